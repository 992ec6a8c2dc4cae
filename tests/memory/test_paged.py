"""The paged allocator, by hand-worked examples: one per rule of sharing, order and refusal."""

from __future__ import annotations

import copy
import pickle
from typing import cast

import pytest

from kvsim.memory import NO_MATCH, BlockCopy, BlockMove, PagedAllocator, PrefixKeys, PrefixMatch
from kvsim.memory.block_pool import FREE_LIST_POLICIES
from kvsim.memory.block_table import Slot, slot_of, table_delta, upload_bytes
from kvsim.memory.journal import Journal
from kvsim.request import Namespace
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, AllocStatus, OutOfBlocks


def keys(source: int, length: int = 1000, block_size: int = 4, namespace: Namespace | None = None) -> PrefixKeys:
    return PrefixKeys(TokenStream.from_segment(source, length), namespace, block_size)


def state(allocator: PagedAllocator) -> tuple[object, ...]:
    """All that a caller can see."""
    tables = {
        seq: (allocator.block_table(seq), allocator.num_tokens(seq), allocator.is_swapped(seq))
        for seq in allocator.seq_ids()
    }
    return (tables, allocator.free_block_ids(), allocator.free_host_block_ids(), allocator.ref_counts(),
            allocator.host_ref_counts(), allocator.usage(),
            allocator.num_filled_slots, allocator.num_hashed_blocks)  # fmt: skip


def serve(allocator: PagedAllocator, seq: object, length: int, text: PrefixKeys) -> PrefixMatch:
    """Run one request of a single step: look up, allocate, compute, make findable, free."""
    match = allocator.match_prefix(text, length)
    allocator.allocate(seq, length, keys=text, prefix=match)
    allocator.register(seq, length)
    allocator.free(seq)
    allocator.audit()
    return match


def test_block_table_maps_position_8_to_block_4_offset_0() -> None:
    assert slot_of([3, 0, 4], 8, 4) == Slot(4, 0)


def test_first_sharer_to_append_copies_and_the_last_writes_in_place() -> None:
    allocator = _pool_in_order([3, 0, 4, 1, 2])
    allocator.allocate("A", 6)
    allocator.fork("A", "B")
    assert allocator.block_table("A") == allocator.block_table("B") == (3, 0)
    assert allocator.append_slots("A") == (BlockCopy(0, 4, 2),)
    assert allocator.append_slots("B") == ()
    assert allocator.block_table("A") == (3, 4)
    assert allocator.block_table("B") == (3, 0)
    assert (allocator.ref_count(3), allocator.ref_count(0), allocator.ref_count(4)) == (2, 1, 1)
    assert allocator.num_filled_slots == 4 + 3 + 3
    allocator.audit()


def _pool_in_order(order: list[int]) -> PagedAllocator:
    """A `fifo` pool that will hand out blocks in `order`: each is taken, and released in that order."""
    allocator = PagedAllocator(len(order), 4)
    for block_id in range(len(order)):
        allocator.allocate(block_id, 4)
    for block_id in order:
        allocator.free(block_id)
    return allocator


def test_four_beams_over_4000_tokens_share_2_gb() -> None:
    allocator = PagedAllocator(1100, 16)
    allocator.allocate(0, 4000)
    for beam in (1, 2, 3):
        allocator.fork(0, beam)
    bytes_per_block = 16 * 512 * 1024
    assert allocator.usage().num_used * bytes_per_block == 250 * bytes_per_block == 2_097_152_000
    assert allocator.num_logical_blocks == 1000


def test_table_updates_and_their_bytes() -> None:
    assert upload_bytes(1_000_000, 8) == 8_000_000
    assert upload_bytes(1_000_000) == 4_000_000
    with pytest.raises(AllocatorError, match="4 or 8 bytes, not 2"):
        upload_bytes(1, 2)
    assert table_delta([3, 0], [3, 4, 1]) == (1, (4, 1))
    assert table_delta([3, 0], [3, 0]) == (2, ())


