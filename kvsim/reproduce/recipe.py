"""What all scenarios of the paper have in common: the model, the memory, the lengths, the 2023 engine's step.

Every input of the reproduction is here or in `engine2023`; nothing in these files comes from the figures that are
reproduced, but for the one setting that is marked so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce.engine2023 import ALL_PER_STEP_US

Scenario = dict[str, Any]

ORCA = ("orca-max", "orca-pow2", "orca-oracle")
VLLM = "vllm-v0"
ENGINES = (*ORCA, VLLM)

MODEL = "opt-13b"
KV_BYTES = {"opt-13b": "12GiB", "opt-66b": "21GiB", "opt-175b": "264GiB", "llama-13b": "12GiB"}
"""Table 1. The paper's GB are read as GiB: 12 GiB / 800 KiB are its 15.7K slots."""
TENSOR_PARALLEL = {"opt-13b": 1, "opt-66b": 4, "opt-175b": 8, "llama-13b": 1}
CATALOG_MODEL = {"llama-13b": "llama-2-13b"}
"""LLaMA-13B has the geometry of Llama-2-13B."""
MAX_MODEL_LEN = 2048

MEAN_LENGTHS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
"""Mean prompt and output of the paper's data sets: an input."""
_SCALED_MEANS = {"sharegpt": (177.46, 340.88), "alpaca": (19.42, 58.74)}
"""What the real pairs are scaled to so that, with pairs above 2,048 dropped, their means are the published ones."""

SAVED_AT_WIDTH_2 = {"alpaca": 37.56, "sharegpt": 44.3}
"""Percent of blocks that two beams save in Figure 15: the points by which beam models are set, and which are therefore
no predictions. ShareGPT's is the low end of its published range: the wider the beam, the more is shared."""
BEAM_THETA = {"alpaca": 0.32, "sharegpt": 0.051}
"""The beam model's parameter, set by that point of the data set (`fig15.saving_at`): how far apart the odds of the
surviving beams are is a matter of the text and of the model that writes it."""
SEED = 2023


def lengths_of(dataset: str) -> Scenario:
    """Real pairs at the published means."""
    prompt_mean, output_mean = _SCALED_MEANS[dataset]
    return {
        "type": "preset",
        "name": dataset,
        "prompt_mean": prompt_mean,
        "output_mean": output_mean,
        "max_total": MAX_MODEL_LEN,
    }


def engine_of(name: str) -> tuple[str, Scenario]:
    """Engine, and blocks of the scenario, that a series stands for."""
    return ("paged", MIXED_STEPS) if name == MIXED else (name, {})


def poisson(rate: float) -> Scenario:
    return {"type": "poisson", "request_rate": rate}


PROMPTS_APART: Scenario = {"prefill_first": True}
"""Orca computes prompts together with decodes. This gives it vLLM's order of work: prompts first, in steps of their
own."""

MIXED = "vllm, mixed steps"
"""vLLM as the paper's section 4.3 describes a step: the tokens of prompts and of decodes together. In `vllm-v0`, the
releases of autumn 2023, prompts have steps of their own."""
MIXED_STEPS: Scenario = {
    "allocator": {"free_list": "lifo"},
    "scheduler": {"preemption": "swap_forked", "enable_chunked_prefill": False},
}
"""What makes the generic engine `paged` that engine: memory and preemption of `vllm-v0`, other steps."""

ALL_AT_ONCE: Scenario = {"type": "batch"}
"""The queue is never empty: what the memory looks like at saturation."""


def cost_of(model: str = MODEL, **changes: Any) -> Scenario:
    """A step of the 2023 engine."""
    return {
        "type": "kvsim.reproduce.engine2023:Engine2023Cost",
        "model": CATALOG_MODEL.get(model, model),
        "tensor_parallel_size": TENSOR_PARALLEL[model],
    } | changes


def constant_cost_of(model: str = MODEL) -> Scenario:
    """A step of an engine whose own work hangs on no sequence."""
    return cost_of(model, step_us=ALL_PER_STEP_US, sequence_us=0.0)


def scenario(
    engine: str,
    lengths: Scenario,
    arrivals: Scenario,
    num_requests: int,
    *,
    model: str = MODEL,
    horizon_s: float | None = None,
    sampling: Scenario | None = None,
    record: Sequence[str] = ("summary",),
    **blocks: Scenario,
) -> Scenario:
    """One run of the paper's set-up; `blocks` (allocator, scheduler, workload, cost, memory) add keys to theirs."""
    base: Scenario = {
        "name": "reproduce",
        "seed": SEED,
        "engine": engine,
        "model": CATALOG_MODEL.get(model, model),
        "gpu": "a100-40gb",
        "memory": {"kv_cache_memory_bytes": KV_BYTES[model]},
        "scheduler": {"max_model_len": MAX_MODEL_LEN},
        "workload": {"num_requests": num_requests, "arrivals": arrivals, "lengths": lengths},
        "cost": cost_of(model),
        "record": list(record),
    }
    if horizon_s is not None:
        base["horizon"] = f"{horizon_s}s"
    if sampling is not None:
        base["workload"]["sampling"] = sampling
    for name, keys in blocks.items():
        base[name] = base.get(name, {}) | keys
    return base


def served_for(engine: str, dataset: str, rate: float, seconds: float, **keywords: Any) -> Scenario:
    """Poisson arrivals for `seconds`, when the clock stops: requests come until the end."""
    num_requests = round(rate * seconds * 1.1 + 50)
    return scenario(engine, lengths_of(dataset), poisson(rate), num_requests, horizon_s=seconds, **keywords)


def saturated(
    engine: str, dataset: str, num_requests: int, *, lengths: Scenario | None = None, **keywords: Any
) -> Scenario:
    """All requests at once: the memory at saturation is `kv_saturated` of the summary."""
    return scenario(engine, lengths or lengths_of(dataset), ALL_AT_ONCE, num_requests, **keywords)
