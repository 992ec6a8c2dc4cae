"""`result.plot`: the pictures of one run, each a matplotlib Figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvsim.result import RunResult


class Plots:
    """Pictures of a run, drawn when asked for."""

    def __init__(self, result: RunResult) -> None:
        self._result = result

    def memory(self, **keywords: Any) -> Figure:
        """KV memory over time: the six parts of the ledger, stacked."""
        return plots.memory(self._result.steps, **keywords)

    def running_waiting(self, **keywords: Any) -> Figure:
        """Requests running and waiting over time."""
        return plots.running_waiting(self._result.steps, **keywords)

    def utilization(self, **keywords: Any) -> Figure:
        """Filled share of the allocated blocks over time, against its theory."""
        summary = self._result.summary
        return plots.utilization(self._result.steps, summary["block_size"], summary, **keywords)

    def latency(self, **keywords: Any) -> Figure:
        """Distributions of TTFT, TPOT and end-to-end latency, with their percentiles."""
        return plots.latency(self._result.requests, self._result.summary, **keywords)
