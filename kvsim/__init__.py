"""kvsim: a wind tunnel for KV-cache allocators.

    import kvsim
    result = kvsim.run("scenarios/quickstart.yaml", **{"allocator.block_size": 32})
    result.summary, result.steps, result.requests, result.plot.memory()
    kvsim.compare("scenarios/quickstart.yaml", ["paged", "orca-max"]).table
    kvsim.sweep("scenarios/quickstart.yaml", {"allocator.block_size": [8, 16, 32]}).table

What is behind these names is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvsim.report import plots
    from kvsim.result import CompareResult, RunResult
    from kvsim.runs import Options, compare, run
    from kvsim.sweeps import SweepResult, sweep

_HOMES = {
    "run": "kvsim.runs",
    "compare": "kvsim.runs",
    "Options": "kvsim.runs",
    "sweep": "kvsim.sweeps",
    "SweepResult": "kvsim.sweeps",
    "RunResult": "kvsim.result",
    "CompareResult": "kvsim.result",
}

__all__ = ["CompareResult", "Options", "RunResult", "SweepResult", "__version__", "compare", "plots", "run", "sweep"]


def __getattr__(name: str) -> Any:
    if name == "plots":
        return import_module("kvsim.report.plots")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
