"""Figure 17: a chatbot, its prompts the last 1024 tokens of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import latency_curves
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import ALL_AT_ONCE, ENGINES, ORCA, VLLM, scenario
from kvsim.reproduce.sustained import RATIO, Search, curve, ratio

CHAT = {
    "type": "lognormal",
    "prompt_mean": 960,
    "prompt_std": 60,
    "output_mean": 338,
    "output_std": 248,
    "max_total": 2048,
}
"""Stand-in: histories so long that nearly all prompts are cut near 1024; outputs with ShareGPT's mean and spread."""
X = "1024 + 1024"


def cases(scale: Scale) -> dict[str, Search]:
    seconds = scale.pick(3600, 400)
    return {
        engine: Search(scenario(engine, CHAT, ALL_AT_ONCE, 1, workload={"max_output_tokens": 1024}), seconds, 200)
        for engine in ENGINES
    }


def ours(results: Results) -> list[Ours]:
    rows = []
    for engine in ENGINES:
        rows += curve(engine, results[engine])
    rows += [Ours(f"{VLLM} / {engine}", X, RATIO, ratio(results[VLLM], results[engine])) for engine in ORCA]
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    latency_curves(picture, rows, {"": "OPT-13B"})


FIGURE = Figure(
    name="fig17",
    title="Figure 17: chatbot (illustration)",
    cases=cases,
    ours=ours,
    draw=draw,
    text="The conversations are not public here: stand-in prompts of about 960 tokens, outputs with ShareGPT's mean "
    "and spread.",
    illustration=True,
)