@pytest.mark.parametrize(("prompt", "copies", "used", "peak"), [(6, 2, 4, 7), (8, 0, 5, 5)])
def test_three_samples_of_one_prompt(prompt: int, copies: int, used: int, peak: int) -> None:
    """K29: of k sharers of a partial tail k - 1 copy; a full tail is never copied."""
    allocator = PagedAllocator(10, 4)
    allocator.allocate(0, prompt)
    allocator.fork(0, 1)
    allocator.fork(0, 2)
    assert [allocator.ref_count(block_id) for block_id in (0, 1)] == [3, 3]
    made = [copy for seq in (0, 1, 2) for copy in allocator.append_slots(seq)]
    assert len(made) == copies
    assert all(copy.src == 1 for copy in made)
    assert allocator.usage().num_used == used
    assert allocator.ref_count(0) == 3
    assert len({allocator.block_table(seq)[-1] for seq in (0, 1, 2)}) == 3
    for _ in range(3):
        for seq in (0, 1, 2):
            allocator.append_slots(seq)
            allocator.audit()
    assert allocator.usage().num_used == peak
    for seq in (0, 1, 2):
        allocator.free(seq)
    assert allocator.num_free_blocks == 10
    allocator.audit()


def test_catching_up_is_appending_one_by_one() -> None:
    slow, fast = PagedAllocator(20, 4), PagedAllocator(20, 4)
    for allocator in (slow, fast):
        allocator.allocate(0, 6)
        allocator.fork(0, 1)
    one_by_one = tuple(copy for _ in range(9) for copy in slow.append_slots(0))
    assert fast.append_slots(0, 9) == one_by_one
    assert state(fast) == state(slow)


def test_what_was_appended_and_not_written_goes_back() -> None:
    """A copies the tail it shares with B and C, B too; C writes in place. Then all three take their token back."""
    allocator = PagedAllocator(6, 4)
    allocator.allocate("A", 6)
    allocator.fork("A", "B")
    allocator.fork("A", "C")
    copies = [copy for name in "ABC" for copy in allocator.append_slots(name)]
    assert copies == [BlockCopy(1, 2, 2), BlockCopy(1, 3, 2)]
    for name in "BCA":
        allocator.retract(name, 1, copies)
    assert {allocator.block_table(name) for name in "ABC"} == {(0, 1)}
    assert [allocator.ref_count(block_id) for block_id in range(4)] == [3, 3, 0, 0]
    assert (allocator.num_shared_partial_tails, allocator.num_filled_slots) == (1, 6)
    assert allocator.free_block_ids() == (4, 5, 3, 2)
    allocator.audit()


def test_new_blocks_of_tokens_that_are_not_written_go_back() -> None:
    allocator = PagedAllocator(6, 4)
    allocator.allocate("A", 7)
    allocator.append_slots("A", 6)
    assert allocator.block_table("A") == (0, 1, 2, 3)
    allocator.retract("A", 6)
    assert (allocator.block_table("A"), allocator.num_tokens("A")) == ((0, 1), 7)
    allocator.audit()
    before = state(allocator)
    for num_tokens in (0, 7):
        with pytest.raises(AllocatorError, match=f"cannot take back {num_tokens} of 7 tokens"):
            allocator.retract("A", num_tokens)
    with pytest.raises(AllocatorError, match="no block table"):
        allocator.retract("B", 1)
    assert state(allocator) == before


def test_who_takes_tokens_back_takes_their_text_back() -> None:
    """Registered blocks that are not computed after all are neither found nor idle."""
    allocator = PagedAllocator(6, 4, enable_prefix_caching=True)
    allocator.allocate("A", 7, keys=keys(1))
    allocator.append_slots("A", 5)
    allocator.register("A", 12)
    allocator.retract("A", 5)
    assert allocator.match_prefix(keys(1), 12).block_ids == (0,)
    assert (allocator.num_hashed_blocks, allocator.usage().num_cached_idle) == (1, 0)
    allocator.audit()


@pytest.mark.parametrize("length", [6, 7])
def test_tokens_that_others_read_cannot_be_taken_back(length: int) -> None:
    """A child has the last token by now, in a partial block or a full one."""
    allocator = PagedAllocator(6, 4)
    allocator.allocate("A", length)
    allocator.append_slots("A")
    allocator.fork("A", "B")
    before = state(allocator)
    with pytest.raises(AllocatorError, match="'A' takes 1 tokens back too late: others came or went since"):
        allocator.retract("A", 1)
    assert state(allocator) == before


def test_a_block_that_was_found_cannot_be_taken_back() -> None:
    allocator = PagedAllocator(6, 4, enable_prefix_caching=True)
    allocator.allocate("A", 4, keys=keys(1))
    allocator.append_slots("A", 4)
    allocator.register("A", 8)
    allocator.allocate("B", 9, keys=keys(1), prefix=allocator.match_prefix(keys(1), 9))
    before = state(allocator)
    with pytest.raises(AllocatorError, match=r"'A' cannot take blocks \[1\] back: others share them"):
        allocator.retract("A", 4)
    assert state(allocator) == before


