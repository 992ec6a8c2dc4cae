"""Continuous batching over regions: hand-worked steps, and every token read back through any compaction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.request import Request, Sampling
from kvsim.scheduling.orca import OrcaScheduler
from kvsim.scheduling.reservations import make_reservation
from kvsim.tokens import TokenStream
from kvsim.types import ScenarioError


def request(name, prompt_len, output_len, **keywords):
    return Request(name, 0, TokenStream.from_segment(1, prompt_len), output_len, output_len, **keywords)


def orca(num_slots=100, *, reservation="max", max_model_len=10, placement="first_fit", compaction=None, **keywords):
    return OrcaScheduler(
        ContiguousAllocator(num_slots, placement=placement, compaction=compaction),
        reservation=make_reservation(reservation, max_model_len),
        max_model_len=max_model_len,
        **keywords,
    )


def names(sequences):
    return [seq.request.request_id for seq in sequences]


def step(scheduler):
    plan = scheduler.schedule(0)
    return plan, scheduler.complete(plan)


def test_textbook_continuous_lets_c_in_at_round_2():
    scheduler = orca(max_num_seqs=2)
    for name, rounds in (("A", 3), ("B", 1), ("C", 2)):
        scheduler.submit(request(name, 2, rounds))
    rounds = []
    while scheduler.has_work:
        plan, outcome = step(scheduler)
        rounds.append((outcome.num_emitted_tokens, names(seq for seq, *_ in plan.admitted), names(outcome.ended)))
    assert rounds == [(2, ["A", "B"], ["B"]), (2, ["C"], []), (2, [], ["A", "C"])]


@pytest.mark.parametrize(("reservation", "num_slots"), [("max", 8), ("pow2", 2 + 4), ("oracle", 5)])
def test_a_request_of_two_and_four_is_given(reservation, num_slots):
    scheduler = orca(reservation=reservation, max_model_len=8)
    scheduler.submit(request("A", 2, 4))
    step(scheduler)
    assert scheduler.allocator.usage().num_used == num_slots


def test_seven_requests_of_2048_run_at_once_in_the_papers_15728_slots():
    scheduler = orca(15_728, max_model_len=2048, placement="buddy")
    for index in range(9):
        scheduler.submit(request(str(index), 100, 50))
    plan, _ = step(scheduler)
    assert (plan.num_running, plan.num_waiting) == (7, 2)
    assert (plan.waits_for_memory, plan.head_slots) == (True, 2048)


def test_samples_are_admitted_one_by_one():
    scheduler = orca(num_slots=25)
    scheduler.submit(request("A", 3, 2, sampling=Sampling(n=3)))
    plan, outcome = step(scheduler)
    assert (plan.num_sequences, plan.num_waiting) == (2, 1)
    assert outcome.num_emitted_tokens == 2
    ended = []
    while scheduler.has_work:
        _, outcome = step(scheduler)
        ended += outcome.finished_requests
    assert ended == ["A"]
    assert scheduler.allocator.num_free_blocks == 25


def test_a_sample_gets_its_own_reservation():
    scheduler = orca(reservation="oracle", max_model_len=50)
    scheduler.submit(request("A", 3, 9, sampling=Sampling(n=2), sample_lens=(9, 2)))
    step(scheduler)
    assert scheduler.allocator.usage().num_used == (3 + 8) + (3 + 1)


def test_what_no_region_holds_is_rejected_with_both_numbers():
    assert "needs 10 slots at once, the pool has 9" in orca(num_slots=9).submit(request("A", 2, 2)).reason
    tight = orca(num_slots=12, placement="buddy", max_model_len=9)
    assert "needs 9 slots at once, the pool has 12, at most 8 in one piece" in tight.submit(request("A", 2, 2)).reason
    with pytest.raises(ScenarioError, match="beam search"):
        orca().submit(request("A", 2, 2, sampling=Sampling(beam_width=2)))


@pytest.mark.parametrize(("watermark", "is_let_in"), [(0.0, True), (0.05, True), (0.06, False), (0.2, False)])
def test_compaction_leaves_the_watermark_alone(watermark, is_let_in):
    # A, B and C take 30, 20 and 30 of 100 slots; when A has ended two holes of 30 and 20 are left, and E needs 45.
    scheduler = orca(reservation="oracle", max_model_len=100, compaction="on_demand", watermark=watermark)
    for name, prompt_len, output_len in (("A", 29, 2), ("B", 11, 10), ("C", 21, 10), ("E", 36, 10)):
        scheduler.submit(request(name, prompt_len, output_len))
    step(scheduler)
    step(scheduler)
    plan, _ = step(scheduler)
    assert bool(plan.admitted) == bool(plan.moves) == is_let_in
    assert scheduler.allocator.num_free_blocks == (5 if is_let_in else 50)


@pytest.mark.parametrize("compaction", [None, "on_demand"])
def test_compaction_lets_in_whoever_misses_a_hole_and_is_paid_for(compaction):
    scheduler = orca(num_slots=20, reservation="oracle", max_model_len=20, compaction=compaction)
    for name, prompt_len, output_len in (("A", 5, 1), ("B", 5, 6), ("C", 5, 1), ("D", 9, 2)):
        scheduler.submit(request(name, prompt_len, output_len))
    plan, _ = step(scheduler)
    assert names(seq for seq, *_ in plan.admitted) == ["A", "B", "C"]
    assert scheduler.allocator.holes() == ((0, 5), (15, 5))
    plan, _ = step(scheduler)
    if compaction is None:
        assert (plan.waits_for_memory, plan.head_slots, plan.moves) == (True, 10, ())
    else:
        assert names(seq for seq, *_ in plan.admitted) == ["D"]
        assert [move[1:] for move in plan.moves] == [(5, 0, 5)]
        assert plan.shape.num_moved_slots == plan.moves[0].num_tokens == 5


class SlotMemory:
    """Executes plans on an array of slots; a slot holds (sequence, position)."""

    def __init__(self, num_slots):
        self.slots = [None] * num_slots
        self.tables = {}
        self.stored = {}

    def execute(self, plan, outcome):
        read = [(move, self.slots[move.src : move.src + move.num_tokens]) for move in plan.moves]
        for move, content in read:
            self.slots[move.dst : move.dst + move.num_tokens] = content
        for update in plan.table_updates:
            table = self.tables.setdefault(update.seq.seq_id, [])
            table[update.start :] = update.block_ids
        for admission in plan.admitted:
            self.stored[admission.seq.seq_id] = 0
        for chunk in plan.prefills:
            self.write(chunk.seq.seq_id, chunk.num_tokens)
        for seq in plan.decodes:
            self.write(seq.seq_id, 1)
        for seq_id, num_stored in self.stored.items():
            content = [self.slots[address] for address in self.tables[seq_id][:num_stored]]
            assert content == [(seq_id, position) for position in range(num_stored)]
        for seq in outcome.ended:
            del self.stored[seq.seq_id]

    def write(self, seq_id, num_tokens):
        for _ in range(num_tokens):
            position = self.stored[seq_id]
            self.slots[self.tables[seq_id][position]] = (seq_id, position)
            self.stored[seq_id] += 1


WORKLOAD = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 10), st.integers(1, 2), st.integers(0, 3)), min_size=1, max_size=14
)
SETUP = st.fixed_dictionaries(
    {
        "num_slots": st.integers(22, 64),
        "reservation": st.sampled_from(["max", "pow2", "oracle"]),
        "placement": st.sampled_from(["buddy", "first_fit", "best_fit"]),
        "compaction": st.sampled_from([None, "on_demand"]),
        "max_num_batched_tokens": st.sampled_from([None, 5]),
    }
)


def history(workload, setup, *, execute=False, **keywords):
    """Shapes, moves and ends of every step; requests arrive so many steps after the one before."""
    scheduler = orca(max_model_len=22, **setup, **keywords)
    memory = SlotMemory(setup["num_slots"])
    arrivals, due = [], 0
    for index, (prompt_len, output_len, n, gap) in enumerate(workload):
        due += gap
        arrivals.append((due, request(str(index), prompt_len, output_len, sampling=Sampling(n=n))))
    rows = []
    for tick in range(100_000):
        while arrivals and arrivals[0][0] <= tick:
            scheduler.submit(arrivals.pop(0)[1])
        if not scheduler.has_work:
            if not arrivals:
                break
            continue
        plan, outcome = step(scheduler)
        assert not plan.preempted
        scheduler.allocator.audit()
        if execute:
            memory.execute(plan, outcome)
        rows.append((plan.shape, plan.moves, names(outcome.ended), scheduler.allocator.usage()))
    assert scheduler.allocator.num_free_blocks == setup["num_slots"]
    return rows


@given(workload=WORKLOAD, setup=SETUP)
def test_every_token_is_read_back_through_any_compaction(workload, setup):
    history(workload, setup, execute=True, detail=True)


@given(workload=WORKLOAD, setup=SETUP)
def test_calendar_and_plain_loop_agree(workload, setup):
    assert history(workload, setup) == history(workload, setup, engine_loop="plain")
