"""Figure 18: what the paged kernel costs, and which block size is best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.draw import bars, lines
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import VLLM, Scenario, cost_of, lengths_of, poisson, scenario

PAGED_KERNEL_FACTOR = 1.23
"""The middle of 20 to 26 % (Figure 18a): an input."""
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = {"sharegpt": 2.0, "alpaca": 20.0}
LATENCY = "mean latency (s)"
TOLERANCE = 0.05
"""Block sizes whose mean latency is this near the best are called best."""


def _served(dataset: str, num_requests: int, block_size: int = 16, **changes: Any) -> Scenario:
    return scenario(
        VLLM,
        lengths_of(dataset),
        poisson(RATES[dataset]),
        num_requests,
        allocator={"block_size": block_size},
        cost=cost_of(**changes),
    )


def kernel_cases(scale: Scale) -> dict[str, Scenario]:
    num = scale.pick(7200, 800)
    return {
        "contiguous": _served("sharegpt", num),
        "paged": _served("sharegpt", num, attention_factor=PAGED_KERNEL_FACTOR),
    }


def kernel_ours(results: Results) -> list[Ours]:
    """Where the input ends up: seldom is attention the larger part of a step."""
    latencies = [results[name]["mean_e2el_ms"] for name in ("contiguous", "paged")]
    return [
        Ours(
            "paged kernel",
            "whole request at 2/s",
            "slower than contiguous (%)",
            100 * (latencies[1] / latencies[0] - 1),
        )
    ]


def kernel_draw(picture: Any, rows: Sequence[Row]) -> None:
    bars(picture, [row._replace(series=row.x) for row in rows], "slower than contiguous (%)")


def block_cases(scale: Scale) -> dict[str, Scenario]:
    sizes = {"sharegpt": scale.pick(7200, 700), "alpaca": scale.pick(20000, 1600)}
    return {
        f"{dataset} {block_size}": _served(dataset, num_requests, block_size)
        for dataset, num_requests in sizes.items()
        for block_size in BLOCK_SIZES
    }


def block_ours(results: Results) -> list[Ours]:
    rows = []
    for dataset in RATES:
        latencies = {size: results[f"{dataset} {size}"]["mean_e2el_ms"] / 1000 for size in BLOCK_SIZES}
        best = [size for size, latency in latencies.items() if latency <= min(latencies.values()) * (1 + TOLERANCE)]
        rows += [Ours(dataset, str(size), LATENCY, latency) for size, latency in latencies.items()]
        rows.append(Ours(dataset, "smallest", "best block size", float(min(best))))
        rows.append(Ours(dataset, "largest", "best block size", float(max(best))))
    return rows


def block_draw(picture: Any, rows: Sequence[Row]) -> None:
    curves = [row for row in rows if row.quantity == LATENCY]
    lines(picture, curves, LATENCY, "block size (tokens)", is_log=True)


FIG18A = Figure(
    name="fig18a",
    title="Figure 18a: the paged kernel",
    cases=kernel_cases,
    ours=kernel_ours,
    draw=kernel_draw,
    inputs=frozenset({("paged kernel", "attention")}),
    text="An input: the kernel's slowdown cannot be simulated. What can is how much of it a request feels: decode "
    f"attention {PAGED_KERNEL_FACTOR:g} times as long against 1.",
)
FIG18B = Figure(
    name="fig18b",
    title="Figure 18b: block size",
    cases=block_cases,
    ours=block_ours,
    draw=block_draw,
    text="vLLM at 2 requests/s (ShareGPT) and 20 (Alpaca). The kernel's own dependence on the block size is that of "
    f"present kernels, which is slight; best are sizes within {TOLERANCE:.0%} of the lowest mean latency.",
)
