"""Every engine's plans, executed: 50 random scenarios each, 300 in the deep suite; and mutants that must not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from attention.replayed import EventCounts, Scenario, Traits, random_scenario, replay_scenario

from kvsim.attention import Replay
from kvsim.memory.interface import BlockMove
from kvsim.memory.prefix_cache import PrefixIndex
from kvsim.request import Request
from kvsim.scheduling.no_evict import NoEvictScheduler
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.plan import StepPlan
from kvsim.scheduling.vllm_v0 import VllmV0Scheduler
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.sim.server import AsyncServer, Server
from kvsim.tokens import TokenStream
from kvsim.types import NS_PER_MS, LawViolation

PAGED = Traits(
    forks=True,
    beams=True,
    swaps=True,
    prefix_caching=True,
    choices={
        "admission": ["full_prompt", "first_chunk"],
        "engine_loop": ["calendar", "plain"],
        "long_prefill_token_threshold": [0, 0, 5],
        "preemption": ["recompute", "swap"],
        "prefill_first": [False, False, True],
        "scheduling_policy": ["fcfs", "priority"],
        "watermark": [0.0, 0.1],
    },
)

WINDOW = replace(PAGED, prefix_caching=False, windows=True)
NO_EVICT = replace(PAGED, swaps=False, choices={"engine_loop": ["calendar", "plain"], "prefill_first": [False, True]})

V0 = Traits(
    forks=True,
    beams=True,
    swaps=True,
    min_budget=100,
    memory={"free_list": "lifo"},
    choices={
        "engine_loop": ["calendar", "plain"],
        "max_model_len": [100],
        "max_paddings": [8, 256],
        "preemption": ["auto", "auto", "recompute", "swap"],
        "watermark": [0.01, 0.1],
    },
)

V1 = Traits(
    forks=True,
    prefix_caching=True,
    early_stops=True,
    null_block=True,
    memory={"free_list": "lru", "null_block": True},
    choices={
        "engine_loop": ["calendar", "plain"],
        "long_prefill_token_threshold": [0, 0, 5],
        "max_loras": [0, 1],
        "reserve_full_isl": [True, False],
        "scheduling_policy": ["fcfs", "priority"],
        "watermark": [0.0, 0.1],
    },
)

PRESSURE = ("preemptions", "resumed", "chunks")


class Engine(NamedTuple):
    """How to run an engine, and what its random scenarios must be good for: else they would prove nothing."""

    make_scheduler: Callable[..., Any]
    traits: Traits
    must_happen: tuple[str, ...]
    make_server: Callable[..., Server] = Server


FORKS = ("copies", "forks", "pruned")
ENGINES = {
    "paged": Engine(PagedScheduler, PAGED, (*PRESSURE, *FORKS, "hit_tokens", "swapped_in_blocks")),
    "paged-window": Engine(PagedScheduler, WINDOW, ("copies", "forks", "chunks")),
    "no-evict": Engine(NoEvictScheduler, NO_EVICT, (*FORKS, "hit_tokens", "chunks")),
    "vllm-v0": Engine(VllmV0Scheduler, V0, ("preemptions", "resumed", *FORKS, "swapped_in_blocks")),
    "vllm-v1": Engine(VllmV1Scheduler, V1, (*PRESSURE, "hit_tokens")),
    "vllm-v1-async": Engine(VllmV1AsyncScheduler, V1, (*PRESSURE, "hit_tokens"), AsyncServer),
}


def replay_engine(engine: Engine, seed: int, **keywords: Any) -> tuple[Replay, EventCounts]:
    scenario = random_scenario(seed, engine.traits)
    return replay_scenario(scenario, engine.make_scheduler, make_server=engine.make_server, **keywords)


def replay_all(name: str, seeds: range) -> None:
    engine = ENGINES[name]
    total = EventCounts()
    for seed in seeds:
        try:
            _, counts = replay_engine(engine, seed)
        except LawViolation as violation:
            raise AssertionError(f"{name}, seed {seed}: {violation}") from violation
        total += counts
    assert total.finished > 2 * len(seeds)
    for event in engine.must_happen:
        assert getattr(total, event) >= len(seeds) // 5, (event, total)


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_over_real_plans_is_dense_attention(engine):
    replay_all(engine, range(50))


@pytest.mark.deep
@pytest.mark.parametrize("engine", ENGINES)
def test_attention_over_many_real_plans_is_dense_attention(engine):
    replay_all(engine, range(1000, 1300))


def skip_first_copy(plan: StepPlan) -> StepPlan | None:
    """Leave out a copy that somebody needs: one into a block that a table names (a victim's copy is for nobody)."""
    named = {block_id for update in plan.table_updates for block_id in update.block_ids}
    needed = [copy for copy in plan.copies if copy.dst in named]
    return plan._replace(copies=tuple(copy for copy in plan.copies if copy != needed[0])) if needed else None


def swap_into_the_neighbour(plan: StepPlan) -> StepPlan | None:
    if not plan.swap_in:
        return None
    first, *others = plan.swap_in
    taken = {move.dst for move in others} | {first.dst}
    wrong = next(block_id for block_id in range(len(taken) + 1) if block_id not in taken)
    return plan._replace(swap_in=(BlockMove(first.src, wrong), *others))


def exchange_swapped_blocks(plan: StepPlan) -> StepPlan | None:
    """Two blocks come back in each other's place: the same keys and values, in another order."""
    if len(plan.swap_in) < 2:
        return None
    first, second, *others = plan.swap_in
    return plan._replace(swap_in=(BlockMove(second.src, first.dst), BlockMove(first.src, second.dst), *others))


def exchange_hit_blocks(plan: StepPlan) -> StepPlan | None:
    """A prefix hit of two blocks, found in the wrong order; both are full and stay so."""
    for index, update in enumerate(plan.table_updates):
        hits = [admission.num_hit_tokens for admission in plan.admitted if admission.seq is update.seq]
        if hits and hits[0] >= 2 * MAX_BLOCK_SIZE:
            first, second, *others = update.block_ids
            updates = list(plan.table_updates)
            updates[index] = update._replace(block_ids=(second, first, *others))
            return plan._replace(table_updates=tuple(updates))
    return None


def swap_as_recompute(plan: StepPlan) -> StepPlan | None:
    """A victim whose blocks went to the host is told that it lost them, and comes back with what it never computed."""
    if not any(preemption.is_swap for preemption in plan.preempted):
        return None
    return plan._replace(preempted=tuple(preemption._replace(is_swap=False) for preemption in plan.preempted))


MAX_BLOCK_SIZE = 4
"""Of random scenarios."""


class Tampered:
    """A replay that gets the first plan of a kind in a wrong form."""

    def __init__(self, replay, tamper: Callable[[StepPlan], StepPlan | None]) -> None:
        self.replay = replay
        self.tamper = tamper
        self.is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replay, name)

    def on_step(self, plan, outcome, start_ns, end_ns):
        tampered = None if self.is_done else self.tamper(plan)
        self.is_done = self.is_done or tampered is not None
        self.replay.on_step(tampered or plan, outcome, start_ns, end_ns)


