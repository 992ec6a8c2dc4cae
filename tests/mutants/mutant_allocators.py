"""Allocators with one rule broken each; none of them audits itself, so that only an outside view can find the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvsim.memory import BlockCopy, PagedAllocator, PrefixMatch, Transfer, Usage
from kvsim.memory.block_table import BlockTable
from kvsim.memory.interface import KeyChain, Link
from kvsim.memory.prefix_cache import Place, PrefixIndex
from kvsim.types import AllocStatus, BlockId, OutOfBlocks, SeqId

MUTANTS: dict[str, type[PagedAllocator]] = {}


class Unaudited(PagedAllocator):
    """The real allocator without its own audit."""

    def audit(self) -> None:
        pass


def mutant(cls: type[PagedAllocator]) -> type[PagedAllocator]:
    MUTANTS[cls.__name__] = cls
    return cls


@mutant
class ForgetsADecrement(Unaudited):
    """A shared block's count is not decremented when its table's first entry is freed."""

    def _release(self, table: BlockTable) -> None:
        if self._ref[table.block_ids[0]] > 1:
            self._ref[table.block_ids[0]] += 1
        super()._release(table)


@mutant
class ForgetsTheTailAtFork(Unaudited):
    """The fork of a third sharer does not count the last block."""

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        super().fork(parent_id, child_id, keys=keys)
        if child_id in self._tables and self._ref[self._tables[child_id].block_ids[-1]] > 2:
            self._ref[self._tables[child_id].block_ids[-1]] -= 1


@mutant
class SharesTheTableObject(Unaudited):
    """The fork of a sequence with a full tail shares the list of block ids instead of copying it."""

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        super().fork(parent_id, child_id, keys=keys)
        if child_id in self._tables and not self.num_tokens(child_id) % self.block_size:
            self._tables[child_id].block_ids = self._tables[parent_id].block_ids


@mutant
class CopiesTheWrongBlock(Unaudited):
    """The copy's source is the first block of the table."""

    def _copy_tail(self, table: BlockTable) -> BlockCopy:
        first = table.block_ids[0]
        return super()._copy_tail(table)._replace(src=first)


@mutant
class CopiesBackwards(Unaudited):
    """Source and destination are exchanged."""

    def _copy_tail(self, table: BlockTable) -> BlockCopy:
        src, dst, num_tokens = super()._copy_tail(table)
        return BlockCopy(dst, src, num_tokens)


@mutant
class CopiesOneTokenTooFew(Unaudited):
    def _copy_tail(self, table: BlockTable) -> BlockCopy:
        copy = super()._copy_tail(table)
        return copy._replace(num_tokens=copy.num_tokens - 1)


@mutant
class ForgetsToReturnTheCopy(Unaudited):
    """The table is repointed, but nobody is told to copy."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        super().append_slots(seq_id, num_tokens)
        return ()


@mutant
class KeepsTheOldReference(Unaudited):
    """A copy-on-write does not drop the shared block."""

    def _copy_tail(self, table: BlockTable) -> BlockCopy:
        copy = super()._copy_tail(table)
        self._ref[copy.src] += 1
        return copy


@mutant
class WritesIntoATailSharedByTwo(Unaudited):
    """Only a tail shared by three or more is copied."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        table = self._table(seq_id)
        tail = table.block_ids[-1]
        if self._ref[tail] != 2 or not 0 < num_tokens <= self.num_slots(seq_id) - table.num_tokens:
            return super().append_slots(seq_id, num_tokens)
        table.num_tokens += num_tokens
        return ()


@mutant
class WritesBeforeTheCopy(Unaudited):
    """The writer stays on the shared block and writes; another sharer is moved to the copy."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        copies = super().append_slots(seq_id, num_tokens)
        for src, dst, _ in copies:
            for other_id, other in self._tables.items():
                if other_id != seq_id and other.block_ids[-1] == src:
                    other.block_ids[-1] = dst
                    mine = self._tables[seq_id].block_ids
                    mine[mine.index(dst)] = src
                    break
        return copies


@mutant
class CopiesFullTails(Unaudited):
    """The next token after a shared full tail copies that tail."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        table = self._table(seq_id)
        tail = table.block_ids[-1]
        is_full = table.num_tokens == self.num_slots(seq_id)
        if is_full and self._ref[tail] > 1 and self.num_free_blocks > 2 and num_tokens > 0:
            return (self._copy_tail(table), *super().append_slots(seq_id, num_tokens))
        return super().append_slots(seq_id, num_tokens)


