"""What an allocator promises: the Protocol every engine is written against, and the values it returns.

One owner, not thread-safe. Queries are pure. A command happens completely, or raises (or returns None) and
changes nothing. Memory never executes a copy or a transfer: it returns them as data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import unwrap
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from kvsim.tokens import Content
from kvsim.types import AllocStatus, BlockId, SeqId


class BlockCopy(NamedTuple):
    """Copy the first `num_tokens` slots of block `src` to block `dst` (copy-on-write)."""

    src: BlockId
    dst: BlockId
    num_tokens: int


class BlockMove(NamedTuple):
    """Move one block between the GPU pool and the host pool; ids are raw ids of their own pool."""

    src: BlockId
    dst: BlockId


class RegionMove(NamedTuple):
    """Contiguous: copy the first `num_tokens` slots of a region from address `src` to `dst` (compaction, or a fork).

    The moves of one compaction happen at once: all is read before anything is written.
    """

    seq_id: SeqId
    src: int
    dst: int
    num_tokens: int


Transfer = tuple[BlockMove, ...]
"""The ordered moves of one swap; a shared block moves once."""


class PrefixMatch(NamedTuple):
    """The longest cached prefix of a text: whole blocks only."""

    num_tokens: int
    block_ids: tuple[BlockId, ...]
    num_revived: int
    """Blocks of the hit that nobody references now: taking them costs free capacity."""
    num_queried: int = 0
    """Tokens that were asked for; counted as a query when the match is allocated."""


NO_MATCH = PrefixMatch(0, (), 0)


class Usage(NamedTuple):
    """Counts of an allocator's memory at one instant, in blocks unless said otherwise (contiguous: block size 1)."""

    num_blocks: int
    num_used: int
    """Referenced by at least one sequence."""
    num_cached_idle: int
    """Findable by the prefix cache, referenced by nobody: reclaimable."""
    num_free: int
    """Neither used nor cached idle."""
    num_shared: int = 0
    """Used blocks that more than one table names."""
    num_evicted: int = 0
    """Evictions since the start."""
    num_host_used: int = 0
    num_host_blocks: int = 0
    num_rounding_slots: int = 0
    """Contiguous only: slots lost to buddy rounding."""
    largest_hole: int = 0
    """Contiguous only: the largest free hole, in slots."""
    num_logical: int = 0
    """Table entries of all sequences on the GPU: what would be used without sharing."""


Link: TypeAlias = tuple[Content, tuple[int, ...]]
"""What one block adds to a prefix: its content, and for the first block the namespace."""


class KeyChain(Protocol):
    """The prefix-cache keys of one text: `chain(k)` is the key of its block `k`, chained over all earlier blocks."""

    def chain(self, block_index: int) -> int: ...

    def link(self, block_index: int) -> Link:
        """What block `block_index` adds to the prefix before it; equal links up to k are equal prefixes up to k."""
        ...

    def num_full_blocks(self, num_tokens: int) -> int: ...


@runtime_checkable
class KVAllocator(Protocol):
    """Who owns block ids, reference counts and the prefix index."""

    block_size: int

    @property
    def num_blocks(self) -> int:
        """Usable blocks (a null block does not count)."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks a command can take now, cached-idle ones included."""
        ...

    def can_allocate(
        self, num_tokens: int, *, prefix: PrefixMatch = NO_MATCH, reserve_tokens: int = 0, watermark_blocks: int = 0
    ) -> AllocStatus:
        """Can a new sequence get slots for `num_tokens` (of which `prefix` is a hit) and leave the watermark free?

        NEVER if an empty pool could not do that either.
        `reserve_tokens` are slots to be set aside beyond `num_tokens`; contiguous allocators need them at once,
        paged ones ignore them.
        """
        ...

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        """The longest cached prefix in whole blocks of the first `num_tokens - 1` tokens: one is left to compute."""
        ...

    def allocate(
        self,
        seq_id: SeqId,
        num_tokens: int,
        *,
        keys: KeyChain | None = None,
        prefix: PrefixMatch = NO_MATCH,
        reserve_tokens: int = 0,
    ) -> None:
        """Give a new sequence a table that holds `num_tokens` tokens, the first `prefix.num_tokens` by sharing.

        Raises OutOfBlocks, or AllocatorError if the sequence has a table already.
        """
        ...

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        """Store `num_tokens` more tokens; copy a shared partial tail first, take new blocks as needed.

        Raises OutOfBlocks (nothing changed), AllocatorError for an unknown sequence.
        """
        ...

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable (a no-op without prefix caching).

        A block whose text another one holds already becomes findable too: the other may be evicted first.
        """
        ...

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        """Let the child share every block of the parent, where that is; takes no block, cannot run out.

        `keys` are those of the child's own text; without them its later blocks stay unknown to the prefix cache.
        """
        ...

    def free(self, seq_id: SeqId) -> None:
        """Drop the sequence's references, last block first. Raises AllocatorError if it has none."""
        ...

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        """Move the sequences' blocks to the host, sharing kept; None (nothing changed) if it has no room."""
        ...

    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        """Move them back into newly allocated blocks; None (nothing changed) if they do not fit."""
        ...

    def has_table(self, seq_id: SeqId) -> bool:
        """Whether the sequence holds memory, here or on the host."""
        ...

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens stored for the sequence."""
        ...

    def num_slots(self, seq_id: SeqId) -> int:
        """Slots allocated to the sequence: table length x block size (contiguous: the reservation)."""
        ...

    def block_table(self, seq_id: SeqId) -> Sequence[BlockId]:
        """Read-only view of the sequence's table, in logical order; host blocks if it is swapped out."""
        ...

    def usage(self) -> Usage: ...

    def audit(self) -> None:
        """Recompute every law of the memory from scratch. Raises LawViolation."""
        ...


def stands_for(allocator: object, shortcut: str, calls: Iterable[str]) -> bool:
    """Whether an allocator has `shortcut`, and it still does what `calls` would do one by one.

    Whoever derives an allocator and writes one of the calls anew inherits shortcuts that know nothing of it.
    """
    if any(_is_patched(allocator, name) for name in calls):
        return False
    for cls in type(allocator).__mro__:
        if shortcut in vars(cls):
            return True
        if any(name in vars(cls) for name in calls):
            return False
    return False


def _is_patched(allocator: object, name: str) -> bool:
    """This one object answers for itself; a wrapper around its class's method (`functools.wraps`) changes nothing."""
    own = getattr(allocator, "__dict__", {}).get(name)
    return own is not None and getattr(unwrap(own), "__func__", None) is not getattr(type(allocator), name, None)
