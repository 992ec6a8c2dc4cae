"""Contiguous regions: textbook and reported cases by hand, laws by Hypothesis."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import num_lines

from kvsim.memory.contiguous import ContiguousAllocator, NoHole, Placement, num_moved_slots
from kvsim.memory.interface import KVAllocator, RegionMove
from kvsim.memory.journal import Journal, double_decrements, life_of, never_returned
from kvsim.testing import check_allocator
from kvsim.types import AllocatorError, AllocStatus, LawViolation

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def three_thirties(placement):
    """A, B, C of 30 slots out of 100, then A and C freed (case K43)."""
    allocator = ContiguousAllocator(100, placement=placement)
    for name in "ABC":
        allocator.allocate(name, 10, reserve_tokens=20)
    allocator.free("A")
    allocator.free("C")
    return allocator


def test_is_an_allocator():
    assert isinstance(ContiguousAllocator(8), KVAllocator)


def test_k43_enough_free_but_no_hole():
    allocator = three_thirties("first_fit")
    assert allocator.num_free_blocks == 70
    assert allocator.holes() == ((0, 30), (60, 40))
    assert allocator.largest_hole == allocator.usage().largest_hole == 40
    assert allocator.external_frag_index == pytest.approx(1 - 40 / 70)
    assert f"{allocator.external_frag_index:.1%}" == "42.9%"

    assert allocator.can_allocate(50) is LATER
    with pytest.raises(NoHole, match="hole of 50 slots; 70 are free, the largest hole has 40"):
        allocator.allocate("D", 50)
    allocator.allocate("E", 40)
    allocator.allocate("F", 30)
    assert allocator.region("E") == (60, 40)
    assert allocator.region("F") == (0, 30)
    assert allocator.external_frag_index == 0.0


def test_k43_worst_fit_spoils_the_large_hole():
    allocator = three_thirties("worst_fit")
    allocator.allocate("D", 30)
    assert allocator.region("D") == (60, 30)
    assert allocator.can_allocate(40) is LATER


def test_best_fit_takes_the_smallest_sufficient_hole_lowest_first():
    allocator = three_thirties("best_fit")
    allocator.allocate("D", 25)
    assert allocator.region("D") == (0, 25)
    allocator.allocate("E", 31)
    assert allocator.region("E") == (60, 31)


def test_buddy_cuts_a_region_that_is_no_power_of_two_into_aligned_powers():
    allocator = ContiguousAllocator(15_728, placement="buddy")
    assert [size for _, size in allocator.holes()] == [8192, 4096, 2048, 1024, 256, 64, 32, 16]
    assert all(start % size == 0 for start, size in allocator.holes())


def test_buddy_holds_exactly_seven_requests_of_2048_in_15728_slots():
    allocator = ContiguousAllocator(15_728, placement="buddy")
    for index in range(7):
        allocator.allocate(index, 1, reserve_tokens=2047)
    assert allocator.can_allocate(2048) is LATER
    with pytest.raises(NoHole):
        allocator.allocate(7, 2048)
    assert allocator.num_free_blocks == 15_728 - 7 * 2048
    for index in range(7):
        allocator.free(index)
    assert allocator.largest_hole == 8192


@pytest.mark.parametrize(("placement", "slots", "answer"), [("buddy", 2048, 7), ("buddy", 1025, 7), ("buddy", 8193, 0)])
def test_max_regions_of_an_empty_space(placement, slots, answer):
    assert ContiguousAllocator(15_728, placement=placement).max_regions(slots) == answer


def test_buddy_rounding_is_counted_on_its_own():
    allocator = ContiguousAllocator(64, placement="buddy")
    allocator.allocate("A", 3, reserve_tokens=14)
    usage = allocator.usage()
    assert (usage.num_used, usage.num_rounding_slots, usage.num_free) == (17, 15, 32)
    assert allocator.num_slots("A") == 17
    assert allocator.block_table("A") == range(17)
    allocator.allocate("B", 16)
    assert allocator.usage().num_rounding_slots == 15


@pytest.mark.parametrize(("placement", "slots", "answer"), [("buddy", 9, NEVER), ("first_fit", 9, OK)])
def test_never_is_what_an_empty_space_cannot_give(placement, slots, answer):
    allocator = ContiguousAllocator(12, placement=placement)
    assert allocator.can_allocate(slots) is answer
    assert allocator.can_allocate(13) is NEVER


def test_a_region_cannot_grow():
    allocator = ContiguousAllocator(8, placement="first_fit")
    allocator.allocate("A", 2, reserve_tokens=2)
    assert allocator.append_slots("A", 2) == ()
    with pytest.raises(AllocatorError, match="store 5 tokens in a region of 4 slots"):
        allocator.append_slots("A")
    assert allocator.num_tokens("A") == 4


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_appending_nothing_is_refused(num_tokens):
    allocator = ContiguousAllocator(8)
    allocator.allocate("A", 2, reserve_tokens=2)
    with pytest.raises(AllocatorError, match=f"cannot append {num_tokens} tokens; append at least 1"):
        allocator.append_slots("A", num_tokens)
    assert allocator.num_tokens("A") == 2


def test_fork_copies_into_a_region_set_aside_at_admission():
    allocator = ContiguousAllocator(16, placement="first_fit")
    allocator.allocate("parent", 3, reserve_tokens=3)
    allocator.allocate("child", 0, reserve_tokens=6)
    free = allocator.num_free_blocks
    allocator.fork("parent", "child")
    assert allocator.num_free_blocks == free
    assert allocator.num_tokens("child") == 3
    assert allocator.fork_move("parent", "child") == RegionMove("child", 0, 6, 3)
    with pytest.raises(AllocatorError, match="3 of them filled"):
        allocator.fork("parent", "child")


def test_fork_takes_a_region_where_none_was_set_aside_or_changes_nothing():
    allocator = ContiguousAllocator(15, placement="first_fit")
    allocator.allocate("parent", 3, reserve_tokens=3)
    allocator.fork("parent", "first")
    assert allocator.region("first") == (6, 6)
    with pytest.raises(NoHole):
        allocator.fork("parent", "second")
    assert not allocator.has_table("second")
    assert allocator.num_free_blocks == 3


def test_compaction_moves_only_what_makes_room():
    allocator = ContiguousAllocator(100, placement="first_fit", compaction="on_demand")
    for name, slots in (("A", 10), ("B", 30), ("C", 20), ("D", 10), ("E", 20), ("F", 10)):
        allocator.allocate(name, slots // 2, reserve_tokens=slots - slots // 2)
    for name in "ACE":
        allocator.free(name)
    assert allocator.holes() == ((0, 10), (40, 20), (70, 20))
    assert allocator.make_room(20) == ()
    moves = allocator.make_room(35)
    assert [(move.seq_id, move.src, move.dst, move.num_tokens) for move in moves] == [("D", 60, 40, 5)]
    assert num_moved_slots(moves) == 5
    assert allocator.holes() == ((0, 10), (50, 40))
    assert allocator.make_room(51) == ()
    allocator.compact()
    assert allocator.holes() == ((50, 50),)
    allocator.audit()


def test_compaction_is_off_unless_asked_for():
    assert three_thirties("first_fit").make_room(50) == ()


def test_buddy_compaction_gathers_aligned_holes():
    allocator = ContiguousAllocator(16, placement="buddy", compaction="on_demand")
    for index in range(8):
        allocator.allocate(index, 2)
    for index in (0, 2, 5, 7):
        allocator.free(index)
    assert allocator.largest_hole == 2
    moves = allocator.make_room(8)
    assert allocator.largest_hole == 8
    assert num_moved_slots(moves) == 4
    allocator.audit()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_slots": 0}, "num_slots is 0"),
        ({"num_slots": 8, "placement": "budy"}, "placement is 'budy'; it is one of buddy, first_fit"),
        ({"num_slots": 8, "compaction": True}, "compaction is True"),
    ],
)
def test_bad_keywords_are_named(keywords, message):
    with pytest.raises(AllocatorError, match=message):
        ContiguousAllocator(**keywords)


def test_contract_errors_change_nothing():
    allocator = ContiguousAllocator(8)
    allocator.allocate("A", 2)
    for wrong in (
        lambda: allocator.allocate("A", 1),
        lambda: allocator.allocate("B", 0),
        lambda: allocator.free("B"),
        lambda: allocator.append_slots("B"),
    ):
        with pytest.raises(AllocatorError):
            wrong()
    assert allocator.usage().num_used == 2
    assert allocator.swap_out(["A"]) is None


def test_audit_finds_a_leaked_hole():
    allocator = ContiguousAllocator(8, placement="first_fit")
    allocator.allocate("A", 2)
    del allocator._regions["A"]
    with pytest.raises(LawViolation, match="law 4"):
        allocator.audit()


@pytest.mark.parametrize("placement", ["first_fit", "best_fit", "worst_fit"])  # the kit knows no rounding
def test_the_public_kit_finds_nothing(placement):
    check_allocator(
        lambda: ContiguousAllocator(24, placement=placement), max_examples=30, fork=False, exact_blocks=False
    )


def test_a_journal_sees_regions_come_move_and_go():
    journal = Journal()
    allocator = ContiguousAllocator(16, placement="first_fit", compaction="on_demand", journal=journal)
    for name in "AB":
        allocator.allocate(name, 4)
    allocator.fork("B", "C")
    allocator.free("A")
    allocator.compact()
    assert [held.block_id for held in never_returned(journal.events())] == [0, 4]
    allocator.free("B")
    allocator.free("C")
    assert never_returned(journal.events()) == double_decrements(journal.events()) == []
    moves = [(event.request_id, event.block_id, event.other_block_id) for event in life_of(journal.events(), 4)]
    assert ("C", 4, 8) in moves
    assert ("B", 4, 0) in moves


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 60), st.integers(0, 30)),
        st.tuples(st.just("free"), st.integers(0, 40)),
        st.tuples(st.just("append"), st.integers(0, 40)),
        st.tuples(st.just("room"), st.integers(1, 120)),
        st.tuples(st.just("compact")),
    ),
    max_size=60,
)


class FlatModel:
    """The same space as one list of owners: the obvious thing, to compare with."""

    def __init__(self, num_slots):
        self.owner = [None] * num_slots

    def runs(self):
        runs, start = [], None
        for index, owner in enumerate([*self.owner, "end"]):
            if owner is None and start is None:
                start = index
            elif owner is not None and start is not None:
                runs.append((start, index - start))
                start = None
        return runs

    def choose(self, size, placement):
        fitting = [(start, length) for start, length in self.runs() if length >= size]
        if placement == "best_fit":
            fitting.sort(key=lambda run: run[1])
        if placement == "worst_fit":
            fitting.sort(key=lambda run: -run[1])
        return fitting[0][0] if fitting else None


@pytest.mark.parametrize("placement", get_args(Placement))
@given(num_slots=st.integers(1, 200), operations=OPERATIONS)
def test_laws_hold_after_any_history(placement, num_slots, operations):
    allocator = ContiguousAllocator(num_slots, placement=placement, compaction="on_demand")
    model = FlatModel(num_slots)
    live = {}
    for index, (name, *args) in enumerate(operations):
        before = allocator.usage()
        if name == "allocate":
            status = allocator.can_allocate(args[0], reserve_tokens=args[1])
            size = sum(args)
            try:
                allocator.allocate(index, args[0], reserve_tokens=args[1])
            except NoHole:
                assert status is not OK
                assert allocator.usage() == before
            else:
                assert status is OK
                start, length = allocator.region(index)
                assert length == size
                if placement != "buddy":
                    assert start == model.choose(size, placement)
                assert set(model.owner[start : start + size]) == {None}
                model.owner[start : start + size] = [index] * size
                live[index] = args[0]
        elif name == "free" and live:
            seq_id = sorted(live)[args[0] % len(live)]
            allocator.free(seq_id)
            model.owner = [None if owner == seq_id else owner for owner in model.owner]
            del live[seq_id]
        elif name == "append" and live:
            seq_id = sorted(live)[args[0] % len(live)]
            if live[seq_id] < allocator.num_slots(seq_id):
                allocator.append_slots(seq_id)
                live[seq_id] += 1
        elif name in ("room", "compact"):
            moves = allocator.make_room(args[0]) if args else allocator.compact()
            old = {seq_id: model.owner.index(seq_id) for seq_id in live}
            assert all(old[move.seq_id] == move.src and move.num_tokens == live[move.seq_id] for move in moves)
            if name == "room" and moves:
                assert allocator.can_allocate(args[0]) is OK
            if placement != "buddy":
                roomy = args[0] if args else allocator.num_free_blocks
                assert roomy > allocator.num_free_blocks or allocator.largest_hole >= roomy
                assert [move.dst for move in moves] == sorted(move.dst for move in moves)
            model.owner = [None] * num_slots
            for seq_id in live:
                start, length = allocator.region(seq_id)
                model.owner[start : start + length] = [seq_id] * length
        assert allocator.usage().num_used == num_slots - model.owner.count(None)
        assert {seq_id: allocator.num_tokens(seq_id) for seq_id in live} == live
        allocator.audit()
    for seq_id in list(live):
        allocator.free(seq_id)
    assert allocator.holes() == ContiguousAllocator(num_slots, placement=placement).holes()


@pytest.mark.parametrize("placement", get_args(Placement))
def test_a_call_costs_the_same_late_in_a_long_run(placement):
    allocator = ContiguousAllocator(131_072, placement=placement)
    live = []
    state = 1

    def run(num: int) -> None:
        nonlocal state
        for _ in range(num):
            state = state * 1_103_515_245 + 12_345 & 0x7FFFFFFF
            while allocator.can_allocate(1 + state % 900) is not OK:
                allocator.free(live.pop(state % len(live)))
            allocator.allocate(state, 1 + state % 900)
            live.append(state)

    run(2_000)
    early = num_lines(lambda: run(2_000))
    run(14_000)
    assert num_lines(lambda: run(2_000)) < 1.5 * early
