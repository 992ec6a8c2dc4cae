"""The engine of the paper: its rules by example, its mended faults, and the laws over random loads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.memory import PagedAllocator
from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.request import Request, Sampling, Sequence, Status
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.scheduling.vllm_v0 import OutOfHostBlocks, VllmV0Scheduler
from kvsim.scheduling.vllm_v0_beam import BeamAction
from kvsim.tokens import TokenStream
from kvsim.types import ScenarioError


def make(
    num_blocks: int,
    block_size: int = 4,
    *,
    num_host_blocks: int = 0,
    sliding_window: int | None = None,
    upstream_faults: bool = False,
    **keywords: Any,
) -> VllmV0Scheduler:
    allocator = PagedAllocator(
        num_blocks,
        block_size,
        num_host_blocks=num_host_blocks,
        free_list="lifo",
        sliding_window=sliding_window,
        upstream_faults=upstream_faults,
    )
    limits = {"max_num_batched_tokens": 64, "max_model_len": 64, "watermark": 0.0, "detail": True}
    return VllmV0Scheduler(allocator, upstream_faults=upstream_faults, **{**limits, **keywords})


def request(request_id: str, prompt_len: int, *output_lens: int, beams: int = 0, arrival_ns: int = 0) -> Request:
    prompt = TokenStream.from_segment(1, prompt_len)
    longest = max(output_lens)
    sampling = Sampling(beam_width=beams) if beams else Sampling(n=len(output_lens))
    return Request(request_id, arrival_ns, prompt, longest, longest, sampling=sampling, sample_lens=output_lens)


@dataclass
class Run:
    """Everything a scheduler planned and did, by step."""

    scheduler: VllmV0Scheduler
    plans: list[StepPlan] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    shown: list[tuple[Any, ...]] = field(default_factory=list)
    """Plans and outcomes as values, for comparison."""

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(len(self.plans))
        self.plans.append(plan)
        self.shown.append(plan_values(plan))
        outcome = self.scheduler.complete(plan)
        self.outcomes.append(outcome)
        self.shown.append(outcome_values(outcome))
        return plan

    def to_the_end(self, limit: int = 2000) -> Run:
        while self.scheduler.has_work:
            assert len(self.plans) < limit, self.scheduler.describe_block()
            self.step()
        return self

    def end_of(self, request_id: str) -> int:
        return next(step for step, out in enumerate(self.outcomes) if request_id in out.finished_requests)

    @property
    def preemptions(self) -> list[tuple[int, str, bool, int]]:
        return [
            (step, entry.seq.request.request_id, entry.is_swap, entry.num_stored_tokens)
            for step, plan in enumerate(self.plans)
            for entry in plan.preempted
        ]


def start(scheduler: VllmV0Scheduler, *requests: Request) -> Run:
    for one in requests:
        assert scheduler.submit(one) is None
    return Run(scheduler)


def names(sequences: Any) -> list[tuple[str, int]]:
    return [(seq.request.request_id, seq.sample) for seq in sequences]


def plan_values(plan: StepPlan) -> tuple[Any, ...]:
    return (
        plan.shape,
        [(seq.seq_id, start_at, num_tokens) for seq, start_at, num_tokens, _ in plan.prefills],
        [(entry.seq.seq_id, *entry[1:]) for entry in (*plan.admitted, *plan.preempted, *plan.rejected)],
        [names(sequences) for sequences in (plan.decodes or (), plan.resumed, plan.grown)],
        [(entry.seq.seq_id, *entry[1:]) for entry in plan.table_updates],
        plan[plan._fields.index("copies") : plan._fields.index("swap_in") + 1],
        (plan.num_running, plan.num_sequences, plan.num_waiting, plan.num_swapped, plan.waits_for_memory),
    )


def outcome_values(outcome: StepOutcome) -> tuple[Any, ...]:
    return (
        outcome.num_emitted_tokens,
        [names(sequences) for sequences in (outcome.started, outcome.ended, outcome.pruned)],
        [(seq.num_output_tokens, seq.num_computed_tokens) for seq in (*outcome.ended, *outcome.pruned)],
        [(fork.parent.seq_id, fork.child.seq_id) for fork in outcome.forks],
        outcome.finished_requests,
    )


def test_a_prompt_step_holds_up_the_decodes() -> None:
    run = start(make(20), request("a", 6, 4))
    run.step()
    run.scheduler.submit(request("b", 3, 2))
    prompt_step = run.step()
    assert names(chunk.seq for chunk in prompt_step.prefills) == [("b", 0)]
    assert prompt_step.shape.num_decodes == 0
    assert not prompt_step.is_decode_tick
    assert names(run.step().decodes) == [("a", 0), ("b", 0)]
    run.to_the_end()
    assert (run.end_of("b"), run.end_of("a")) == (2, 4)


def test_prompts_are_padded_to_the_longest_of_them() -> None:
    # 2 x 6 padded tokens fit 64; with a third of 1 token the padding would be 18 - 13 = 5.
    run = start(make(20, max_paddings=4), request("a", 6, 1), request("b", 6, 1), request("c", 1, 1))
    plan = run.step()
    assert plan.shape.padded_batch == (2, 6)
    assert plan.shape.num_prefill_tokens == 12
    assert plan.head_wait == "padding limit"


@pytest.mark.parametrize(
    ("max_num_seqs", "num_blocks", "prompt_len", "reason"),
    [(1, 20, 16, "sequence limit"), (8, 20, 40, "token budget"), (8, 9, 16, "blocks")],
)
def test_nobody_overtakes_the_head_of_the_line(
    max_num_seqs: int, num_blocks: int, prompt_len: int, reason: str
) -> None:
    scheduler = make(num_blocks, max_num_seqs=max_num_seqs)
    run = start(scheduler, request("a", 24, 2), request("b", prompt_len, 1), request("c", 1, 1))
    plan = run.step()
    assert names(entry.seq for entry in plan.admitted) == [("a", 0)]
    assert plan.head_wait == reason
    assert plan.waits_for_memory == (reason == "blocks")
    assert plan.num_waiting == 2


def test_the_watermark_holds_for_admission_alone() -> None:
    # 10 blocks, 2 of them above the watermark; b would leave 1.
    run = start(make(10, watermark=0.2), request("a", 16, 16), request("b", 20, 1))
    assert run.step().head_wait == "blocks"
    for _ in range(4):
        run.step()
    assert run.scheduler.allocator.num_free_blocks == 5


def test_the_model_length_ends_a_sequence_one_token_late() -> None:
    run = start(make(40), request("a", 62, 9)).to_the_end()
    assert sum(outcome.num_emitted_tokens for outcome in run.outcomes) == 3


def test_samples_fork_at_the_first_token_and_copy_the_shared_tail() -> None:
    # 6 prompt tokens in 2 blocks; the first two of three samples copy the tail, the third writes in place.
    run = start(make(20), request("a", 6, 5, 5, 5))
    run.step()
    assert names(fork.child for fork in run.outcomes[0].forks) == [("a", 1), ("a", 2)]
    assert run.outcomes[0].num_emitted_tokens == 3
    plan = run.step()
    assert [(copy.src, copy.num_tokens) for copy in plan.copies] == [(18, 2), (18, 2)]
    assert run.scheduler.allocator.usage().num_used == 4
    run.to_the_end()
    assert run.scheduler.allocator.num_free_blocks == 20


def test_a_sample_that_ends_with_its_first_token_is_never_forked() -> None:
    run = start(make(20), request("a", 6, 1, 1, 3))
    run.step()
    outcome = run.outcomes[0]
    assert names(fork.child for fork in outcome.forks) == [("a", 2)]
    assert names(outcome.ended) == [("a", 1), ("a", 0)]
    assert run.scheduler.num_seats == 1


def test_a_group_with_siblings_is_swapped_and_a_single_sequence_is_recomputed() -> None:
    run = start(make(6, num_host_blocks=9), request("a", 8, 9), request("p", 4, 5, 5), request("g", 4, 5)).to_the_end()
    assert {(name, is_swap) for _, name, is_swap, _ in run.preemptions} == {("p", True), ("g", False)}
    assert run.scheduler.allocator.num_free_blocks == 6
    assert run.scheduler.allocator.num_free_host_blocks == 9


def test_the_last_to_arrive_is_the_victim_whatever_the_order_of_submission() -> None:
    late, early = request("late", 8, 9, arrival_ns=5), request("early", 8, 9, arrival_ns=3)
    run = start(make(4), late, early).to_the_end()
    assert [(name, num_stored) for _, name, _, num_stored in run.preemptions] == [("late", 8)]


def test_beams_move_as_scripted() -> None:
    script = {
        0: [BeamAction("fork", 0), BeamAction("fork", 0), BeamAction("free", 0)],
        1: [BeamAction("free", 2), BeamAction("fork", 1)],
    }
    scheduler = make(20, beam_moves=lambda group, step: script.get(step, []))
    run = start(scheduler, request("b", 4, 4, beams=2))
    run.step()
    assert names(scheduler.groups["b"].seqs) == [("b", 1), ("b", 2)]
    assert scheduler.num_seats == 2
    run.step()
    assert names(run.outcomes[1].pruned) == [("b", 2)]
    assert names(scheduler.groups["b"].seqs) == [("b", 1), ("b", 3)]
    run.to_the_end()
    assert names(run.outcomes[-1].ended) == [("b", 1), ("b", 3)]


def test_a_sliding_window_reuses_its_own_blocks() -> None:
    run = start(make(4, sliding_window=8), request("a", 6, 20)).to_the_end()
    assert max(plan.shape.num_table_entries for plan in run.plans) == 7
    assert run.preemptions == []


def test_who_can_never_be_served_is_rejected_with_both_numbers() -> None:
    scheduler = make(4, max_num_seqs=2)
    reasons = [
        scheduler.submit(request("long", 65, 1)),
        scheduler.submit(request("big", 8, 10)),
        scheduler.submit(request("wide", 1, 1, 1, 1)),
        scheduler.submit(request("pair", 6, 8, 8)),
    ]
    assert [rejection and rejection.reason for rejection in reasons] == [
        "the prompt has 65 tokens, the limit is 64",
        "needs 5 blocks (20 slots), the pool has 4 (16 slots)",
        "runs 3 sequences, max_num_seqs is 2",
        "needs 7 blocks (28 slots), the pool has 4 (16 slots)",
    ]
    assert not scheduler.has_work


def test_a_full_host_ends_the_original_and_costs_the_mended_engine_a_recompute() -> None:
    load = (request("a", 8, 9), request("p", 4, 5, 5))
    with pytest.raises(OutOfHostBlocks, match="no host blocks are left to swap out request 'p'") as caught:
        start(make(5, upstream_faults=True), *load).to_the_end()
    assert [entry.is_swap for entry in caught.value.preempted] == [True, True]
    run = start(make(5), *load).to_the_end()
    assert {is_swap for *_, is_swap, _ in run.preemptions} == {False}
    assert run.scheduler.allocator.num_free_blocks == 5


def test_samples_that_come_back_share_their_prompt_again() -> None:
    run = start(make(6), request("a", 8, 9), request("p", 8, 5, 5)).to_the_end()
    again = [entry for plan in run.plans for entry in plan.admitted if entry.is_resumed]
    # The second sample shares the prompt's two full blocks with the first.
    assert {(entry.seq.sample, entry.num_hit_tokens) for entry in again} == {(0, 0), (1, 8)}


def test_the_original_deadlocks_where_the_mended_engine_goes_on() -> None:
    # When a grows, p has 3 blocks. To come back it asks for those, one more for each sample, and 1 for the watermark.
    load = (request("a", 4, 9), request("p", 4, 5, 5))
    stuck = start(make(5, num_host_blocks=8, watermark=0.25, upstream_faults=True), *load)
    for _ in range(40):
        stuck.step()
    assert stuck.plans[-1].is_empty
    assert stuck.scheduler.has_work
    assert "request 'p' is swapped out and needs 5 blocks" in stuck.scheduler.describe_block()
    run = start(make(5, num_host_blocks=8, watermark=0.25), *load).to_the_end()
    assert run.outcomes[-1].finished_requests == ("p",)


def test_ended_samples_leak_blocks_in_the_original_alone() -> None:
    # One sample of p ends early; the other is preempted alone, and comes back with two references to each block.
    load = (request("a", 8, 30), request("p", 4, 2, 20))
    leaking = start(make(11, upstream_faults=True), *load, request("b", 4, 25))
    for _ in range(60):
        leaking.step()
    assert leaking.scheduler.allocator.num_leaked_blocks > 0
    mended = start(make(11), *load, request("b", 4, 25)).to_the_end()
    assert ("p", False) in {(name, is_swap) for _, name, is_swap, _ in mended.preemptions}
    assert mended.scheduler.allocator.num_free_blocks == 11


@pytest.mark.parametrize("moment", ["waiting", "running", "swapped", "recomputed", "ended", "unknown"])
def test_an_abort_gives_everything_back_and_a_second_one_is_harmless(moment: str) -> None:
    n = 2 if moment == "swapped" else 1
    scheduler = make(5, num_host_blocks=8)
    run = start(scheduler, request("a", 8, 9), request("x", 4, *[5] * n))
    states = {"running": Status.RUNNING, "swapped": Status.SWAPPED, "recomputed": Status.WAITING}
    if moment in states:
        run.step()
        while scheduler.groups["x"].seqs[0].status is not states[moment]:
            run.step()
    if moment == "ended":
        run.to_the_end()
    aborted = scheduler.abort("nobody" if moment == "unknown" else "x")
    assert len(aborted) == (0 if moment in ("ended", "unknown") else n)
    assert all(seq.status is Status.ABORTED for seq in aborted)
    if moment != "unknown":
        assert scheduler.abort("x") == ()
    scheduler.allocator.audit()
    scheduler.abort("a")
    scheduler.abort("x")
    assert scheduler.allocator.num_free_blocks == 5
    assert scheduler.allocator.num_free_host_blocks == 8


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ScenarioError, match="works on paged memory, not on ContiguousAllocator"):
        VllmV0Scheduler(ContiguousAllocator(64))  # type: ignore[arg-type]
    with pytest.raises(ScenarioError, match=r"max_num_batched_tokens \(32\) is below max_model_len \(64\)"):
        make(9, max_num_batched_tokens=32)
    with pytest.raises(ScenarioError, match="preemption: 'drop' is unknown; it is one of auto, recompute, swap"):
        make(9, preemption="drop")
    with pytest.raises(ScenarioError, match="engine_loop: 'slow' is unknown"):
        make(9, engine_loop="slow")


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, Request]], dict[int, str]]:
    """An engine, arrivals by step, and aborts by step."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_model_len = draw(st.sampled_from([12, 40, 100]))
    keywords = {
        "num_blocks": draw(st.integers(3, 30)),
        "block_size": block_size,
        "num_host_blocks": draw(st.sampled_from([0, 2, 40])),
        "sliding_window": draw(st.sampled_from([None, None, 2 * block_size])),
        "max_num_seqs": draw(st.sampled_from([2, 4, 32])),
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_model_len * draw(st.integers(1, 3)),
        "max_paddings": draw(st.sampled_from([0, 4, 256])),
        "watermark": draw(st.sampled_from([0.0, 0.1, 0.3])),
        "preemption": draw(st.sampled_from(["auto", "recompute", "swap"])),
    }
    arrivals, step = [], 0
    for number in range(draw(st.integers(1, 9))):
        step += draw(st.sampled_from([0, 0, 1, 4]))
        lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        beams = draw(st.sampled_from([0, 0, 2, 4])) if len(lengths) == 1 else 0
        arrival_ns = 10 * step + draw(st.sampled_from([0, 0, -35]))
        one = request(str(number), draw(st.integers(1, 20)), *lengths, beams=beams, arrival_ns=arrival_ns)
        arrivals.append((step, one))
    aborts = draw(st.dictionaries(st.integers(0, 30), st.integers(0, 9).map(str), max_size=2))
    return keywords, arrivals, aborts


