"""Figure 12: the rate that each engine sustains on ShareGPT, for three models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce import recipe
from kvsim.reproduce.draw import latency_curves
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import (
    ALL_AT_ONCE,
    ENGINES,
    MIXED,
    PROMPTS_APART,
    VLLM,
    Scenario,
    constant_cost_of,
    engine_of,
    lengths_of,
    scenario,
)
from kvsim.reproduce.sustained import BOUND_S, RATIO, Search, curve, ratio

PER_STEP = "opt-13b, overhead per step"
PER_STEP_175B = "opt-175b, overhead per step"
APART = "opt-13b, prompt steps apart for all"
COMPARED = {
    "opt-13b": (*ENGINES, MIXED),
    "opt-66b": ("orca-max", "orca-oracle", VLLM, MIXED),
    "opt-175b": ("orca-max", "orca-oracle", VLLM, MIXED),
    PER_STEP: ("orca-max", "orca-oracle", VLLM, MIXED),
    APART: ("orca-max", "orca-oracle", VLLM),
    PER_STEP_175B: ("orca-max", "orca-oracle", VLLM, MIXED),
}
"""Models, and the engines that are run with each; some also with one assumption changed."""


def cases(scale: Scale) -> dict[str, Search]:
    seconds = scale.pick(3600, 300)
    return {
        f"{engine}, {model}": Search(_scenario(engine, model), seconds)
        for model, engines in COMPARED.items()
        for engine in engines
    }


def _scenario(name: str, setting: str) -> Scenario:
    engine, blocks = engine_of(name)
    model = setting.partition(",")[0]
    if setting in (PER_STEP, PER_STEP_175B):
        blocks = blocks | {"cost": constant_cost_of(model)}
    if setting == APART and engine != VLLM:
        blocks = blocks | {"scheduler": PROMPTS_APART}
    return scenario(engine, lengths_of("sharegpt"), ALL_AT_ONCE, 1, model=model, **blocks)


def ours(results: Results) -> list[Ours]:
    rows = []
    for model, engines in COMPARED.items():
        found = {engine: results[f"{engine}, {model}"] for engine in engines}
        for engine in engines:
            if engine == MIXED:
                continue
            rows += curve(f"{engine}, {model}", found[engine])
            if engine != VLLM:
                rows += [
                    Ours(f"{vllm} / {engine}", model, RATIO, ratio(found[vllm], found[engine]))
                    for vllm in (VLLM, MIXED)
                    if vllm in found
                ]
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    latency_curves(picture, rows, {f", {model}": model.upper() for model in COMPARED if model in recipe.KV_BYTES})


FIGURE = Figure(
    name="fig12",
    title="Figure 12: sustained rate on ShareGPT",
    cases=cases,
    ours=ours,
    draw=draw,
    text="Sustained is the rate at which the mean of latency / output tokens passes "
    f"{BOUND_S:g} s a token. The larger models run on 4 and 8 GPUs of the same profile.",
)
