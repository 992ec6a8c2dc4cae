"""Beyond the paper: today's engine in the same bars, and cures that the paper did not try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import stacks
from kvsim.reproduce.fig2 import QUANTITY
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import VLLM, Scenario, saturated, served_for

PARTS = {
    "token states": "token_states",
    "reservation": "reserved",
    "internal fragmentation": "internal_frag",
    "external fragmentation": "external_frag",
    "free": "free",
    "cached, idle": "cached_idle",
}
VARIANTS: dict[str, tuple[str, Scenario]] = {
    "Oracle, buddy": ("orca-oracle", {}),
    "Oracle, buddy, compaction": ("orca-oracle", {"allocator": {"compaction": "on_demand"}}),
    "Oracle, first-fit": ("orca-oracle", {"allocator": {"placement": "first_fit"}}),
    "Oracle, best-fit": ("orca-oracle", {"allocator": {"placement": "best_fit"}}),
    "Oracle, first-fit, compaction": (
        "orca-oracle",
        {"allocator": {"placement": "first_fit", "compaction": "on_demand"}},
    ),
    "no-evict": ("no-evict", {}),
    "vLLM 2023": (VLLM, {}),
    "vLLM today": ("vllm-v1", {}),
}
"""Engine, and blocks of its scenario. Today's engine: prefix caching, chunked prefill, recompute only."""
ENGINES = ("vLLM 2023", "vLLM today", "no-evict")
"""Those of them that are also run at the rates of Figure 13."""
SERVED = {"sharegpt": (2.0, 3600, 400), "alpaca": (30.0, 1200, 80)}
"""Figure 13's rates, and seconds in full and quick."""
MEASURES = {
    "requests in a batch": "running_mean",
    "requests/s": "request_throughput",
    "median inter-token latency (ms)": "median_itl_ms",
    "p99 inter-token latency (ms)": "p99_itl_ms",
}


def cases(scale: Scale) -> dict[str, Scenario]:
    num = scale.pick(7200, 800)
    found = {name: saturated(engine, "sharegpt", num, **blocks) for name, (engine, blocks) in VARIANTS.items()}
    for dataset, (rate, full_s, quick_s) in SERVED.items():
        for name in ENGINES:
            engine = VARIANTS[name][0]
            found[f"{name}, {dataset} at {rate:g}/s"] = served_for(engine, dataset, rate, scale.pick(full_s, quick_s))
    return found


def ours(results: Results) -> list[Ours]:
    rows = []
    for name, summary in results.items():
        if name in VARIANTS:
            rows += [
                Ours(name, part, QUANTITY, 100 * (summary[f"kv_saturated.{key}"] or 0.0)) for part, key in PARTS.items()
            ]
        rows += [Ours(name, "", measure, summary[key] or 0.0) for measure, key in MEASURES.items()]
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    stacks(picture, [row for row in rows if row.quantity == QUANTITY], tuple(PARTS), "share of the KV memory")


FIGURE = Figure(
    name="beyond",
    title="Beyond the paper: other cures, and today's engine",
    cases=cases,
    ours=ours,
    draw=draw,
    text="ShareGPT, OPT-13B, all requests at once as in Figure 2, and the rates of Figure 13. Compaction slides "
    "regions together when only a hole is missing, and the step pays for the copies. All engines are charged the step "
    "of 2023, so that only memory and scheduling differ.",
)