def test_a_copy_whose_source_is_gone_cannot_be_taken_back() -> None:
    allocator = PagedAllocator(6, 4)
    allocator.allocate("A", 6)
    allocator.fork("A", "B")
    copies = allocator.append_slots("A")
    allocator.free("B")
    before = state(allocator)
    with pytest.raises(AllocatorError, match="'A' takes 1 tokens back too late"):
        allocator.retract("A", 1, copies)
    assert state(allocator) == before
    allocator.audit()


def whatever_the_order(allocator: PagedAllocator) -> tuple[object, ...]:
    """All that a caller can see but the order of the free list."""
    tables, free, *rest = state(allocator)
    return (tables, set(cast("tuple[int, ...]", free)), *rest, allocator.num_shared_partial_tails)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("prompt_len", [3, 6, 8, 9, 18])
def test_a_ring_takes_back_what_was_not_written(prompt_len: int, num_tokens: int) -> None:
    """Block size 4, window 8: both samples go round, copying what they share; then the table names the old blocks."""
    allocator = PagedAllocator(9, 4, sliding_window=8)
    allocator.allocate("A", prompt_len)
    allocator.fork("A", "B")
    before = whatever_the_order(allocator)
    copies = [copy for name in "AB" for copy in allocator.append_slots(name, num_tokens)]
    for name in "AB":
        allocator.retract(name, num_tokens, copies)
    assert whatever_the_order(allocator) == before
    allocator.audit()


def test_the_paper_s_engine_s_ring_takes_nothing_back() -> None:
    allocator = PagedAllocator(9, 4, sliding_window=8, upstream_faults=True)
    allocator.allocate("A", 6)
    with pytest.raises(AllocatorError, match="takes nothing back"):
        allocator.retract("A", 1)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_appending_nothing_is_refused(num_tokens: int) -> None:
    allocator = PagedAllocator(4, 4)
    allocator.allocate(0, 2)
    with pytest.raises(AllocatorError, match="append at least 1"):
        allocator.append_slots(0, num_tokens)


def test_write_into_a_shared_full_block_is_refused() -> None:
    allocator = PagedAllocator(4, 4)
    allocator.allocate(0, 6)
    allocator.fork(0, 1)
    with pytest.raises(AllocatorError, match="position 2 into block 0, which 2 tables share"):
        allocator.check_write(0, 2)
    allocator.free(1)
    allocator.check_write(0, 2)


def test_refused_commands_change_nothing() -> None:
    allocator = PagedAllocator(4, 4, num_host_blocks=1)
    allocator.allocate("a", 7)
    allocator.fork("a", "b")
    allocator.allocate("c", 8)
    before = state(allocator)
    refused = [
        lambda: allocator.allocate("d", 1),
        lambda: allocator.allocate("a", 1),
        lambda: allocator.append_slots("a"),
        lambda: allocator.append_slots("a", 5),
        lambda: allocator.append_slots("c"),
        lambda: allocator.append_slots("nobody"),
        lambda: allocator.fork("nobody", "e"),
        lambda: allocator.fork("a", "b"),
        lambda: allocator.free("nobody"),
        lambda: allocator.swap_in(["a"]),
        lambda: allocator.swap_out(["a", "a"]),
        lambda: allocator.register("a", 8) if allocator.enable_prefix_caching else allocator.free("e"),
        lambda: allocator.allocate("d", 4, num_refs=2),
    ]
    for command in refused:
        with pytest.raises(AllocatorError):
            command()
        assert state(allocator) == before
    assert allocator.swap_out(["a", "b"]) is None
    assert state(allocator) == before
    with pytest.raises(OutOfBlocks) as error:
        allocator.allocate("d", 5)
    assert (error.value.needed, error.value.free) == (2, 0)


def test_can_allocate_answers_now_later_never() -> None:
    allocator = PagedAllocator(10, 4)
    allocator.allocate(0, 20)
    assert allocator.can_allocate(20) is AllocStatus.OK
    assert allocator.can_allocate(20, watermark_blocks=1) is AllocStatus.LATER
    assert allocator.can_allocate(21) is AllocStatus.LATER
    assert allocator.can_allocate(40) is AllocStatus.LATER
    assert allocator.can_allocate(41) is AllocStatus.NEVER
    assert allocator.can_allocate(37, watermark_blocks=1) is AllocStatus.NEVER


