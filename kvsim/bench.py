"""The simulator's speed on a common trace: output tokens simulated per second of wall-clock time.

The clock is handed in, so that nothing below the command line reads one.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvsim.registry import build
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.sim.run import Simulation, simulate

Clock = Callable[[], float]

SIZES = (1_000, 10_000, 100_000)

COMMON: dict[str, Any] = {
    "name": "common",
    "seed": 1,
    "engine": "paged",
    "model": "llama-3.1-8b",
    "gpu": "h100-80gb",
    "memory": {"num_gpu_blocks_override": 4000},
    "allocator": {"block_size": 16, "watermark": 0.01},
    "scheduler": {
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "max_model_len": 8192,
        "admission": "full_prompt",
    },
    "workload": {
        "num_requests": 10_000,
        "arrivals": {"type": "poisson", "request_rate": 28.0},
        "lengths": {"type": "normal", "prompt_mean": 512, "prompt_std": 128, "output_mean": 256, "output_std": 64},
    },
    "cost": {"type": "linear", "step_ms": 6.0, "prefill_token_us": 18, "decode_us": 0, "context_token_ns": 45},
    "record": ["summary", "steps", "requests"],
}
"""The trace that other simulators are measured on: see docs/performance.md."""

ROWS: dict[str, dict[str, Any]] = {
    "common": {},
    "common-plain": {"engine_loop": "plain"},
    "prefix-caching": {
        "allocator.enable_prefix_caching": True,
        "workload.content": {"system_prompt": {"num_groups": 8, "zipf": 0.0, "tokens": 256}},
    },
    "pressure": {"memory.num_gpu_blocks_override": 1500},
    "vllm-v1": {"engine": "vllm-v1"},
    "kernels": {"cost": {"type": "kernels", "profile": "h100"}},
}
"""What each row changes of the common trace."""

SLOW_ROWS = ("common-plain",)
"""Rows that are left out at the largest size."""


class BenchRow(NamedTuple):
    """One measurement. `peak_mb` is what Python allocated at most, measured in a run of its own."""

    row: str
    num_requests: int
    output_tokens_per_s: float
    requests_per_s: float
    peak_mb: float | None
    fast_share: float
    num_steps: int
    us_per_step: float


def bench(
    rows: tuple[str, ...], sizes: tuple[int, ...], clock: Clock, *, repeat: int = 3, memory: bool = True
) -> Iterator[BenchRow]:
    """Measure rows at sizes; the best of `repeat` runs counts (one run above 10,000 requests)."""
    for num_requests in sizes:
        for row in rows:
            if num_requests > 10_000 and row in SLOW_ROWS:
                continue
            yield _measure(row, num_requests, clock, repeat if num_requests <= 10_000 else 1, memory)


def _measure(row: str, num_requests: int, clock: Clock, repeat: int, memory: bool) -> BenchRow:
    best: tuple[float, Simulation] | None = None
    for _ in range(repeat):
        elapsed_s, simulation = _run(row, num_requests, clock)
        if best is None or elapsed_s < best[0]:
            best = (elapsed_s, simulation)
    assert best is not None
    elapsed_s, simulation = best
    totals = simulation.recorder.totals
    return BenchRow(
        row,
        num_requests,
        totals.num_emitted_tokens / elapsed_s,
        num_requests / elapsed_s,
        _peak_mb(row, num_requests, clock) if memory and num_requests <= 10_000 else None,
        getattr(simulation.recorder.scheduler, "num_fast_steps", 0) / max(totals.num_steps, 1),
        totals.num_steps,
        elapsed_s / max(totals.num_steps, 1) * 1e6,
    )


def _run(row: str, num_requests: int, clock: Clock) -> tuple[float, Simulation]:
    scenario = scenario_of(row, num_requests)
    engine = build(scenario)
    start = clock()
    simulation = simulate(engine.scheduler, engine.cost, engine.source, record=scenario.record)
    return clock() - start, simulation


def scenario_of(row: str, num_requests: int) -> Any:
    """The scenario of one row."""
    resolved = scenario_from_dict(COMMON | {"name": row}).with_values(
        {"workload.num_requests": num_requests, **ROWS[row]}
    )
    return resolved.scenario


def _peak_mb(row: str, num_requests: int, clock: Clock) -> float:
    tracemalloc.start()
    try:
        _run(row, num_requests, clock)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
