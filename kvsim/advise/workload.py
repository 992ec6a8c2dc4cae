"""How a scenario's request rate is changed, and how much cache would be more than it can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from kvsim.advise.lab import Run, Runs, Values
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.workload import load_trace

AT_ONCE = 1e6
"""Requests per second that stand for "all at once"."""


class RateKnob(NamedTuple):
    """What to change for another request rate; `rate` is the one that is stated, `note` says what was assumed."""

    values_of: Callable[[float], Values]
    unit: str
    rate: float | None = None
    note: str = ""


def rate_knob(base: ResolvedScenario) -> RateKnob | None:
    """None where requests are written out, or come from a class of the user's: their times cannot be scaled."""
    workload: Any = base.scenario.workload
    if not hasattr(workload, "arrivals") or workload.requests is not None:
        return None
    if workload.trace is not None and _has_times(workload):
        return RateKnob(lambda rate: {"workload.rate": rate, "workload.speed": 1.0}, "requests/s", workload.rate)
    unit = "sessions/s" if workload.sessions is not None else "requests/s"
    rate = getattr(workload.arrivals, "request_rate", None)
    if rate is not None and math.isfinite(rate):
        return RateKnob(lambda rate: {"workload.arrivals.request_rate": rate}, unit, rate)
    is_other = workload.arrivals is not None
    note = "the scenario sends its requests in batches; here they arrive one by one (Poisson)" if is_other else ""
    return RateKnob(lambda rate: {"workload.arrivals": {"type": "poisson", "request_rate": rate}}, unit, None, note)


def _has_times(workload: Any) -> bool:
    """Whether the trace has times of its own, which replace `arrivals`."""
    trace = load_trace(
        workload.trace,
        workload.trace_format,
        hash_block_size=workload.hash_block_size,
        on_bad_row=workload.on_bad_row,
        needs_times=False,
    )
    return trace.arrival_ns is not None


def own_rate(knob: RateKnob, runs: Runs) -> float:
    """The scenario's rate, or where none is stated that at which it was served."""
    return knob.rate or min((value for value in runs.values("request_throughput") if value > 0), default=1.0)


def endless_blocks(base: ResolvedScenario, runs: Runs, block_size: int) -> int:
    """More blocks than all requests of the workload can hold together."""
    return max(_most_blocks(run, block_size, _branches(base)) for run in runs.runs)


def _most_blocks(run: Run, block_size: int, branches: int) -> int:
    num_sequences = int(run["num_requests"]) * branches
    tokens = branches * int(run["total_input_tokens"]) + int(run["total_output_tokens"])
    return tokens // block_size + num_sequences + 2


def _branches(base: ResolvedScenario) -> int:
    sampling = getattr(base.scenario.workload, "sampling", None)
    return max(1, getattr(sampling, "n", 1), getattr(sampling, "beam_width", 0))
