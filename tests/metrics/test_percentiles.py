"""K64: linear percentiles; one set for the mean and the percentiles; empty sets are None."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.metrics.percentiles import describe, weighted_percentiles


def test_k64_four_values_in_any_order():
    values = np.array([40.0, 10.0, 30.0, 20.0])
    counts = np.ones(4, dtype=np.int64)
    assert weighted_percentiles(values, counts, (50, 90, 95, 99)) == pytest.approx([25, 37, 38.5, 39.7])
    assert describe(values)["mean"] == 25


def test_k64_one_value_is_every_percentile():
    assert set(describe(np.array([7.0])).values()) == {7.0, 0.0}
    assert describe(np.array([7.0]))["std"] == 0


def test_k64_no_values_are_none():
    assert set(describe(np.array([])).values()) == {None}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1).filter(
        lambda pairs: sum(n for _, n in pairs)
    ),
    st.floats(0, 100),
)
def test_weighted_percentiles_equal_those_of_the_expanded_sample(pairs, level):
    values = np.array([float(value) for value, _ in pairs])
    counts = np.array([count for _, count in pairs])
    expanded = np.repeat(values, counts)
    assert weighted_percentiles(values, counts, (level,))[0] == pytest.approx(np.percentile(expanded, level))
    described = describe(values, counts)
    assert described["mean"] == pytest.approx(expanded.mean())
    assert described["std"] == pytest.approx(expanded.std(), abs=1e-9)