def test_blocks_needed_for_an_append() -> None:
    allocator = PagedAllocator(10, 4)
    allocator.allocate(0, 6)
    assert [allocator.num_blocks_to_append(0, count) for count in (1, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]
    allocator.fork(0, 1)
    assert [allocator.num_blocks_to_append(0, count) for count in (1, 2, 3)] == [1, 1, 2]
    assert allocator.can_append(8)
    assert not allocator.can_append(9)


def test_swap_keeps_sharing_and_restores_into_new_blocks() -> None:
    allocator = PagedAllocator(6, 4, num_host_blocks=4)
    allocator.allocate("a", 6)
    allocator.fork("a", "b")
    allocator.append_slots("a")
    assert allocator.can_swap_out(["a", "b"])
    assert allocator.swap_out(["a", "b"]) == (BlockMove(0, 0), BlockMove(2, 1), BlockMove(1, 2))
    assert allocator.block_table("a") == (0, 1)
    assert allocator.block_table("b") == (0, 2)
    assert allocator.host_ref_count(0) == 2
    assert allocator.num_free_blocks == 6
    assert allocator.num_filled_slots == 0
    assert allocator.num_swapped_blocks(["a", "b"]) == 3
    assert allocator.can_swap_in(["a", "b"], extra_blocks=2, watermark_blocks=1)
    assert not allocator.can_swap_in(["a", "b"], extra_blocks=2, watermark_blocks=2)
    with pytest.raises(AllocatorError, match="swapped out"):
        allocator.append_slots("a")
    assert allocator.swap_in(["a", "b"]) == (BlockMove(0, 3), BlockMove(1, 4), BlockMove(2, 5))
    assert allocator.block_table("a") == (3, 4)
    assert allocator.ref_count(3) == 2
    assert allocator.num_filled_slots == 4 + 3 + 2
    assert allocator.num_free_host_blocks == 4
    allocator.audit()


def test_free_of_a_swapped_sequence_returns_host_blocks() -> None:
    allocator = PagedAllocator(4, 4, num_host_blocks=4)
    allocator.allocate(0, 8)
    allocator.swap_out([0])
    allocator.free(0)
    assert (allocator.num_free_blocks, allocator.num_free_host_blocks) == (4, 4)


def test_hit_blocks_that_sit_in_the_free_list_are_not_free_capacity() -> None:
    """K13: the hits are among the free blocks, so what fits only by counting them twice has to wait."""
    allocator = PagedAllocator(5, 4, enable_prefix_caching=True)
    serve(allocator, "X", 12, keys(1))
    allocator.allocate("W", 3)
    match = allocator.match_prefix(keys(1), 20)
    assert (match.num_tokens, match.num_revived) == (12, 3)
    assert allocator.num_free_blocks == 4
    assert allocator.can_allocate(20, prefix=match) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks):
        allocator.allocate("Y", 20, keys=keys(1), prefix=match)
    allocator.free("W")
    assert allocator.can_allocate(20, prefix=match) is AllocStatus.OK
    allocator.allocate("Y", 20, keys=keys(1), prefix=match)
    assert allocator.block_table("Y")[:3] == match.block_ids
    assert allocator.num_evicted == 0
    allocator.audit()


def test_end_of_a_chain_is_evicted_first() -> None:
    """K15: without its first block the rest of a chain could not be reached."""
    allocator = PagedAllocator(3, 4, enable_prefix_caching=True)
    serve(allocator, "X", 12, keys(1))
    serve(allocator, "Y", 4, keys(2))
    assert allocator.num_evicted == 1
    assert serve(allocator, "X", 12, keys(1)).num_tokens == 8
    assert allocator.num_evicted == 2


def test_a_whole_cached_prompt_leaves_one_token_to_compute() -> None:
    """K17: hits are whole blocks, and never of the last token."""
    hits = []
    for source, length in enumerate((15, 16, 31, 32, 33, 48), start=1):
        allocator = PagedAllocator(20, 16, enable_prefix_caching=True)
        text = keys(source, block_size=16)
        serve(allocator, 0, length, text)
        hits.append(serve(allocator, 1, length, text).num_tokens)
    assert hits == [0, 0, 16, 16, 32, 32]


def test_only_registered_tokens_are_found() -> None:
    """K23: an abort half-way leaves what was computed, and no more."""
    allocator = PagedAllocator(10, 4, enable_prefix_caching=True)
    allocator.allocate("X", 8, keys=keys(1))
    assert allocator.match_prefix(keys(1), 16) == NO_MATCH._replace(num_queried=16)
    allocator.register("X", 8)
    with pytest.raises(AllocatorError, match="stores 8 tokens, 16 are registered"):
        allocator.register("X", 16)
    allocator.free("X")
    assert allocator.match_prefix(keys(1), 16).num_tokens == 8


