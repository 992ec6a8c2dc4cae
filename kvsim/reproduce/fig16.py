"""Figure 16: translation with a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import latency_curves
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import ALL_AT_ONCE, VLLM, Scenario, scenario
from kvsim.reproduce.sustained import RATIO, Search, curve, ratio

ORACLE = "orca-oracle"
PREFIXES = {"1 shot (80 tokens)": 80, "5 shots (341 tokens)": 341}
SENTENCE = {
    "type": "lognormal",
    "prompt_mean": 35,
    "prompt_std": 20,
    "output_mean": 40,
    "output_std": 22,
    "correlation": 0.9,
    "max_total": 512,
}
"""Stand-in for WMT16's sentences and their translations: some tens of tokens, correlated."""


def cases(scale: Scale) -> dict[str, Search]:
    seconds = scale.pick(1200, 60)
    return {
        f"{engine}, {name}": Search(_scenario(engine, tokens), seconds, 300)
        for name, tokens in PREFIXES.items()
        for engine in (VLLM, ORACLE)
    }


def _scenario(engine: str, prefix_tokens: int) -> Scenario:
    """The prefix is computed once and kept by the paged engine (prefix caching); Orca stores it with every request."""
    paged = engine == VLLM
    base = scenario(
        "paged" if paged else engine,
        SENTENCE,
        ALL_AT_ONCE,
        1,
        model="llama-13b",
        workload={"content": {"system_prompt": {"tokens": prefix_tokens}}},
    )
    if paged:
        base["allocator"] = {"enable_prefix_caching": True}
    return base


def ours(results: Results) -> list[Ours]:
    rows = []
    for name in PREFIXES:
        vllm, oracle = (results[f"{engine}, {name}"] for engine in (VLLM, ORACLE))
        rows += curve(f"{VLLM}, {name}", vllm) + curve(f"{ORACLE}, {name}", oracle)
        rows.append(Ours(f"{VLLM} / {ORACLE}", name, RATIO, ratio(vllm, oracle)))
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    latency_curves(picture, rows, {f", {name}": name for name in PREFIXES})


FIGURE = Figure(
    name="fig16",
    title="Figure 16: shared prefix (illustration)",
    cases=cases,
    ours=ours,
    draw=draw,
    text="The lengths of WMT16 are not public here: log-normal stand-ins of 35 and 40 tokens behind the prefix. "
    "The paged engine finds the prefix by its prefix cache (whole blocks of 16).",
    illustration=True,
)
