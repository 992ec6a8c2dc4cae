"""What sharing saves, and the lengths behind the theory of block utilization: windows and partial tails apart."""

from __future__ import annotations

from typing import Any

import pytest

from kvsim.runs import Options, run

COPIES = 1e-4
"""A copy takes a few nanoseconds of a step."""
WINDOWED = ["paged", "no-evict", "vllm-v0", "vllm-v1", "vllm-v1-async"]


def summary_of(engine: str, requests: list[dict[str, Any]], **blocks: Any) -> dict[str, Any]:
    scenario = {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": 40},
        "allocator": {"block_size": 4, "watermark": 0, "enable_prefix_caching": False},
        "scheduler": {"max_model_len": 100},
        "workload": {"requests": requests},
        "cost": {"step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    for name, values in blocks.items():
        scenario[name] = scenario[name] | values
    return run(scenario, options=Options(plots=False, check=True)).summary


@pytest.mark.parametrize("engine", WINDOWED)
def test_a_table_that_goes_round_its_window_shares_nothing(engine: str) -> None:
    """6 tokens, 7, then 8 of the window for as long as it lasts: one sequence, two blocks that nobody else names."""
    request = {"prompt_tokens": 6, "output_tokens": 30, "max_output_tokens": 40}
    summary = summary_of(engine, [request], allocator={"sliding_window": 8})
    num_steps = summary["num_steps"]
    assert num_steps in (30, 31)  # 31: the stop is not foreseen in asynchronous scheduling.
    assert summary["sharing_saving"] == 0
    mean_length = (6 + 7 + 8 * (num_steps - 2)) / num_steps
    assert summary["block_utilization_theory"] == pytest.approx(1 - 4 / (2 * mean_length), rel=COPIES)


@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
def test_samples_behind_a_window_save_what_they_share(engine: str) -> None:
    """Two samples share 8 tokens in 2 blocks for one step; then each overwrites the blocks of its own ring in turn.

    Blocks in use: 2, four times 3 (one is copied), four times 4 (both are); without sharing 2, then 4.
    """
    summary = summary_of(engine, [{"prompt_tokens": 8, "output_tokens": 9, "n": 2}], allocator={"sliding_window": 8})
    assert summary["num_steps"] == 9
    physical, logical = 2 + 4 * 3 + 4 * 4, 2 + 8 * 4
    assert summary["sharing_saving"] == pytest.approx(1 - physical / logical, rel=COPIES)


@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
def test_a_tail_that_samples_share_counts_as_long_as_it_is(engine: str) -> None:
    """Between their fork and their first write a prompt goes first: 5 tokens each are 5, whatever their last block is.

    The steps: a prompt of 5; one of 4 while two samples hold 5 each; then both samples write their sixth token (and the
    other request, which has ended, is gone).
    """
    requests = [
        {"prompt_tokens": 5, "output_tokens": 2, "n": 2},
        {"arrival_s": 0.001, "prompt_tokens": 4, "output_tokens": 1},
    ]
    scheduler: dict[str, Any] = {"prefill_first": True} if engine == "paged" else {}
    summary = summary_of(engine, requests, scheduler=scheduler)
    assert summary["num_steps"] == 3
    mean_length = (5 + (5 + 5 + 4) + (6 + 6)) / (1 + 3 + 2)
    assert summary["sequences_mean"] == pytest.approx((1 + 3 + 2) / 3, rel=COPIES)
    assert summary["block_utilization_theory"] == pytest.approx(1 - 4 / (2 * mean_length), rel=COPIES)