def test_idle_cached_blocks_are_neither_used_nor_free() -> None:
    """K35: they are handed out like free ones, and what they held is lost only then."""
    allocator = PagedAllocator(10, 4, enable_prefix_caching=True)
    text = keys(1)
    allocator.allocate("X", 10, keys=text)
    allocator.append_slots("X", 2)
    allocator.register("X", 12)
    allocator.free("X")
    usage = allocator.usage()
    assert (usage.num_used, usage.num_cached_idle, usage.num_free) == (0, 3, 7)
    assert allocator.num_free_blocks == 10
    assert allocator.take_evicted() == []
    allocator.allocate("Y", 40, keys=keys(2))
    assert allocator.num_evicted == 3
    assert allocator.take_evicted() == [2, 1, 0]
    assert allocator.take_evicted() == []


@pytest.mark.parametrize(
    ("num_blocks", "shared", "runs", "hits", "evictions"),
    [(400, 1024, 100, 101376, None), (400, 1030, 100, 101376, None), (400, 15, 100, 0, None), (71, 1024, 5, 4096, 24)],
)
def test_saving_of_a_shared_system_prompt(
    num_blocks: int, shared: int, runs: int, hits: int, evictions: int | None
) -> None:
    """K49: every request but the first finds the whole blocks of the prompt; a small pool loses the tails alone."""
    allocator = PagedAllocator(num_blocks, 16, enable_prefix_caching=True)
    for run in range(runs):
        stream = TokenStream.from_segment(1, shared) + TokenStream.from_segment(2 + run, 100)
        serve(allocator, run, shared + 100, PrefixKeys(stream, None, 16))
    assert allocator.num_hit_tokens == hits
    assert allocator.num_queried_tokens == runs * (shared + 100)
    if evictions is not None:
        assert allocator.num_evicted == evictions


def test_duplicates_stay_and_the_earliest_registered_serves() -> None:
    allocator = PagedAllocator(6, 4, enable_prefix_caching=True)
    for seq in ("a", "b"):
        allocator.allocate(seq, 4, keys=keys(1))
    allocator.register("b", 4)
    allocator.register("a", 4)
    assert allocator.num_hashed_blocks == 2
    assert allocator.match_prefix(keys(1), 5).block_ids == (1,)
    allocator.free("b")
    assert allocator.take_evicted() == []
    allocator.allocate("c", 20)
    assert allocator.take_evicted() == [1]
    assert allocator.match_prefix(keys(1), 5).block_ids == (0,)
    allocator.audit()


def test_a_stale_match_is_refused() -> None:
    allocator = PagedAllocator(3, 4, enable_prefix_caching=True)
    serve(allocator, "X", 12, keys(1))
    match = allocator.match_prefix(keys(1), 12)
    serve(allocator, "Y", 12, keys(2))
    with pytest.raises(AllocatorError, match="out of date"):
        allocator.allocate("Z", 12, keys=keys(1), prefix=match)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (Namespace("x"), Namespace("x"), True),
        (Namespace("x"), Namespace("y"), False),
        (Namespace("x"), Namespace(None, "x"), False),
        (Namespace(None, "s"), Namespace(None, None), False),
        (Namespace(""), Namespace(None), False),
        (None, Namespace(), True),
    ],
)
def test_equal_text_meets_only_in_one_namespace(ours: Namespace, theirs: Namespace, same: bool) -> None:
    allocator = PagedAllocator(6, 4, enable_prefix_caching=True)
    serve(allocator, 0, 12, keys(1, namespace=ours))
    assert bool(allocator.match_prefix(keys(1, namespace=theirs), 12).num_tokens) is same
    assert (keys(1, namespace=ours).chain(2) == keys(1, namespace=theirs).chain(2)) is same


def test_equal_blocks_after_unequal_ones_do_not_hit() -> None:
    allocator = PagedAllocator(6, 4, enable_prefix_caching=True)
    first = PrefixKeys(TokenStream.from_ids([1, 2, 3, 4, 9, 9, 9, 9]), None, 4)
    other = PrefixKeys(TokenStream.from_ids([5, 6, 7, 8, 9, 9, 9, 9]), None, 4)
    serve(allocator, 0, 8, first)
    assert allocator.match_prefix(other, 9).num_tokens == 0
    assert first.link(1) == other.link(1)
    assert first.chain(1) != other.chain(1)


