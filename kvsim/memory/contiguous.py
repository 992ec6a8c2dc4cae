"""Contiguous preallocation: every sequence owns one region of an address space, taken whole at admission.

This is how serving systems kept their KV cache before paging, and the baseline of the PagedAttention paper
(SOSP 2023, its Orca variants over a buddy allocator). How many slots a region gets is the scheduler's reservation
policy; where it lies is the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from kvsim.memory.holes import Extent, make_space
from kvsim.memory.interface import NO_MATCH, BlockCopy, KeyChain, PrefixMatch, RegionMove, Transfer, Usage
from kvsim.memory.journal import Journal
from kvsim.types import AllocatorError, AllocStatus, LawViolation, OutOfBlocks, SeqId

Placement = Literal["buddy", "first_fit", "best_fit", "worst_fit"]
Compaction = Literal["on_demand"]


class NoHole(OutOfBlocks):
    """No hole is large enough, whatever the free total; nothing was changed."""

    def __init__(self, needed: int, free: int, largest_hole: int) -> None:
        super().__init__(needed, free)
        self.largest_hole = largest_hole
        self.args = (needed, free, largest_hole)

    def __str__(self) -> str:
        return f"needs a hole of {self.needed} slots; {self.free} are free, the largest hole has {self.largest_hole}"


class _Region:
    __slots__ = ("length", "num_tokens", "size", "start")

    def __init__(self, start: int, length: int, size: int, num_tokens: int) -> None:
        self.start = start
        self.length = length
        """Slots the sequence asked for."""
        self.size = size
        """Slots taken: `length`, rounded up by the buddy placement."""
        self.num_tokens = num_tokens


class ContiguousAllocator:
    """A `KVAllocator` of block size 1 in which a sequence's slots lie side by side; block ids are slot addresses.

    `allocate` takes `num_tokens + reserve_tokens` slots in one hole; `append_slots` stays within them, and asking for
    more raises AllocatorError, for a region cannot grow. Nothing can be shared: there is no prefix cache and no
    host pool (`swap_out` answers None), and **`fork` copies**: the child needs a region of its own, either one that
    was set aside for it at admission by `allocate(child, 0, reserve_tokens=parent's slots)` (then `fork` cannot run
    out; a request with n samples is admitted as n regions), or one taken by `fork` itself, which raises NoHole
    if none is large enough. `fork_move` says what must be copied.

    Used slots are those asked for; what the buddy placement adds is `Usage.num_rounding_slots`.
    `compaction="on_demand"` lets `make_room` slide regions together when only a hole is missing.
    A journal sees a region as the block at its first address.
    """

    block_size = 1

    def __init__(
        self,
        num_slots: int,
        *,
        placement: Placement = "buddy",
        compaction: Compaction | None = None,
        journal: Journal | None = None,
    ) -> None:
        if num_slots < 1:
            raise AllocatorError(f"num_slots is {num_slots}; it must be at least 1")
        if placement not in get_args(Placement):
            raise AllocatorError(f"placement is {placement!r}; it is one of {', '.join(get_args(Placement))}")
        if compaction is not None and compaction not in get_args(Compaction):
            raise AllocatorError(f"compaction is {compaction!r}; it is 'on_demand' or null")
        self.placement = placement
        self.compaction = compaction
        self.journal = journal
        self._space = make_space(num_slots, placement)
        self._regions: dict[SeqId, _Region] = {}
        self._num_used = 0
        self._usage: Usage | None = None
        """Counted when first asked for after a change."""

    @property
    def num_blocks(self) -> int:
        return self._space.num_slots

    @property
    def num_free_blocks(self) -> int:
        """Slots in no region, rounding excluded; a single request gets at most `largest_hole` of them."""
        return self._space.num_free

    @property
    def largest_hole(self) -> int:
        """The largest region that can be taken now (buddy: the largest free aligned power of two), in slots."""
        return self._space.largest_hole

    @property
    def max_region(self) -> int:
        """The largest region an empty space can give, in slots."""
        return self._space.max_extent

    def max_regions(self, num_slots: int) -> int:
        """How many regions of `num_slots` slots fit into the empty space."""
        size = self._space.extent_size(num_slots)
        return self._space.num_slots // size if 0 < size <= self._space.max_extent else 0

    def holes(self) -> tuple[Extent, ...]:
        """The free extents (start, size), by address; the buddy placement's are aligned powers of two."""
        return self._space.holes()

    @property
    def external_frag_index(self) -> float:
        """1 - largest hole / free slots: 0 with a single hole (or none), near 1 when the space is in splinters."""
        free = self._space.num_free
        return 1 - self._space.largest_hole / free if free else 0.0

    def region(self, seq_id: SeqId) -> Extent:
        """Where the sequence lies: (start, length), in slots, rounding excluded."""
        region = self._region(seq_id)
        return region.start, region.length

    def can_allocate(
        self, num_tokens: int, *, prefix: PrefixMatch = NO_MATCH, reserve_tokens: int = 0, watermark_blocks: int = 0
    ) -> AllocStatus:
        size = self._space.extent_size(num_tokens + reserve_tokens)
        if size > self._space.max_extent or size + watermark_blocks > self._space.num_slots:
            return AllocStatus.NEVER
        fits = size <= self._space.largest_hole and self._space.num_free - size >= watermark_blocks
        return AllocStatus.OK if fits else AllocStatus.LATER

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        """Always NO_MATCH: regions are never shared."""
        return NO_MATCH

    def has_table(self, seq_id: SeqId) -> bool:
        return seq_id in self._regions

    def num_tokens(self, seq_id: SeqId) -> int:
        return self._region(seq_id).num_tokens

    def num_slots(self, seq_id: SeqId) -> int:
        return self._region(seq_id).length

    def block_table(self, seq_id: SeqId) -> Sequence[int]:
        """The addresses of the sequence's slots, filled or not."""
        region = self._region(seq_id)
        return range(region.start, region.start + region.length)

    def fork_move(self, parent_id: SeqId, child_id: SeqId) -> RegionMove:
        """The copy that a fork owes: the child's tokens, from the parent's region to its own."""
        src, dst = self._region(parent_id), self._region(child_id)
        return RegionMove(child_id, src.start, dst.start, dst.num_tokens)

    def usage(self) -> Usage:
        if self._usage is None:
            self._usage = self._count_usage()
        return self._usage

    def _count_usage(self) -> Usage:
        space = self._space
        return Usage(
            num_blocks=space.num_slots,
            num_used=self._num_used,
            num_cached_idle=0,
            num_free=space.num_free,
            num_rounding_slots=space.num_slots - space.num_free - self._num_used,
            largest_hole=space.largest_hole,
            num_logical=self._num_used,
        )

    def _region(self, seq_id: SeqId) -> _Region:
        region = self._regions.get(seq_id)
        if region is None:
            raise AllocatorError(f"sequence {seq_id!r} has no region")
        return region

    def allocate(
        self,
        seq_id: SeqId,
        num_tokens: int,
        *,
        keys: KeyChain | None = None,
        prefix: PrefixMatch = NO_MATCH,
        reserve_tokens: int = 0,
    ) -> None:
        """Take one hole of `num_tokens + reserve_tokens` slots, the first `num_tokens` of them filled.

        Raises NoHole (an OutOfBlocks), or AllocatorError for a sequence that has a region, a size below 1,
        or a prefix to share.
        """
        if prefix.num_tokens:
            raise AllocatorError(f"sequence {seq_id!r}: contiguous regions cannot share a prefix")
        if num_tokens < 0 or reserve_tokens < 0:
            raise AllocatorError(f"sequence {seq_id!r}: {num_tokens} + {reserve_tokens} slots; none may be negative")
        self._take(seq_id, num_tokens + reserve_tokens, num_tokens)

    def _take(self, seq_id: SeqId, length: int, num_tokens: int) -> None:
        if seq_id in self._regions:
            raise AllocatorError(f"sequence {seq_id!r} has a region already")
        if length < 1:
            raise AllocatorError(f"sequence {seq_id!r} asks for {length} slots; a region has at least 1")
        size = self._space.extent_size(length)
        start = self._space.take(size)
        if start is None:
            raise NoHole(size, self._space.num_free, self._space.largest_hole)
        self._regions[seq_id] = _Region(start, length, size, num_tokens)
        self._num_used += length
        self._usage = None
        self._note(seq_id, "taken", start, 1)

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        """Store `num_tokens` more tokens within the region; never takes a slot, never copies.

        Raises AllocatorError beyond the region's end, and for less than one token.
        """
        region = self._region(seq_id)
        if num_tokens < 1:
            raise AllocatorError(f"cannot append {num_tokens} tokens; append at least 1")
        stored = region.num_tokens + num_tokens
        if stored > region.length:
            raise AllocatorError(
                f"sequence {seq_id!r} would store {stored} tokens in a region of {region.length} slots; "
                f"a contiguous region cannot grow: reserve more at admission"
            )
        region.num_tokens = stored
        return ()

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        """A no-op: there is no prefix cache."""

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        """Copy the parent's tokens into the child's own region; see the class for where that comes from.

        Raises NoHole, or AllocatorError if the child's region is filled already or too small; nothing is changed then.
        """
        parent = self._region(parent_id)
        child = self._regions.get(child_id)
        if child is None:
            self._take(child_id, parent.length, parent.num_tokens)
        elif child.num_tokens or child.length < parent.num_tokens:
            raise AllocatorError(
                f"sequence {child_id!r} cannot be forked from {parent_id!r}: its region has {child.length} slots, "
                f"{child.num_tokens} of them filled, and {parent.num_tokens} tokens are to be copied"
            )
        else:
            child.num_tokens = parent.num_tokens
        self._note(child_id, "copied", parent.start, 1, self._regions[child_id].start)

    def free(self, seq_id: SeqId) -> None:
        region = self._region(seq_id)
        del self._regions[seq_id]
        self._num_used -= region.length
        self._usage = None
        self._space.release(region.start, region.size)
        self._note(seq_id, "ref_dec", region.start, 0)
        self._note(seq_id, "freed", region.start, 0)

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        """Always None: there is no host pool."""
        return None

    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        """Always None: there is no host pool."""
        return None

    def make_room(self, num_slots: int) -> tuple[RegionMove, ...]:
        """Compact on demand: slide regions so that one of `num_slots` slots fits, if that is all that is missing.

        Empty (nothing changed) if a hole is there already, if no packing makes one, or with compaction switched off.
        """
        size = self._space.extent_size(num_slots)
        if self.compaction is None or size <= self._space.largest_hole:
            return ()
        return self._pack(size)

    def compact(self) -> tuple[RegionMove, ...]:
        """Slide all regions together, so that what is free is as whole as the placement allows."""
        return self._pack(None)

    def _pack(self, room: int | None) -> tuple[RegionMove, ...]:
        extents = [(region.start, region.size) for region in self._regions.values()]
        new_starts = self._space.packed(extents, room)
        if not new_starts:
            return ()
        moves = []
        for seq_id, region in sorted(self._regions.items(), key=lambda item: item[1].start):
            start = new_starts.get(region.start)
            if start is not None:
                moves.append(RegionMove(seq_id, region.start, start, region.num_tokens))
                region.start = start
        self._usage = None
        self._space.rebuild((region.start, region.size) for region in self._regions.values())
        self._note_moves(moves)
        return tuple(moves)

    def _note_moves(self, moves: Sequence[RegionMove]) -> None:
        """All old addresses are given up before any new one is taken, for they may overlap."""
        for move in moves:
            self._note(move.seq_id, "copied", move.src, 1, move.dst)
            self._note(move.seq_id, "ref_dec", move.src, 0)
            self._note(move.seq_id, "freed", move.src, 0)
        for move in moves:
            self._note(move.seq_id, "taken", move.dst, 1)

    def _note(self, seq_id: SeqId, event: str, start: int, ref_count: int, other: int | None = None) -> None:
        if self.journal is not None:
            self.journal.name(seq_id)
            self.journal.record(event, start, ref_count, other)

    def audit(self) -> None:
        """Recompute the memory's laws: regions and holes tile the space, sums agree, holes are merged."""
        if fault := self._space.check():
            raise LawViolation(f"law 4: {fault}")
        extents = sorted((region.start, region.size) for region in self._regions.values())
        end = 0
        for start, size in sorted([*extents, *self._space.holes()]):
            if start != end:
                raise LawViolation(f"law 4: slots {end} and {start} should be neighbours: an overlap or a leak")
            end = start + size
        if end != self._space.num_slots:
            raise LawViolation(f"law 4: regions and holes end at {end}, the space has {self._space.num_slots} slots")
        for seq_id, region in self._regions.items():
            if not 0 <= region.num_tokens <= region.length <= region.size:
                raise LawViolation(f"law 8: sequence {seq_id!r} stores {region.num_tokens} of {region.length} slots")
        if self._num_used != sum(region.length for region in self._regions.values()):
            raise LawViolation(f"law 4: {self._num_used} slots are counted as used")
        if self.usage() != self._count_usage():
            raise LawViolation(f"law 4: usage is counted as {self.usage()}; it is {self._count_usage()}")
        free = sum(size for _, size in self._space.holes())
        if free != self._space.num_free:
            raise LawViolation(f"law 4: {self._space.num_free} slots are counted as free, the holes have {free}")


def num_moved_slots(moves: Sequence[RegionMove]) -> int:
    """Slots that a compaction copies: what `StepShape.num_moved_slots` prices."""
    return sum(move.num_tokens for move in moves)
