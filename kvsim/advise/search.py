"""The value at which runs stop meeting their SLO, for each seed on its own, by doubling and bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvsim.advise.lab import Lab, Run, Values

TOLERANCE = 0.02
"""Bisection ends when the two sides are this close."""


@dataclass
class _Bracket:
    """Between the value that is known to do and the one that is known not to."""

    good: float | None = None
    bad: float | None = None


@dataclass(frozen=True)
class Scale:
    """A value to search: what it changes, and where it may lie.

    `better` is the direction in which runs get easier: -1 for a request rate, 1 for the size of a cache.
    """

    values_of: Callable[[float], Values]
    low: float
    high: float
    better: int
    is_whole: bool = False

    @property
    def easiest(self) -> float:
        return self.high if self.better > 0 else self.low

    @property
    def hardest(self) -> float:
        return self.low if self.better > 0 else self.high


def search(lab: Lab, scale: Scale, start: float) -> tuple[dict[int, float | None], list[Run]]:
    """For each seed the hardest value that still meets the SLO (None: none does), and every run that was made."""
    brackets = {seed: _Bracket() for seed in lab.seeds}
    made: list[Run] = []
    begin = min(max(start, scale.low), scale.high)
    while probes := [(seed, value) for seed in lab.seeds if (value := _next(brackets[seed], scale, begin)) is not None]:
        runs = lab.run([(scale.values_of(value), seed) for seed, value in probes])
        made += runs
        for (seed, value), run in zip(probes, runs, strict=True):
            if run.meets_slo:
                brackets[seed].good = value
            else:
                brackets[seed].bad = value
    return {seed: bracket.good for seed, bracket in brackets.items()}, made


def _next(bracket: _Bracket, scale: Scale, begin: float) -> float | None:
    good, bad = bracket.good, bracket.bad
    if good is None and bad is None:
        return begin
    if good is None:
        assert bad is not None
        return None if bad == scale.easiest else _step(bad, scale, scale.better)
    if bad is None:
        return None if good == scale.hardest else _step(good, scale, -scale.better)
    low, high = sorted((good, bad))
    middle = math.sqrt(low * high)
    if scale.is_whole:
        middle = round(middle)
        if not low < middle < high:
            return None
    return None if high / low < 1 + TOLERANCE else middle


def _step(value: float, scale: Scale, direction: int) -> float:
    value = value * 2 if direction > 0 else value / 2
    if scale.is_whole:
        value = math.floor(value)
    return min(max(value, scale.low), scale.high)