def test_token_ids_whose_hashes_collide_do_not_hit() -> None:
    """In Python hash(-1) == hash(-2): a hit must compare the text."""
    allocator = PagedAllocator(8, 1, enable_prefix_caching=True)
    for seq, token in (("a", -1), ("b", -2)):
        serve(allocator, seq, 2, PrefixKeys(TokenStream.from_ids([token, 5]), None, 1))
    match = allocator.match_prefix(PrefixKeys(TokenStream.from_ids([-2, 5, 5]), None, 1), 3)
    assert match.block_ids == (2, 3)


def test_a_match_whose_block_says_something_else_by_now_is_refused() -> None:
    """Block 0 was A's and is B's: the same place in another text."""
    allocator = PagedAllocator(3, 4, enable_prefix_caching=True)
    match = serve(allocator, "A", 4, keys(1))
    match = allocator.match_prefix(keys(1), 5)
    allocator.allocate("others", 8)
    serve(allocator, "B", 4, keys(2))
    assert allocator.match_prefix(keys(2), 5).block_ids == match.block_ids == (0,)
    before = state(allocator)
    with pytest.raises(AllocatorError, match="out of date"):
        allocator.allocate("A", 4, keys=keys(1), prefix=match)
    assert state(allocator) == before


def test_a_match_that_leaves_its_run_is_held_to_its_text() -> None:
    """Two texts part after a block; the end of one is no hit for the other, nor for a third."""
    allocator = PagedAllocator(9, 4, enable_prefix_caching=True)
    texts = [keys_of((1,) * 4 + (number,) * 5) for number in range(3)]
    for number in (0, 1):
        serve(allocator, number, 8, texts[number])
    matches = [allocator.match_prefix(text, 9) for text in texts[:2]]
    for match, text in ((matches[0], texts[1]), (matches[1], texts[0]), (matches[1], texts[2])):
        with pytest.raises(AllocatorError, match="out of date"):
            allocator.allocate("x", 9, keys=text, prefix=match)
    for number in (0, 1):
        allocator.allocate(number, 9, keys=texts[number], prefix=matches[number])
    allocator.audit()


def keys_of(token_ids: tuple[int, ...]) -> PrefixKeys:
    return PrefixKeys(TokenStream.from_ids(token_ids), None, 4)


def test_a_forked_child_registers_its_own_text() -> None:
    allocator = PagedAllocator(10, 4, enable_prefix_caching=True)
    prompt = TokenStream.from_segment(1, 6)
    texts = [PrefixKeys(prompt + TokenStream.from_segment(2 + sample, 6), None, 4) for sample in (0, 1)]
    allocator.allocate(0, 6, keys=texts[0])
    allocator.register(0, 6)
    allocator.fork(0, 1, keys=texts[1])
    for sample in (0, 1):
        allocator.append_slots(sample, 6)
        allocator.register(sample, 12)
    assert allocator.num_hashed_blocks == 5
    for sample in (0, 1):
        assert allocator.match_prefix(texts[sample], 13).block_ids == allocator.block_table(sample)
    allocator.audit()


def test_lifo_hands_out_the_last_block_first_and_frees_front_to_back() -> None:
    allocator = PagedAllocator(5, 4, free_list="lifo")
    allocator.allocate(0, 12)
    assert allocator.block_table(0) == (4, 3, 2)
    allocator.free(0)
    assert allocator.free_block_ids() == (0, 1, 4, 3, 2)


def test_lru_puts_unhashed_blocks_in_front_and_hashed_ones_behind() -> None:
    allocator = PagedAllocator(9, 4, enable_prefix_caching=True, free_list="lru", null_block=True)
    assert allocator.num_blocks == 8
    assert allocator.free_block_ids() == (1, 2, 3, 4, 5, 6, 7, 8)
    allocator.allocate("a", 15, keys=keys(1))
    allocator.register("a", 8)
    allocator.free("a")
    assert allocator.free_block_ids() == (4, 3, 5, 6, 7, 8, 2, 1)


def test_exclusive_first_hands_out_shared_blocks_last() -> None:
    allocator = PagedAllocator(4, 4, free_list="exclusive_first")
    allocator.allocate("a", 4)
    allocator.fork("a", "b")
    allocator.allocate("c", 4)
    assert allocator.is_shared(0)
    assert not allocator.is_shared(1)
    for seq in ("a", "b", "c"):
        allocator.free(seq)
    assert allocator.free_block_ids() == (2, 3, 1, 0)
    allocator.allocate("d", 16)
    allocator.free("d")
    assert allocator.free_block_ids() == (0, 1, 3, 2)


