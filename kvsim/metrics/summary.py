"""The summary of a run: every figure derived here, once, from what the recorder kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.metrics.columns import IntArray
from kvsim.metrics.ledger import Parts
from kvsim.metrics.percentiles import FloatArray, describe
from kvsim.metrics.recorder import Recorder
from kvsim.metrics.requests import NEVER, NOT_ARRIVED, STATUS_CODE, EndedRequests
from kvsim.request import Status
from kvsim.types import NS_PER_MS, NS_PER_S

ENDED = (Status.FINISHED, Status.REJECTED, Status.ABORTED)
UNFINISHED = (Status.RUNNING, Status.WAITING, Status.SWAPPED)

SIGNIFICANT_DIGITS = 12
"""Figures are rounded to this many digits, so that the last bits of a sum do not depend on a library's version."""


@dataclass(frozen=True, slots=True)
class Goals:
    """Service-level objectives per request, in ns; None where there is no goal."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    e2el_ns: int | None = None

    @property
    def any(self) -> bool:
        return not (self.ttft_ns is None and self.tpot_ns is None and self.e2el_ns is None)


def summarise(
    recorder: Recorder,
    *,
    end_ns: int,
    num_requests: int,
    goals: Goals,
    facts: Mapping[str, Any],
    table_entry_bytes: int = 4,
) -> dict[str, Any]:
    """All figures of a run that ended at `end_ns`, as a JSON-ready dict.

    `facts` (name, engine, seed, versions, geometry) go first as they are. `table_entry_bytes` is the size of a
    block-table entry.
    """
    requests = RequestColumns(recorder.ended)
    summary: dict[str, Any] = dict(facts)
    summary |= _counts(recorder, num_requests)
    summary |= _throughput(requests, recorder, goals, end_ns)
    summary |= _latencies(requests, recorder)
    summary |= _counters(recorder, table_entry_bytes)
    summary |= _memory(recorder)
    by_priority = _per_priority(requests, goals)
    if by_priority:
        summary["by_priority"] = by_priority
    rounded: dict[str, Any] = _rounded(summary)
    return rounded


class RequestColumns:
    """Per-request arrays of the requests that ended; latencies are those of the completed ones."""

    def __init__(self, ended: EndedRequests) -> None:
        self._table = ended.table
        status = ended.table.column("status")
        self.completed = status == STATUS_CODE[Status.FINISHED]
        self.arrived = status != STATUS_CODE[NOT_ARRIVED]

    def __getitem__(self, name: str) -> IntArray:
        return self._table.column(name)

    def of_completed(self, name: str) -> IntArray:
        values: IntArray = self[name][self.completed]
        return values

    def ttft_ns(self) -> IntArray:
        """Arrival to first token, of the completed requests."""
        return self.of_completed("first_token_ns") - self.of_completed("arrival_ns")

    def e2el_ns(self) -> IntArray:
        return self.of_completed("finish_ns") - self.of_completed("arrival_ns")

    def tpot_ns(self) -> FloatArray:
        """Mean gap after the first token; NaN for one-token outputs, which have none."""
        num_gaps = self.of_completed("longest_output") - 1
        decode_ns = self.of_completed("finish_ns") - self.of_completed("first_token_ns")
        return np.where(num_gaps > 0, decode_ns / np.maximum(num_gaps, 1), np.nan)

    def meets(self, goals: Goals) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which completed requests meet every goal; a one-token output cannot miss a TPOT goal."""
        good = np.ones(int(self.completed.sum()), dtype=bool)
        if goals.ttft_ns is not None:
            good &= self.ttft_ns() <= goals.ttft_ns
        if goals.tpot_ns is not None:
            tpot = self.tpot_ns()
            good &= np.isnan(tpot) | (tpot <= goals.tpot_ns)
        if goals.e2el_ns is not None:
            good &= self.e2el_ns() <= goals.e2el_ns
        return good


def _counts(recorder: Recorder, num_requests: int) -> dict[str, Any]:
    count = recorder.ended.count
    unfinished = {status: count.get(status, 0) for status in UNFINISHED}
    return {
        "num_requests": num_requests,
        "completed": count.get(Status.FINISHED, 0),
        "num_rejected": count.get(Status.REJECTED, 0),
        "num_aborted": count.get(Status.ABORTED, 0),
        "num_unfinished": num_requests - sum(count.get(status, 0) for status in ENDED),
        "num_running_at_end": unfinished[Status.RUNNING],
        "num_waiting_at_end": unfinished[Status.WAITING],
        "num_swapped_at_end": unfinished[Status.SWAPPED],
        "num_not_arrived": num_requests - sum(count.get(status, 0) for status in (*ENDED, *UNFINISHED)),
    }


