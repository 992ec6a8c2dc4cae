"""Figures over seeds: means with intervals, paired ratios, and what a run with another seed may be expected to give."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from kvsim.metrics.intervals import CONFIDENCE, interval_factor, student_quantile

NEXT_RUN_CONFIDENCE = 0.9
"""One-sided: how sure a recommendation is to hold in a run with another seed."""
MATERIAL = 0.05
"""Relative differences below this are none that anybody would act on."""
MAX_SEEDS = 1000
"""More are not advised: what needs them is too small to matter."""


class Estimate(NamedTuple):
    """A mean over seeds and half of its 95 % interval (Student's t; infinite for one seed)."""

    mean: float
    half_width: float
    num_values: int = 0

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed. Raises ValueError without any."""
    mean, deviation = _moments(values)
    if len(values) < 2:
        return Estimate(mean, math.inf, len(values))
    width = interval_factor(len(values)) * deviation / math.sqrt(len(values))
    return Estimate(mean, width, len(values))


def ratio(values: Sequence[float], others: Sequence[float]) -> Estimate | None:
    """`values` over `others`, seed by seed, as a relative difference: 0.1 is 10 % more. None where one is not above 0.

    The same seed is the same workload, so what the workloads have apart cancels.
    """
    if not values or len(values) != len(others) or not all(value > 0 for value in (*values, *others)):
        return None
    return estimate([value / other - 1 for value, other in zip(values, others, strict=True)])


def is_surely_above(values: Sequence[float], others: Sequence[float], margin: float = 0.0) -> bool:
    """Whether `values` exceed `others` by more than the relative margin, beyond doubt.

    Either the interval says so, or every seed does, where there are enough of them for a sign test; the latter is for
    differences that vary widely but all point one way. A value above nothing is above.
    """
    difference = ratio(values, others)
    if difference is None:
        return math.fsum(values) > math.fsum(others)
    all_agree = all(value > (1 + margin) * other for value, other in zip(values, others, strict=True))
    return difference.low > margin or (all_agree and 0.5 ** (len(values) - 1) <= 1 - CONFIDENCE)


def is_unclear(difference: Estimate | None, margin: float = 0.0) -> bool:
    """Whether an interval of a relative difference holds both no effect (`margin`) and one that would matter."""
    if difference is None:
        return False
    low, high = difference.low - margin, difference.high - margin
    return low <= 0 <= high and max(-low, high) > MATERIAL


def seeds_needed(value: Estimate, margin: float = 0.0) -> int | None:
    """Seeds with which the interval would no longer hold `margin`, if mean and spread stay; None: over `MAX_SEEDS`."""
    distance, num = abs(value.mean - margin), value.num_values
    if distance == 0 or num < 2 or not math.isfinite(value.half_width):
        return None
    deviation = value.half_width * math.sqrt(num) / interval_factor(num)
    enough = range(num, MAX_SEEDS + 1)
    # Intervals only become narrower with more seeds.
    index = bisect_left(enough, True, key=lambda more: interval_factor(more) * deviation < distance * math.sqrt(more))
    return enough[index] if index < len(enough) else None


def next_run_at_least(values: Sequence[float]) -> float:
    """What a run with another seed will reach or exceed, with `NEXT_RUN_CONFIDENCE`, if values are normal."""
    mean, deviation = _moments(values)
    return mean - _next_run_width(values, deviation)


def next_run_at_most(values: Sequence[float]) -> float:
    """What a run with another seed will not exceed."""
    mean, deviation = _moments(values)
    return mean + _next_run_width(values, deviation)


def _next_run_width(values: Sequence[float], deviation: float) -> float:
    if len(values) < 2:
        return 0.0
    return student_quantile(NEXT_RUN_CONFIDENCE, len(values)) * deviation * math.sqrt(1 + 1 / len(values))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        raise ValueError("an estimate needs at least one value")
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