def test_sliding_window_reuses_its_own_blocks_in_a_ring() -> None:
    allocator = PagedAllocator(6, 4, sliding_window=8)
    assert allocator.can_allocate(1000) is AllocStatus.OK
    allocator.allocate(0, 10)
    assert allocator.block_table(0) == (0, 1, 0)
    for _ in range(8):
        allocator.append_slots(0)
        allocator.audit()
    assert allocator.block_table(0) == (0, 1, 0, 1, 0)
    assert allocator.num_filled_slots == 8
    allocator.fork(0, 1)
    assert allocator.append_slots(1) == (BlockCopy(0, 2, 4),)
    assert allocator.block_table(1) == (2, 1, 2, 1, 2)
    allocator.audit()
    assert allocator.append_slots(0, 6) == (BlockCopy(1, 3, 4),)
    allocator.audit()
    allocator.free(0)
    allocator.free(1)
    assert allocator.num_free_blocks == 6
    assert allocator.num_filled_slots == 0
    allocator.audit()


def test_the_papers_leaks_are_there_only_on_request() -> None:
    allocator = PagedAllocator(6, 4, free_list="lifo", upstream_faults=True)
    allocator.allocate(0, 6, num_refs=2)
    assert allocator.append_slots(0) == (BlockCopy(4, 3, 2),)
    allocator.audit()
    assert allocator.num_leaked_blocks == 1
    assert allocator.num_filled_slots == 7
    allocator.free(0)
    allocator.free(0)
    assert (allocator.num_leaked_blocks, allocator.num_filled_slots) == (2, 0)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1, 20)
    assert (allocator.num_free_blocks, allocator.num_leaked_blocks) == (0, 6)
    allocator.audit()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_blocks": 0, "block_size": 4}, "num_blocks is 0"),
        ({"num_blocks": 4, "block_size": 0}, "block_size is 0"),
        ({"num_blocks": 4, "block_size": 4, "free_list": "random"}, "'random' is unknown"),
        ({"num_blocks": 4, "block_size": 4, "sliding_window": 6}, "multiple of block_size"),
        ({"num_blocks": 4, "block_size": 4, "sliding_window": 8, "enable_prefix_caching": True}, "sliding window"),
    ],
)
def test_bad_sizes_are_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(AllocatorError, match=text):
        PagedAllocator(**arguments)  # type: ignore[arg-type]


def grown_twins(caching: bool) -> tuple[PagedAllocator, PagedAllocator]:
    """Two allocators with three sequences of two blocks each, which were told 5, 7 and 8 tokens."""
    twins = []
    for _ in range(2):
        allocator = PagedAllocator(8, 4, enable_prefix_caching=caching)
        for source, num_tokens in ((1, 5), (2, 7), (3, 8)):
            allocator.allocate(source, num_tokens, keys=keys(source) if caching else None)
        twins.append(allocator)
    return twins[0], twins[1]


@pytest.mark.parametrize("caching", [False, True])
def test_growing_each_is_appending_one_after_the_other(caching: bool) -> None:
    """Two blocks are left for three sequences that need one each: the first two get them."""
    together, alone = grown_twins(caching)
    assert together.grow_each([1, 2, 3]) == 2
    alone.append_slots(1, 4)
    alone.append_slots(2, 2)
    assert state(together) == state(alone)
    together.audit()


def test_growing_each_ends_where_a_tail_has_to_be_copied_first() -> None:
    allocator = PagedAllocator(20, 4)
    for name, num_tokens in (("full", 8), ("half", 6), ("shared", 7)):
        allocator.allocate(name, num_tokens)
    allocator.fork("shared", "twin")
    before = state(allocator)
    assert allocator.grow_each(["shared", "full"]) == 0
    with pytest.raises(AllocatorError, match="'nobody' has no block table"):
        allocator.grow_each(["full", "nobody"])
    assert state(allocator) == before
    assert allocator.grow_each(["half", "full", "twin", "full"]) == 2
    assert [allocator.num_tokens(name) for name in ("half", "full", "twin")] == [9, 9, 7]
    allocator.audit()


def test_neither_grows_each_nor_fills_each_in_a_window() -> None:
    allocator = PagedAllocator(20, 4, sliding_window=8)
    allocator.allocate("a", 6)
    with pytest.raises(AllocatorError, match="window"):
        allocator.grow_each(["a"])
    with pytest.raises(AllocatorError, match="'a' has no room of its own for 8 tokens"):
        allocator.fill_each(["a"])