def drive(keywords: dict[str, Any], arrivals: list[tuple[int, Request]], aborts: dict[int, str]) -> tuple[Run, int]:
    """Run to the end, the laws checked at every step; returns the run and the number of rejected requests."""
    scheduler = make(**keywords)
    run, todo, num_rejected = Run(scheduler), deque(arrivals), 0
    while todo or scheduler.has_work:
        while todo and todo[0][0] <= len(run.plans):
            num_rejected += scheduler.submit(todo.popleft()[1]) is not None
        if victim := aborts.get(len(run.plans)):
            run.shown.append(tuple(names(scheduler.abort(victim))))
        plan = run.step()
        assert len(run.plans) < 3000
        assert not scheduler.has_work or not plan.is_empty or plan.preempted, scheduler.describe_block()
        if not keywords.get("upstream_faults"):
            check_laws(run, scheduler)
    return run, num_rejected


def check_laws(run: Run, scheduler: VllmV0Scheduler) -> None:
    scheduler.allocator.audit()
    live = scheduler.live_sequences()
    assert len({seq.seq_id for seq in live}) == len(live)
    assert scheduler.num_seats == sum(group.num_seats for group in scheduler.running.values())
    for seq in live:
        check_sequence(seq, scheduler)


def check_sequence(seq: Sequence, scheduler: VllmV0Scheduler) -> None:
    allocator = scheduler.allocator
    assert allocator.has_table(seq.seq_id) == (seq.status in (Status.RUNNING, Status.SWAPPED))
    if seq.status is not Status.RUNNING:
        return
    assert seq.num_computed_tokens == seq.prompt_len + seq.num_output_tokens - 1
    assert allocator.num_tokens(seq.seq_id) == seq.num_computed_tokens
    assert allocator.num_slots(seq.seq_id) // allocator.block_size == -(
        -seq.num_computed_tokens // allocator.block_size
    )


