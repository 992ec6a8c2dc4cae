"""Policies of the user's own see requests as they are, whatever the loop: counters lag behind in the calendar alone."""

from __future__ import annotations

from typing import Any

import pytest
from support import StepCost, request

from kvsim.memory import PagedAllocator
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.vllm_v0 import VllmV0Scheduler
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.sim.run import simulate
from kvsim.workload.source import ListSource


def cheapest_to_restore(running: Any) -> Any:
    """As in docs/extend.md."""
    return min(reversed(running), key=lambda group: group.num_known_tokens)


def run_of(scheduler: Any) -> list[tuple[Any, ...]]:
    """The steps of ten requests that crowd each other out."""
    source = ListSource([request(f"r{i}", 5 + 7 * (i % 4), 12 + i, 2.0 * i) for i in range(10)])
    recorder = simulate(scheduler, StepCost(), source, record=("steps", "requests")).recorder
    assert recorder.totals.num_preemptions > 3
    return [tuple(row) for row in recorder.steps.matrix().tolist()]


@pytest.mark.parametrize("kind", [PagedScheduler, VllmV0Scheduler, VllmV1Scheduler, VllmV1AsyncScheduler])
def test_a_victim_is_chosen_by_current_counters(kind: Any) -> None:
    asked: dict[str, list[Any]] = {}

    def steps(engine_loop: str) -> list[Any]:
        seen = asked[engine_loop] = []

        def victim(running: Any) -> Any:
            seen.append([(group.request_id, group.num_known_tokens) for group in running])
            return cheapest_to_restore(running)

        free_list = "lifo" if kind is VllmV0Scheduler else "fifo"
        return run_of(kind(PagedAllocator(16, 4, free_list=free_list), victim=victim, engine_loop=engine_loop))

    assert steps("calendar") == steps("plain")
    assert asked["calendar"] == asked["plain"]


@pytest.mark.parametrize("kind", [PagedScheduler, VllmV0Scheduler])
def test_a_preemption_mode_is_chosen_by_current_counters(kind: Any) -> None:
    asked: dict[str, list[Any]] = {}

    def steps(engine_loop: str) -> list[Any]:
        seen = asked[engine_loop] = []

        def swap_long_ones(group: Any, allocator: Any) -> bool:
            seq = group.seqs[0]
            seen.append((group.request_id, seq.num_output_tokens, allocator.num_tokens(seq.seq_id)))
            return bool(seq.num_computed_tokens > 20)

        free_list = "lifo" if kind is VllmV0Scheduler else "fifo"
        allocator = PagedAllocator(16, 4, num_host_blocks=40, free_list=free_list)
        return run_of(kind(allocator, preemption=swap_long_ones, engine_loop=engine_loop))

    assert steps("calendar") == steps("plain")
    assert asked["calendar"] == asked["plain"]


@pytest.mark.parametrize("kind", [PagedScheduler, VllmV1Scheduler, VllmV1AsyncScheduler])
@pytest.mark.parametrize("limit", [27, 34, 48, 62])
def test_a_gate_sees_the_slots_that_are_filled(kind: Any, limit: int) -> None:
    def steps(engine_loop: str) -> list[Any]:
        def gate(group: Any, allocator: Any) -> bool:
            return bool(allocator.num_filled_slots < limit)

        source = ListSource([request(f"r{i}", 5 + 3 * i, 20, 2.0 * i) for i in range(8)])
        scheduler = kind(PagedAllocator(24, 8), gate=gate, engine_loop=engine_loop)
        recorder = simulate(scheduler, StepCost(), source, record=("steps", "requests")).recorder
        return [tuple(row) for row in recorder.steps.matrix().tolist()]

    assert steps("calendar") == steps("plain")