def test_filling_each_is_appending_and_registering() -> None:
    together, alone = grown_twins(True)
    together.fill_each([1, 2])
    for seq_id, num_tokens in ((1, 3), (2, 1)):
        alone.append_slots(seq_id, num_tokens)
        alone.register(seq_id, 8)
    assert state(together) == state(alone)
    assert together.match_prefix(keys(1), 9).num_tokens == 8
    together.audit()


def test_filling_each_tells_a_cache_that_is_off_nothing() -> None:
    allocator = PagedAllocator(2, 4)
    for source in (1, 2, 3):
        allocator.allocate("A", 3, keys=keys(source))
        allocator.fill_each(["A"])
        assert allocator.num_hashed_blocks == 0
        allocator.free("A")
        allocator.audit()


def test_filling_each_takes_no_block_and_copies_none() -> None:
    allocator = PagedAllocator(20, 4, enable_prefix_caching=True)
    allocator.allocate("a", 6, keys=keys(1))
    allocator.fork("a", "b", keys=keys(2))
    with pytest.raises(AllocatorError, match="'a' has no room of its own for 8 tokens"):
        allocator.fill_each(["a"])
    allocator.audit()


def test_the_end_of_a_common_text_branches_within_a_run() -> None:
    """Three texts share a system prompt of two blocks; each goes on by itself, and is found again whole."""
    allocator = PagedAllocator(40, 4, enable_prefix_caching=True)
    texts = [PrefixKeys(TokenStream.from_segment(9, 8) + TokenStream.from_segment(i, 12), None, 4) for i in (1, 2, 3)]
    for name, text in enumerate(texts):
        serve(allocator, name, 20, text)
    assert [allocator.match_prefix(text, 21).num_tokens for text in texts] == [20, 20, 20]
    assert len({allocator.match_prefix(text, 9).block_ids for text in texts}) == 1
    assert allocator.num_hashed_blocks == 2 + 3 * 3


def test_an_adapter_and_a_salt_keep_equal_texts_apart_and_an_empty_salt_does_not() -> None:
    allocator = PagedAllocator(8, 4, enable_prefix_caching=True)
    text = TokenStream.from_segment(1, 8)
    allocator.allocate("a", 8, keys=PrefixKeys(text, Namespace(), 4))
    allocator.register("a", 8)
    found = {
        namespace: allocator.match_prefix(PrefixKeys(text, namespace, 4), 9).num_tokens
        for namespace in (Namespace(), Namespace(salt=""), Namespace(salt="s"), Namespace(lora="s"))
    }
    assert list(found.values()) == [8, 8, 0, 0]


def test_keys_for_blocks_of_another_size_are_refused() -> None:
    allocator = PagedAllocator(8, 4, enable_prefix_caching=True)
    text = TokenStream.from_ids(range(16))
    keys, small = (PrefixKeys(text, None, size) for size in (4, 2))
    message = "the keys are for blocks of 2 tokens; the allocator has blocks of 4"
    for command in (
        lambda: allocator.match_prefix(small, 9),
        lambda: allocator.allocate("a", 8, keys=small),
    ):
        with pytest.raises(AllocatorError, match=message):
            command()
    assert allocator.usage().num_used == 0
    allocator.allocate("a", 8, keys=keys)
    with pytest.raises(AllocatorError, match=message):
        allocator.fork("a", "b", keys=small)
    assert not allocator.has_table("b")
    allocator.audit()


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("free_list", FREE_LIST_POLICIES)
def test_a_deep_copy_lives_a_life_of_its_own(free_list: str, caching: bool, is_watched: bool) -> None:
    """What would happen if: the copy goes on as the first would have, which notices nothing."""
    first = PagedAllocator(
        9,
        4,
        num_host_blocks=4,
        free_list=free_list,
        enable_prefix_caching=caching,
        journal=Journal() if is_watched else None,
    )
    serve(first, "a", 8, keys(1))
    first.allocate("b", 7, keys=keys(2))
    first.register("b", 7)
    before = state(first)

    def go_on(allocator: PagedAllocator) -> tuple[object, ...]:
        match = allocator.match_prefix(keys(1), 9)
        allocator.allocate("c", 9, keys=keys(1), prefix=match)
        allocator.append_slots("b", 2)
        allocator.fork("b", "d")
        allocator.append_slots("d")
        allocator.swap_out(["c"])
        allocator.register("b", 9)
        allocator.free("b")
        allocator.audit()
        return state(allocator)

    twins = [copy.deepcopy(first)] if is_watched else [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    after = [go_on(twin) for twin in twins]
    assert state(first) == before
    first.audit()
    assert {*map(repr, after)} == {repr(go_on(first))}
