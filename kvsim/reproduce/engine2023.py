"""What a step of the 2023 engine cost: kernels of an A100, and the CPU work between them.

The kernels come from the calibrated profile. The engine's own time per step, a constant and a part for every running
sequence (its Python scheduled, sampled and detokenised them one by one), is fitted to two published end-to-end figures
of vLLM 0.1 and 0.2 with LLaMA-7B (`fit_overhead`), none of them a figure that is reproduced here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvsim.catalog import load_model
from kvsim.cost.kernels import KernelCost
from kvsim.scheduling.plan import StepShape
from kvsim.types import NS_PER_US, Ns

PROFILE = "a100"
STEP_OVERHEAD_US = 380.0
"""Of every step. vLLM 0.2, Llama-2-7B, one sequence: 11.19 and 11.48 ms a token (FlightLLM's profiling README), less
the profile's kernels at the same contexts."""
SEQUENCE_OVERHEAD_US = 330.0
"""Of every running sequence and step. vLLM of July 2023, LLaMA-7B: 1000 ShareGPT requests at once, 5.99 requests/s
(github.com/vllm-project/vllm/issues/359)."""

ALL_PER_STEP_US = 13_000.0
"""Of every step, if nothing were each sequence's own: the constant with which vLLM has the 30.42 requests in a batch of
the paper's Figure 13a. An experiment takes it as its input; no figure's own rows do."""


class Engine2023Cost:
    """A `CostModel`: the profile's kernels, and the engine's time per step and per sequence.

    Scenarios name it: `cost: {type: "kvsim.reproduce.engine2023:Engine2023Cost", model: opt-13b}`.
    """

    def __init__(
        self,
        model: str,
        tensor_parallel_size: int = 1,
        block_size: int = 16,
        step_us: float = STEP_OVERHEAD_US,
        sequence_us: float = SEQUENCE_OVERHEAD_US,
        attention_factor: float = 1.0,
    ) -> None:
        self.kernels = KernelCost.from_profile(
            PROFILE,
            load_model(model),
            block_size=block_size,
            tensor_parallel_size=tensor_parallel_size,
            overhead_us=step_us,
        )
        self.sequence_ns = sequence_us * NS_PER_US
        self.attention_factor = attention_factor
        """How many times longer than the profile says decode attention takes (Figure 18a)."""

    def step_ns(self, shape: StepShape) -> Ns:
        """Duration of the step in integer nanoseconds."""
        num_sequences = shape.num_decodes + len(shape.prefills)
        duration_ns = self.kernels.step_ns(shape) + round(num_sequences * self.sequence_ns)
        if self.attention_factor == 1.0:
            return duration_ns
        return duration_ns + round((self.attention_factor - 1) * self._decode_attention_ns(shape))

    def _decode_attention_ns(self, shape: StepShape) -> Ns:
        """What the step costs beyond the same step over contexts of one token."""
        if not shape.num_decodes:
            return 0
        without = shape._replace(context_tokens=shape.num_decodes)
        return self.kernels.step_ns(shape) - self.kernels.step_ns(without)

    def warnings(self) -> list[str]:
        """What lay outside the profile's measurements."""
        return self.kernels.warnings()


SINGLE_STREAM_MS = ((128, 512, 11.19), (512, 512, 11.48))
"""(prompt, output, ms per token) of vLLM 0.2, Llama-2-7B, A100, batch 1."""
LOADED_REQUESTS_PER_S = 5.99
"""vLLM of July 2023, LLaMA-7B, A100: 1000 ShareGPT requests sent at 200/s."""


def fit_step_us() -> float:
    """The constant part: what one sequence's step took beyond its kernels, mean of the two contexts."""
    kernels = KernelCost.from_profile(PROFILE, load_model("llama-2-7b"), overhead_us=0.0)
    beyond = [
        measured * 1e3 - kernels.step_ns(StepShape(num_decodes=1, context_tokens=prompt + output // 2)) / 1e3
        for prompt, output, measured in SINGLE_STREAM_MS
    ]
    return sum(beyond) / len(beyond)


def loaded_scenario(step_us: float, sequence_us: float) -> dict[str, Any]:
    """The loaded run: LLaMA-7B on an A100-40GB, ShareGPT as vLLM's benchmark filters it, all at once."""
    return {
        "name": "fit-2023",
        "engine": "vllm-v0",
        "model": "llama-2-7b",
        "gpu": "a100-40gb",
        "scheduler": {"max_model_len": 2048},
        "workload": {
            "num_requests": 1000,
            "arrivals": {"type": "poisson", "request_rate": 200.0},
            "lengths": {"type": "preset", "name": "sharegpt_vllm_filter", "max_total": 2048},
        },
        "cost": {
            "type": f"{__name__}:{Engine2023Cost.__name__}",
            "model": "llama-2-7b",
            "step_us": step_us,
            "sequence_us": sequence_us,
        },
        "record": ["summary"],
    }


def fit_sequence_us(throughput_of: Callable[[dict[str, Any]], float], step_us: float, num_halvings: int = 8) -> float:
    """The part per sequence at which the loaded run serves as many requests per second as it did.

    `throughput_of` runs a scenario.
    """
    low, high = 0.0, 1600.0
    for _ in range(num_halvings):
        middle = (low + high) / 2
        if throughput_of(loaded_scenario(step_us, middle)) > LOADED_REQUESTS_PER_S:
            low = middle
        else:
            high = middle
    return (low + high) / 2
