"""The ledger by hand: where slots are, and what hindsight says of them."""

from __future__ import annotations

import pandas as pd
import pytest
from support import StepCost, play, request, text

from kvsim.memory.paged import PagedAllocator
from kvsim.metrics.export import step_columns
from kvsim.metrics.ledger import Parts, check_parts
from kvsim.request import Sampling
from kvsim.scheduling.no_evict import NoEvictScheduler
from kvsim.scheduling.vllm_v0 import VllmV0Scheduler
from kvsim.sim.run import simulate
from kvsim.types import LawViolation
from kvsim.workload.source import ListSource

PARTS = ["token_states", "reserved", "internal_frag", "external_frag", "cached_idle", "free"]


def test_an_unfinished_tail_is_reserved_until_its_last_block():
    """(P, O) = (3, 6) stores 8 = two blocks of 4: nothing is ever internal waste."""
    out = play([request("a", 3, 6)], num_blocks=3, block_size=4)
    assert out.steps.token_states.tolist() == [3, 4, 5, 6, 7, 8]
    assert out.steps.reserved.tolist() == [1, 0, 3, 2, 1, 0]
    assert out.steps.internal_frag.tolist() == [0] * 6


def test_the_end_of_the_last_block_is_internal():
    """(P, O) = (3, 4) stores 6: of the second block two slots will never be filled."""
    out = play([request("a", 3, 4)], num_blocks=3, block_size=4)
    assert out.steps.internal_frag.tolist() == [0, 0, 2, 2]
    assert out.steps.reserved.tolist() == [1, 0, 1, 0]


def test_hindsight_of_an_abort():
    """Aborted with 6 stored: slots 6 and 7 of the second block were never to be filled, from the step that took it."""
    out = play([request("a", 3, 20, abort_at=4)], num_blocks=6, block_size=4)
    assert out.steps.token_states.tolist() == [3, 4, 5, 6]
    assert out.steps.reserved.tolist() == [1, 0, 1, 0]
    assert out.steps.internal_frag.tolist() == [0, 0, 2, 2]
    assert out.summary["kv"]["internal_frag"] == pytest.approx((2 + 2) / (4 * 24))
    assert out.summary["num_aborted"] == 1


def test_a_later_preemption_is_not_hindsight():
    out = play([request("A", 8, 9), request("B", 8, 9)], num_blocks=4, block_size=4)
    assert out.summary["num_preemptions"] == 1
    assert out.steps.internal_frag.tolist()[0] == 0


def test_shared_prefix_slots_count_once():
    requests = [
        request("X", text(1, 12), 1),
        request("Y", text(1, 12, (2, 4)), 1, at=10),
        request("Z", text(1, 12, (3, 4)), 1, at=10),
    ]
    out = play(requests, num_blocks=9, block_size=4, enable_prefix_caching=True)
    both = out.steps.iloc[-1]
    assert both.num_running == 2
    assert both.token_states == 12 + 4 + 4
    assert both.used_blocks == 5
    assert out.summary["sharing_saving"] > 0


def test_cached_idle_is_neither_used_nor_free():
    requests = [request("X", text(1, 12), 1), request("Y", 4, 1, at=10)]
    out = play(requests, num_blocks=6, block_size=4, enable_prefix_caching=True)
    assert out.steps.iloc[-1][PARTS].tolist() == [4, 0, 0, 0, 12, 8]


def test_parts_that_do_not_sum_to_the_capacity_are_a_violation():
    with pytest.raises(LawViolation, match="law 12: step 3"):
        check_parts(Parts(1, 0, 0, 0, 0, 2), 4, 3)


def test_parts_sum_to_the_capacity_at_every_step():
    requests = [request(f"r{index}", 5 + index, 9, at=index / 3) for index in range(12)]
    out = play(requests, num_blocks=9, block_size=4, enable_prefix_caching=True)
    assert set(out.steps[PARTS].sum(axis=1)) == {36}


def test_time_weighted_means():
    out = play([request("a", 4, 3)], num_blocks=4, block_size=4, cost=StepCost(10.0))
    assert out.summary["running_mean"] == 1
    assert out.summary["kv"]["token_states"] == pytest.approx((4 + 5 + 6) / 3 / 16)
    assert out.summary["block_utilization"] == pytest.approx((4 + 5 + 6) / (4 + 8 + 8))


def test_columns_are_integers_and_floats():
    out = play([request("a", 4, 3)], num_blocks=4, block_size=4)
    kinds = {column.dtype.kind for column in step_columns(out.simulation.recorder).values()}
    assert kinds == {"i", "f"}


def test_promises_of_no_evict_are_reserved_or_waste():
    """(P, O) = (3, 2), at most 10: promised are 12 slots in 3 blocks of 4, and 4 of them will ever be filled."""
    out = play([request("a", 3, 2, max_output_len=10)], num_blocks=5, block_size=4, scheduler=NoEvictScheduler)
    assert out.steps[PARTS].values.tolist() == [[3, 1, 8, 0, 0, 8], [4, 0, 8, 0, 0, 8]]


def test_promises_are_kept_from_idle_cached_blocks():
    requests = [request("X", text(1, 8), 1), request("Y", 3, 2, at=10, max_output_len=14)]
    out = play(requests, num_blocks=5, block_size=4, scheduler=NoEvictScheduler, enable_prefix_caching=True)
    assert out.steps.iloc[-1][PARTS].tolist() == [4, 0, 12, 0, 4, 0]


@pytest.mark.parametrize("lens", [(3, 3, 3), (2, 4, 3)])
def test_samples_that_end_early_share_the_empty_slots_of_their_prompt(lens):
    """Four tokens in two blocks of three, aborted as soon as they have forked: two empty slots, for all together."""
    out = play(
        [request("a", 4, max(lens), sampling=Sampling(n=3), sample_lens=lens, abort_at=1)], num_blocks=10, block_size=3
    )
    assert out.steps.token_states.tolist() == [4]
    assert out.steps.reserved.tolist() == [0]
    assert out.steps.internal_frag.tolist() == [2]


def test_blocks_that_leak_are_internal():
    """One sample of p ends early; the other is preempted alone, with 17 tokens stored.

    It comes back with the 5 blocks of its 18 tokens, and two references to each: those are lost. Then z runs alone.
    """
    allocator = PagedAllocator(11, 4, free_list="lifo", upstream_faults=True)
    engine = VllmV0Scheduler(
        allocator, upstream_faults=True, max_num_batched_tokens=64, max_model_len=64, watermark=0.0
    )
    p = request("p", 4, 20, sampling=Sampling(n=2), sample_lens=(2, 20))
    load = [request("a", 8, 15), p, request("z", 5, 1, at=100)]
    simulation = simulate(engine, StepCost(), ListSource(load), check=True)
    steps = pd.DataFrame(step_columns(simulation.recorder))
    assert set(steps[PARTS].sum(axis=1)) == {44}
    assert allocator.num_leaked_blocks == 5
    last = steps.iloc[-1]
    assert last.used_blocks == 5 + 2
    assert last[PARTS].tolist() == [5, 0, 5 * 4 + 3, 0, 0, 16]
