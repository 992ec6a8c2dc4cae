"""Limits met exactly, and what a plan says beside its decisions."""

from __future__ import annotations

import pytest
from scheduling.stepping import drive, paged, request
from scheduling.test_continuous_engines import most_advanced
from scheduling.test_static import request as static_request
from scheduling.test_static import run as run_static
from scheduling.test_static import static, step
from scheduling.test_vllm_v0 import make, start
from scheduling.test_vllm_v0 import request as v0_request

import kvsim
from kvsim.request import Sampling
from kvsim.scheduling.continuous import LivelockError
from kvsim.types import ScenarioError


def test_a_static_batch_holds_as_many_samples_as_it_has_places() -> None:
    scheduler = static(num_slots=100, max_num_seqs=3)
    assert scheduler.submit(static_request("A", 2, 3, sampling=Sampling(n=3))) is None
    rejection = scheduler.submit(static_request("B", 2, 3, sampling=Sampling(n=4)))
    assert rejection is not None
    assert "needs 4 places, max_num_seqs is 3" in rejection.reason
    assert [emitted for emitted, _ in run_static(scheduler)] == [3, 3, 3]


def test_a_static_batch_resumes_nobody_and_finds_nothing_cached() -> None:
    scheduler = static(max_num_seqs=2)
    scheduler.submit(static_request("A", 2, 3))
    scheduler.submit(static_request("B", 2, 1))
    plan, _ = step(scheduler)
    assert [admission[1:] for admission in plan.admitted] == [(0, False), (0, False)]


def test_a_prompt_without_budget_left_waits_for_the_next_step() -> None:
    scheduler = static(max_num_seqs=2, max_num_batched_tokens=5)
    for name in "AB":
        scheduler.submit(static_request(name, 5, 2))
    chunks = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        chunks.append([(chunk.seq.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.prefills])
    # A decodes while B is computed: 1 + 4 tokens, and then the last one.
    assert chunks[:3] == [[("A", 0, 5)], [("B", 0, 4)], [("B", 4, 1)]]


def test_an_unknown_preemption_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"preemption.*'swop'.*recompute"):
        paged(4, 4, preemption="swop")


def test_what_a_request_may_store_ends_with_the_model() -> None:
    """The last token of a text is never stored: 9 tokens at most are 8 slots, two blocks of 4."""
    scheduler = paged(2, 4, max_model_len=9, watermark=0.0)
    run = drive(scheduler, [request("a", 6, 50)])
    assert not run.rejected
    assert run.finished_at == {"a": 3}
    assert drive(paged(2, 4, max_model_len=10, watermark=0.0), [request("a", 6, 50)]).rejected


def test_a_livelock_is_claimed_after_as_many_preemptions_as_it_says() -> None:
    """1,000 in a row, and 10 more for each request."""
    scheduler = paged(4, 4, victim=most_advanced, admission="first_chunk", long_prefill_token_threshold=2)
    with pytest.raises(LivelockError, match=r"^livelock: 1021 preemptions in a row"):
        drive(scheduler, [request("A", 14, 2), request("B", 14, 2)], max_steps=10_000)


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_table_entries_are_counted_as_they_are_listed(num_host_blocks: int) -> None:
    scheduler = make(12, num_host_blocks=num_host_blocks)
    run = start(scheduler, *(v0_request(name, 9, 8, 8) for name in "abc")).to_the_end()
    assert run.preemptions
    for plan in run.plans:
        assert plan.shape.num_table_rows == len(plan.table_updates)
        assert plan.shape.num_table_updates == sum(len(update.block_ids) for update in plan.table_updates)


def test_a_victim_s_next_tokens_are_what_memory_was_wanted_for() -> None:
    run = start(make(6), v0_request("a", 8, 9), v0_request("b", 8, 9)).to_the_end()
    refused = [plan for plan in run.plans if plan.preempted]
    assert refused
    assert all(plan.waits_for_memory and plan.head_slots == 4 for plan in refused)


@pytest.mark.parametrize("engine", ["vllm-v1", "vllm-v1-async", "orca-max", "static", "no-evict", "paged"])
def test_nobody_is_swapped_without_host_memory(engine: str) -> None:
    lengths = {"type": "uniform", "prompt": [10, 60], "output": [10, 60]}
    workload = {"num_requests": 20, "arrivals": {"type": "batch"}, "lengths": lengths}
    result = kvsim.run(
        {
            "engine": engine,
            "memory": {"num_gpu_blocks_override": 30},
            "scheduler": {"max_model_len": 128},
            "workload": workload,
        }
    )
    assert set(result.steps["num_swapped"]) == {0}
