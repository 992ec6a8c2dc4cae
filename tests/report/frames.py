"""Made-up tables with the columns a run writes."""

from __future__ import annotations

import numpy as np
import pandas as pd

CAPACITY = 16_000
BLOCK_SIZE = 16
PARTS = ("token_states", "reserved", "internal_frag", "external_frag", "cached_idle", "free")


def make_steps(num_steps: int = 300, seed: int = 0) -> pd.DataFrame:
    """A ramp up, a full pool with noise, and a pause in the middle."""
    rng = np.random.default_rng(seed)
    duration_ms = rng.uniform(5, 15, num_steps)
    start_s = np.concatenate([[0.0], np.cumsum(duration_ms)[:-1]]) / 1e3
    start_s[num_steps // 2 :] += start_s[-1] * 0.1
    running = np.minimum(np.arange(1, num_steps + 1), 40) + rng.integers(0, 3, num_steps)
    token_states = np.minimum(running * 330, 14_000)
    used_blocks = np.minimum(-(-token_states // BLOCK_SIZE) + running // 2, CAPACITY // BLOCK_SIZE)
    allocated = used_blocks * BLOCK_SIZE
    internal = np.minimum(allocated - token_states, running // 4)
    free = CAPACITY - allocated
    cached = free // 3
    frame = pd.DataFrame(
        {
            "step": np.arange(num_steps),
            "start_s": start_s,
            "duration_ms": duration_ms,
            "num_running": running,
            "num_waiting": np.maximum(np.arange(num_steps) - 40, 0) // 3,
            "num_swapped": 0,
            "num_prefill_tokens": 0,
            "num_decode_tokens": running,
            "num_preempted": 0,
            "used_blocks": used_blocks,
            "token_states": token_states,
            "reserved": allocated - token_states - internal,
            "internal_frag": internal,
            "external_frag": 0,
            "cached_idle": cached,
            "free": free - cached,
            "block_utilization": token_states / allocated,
            "num_copies": 0,
            "swapped_out_blocks": 0,
            "swapped_in_blocks": 0,
            "prefix_hit_tokens": 0,
            "evicted_blocks": 0,
        }
    )
    return frame


def make_requests(num_requests: int = 200, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.25, num_requests))
    ttft = rng.lognormal(5, 1, num_requests)
    tpot = rng.normal(20, 3, num_requests)
    output = rng.integers(1, 400, num_requests)
    status = np.where(np.arange(num_requests) % 50 == 7, "rejected", "finished")
    frame = pd.DataFrame(
        {
            "request_id": [f"r{i}" for i in range(num_requests)],
            "arrival_s": arrival,
            "prompt_tokens": rng.integers(1, 1000, num_requests),
            "output_tokens": output,
            "status": status,
            "reason": "",
            "first_scheduled_s": arrival + ttft / 2000,
            "first_token_s": arrival + ttft / 1000,
            "finish_s": arrival + (ttft + tpot * output) / 1000,
            "ttft_ms": ttft,
            "tpot_ms": np.where(output > 1, tpot, np.nan),
            "e2el_ms": ttft + tpot * output,
            "queue_ms": ttft / 2,
            "num_preemptions": 0,
            "recomputed_tokens": 0,
            "prefix_hit_tokens": 0,
            "num_cow_copies": 0,
            "peak_blocks": 10,
        }
    )
    return frame


def make_compare() -> pd.DataFrame:
    """The shares of the paper's Figure 2, and an engine in which no request ever waited."""
    shares = {
        "orca-max": (0.204, 0.133, 0.573, 0.060, 0.0, 0.030),
        "orca-pow2": (0.268, 0.179, 0.136, 0.357, 0.0, 0.060),
        "orca-oracle": (0.382, 0.252, 0.0, 0.300, 0.0, 0.066),
        "paged": (0.963, 0.013, 0.0, 0.0, 0.0, 0.024),
        "no-evict": (None,) * 6,
    }
    rows = []
    for engine, parts in shares.items():
        row: dict[str, object] = {"engine": engine}
        row |= {f"kv_saturated.{name}": part for name, part in zip(PARTS, parts, strict=True)}
        row |= {f"kv.{name}": 1 / 6 for name in PARTS}
        row |= {"running_mean": 7.0 + len(rows), "running_peak": 9 + 3 * len(rows)}
        row |= {"output_throughput": 500.0 * (1 + len(rows)), "median_ttft_ms": 90000.0, "p99_ttft_ms": 2e5}
        row |= {"median_tpot_ms": 20.0, "p99_tpot_ms": None}
        rows.append(row)
    return pd.DataFrame(rows)


def make_sweep() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    rows = [
        {
            "allocator.block_size": block_size,
            "workload.arrivals.request_rate": rate,
            "seed": seed,
            "output_throughput": 900 * rate - 2 * block_size + rng.normal(0, 30),
            "mean_ttft_ms": 100 * rate + block_size + rng.normal(0, 5),
            "running_mean": None,
        }
        for block_size in (8, 16, 32, 64, 128)
        for rate in (1.0, 2.0, 4.0)
        for seed in (1, 2, 3)
    ]
    return pd.DataFrame(rows)
