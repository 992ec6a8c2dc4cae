"""The paged allocator: block tables over one pool, sharing with copy-on-write, swap, and a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from kvsim.memory.audit import audit, fills_of
from kvsim.memory.block_pool import BlockPool, picked
from kvsim.memory.block_table import BlockTable, Slot, slot_of
from kvsim.memory.interface import NO_MATCH, BlockCopy, BlockMove, KeyChain, PrefixMatch, Transfer, Usage
from kvsim.memory.journal import Journal, JournaledPool
from kvsim.memory.prefix_cache import Place, PrefixIndex
from kvsim.types import AllocatorError, AllocStatus, BlockId, OutOfBlocks, SeqId


class PagedAllocator:
    """A `KVAllocator` over `num_blocks` GPU blocks and `num_host_blocks` host blocks of `block_size` slots.

    `free_list` is an order of `kvsim.memory.block_pool`. With `null_block` block 0 is never handed out and does not
    count. `sliding_window` (tokens, a multiple of the block size) makes a table reuse its own blocks in a ring: entry
    k is the same block as entry k - window/block_size. `upstream_faults` reproduces the leaks of the paper's engine:
    surplus references (`num_refs`), blocks lost when an allocation runs out half-way, a ring that has gone round
    although there is no block for the copy, and a free of nothing that passes in silence. `journal` observes every
    block.

    Commands happen completely or raise and change nothing.
    """

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
            self._observe(journal)
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

    def allocate(
        self,
        seq_id: SeqId,
        num_tokens: int,
        *,
        keys: KeyChain | None = None,
        prefix: PrefixMatch = NO_MATCH,
        reserve_tokens: int = 0,
        sharers: Sequence[SeqId] = (),
        num_refs: int | None = None,
    ) -> None:
        """Give `seq_id` a table; hit blocks first, then new ones in logical order.

        `sharers` get equal tables over the same blocks (samples that start together). `num_refs` sets the reference
        count where the paper's engine counts more sequences than get a table (`upstream_faults` only).
        Raises OutOfBlocks; AllocatorError if a sequence has a table, or the match is out of date.
        """
        owners = (seq_id, *sharers) if sharers else (seq_id,)
        self._check_keys(keys)
        hits = prefix.block_ids
        num_new = self._table_blocks(num_tokens) - len(hits)
        surplus, place = self._check_allocate(owners, num_tokens, prefix, num_refs)
        num_free = self.pool.num_free
        self._check_room(num_new, num_free - self._num_idle(hits) if hits else num_free, num_refs or len(owners))
        if hits:
            self._reference(hits)
        blocks = self.pool.take(num_new)
        if hits:
            blocks[:0] = hits
        if sharers or surplus:
            self._share_all(blocks, sharers, surplus)
        table = BlockTable(self._unrolled(blocks, num_tokens) if self.window_blocks else blocks, num_tokens)
        table.num_registered = len(hits)
        table.place = place
        table.keys = keys
        self._num_logical += len(owners) * len(table.block_ids)
        if self.pool.num_shared and self._shares_tail(table):
            self._num_shared_tails += 1
        self._tables[seq_id] = table
        for owner in sharers:
            self._tables[owner] = table.copy()
        self.num_hit_tokens += prefix.num_tokens
        self.num_queried_tokens += prefix.num_queried

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        """Store `num_tokens` more tokens; returns the copies to execute before they are written.

        Raises OutOfBlocks, or AllocatorError for an unknown or swapped sequence; nothing is changed then.
        """
        try:
            table = self._tables[seq_id]
        except KeyError:
            raise self._no_table(seq_id) from None
        blocks = table.block_ids
        room = len(blocks) * self.block_size - table.num_tokens
        if self.window_blocks or (room and self._ref[blocks[-1]] != 1):
            return self._append_any(table, num_tokens)
        if room >= num_tokens > 0:
            table.num_tokens += num_tokens
            return ()
        if not 0 < num_tokens - room <= self.block_size:
            return self._append_any(table, num_tokens)
        try:
            blocks.append(self.pool.take_next())
        except LookupError:
            raise OutOfBlocks(1, 0) from None
        table.num_tokens += num_tokens
        self._num_logical += 1
        return ()

    def retract(self, seq_id: SeqId, num_tokens: int, copies: Iterable[BlockCopy] = ()) -> None:
        """Take the last `append_slots` of a sequence back: its tokens are not written after all.

        `copies` may hold those of others; none was executed. Raises AllocatorError for an unknown or swapped sequence,
        for one that stores fewer tokens, and for the paper's engine's window (`upstream_faults`), whose copies leave
        the ring.
        """
        table = self._table(seq_id)
        if self.window_blocks and self.upstream_faults:
            raise AllocatorError("with upstream_faults a sliding window takes nothing back")
        if not 0 < num_tokens < table.num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} cannot take back {num_tokens} of {table.num_tokens} tokens")
        self._name(seq_id)
        self.index.disown(table)
        table.num_tokens -= num_tokens
        num_blocks = self._ceil(table.num_tokens)
        dropped = table.block_ids[num_blocks:]
        del table.block_ids[num_blocks:]
        self._num_logical -= len(dropped)
        # Beyond the window entries name blocks of the ring again.
        unused = dropped[: max(0, self.window_blocks - num_blocks)] if self.window_blocks else dropped
        for copy in copies:
            if copy.dst in table.block_ids:
                self._undo_copy(table, copy)
                unused.append(copy.dst)
        self.pool.release(unused)

    def _undo_copy(self, table: BlockTable, copy: BlockCopy) -> None:
        """Let a table name the block again that it was to copy; the copy itself is still to be released."""
        is_tail = copy.dst == table.block_ids[-1]
        self._num_shared_tails += is_tail and self._is_partial(table) and self._ref[copy.src] == 1
        self.pool.share(copy.src)
        table.block_ids = [copy.src if block_id == copy.dst else block_id for block_id in table.block_ids]

    def grow_each(self, seq_ids: Sequence[SeqId]) -> int:
        """Fill the blocks that each sequence has, and store one token in a new one, in order.

        Returns how many were served: it ends before the first for which there is no block left, or whose tail has to be
        copied. Raises AllocatorError for an unknown or swapped sequence, and for windows; nothing is changed then.
        """
        if self.window_blocks:
            raise AllocatorError("a sliding window lets tables go round: append to them one by one")
        try:
            tables = list(map(self._tables.__getitem__, seq_ids))
        except KeyError as error:
            raise self._no_table(error.args[0]) from None
        num_served = min(len(tables), self.pool.num_free)
        if self._num_shared_tails:
            num_served = next((i for i in range(num_served) if self._shares_tail(tables[i])), num_served)
        size = self.block_size
        for table, block_id in zip(tables, self.pool.take(num_served), strict=False):
            block_ids = table.block_ids
            table.num_tokens = len(block_ids) * size + 1
            block_ids.append(block_id)
        self._num_logical += num_served
        return num_served

    def fill_each(self, seq_ids: Sequence[SeqId]) -> None:
        """Fill the blocks that each sequence has, and make them findable, in order.

        Raises AllocatorError for an unknown or swapped sequence, for a tail that others share, and for windows;
        nothing is changed then.
        """
        try:
            tables = list(map(self._tables.__getitem__, seq_ids))
        except KeyError as error:
            raise self._no_table(error.args[0]) from None
        if self.window_blocks or self._num_shared_tails:
            self._check_tails(seq_ids, tables)
        size = self.block_size
        for table in tables:
            table.num_tokens = num_tokens = len(table.block_ids) * size
            if table.own_run is not None:
                table.num_findable = num_tokens
            else:
                self._register_upto(table, num_tokens)

    def _check_tails(self, seq_ids: Sequence[SeqId], tables: Sequence[BlockTable]) -> None:
        """Refuse to fill a block that others share, and any in a window."""
        for seq_id, table in zip(seq_ids, tables, strict=True):
            if self.window_blocks or self._shares_tail(table):
                num_tokens = len(table.block_ids) * self.block_size
                raise AllocatorError(f"sequence {seq_id!r} has no room of its own for {num_tokens} tokens")

    def _shares_tail(self, table: BlockTable) -> bool:
        """Its last block is partly filled and not its own: who writes there copies it first."""
        return self._is_partial(table) and self._ref[table.block_ids[-1]] > 1

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable.

        Raises AllocatorError if fewer are stored: a block must not be found before it is filled.
        """
        table = self._table(seq_id)
        if not self.enable_prefix_caching or table.keys is None:
            return
        if num_tokens > table.num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} stores {table.num_tokens} tokens, {num_tokens} are registered")
        self._register_upto(table, num_tokens)

    def unregister(self, seq_id: SeqId, num_tokens: int) -> None:
        """Take back what was registered beyond the first `num_tokens` tokens: it will not be computed after all.

        To be called before anyone can have found those blocks.
        """
        table = self._table(seq_id)
        self.index.disown(table)
        while table.num_registered > num_tokens // self.block_size:
            table.num_registered -= 1
            if table.place is not None:
                table.place = table.place.before()
            self.index.drop(table.block_ids[table.num_registered])

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        """Let the child share every block of the parent, on the device where that is; takes no block."""
        is_swapped = parent_id in self._swapped
        parent = self._swapped[parent_id] if is_swapped else self._table(parent_id)
        self._check_new(child_id)
        self._check_keys(keys)
        child = parent.copy()
        child.keys = keys
        if not is_swapped:
            self._num_shared_tails += self._is_partial(parent) and self._ref[parent.block_ids[-1]] == 1
            self._num_logical += len(child.block_ids)
        pool = self.host if is_swapped else self.pool
        # The paper's engine counts every occurrence of a ring's block here, and drops one at the free.
        for block_id in child.block_ids if self.upstream_faults else self._ring(child):
            pool.share(block_id)
        (self._swapped if is_swapped else self._tables)[child_id] = child

    def free(self, seq_id: SeqId) -> None:
        """Drop the sequence's references on either device. Raises AllocatorError if it has none."""
        if seq_id in self._tables:
            self._release(self._tables.pop(seq_id))
        elif seq_id in self._swapped:
            self.host.release(self._ring(self._swapped.pop(seq_id)))
        elif not self.upstream_faults:
            raise self._no_table(seq_id)

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        """Move the sequences to the host, sharing among them kept; None if it has no room."""
        tables = self._each(seq_ids, self._table)
        if len(self._distinct(tables)) > self.host.num_free:
            return None
        moved = self._copy_tables(seq_ids, tables, self.host)
        for seq_id, table, host_ids in zip(seq_ids, tables, moved.tables, strict=True):
            self._name(seq_id)
            self._release(table)
            table.block_ids = host_ids
            # Restored blocks are new ones: they are findable when they are registered again.
            table.num_registered, table.place = 0, self.index.root
            self._swapped[seq_id] = self._tables.pop(seq_id)
        if self.journal is not None:
            for src, dst in moved.transfer:
                self.journal.record("swapped_out", src, self._ref[src], dst)
        return moved.transfer

    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        """Move the sequences back into newly taken blocks; None if they do not fit."""
        tables = self._each(seq_ids, self._swapped_table)
        if len(self._distinct(tables)) > self.pool.num_free:
            return None
        moved = self._copy_tables(seq_ids, tables, self.pool)
        for seq_id, table, gpu_ids in zip(seq_ids, tables, moved.tables, strict=True):
            self.host.release(self._ring(table))
            table.block_ids = gpu_ids
            self._tables[seq_id] = self._swapped.pop(seq_id)
        self._count_returned(tables)
        if self.journal is not None:
            for src, dst in moved.transfer:
                self.journal.record("swapped_in", dst, self._ref[dst], src)
        return moved.transfer

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

    def _check_new(self, seq_id: SeqId) -> None:
        if self.has_table(seq_id):
            raise AllocatorError(f"sequence {seq_id!r} has a block table already")

    def _check_keys(self, keys: KeyChain | None) -> None:
        """Keys of blocks of another size would find blocks whose ends are other text."""
        if keys is not None and (size := getattr(keys, "block_size", self.block_size)) != self.block_size:
            raise AllocatorError(
                f"the keys are for blocks of {size} tokens; the allocator has blocks of {self.block_size}"
            )

    def _check_allocate(
        self, owners: Sequence[SeqId], num_tokens: int, prefix: PrefixMatch, num_refs: int | None
    ) -> tuple[int, Place]:
        """Refuse what cannot be meant; returns the surplus references, and where the hit ends in the prefix index."""
        for owner in owners:
            self._check_new(owner)
        if len(owners) > 1 and len(set(owners)) < len(owners):
            raise AllocatorError(f"sequences {owners!r} are not distinct")
        if num_tokens < 1 or num_tokens < prefix.num_tokens:
            raise AllocatorError(f"cannot allocate {num_tokens} tokens with a hit of {prefix.num_tokens}")
        place = self.index.end_of(prefix.block_ids) if prefix.block_ids else self.index.root
        if place is None or prefix.num_tokens != len(prefix.block_ids) * self.block_size:
            raise AllocatorError(f"the prefix match {prefix.block_ids} is out of date; match again before allocating")
        surplus = 0 if num_refs is None else num_refs - len(owners)
        if surplus < 0 or (surplus and not self.upstream_faults):
            raise AllocatorError(f"{num_refs} references for {len(owners)} tables; only upstream_faults allows more")
        return surplus, place

    def _check_room(self, needed: int, available: int, num_refs: int) -> None:
        if needed <= available:
            return
        if self.upstream_faults:
            # The paper's engine takes what there is before it raises, and nobody ever returns it.
            for block_id in self.pool.take(available):
                if num_refs > 1:
                    self.pool.share(block_id, num_refs - 1)
                self._surplus[block_id] = num_refs
            self._num_leaked += available
        raise OutOfBlocks(needed, available)

    def _num_idle(self, block_ids: Sequence[BlockId]) -> int:
        return picked(self._ref, block_ids).count(0)

    def _register_upto(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full blocks of a table's first `num_tokens` tokens findable, as far as they are not."""
        if table.own_run is not None:
            table.num_findable = max(table.num_findable, num_tokens)
            return
        first, keys = table.num_registered, table.keys
        num_full = keys.num_full_blocks(num_tokens) if keys is not None else 0
        if num_full <= first or keys is None:
            return
        index, block_ids = self.index, table.block_ids[first:num_full]
        is_new = [not index.has_text(block_id) for block_id in block_ids] if self.journal is not None else ()
        table.place = index.add_all(block_ids, table.place or index.root, keys, first)
        table.num_registered = num_full
        if self.journal is not None:
            for block_id in compress(block_ids, is_new):
                self.journal.record("cached", block_id, self._ref[block_id])
        else:
            index.own(table)

    def _reference(self, block_ids: Sequence[BlockId]) -> None:
        """One more table reads these cached blocks."""
        self._num_cached_idle -= self.pool.hit_all(block_ids)

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

    def _share_all(self, block_ids: Sequence[BlockId], sharers: Sequence[SeqId], surplus: int) -> None:
        for sharer in sharers:
            self._name(sharer)
            for block_id in block_ids:
                self.pool.share(block_id)
        if surplus:
            for block_id in block_ids:
                self.pool.share(block_id, surplus)
                self._surplus[block_id] = self._surplus.get(block_id, 0) + surplus

    def _unrolled(self, block_ids: list[BlockId], num_tokens: int) -> list[BlockId]:
        """A table for `num_tokens` tokens; beyond the window it goes round the ring of its own blocks."""
        return [block_ids[index % self.window_blocks] for index in range(self._ceil(num_tokens))]

    def _ring(self, table: BlockTable) -> list[BlockId]:
        """The table's blocks, each once."""
        return list(dict.fromkeys(table.block_ids)) if self.window_blocks else table.block_ids

    def _distinct(self, tables: Iterable[BlockTable]) -> set[BlockId]:
        return {block_id for table in tables for block_id in table.block_ids}

    def _each(self, seq_ids: Sequence[SeqId], find: Callable[[SeqId], BlockTable]) -> list[BlockTable]:
        if len(set(seq_ids)) < len(seq_ids):
            raise AllocatorError(f"sequences {tuple(seq_ids)!r} are not distinct")
        return [find(seq_id) for seq_id in seq_ids]

    def _tail_fill(self, table: BlockTable) -> int:
        """Slots of the last block that hold KV; a ring that has gone round is full of older tokens."""
        if self.window_blocks and len(table.block_ids) > self.window_blocks:
            return self.block_size
        return table.num_tokens - (len(table.block_ids) - 1) * self.block_size

    def _is_partial(self, table: BlockTable) -> bool:
        return self._tail_fill(table) < self.block_size

    def _count_returned(self, tables: Sequence[BlockTable]) -> None:
        fills: dict[BlockId, int] = {}
        for table in tables:
            self._num_logical += len(table.block_ids)
            fills.update(dict.fromkeys(table.block_ids, self.block_size))
            fills[table.block_ids[-1]] = self._tail_fill(table)
        for block_id, fill in fills.items():
            self._num_shared_tails += fill < self.block_size and self._ref[block_id] > 1

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

    def _append_any(self, table: BlockTable, num_tokens: int) -> tuple[BlockCopy, ...]:
        """The whole rule: copy a shared tail that is written, take all new blocks, then write."""
        if num_tokens < 1:
            raise AllocatorError(f"cannot append {num_tokens} tokens; append at least 1")
        needed = self._num_needed(table, num_tokens)
        if needed > self.pool.num_free:
            if self.upstream_faults and 0 < self.window_blocks <= len(table.block_ids) and self._is_full(table):
                # The paper's engine goes round before it finds no block for the copy.
                self._grow(table)
                table.num_tokens += 1
            raise OutOfBlocks(needed, self.pool.num_free)
        if self.window_blocks:
            return self._append_in_ring(table, num_tokens)
        has_room = table.num_tokens < len(table.block_ids) * self.block_size
        copies = (self._copy_tail(table),) if has_room and self._ref[table.block_ids[-1]] != 1 else ()
        new = self.pool.take(needed - len(copies))
        table.block_ids += new
        table.num_tokens += num_tokens
        self._num_logical += len(new)
        return copies

    def _append_in_ring(self, table: BlockTable, num_tokens: int) -> tuple[BlockCopy, ...]:
        """With a window, a block at a time: go round the ring or grow, copy what is shared, then write."""
        copies = []
        end = table.num_tokens + num_tokens
        while table.num_tokens < end:
            if self._is_full(table):
                self._grow(table)
            if self._ref[table.block_ids[-1]] != 1:
                copies.append(self._copy_tail(table))
            table.num_tokens = min(end, len(table.block_ids) * self.block_size)
        return tuple(copies)

    def _is_full(self, table: BlockTable) -> bool:
        """The next token needs another entry."""
        return table.num_tokens == len(table.block_ids) * self.block_size

    def _grow(self, table: BlockTable) -> None:
        length = len(table.block_ids)
        if length >= self.window_blocks:
            table.block_ids.append(table.block_ids[length % self.window_blocks])
        else:
            table.block_ids += self.pool.take(1)
        self._num_logical += 1

    def _copy_tail(self, table: BlockTable) -> BlockCopy:
        """Copy-on-write: take the new block, point the table at it, then drop the old one."""
        old, fill = table.block_ids[-1], self._tail_fill(table)
        (new,) = self.pool.take(1)
        if self.window_blocks and not self.upstream_faults:
            table.block_ids = [new if block_id == old else block_id for block_id in table.block_ids]
        table.block_ids[-1] = new
        self._num_shared_tails -= fill < self.block_size and self._ref[old] == 2
        if self.journal is not None:
            self.journal.record("copied", old, self._ref[old], new)
        self.pool.release([old])
        if self._surplus:
            self._count_leaks([old], {old: fill})
        return BlockCopy(old, new, fill)

    def _release(self, table: BlockTable) -> None:
        block_ids = table.block_ids
        if table.own_run is not None:
            self.index.disown(table)
        if self._num_shared_tails:
            self._num_shared_tails -= self._is_partial(table) and self._ref[block_ids[-1]] == 2
        freed = self.pool.release(self._ring(table) if self.window_blocks else block_ids)
        self._num_logical -= len(block_ids)
        if self.enable_prefix_caching:
            self._num_cached_idle += len(freed) - picked(self.index.run_of, freed).count(None)
        if self._surplus:
            self._count_leaks(block_ids, {block_ids[-1]: self._tail_fill(table)})

    def _count_leaks(self, block_ids: Iterable[BlockId], fills: dict[BlockId, int]) -> None:
        """A block that only surplus references hold is lost; what it holds will not be read again."""
        for block_id in block_ids:
            if self._ref[block_id] and self._ref[block_id] == self._surplus.get(block_id):
                fill = fills.get(block_id, self.block_size)
                self._num_leaked += 1
                self._num_shared_tails -= fill < self.block_size and self._ref[block_id] > 1

    def _copy_tables(self, seq_ids: Sequence[SeqId], tables: Sequence[BlockTable], pool: BlockPool) -> _Moved:
        """Give every distinct block of the tables a new one in `pool`, shared as it was."""
        target: dict[BlockId, BlockId] = {}
        for seq_id, table in zip(seq_ids, tables, strict=True):
            self._name(seq_id)
            for block_id in self._ring(table):
                if block_id in target:
                    pool.share(target[block_id])
                else:
                    target[block_id] = pool.take(1)[0]
        transfer = tuple(BlockMove(src, dst) for src, dst in target.items())
        return _Moved(transfer, [[target[block_id] for block_id in table.block_ids] for table in tables])

    def _observe(self, journal: Journal) -> None:
        """Tell the journal who is served and which block is handed out; the unobserved allocator pays nothing."""
        for name in ("allocate", "append_slots", "register", "free"):
            setattr(self, name, journal.naming(getattr(self, name), 0, "seq_id"))
        setattr(self, "fork", journal.naming(self.fork, 1, "child_id"))  # noqa: B010
        pop = self.pool.pop

        def pop_and_record() -> BlockId:
            block_id = pop()
            journal.record("taken", block_id, 1)
            return block_id

        self.pool.pop = pop_and_record
        self.pool.pop_many = lambda count: [pop_and_record() for _ in range(count)]

    def _name(self, seq_id: SeqId) -> None:
        if self.journal is not None:
            self.journal.name(seq_id)


class _Moved(NamedTuple):
    transfer: Transfer
    tables: list[list[BlockId]]


def _check_sizes(
    num_blocks: int, block_size: int, num_host_blocks: int, sliding_window: int | None, null_block: bool
) -> None:
    if block_size < 1:
        raise AllocatorError(f"block_size is {block_size}; it must be at least 1")
    if num_blocks < 1 + null_block or num_host_blocks < 0:
        raise AllocatorError(f"num_blocks is {num_blocks} and num_host_blocks {num_host_blocks}; that is too few")
    if sliding_window is not None and (sliding_window < block_size or sliding_window % block_size):
        raise AllocatorError(f"sliding_window is {sliding_window}; it must be a multiple of block_size {block_size}")
