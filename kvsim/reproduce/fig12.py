"""Figure 12: the rate that each engine sustains on ShareGPT, for three models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import bars
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import ALL_AT_ONCE, ENGINES, VLLM, lengths_of, scenario
from kvsim.reproduce.sustained import BOUND_S, RATIO, Search, curve, ratio

COMPARED = {
    "opt-13b": ENGINES,
    "opt-66b": ("orca-max", "orca-oracle", VLLM),
    "opt-175b": ("orca-max", "orca-oracle", VLLM),
}


def cases(scale: Scale) -> dict[str, Search]:
    seconds = scale.pick(3600, 300)
    return {
        f"{engine}, {model}": Search(scenario(engine, lengths_of("sharegpt"), ALL_AT_ONCE, 1, model=model), seconds)
        for model, engines in COMPARED.items()
        for engine in engines
    }


def ours(results: Results) -> list[Ours]:
    rows = []
    for model, engines in COMPARED.items():
        vllm = results[f"{VLLM}, {model}"]
        for engine in engines:
            rows += curve(f"{engine}, {model}", results[f"{engine}, {model}"])
            if engine != VLLM:
                rows.append(Ours(f"{VLLM} / {engine}", model, RATIO, ratio(vllm, results[f"{engine}, {model}"])))
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    ratios = [row for row in rows if row.quantity == RATIO]
    bars(picture, [row._replace(series=f"{row.series}\n{row.x}") for row in ratios], RATIO)


FIGURE = Figure(
    name="fig12",
    title="Figure 12: sustained rate on ShareGPT",
    cases=cases,
    ours=ours,
    draw=draw,
    text="Sustained is the rate at which the mean of latency / output tokens passes "
    f"{BOUND_S:g} s a token. The larger models run on 4 and 8 GPUs of the same profile.",
)