@given(load=loads())
def test_every_request_ends_and_the_memory_is_whole(load: Any) -> None:
    keywords, arrivals, aborts = load
    run, num_rejected = drive(keywords, arrivals, aborts)
    allocator = run.scheduler.allocator
    assert allocator.num_free_blocks == keywords["num_blocks"]
    assert allocator.num_free_host_blocks == keywords["num_host_blocks"]
    finished = [request_id for outcome in run.outcomes for request_id in outcome.finished_requests]
    assert len(set(finished)) == len(finished)
    if not aborts:
        assert len(finished) + num_rejected == len(arrivals)


@given(load=loads())
def test_the_calendar_decides_as_the_plain_loop(load: Any) -> None:
    keywords, arrivals, aborts = load
    plain, _ = drive(keywords | {"engine_loop": "plain"}, arrivals, aborts)
    calendar, _ = drive(keywords | {"engine_loop": "calendar"}, arrivals, aborts)
    assert calendar.shown == plain.shown


def test_a_refusal_for_the_watermark_says_so() -> None:
    # All 100 blocks fit, and the original wants to keep one of them; alone, it is served without that fault.
    scheduler = make(100, upstream_faults=True, watermark=0.01, max_num_batched_tokens=500, max_model_len=500)
    (rejection,) = start(scheduler, request("a", 400, 1)).step().rejected
    assert rejection.reason == (
        "needs 100 blocks (400 slots), the pool has 100 (400 slots), of which 1 must stay free (watermark)"
    )
    mended = make(100, watermark=0.01, max_num_batched_tokens=500, max_model_len=500)
    assert start(mended, request("a", 400, 1)).step().admitted
