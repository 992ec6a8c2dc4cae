"""Figure 14: several samples and beams per request, vLLM against the best Orca."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import lines
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import (
    ALL_AT_ONCE,
    BEAM_THETA,
    MIXED,
    PROMPTS_APART,
    VLLM,
    Scenario,
    constant_cost_of,
    engine_of,
    lengths_of,
    scenario,
)
from kvsim.reproduce.sustained import BOUND_S, RATE, Search, ratio

ORACLE = "orca-oracle"
APART = "orca-oracle, prompt steps apart"
QUANTITY = "sustained rate ratio to orca-oracle"
PER_STEP = "overhead per step"
MIXED_QUANTITY = f"{QUANTITY}, of {MIXED}"
PER_STEP_QUANTITY = f"{MIXED_QUANTITY}, {PER_STEP}"
MODES: dict[tuple[str, int], Scenario] = {
    ("basic", 1): {"n": 1},
    **{("parallel", width): {"n": width} for width in (2, 4, 6)},
    **{("beam", width): {"beam_width": width, "theta": BEAM_THETA["alpaca"]} for width in (2, 4, 6)},
}
ALSO_CHANGED = (("basic", 1), ("beam", 6))
"""Where each engine is also run with the other's order of work, so that only the memory differs, and with an
overhead per step instead of per sequence."""


def _orca_sampling(sampling: Scenario) -> Scenario:
    """Regions cannot be shared: Orca keeps every beam as a sequence of its own, as it keeps every sample."""
    return {"n": sampling.get("beam_width", sampling.get("n", 1))}


def cases(scale: Scale) -> dict[str, Search]:
    seconds = scale.pick(1200, 60)

    def searched(name: str, sampling: Scenario, **blocks: Any) -> Search:
        engine, own = engine_of(name)
        one = scenario(engine, lengths_of("alpaca"), ALL_AT_ONCE, 1, sampling=sampling, **own, **blocks)
        return Search(one, seconds, 300)

    found = {}
    for (mode, width), sampling in MODES.items():
        x, regions = f"{mode} {width}", _orca_sampling(sampling)
        found[f"{VLLM}, {x}"] = searched(VLLM, sampling)
        found[f"{ORACLE}, {x}"] = searched(ORACLE, regions)
        if (mode, width) in ALSO_CHANGED:
            found[f"{APART}, {x}"] = searched(ORACLE, regions, scheduler=PROMPTS_APART)
            found[f"{MIXED}, {x}"] = searched(MIXED, sampling)
            found[f"{MIXED}, {PER_STEP}, {x}"] = searched(MIXED, sampling, cost=constant_cost_of())
            found[f"{ORACLE}, {PER_STEP}, {x}"] = searched(ORACLE, regions, cost=constant_cost_of())
    return found


def ours(results: Results) -> list[Ours]:
    rows = []
    for mode, width in MODES:
        vllm, oracle = (results[f"{engine}, {mode} {width}"] for engine in (VLLM, ORACLE))
        rows.append(Ours(mode, str(width), QUANTITY, ratio(vllm, oracle)))
        if (mode, width) in ALSO_CHANGED:
            apart, mixed, mixed_per_step, per_step = (
                results[f"{name}, {mode} {width}"]
                for name in (APART, MIXED, f"{MIXED}, {PER_STEP}", f"{ORACLE}, {PER_STEP}")
            )
            rows += [
                Ours(mode, str(width), f"sustained rate ratio to {APART}", ratio(vllm, apart)),
                Ours(mode, str(width), MIXED_QUANTITY, ratio(mixed, oracle)),
                Ours(mode, str(width), PER_STEP_QUANTITY, ratio(mixed_per_step, per_step)),
            ]
        rows += [
            Ours(f"{name}, {mode}", str(width), RATE, found["sustained_rate"])
            for name, found in ((VLLM, vllm), (ORACLE, oracle))
        ]
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    lines(picture, [row for row in rows if row.quantity == QUANTITY], QUANTITY, "samples or beams")


FIGURE = Figure(
    name="fig14",
    title="Figure 14: parallel sampling and beam search",
    cases=cases,
    ours=ours,
    draw=draw,
    text=f"Alpaca, OPT-13B; sustained as in Figure 12 (bound {BOUND_S:g} s a token). Orca Oracle holds every sample "
    "and every beam in a region of its own, and is not charged for copying beams.",
)
