"""Requests that wait while memory is left: the summary names the limit that holds them back."""

from __future__ import annotations

from typing import Any

import pytest

import kvsim

STEP = {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0}


def run(requests: list[dict[str, Any]], num_blocks: int = 100, engine: str = "paged", **scheduler: Any) -> Any:
    return kvsim.run(
        {
            "engine": engine,
            "memory": {"num_gpu_blocks_override": num_blocks},
            "allocator": {"block_size": 4},
            "scheduler": {"max_model_len": 32, **scheduler},
            "workload": {"requests": requests},
            "cost": STEP,
        }
    )


def told(result: Any) -> list[str]:
    return [text for text in result.summary["warnings"] if text.startswith("requests waited")]


def row(prompt: int, output: int, arrival_s: float = 0, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "output_tokens": output, "arrival_s": arrival_s, **more}


def test_one_place_for_two_requests() -> None:
    """The second waits in 8 of 18 steps, in which the first holds 3 blocks, then 4, of 100."""
    result = run([row(8, 9), row(8, 9, 0.001)], max_num_seqs=1)
    assert result.summary["saturated_share"] == pytest.approx(8 / 18)
    assert told(result) == [
        "requests waited in 44.4% of the time, for a limit (max_num_seqs 1) and not for memory: 96.5% of it was to be "
        "had meanwhile, so kv_saturated shows no full memory"
    ]


def test_who_waits_for_memory_is_not_told() -> None:
    assert told(run([row(8, 9), row(8, 9)], num_blocks=4)) == []
    # Full, with or without a limit on sequences beside it.
    assert told(run([row(8, 9), row(8, 9), row(8, 9)], num_blocks=8, max_num_seqs=2)) == []


def test_a_wait_that_is_rare_is_not_told() -> None:
    """One step of 31 in which the second waits for its place."""
    assert told(run([row(1, 2), row(1, 29, 0.001)], max_num_seqs=1)) == []


@pytest.mark.parametrize(
    ("engine", "settings", "limit"),
    [
        ("paged", {"max_num_batched_tokens": 4}, "max_num_batched_tokens 4"),
        ("vllm-v1", {"max_num_batched_tokens": 8, "max_num_seqs": 8, "max_loras": 1}, "max_loras 1"),
        ("vllm-v0", {"max_num_batched_tokens": 32, "max_num_seqs": 1}, "max_num_seqs 1"),
        ("vllm-v0", {"max_num_batched_tokens": 64, "max_paddings": 0}, "max_paddings 0"),
        ("no-evict", {"max_num_seqs": 2}, "max_num_seqs 2"),
        ("orca-max", {"max_num_seqs": 2}, "max_num_seqs 2"),
        ("static", {"max_num_seqs": 1}, "running batch"),
    ],
)
def test_every_limit_has_its_name(engine: str, settings: dict[str, Any], limit: str) -> None:
    adapters = ({}, {"lora": "a"}, {"lora": "b"}) if "max_loras" in settings else ({}, {}, {})
    requests = [row(8 - index, 9, **more) for index, more in enumerate(adapters)]
    (text,) = told(run(requests, engine=engine, **settings))
    assert f"for a limit ({limit})" in text
