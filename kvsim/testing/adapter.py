"""Makes a foreign block manager testable: write five small methods, get the `KVAllocator` protocol.

The adapter keeps only what a caller of the manager must know anyway: which sequences there are and how many tokens
each stores. Block ids, sharing and exhaustion are the manager's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvsim.memory.interface import NO_MATCH, BlockCopy, BlockMove, KeyChain, PrefixMatch, Transfer, Usage
from kvsim.types import AllocatorError, AllocStatus, BlockId, OutOfBlocks, SeqId


class BlockManagerAdapter:
    """Subclass it around one manager; override `take`, `grow`, `drop`, `table`, `num_free`, and what else it can do.

    `out_of_blocks` are the exceptions that mean that the manager has run out. A manager without `share` (fork) or
    `to_host`/`to_gpu` (swap, with `num_host_blocks`) is tested without them: pass `fork=False` to `check_allocator`.
    """

    out_of_blocks: tuple[type[Exception], ...] = ()

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._num_tokens: dict[SeqId, int] = {}
        self._swapped: set[SeqId] = set()

    def take(self, seq_id: SeqId, num_tokens: int) -> None:
        """Give a new sequence the blocks of `num_tokens` tokens."""
        raise NotImplementedError("no take")

    def grow(self, seq_id: SeqId, num_tokens: int) -> Iterable[tuple[BlockId, BlockId]] | None:
        """The sequence now has `num_tokens` tokens in all, one more than before; returns copies as (src, dst)."""
        raise NotImplementedError("no grow")

    def drop(self, seq_id: SeqId) -> None:
        """Free the sequence."""
        raise NotImplementedError("no drop")

    def table(self, seq_id: SeqId) -> Sequence[BlockId]:
        """The sequence's block ids."""
        raise NotImplementedError("no table")

    def num_free(self) -> int:
        """Free GPU blocks."""
        raise NotImplementedError("no num_free")

    def share(self, parent_id: SeqId, child_id: SeqId) -> None:
        """Fork."""
        raise NotImplementedError("no share")

    def to_host(self, seq_ids: Sequence[SeqId]) -> Iterable[tuple[BlockId, BlockId]] | None:
        """Swap out; returns (GPU block, host block) pairs, None (or `out_of_blocks`) if the host has no room."""
        raise NotImplementedError("no to_host")

    def to_gpu(self, seq_ids: Sequence[SeqId]) -> Iterable[tuple[BlockId, BlockId]] | None:
        """Swap in; returns (host block, GPU block) pairs, None (or `out_of_blocks`) if there is no room."""
        raise NotImplementedError("no to_gpu")

    @property
    def num_free_blocks(self) -> int:
        return self.num_free()

    def can_allocate(
        self, num_tokens: int, *, prefix: PrefixMatch = NO_MATCH, reserve_tokens: int = 0, watermark_blocks: int = 0
    ) -> AllocStatus:
        needed = -(-num_tokens // self.block_size)
        if self.num_blocks - needed < watermark_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if self.num_free() - needed >= watermark_blocks else AllocStatus.LATER

    def match_prefix(self, keys: KeyChain, num_tokens: int) -> PrefixMatch:
        return NO_MATCH

    def register(self, seq_id: SeqId, num_tokens: int) -> None:
        pass

    def allocate(
        self,
        seq_id: SeqId,
        num_tokens: int,
        *,
        keys: KeyChain | None = None,
        prefix: PrefixMatch = NO_MATCH,
        reserve_tokens: int = 0,
    ) -> None:
        if seq_id in self._num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} has a block table already")
        self._guarded(self.take, seq_id, num_tokens)
        self._num_tokens[seq_id] = num_tokens

    def append_slots(self, seq_id: SeqId, num_tokens: int = 1) -> tuple[BlockCopy, ...]:
        """Token by token; a catch-up that would not fit is not begun."""
        self._require(seq_id)
        if num_tokens > 1 and self._num_missing(seq_id, num_tokens) > self.num_free():
            raise OutOfBlocks(self._num_missing(seq_id, num_tokens), self.num_free())
        copies = []
        for _ in range(num_tokens):
            stored = self._num_tokens[seq_id]
            pairs = self._guarded(self.grow, seq_id, stored + 1) or ()
            copies += [BlockCopy(src, dst, stored % self.block_size or self.block_size) for src, dst in pairs]
            self._num_tokens[seq_id] = stored + 1
        return tuple(copies)

    def fork(self, parent_id: SeqId, child_id: SeqId, *, keys: KeyChain | None = None) -> None:
        self._require(parent_id)
        self.share(parent_id, child_id)
        self._num_tokens[child_id] = self._num_tokens[parent_id]
        if parent_id in self._swapped:
            self._swapped.add(child_id)

    def free(self, seq_id: SeqId) -> None:
        self._require(seq_id)
        self.drop(seq_id)
        del self._num_tokens[seq_id]
        self._swapped.discard(seq_id)

    def swap_out(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        pairs = self._pairs(self.to_host, seq_ids)
        if pairs is None:
            return None
        self._swapped.update(seq_ids)
        return tuple(BlockMove(src, dst) for src, dst in pairs)

    def swap_in(self, seq_ids: Sequence[SeqId]) -> Transfer | None:
        pairs = self._pairs(self.to_gpu, seq_ids)
        if pairs is None:
            return None
        self._swapped.difference_update(seq_ids)
        return tuple(BlockMove(src, dst) for src, dst in pairs)

    def has_table(self, seq_id: SeqId) -> bool:
        return seq_id in self._num_tokens

    def num_tokens(self, seq_id: SeqId) -> int:
        return self._num_tokens[self._require(seq_id)]

    def num_slots(self, seq_id: SeqId) -> int:
        return len(self.block_table(seq_id)) * self.block_size

    def block_table(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        return tuple(self.table(self._require(seq_id)))

    def usage(self) -> Usage:
        """Used is what is not free; sharing is counted from the tables."""
        gpu = [self.block_table(seq_id) for seq_id in self._num_tokens if seq_id not in self._swapped]
        named = [block_id for table in gpu for block_id in set(table)]
        host = {block_id for seq_id in self._swapped for block_id in self.block_table(seq_id)}
        return Usage(
            num_blocks=self.num_blocks,
            num_used=self.num_blocks - self.num_free(),
            num_cached_idle=0,
            num_free=self.num_free(),
            num_shared=sum(1 for block_id in set(named) if named.count(block_id) > 1),
            num_host_used=len(host),
            num_host_blocks=self.num_host_blocks,
            num_logical=len(named),
        )

    def audit(self) -> None:
        pass

    def _require(self, seq_id: SeqId) -> SeqId:
        if seq_id not in self._num_tokens:
            raise AllocatorError(f"sequence {seq_id!r} has no block table")
        return seq_id

    def _guarded(self, command: Any, *args: Any) -> Any:
        try:
            return command(*args)
        except self.out_of_blocks as error:
            raise OutOfBlocks(1, self.num_free()) from error

    def _pairs(self, swap: Any, seq_ids: Sequence[SeqId]) -> Any:
        """What the manager moved; None if it says in either way that there is no room."""
        try:
            return swap(seq_ids)
        except self.out_of_blocks:
            return None

    def _num_missing(self, seq_id: SeqId, num_tokens: int) -> int:
        """Blocks for `num_tokens` more tokens, the copy of a shared partial tail included."""
        stored, table = self._num_tokens[seq_id], self.block_table(seq_id)
        is_shared = stored % self.block_size and any(
            table[-1] in self.block_table(other_id)
            for other_id in self._num_tokens
            if other_id != seq_id and (other_id in self._swapped) == (seq_id in self._swapped)
        )
        return -(-(stored + num_tokens) // self.block_size) - len(table) + bool(is_shared)
