"""Replays of recorded engine traces: where do we depart from the real engine, and at which step.

No engine rule lives here. A replay feeds a recorded case to the schedulers and allocators that `run` uses and
compares what they decide with what the real engine decided, field by field.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvsim.conform import block_manager, v0, v1
from kvsim.conform.cases import Case, CaseError, find_cases, load_case
from kvsim.conform.report import ConformReport, as_json, as_text
from kvsim.conform.result import CaseResult, Mismatch
from kvsim.types import KvsimError, LawViolation, ScenarioError

__all__ = ["CaseError", "CaseResult", "ConformReport", "Mismatch", "as_json", "as_text", "conform", "replay"]


def conform(paths: Iterable[str | Path], *, engine_loop: str = "calendar") -> ConformReport:
    """Replay every case among files and folders. Raises CaseError for a path or a file that cannot be used."""
    cases = [load_case(path) for path in find_cases(paths)]
    return ConformReport(tuple((case, replay(case, engine_loop=engine_loop)) for case in cases))


def replay(case: Case, *, engine_loop: str = "calendar") -> CaseResult:
    """Replay one case through the classes that its format asks for.

    An error that the engine raises is a disagreement. Raises CaseError if the case contradicts itself.
    """
    try:
        match case.kind:
            case "bm":
                return block_manager.replay(case.data)
            case "sched":
                return v0.replay(case.data, engine_loop=engine_loop)
            case "v1":
                return v1.replay(case.data, engine_loop=engine_loop)
    except (CaseError, ScenarioError) as error:
        raise CaseError(f"{case.path}: {error}") from None
    except (KvsimError, LawViolation) as error:
        name = str(case.data["name" if case.kind == "v1" else "id"])
        return CaseResult(name, 0, Mismatch(-1, "error", None, f"{type(error).__name__}: {error}"))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        StopIteration,
    ) as error:
        raise CaseError(f"{case.path}: cannot be replayed: {type(error).__name__}: {error}") from error
