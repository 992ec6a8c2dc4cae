"""Small random scenarios under memory pressure, for every engine: one strategy that many tests share.

A scenario is a dict, as a YAML file would hold it: whatever is drawn can be written down and run. It is drawn from a
seed by plain random choices, which put more of the examples under pressure than Hypothesis's own, simplest first.
"""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from kvsim.scenario.schema import ENGINES

PAGED = ("paged", "no-evict", "vllm-v0", "vllm-v1", "vllm-v1-async")
CONTIGUOUS = ("orca-max", "orca-pow2", "orca-oracle", "static")
V1 = ("vllm-v1", "vllm-v1-async")
BEAMS = ("paged", "no-evict", "vllm-v0")

assert {*PAGED, *CONTIGUOUS} == set(ENGINES)

Dict = dict[str, Any]


def scenarios(engine: str) -> st.SearchStrategy[Dict]:
    """Scenarios for `engine` that are valid, and tight: a few requests that do not fit together."""
    return st.integers(0, 2**40).map(lambda seed: draw_scenario(engine, seed))


def draw_scenario(engine: str, seed: int) -> Dict:
    rng = Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 4, 8])
    num_blocks = rng.randint(3, 24) if block_size < 4 else rng.randint(3, 12)
    slots = num_blocks * block_size
    scheduler = _scheduler(rng, engine, slots)
    longest = max(2, rng.choice([slots // 3, slots // 2, slots // 2, slots]))
    widest = min(3, scheduler["max_num_seqs"])
    make_workload = rng.choice([_written, _written, _generated])
    workload = make_workload(rng, engine, longest, widest)
    if rng.random() < 0.2:
        workload["max_concurrency"] = rng.choice([1, 3])
    scenario = {
        "name": "drawn",
        "engine": engine,
        "seed": rng.randint(0, 9),
        "memory": {
            "num_gpu_blocks_override": num_blocks + (engine in V1),
            "num_cpu_blocks_override": rng.choice([0, 3, num_blocks, num_blocks]),
        },
        "allocator": _allocator(rng, engine, block_size),
        "scheduler": scheduler,
        "workload": workload,
        "cost": {
            "step_ms": 1,
            "prefill_token_us": rng.choice([0, 100]),
            "context_token_ns": rng.choice([0, 50]),
        },
    }
    if rng.random() < 0.1:
        scenario["horizon"] = 0.02
    return scenario


def _allocator(rng: Random, engine: str, block_size: int) -> Dict:
    if engine in CONTIGUOUS:
        placement = rng.choice(["buddy", "first_fit", "best_fit", "worst_fit"])
        return {"block_size": block_size, "placement": placement, "compaction": rng.choice([None, "on_demand"])}
    allocator: Dict = {"block_size": block_size, "watermark": rng.choice([0, 0.01, 0.2])}
    if rng.random() < 0.15:
        allocator |= {"sliding_window": block_size * rng.randint(1, 4), "enable_prefix_caching": False}
    elif engine != "vllm-v0":
        allocator["enable_prefix_caching"] = rng.random() < 0.6
    if engine in ("paged", "no-evict"):
        allocator["free_list"] = rng.choice(["fifo", "lifo", "lru", "exclusive_first"])
    return allocator


def _scheduler(rng: Random, engine: str, slots: int) -> Dict:
    max_num_seqs = rng.choice([1, 3, 3, 5, 8, 16])
    scheduler: Dict = {"max_num_seqs": max_num_seqs}
    max_model_len = rng.choice([None, slots, max(2, slots // 2), 20])
    if engine in CONTIGUOUS:
        max_model_len = max_model_len or max(2, slots // 2)
        scheduler["max_num_batched_tokens"] = rng.choice([None, max_num_seqs, max_num_seqs + 7])
    elif engine == "vllm-v0":
        max_model_len = max_model_len or slots
        scheduler["max_num_batched_tokens"] = max_model_len + rng.choice([0, 7, 50])
        scheduler["max_paddings"] = rng.choice([0, 5, 256])
        scheduler["preemption"] = rng.choice(["auto", "auto", "recompute", "swap"])
    else:
        scheduler |= _one_pass_scheduler(rng, engine, max_num_seqs, slots)
    if max_model_len is not None:
        scheduler["max_model_len"] = max_model_len
    return scheduler


def _one_pass_scheduler(rng: Random, engine: str, max_num_seqs: int, slots: int) -> Dict:
    is_chunked = rng.random() < 0.8
    scheduler: Dict = {
        "enable_chunked_prefill": is_chunked,
        "long_prefill_token_threshold": rng.choice([0, 0, 3]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "max_num_batched_tokens": max_num_seqs + rng.choice([0, 4, 30])
        if is_chunked
        else max(2 * slots + 8, 20),  # at least max_num_seqs, and max_model_len
    }
    if engine == "paged":
        scheduler["preemption"] = rng.choice(["recompute", "swap", "swap", "swap_forked"])
        scheduler["admission"] = rng.choice(["full_prompt", "first_chunk"])
    if engine in V1:
        scheduler["scheduler_reserve_full_isl"] = rng.random() < 0.5
        scheduler["max_loras"] = rng.choice([0, 0, 1])
    else:
        scheduler["prefill_first"] = rng.random() < 0.3
        if is_chunked and rng.random() < 0.2:
            # A budget that does not go round the running sequences.
            scheduler["max_num_batched_tokens"] = rng.randint(1, 4)
    return scheduler


def _written(rng: Random, engine: str, longest: int, widest: int) -> Dict:
    """Requests one by one: each with its own arrival, lengths, samples, priority, prefix, abort."""
    num_requests = rng.choice([1, 3, 5, 8, 8])
    return {"requests": [_request(rng, engine, longest, widest) for _ in range(num_requests)]}


def _request(rng: Random, engine: str, longest: int, widest: int) -> Dict:
    prompt = rng.randint(1, max(1, longest * 2 // 3))
    output = rng.choice([1, 2, rng.randint(1, longest), rng.randint(1, longest)])
    request: Dict = {
        "arrival_s": rng.choice([0, 0, 1, 4, 20]) / 1000,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "max_output_tokens": output + rng.choice([0, 0, 1, 5]),
        "priority": rng.randint(0, 2),
    }
    if shared := rng.randint(0, prompt):
        request |= {"prefix_group": rng.choice(["a", "b"]), "prefix_tokens": shared}
    kind = rng.random()
    if kind < 0.25:
        request["n"] = rng.randint(1, widest)
    elif kind > 0.85 and engine in BEAMS:
        request["beam_width"] = rng.randint(1, widest)
    if rng.random() < 0.2:
        request["abort_s"] = rng.randint(0, 25) / 1000
    return request


def _generated(rng: Random, engine: str, longest: int, widest: int) -> Dict:
    """Requests from a seed: arrivals, lengths, independent samples, adapters, system prompts, clients that give up."""
    top = max(1, longest // 2)
    workload: Dict = {
        "num_requests": rng.choice([2, 6, 10, 15]),
        "arrivals": rng.choice(
            [
                {"type": "batch"},
                {"type": "poisson", "request_rate": 400},
                {"type": "gamma", "request_rate": 200, "burstiness": 0.3},
                {"type": "batch", "batch_size": 3, "interval": 0.005},
            ]
        ),
        "lengths": {"type": "uniform", "prompt": [rng.randint(1, top), top], "output": [1, top]},
        "priorities": rng.choice([None, {0: 0.5, 3: 0.5}]),
    }
    if rng.random() < 0.5:
        workload["content"] = {
            "system_prompt": {"num_groups": 2, "tokens": rng.randint(1, 2 + longest // 3)},
            "num_loras": rng.choice([0, 2]),
        }
    sampling = rng.choice([{}, {}, {"n": widest, "lengths": "independent"}, {"beam_width": widest, "theta": 0.5}])
    if engine in BEAMS or "beam_width" not in sampling:
        workload["sampling"] = sampling
    if rng.random() < 0.3:
        workload["abort"] = {"probability": 0.4, "after": 0.01}
    if rng.random() < 0.2:
        workload["max_output_tokens"] = 3
    return workload
