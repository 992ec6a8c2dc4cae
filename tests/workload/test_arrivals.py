"""Arrival processes and the named random streams under them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.types import NS_PER_S, ScenarioError
from kvsim.workload.arrivals import draw_arrivals
from kvsim.workload.spec import ArrivalsSpec
from kvsim.workload.streams import mix, mix_range, stream, streams


def draw(num: int = 50_000, seed: int = 1, **keys: object) -> np.ndarray:
    return draw_arrivals(ArrivalsSpec(**keys), stream(seed, "arrivals"), num)  # type: ignore[arg-type]


def rate_and_cv(arrivals: np.ndarray) -> tuple[float, float]:
    gaps = np.diff(arrivals)
    return NS_PER_S / gaps.mean(), gaps.std() / gaps.mean()


def test_poisson() -> None:
    assert rate_and_cv(draw(request_rate=4.0)) == pytest.approx((4.0, 1.0), rel=0.02)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    arrivals = draw(type="gamma", request_rate=10.0, burstiness=burstiness)
    assert rate_and_cv(arrivals) == pytest.approx((10.0, burstiness**-0.5), rel=0.03)


def test_gamma_of_shape_one_is_poisson() -> None:
    assert (draw(type="gamma", request_rate=3.0) == draw(request_rate=3.0)).all()


def test_constant_batch_and_infinite_rate() -> None:
    assert draw(4, type="constant", request_rate=4.0).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]
    assert draw(3, request_rate=float("inf")).tolist() == [0, 0, 0]
    assert draw(3, type="batch").tolist() == [0, 0, 0]
    assert draw(5, type="batch", batch_size=2, interval=1.5).tolist() == [0, 0, 15 * 10**8, 15 * 10**8, 3 * 10**9]
    assert draw(4, type="batch", batch_size=2, request_rate=4.0).tolist() == [0, 0, 500_000_000, 500_000_000]
    assert draw(4, type="batch", batch_size=2, interval=0).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("interval", "times"), [({}, [0, 0, 0, 0]), ({"interval": 0}, [0] * 4), ({"interval": 2}, [0, 0, 2, 2])]
)
def test_groups_without_an_interval_come_at_once(interval: dict[str, int], times: list[int]) -> None:
    """As the scenario's page says: the interval is 0 by default."""
    arrivals = {"type": "batch", "batch_size": 2} | interval
    workload = {"num_requests": 4, "arrivals": arrivals, "lengths": {"type": "fixed", "prompt": 2, "output": 2}}
    result = kvsim.run({"workload": workload})
    assert list(result.requests["arrival_s"]) == times
    idle = "workload.arrivals.batch_size: is not used: without an interval all groups come at once"
    assert sum(idle in warning for warning in result.summary["warnings"]) == (times[-1] == 0)


@given(
    kind=st.sampled_from(["poisson", "gamma", "constant", "batch"]),
    short=st.integers(0, 40),
    more=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_longer_runs_begin_like_shorter_ones(kind: str, short: int, more: int, seed: int) -> None:
    keys = {"type": kind, "burstiness": 0.5, "batch_size": 3, "request_rate": 7.0}
    many = draw(short + more, seed, **keys)
    assert (draw(short, seed, **keys) == many[:short]).all()
    assert (np.diff(many) >= 0).all()
    assert many.dtype == np.int64


@pytest.mark.parametrize(
    "keys",
    [
        {"request_rate": 0},
        {"request_rate": -1},
        {"request_rate": float("nan")},
        {"request_rate": 1e-300},
        {"type": "gamma", "burstiness": 0},
        {"type": "batch", "batch_size": 0},
        {"type": "trace"},
        {"type": "uniform"},
        {"type": "batch", "batch_size": 1, "interval": -1},
    ],
)
def test_nonsense_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ScenarioError, match=r"workload\.arrivals"):
        draw(10, **keys)


def test_streams_are_told_apart_by_name_alone() -> None:
    first = streams(7)
    first["lengths"].random(1000)
    assert first["arrivals"].random() == stream(7, "arrivals").random()
    assert first["arrivals"] is first["arrivals"]
    assert stream(7, "arrivals").random() != stream(7, "lengths").random()
    assert stream(7, "arrivals").random() != stream(8, "arrivals").random()


def test_mix_scatters() -> None:
    values = {mix(seed, index) for seed in range(50) for index in range(50)}
    assert len(values) == 2500
    assert mix(1, 2) != mix(2, 1)
    assert all(0 <= value < 2**64 for value in values)


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 20))
def test_mix_range_is_mix_of_each(value: int, start: int, num: int) -> None:
    assert mix_range(value, start, start + num) == [mix(value, start + index) for index in range(num)]


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ({"arrivals": {"type": "constant", "request_rate": 1e-10}}, r"9e\+09 s is the most: raise request_rate"),
        ({"arrivals": {"type": "batch", "batch_size": 1, "interval": 1e9}}, r"9e\+09 s is the most: shorten interval"),
        ({"sessions": {"num_turns": 2, "think_time": 1e9}}, r"think_time: is 1000000000\.0; must be at most 1e\+08"),
        ({"abort": {"probability": 1, "after": 1e9}}, r"abort\.after: is 1000000000\.0; must be at most 1e\+08"),
    ],
)
def test_times_that_the_clock_does_not_hold_are_refused_with_the_cure(
    workload: dict[str, object], expected: str
) -> None:
    with pytest.raises(ScenarioError, match=expected):
        kvsim.run({"workload": {"num_requests": 20, **workload}})
