"""Block utilization far below its theory: which cause the summary names."""

from __future__ import annotations

from typing import Any

import pytest

import kvsim

STEP = {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0}
PREFIX = {"prefix_group": "g", "prefix_tokens": 1024}


def run(requests: list[dict[str, Any]], block_size: int, engine: str = "paged", **allocator: Any) -> Any:
    return kvsim.run(
        {
            "engine": engine,
            "memory": {"num_gpu_blocks_override": 4000},
            "allocator": {"block_size": block_size, **allocator},
            "scheduler": {"max_model_len": 4096},
            "workload": {"requests": requests},
            "cost": STEP,
        }
    )


def told(result: Any) -> list[str]:
    return [text for text in result.summary["warnings"] if text.startswith("block utilization")]


def test_samples_that_share_their_prompt() -> None:
    """Eight of 64 + 3 tokens: 4 blocks, then 4 shared and 8 tails with 1 token, then with 2."""
    result = run([{"prompt_tokens": 64, "output_tokens": 3, "n": 8}], block_size=16)
    filled, allocated, tokens, sequences = 64 + (64 + 8) + (64 + 16), 4 + 12 + 12, 64 + 8 * (65 + 66), 1 + 8 + 8
    assert result.summary["block_utilization"] == pytest.approx(filled / (16 * allocated))
    assert result.summary["block_utilization_theory"] == pytest.approx(1 - 16 / (2 * tokens / sequences))
    assert result.summary["sharing_saving"] == pytest.approx(1 - allocated / (4 + 8 * (5 + 5)))
    assert told(result) == [
        "block utilization is 0.482, 0.878 would be usual for sequences of these lengths: they share 66.7% of their "
        "blocks, and each leaves half a block of its own empty"
    ]


@pytest.mark.parametrize("engine", ["paged", "vllm-v1"])
def test_requests_that_share_a_system_prompt(engine: str) -> None:
    first = {"prompt_tokens": 1064, "output_tokens": 1, **PREFIX}
    others = [{"arrival_s": 0.01, "prompt_tokens": 1064, "output_tokens": 40, **PREFIX} for _ in range(30)]
    (text,) = told(run([first, *others], 128, engine, enable_prefix_caching=True))
    assert text.endswith("they share 85.9% of their blocks, and each leaves half a block of its own empty")
