"""Small random scenarios under memory pressure, for every engine: one Hypothesis strategy that many tests share.

A scenario is a dict, as a YAML file would hold it: whatever the strategy draws can be written down and run.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvsim.scenario.schema import ENGINES

PAGED = ("paged", "no-evict", "vllm-v0", "vllm-v1", "vllm-v1-async")
CONTIGUOUS = ("orca-max", "orca-pow2", "orca-oracle", "static")
V1 = ("vllm-v1", "vllm-v1-async")
BEAMS = ("paged", "no-evict", "vllm-v0")

assert {*PAGED, *CONTIGUOUS} == set(ENGINES)

Dict = dict[str, Any]


def _pick(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def scenarios(draw: st.DrawFn, engine: str, *, windows: bool = True) -> Dict:
    """A scenario for `engine` that is valid, and tight: a few requests that do not fit together."""
    scenario: Dict = {"name": "drawn", "engine": engine, "seed": draw(st.integers(0, 9))}
    block_size = draw(_pick(4, 1, 2, 3, 8))
    num_blocks = draw(st.integers(2, 24))
    slots = num_blocks * block_size
    scenario["memory"] = {
        "num_gpu_blocks_override": num_blocks + (engine in V1),
        "num_cpu_blocks_override": draw(_pick(0, 3, num_blocks)),
    }
    scenario["allocator"] = draw(_allocators(engine, block_size, windows))
    scenario["scheduler"] = draw(_schedulers(engine, slots))
    widest = min(3, scenario["scheduler"]["max_num_seqs"])
    longest = draw(_pick(slots // 3, slots // 2, slots, slots + 2)) if slots > 5 else slots
    workload = draw(st.one_of(_written(engine, longest, widest), _generated(engine, longest, widest)))
    if concurrency := draw(_pick(0, 0, 0, 1, 3)):
        workload["max_concurrency"] = concurrency
    scenario["workload"] = workload
    scenario["cost"] = {"step_ms": 1, "prefill_token_us": draw(_pick(0, 100)), "context_token_ns": draw(_pick(0, 50))}
    if horizon := draw(_pick(0, 0, 0, 0, 0.02)):
        scenario["horizon"] = horizon
    return scenario


@st.composite
def _allocators(draw: st.DrawFn, engine: str, block_size: int, windows: bool) -> Dict:
    allocator: Dict = {"block_size": block_size}
    if engine in CONTIGUOUS:
        allocator["placement"] = draw(_pick("buddy", "first_fit", "best_fit", "worst_fit"))
        allocator["compaction"] = draw(_pick(None, "on_demand"))
        return allocator
    allocator["watermark"] = draw(_pick(0, 0.01, 0.2))
    if windows and draw(_pick(False, False, False, True)):
        allocator["sliding_window"] = block_size * draw(st.integers(1, 4))
        allocator["enable_prefix_caching"] = False
    elif engine != "vllm-v0":
        allocator["enable_prefix_caching"] = draw(st.booleans())
    if engine in ("paged", "no-evict"):
        allocator["free_list"] = draw(_pick("fifo", "lifo", "lru", "exclusive_first"))
    return allocator


@st.composite
def _schedulers(draw: st.DrawFn, engine: str, slots: int) -> Dict:
    max_num_seqs = draw(_pick(3, 2, 5, 16, 1))
    scheduler: Dict = {"max_num_seqs": max_num_seqs}
    max_model_len = draw(_pick(None, slots, max(2, slots // 2), 20))
    if engine in CONTIGUOUS:
        max_model_len = max_model_len or slots
        scheduler["max_num_batched_tokens"] = draw(_pick(None, max_num_seqs, max_num_seqs + 7))
    elif engine == "vllm-v0":
        max_model_len = max_model_len or slots
        scheduler["max_num_batched_tokens"] = max_model_len + draw(_pick(0, 0, 7, 50))
        scheduler["max_paddings"] = draw(_pick(256, 0, 5))
        scheduler["preemption"] = draw(_pick("auto", "recompute", "swap"))
    else:
        scheduler |= draw(_one_pass_schedulers(engine, max_num_seqs, slots))
    if max_model_len is not None:
        scheduler["max_model_len"] = max_model_len
    return scheduler


@st.composite
def _one_pass_schedulers(draw: st.DrawFn, engine: str, max_num_seqs: int, slots: int) -> Dict:
    is_chunked = draw(_pick(True, True, True, False))
    scheduler: Dict = {
        "enable_chunked_prefill": is_chunked,
        "long_prefill_token_threshold": draw(_pick(0, 0, 3)),
        "scheduling_policy": draw(_pick("fcfs", "priority")),
        "max_num_batched_tokens": max_num_seqs + draw(_pick(0, 4, 30)) if is_chunked else 2 * slots + 8,
    }
    if engine == "paged":
        scheduler["preemption"] = draw(_pick("recompute", "swap", "swap_forked"))
        scheduler["admission"] = draw(_pick("full_prompt", "first_chunk"))
    if engine in V1:
        scheduler["scheduler_reserve_full_isl"] = draw(st.booleans())
        scheduler["max_loras"] = draw(_pick(0, 0, 1))
    else:
        scheduler["prefill_first"] = draw(_pick(False, False, True))
        # Budgets that do not go round the running sequences.
        if is_chunked and draw(_pick(False, False, True)):
            scheduler["max_num_batched_tokens"] = draw(st.integers(1, 4))
    return scheduler


@st.composite
def _written(draw: st.DrawFn, engine: str, longest: int, widest: int) -> Dict:
    """Requests one by one: each with its own arrival, lengths, samples, priority, prefix, abort."""
    requests = draw(st.lists(_requests(engine, longest, widest), min_size=1, max_size=8))
    return {"requests": requests}


@st.composite
def _requests(draw: st.DrawFn, engine: str, longest: int, widest: int) -> Dict:
    prompt = draw(st.integers(1, max(1, longest * 2 // 3)))
    output = draw(st.one_of(_pick(1, 2), st.integers(1, max(1, longest))))
    request: Dict = {
        "arrival_s": draw(st.integers(0, 20)) / 1000,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "max_output_tokens": output + draw(_pick(0, 0, 1, 5)),
        "priority": draw(st.integers(0, 2)),
    }
    if shared := draw(st.integers(0, prompt)):
        request |= {"prefix_group": draw(_pick("a", "b")), "prefix_tokens": shared}
    kind = draw(_pick("greedy", "greedy", "samples", "beams"))
    if kind == "samples":
        request["n"] = draw(st.integers(1, widest))
    elif kind == "beams" and engine in BEAMS:
        request["beam_width"] = draw(st.integers(1, widest))
    if draw(_pick(False, False, False, True)):
        request["abort_s"] = draw(st.integers(0, 25)) / 1000
    return request


@st.composite
def _generated(draw: st.DrawFn, engine: str, longest: int, widest: int) -> Dict:
    """Requests from a seed: arrivals, lengths, independent samples, adapters, system prompts, clients that give up."""
    low, high = sorted((draw(st.integers(1, max(1, longest // 2))), max(1, longest // 2)))
    workload: Dict = {
        "num_requests": draw(st.integers(1, 10)),
        "arrivals": draw(_pick(
            {"type": "batch"},
            {"type": "poisson", "request_rate": 400},
            {"type": "gamma", "request_rate": 200, "burstiness": 0.3},
            {"type": "batch", "batch_size": 3, "interval": 0.005},
        )),  # fmt: skip
        "lengths": {"type": "uniform", "prompt": [low, high], "output": [1, max(1, longest // 2)]},
        "priorities": draw(_pick(None, {0: 0.5, 3: 0.5})),
    }
    if draw(st.booleans()):
        workload["content"] = {
            "system_prompt": {"num_groups": 2, "tokens": draw(st.integers(1, 2 + longest // 3))},
            "num_loras": draw(_pick(0, 2)),
        }
    sampling = draw(_pick({}, {"n": widest, "lengths": "independent"}, {"beam_width": widest, "theta": 0.5}))
    if engine in BEAMS or "beam_width" not in sampling:
        workload["sampling"] = sampling
    if draw(_pick(False, True)):
        workload["abort"] = {"probability": 0.4, "after": 0.01}
    if cut := draw(_pick(None, None, 3)):
        workload["max_output_tokens"] = cut
    return workload
