"""Means and linear percentiles of plain and of weighted samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def weighted_percentiles(values: FloatArray, counts: NDArray[np.int64], levels: Sequence[float]) -> list[float]:
    """Linear percentiles (numpy's default) of the multiset in which `values[i]` occurs `counts[i]` times.

    `levels` are in 0..100. The multiset must not be empty.
    """
    order = np.argsort(values, kind="stable")
    ordered, ends = values[order], np.cumsum(counts[order])
    last = int(ends[-1]) - 1
    result = []
    for level in levels:
        position = level / 100 * last
        below = int(position)
        low = ordered[np.searchsorted(ends, below, side="right")]
        high = ordered[np.searchsorted(ends, min(below + 1, last), side="right")]
        result.append(float(low + (high - low) * (position - below)))
    return result


def describe(values: FloatArray, counts: NDArray[np.int64] | None = None) -> dict[str, float | None]:
    """mean, median, std, p90, p95 and p99 of a (weighted) sample; all None for an empty one.

    One set serves them all. The standard deviation is that of the population.
    """
    weights = np.ones(len(values), dtype=np.int64) if counts is None else counts
    total = int(weights.sum())
    if total == 0:
        return dict.fromkeys(("mean", "median", "std", "p90", "p95", "p99"))
    mean = float(values @ weights) / total
    variance = float(((values - mean) ** 2) @ weights) / total
    median, p90, p95, p99 = weighted_percentiles(values, weights, (50, 90, 95, 99))
    return {"mean": mean, "median": median, "std": variance**0.5, "p90": p90, "p95": p95, "p99": p99}
