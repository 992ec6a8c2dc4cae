"""Block tables: from a sequence's token positions to physical slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvsim.types import AllocatorError, BlockId

if TYPE_CHECKING:
    from kvsim.memory.interface import KeyChain
    from kvsim.memory.prefix_cache import Place, PrefixRun


class BlockTable:
    """One sequence's blocks in logical order, and how far they are filled; mutable, owned by the allocator."""

    __slots__ = ("block_ids", "keys", "num_findable", "num_registered", "num_tokens", "own_run", "place")

    def __init__(self, block_ids: list[BlockId], num_tokens: int) -> None:
        self.block_ids = block_ids
        self.num_tokens = num_tokens
        self.keys: KeyChain | None = None
        self.num_registered = 0
        """Leading blocks that the prefix cache knows."""
        self.place: Place | None = None
        """Where in the prefix cache those blocks end."""
        self.own_run: PrefixRun | None = None
        """The run of the prefix cache that this table makes longer: it takes the blocks when somebody looks at it."""
        self.num_findable = 0
        """Leading tokens of which the full blocks may be found (for a table with a run of its own)."""

    def copy(self) -> BlockTable:
        """A table of its own over the same blocks; a run of the prefix cache stays with the first."""
        twin = BlockTable(self.block_ids.copy(), self.num_tokens)
        twin.keys, twin.num_registered, twin.place = self.keys, self.num_registered, self.place
        return twin


class Slot(NamedTuple):
    """A physical place for the KV of one token."""

    block_id: BlockId
    offset: int


def slot_of(block_ids: Sequence[BlockId], position: int, block_size: int) -> Slot:
    """Where the token at `position` lives: block `position // block_size` of the table, offset the rest."""
    return Slot(block_ids[position // block_size], position % block_size)


class TableDelta(NamedTuple):
    """Entries `start ..` of a block table that must reach the GPU."""

    start: int
    block_ids: tuple[BlockId, ...]


def table_delta(before: Sequence[BlockId], after: Sequence[BlockId]) -> TableDelta:
    """The tail of `after` from the first entry that differs from `before`."""
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    return TableDelta(same, tuple(after[same:]))


def upload_bytes(num_entries: int, entry_bytes: int = 4) -> int:
    """Bytes of `num_entries` table entries of 4 or 8 bytes. Raises AllocatorError for another width."""
    if entry_bytes not in (4, 8):
        raise AllocatorError(f"a block-table entry has 4 or 8 bytes, not {entry_bytes}")
    return num_entries * entry_bytes
