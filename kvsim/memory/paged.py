"""The paged allocator: block tables over one pool, sharing with copy-on-write, swap, and a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from kvsim.memory.block_pool import BlockPool, picked
from kvsim.memory.block_table import BlockTable
from kvsim.memory.interface import NO_MATCH, BlockCopy, BlockMove, KeyChain, PrefixMatch, Transfer
from kvsim.memory.paged_state import PagedState
from kvsim.memory.prefix_cache import Place
from kvsim.types import AllocatorError, BlockId, OutOfBlocks, SeqId


class PagedAllocator(PagedState):
    """A `KVAllocator` over `num_blocks` GPU blocks and `num_host_blocks` host blocks of `block_size` slots.

    `free_list` is an order of `kvsim.memory.block_pool`. With `null_block` block 0 is never handed out and does not
    count. `sliding_window` (tokens, a multiple of the block size) makes a table reuse its own blocks in a ring: entry
    k is the same block as entry k - window/block_size. `upstream_faults` reproduces the leaks of the paper's engine:
    surplus references (`num_refs`), blocks lost when an allocation runs out half-way, a ring that has gone round
    although there is no block for the copy, and a free of nothing that passes in silence. `journal` observes every
    block.

    Commands happen completely or raise and change nothing.
    """

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
        surplus, place = self._check_allocate(owners, num_tokens, keys, prefix, num_refs)
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
        table.keys = keys if self.enable_prefix_caching else None
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
        """Take the last `append_slots` of a sequence back: its tokens are not written after all, and nobody finds them.

        `copies` may hold those of others; none was executed. Raises AllocatorError for an unknown or swapped sequence,
        for one that stores fewer tokens, for tokens that others share, and for the paper's engine's window
        (`upstream_faults`), whose copies leave the ring; nothing is changed then.
        """
        table = self._table(seq_id)
        num_kept = table.num_tokens - num_tokens
        if self.window_blocks and self.upstream_faults:
            raise AllocatorError("with upstream_faults a sliding window takes nothing back")
        if not 0 < num_tokens < table.num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} cannot take back {num_tokens} of {table.num_tokens} tokens")
        num_blocks = self._ceil(num_kept)
        undone = [copy for copy in copies if copy.dst in table.block_ids[:num_blocks]]
        is_tail_copied = table.block_ids[num_blocks - 1] in [copy.dst for copy in undone]
        lost_source = any(not self._ref[copy.src] for copy in undone)
        if lost_source or (not is_tail_copied and self._is_read_beyond(table, num_kept)):
            raise AllocatorError(
                f"sequence {seq_id!r} takes {num_tokens} tokens back too late: others came or went since"
            )
        self.unregister(seq_id, num_kept)
        self._name(seq_id)
        table.num_tokens = num_kept
        dropped = table.block_ids[num_blocks:]
        del table.block_ids[num_blocks:]
        self._num_logical -= len(dropped)
        # Beyond the window entries name blocks of the ring again.
        unused = dropped[: max(0, self.window_blocks - num_blocks)] if self.window_blocks else dropped
        for copy in undone:
            self._undo_copy(table, copy)
            unused.append(copy.dst)
        self.pool.release(unused)

    def _is_read_beyond(self, table: BlockTable, num_tokens: int) -> bool:
        """Others store more than a table's first `num_tokens` tokens in the block where those end."""
        index = (num_tokens - 1) // self.block_size
        block_id = table.block_ids[index]
        return self._ref[block_id] > 1 and any(
            other is not table and other.num_tokens > num_tokens and other.block_ids[index] == block_id
            for other in (self._tables.values() if num_tokens % self.block_size else ())
        )

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
        if self.journal is None:
            new = self.pool.take(num_served)
        else:
            new = [self._take_for(seq_id) for seq_id in seq_ids[:num_served]]
        for table, block_id in zip(tables, new, strict=False):
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
        for seq_id, table in zip(seq_ids, tables, strict=True):
            table.num_tokens = num_tokens = len(table.block_ids) * size
            if table.own_run is not None:
                table.num_findable = num_tokens
            else:
                if self.journal is not None:
                    self.journal.name(seq_id)
                self._register_upto(table, num_tokens)

    def _check_tails(self, seq_ids: Sequence[SeqId], tables: Sequence[BlockTable]) -> None:
        """Refuse to fill a block that others share, and any in a window."""
        for seq_id, table in zip(seq_ids, tables, strict=True):
            if self.window_blocks or self._shares_tail(table):
                num_tokens = len(table.block_ids) * self.block_size
                raise AllocatorError(f"sequence {seq_id!r} has no room of its own for {num_tokens} tokens")

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable.

        Raises AllocatorError if fewer are stored: a block must not be found before it is filled.
        """
        table = self._table(seq_id)
        if table.keys is None:
            return
        if num_tokens > table.num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} stores {table.num_tokens} tokens, {num_tokens} are registered")
        self._register_upto(table, num_tokens)

    def unregister(self, seq_id: SeqId, num_tokens: int) -> None:
        """Take back what was registered beyond the first `num_tokens` tokens: it will not be computed after all.

        Raises AllocatorError if somebody shares one of those blocks; nothing is changed then.
        """
        table = self._table(seq_id)
        self.index.disown(table)
        num_kept = max(0, num_tokens) // self.block_size
        untold = table.block_ids[num_kept : table.num_registered]
        if untold and max(picked(self._ref, untold)) > 1:
            raise AllocatorError(f"sequence {seq_id!r} cannot take blocks {untold} back: others share them")
        table.num_registered -= len(untold)
        for block_id in reversed(untold):
            if table.place is not None:
                table.place = table.place.before()
            self.index.drop(block_id)

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        """Let the child share every block of the parent, on the device where that is; takes no block."""
        is_swapped = parent_id in self._swapped
        parent = self._swapped[parent_id] if is_swapped else self._table(parent_id)
        self._check_new(child_id)
        self._check_keys(keys)
        self.index.catch_up(parent)
        child = parent.copy()
        child.keys = keys if self.enable_prefix_caching else None
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
        self._note_moves("swapped_out", seq_ids, moved.transfer)
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
        self._note_moves("swapped_in", seq_ids, moved.transfer)
        return moved.transfer

    def _check_new(self, seq_id: SeqId) -> None:
        if self.has_table(seq_id):
            raise AllocatorError(f"sequence {seq_id!r} has a block table already")

    def _check_allocate(
        self,
        owners: Sequence[SeqId],
        num_tokens: int,
        keys: KeyChain | None,
        prefix: PrefixMatch,
        num_refs: int | None,
    ) -> tuple[int, Place]:
        """Refuse what cannot be meant; returns the surplus references, and where the hit ends in the prefix index."""
        for owner in owners:
            self._check_new(owner)
        if len(owners) > 1 and len(set(owners)) < len(owners):
            raise AllocatorError(f"sequences {owners!r} are not distinct")
        if num_tokens < 1 or num_tokens < prefix.num_tokens:
            raise AllocatorError(f"cannot allocate {num_tokens} tokens with a hit of {prefix.num_tokens}")
        place = self.index.end_of(prefix.block_ids, keys) if prefix.block_ids else self.index.root
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

    def _each(self, seq_ids: Sequence[SeqId], find: Callable[[SeqId], BlockTable]) -> list[BlockTable]:
        if len(set(seq_ids)) < len(seq_ids):
            raise AllocatorError(f"sequences {tuple(seq_ids)!r} are not distinct")
        return [find(seq_id) for seq_id in seq_ids]

    def _count_returned(self, tables: Sequence[BlockTable]) -> None:
        fills: dict[BlockId, int] = {}
        for table in tables:
            self._num_logical += len(table.block_ids)
            fills.update(dict.fromkeys(table.block_ids, self.block_size))
            fills[table.block_ids[-1]] = self._tail_fill(table)
        for block_id, fill in fills.items():
            self._num_shared_tails += fill < self.block_size and self._ref[block_id] > 1

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

    def _note_moves(self, event: str, seq_ids: Sequence[SeqId], moves: Transfer) -> None:
        """Tell the journal of a swap, each block in the name of the last sequence that has it."""
        if self.journal is None:
            return
        holder = {block_id: seq_id for seq_id in seq_ids for block_id in self._any_table(seq_id).block_ids}
        for src, dst in moves:
            block_id, host_id = (src, dst) if event == "swapped_out" else (dst, src)
            self.journal.name(holder[dst])
            self.journal.record(event, block_id, self._ref[block_id], host_id)

    def _take_for(self, seq_id: SeqId) -> BlockId:
        self._name(seq_id)
        return self.pool.take_next()

    def _name(self, seq_id: SeqId) -> None:
        if self.journal is not None:
            self.journal.name(seq_id)


class _Moved(NamedTuple):
    transfer: Transfer
    tables: list[list[BlockId]]
