"""The rate an engine sustains: the highest at which the mean normalised latency stays below a bound.

The paper plots normalised latency against the request rate, and compares engines where the curves turn up. Here that
point is defined: the rate at which the curve crosses `BOUND_S`, interpolated between simulated rates. The rates tried
are multiples of the throughput that the engine reaches when all requests come at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kvsim.reproduce.figure import Ours, Summary
from kvsim.reproduce.recipe import ALL_AT_ONCE, Scenario, poisson

BOUND_S = 0.1
"""Seconds of end-to-end latency per output token: ten tokens a second."""
SHARES = (0.85, 1.0, 1.15, 1.3, 1.5)
"""Rates tried, as shares of the saturated throughput, until one passes the bound."""
RATE = "sustained rate (requests/s)"
LATENCY = "normalised latency (s/token)"
RATIO = "sustained rate ratio"


class Search(NamedTuple):
    """A scenario whose arrivals are to be found; its requests come over `seconds` at every rate."""

    scenario: Scenario
    seconds: float
    num_saturated: int = 400
    """Requests of the saturated run that says where to look."""


def search(task: Search, latency_at: Any, throughput_of: Any) -> dict[str, Any]:
    """`sustained_rate`, and the curve as `rates` and `latencies`; the two callables run a scenario."""
    capacity = throughput_of(_with(task.scenario, ALL_AT_ONCE, task.num_saturated))
    rates: list[float] = []
    latencies: list[float] = []
    for share in SHARES:
        rates.append(_three_digits(share * capacity))
        num_requests = max(50, round(rates[-1] * task.seconds))
        latencies.append(latency_at(_with(task.scenario, poisson(rates[-1]), num_requests)))
        if latencies[-1] >= BOUND_S:
            break
    return {"sustained_rate": crossing(rates, latencies), "rates": rates, "latencies": latencies}


def crossing(rates: Sequence[float], latencies: Sequence[float], bound: float = BOUND_S) -> float:
    """Where the curve first passes `bound`, the latency taken as exponential between points.

    The last rate if it never does, the first if it does from the start.
    """
    if latencies[0] >= bound:
        return rates[0]
    for (low_rate, low), (high_rate, high) in pairwise(zip(rates, latencies, strict=True)):
        if high >= bound:
            share = math.log(bound / low) / math.log(high / low)
            return low_rate + share * (high_rate - low_rate)
    return rates[-1]


def curve(series: str, summary: Summary) -> list[Ours]:
    """The rate, and the simulated points of the curve."""
    points = zip(summary["rates"], summary["latencies"], strict=True)
    return [
        Ours(series, "", RATE, summary["sustained_rate"]),
        *(Ours(series, f"{rate:g}", LATENCY, latency) for rate, latency in points),
    ]


def ratio(first: Summary, second: Summary) -> float:
    """How many times the rate of the second the first sustains."""
    return float(first["sustained_rate"] / second["sustained_rate"])


def _with(scenario: Scenario, arrivals: Scenario, num_requests: int) -> Scenario:
    workload = scenario["workload"] | {"arrivals": arrivals, "num_requests": num_requests}
    return scenario | {"workload": workload}


def _three_digits(rate: float) -> float:
    return float(f"{rate:.3g}")
