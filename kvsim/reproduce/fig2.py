"""Figure 2: what the KV memory holds at saturation, under each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import stacks
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale, Summary
from kvsim.reproduce.recipe import ENGINES, Scenario, saturated

PARTS = {
    "token states": ("token_states",),
    "reservation": ("reserved",),
    "internal fragmentation": ("internal_frag",),
    "external and others": ("external_frag", "free", "cached_idle"),
}
"""The paper's parts, and the ledger's. Its \"others\" are slots that are free and of no use to the queue's head."""
QUANTITY = "share (%)"


def cases(scale: Scale) -> dict[str, Scenario]:
    return {engine: saturated(engine, "sharegpt", scale.pick(7200, 1600)) for engine in ENGINES}


def parts_of(summary: Summary) -> dict[str, float]:
    """The paper's parts in percent, over the steps at which a request waits."""
    return {part: 100 * sum(summary[f"kv_saturated.{name}"] or 0.0 for name in names) for part, names in PARTS.items()}


def ours(results: Results) -> list[Ours]:
    return [
        Ours(engine, part, QUANTITY, share)
        for engine, summary in results.items()
        for part, share in parts_of(summary).items()
    ]


def draw(picture: Any, rows: Sequence[Row]) -> None:
    stacks(picture, rows, tuple(PARTS), "share of the KV memory")


FIGURE = Figure(
    name="fig2",
    title="Figure 2: what the KV memory holds",
    cases=cases,
    ours=ours,
    draw=draw,
    text="ShareGPT, OPT-13B, all requests at once: time-weighted shares over the steps at which a request waits.",
)
