"""The audit of counts: which law a wrong one breaks, and blocks that are free twice."""

from __future__ import annotations

import pytest
from memory.test_audit import busy

from kvsim.memory import PagedAllocator, PrefixKeys
from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.memory.journal import Journal
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, LawViolation


def test_a_block_that_is_free_twice_is_found() -> None:
    allocator = PagedAllocator(6, 4, free_list="fifo")
    allocator.allocate("a", 5)
    twice = next(iter(allocator.pool.free))
    allocator.pool.free.extend([twice])
    if len(list(allocator.pool.free)) == 4:
        pytest.skip("this free list cannot hold a block twice")
    with pytest.raises(LawViolation, match=rf"^law 4: .*\[{twice}\] are in the free list more than once"):
        allocator.audit()


def test_idle_blocks_are_counted_under_law_4(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = busy()
    usage = allocator.usage()
    monkeypatch.setattr(allocator, "usage", lambda: usage._replace(num_cached_idle=usage.num_cached_idle + 1))
    with pytest.raises(LawViolation, match=r"^law 4: num_cached_idle is counted as"):
        allocator.audit()


def test_a_region_that_ends_has_no_references() -> None:
    journal = Journal()
    allocator = ContiguousAllocator(40, placement="first_fit", journal=journal)
    allocator.allocate("a", 5)
    allocator.free("a")
    events = [(event.event, event.ref_count) for event in journal.events()]
    assert events == [("taken", 1), ("ref_dec", 0), ("freed", 0)]


def test_a_move_gives_the_old_address_up_before_the_new_one_is_taken() -> None:
    journal = Journal()
    allocator = ContiguousAllocator(12, placement="first_fit", compaction="on_demand", journal=journal)
    allocator.allocate("a", 4)
    allocator.allocate("b", 4)
    allocator.free("a")
    num_before = len(journal.events())
    assert [(move.src, move.dst) for move in allocator.make_room(8)] == [(4, 0)]
    events = [(event.event, event.block_id, event.ref_count) for event in journal.events()[num_before:]]
    assert events == [("copied", 4, 1), ("ref_dec", 4, 0), ("freed", 4, 0), ("taken", 0, 1)]


def test_a_miscount_of_shared_blocks_breaks_law_4() -> None:
    allocator = busy()
    allocator.pool.num_shared += 1
    with pytest.raises(LawViolation, match=r"^law 4: GPU counts 3 shared blocks; there are 2"):
        allocator.audit()


def test_a_block_that_is_findable_before_it_is_full_breaks_law_11() -> None:
    allocator = busy()
    allocator.tables()["cached"].num_tokens = 7
    with pytest.raises(LawViolation, match=r"^law 11: sequence 'cached' made 2 blocks findable before they were full"):
        allocator.audit()


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_fewer_tokens_than_there_are_hits_are_refused(num_tokens: int) -> None:
    allocator = PagedAllocator(6, 4, enable_prefix_caching=True)
    text = PrefixKeys(TokenStream.from_segment(1, 8), None, 4)
    allocator.allocate("a", 8, keys=text)
    allocator.register("a", 8)
    hit = allocator.match_prefix(text, 8)
    assert hit.num_tokens >= 4
    with pytest.raises(AllocatorError, match=f"cannot allocate {num_tokens} tokens with a hit of {hit.num_tokens}"):
        allocator.allocate("b", num_tokens, keys=text, prefix=hit)
    with pytest.raises(AllocatorError, match="cannot allocate 0 tokens"):
        allocator.allocate("c", 0)
