"""Bisection for each seed, on runs whose limit is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.advise.lab import Run
from kvsim.advise.search import TOLERANCE, Scale, search


class FakeLab:
    """Seeds meet the SLO up to (or from) a value that is known."""

    def __init__(self, limits: dict[int, float], better: int) -> None:
        self.limits = limits
        self.better = better
        self.seeds = tuple(limits)
        self.num_runs = 0

    def run(self, pairs: Sequence[tuple[Any, int]]) -> list[Run]:
        self.num_runs += len(pairs)
        return [self._run(values["x"], seed) for values, seed in pairs]

    def _run(self, value: float, seed: int) -> Run:
        meets = value >= self.limits[seed] if self.better > 0 else value <= self.limits[seed]
        summary = {"num_requests": 1, "request_goodput": float(meets), "duration": 1.0}
        return Run(0, "", {"x": value}, seed, summary)


@given(st.lists(st.floats(0.01, 900), min_size=1, max_size=4), st.floats(0.01, 900))
def test_rates_end_just_below_their_limits(limits: list[float], start: float) -> None:
    lab: Any = FakeLab(dict(enumerate(limits)), better=-1)
    found, _ = search(lab, Scale(lambda x: {"x": x}, 0.001, 1000, better=-1), start)
    for seed, limit in enumerate(limits):
        value = found[seed]
        assert value is not None
        assert limit / (1 + TOLERANCE) <= value <= limit
    assert lab.num_runs <= 30 * len(limits)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_blocks_end_just_above_their_limits(limit: int, start: int) -> None:
    lab: Any = FakeLab({0: limit}, better=1)
    found, _ = search(lab, Scale(lambda x: {"x": x}, 1, 5000, better=1, is_whole=True), start)
    value = found[0]
    assert value is not None
    assert limit <= value <= max(limit + 1, limit * (1 + TOLERANCE))
    assert value == int(value)


@pytest.mark.parametrize("better", [-1, 1])
def test_no_value_does(better: int) -> None:
    lab: Any = FakeLab({0: 0.0 if better < 0 else 1e9}, better)
    found, _ = search(lab, Scale(lambda x: {"x": x}, 1, 1000, better), 10)
    assert found == {0: None}


@pytest.mark.parametrize(("better", "hardest"), [(-1, 1000), (1, 1)])
def test_every_value_does(better: int, hardest: float) -> None:
    lab: Any = FakeLab({0: 1e9 if better < 0 else 0.0}, better)
    found, _ = search(lab, Scale(lambda x: {"x": x}, 1, 1000, better), 10)
    assert found == {0: hardest}


def test_a_share_that_is_met_exactly_is_met() -> None:
    """95 of 100 requests are 95 %, whatever digits the rate keeps of them."""
    for tenths in range(1, 400):
        duration = tenths / 7
        summary = {"num_requests": 100, "request_goodput": float(f"{95 / duration:.12g}"), "duration": duration}
        run = Run(1, "", {}, 0, summary)
        assert run.attainment == 0.95
        assert run.meets_slo
