"""Figure 15: what sharing saves among the samples and beams of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import lines
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import BEAM_THETA, VLLM, Scenario, lengths_of, poisson, scenario

QUANTITY = "blocks saved (%)"
WIDTHS = (2, 4, 6)
RATES = {"alpaca": 4.0, "sharegpt": 0.5}
"""Low enough that nothing is preempted for long; sharing hardly depends on it."""


def sampled(dataset: str, sampling: Scenario, num_requests: int) -> Scenario:
    """vLLM on a data set whose requests ask for several samples or beams."""
    return scenario(VLLM, lengths_of(dataset), poisson(RATES[dataset]), num_requests, sampling=sampling)


def saving_at(theta: float, dataset: str) -> Scenario:
    """The scenario by which the beam model's parameter was set for a data set: two beams."""
    return sampled(dataset, {"beam_width": 2, "theta": theta}, 400)


def cases(scale: Scale) -> dict[str, Scenario]:
    sizes = {
        ("alpaca", "parallel"): scale.pick(4000, 700),
        ("alpaca", "beam"): scale.pick(3000, 300),
        ("sharegpt", "parallel"): scale.pick(2000, 300),
        ("sharegpt", "beam"): scale.pick(400, 240),
    }
    return {
        f"{dataset} {mode} {width}": sampled(dataset, _sampling(dataset, mode, width), num_requests)
        for (dataset, mode), num_requests in sizes.items()
        for width in WIDTHS
    }


def _sampling(dataset: str, mode: str, width: int) -> Scenario:
    return {"n": width} if mode == "parallel" else {"beam_width": width, "theta": BEAM_THETA[dataset]}


def ours(results: Results) -> list[Ours]:
    rows = []
    for name, summary in results.items():
        series, _, width = name.rpartition(" ")
        rows.append(Ours(series, width, QUANTITY, 100 * summary["sharing_saving"]))
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    lines(picture, rows, QUANTITY, "samples or beams")


FIGURE = Figure(
    name="fig15",
    title="Figure 15: blocks saved by sharing",
    cases=cases,
    ours=ours,
    draw=draw,
    inputs=frozenset({("alpaca beam", "2"), ("sharegpt beam", "2")}),
    text="1 - blocks allocated / blocks without sharing, over time. All samples of a request are as long as its "
    "traced output. The beam model has one parameter, set for each data set so that its saving at width 2 is the "
    f"published one (theta = {BEAM_THETA['alpaca']:g} for Alpaca, {BEAM_THETA['sharegpt']:g} for ShareGPT, whose width "
    "2 is taken for the low end of the published range); those points are inputs, widths 4 and 6 are predictions.",
)
