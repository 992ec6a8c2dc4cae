"""Table 1: how many tokens the KV memory of each model holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import bars
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import KV_BYTES, VLLM, Scenario, saturated

MODELS = ("opt-13b", "opt-66b", "opt-175b")


def cases(scale: Scale) -> dict[str, Scenario]:
    """One request each: only the size of the pool is asked for."""
    return {model: saturated(VLLM, "alpaca", 1, model=model) for model in MODELS}


def ours(results: Results) -> list[Ours]:
    rows = []
    for model in MODELS:
        summary = results[model]
        slots = summary["num_gpu_blocks"] * summary["block_size"]
        rows.append(Ours(model, KV_BYTES[model].replace("G", " G"), "KV slots (K)", slots / 1000))
        rows.append(Ours(model, "token", "KV bytes (KiB)", summary["bytes_per_token"] / 1024))
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    bars(picture, [row for row in rows if row.quantity == "KV slots (K)"], "KV slots (thousands)")


FIGURE = Figure(
    name="table1",
    title="Table 1: KV slots of each model",
    cases=cases,
    ours=ours,
    draw=draw,
    text="The pool that each model's KV memory makes. OPT-66B: 21 GiB / 2.25 MiB are 9,557 slots, 9.6K; the 9.7K "
    "printed needs 21.3 GiB, so the paper's 21 GB is itself rounded.",
)
