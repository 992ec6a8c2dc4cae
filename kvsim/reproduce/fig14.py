"""Figure 14: several samples and beams per request, vLLM against the best Orca."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import lines
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import ALL_AT_ONCE, BEAM_THETA, PROMPTS_APART, VLLM, Scenario, lengths_of, scenario
from kvsim.reproduce.sustained import BOUND_S, RATE, Search, ratio

ORACLE = "orca-oracle"
APART = "orca-oracle, prompt steps apart"
QUANTITY = "sustained rate ratio to orca-oracle"
MODES: dict[tuple[str, int], Scenario] = {
    ("basic", 1): {"n": 1},
    **{("parallel", width): {"n": width} for width in (2, 4, 6)},
    **{("beam", width): {"beam_width": width, "theta": BEAM_THETA} for width in (2, 4, 6)},
}
ALSO_APART = (("basic", 1), ("beam", 6))
"""Where Oracle is also run with vLLM's order of work, so that only the memory differs."""


def _orca_sampling(sampling: Scenario) -> Scenario:
    """Regions cannot be shared: Orca keeps every beam as a sequence of its own, as it keeps every sample."""
    return {"n": sampling.get("beam_width", sampling.get("n", 1))}


def cases(scale: Scale) -> dict[str, Search]:
    seconds = scale.pick(1200, 60)
    found = {}
    for (mode, width), sampling in MODES.items():
        for engine, chosen in ((VLLM, sampling), (ORACLE, _orca_sampling(sampling))):
            one = scenario(engine, lengths_of("alpaca"), ALL_AT_ONCE, 1, sampling=chosen)
            found[f"{engine}, {mode} {width}"] = Search(one, seconds, 300)
            if engine == ORACLE and (mode, width) in ALSO_APART:
                apart = one | {"scheduler": one["scheduler"] | PROMPTS_APART}
                found[f"{APART}, {mode} {width}"] = Search(apart, seconds, 300)
    return found


def ours(results: Results) -> list[Ours]:
    rows = []
    for mode, width in MODES:
        vllm, oracle = (results[f"{engine}, {mode} {width}"] for engine in (VLLM, ORACLE))
        rows.append(Ours(mode, str(width), QUANTITY, ratio(vllm, oracle)))
        if (mode, width) in ALSO_APART:
            apart = results[f"{APART}, {mode} {width}"]
            rows.append(Ours(mode, str(width), f"sustained rate ratio to {APART}", ratio(vllm, apart)))
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