def _throughput(requests: RequestColumns, recorder: Recorder, goals: Goals, end_ns: int) -> dict[str, Any]:
    arrivals = requests["arrival_ns"][requests.arrived]
    is_cut = any(recorder.ended.count.get(status, 0) for status in (*UNFINISHED, NOT_ARRIVED))
    last_ns = end_ns if is_cut else recorder.totals.last_token_ns
    duration_s = max(0, last_ns - int(arrivals.min())) / NS_PER_S if len(arrivals) and last_ns != NEVER else 0.0
    completed = int(requests.completed.sum())
    prompt_tokens = int(requests.of_completed("prompt_tokens").sum())
    num_tokens = recorder.totals.num_emitted_tokens
    return {
        "duration": duration_s,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": num_tokens,
        "request_throughput": _rate(completed, duration_s),
        "output_throughput": _rate(num_tokens, duration_s),
        "total_token_throughput": _rate(num_tokens + prompt_tokens, duration_s),
        "request_goodput": _rate(int(requests.meets(goals).sum()), duration_s) if goals.any else None,
    }


def _rate(amount: int, duration_s: float) -> float | None:
    return amount / duration_s if duration_s > 0 else None


def _latencies(requests: RequestColumns, recorder: Recorder) -> dict[str, Any]:
    gaps = recorder.gaps.table
    # One sample at a time: a million requests are to fit beside nothing but their columns.
    samples: dict[str, Callable[[], tuple[FloatArray, IntArray | None]]] = {
        "ttft": lambda: (requests.ttft_ns().astype(np.float64), None),
        "tpot": lambda: (_without_nan(requests.tpot_ns()), None),
        "itl": lambda: (gaps.column("gap_ns").astype(np.float64), gaps.column("count")),
        "e2el": lambda: (requests.e2el_ns().astype(np.float64), None),
    }
    result: dict[str, Any] = {}
    for name, sample in samples.items():
        values_ns, counts = sample()
        for statistic, value in describe(values_ns, counts).items():
            result[f"{statistic}_{name}_ms"] = None if value is None else value / NS_PER_MS
        result[f"num_{name}"] = len(values_ns) if counts is None else int(counts.sum())
        del values_ns, counts
    return result


def _without_nan(values: FloatArray) -> FloatArray:
    kept: FloatArray = values[~np.isnan(values)]
    return kept


def _counters(recorder: Recorder, entry_bytes: int) -> dict[str, Any]:
    totals = recorder.totals
    return {
        "num_preemptions": totals.num_preemptions,
        "num_recomputed_tokens": totals.num_recomputed_tokens,
        "num_cow_copies": totals.num_cow_copies,
        "num_swapped_out_blocks": totals.num_swapped_out_blocks,
        "num_swapped_in_blocks": totals.num_swapped_in_blocks,
        "num_evicted_blocks": totals.num_evicted_blocks,
        "prefix_cache_queries": totals.prefix_cache_queries,
        "prefix_cache_hits": totals.prefix_cache_hits,
        "block_table_updates": totals.block_table_updates,
        "block_table_upload_bytes": totals.block_table_updates * entry_bytes,
        "block_table_peak_bytes": totals.peak_table_entries * entry_bytes,
        "num_steps": totals.num_steps,
    }


def _memory(recorder: Recorder) -> dict[str, Any]:
    sums, allocator = recorder.integrals, recorder.scheduler.allocator
    time = sums.elapsed_ns
    return {
        "kv": _shares(sums.parts, time, recorder.capacity),
        "kv_saturated": _shares(sums.saturated_parts, sums.saturated_ns, recorder.capacity),
        "saturated_share": sums.saturated_ns / time if time else None,
        "block_utilization": sums.parts[0] / sums.allocated_slots if sums.allocated_slots else None,
        "block_utilization_theory": _utilization_theory(recorder),
        "sharing_saving": 1 - sums.used_blocks / sums.logical_blocks if sums.logical_blocks else None,
        "num_gpu_blocks": allocator.num_blocks,
        "running_mean": sums.running / time if time else None,
        "running_peak": recorder.totals.running_peak,
        "sequences_mean": sums.sequences / time if time else None,
        "waiting_mean": sums.waiting / time if time else None,
    }


def _utilization_theory(recorder: Recorder) -> float | None:
    """1 - B / (2 x time-weighted mean current length): half a block is lost per running sequence."""
    sums = recorder.integrals
    if not sums.sequences or not sums.stored_tokens:
        return None
    mean_length = sums.stored_tokens / sums.sequences
    return 1 - recorder.scheduler.allocator.block_size / (2 * mean_length)


def _shares(parts: list[int], time_ns: int, capacity: int) -> dict[str, float | None]:
    if not time_ns or not capacity:
        return dict.fromkeys(Parts._fields)
    return {name: part / (time_ns * capacity) for name, part in zip(Parts._fields, parts, strict=True)}


def _per_priority(requests: RequestColumns, goals: Goals) -> dict[str, Any]:
    """Latency and goodput of each priority; empty if there is only one."""
    priorities = requests.of_completed("priority")
    levels = np.unique(priorities)
    if len(levels) < 2:
        return {}
    ttft, tpot, good = requests.ttft_ns(), requests.tpot_ns(), requests.meets(goals)
    result: dict[str, Any] = {}
    for level in levels:
        mine = priorities == level
        gaps = tpot[mine & ~np.isnan(tpot)]
        result[str(int(level))] = {
            "completed": int(mine.sum()),
            "mean_ttft_ms": float(ttft[mine].mean()) / NS_PER_MS,
            "mean_tpot_ms": float(gaps.mean()) / NS_PER_MS if len(gaps) else None,
            "share_meeting_slo": float(good[mine].mean()) if goals.any else None,
        }
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
