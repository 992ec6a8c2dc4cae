"""Figure 19: bringing a preempted sequence back, by swapping or by computing it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvsim.reproduce.draw import lines
from kvsim.reproduce.engine2023 import Engine2023Cost
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import MODEL, Scenario
from kvsim.scheduling.plan import StepShape

NUM_TOKENS = 256
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COST = "cost of bringing 256 tokens back (ms)"


def cases(scale: Scale) -> dict[str, Scenario]:
    """None: the cost model is asked."""
    return {}


def swap_ms(block_size: int) -> float:
    """Out and in again."""
    num_blocks = math.ceil(NUM_TOKENS / block_size)
    cost = Engine2023Cost(MODEL, block_size=block_size, step_us=0.0, sequence_us=0.0)
    return cost.step_ns(StepShape(num_swapped_out_blocks=num_blocks, num_swapped_in_blocks=num_blocks)) / 1e6


def recompute_ms(block_size: int) -> float:
    """One prompt step of the stored tokens."""
    cost = Engine2023Cost(MODEL, block_size=block_size, step_us=0.0, sequence_us=0.0)
    return cost.step_ns(StepShape(prefills=((0, NUM_TOKENS),))) / 1e6


def ours(results: Results) -> list[Ours]:
    swap = {size: swap_ms(size) for size in BLOCK_SIZES}
    recompute = {size: recompute_ms(size) for size in BLOCK_SIZES}
    rows = [
        Ours(way, str(size), COST, costs[size])
        for way, costs in (("swap", swap), ("recompute", recompute))
        for size in BLOCK_SIZES
    ]
    largest = max(recompute[size] / swap[size] for size in (16, 32, 64))
    rows.append(Ours("recompute", "1 / 256", "cost ratio", recompute[1] / recompute[256]))
    rows.append(Ours("recompute / swap", "16 to 64", "largest ratio", largest))
    rows.append(Ours("swap = recompute", "", "block size", _crossing(swap, recompute[16])))
    return rows


def _crossing(swap: dict[int, float], recompute: float) -> float | None:
    """The block size above which swapping is the cheaper, interpolated on logarithms."""
    for (small, dear), (large, cheap) in pairwise(swap.items()):
        if dear >= recompute > cheap:
            share = math.log(dear / recompute) / math.log(dear / cheap)
            return float(small * (large / small) ** share)
    return None


def draw(picture: Any, rows: Sequence[Row]) -> None:
    curves = [row for row in rows if row.quantity == COST]
    lines(picture, curves, "ms", "block size (tokens)", is_log=True)


FIGURE = Figure(
    name="fig19",
    title="Figure 19: swapping or recomputing",
    cases=cases,
    ours=ours,
    draw=draw,
    text=f"{NUM_TOKENS} tokens of OPT-13B. A swap copies K and V of each of 40 layers apart: 80 calls of 2.3 us per "
    "block and direction, and 25.6 GB/s; recomputing is one prompt step of the profile.",
)
