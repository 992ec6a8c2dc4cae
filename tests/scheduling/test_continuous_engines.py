"""What is special to one engine or one policy: promises, priorities, gates, faults, the asynchronous example."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling.scenarios import draw_scenario
from scheduling.stepping import drive, paged, request

from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.memory.paged import PagedAllocator
from kvsim.request import Group, Request, Sequence
from kvsim.scheduling.builder import OutcomeBuilder, PlanBuilder, quiet_plan
from kvsim.scheduling.continuous import LivelockError
from kvsim.scheduling.no_evict import NoEvictScheduler
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.plan import Admission, PrefillChunk, StepOutcome, StepPlan, StepShape
from kvsim.scheduling.policies import Running
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.tokens import TokenStream
from kvsim.types import ScenarioError

LOOPS = pytest.mark.parametrize("engine_loop", ["calendar", "plain"])


def v1(num_usable: int, block_size: int, *, is_async: bool = False, caching: bool = True, **keywords: Any) -> Any:
    allocator = PagedAllocator(
        num_usable + 1, block_size, enable_prefix_caching=caching, free_list="lru", null_block=True
    )
    return (VllmV1AsyncScheduler if is_async else VllmV1Scheduler)(allocator, **keywords)


@LOOPS
def test_no_evict_keeps_its_promises(engine_loop: str) -> None:
    scheduler = NoEvictScheduler(PagedAllocator(4, 4), engine_loop=engine_loop)
    run = drive(scheduler, [request("A", 4, 5), request("B", 4, 5), request("C", 4, 5)])
    # Each may store 8 tokens, 2 blocks: two run at once, the third waits for both, which end together.
    assert run.preempted == []
    assert run.finished_at == {"A": 5, "B": 5, "C": 10}
    assert [plan.num_running for plan in run.plans[:6]] == [2, 2, 2, 2, 2, 1]
    assert run.plans[0].head_wait == "promises"


@settings(max_examples=20)
@given(seed=st.integers(0, 100_000))
def test_no_evict_never_preempts(seed: int) -> None:
    scenario = draw_scenario(seed, "no-evict")
    scheduler = scenario.scheduler("calendar")
    assert isinstance(scheduler, NoEvictScheduler)
    for _, arrived in scenario.arrivals:
        scheduler.submit(arrived)
    while scheduler.has_work:
        plan = scheduler.schedule(0)
        assert plan.preempted == ()
        assert scheduler.num_promised_blocks <= scheduler.allocator.num_blocks
        scheduler.complete(plan)


@LOOPS
@pytest.mark.parametrize("engine", ["paged", "v1"])
def test_priorities_order_the_queue_and_the_victims(engine: str, engine_loop: str) -> None:
    keywords: dict[str, Any] = {"scheduling_policy": "priority", "engine_loop": engine_loop, "max_num_seqs": 2}
    scheduler = paged(6, 4, **keywords) if engine == "paged" else v1(6, 4, caching=False, **keywords)
    requests = [request("low", 8, 9, priority=5), request("high", 8, 9, priority=1), request("mid", 8, 9, priority=3)]
    run = drive(scheduler, requests)
    admitted = [admission.seq.request.request_id for plan in run.plans for admission in plan.admitted]
    assert admitted[:2] == ["high", "mid"]
    assert sorted(run.finished_at, key=lambda name: run.finished_at[name]) == ["high", "mid", "low"]
    # At step 6 both need a fourth block of six.
    assert run.preempted[0] == "mid"


def test_a_request_that_fits_nowhere_is_rejected_with_both_numbers() -> None:
    scheduler = paged(10, 4, max_model_len=30, max_num_batched_tokens=16, enable_chunked_prefill=False, max_num_seqs=2)
    reasons = drive(
        scheduler,
        [request("long", 30, 1), request("late", 12, 6), request("wide", 4, 2, n=3), request("fine", 12, 5)],
    ).rejected
    assert "30 tokens" in reasons["long"]
    assert "max_model_len is 30" in reasons["long"]
    assert "17 tokens" in reasons["late"]
    assert "max_num_batched_tokens is 16" in reasons["late"]
    assert "3 sequences" in reasons["wide"]
    assert "max_num_seqs is 2" in reasons["wide"]
    assert "fine" not in reasons
    assert paged(6, 4).submit(request("tree", 6, 5, n=3)) is not None, "needs 1 + 3 x 2 blocks at its end"
    assert paged(7, 4).submit(request("tree", 6, 5, n=3)) is None


@LOOPS
def test_the_output_ends_at_max_model_len(engine_loop: str) -> None:
    scheduler = paged(10, 4, max_model_len=10, engine_loop=engine_loop)
    assert drive(scheduler, [request("a", 6, 50)]).finished_at == {"a": 4}


def most_advanced(running: Running) -> Group:
    """A bad policy: whoever has done most loses it."""
    return max(running, key=lambda group: group.seqs[0].num_computed_tokens)


@LOOPS
def test_a_livelock_ends_with_an_explanation(engine_loop: str) -> None:
    scheduler = paged(
        4, 4, victim=most_advanced, admission="first_chunk", long_prefill_token_threshold=2, engine_loop=engine_loop
    )
    with pytest.raises(LivelockError, match=r"request '[AB]', which needs 4 blocks for 14 tokens, the pool has 4"):
        drive(scheduler, [request("A", 14, 2), request("B", 14, 2)], max_steps=10_000)


def test_a_gate_is_asked() -> None:
    asked: list[str] = []

    def one_at_a_time(group: Group, allocator: Any) -> bool:
        asked.append(group.request_id)
        return allocator.usage().num_used == 0

    scheduler = paged(40, 4, gate=one_at_a_time)
    run = drive(scheduler, [request("A", 4, 3), request("B", 4, 3)])
    assert run.finished_at == {"A": 3, "B": 6}
    assert run.plans[0].head_wait == "gate"


@LOOPS
def test_recompute_of_forked_samples_shares_the_prompt_again(engine_loop: str) -> None:
    scheduler = paged(8, 4, engine_loop=engine_loop)
    requests = [request("A", 4, 14), request("B", 8, 9, n=2)]
    run = drive(scheduler, requests)
    assert set(run.preempted) == {"B"}
    assert run.finished_at.keys() == {"A", "B"}
    forks = [fork for outcome in run.outcomes for fork in outcome.forks]
    assert len(forks) == 2, "once after the prefill, once after the recompute"
    assert sum(outcome.num_emitted_tokens for outcome in run.outcomes) == 14 + 2 * 9


@LOOPS
def test_beams_branch_and_are_pruned(engine_loop: str) -> None:
    scheduler = paged(60, 4, engine_loop=engine_loop)
    run = drive(scheduler, [request("a", 6, 12, beam_width=4, seed=3)])
    assert run.finished_at == {"a": 12}
    emitted = [outcome.num_emitted_tokens for outcome in run.outcomes]
    assert emitted == [1] + [4] * 11
    num_forks = sum(len(outcome.forks) for outcome in run.outcomes)
    num_pruned = sum(len(outcome.pruned) for outcome in run.outcomes)
    assert num_forks - num_pruned == 3
    assert num_pruned > 0
    assert scheduler.allocator.num_free_blocks == 60


@LOOPS
@pytest.mark.parametrize(("reserve", "running"), [(28, 2), (12, 4)])
def test_a_reservation_is_taken_whole_and_never_grows(reserve: int, running: int, engine_loop: str) -> None:
    def slots(request: Request) -> int:
        return reserve

    allocator = ContiguousAllocator(64, placement="first_fit")
    scheduler = PagedScheduler(allocator, reservation=slots, engine_loop=engine_loop)
    run = drive(scheduler, [request(name, 4, 10) for name in "ABCD"])
    assert [plan.num_running for plan in run.plans] == [running] * len(run.plans)
    assert run.finished_at["D"] == 10 * 4 // running
    assert not any(plan.grown or plan.preempted for plan in run.plans)


def test_every_sample_of_v1_is_a_request_of_its_own() -> None:
    scheduler = v1(20, 4)
    scheduler.submit(request("a", 9, 3, n=2))
    plan = scheduler.schedule(0)
    assert [(admission.seq.sample, admission.num_hit_tokens) for admission in plan.admitted] == [(0, 0), (1, 8)]
    scheduler.complete(plan)
    assert drive(scheduler).finished_at == {"a": 2}
    scheduler = v1(20, 4)
    assert drive(scheduler, [request("a", 9, 3, n=2)]).finished_at == {"a": 3}
    with pytest.raises(ScenarioError, match="beam search"):
        scheduler.submit(request("b", 9, 3, beam_width=2))
    with pytest.raises(ScenarioError, match="'swap' is unknown"):
        v1(20, 4, preemption="swap")


def test_the_lora_limit_lets_others_pass() -> None:
    scheduler = v1(40, 4, max_loras=1)
    requests = [request("a", 4, 5, lora="x"), request("b", 4, 5, lora="y"), request("c", 4, 5)]
    assert drive(scheduler, requests).finished_at == {"a": 5, "c": 5, "b": 10}


@LOOPS
@pytest.mark.parametrize(("upstream_faults", "hit"), [(True, 16), (False, 12)])
def test_blocks_that_were_never_computed_are_hit_only_as_a_fault(
    upstream_faults: bool, hit: int, engine_loop: str
) -> None:
    scheduler = v1(
        6,
        4,
        scheduling_policy="priority",
        max_num_batched_tokens=10,
        long_prefill_token_threshold=4,
        upstream_faults=upstream_faults,
        reserve_full_isl=False,
        engine_loop=engine_loop,
    )
    # Chunks of `low`: 10, 4, 4 tokens. With the third its fourth block is full and registered; then `urgent`, behind
    # it, needs a block, and `low` loses that chunk: tokens 14 and 15 are never computed.
    run = drive(scheduler, [request("low", 19, 1, priority=9), request("urgent", 4, 3, 1, priority=0)])
    assert run.preempted == ["low"]
    assert run.num_recomputed == 14
    assert run.hits == {"low": [0, hit], "urgent": [0]}
    assert run.finished_at == {"urgent": 4, "low": 5}


def test_an_unforeseen_stop_token_ends_a_request_early() -> None:
    scheduler = v1(10, 4)
    assert drive(scheduler, [request("a", 4, 3, max_output_len=20)]).finished_at == {"a": 3}


class AsyncRun:
    """Schedules, then applies the plan before; keeps plans and outcomes."""

    def __init__(self, scheduler: VllmV1AsyncScheduler) -> None:
        self.scheduler = scheduler
        self.plans: list[StepPlan] = []
        self.outcomes: list[StepOutcome] = []
        self.free: list[tuple[int, int]] = []

    def step(self) -> None:
        allocator = self.scheduler.allocator
        self.plans.append(self.scheduler.schedule(len(self.plans)))
        after_plan = allocator.num_free_blocks
        if len(self.plans) > 1:
            self.outcomes.append(self.scheduler.complete(self.plans[-2]))
        self.free.append((after_plan, allocator.num_free_blocks))


@LOOPS
def test_the_worked_example_of_asynchronous_scheduling(engine_loop: str) -> None:
    prompt = TokenStream.from_ids(range(1, 9))
    scheduler = v1(8, 4, is_async=True, max_num_batched_tokens=16, engine_loop=engine_loop)
    run = AsyncRun(scheduler)
    scheduler.submit(request("a", 8, 12, prompt=prompt))
    scheduler.submit(request("b", 8, 12, prompt=prompt))
    run.step()
    scheduler.submit(request("c", 9, 12, prompt=TokenStream.from_ids([1, 2, 3, 4, 5, 6, 7, 9, 9])))
    for _ in range(13):
        run.step()
    assert [admission.num_hit_tokens for plan in run.plans[:2] for admission in plan.admitted] == [0, 4, 4]
    assert [preemption.seq.request.request_id for preemption in run.plans[5].preempted] == ["c"]
    assert [seq.request.request_id for seq in run.outcomes[4].delivered] == ["c"]
    assert run.outcomes[4].delivered[0].num_tokens == 13
    assert [seq.request.request_id for seq in run.plans[12].skipped] == ["a"]
    assert run.outcomes[11].finished_requests == ("a",)
    assert run.free[12] == (0, 3)
    assert (run.plans[12].num_running, run.plans[12].num_waiting) == (2, 1)
    assert [admission.seq.request.request_id for admission in run.plans[13].admitted] == ["c"]


@LOOPS
@pytest.mark.parametrize(("max_output_len", "num_plans"), [(3, 3), (9, 4)])
def test_a_stop_token_costs_a_superfluous_step(max_output_len: int, num_plans: int, engine_loop: str) -> None:
    scheduler = v1(8, 4, is_async=True, engine_loop=engine_loop)
    run = AsyncRun(scheduler)
    scheduler.submit(request("a", 6, 3, max_output_len=max_output_len))
    for _ in range(5):
        run.step()
    assert sum(not plan.is_empty for plan in run.plans) == num_plans
    assert sum(outcome.num_emitted_tokens for outcome in run.outcomes) == 3
    assert scheduler.num_discarded_entries == num_plans - 3
    assert not scheduler.has_work
    assert scheduler.allocator.num_free_blocks == 8


@LOOPS
def test_an_abort_while_two_steps_are_planned(engine_loop: str) -> None:
    scheduler = v1(8, 4, is_async=True, engine_loop=engine_loop)
    run = AsyncRun(scheduler)
    for name in "ab":
        scheduler.submit(request(name, 6, 9))
    for _ in range(3):
        run.step()
    last, plan = run.plans[-1], scheduler.schedule(3)
    (aborted,) = scheduler.abort("a")
    assert aborted.num_output_tokens == 2
    assert scheduler.complete(last).num_emitted_tokens == 1
    assert scheduler.complete(plan).num_emitted_tokens == 1
    assert scheduler.num_discarded_entries == 2
    scheduler.allocator.audit()


def test_a_gate_that_never_opens_is_named() -> None:
    def never(group: Any, allocator: Any) -> bool:
        return False

    scheduler = paged(2, 4, gate=never)
    scheduler.submit(request("a", 4, 3))
    assert scheduler.schedule(0).head_wait == "gate"
    assert scheduler.describe_block() == "request 'a' is waiting, and the gate (never) does not let it in"


def test_a_plan_in_which_nothing_runs_needs_no_completion() -> None:
    scheduler = paged(2, 4, gate=lambda group, allocator: False)
    scheduler.submit(request("a", 4, 3))
    assert scheduler.schedule(0).is_empty
    scheduler.gate = None
    plan = scheduler.schedule(1)
    assert scheduler.complete(plan).num_emitted_tokens == 1
    assert [seq.num_output_tokens for seq in scheduler.live_sequences()] == [1]


def rivals(scheduler: Any) -> Any:
    """Two requests that tie in everything, and fit one at a time."""
    return drive(scheduler, [request("A", 14, 2), request("B", 14, 2)], max_steps=300)


@LOOPS
def test_rivals_of_equal_priority_both_finish_unless_the_fault_is_asked_for(engine_loop: str) -> None:
    keywords: dict[str, Any] = {
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 2,
        "engine_loop": engine_loop,
    }
    assert rivals(paged(4, 4, admission="first_chunk", **keywords)).finished_at.keys() == {"A", "B"}
    keywords |= {"reserve_full_isl": False, "caching": False}
    assert rivals(v1(4, 4, **keywords)).finished_at.keys() == {"A", "B"}
    with pytest.raises(AssertionError, match="not done after 300 steps"):
        rivals(v1(4, 4, upstream_faults=True, **keywords))


def test_quiet_plan_has_every_field() -> None:
    grown = (Sequence(5, request("r", 16, 8)),)
    plan = quiet_plan(7, 4, 3, 40, grown, 9, (2, 3, 1, 0), (True, 32, "blocks"))
    shape = StepShape(3, 40, num_table_updates=1, num_table_rows=1, num_table_entries=9, num_alloc_decisions=1)
    assert plan == StepPlan(
        7,
        shape,
        is_decode_tick=True,
        grown=grown,
        num_running=2,
        num_sequences=3,
        num_waiting=1,
        num_swapped=0,
        waits_for_memory=True,
        head_slots=32,
        head_wait="blocks",
        num_crossed=1,
        tick=4,
        is_quiet=True,
    )


@LOOPS
def test_refused_head_is_let_in_when_there_is_room_or_another_head(engine_loop: str) -> None:
    scheduler = paged(7, 4, engine_loop=engine_loop, scheduling_policy="priority")

    def step() -> tuple[list[str], str, int]:
        plan = scheduler.schedule(0)
        scheduler.complete(plan)
        return [one.seq.request.request_id for one in plan.admitted], plan.head_wait, plan.head_slots

    scheduler.submit(request("a", 16, 12))
    assert step() == (["a"], "", 0)
    scheduler.submit(request("b", 14, 8))
    assert [step() for _ in range(3)] == [([], "blocks", 14)] * 3, "4 blocks, and 2 are free"
    scheduler.submit(request("c", 3, 8, priority=-1))
    assert step() == (["c"], "blocks", 14), "a more urgent head that fits"
    assert step() == ([], "blocks", 14)
    scheduler.abort("a")
    assert step() == (["b"], "", 0)
    scheduler.abort("c")
    scheduler.submit(request("d", 9, 2))
    scheduler.submit(request("e", 13, 2))
    assert step() == (["d"], "blocks", 13)
    scheduler.abort("e")
    assert step() == ([], "", 0), "nobody waits"


class _OpensLater:
    """A gate that lets nobody in at first."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, group: Group, allocator: Any) -> bool:
        self.num_asked += 1
        return self.num_asked % 5 > 1


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"prefill_first": True},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 36},
        {"admission": "first_chunk", "max_num_batched_tokens": 9},
        {"max_num_batched_tokens": 9},
        {"max_num_seqs": 4, "watermark": 0.1},
        {"enable_prefix_caching": True},
        {"preemption": "swap", "num_host_blocks": 12},
        {"scheduling_policy": "priority"},
        {"gate": _OpensLater},
    ],
    ids=lambda keywords: "-".join(keywords) or "default",
)
def test_heads_wait_for_the_same_in_both_loops(keywords: dict[str, Any]) -> None:
    """In a pool short of blocks each plan says the same of the head of the line, and lets in the same requests."""

    def heads(seed: int, engine_loop: str) -> list[tuple[Any, ...]]:
        rng = Random(seed)
        made = {name: value() if value is _OpensLater else value for name, value in keywords.items()}
        scheduler = paged(16, 4, engine_loop=engine_loop, **made)
        seen = []
        for number in range(100):
            if rng.random() < 0.35:
                lengths = rng.randint(1, rng.choice((3, 30))), rng.randint(1, 20)
                priority, source = rng.randint(0, 2), rng.randint(1, 3)
                scheduler.submit(
                    request(str(number), *lengths, priority=priority, source=source, n=rng.choice((1, 1, 2)))
                )
            if rng.random() < 0.05 and scheduler.groups:
                scheduler.abort(rng.choice(list(scheduler.groups)))
            if scheduler.has_work:
                plan = scheduler.schedule(number)
                admitted = [one.seq.request.request_id for one in plan.admitted]
                seen.append((admitted, plan.num_waiting, plan.waits_for_memory, plan.head_slots, plan.head_wait))
                scheduler.complete(plan)
        return seen

    waits = Counter()
    for seed in range(30):
        calendar = heads(seed, "calendar")
        assert calendar == heads(seed, "plain")
        waits.update(head_wait for *_, head_wait in calendar)
    assert waits["blocks"] > 50 or "gate" in keywords


def test_built_plans_and_outcomes_have_every_field() -> None:
    seq = Sequence(5, request("r", 16, 8))
    step = PlanBuilder(7, 4, 100, 50)
    step.num_bulk = 2
    step.prefills.append(PrefillChunk(seq, 3, 13, True))
    step.admitted.append(Admission(seq, 3, False))
    step.waits_for_memory, step.head_slots, step.head_wait = True, 32, "blocks"
    assert step.build(40, 9, None, (), (2, 3, 1, 0)) == StepPlan(
        7,
        StepShape(2, 40, ((3, 13),), num_table_entries=9),
        is_decode_tick=True,
        prefills=(PrefillChunk(seq, 3, 13, True),),
        admitted=(Admission(seq, 3, False),),
        num_running=2,
        num_sequences=3,
        num_waiting=1,
        waits_for_memory=True,
        head_slots=32,
        head_wait="blocks",
        tick=4,
    )
    outcome = OutcomeBuilder(6)
    outcome.started.append(seq)
    outcome.held_back.append(seq)
    assert outcome.build() == StepOutcome(6, started=(seq,), held_back=(seq,))