@mutant
class FreesTheHeadFirst(Unaudited):
    """A table's first block is released first, so that the head of a chain is evicted first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool.free.is_tail_first = False


@mutant
class FreesWhileShared(Unaudited):
    """A block goes back to the free list when one reference is left."""

    def _release(self, table: BlockTable) -> None:
        shared = [block_id for block_id in table.block_ids if self._ref[block_id] == 2]
        super()._release(table)
        self.pool.free.extend(shared[-1:])


@mutant
class FreesTwiceOnAbort(Unaudited):
    """The abort of a swapped sequence returns its last host block twice."""

    def free(self, seq_id: SeqId) -> None:
        table = self._swapped.get(seq_id)
        super().free(seq_id)
        if table is not None and not self.host.ref[table.block_ids[-1]]:
            self.host.free.extend(table.block_ids[-1:])


@mutant
class SecondFreeIsSilent(Unaudited):
    """Freeing what has no table passes without a word."""

    def free(self, seq_id: SeqId) -> None:
        if self.has_table(seq_id):
            super().free(seq_id)


@mutant
class AbortForgetsTheHost(Unaudited):
    """The abort of a swapped sequence leaks its host blocks."""

    def free(self, seq_id: SeqId) -> None:
        if self._swapped.pop(seq_id, None) is None:
            super().free(seq_id)


@mutant
class AppendsEarlyAtAMultiple(Unaudited):
    """A tail that has just become full gets its next block at once."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        copies = super().append_slots(seq_id, num_tokens)
        table = self._tables[seq_id]
        if table.num_tokens % self.block_size == 0 and self.num_free_blocks:
            table.block_ids += self.pool.take(1)
        return copies


@mutant
class AllocatesOneMoreAtAMultiple(Unaudited):
    """The prompt's blocks are its length // B + 1."""

    def _ceil(self, num_tokens: int) -> int:
        return num_tokens // self.block_size + 1


@mutant
class AppendsLateAtAMultiple(Unaudited):
    """The first token after a full block gets no block of its own."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        table = self._table(seq_id)
        if num_tokens == 1 and table.num_tokens == 2 * self.block_size:
            table.num_tokens += 1
            return ()
        return super().append_slots(seq_id, num_tokens)


@mutant
class RestoresIntoTheOldBlocks(Unaudited):
    """A swap-in puts a sequence back where it was, whoever lives there now."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._old: dict[SeqId, list[BlockId]] = {}

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        old = {seq_id: list(self._table(seq_id).block_ids) for seq_id in seq_ids}
        transfer = super().swap_out(seq_ids)
        if transfer is not None:
            self._old |= old
        return transfer

    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        transfer = super().swap_in(seq_ids)
        if transfer is None or len(seq_ids) > 1:
            return transfer
        table, old = self._tables[seq_ids[0]], self._old.get(seq_ids[0], [])
        if len(old) != len(table.block_ids):
            return transfer
        moves = tuple(move._replace(dst=old[table.block_ids.index(move.dst)]) for move in transfer)
        for block_id in table.block_ids:
            self._ref[block_id] = 0
        self.pool.free.extend(table.block_ids)
        for block_id in old:
            if not self._ref[block_id]:
                self.pool.free.remove(block_id)
            self._ref[block_id] += 1
        table.block_ids = old.copy()
        return moves


@mutant
class SwapLosesSharing(Unaudited):
    """Each sequence of a swap gets host blocks of its own."""

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        transfers = [super(SwapLosesSharing, self).swap_out([seq_id]) for seq_id in seq_ids]
        if None in transfers:
            return transfers[0]
        return tuple(move for transfer in transfers for move in transfer or ())


@mutant
class SwapOutKeepsTheGpuBlocks(Unaudited):
    """The source of a swap stays referenced."""

    def _release(self, table: BlockTable) -> None:
        if self._is_swapping and self.num_free_blocks:
            self._ref[table.block_ids[-1]] += 1
        super()._release(table)

    _is_swapping = False

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        self._is_swapping = True
        try:
            return super().swap_out(seq_ids)
        finally:
            self._is_swapping = False


