"""Counters of runs that a horizon cuts off, of victims that had their turn, and of copies in a sliding window."""

from __future__ import annotations

import pytest
from support import play, request

import kvsim
from kvsim.request import Sampling

TWO = Sampling(n=2)


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
def test_what_a_victim_grew_by_in_its_last_step_is_no_table_update(engine_loop: str) -> None:
    """A takes a block in step 1, and gives it up for B: 1 + 1 entries at first, 1 of B, 2 of A when it is back."""
    out = play(
        [request("a", 2, 2, priority=1), request("b", 2, 2)],
        num_blocks=3, block_size=2, scheduling_policy="priority", engine_loop=engine_loop,
        queue_order=lambda group: (group.request.request_id,),
    )  # fmt: skip
    assert out["a"].num_preemptions == 1
    assert out.summary["block_table_updates"] == 5


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
def test_a_forked_row_and_its_copied_tail_are_one_change(engine: str, engine_loop: str) -> None:
    """Four samples of 10 tokens at B = 4, 15 stored in the end: 3 entries, three new rows of 3, the leader's copied
    tail, and a fourth block for each. Two of the other samples copy a tail that is new in their rows anyway.
    """
    assert _num_updates(engine, engine_loop, {"prompt_tokens": 10, "output_tokens": 6, "n": 4}) == 3 + 9 + 1 + 4


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
def test_samples_that_end_at_once_get_no_row(engine: str, engine_loop: str) -> None:
    """A's two entries; B's one, and its second block."""
    a, b = {"prompt_tokens": 8, "output_tokens": 1, "n": 4}, {"prompt_tokens": 3, "output_tokens": 3}
    assert _num_updates(engine, engine_loop, a, b) == 2 + 1 + 1


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
def test_the_row_of_a_fork_that_is_pushed_out_at_once_is_no_update(engine_loop: str) -> None:
    """A and B have 2 entries each. A's third block pushes B out before the row of its second sample was uploaded;
    when it comes back: 2, then that row of 2 and the leader's copied tail, then a third block for each.
    """
    out = play(
        [request("a", 8, 4), request("b", 6, 4, sampling=TWO)], num_blocks=5, block_size=4, engine_loop=engine_loop
    )
    assert out["b"].num_preemptions == 1
    assert out.summary["block_table_updates"] == 4 + 1 + 2 + 3 + 2


def test_the_row_of_a_fork_that_comes_back_from_the_host_is_one_change() -> None:
    """As before, but B's two blocks are on the host meanwhile: two rows of 2, of which a tail is copied."""
    out = play(
        [request("a", 8, 4), request("b", 6, 4, sampling=TWO)],
        num_blocks=5, block_size=4, num_host_blocks=4, preemption="swap",
    )  # fmt: skip
    assert out.summary["num_swapped_in_blocks"] == 2
    assert out.summary["num_cow_copies"] == 1
    assert out.summary["block_table_updates"] == 4 + 1 + 4 + 2


def _num_updates(engine: str, engine_loop: str, *requests: dict[str, int]) -> int:
    scenario = {
        "engine": engine,
        "engine_loop": engine_loop,
        "memory": {"num_gpu_blocks_override": 30},
        "allocator": {"block_size": 4},
        "workload": {"requests": list(requests)},
    }
    return int(kvsim.run(scenario).summary["block_table_updates"])


def test_a_preempted_request_that_the_horizon_cuts_off_keeps_the_tokens_of_all_its_samples() -> None:
    """B is pushed out in step 2, when each of its samples had emitted two tokens."""
    out = play([request("a", 1, 6), request("b", 1, 3, sampling=TWO)], num_blocks=6, block_size=1, horizon_ms=3)
    assert (out["b"].status, out["b"].output_tokens) == ("waiting", 4)
    assert out.requests.output_tokens.sum() == out.summary["total_output_tokens"] == 7


def test_a_step_that_the_horizon_cuts_off_pushes_nobody_out() -> None:
    out = play([request("a", 1, 6), request("b", 1, 3, sampling=TWO)], num_blocks=6, block_size=1, horizon_ms=2.5)
    assert out.steps.num_preempted.sum() == out.summary["num_preemptions"] == out.requests.num_preemptions.sum() == 0


