"""The figures by which a predicted and a measured run are compared."""

from __future__ import annotations

import math

import numpy as np

from kvsim.validate_run.recorded import RecordedRun

METRICS = (
    "makespan_s",
    "output_throughput",
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
)


def metrics_of(queued: np.ndarray, first: np.ndarray, last: np.ndarray, output_len: np.ndarray) -> dict[str, float]:
    """The `METRICS` of requests, from their times in seconds and output tokens; NaN where there is no such figure."""
    makespan = float(last.max() - queued.min())
    ttft = 1e3 * (first - queued)
    several = output_len > 1
    tpot = 1e3 * (last - first)[several] / (output_len[several] - 1)
    return {
        "makespan_s": makespan,
        "output_throughput": float(output_len.sum()) / makespan,
        "mean_ttft_ms": float(ttft.mean()),
        "p50_ttft_ms": float(np.percentile(ttft, 50)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "mean_tpot_ms": float(tpot.mean()) if len(tpot) else math.nan,
        "p99_tpot_ms": float(np.percentile(tpot, 99)) if len(tpot) else math.nan,
        "mean_e2el_ms": float(1e3 * (last - queued).mean()),
    }


def measured_metrics(run: RecordedRun) -> dict[str, float]:
    """The comparison's metrics of the run itself."""
    columns = [
        np.array([getattr(request, name) for request in run.requests], dtype=float)
        for name in ("queued_s", "first_token_s", "last_token_s", "output_len")
    ]
    return metrics_of(*columns)
