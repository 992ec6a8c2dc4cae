"""Means and linear percentiles of plain and of weighted samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

LEVELS = (50, 90, 95, 99)
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


def weighted_percentiles(values: FloatArray, counts: NDArray[np.int64], levels: Sequence[float]) -> list[float]:
    """Linear percentiles (numpy's default) of the multiset in which `values[i]` occurs `counts[i]` times.

    `levels` are in 0..100. The multiset must not be empty.
    """
    order = np.argsort(values, kind="stable")
    ordered, ends = values[order], counts[order]
    del order
    np.cumsum(ends, out=ends)
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
    if counts is None:
        return _describe_plain(values)
    total = int(counts.sum())
    if total == 0:
        return dict.fromkeys(STATISTICS)
    mean = float(values @ counts) / total
    variance = float(((values - mean) ** 2) @ counts) / total
    return _named(mean, variance**0.5, weighted_percentiles(values, counts, LEVELS))


def _describe_plain(values: FloatArray) -> dict[str, float | None]:
    """The same for a sample in which each value counts once, in little memory."""
    if not len(values):
        return dict.fromkeys(STATISTICS)
    return _named(float(values.mean()), float(values.std()), np.percentile(values, LEVELS).tolist())


def _named(mean: float, std: float, percentiles: Sequence[float]) -> dict[str, float | None]:
    median, p90, p95, p99 = percentiles
    return {"mean": mean, "median": median, "std": std, "p90": p90, "p95": p95, "p99": p99}