def test_a_step_that_the_horizon_cuts_off_copies_nothing() -> None:
    out = play([request("a", 3, 4, sampling=TWO)], num_blocks=6, block_size=4, horizon_ms=1.5)
    assert out.steps.num_copies.sum() == out.summary["num_cow_copies"] == out.requests.num_cow_copies.sum() == 0


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize("engine", ["paged", "vllm-v0", "vllm-v1", "vllm-v1-async"])
def test_a_step_that_the_horizon_cuts_off_computes_nothing_again(engine: str, engine_loop: str) -> None:
    """B is pushed out by A; from the step on in which it is back, but not in the one that is cut off, tokens recur."""
    whole = _recomputing(engine, engine_loop)
    back = int(whole.steps.num_prefill_tokens[2:].gt(0).idxmax())
    cut, seen = (_recomputing(engine, engine_loop, horizon=(back + part) / 1000) for part in (0.5, 1.5))
    assert cut.summary["num_recomputed_tokens"] == cut.requests.recomputed_tokens.sum() == 0
    assert seen.summary["num_recomputed_tokens"] == seen.requests.recomputed_tokens.sum() >= 3


def _recomputing(engine: str, engine_loop: str, **values: float) -> kvsim.RunResult:
    scenario = {
        "engine": engine,
        "engine_loop": engine_loop,
        "memory": {"num_gpu_blocks_override": 4 + engine.startswith("vllm-v1")},
        "allocator": {"block_size": 2, "watermark": 0},
        "workload": {"requests": [{"prompt_tokens": 2, "output_tokens": 6}, {"prompt_tokens": 2, "output_tokens": 4}]},
        "cost": {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    if engine.startswith("vllm-v1"):
        scenario["allocator"]["enable_prefix_caching"] = False
    return kvsim.run(scenario, **values)


def test_every_block_that_a_sample_copies_in_its_window_is_counted() -> None:
    """The samples fork again, and the first one writes both blocks of the ring that they share in one step."""
    result = kvsim.run(
        {
            "memory": {"num_gpu_blocks_override": 5},
            "allocator": {"block_size": 2, "sliding_window": 4, "watermark": 0},
            "scheduler": {"max_model_len": 64},
            "workload": {
                "requests": [
                    {"prompt_tokens": 2, "output_tokens": 4},
                    {"prompt_tokens": 3, "output_tokens": 3, "n": 2},
                ]
            },
        }
    )
    assert result.steps.num_copies.sum() == result.summary["num_cow_copies"] == 3
    assert result.requests.num_cow_copies.tolist() == [0, 3]


def window_run(requests: list[dict[str, object]], blocks: int, **keys: object) -> kvsim.RunResult:
    return kvsim.run(
        {
            "memory": {"num_gpu_blocks_override": blocks},
            "allocator": {"block_size": 2, "sliding_window": 2, "watermark": 0},
            "scheduler": {"max_model_len": 64},
            "workload": {"requests": requests},
            "cost": {"step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
            **keys,
        }
    )


def test_peak_blocks_of_samples_in_a_window_are_those_of_their_rings() -> None:
    """A ring is one block: two samples hold two, however long the prompt was."""
    result = window_run([{"prompt_tokens": 9, "output_tokens": 3, "n": 2}], 8)
    assert result.steps.used_blocks.max() == 2
    assert result.requests.peak_blocks.tolist() == [2]


def test_peak_blocks_of_a_request_that_the_horizon_cuts_off_in_a_window() -> None:
    result = window_run([{"prompt_tokens": 9, "output_tokens": 9}], 8, horizon=0.003)
    assert result.steps.used_blocks.max() == 1
    assert result.requests.peak_blocks.tolist() == [1]


def test_siblings_that_fork_again_in_windows_wait_until_there_is_room_for_all_their_rings() -> None:
    """B's two samples hold two blocks each in the end; with fewer free it came back twice only to be pushed out."""
    requests: list[dict[str, object]] = [
        {"arrival_s": 0.001, "prompt_tokens": 3, "output_tokens": 6},
        {"arrival_s": 0.001, "prompt_tokens": 2, "output_tokens": 2, "n": 2},
    ]
    scenario = {
        "memory": {"num_gpu_blocks_override": 4},
        "allocator": {"block_size": 2, "sliding_window": 4, "watermark": 0},
        "scheduler": {"max_model_len": 64},
        "workload": {"requests": requests},
        "cost": {"step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    assert kvsim.run(scenario).requests.num_preemptions.tolist() == [0, 1]
