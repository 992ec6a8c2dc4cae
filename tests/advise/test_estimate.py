"""Intervals, paired ratios and bounds for the next run, against worked-out values."""

from __future__ import annotations

import math

import pytest

from kvsim.advise.answer import effect, more_seeds
from kvsim.advise.estimate import (
    Estimate,
    estimate,
    is_surely_above,
    is_unclear,
    next_run_at_least,
    next_run_at_most,
    ratio,
    seeds_needed,
)


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


@pytest.mark.parametrize(
    ("mean", "half_width", "margin", "unclear"),
    [
        (0.588, 4.39, 0.0, True),
        (0.03, 0.04, 0.0, True),
        (0.001, 0.002, 0.0, False),  # no effect, and surely none that matters
        (0.5, 0.4, 0.0, False),
        (0.5, 0.4, 0.2, True),
        (-0.5, 0.4, 0.0, False),
        (-0.3, 0.4, 0.0, True),
        (0.0, math.inf, 0.0, True),
    ],
)
def test_an_interval_that_holds_no_effect_is_unclear(
    mean: float, half_width: float, margin: float, unclear: bool
) -> None:
    assert is_unclear(Estimate(mean, half_width, 2), margin) is unclear
    assert not is_unclear(None)


@pytest.mark.parametrize("values", [[0.2, 1.0], [0.1, 0.2, 0.9, -0.3], [-3.0, 1.0, -2.5]])
def test_with_the_seeds_asked_for_the_interval_is_clear(values: list[float]) -> None:
    """The same mean and spread over so many seeds: one fewer would not do."""
    found = estimate(values)
    needed = seeds_needed(found)
    assert needed is not None
    deviation = math.sqrt(sum((value - found.mean) ** 2 for value in values) / (len(values) - 1))

    def half_width(num: int) -> float:
        # Of values alternating around the mean, scaled to have that deviation.
        sample = [found.mean + (-1) ** index for index in range(num)]
        return estimate(sample).half_width * deviation / _deviation(sample)

    assert half_width(needed) < abs(found.mean)
    assert needed == len(values) or half_width(needed - 1) >= abs(found.mean)
    assert more_seeds(found) == f"cannot tell with {len(values)} seeds; --seeds {needed} might"


def _deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def test_what_is_too_small_is_not_worth_more_seeds() -> None:
    assert seeds_needed(estimate([1.0, -0.99])) is None
    assert seeds_needed(estimate([1.0, -1.0])) is None
    assert seeds_needed(estimate([1.0])) is None
    assert more_seeds(estimate([1.0, -1.0])) == "cannot tell with 2 seeds; nor would 1,000"


def test_an_effect_is_claimed_only_where_there_is_one() -> None:
    assert effect(estimate([0.5, 0.51])) == "+50.5 ± 6.4 %"
    assert effect(estimate([0.24, 0.936])).startswith("+58.8 ± 442.2 % (cannot tell with 2 seeds; --seeds ")
    assert effect(None) == "–"
