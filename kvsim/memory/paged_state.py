"""What a paged allocator holds, and what can be asked of it: tables, counts, and where each token lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvsim.memory.audit import audit, fills_of
from kvsim.memory.block_pool import BlockPool, picked
from kvsim.memory.block_table import BlockTable, Slot, slot_of
from kvsim.memory.interface import NO_MATCH, KeyChain, PrefixMatch, Usage
from kvsim.memory.journal import Journal, JournaledPool, observe
from kvsim.memory.prefix_cache import PrefixIndex
from kvsim.types import AllocatorError, AllocStatus, BlockId, SeqId


class PagedState:
    """The state of a `PagedAllocator`, which has the keywords; the questions change nothing."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = False,
        free_list: str = "fifo",
        sliding_window: int | None = None,
        null_block: bool = False,
        upstream_faults: bool = False,
        journal: Journal | None = None,
    ) -> None:
        _check_sizes(num_blocks, block_size, num_host_blocks, sliding_window, null_block)
        if sliding_window and enable_prefix_caching:
            raise AllocatorError("a sliding window overwrites blocks, so prefix caching cannot be on beside it")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.upstream_faults = upstream_faults
        self.window_blocks = sliding_window // block_size if sliding_window else 0
        self.index = PrefixIndex(num_blocks)
        make_pool = BlockPool if journal is None else partial(JournaledPool, journal)
        self.pool = make_pool(
            num_blocks,
            free_list,
            num_reserved=int(null_block),
            can_pull=enable_prefix_caching,
            texts=self.index.run_of,
        )
        self.host = BlockPool(num_host_blocks, "lifo" if free_list == "lifo" else "fifo")
        self._tables: dict[SeqId, BlockTable] = {}
        self._swapped: dict[SeqId, BlockTable] = {}
        self._surplus: dict[BlockId, int] = {}
        """References that belong to no table (the paper's engine's leaks)."""
        self._ref = self.pool.ref
        self._free_pop, self._free_pop_many = self.pool.pop, self.pool.pop_many
        if enable_prefix_caching:
            self.pool.pop, self.pool.pop_many = self._pop_and_forget, self._pop_many_and_forget
        self.journal = journal
        if journal is not None:
            observe(self, journal)
        self._num_logical = 0
        self._num_shared_tails = 0
        self._num_cached_idle = 0
        self._num_leaked = 0
        self._evicted: list[BlockId] | None = None
        self.num_evicted = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that are never handed out and do not count: 1 with a null block."""
        return self.pool.first_block

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_host_blocks(self) -> int:
        return self.host.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        return self.host.num_free

    @property
    def num_filled_slots(self) -> int:
        """Slots of used GPU blocks that hold KV which a table can reach, a shared slot once; costs O(blocks)."""
        return sum(fills_of(self, self._tables).values())

    @property
    def num_logical_blocks(self) -> int:
        """Table entries of the sequences on the GPU."""
        return self._num_logical

    @property
    def num_shared_partial_tails(self) -> int:
        """Partly filled blocks that more than one sequence shares: who writes there must copy first."""
        return self._num_shared_tails

    @property
    def num_hashed_blocks(self) -> int:
        """Blocks that carry a cached text, in use or free; costs O(tables)."""
        for table in self._tables.values():
            self.index.catch_up(table)
        return self.index.num_hashed

    @property
    def num_leaked_blocks(self) -> int:
        """Blocks whose references belong to no table (`upstream_faults` only)."""
        return self._num_leaked

    def can_allocate(
        self, num_tokens: int, *, prefix: PrefixMatch = NO_MATCH, reserve_tokens: int = 0, watermark_blocks: int = 0
    ) -> AllocStatus:
        """OK if new and revived blocks leave `watermark_blocks` free; NEVER if even the empty pool would not do."""
        needed = self._table_blocks(num_tokens)
        if self.num_blocks - needed < watermark_blocks:
            return AllocStatus.NEVER
        taken = needed - len(prefix.block_ids) + prefix.num_revived
        return AllocStatus.OK if self.pool.num_free - taken >= watermark_blocks else AllocStatus.LATER

    def can_append(self, num_sequences: int) -> bool:
        """The paper's engine's question: would one block for each of `num_sequences` sequences do?"""
        return num_sequences <= self.pool.num_free

    def num_blocks_to_append(self, seq_id: SeqId, num_tokens: int = 1) -> int:
        """Blocks that `append_slots(seq_id, num_tokens)` would take now, the copy of a shared tail included."""
        return self._num_needed(self._table(seq_id), num_tokens)

    def can_swap_out(self, seq_ids: Sequence[SeqId]) -> bool:
        """The host has room for the sequences' distinct blocks, wherever they are now."""
        return len(self._distinct(map(self._any_table, seq_ids))) <= self.host.num_free

    def can_swap_in(self, seq_ids: Sequence[SeqId], *, extra_blocks: int = 0, watermark_blocks: int = 0) -> bool:
        """Taking their distinct blocks and `extra_blocks` more (for the next tokens) leaves `watermark_blocks` free."""
        needed = len(self._distinct(map(self._any_table, seq_ids))) + extra_blocks
        return self.pool.num_free - needed >= watermark_blocks

    def num_swapped_blocks(self, seq_ids: Sequence[SeqId]) -> int:
        """Distinct host blocks of swapped sequences: what bringing them back takes."""
        return len(self._distinct(self._swapped_table(seq_id) for seq_id in seq_ids))

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        """The longest cached prefix in whole blocks of the first `num_tokens - 1` tokens; changes nothing."""
        if not self.enable_prefix_caching or num_tokens < 1:
            return NO_MATCH
        self._check_keys(keys)
        found = self.index.find(keys, (num_tokens - 1) // self.block_size)
        if not found:
            return PrefixMatch(0, (), 0, num_tokens)
        return PrefixMatch(len(found) * self.block_size, tuple(found), self._num_idle(found), num_tokens)

    def has_table(self, seq_id: SeqId) -> bool:
        """It holds blocks, on either device."""
        return seq_id in self._tables or seq_id in self._swapped

    def is_swapped(self, seq_id: SeqId) -> bool:
        """Its table holds host block ids."""
        return seq_id in self._swapped

    def seq_ids(self) -> tuple[SeqId, ...]:
        """Sequences that have a table, swapped ones last."""
        return (*self._tables, *self._swapped)

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens stored, as far as the allocator was told."""
        return self._any_table(seq_id).num_tokens

    def num_slots(self, seq_id: SeqId) -> int:
        """Table length x block size."""
        table = self._tables.get(seq_id) or self._any_table(seq_id)
        return len(table.block_ids) * self.block_size

    def block_table(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        """A snapshot of the table, in logical order; host ids if the sequence is swapped."""
        return tuple(self._any_table(seq_id).block_ids)

    def slot(self, seq_id: SeqId, position: int) -> Slot:
        """Where the KV of the sequence's token at `position` lives. Raises AllocatorError beyond the stored tokens."""
        table = self._any_table(seq_id)
        if not 0 <= position < table.num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} stores {table.num_tokens} tokens, none at position {position}")
        return slot_of(table.block_ids, position, self.block_size)

    def check_write(self, seq_id: SeqId, position: int) -> None:
        """Raise AllocatorError if writing the KV of token `position` would change a block that others read."""
        block_id = self.slot(seq_id, position).block_id
        num_refs = (self.host if seq_id in self._swapped else self.pool).ref[block_id]
        if num_refs > 1:
            raise AllocatorError(
                f"sequence {seq_id!r} writes position {position} into block {block_id}, which {num_refs} tables share"
            )

    def ref_count(self, block_id: BlockId) -> int:
        """References to a GPU block."""
        return self.pool.ref[block_id]

    def host_ref_count(self, block_id: BlockId) -> int:
        return self.host.ref[block_id]

    def ref_counts(self) -> list[int]:
        """Reference counts by block id."""
        return self.pool.ref.copy()

    def host_ref_counts(self) -> list[int]:
        return self.host.ref.copy()

    def is_shared(self, block_id: BlockId) -> bool:
        """More than one table names the block now."""
        return self.pool.ref[block_id] > 1

    def free_block_ids(self) -> tuple[BlockId, ...]:
        """The free list front to back (`lifo`: from the bottom of the stack to its top)."""
        return tuple(self.pool.free)

    def free_host_block_ids(self) -> tuple[BlockId, ...]:
        return tuple(self.host.free)

    def tables(self) -> dict[SeqId, BlockTable]:
        """The tables of the sequences on the GPU, for audits; not to be changed."""
        return self._tables

    def swapped_tables(self) -> dict[SeqId, BlockTable]:
        return self._swapped

    def surplus_refs(self) -> dict[BlockId, int]:
        """References that belong to no table, by block (`upstream_faults` only)."""
        return self._surplus

    def take_evicted(self) -> list[BlockId]:
        """Blocks that lost their cached text since the last call of this method, in order.

        The first call begins to keep them: an allocator whose evictions nobody asks for keeps none.
        """
        evicted, self._evicted = self._evicted, []
        return evicted or []

    def usage(self) -> Usage:
        """Counts at this instant; O(1)."""
        pool, host = self.pool, self.host
        num_free = pool.num_free
        counts = (
            pool.num_blocks,
            pool.num_blocks - num_free,
            self._num_cached_idle,
            num_free - self._num_cached_idle,
            pool.num_shared,
            self.num_evicted,
            host.num_blocks - host.num_free,
            host.num_blocks,
            0,
            0,
            self._num_logical,
        )
        # Asked at every step: filling the tuple takes half as long as calling the class with its fields.
        return tuple.__new__(Usage, counts)

    def audit(self) -> None:
        """Recompute every memory law from scratch. Raises LawViolation."""
        audit(self)

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _table_blocks(self, num_tokens: int) -> int:
        """Physical blocks of an unshared table."""
        needed = self._ceil(num_tokens)
        return min(needed, self.window_blocks) if self.window_blocks else needed

    def _table(self, seq_id: SeqId) -> BlockTable:
        try:
            return self._tables[seq_id]
        except KeyError:
            raise self._no_table(seq_id) from None

    def _swapped_table(self, seq_id: SeqId) -> BlockTable:
        try:
            return self._swapped[seq_id]
        except KeyError:
            raise AllocatorError(f"sequence {seq_id!r} is not swapped out") from None

    def _any_table(self, seq_id: SeqId) -> BlockTable:
        return self._swapped[seq_id] if seq_id in self._swapped else self._table(seq_id)

    def _no_table(self, seq_id: SeqId) -> AllocatorError:
        if seq_id in self._swapped:
            return AllocatorError(f"sequence {seq_id!r} is swapped out; swap it in first")
        return AllocatorError(f"sequence {seq_id!r} has no block table (never allocated, or freed already)")

    def _check_keys(self, keys: KeyChain | None) -> None:
        """Keys of blocks of another size would find blocks whose ends are other text."""
        if keys is not None and (size := getattr(keys, "block_size", self.block_size)) != self.block_size:
            raise AllocatorError(
                f"the keys are for blocks of {size} tokens; the allocator has blocks of {self.block_size}"
            )

    def _num_idle(self, block_ids: Sequence[BlockId]) -> int:
        return picked(self._ref, block_ids).count(0)

    def _ring(self, table: BlockTable) -> list[BlockId]:
        """The table's blocks, each once."""
        return list(dict.fromkeys(table.block_ids)) if self.window_blocks else table.block_ids

    def _distinct(self, tables: Iterable[BlockTable]) -> set[BlockId]:
        return {block_id for table in tables for block_id in table.block_ids}

    def _tail_fill(self, table: BlockTable) -> int:
        """Slots of the last block that hold KV; a ring that has gone round is full of older tokens."""
        if self.window_blocks and len(table.block_ids) > self.window_blocks:
            return self.block_size
        return table.num_tokens - (len(table.block_ids) - 1) * self.block_size

    def _is_partial(self, table: BlockTable) -> bool:
        return self._tail_fill(table) < self.block_size

    def _shares_tail(self, table: BlockTable) -> bool:
        """Its last block is partly filled and not its own: who writes there copies it first."""
        return self._is_partial(table) and self._ref[table.block_ids[-1]] > 1

    def _num_needed(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks to take for `num_tokens` more tokens: growth, and copies of shared blocks that are written."""
        first = table.num_tokens // self.block_size
        last = self._ceil(table.num_tokens + num_tokens)
        if not self.window_blocks:
            is_copied = first < len(table.block_ids) and num_tokens > 0 and self._ref[table.block_ids[-1]] > 1
            return last - len(table.block_ids) + is_copied
        held, ring = table.block_ids, self.window_blocks
        # In the paper's engine a copy leaves the ring: an entry need not name the block that is a round before it.
        num_new = max(0, min(last, ring) - len(held))
        written = [index if index < len(held) else index % ring for index in range(first, min(last, first + ring))]
        return num_new + sum(1 for index in written if index < len(held) and self._ref[held[index]] != 1)

    def _pop_and_forget(self) -> BlockId:
        """Hand out the next block; if it carries a cached text, that is evicted now and not before."""
        block_id = self._free_pop()
        if self.index.drop(block_id):
            self._note_evicted((block_id,))
        return block_id

    def _pop_many_and_forget(self, count: int) -> list[BlockId]:
        taken = self._free_pop_many(count)
        evicted = self.index.drop_all(taken)
        if evicted:
            self._note_evicted(evicted)
        return taken

    def _note_evicted(self, block_ids: Sequence[BlockId]) -> None:
        if self.journal is not None:
            for block_id in block_ids:
                self.journal.record("evicted", block_id, 0)
        if self._evicted is not None:
            self._evicted += block_ids
        self.num_evicted += len(block_ids)
        self._num_cached_idle -= len(block_ids)


def _check_sizes(
    num_blocks: int, block_size: int, num_host_blocks: int, sliding_window: int | None, null_block: bool
) -> None:
    if block_size < 1:
        raise AllocatorError(f"block_size is {block_size}; it must be at least 1")
    if num_blocks < 1 + null_block or num_host_blocks < 0:
        raise AllocatorError(f"num_blocks is {num_blocks} and num_host_blocks {num_host_blocks}; that is too few")
    if sliding_window is not None and (sliding_window < block_size or sliding_window % block_size):
        raise AllocatorError(f"sliding_window is {sliding_window}; it must be a multiple of block_size {block_size}")