def count_caught(tamper: Callable[[StepPlan], StepPlan | None], seeds: range) -> tuple[int, int]:
    """(scenarios in which there was something to tamper with, those in which the replay noticed)."""
    num_tampered = num_caught = 0
    for seed in seeds:
        seen: list[Tampered] = []

        def wrap(replay, seen=seen):
            seen.append(Tampered(replay, tamper))
            return seen[0]

        try:
            replay_engine(ENGINES["paged"], seed, wrap=wrap)
        except LawViolation:
            num_caught += 1
        num_tampered += seen[0].is_done
    return num_tampered, num_caught


def test_one_skipped_copy_never_passes():
    num_tampered, num_caught = count_caught(skip_first_copy, range(30))
    assert num_caught == num_tampered > 10


def test_one_swap_into_the_wrong_block_never_passes():
    num_tampered, num_caught = count_caught(swap_into_the_neighbour, range(35))
    assert num_caught == num_tampered > 5


@pytest.mark.parametrize("tamper", [exchange_swapped_blocks, exchange_hit_blocks, swap_as_recompute])
def test_what_attention_alone_does_not_see_never_passes(tamper):
    """Attention over the same keys in another order is the same; and positions computed twice are computed right."""
    num_tampered, num_caught = count_caught(tamper, range(35))
    assert num_caught == num_tampered > 5


def test_a_hash_without_the_parent_is_noticed(monkeypatch):
    """Blocks found by their own tokens alone, whatever stands before them."""
    add_all = PrefixIndex.add_all

    def find_anywhere(self, keys, max_blocks):
        found = []
        for index in range(min(max_blocks, keys.num_full_blocks(1 << 62))):
            run = self.root.run.branches.get(-1, {}).get(keys.link(index))
            if run is None or run.carriers[0] is None:
                break
            found.append(run.carriers[0])
        return found

    def add_anywhere(self, block_ids, after, keys, first):
        for index, block_id in enumerate(block_ids, start=first):
            add_all(self, [block_id], self.root, keys, index)
        return self.root

    monkeypatch.setattr(PrefixIndex, "add_all", add_anywhere)
    monkeypatch.setattr(PrefixIndex, "find", find_anywhere)
    monkeypatch.setattr(PrefixIndex, "end_of", lambda self, block_ids, keys: self.root)
    with pytest.raises(AssertionError, match="law 10"):
        replay_all("paged", range(50))


def promised_blocks(upstream_faults: bool) -> Scenario:
    """Priorities, and blocks that become findable when they are planned: a victim may have had its turn already."""
    lengths = [(0, 13, 9, 0), (1, 2, 8, 1), (3, 3, 9, 3), (3, 2, 6, 3)]
    requests = [
        Request(f"r{index}", at * NS_PER_MS, TokenStream.from_segment(1 + index, prompt), output, 12, priority=priority)
        for index, (at, prompt, output, priority) in enumerate(lengths)
    ]
    scheduler = {
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 7,
        "max_num_seqs": 4,
        "long_prefill_token_threshold": 3,
        "reserve_full_isl": False,
        "upstream_faults": upstream_faults,
    }
    return Scenario(requests, 18, 2, 0, V1.memory | {"enable_prefix_caching": True}, scheduler)


def test_the_original_hits_blocks_that_were_never_computed():
    """A defect of the engine that is modelled: the replay shows it, and shows that it is mended by default."""
    with pytest.raises(LawViolation, match=r"sequence r2, position 4: .* by nan"):
        replay_scenario(promised_blocks(upstream_faults=True), VllmV1Scheduler)
    _, counts = replay_scenario(promised_blocks(upstream_faults=False), VllmV1Scheduler)
    assert counts.finished == 4
    assert counts.preemptions > 0
