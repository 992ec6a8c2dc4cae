"""Figures of a run that need more than one request: goodput, priorities, gaps across a pause."""

from __future__ import annotations

import pytest
from support import StepCost, play, request

from kvsim.metrics.summary import Goals, summarise
from kvsim.runs import Options, run

CHECKED = Options(plots=False, check=True)


def summary_with(out, goals):
    return summarise(
        out.simulation.recorder,
        end_ns=out.simulation.end_ns,
        num_requests=out.simulation.num_requests,
        goals=goals,
        facts={},
    )


def test_table_bytes_are_those_of_the_entries_that_the_scenario_has():
    scenario = {
        "engine": "paged",
        "model": "llama-3.1-8b",
        "gpu": "h100-80gb",
        "memory": {"num_gpu_blocks_override": 100},
        "workload": {"requests": [{"prompt_tokens": 33, "output_tokens": 2}]},
        "cost": {"type": "kernels"},
    }
    # A prompt of 33 tokens has a table of 3 blocks of 16; the second token's slot is in the third.
    for entry_bytes in (4, 8):
        summary = run(scenario, **{"cost.table_entry_bytes": entry_bytes}).summary
        assert summary["block_table_updates"] == 3
        assert summary["block_table_upload_bytes"] == 3 * entry_bytes
        assert summary["block_table_peak_bytes"] == 3 * entry_bytes


def two_priorities():
    requests = [request("a", 4, 3, priority=1), request("b", 4, 3, priority=0), request("c", 4, 1, priority=0)]
    return play(
        requests, num_blocks=40, block_size=4, max_num_seqs=1, scheduling_policy="priority", cost=StepCost(10.0)
    )


def test_goodput_counts_requests_that_meet_every_goal():
    out = two_priorities()
    summary = summary_with(out, Goals(ttft_ns=40_000_000))
    assert out["b"].ttft_ms == 10
    assert out["c"].ttft_ms == 40
    assert out["a"].ttft_ms == 50
    assert summary["request_goodput"] == pytest.approx(2 / summary["duration"])
    assert summary_with(out, Goals())["request_goodput"] is None


def test_a_one_token_output_cannot_miss_a_tpot_goal():
    summary = summary_with(two_priorities(), Goals(tpot_ns=1))
    assert summary["request_goodput"] == pytest.approx(1 / summary["duration"])


def test_breakdown_by_priority():
    summary = summary_with(two_priorities(), Goals(ttft_ns=40_000_000))
    assert summary["by_priority"]["0"] == {
        "completed": 2,
        "mean_ttft_ms": 25.0,
        "mean_tpot_ms": 10.0,
        "share_meeting_slo": 1.0,
    }
    assert summary["by_priority"]["1"]["share_meeting_slo"] == 0


def test_gaps_of_a_preempted_request_span_the_pause():
    """K07: B emits token 1 at 1 ms, waits for A, and token 2 comes with its second prefill at 10 ms: a gap of 9."""
    out = play([request("A", 8, 9), request("B", 8, 9)], num_blocks=4, block_size=4)
    out.simulation.recorder.gaps.table.take_chunk()
    gaps = out.simulation.recorder.gaps.table.matrix()
    longest = gaps[gaps[:, 0].argmax()]
    assert longest.tolist() == [9_000_000, 1]
    assert out.summary["num_itl"] == 16
    assert out.summary["mean_itl_ms"] == pytest.approx((8 + 16) / 16)


def test_every_token_but_the_first_has_a_gap():
    requests = [request(f"r{index}", 3 + index % 5, 2 + index % 7, at=index / 4) for index in range(30)]
    out = play(requests, num_blocks=12, block_size=4, preemption="recompute")
    assert out.summary["num_preemptions"] > 0
    assert out.summary["num_itl"] == sum(out.requests.output_tokens - 1)
    spans = (out.requests.e2el_ms - out.requests.ttft_ms).sum()
    assert out.summary["mean_itl_ms"] * out.summary["num_itl"] == pytest.approx(spans)


def beams(engine):
    return {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": 60},
        "scheduler": {"max_model_len": 200},
        "workload": {
            "requests": [
                {"id": "A", "prompt_tokens": 18, "output_tokens": 30, "beam_width": 3},
                {"id": "B", "arrival_s": 0.001, "prompt_tokens": 92, "output_tokens": 4, "beam_width": 3},
            ]
        },
    }


@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
def test_a_beams_inherited_tokens_are_emitted_once(engine):
    """And hindsight of a pruned beam reaches back to its own slots only: nothing is reserved less than once."""
    result = run(beams(engine), options=CHECKED)
    assert sum(result.requests.output_tokens) == result.summary["total_output_tokens"]
    assert result.steps.reserved.min() >= 0


def test_hindsight_of_an_abort_in_asynchronous_scheduling():
    """The step in flight gave A a second block: it is waste in that step, not in the one before."""
    request = {"id": "A", "prompt_tokens": 16, "output_tokens": 40, "abort_s": 0.001}
    scenario = {
        "engine": "vllm-v1-async",
        "memory": {"num_gpu_blocks_override": 60},
        "scheduler": {"max_model_len": 200},
        "workload": {"requests": [request]},
    }
    steps = run(scenario, options=CHECKED).steps
    assert steps.reserved.tolist() == [0, 0]
    assert steps.internal_frag.tolist() == [0, 15]


def test_who_still_runs_at_the_horizon_has_a_peak():
    out = play([request("A", 4, 50)], num_blocks=20, block_size=4, horizon_ms=5.5)
    assert out["A"].peak_blocks == 3
