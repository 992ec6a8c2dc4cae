"""What `no-evict` promises, in hindsight: of requests that were given up, and of those that go round a window."""

from __future__ import annotations

from typing import Any

import pytest

from kvsim.runs import Options, run


def parts_of(requests: list[dict[str, Any]], num_blocks: int, **blocks: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Token states, reserved, internal and free slots of each step; and the summary."""
    scenario = {
        "engine": "no-evict",
        "memory": {"num_gpu_blocks_override": num_blocks},
        "allocator": {"block_size": 4, "watermark": 0},
        "scheduler": {"max_model_len": 100},
        "workload": {"requests": requests},
        "cost": {"step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    for name, values in blocks.items():
        scenario[name] = scenario[name] | values
    result = run(scenario, options=Options(plots=False, check=True))
    columns = ["token_states", "reserved", "internal_frag", "free"]
    return result.steps[columns].to_numpy().tolist(), result.summary


def test_a_promise_to_a_request_that_is_given_up_is_waste() -> None:
    """3 + 10 - 1 slots in 3 blocks; given up with 5 stored: 7 of the 12 were never filled, in a block and beyond."""
    request = {"prompt_tokens": 3, "output_tokens": 10, "abort_s": 0.0025}
    parts, summary = parts_of([request], 5)
    assert parts == [[3, 2, 7, 8], [4, 1, 7, 8], [5, 0, 7, 8]]
    assert summary["kv"]["reserved"] == pytest.approx(3 / 60)
    assert summary["kv"]["internal_frag"] == pytest.approx(21 / 60)


def test_a_promise_is_kept_to_those_who_stay() -> None:
    """Beside it one of 4 + 4 - 1 slots in 2 blocks, of which the last is never filled."""
    requests = [
        {"prompt_tokens": 3, "output_tokens": 10, "abort_s": 0.0025},
        {"prompt_tokens": 4, "output_tokens": 4, "abort_s": 1},
    ]
    parts, _ = parts_of(requests, 5)
    assert parts == [[7, 5, 8, 0], [9, 3, 8, 0], [11, 1, 8, 0], [7, 0, 1, 12]]


def test_promises_to_samples_that_are_given_up() -> None:
    """3 tokens, then 4 and 5 in two blocks of each sample: 10 slots are ever filled of 3 blocks for each."""
    request = {"prompt_tokens": 3, "output_tokens": 10, "n": 2, "abort_s": 0.0025}
    parts, _ = parts_of([request], 6)
    assert parts == [[3, 7, 14, 0], [8, 2, 14, 0], [10, 0, 14, 0]]


def test_promises_to_samples_that_are_given_up_before_they_fork() -> None:
    request = {"prompt_tokens": 6, "output_tokens": 3, "n": 2, "abort_s": 0.0005}
    parts, _ = parts_of([request], 6, scheduler={"max_num_batched_tokens": 4})
    assert parts == [[4, 0, 8, 12]]


def test_a_full_ring_is_promised_nothing_more() -> None:
    """Rings of 2 blocks: the first request fills both at once; the second will fill 5 of its 8 slots.

    No more than that is reserved, however long the first one goes round in its own.
    """
    requests = [
        {"prompt_tokens": 8, "output_tokens": 10},
        {"prompt_tokens": 4, "output_tokens": 2, "max_output_tokens": 9},
    ]
    parts, _ = parts_of(requests, 4, allocator={"sliding_window": 8})
    assert parts[:3] == [[12, 1, 3, 0], [13, 0, 3, 0], [8, 0, 0, 8]]


def test_samples_come_to_rings_of_their_own() -> None:
    """Both overwrite the 2 blocks of their prompt; then one ends and the other goes on in its own."""
    request = {"prompt_tokens": 8, "output_tokens": 6, "max_output_tokens": 20, "n": 2}
    parts, _ = parts_of([request], 4, allocator={"sliding_window": 8})
    assert parts == [[8, 8, 0, 0], *[[12, 4, 0, 0]] * 4, [16, 0, 0, 0]]
