"""Intervals, paired ratios and bounds for the next run, against worked-out values."""

from __future__ import annotations

import math

import pytest

from kvsim.advise.estimate import estimate, is_surely_above, next_run_at_least, next_run_at_most, ratio


def test_interval_of_three_values() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert (found.low, found.high) == (found.mean - found.half_width, found.mean + found.half_width)


def test_one_value_has_no_interval() -> None:
    assert estimate([5.0]).half_width == math.inf
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_ratios_are_taken_seed_by_seed() -> None:
    found = ratio([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.half_width == pytest.approx(0.0, abs=1e-12)
    assert ratio([1.0, 0.0], [1.0, 1.0]) is None
    assert ratio([], []) is None


def test_bounds_of_the_next_run() -> None:
    # t(0.9, 2) = 1.88562, s = 1, sqrt(1 + 1/3) = 1.15470
    assert next_run_at_least([1.0, 2.0, 3.0]) == pytest.approx(2 - 1.8856180831641267 * math.sqrt(4 / 3))
    assert next_run_at_most([1.0, 2.0, 3.0]) == pytest.approx(2 + 1.8856180831641267 * math.sqrt(4 / 3))
    assert next_run_at_least([7.0]) == 7.0


def test_above_beyond_doubt() -> None:
    assert is_surely_above([11.0, 11.1, 11.2], [10.0, 10.0, 10.0])
    assert not is_surely_above([11.0, 11.1, 11.2], [10.0, 10.0, 10.0], margin=0.2)
    assert not is_surely_above([11.0, 9.0, 10.0], [10.0, 10.0, 10.0])
    assert not is_surely_above([10.0] * 3, [10.0] * 3)


def test_differences_that_vary_but_agree_need_enough_seeds() -> None:
    wild = [10.1, 10.2, 10.1, 10.3, 10.1, 20.0]
    assert is_surely_above(wild, [10.0] * 6)
    assert not is_surely_above(wild[-4:], [10.0] * 4)


def test_above_nothing_is_above() -> None:
    assert is_surely_above([1.0, 1.0], [0.0, 0.0])
    assert not is_surely_above([0.0, 0.0], [0.0, 0.0])
