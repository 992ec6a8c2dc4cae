"""Figure 13: how many requests run at once, at a fixed rate for an hour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import bars
from kvsim.reproduce.engine2023 import ALL_PER_STEP_US, SEQUENCE_OVERHEAD_US
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import ENGINES, VLLM, Scenario, constant_cost_of, cost_of, served_for

QUANTITY = "requests in a batch"
OTHER_OVERHEADS_US = (0.0, 165.0, 500.0, 660.0)
"""Microseconds per sequence and step that vLLM is also run with: how much hangs on the step's price."""
PER_STEP = f"{ALL_PER_STEP_US:,g} us a step"

STEPS: Any = {"record": ["summary", "steps"]}


def _figure(name: str, dataset: str, rate: float, full_s: int, quick_s: int) -> Figure:
    x = f"{rate:g}/s"

    def cases(scale: Scale) -> dict[str, Scenario]:
        seconds = scale.pick(full_s, quick_s)
        found = {engine: served_for(engine, dataset, rate, seconds, **STEPS) for engine in ENGINES}
        costs = {_varied(sequence_us): cost_of(sequence_us=sequence_us) for sequence_us in OTHER_OVERHEADS_US}
        for varied, cost in (costs | {PER_STEP: constant_cost_of()}).items():
            found[varied] = served_for(VLLM, dataset, rate, seconds, cost=cost, **STEPS)
        return found

    def ours(results: Results) -> list[Ours]:
        return [
            Ours(name, x, QUANTITY, summary["steady_running_mean"])
            if name in ENGINES
            else Ours(VLLM, name, QUANTITY, summary["steady_running_mean"])
            for name, summary in results.items()
        ]

    def draw(picture: Any, rows: Sequence[Row]) -> None:
        bars(picture, [row for row in rows if row.x == x], QUANTITY)

    return Figure(
        name=name,
        title=f"Figure 13{name[-1]}: requests in a batch, {dataset} at {x}",
        cases=cases,
        ours=ours,
        draw=draw,
        text=f"Poisson arrivals at {x}; the mean over time of the requests that run, the first minute left out. "
        "vLLM's bar follows from the price of a step (Little's law), so it is also run with other overheads than the "
        f"fitted {SEQUENCE_OVERHEAD_US:g} us per sequence.",
    )


def _varied(sequence_us: float) -> str:
    return f"{sequence_us:g} us a sequence"


FIG13A = _figure("fig13a", "sharegpt", 2.0, 3600, 1200)
FIG13B = _figure("fig13b", "alpaca", 30.0, 3600, 240)
