"""Small runs whose counts were worked out by hand: what a request, a step and the summary say is the same."""

from __future__ import annotations

from typing import Any

import pytest

import kvsim
from kvsim.result import RunResult


def run(engine: str, requests: list[tuple[float, int, int, int]], blocks: int, size: int, **values: Any) -> RunResult:
    """Requests are (arrival in s, prompt, output, samples); a step takes 1 ms."""
    scenario = {
        "engine": engine,
        "model": {
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_attention_heads": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "vocab_size": 100,
            "max_position_embeddings": 100_000,
        },
        "memory": {"num_gpu_blocks_override": blocks},
        "allocator": {"block_size": size},
        "workload": {
            "requests": [
                {"arrival_s": arrival_s, "prompt_tokens": prompt, "output_tokens": output, "n": n}
                for arrival_s, prompt, output, n in requests
            ]
        },
        "cost": {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    return kvsim.run(scenario, **values)


def test_a_single_token_has_no_gap_before_it_whatever_was_before() -> None:
    """Asynchronous scheduling leaves a sequence out of a plan before its first token is delivered."""
    summary = run("vllm-v1-async", [(0, 4, 2, 1), (100, 4, 1, 1)], 20, 8).summary
    assert (summary["num_itl"], summary["mean_itl_ms"], summary["p99_itl_ms"]) == (1, 1.0, 1.0)


def test_samples_pushed_out_together_are_one_preemption_and_copies_are_counted_with_growth() -> None:
    """A chunk after the preemption copies the shared tail and takes a further block."""
    result = run("paged", [(0, 1, 3, 1), (0, 6, 3, 2)], 4, 7)
    assert result.summary["num_preemptions"] == 1
    assert list(result.requests["num_preemptions"]) == [0, 1]
    assert int(result.steps["num_preempted"].sum()) == 1
    assert result.summary["num_cow_copies"] == 2
    assert list(result.requests["num_cow_copies"]) == [0, 2]


def test_a_copy_at_the_swap_in_is_the_requests_and_shows_in_its_peak() -> None:
    result = run("vllm-v0", [(0, 1, 2, 1), (0, 1, 2, 2)], 2, 2, **{"memory.num_cpu_blocks_override": 4})
    assert result.summary["num_cow_copies"] == 1
    assert list(result.requests["num_cow_copies"]) == [0, 1]
    assert list(result.requests["peak_blocks"]) == [1, 2]


def test_decoding_sequences_run_during_a_prompt_step() -> None:
    summary = run("vllm-v0", [(0, 3, 4, 1), (0, 2, 3, 1)], 5, 2).summary
    assert summary["sequences_mean"] == summary["running_mean"] == pytest.approx(1.6)
    assert summary["block_utilization_theory"] == pytest.approx(0.75)


@pytest.mark.parametrize("kind", ["n", "beam_width"])
@pytest.mark.parametrize("engine", ["paged", "no-evict", "vllm-v0"])
def test_samples_are_sequences_from_the_fork_on(engine: str, kind: str) -> None:
    """The prompt is one step of one sequence with 5 tokens; then two steps of two sequences, with 6 and 7 each."""
    requests = [{"prompt_tokens": 5, "output_tokens": 3, kind: 2}]
    summary = run(engine, [(0, 1, 1, 1)], 20, 4, **{"workload.requests": requests}).summary
    assert summary["sequences_mean"] == pytest.approx((1 + 2 + 2) / 3)
    mean_length = (5 + 2 * 6 + 2 * 7) / 5
    assert summary["block_utilization_theory"] == pytest.approx(1 - 4 / (2 * mean_length))


def test_duration_goes_to_a_horizon_that_cuts_off_arrivals() -> None:
    summary = run("paged", [(0, 4, 2, 1), (1, 4, 2, 1)], 10, 4, horizon="0.5s").summary
    assert (summary["num_unfinished"], summary["duration"], summary["output_throughput"]) == (1, 0.5, 4.0)


def test_who_gives_up_after_the_last_token_does_not_prolong_the_run() -> None:
    """`a` speaks from 1 s to 7 s; `b` at 4 s and 5 s, then it is pushed out, and gives up in its recompute, at 9 s."""
    requests = [
        {"id": "a", "prompt_tokens": 4, "output_tokens": 7},
        {"id": "b", "prompt_tokens": 8, "output_tokens": 4, "abort_s": 8.5},
    ]
    result = kvsim.run(
        {
            "memory": {"num_gpu_blocks_override": 17},
            "allocator": {"block_size": 1, "watermark": 0},
            "scheduler": {"max_num_batched_tokens": 4},
            "workload": {"requests": requests},
            "cost": {"type": "linear", "step_ms": 1000, "prefill_token_us": 0, "context_token_ns": 0},
        }
    )
    assert list(result.requests["finish_s"]) == [7, 9]
    assert list(result.requests["output_tokens"]) == [7, 2]
    assert (result.summary["duration"], result.summary["total_output_tokens"]) == (7, 9)


@pytest.mark.parametrize("engine", ["orca-oracle", "no-evict"])
def test_who_never_recomputes_needs_a_budget_for_the_prompt_alone(engine: str) -> None:
    limits = {"scheduler.enable_chunked_prefill": False, "scheduler.max_num_batched_tokens": 3}
    result = run(engine, [(0, 3, 2, 1)], 10, 4, **limits, **{"scheduler.max_num_seqs": 2})
    assert result.summary["completed"] == 1


@pytest.mark.parametrize("engine", ["paged", "no-evict"])
def test_samples_of_one_token_share_the_whole_prompt(engine: str) -> None:
    result = run(engine, [(0, 29, 1, 2)], 10, 3)
    assert (result.summary["completed"], list(result.requests["peak_blocks"])) == (1, [10])


def test_a_rejected_request_has_no_end_and_its_reason_counts_sequences() -> None:
    result = run("paged", [(0, 4, 9, 2)], 3, 4)
    assert list(result.requests["finish_s"].isna()) == [True]
    assert result.requests["reason"][0] == "needs 5 blocks (2 sequences of 12 slots), the pool has 3"


def test_outputs_that_meet_max_model_len_are_told() -> None:
    result = run("paged", [(0, 4, 9, 1), (0, 4, 2, 1)], 9, 4, **{"scheduler.max_model_len": 8})
    assert list(result.requests["output_tokens"]) == [4, 2]
    cut = "outputs cut where prompt and output together reach scheduler.max_model_len: 1"
    assert cut in result.summary["warnings"]


@pytest.mark.parametrize(
    ("prompt", "output", "size", "reserved", "internal"), [(2, 3, 1, [4, 2, 0], [0, 0, 0]), (6, 6, 4, [12], [2])]
)
def test_what_is_promised_to_samples_is_reserved_as_far_as_they_will_fill_it(
    prompt: int, output: int, size: int, reserved: list[int], internal: list[int]
) -> None:
    """Before the fork, too: the second sample's own blocks, and its copy of the prompt's last one."""
    steps = run("no-evict", [(0, prompt, output, 2)], 10, size).steps
    assert list(steps["reserved"][: len(reserved)]) == reserved
    assert list(steps["internal_frag"][: len(internal)]) == internal


def test_means_of_a_large_memory_over_long_steps_are_exact() -> None:
    """32 million slots for a thousand seconds are more slot-nanoseconds than 64 bits hold."""
    limits = {"cost.step_ms": 1e6, "scheduler.max_num_seqs": 1, "scheduler.max_model_len": 20_000_000}
    summary = run("paged", [(0, 8_000_000, 1, 1), (0, 16_000_000, 1, 1)], 2_000_000, 16, **limits).summary
    assert summary["kv"] == {**dict.fromkeys(summary["kv"], 0), "token_states": 0.375, "free": 0.625}
    assert summary["kv_saturated"] == {**dict.fromkeys(summary["kv"], 0), "token_states": 0.25, "free": 0.75}
    assert (summary["saturated_share"], summary["waiting_mean"], summary["block_utilization"]) == (0.5, 0.5, 1)
    assert summary["sharing_saving"] == 0
    assert summary["block_utilization_theory"] == pytest.approx(1)
