"""The beam model: a pure function of its arguments, and what its parameter does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.workload.beam import beam_policy, children, parents

THETAS = st.sampled_from([0.0, 0.1, 1.0, 5.0, 700.0, float("inf")])


@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 5000),
    beams=st.integers(1, 9),
    width=st.integers(1, 9),
    theta=THETAS,
)
def test_survivors_are_as_many_as_the_width(seed: int, step: int, beams: int, width: int, theta: float) -> None:
    counts = children(seed, step, beams, width, theta)
    assert len(counts) == beams
    assert sum(counts) == width
    assert min(counts) >= 0
    assert counts == beam_policy(theta)(seed, step, beams, width)


@given(seed=st.integers(0, 2**63 - 1), step=st.integers(0, 5000), width=st.integers(1, 9), theta=THETAS)
def test_parents_are_the_children_listed(seed: int, step: int, width: int, theta: float) -> None:
    chosen = parents(seed, step, width, theta)
    assert list(chosen) == sorted(chosen)
    assert [Counter(chosen)[beam] for beam in range(width)] == children(seed, step, width, width, theta)


def test_theta_zero_keeps_every_beam_and_infinity_keeps_one() -> None:
    for step in range(100):
        assert parents(3, step, 6, 0.0) == (0, 1, 2, 3, 4, 5)
        assert len(set(parents(3, step, 6, float("inf")))) == 1


def steps_since_common_ancestor(theta: float, width: int = 4, num_steps: int = 4000) -> float:
    """Mean age of the youngest common ancestor of two neighbouring survivors, looked at every 50 steps."""
    ancestry = [parents(11, step, width, theta) for step in range(num_steps)]
    ages = []
    for last in range(num_steps - 1, 1000, -50):
        one, other, age = 0, width - 1, 0
        while one != other and age < 1000:
            one, other = ancestry[last - age][one], ancestry[last - age][other]
            age += 1
        ages.append(age)
    return sum(ages) / len(ages)


def test_a_larger_theta_makes_younger_ancestors() -> None:
    ages = [steps_since_common_ancestor(theta) for theta in (0.1, 0.5, 1.0, 3.0)]
    assert ages == sorted(ages, reverse=True)
    assert ages[-1] < 3 < ages[0]


def test_no_beam_is_favoured() -> None:
    counts = Counter(beam for step in range(3000) for beam in parents(5, step, 4, 1.0))
    assert [counts[beam] for beam in range(4)] == pytest.approx([3000] * 4, rel=0.08)