@mutant
class SwapInLeaksHostBlocks(Unaudited):
    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        table = self._swapped_table(seq_ids[0])
        last, spare = table.block_ids[-1], self.num_free_host_blocks
        transfer = super().swap_in(seq_ids)
        if transfer is not None and self.num_free_host_blocks > spare and not self.host.ref[last]:
            self.host.free.remove(last)
        return transfer


@mutant
class RefusedSwapStillMoves(Unaudited):
    """A swap-out that does not fit gives up the last block it would have moved."""

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        transfer = super().swap_out(seq_ids)
        if transfer is None and self.num_free_host_blocks:
            self.host.take(1)
        return transfer


@mutant
class LeaksWhenAllocationRunsOut(Unaudited):
    """Blocks taken before an allocation runs out are not given back."""

    def _check_room(self, needed: int, available: int, num_refs: int) -> None:
        if 1 < available < needed:
            self.pool.take(1)
        super()._check_room(needed, available, num_refs)


@mutant
class AppendRunsOutHalfWay(Unaudited):
    """A catch-up of several tokens stores what fits before it raises."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        try:
            return super().append_slots(seq_id, num_tokens)
        except OutOfBlocks:
            table = self._tables[seq_id]
            room = self.num_slots(seq_id) - table.num_tokens
            if room and num_tokens > 1 and self._ref[table.block_ids[-1]] == 1:
                super().append_slots(seq_id, room)
            raise


@mutant
class IgnoresTheWatermark(Unaudited):
    def can_allocate(self, num_tokens: int, **kwargs: Any) -> AllocStatus:
        return super().can_allocate(num_tokens, **(kwargs | {"watermark_blocks": 0}))


@mutant
class NeverSaysNever(Unaudited):
    def can_allocate(self, num_tokens: int, **kwargs: Any) -> AllocStatus:
        status = super().can_allocate(num_tokens, **kwargs)
        return AllocStatus.LATER if status is AllocStatus.NEVER else status


@mutant
class CountsHitsAsFree(Unaudited):
    """Hit blocks that sit in the free list are counted as free capacity too."""

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        return super().match_prefix(keys, num_tokens)._replace(num_revived=0)


@mutant
class HitsTheWholePrompt(Unaudited):
    """The lookup may leave nothing to compute."""

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        return super().match_prefix(keys, num_tokens + 1)


@mutant
class HitsOneBlockTooFew(Unaudited):
    """A prompt of a multiple of B plus one token does not hit its last full block."""

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        return super().match_prefix(keys, max(0, num_tokens - 1))


@mutant
class HitIsNotReferenced(Unaudited):
    """A hit on a block in use does not count its new reader."""

    def _reference(self, block_ids: Sequence[BlockId]) -> None:
        super()._reference([block_id for block_id in block_ids if not self._ref[block_id]])


@mutant
class HitStaysInTheFreeList(Unaudited):
    """A revived block is not pulled out of the free list."""

    def _reference(self, block_ids: Sequence[BlockId]) -> None:
        were_free = [block_id for block_id in block_ids if not self._ref[block_id]]
        super()._reference(block_ids)
        self.pool.free.extend(were_free)


class _BadIndex(PrefixIndex):
    """A prefix index whose links are rewritten."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._rewritten: dict[int, _Rewritten] = {}

    def _rewrite(self, keys: KeyChain) -> _Rewritten:
        """The same object for the same text, as the index may ask whether it is."""
        return self._rewritten.setdefault(id(keys), _Rewritten(keys, self.key))

    @staticmethod
    def key(link: Link) -> Link:
        return link

    def find(self, keys: KeyChain, max_blocks: int) -> list[BlockId]:
        return super().find(self._rewrite(keys), max_blocks)

    def add_all(self, block_ids: Sequence[BlockId], after: Place, keys: KeyChain, first: int) -> Place:
        return super().add_all(block_ids, after, self._rewrite(keys), first)

    def end_of(self, block_ids: Sequence[BlockId], keys: KeyChain | None) -> Place | None:
        return super().end_of(block_ids, keys and self._rewrite(keys))


class _Rewritten:
    def __init__(self, keys: KeyChain, key: Callable[[Link], Link]) -> None:
        self._keys, self._key = keys, key

    def link(self, block_index: int) -> Link:
        return self._key(self._keys.link(block_index))

    def chain(self, block_index: int) -> int:
        return self._keys.chain(block_index)

    def num_full_blocks(self, num_tokens: int) -> int:
        return self._keys.num_full_blocks(num_tokens)


class _WithIndex(Unaudited):
    """The real allocator over another prefix index."""

    Index: type[PrefixIndex] = PrefixIndex

    def __init__(self, num_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_blocks, *args, **kwargs)
        index = self.Index(num_blocks)
        # The free list asks the index that it was given, so the new one takes over its state.
        index.run_of, index.root = self.index.run_of, self.index.root
        self.index = index


@mutant
class HashesWithoutParent(_WithIndex):
    """A block is found by its own content, whatever stands before it."""

    class Index(PrefixIndex):
        def __init__(self, num_blocks: int) -> None:
            super().__init__(num_blocks)
            self._by_link: dict[Link, list[BlockId]] = {}

        def add_all(self, block_ids: Sequence[BlockId], after: Place, keys: KeyChain, first: int) -> Place:
            end = super().add_all(block_ids, after, keys, first)
            for index, block_id in enumerate(block_ids, start=first):
                carriers = self._by_link.setdefault((keys.link(index)[0], ()), [])
                if block_id not in carriers:
                    carriers.append(block_id)
            return end

        def drop_all(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
            for carriers in self._by_link.values():
                carriers[:] = [block_id for block_id in carriers if block_id not in block_ids]
            return super().drop_all(block_ids)

        def find(self, keys: KeyChain, max_blocks: int) -> list[BlockId]:
            found: list[BlockId] = []
            for index in range(min(max_blocks, keys.num_full_blocks(1 << 62))):
                carriers = self._by_link.get((keys.link(index)[0], ()))
                if not carriers:
                    break
                found.append(carriers[0])
            return found

        def end_of(self, block_ids: Sequence[BlockId], keys: KeyChain | None) -> Place | None:
            return super().end_of(block_ids, keys) or self.root


@mutant
class IgnoresTheNamespace(_WithIndex):
    """Equal texts meet whatever their LoRA adapter and salt."""

    class Index(_BadIndex):
        @staticmethod
        def key(link: Link) -> Link:
            return link[0], ()


@mutant
class IgnoresTheSalt(_WithIndex):
    class Index(_BadIndex):
        @staticmethod
        def key(link: Link) -> Link:
            return link[0], link[1][:1]


@mutant
class HashesAllButTheLastToken(_WithIndex):
    """Blocks that differ in their last token alone are taken for equal."""

    class Index(_BadIndex):
        @staticmethod
        def key(link: Link) -> Link:
            content = link[0]
            return (*content[:-1], content[-1][:-1]), link[1]


@mutant
class KeepsEvictedTexts(_WithIndex):
    """A block that is handed out is still found under its old text."""

    class Index(PrefixIndex):
        def drop_all(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
            return []


@mutant
class EvictsAtTheFree(Unaudited):
    """A cached text is forgotten when its last reader leaves."""

    def free(self, seq_id: SeqId) -> None:
        table = self._tables.get(seq_id)
        super().free(seq_id)
        for block_id in table.block_ids if table else ():
            if not self._ref[block_id] and self.index.drop(block_id):
                self._num_cached_idle -= 1


@mutant
class FindsPartialBlocks(Unaudited):
    """Registration rounds up: a block is findable before it is full."""

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        table = self._table(seq_id)
        stored = table.num_tokens
        table.num_tokens = self.num_slots(seq_id)
        super().register(seq_id, table.num_tokens)
        table.num_tokens = stored


@mutant
class RegistersAtAllocation(Unaudited):
    """A block is findable as soon as it is allocated, before anything is computed."""

    def allocate(self, seq_id: SeqId, num_tokens: int, **kwargs: Any) -> None:
        super().allocate(seq_id, num_tokens, **kwargs)
        self.register(seq_id, num_tokens)


@mutant
class EvictsTheMostRecent(Unaudited):
    """The block that was released last is handed out first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"free_list": "lifo"}))


@mutant
class ReportsCachedAsUsed(Unaudited):
    """Idle cached blocks are reported as used."""

    def usage(self) -> Usage:
        usage = super().usage()
        return usage._replace(num_used=usage.num_used + usage.num_cached_idle, num_cached_idle=0)


@mutant
class CountsSharedBlocksTwice(Unaudited):
    """Used blocks are counted per table."""

    def usage(self) -> Usage:
        usage = super().usage()
        return usage._replace(num_used=usage.num_used + usage.num_shared)


@mutant
class ForgetsEvictions(Unaudited):
    def usage(self) -> Usage:
        return super().usage()._replace(num_evicted=0)


@mutant
class QueriesTouch(Unaudited):
    """Asking for a match moves the hit blocks to the tail of the free list."""

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        match = super().match_prefix(keys, num_tokens)
        for block_id in match.block_ids:
            if not self._ref[block_id]:
                self.pool.free.remove(block_id)
                self.pool.free.extend([block_id])
        return match


@mutant
class ReturnsUnfindable(Unaudited):
    """What was findable before a swap-out is taken for findable after the swap-in, in blocks that nobody registered."""

    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        transfer = super().swap_in(seq_ids)
        for seq_id in seq_ids if transfer is not None else ():
            table = self._tables[seq_id]
            table.num_registered = max(table.num_registered, table.num_tokens // self.block_size - 1)
        return transfer


@mutant
class RemembersFreedIds(Unaudited):
    """How much of a sequence is registered survives its free, and counts for the next one of that id."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registered: dict[SeqId, int] = {}

    def free(self, seq_id: SeqId) -> None:
        table = self._tables.get(seq_id)
        if table is not None:
            self.index.catch_up(table)
            self._registered[seq_id] = table.num_registered
        super().free(seq_id)

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        if num_tokens > self._registered.get(seq_id, 0) * self.block_size:
            super().register(seq_id, num_tokens)


@mutant
class GivesASecondTable(Unaudited):
    """An allocation under an id in use makes a new table; the blocks of the old one are lost."""

    def allocate(self, seq_id: SeqId, num_tokens: int, **kwargs: Any) -> None:
        if self.num_free_blocks > self._ceil(num_tokens):
            self._tables.pop(seq_id, None)
        super().allocate(seq_id, num_tokens, **kwargs)


@mutant
class RefusalLeavesATable(Unaudited):
    """The table is made before the room is looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused: set[SeqId] = set()

    def allocate(self, seq_id: SeqId, num_tokens: int, **kwargs: Any) -> None:
        try:
            super().allocate(seq_id, num_tokens, **kwargs)
        except OutOfBlocks:
            self._refused.add(seq_id)
            raise

    def has_table(self, seq_id: SeqId) -> bool:
        return seq_id in self._refused or super().has_table(seq_id)


@mutant
class RegistersWhatIsStored(Unaudited):
    """All full blocks are registered, whatever part of them is said to be computed."""

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        super().register(seq_id, max(num_tokens, self.num_tokens(seq_id)))


@mutant
class NeverForgetsTheWatermark(Unaudited):
    """A prompt that fits the empty pool, but for the watermark, is put off for ever."""

    def can_allocate(self, num_tokens: int, **kwargs: Any) -> AllocStatus:
        status = super().can_allocate(num_tokens, **kwargs)
        fits = self._ceil(num_tokens) <= self.num_blocks
        return AllocStatus.LATER if status is AllocStatus.NEVER and fits else status


@mutant
class CopyIsNotCounted(Unaudited):
    """A catch-up that needs new blocks counts those alone; where the copy does not fit, it writes into the tail."""

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        try:
            return super().append_slots(seq_id, num_tokens)
        except OutOfBlocks as error:
            table = self._tables[seq_id]
            num_new = self._ceil(table.num_tokens + num_tokens) - len(table.block_ids)
            if error.needed != num_new + 1 or not 0 < num_new <= self.num_free_blocks:
                raise
            table.block_ids += self.pool.take(num_new)
            table.num_tokens += num_tokens
            return ()


@mutant
class LaterDoubleHidesTheFirst(Unaudited):
    """One block is found for a text, the last that was registered; when that one goes, the text is lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last: dict[int, BlockId] = {}

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        super().register(seq_id, num_tokens)
        table = self._tables[seq_id]
        for index in range(num_tokens // self.block_size if table.keys else 0):
            self._last[table.keys.chain(index)] = table.block_ids[index]

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        found = super().match_prefix(keys, num_tokens)
        for index in range(len(found.block_ids)):
            if not self.index.has_text(self._last[keys.chain(index)]):
                ids = found.block_ids[:index]
                num_revived = sum(1 for block_id in ids if not self._ref[block_id])
                return found._replace(num_tokens=index * self.block_size, block_ids=ids, num_revived=num_revived)
        return found
