"""Physical blocks: who is free, in which order they are handed out, and how many tables name each.

The order of the free list is a policy; all are O(1) per block:

`fifo`             taken from the head, released at the tail, a table's last block first.
`lifo`             taken from the end, released to the end, a table's first block first (the paper's engine).
`lru`              blocks without a cached text go to the head, a table's last block foremost; blocks with one go to
                   the tail, a table's last block first, so that the tail of a chain is evicted before its head.
`exclusive_first`  as `fifo`, but a block that more than one sequence used in its last life is handed out only when
                   no other is left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, islice
from operator import itemgetter, not_
from typing import Literal, Protocol, TypeAlias, TypeVar, get_args

from kvsim.types import AllocatorError, BlockId

FreeListPolicy: TypeAlias = Literal["fifo", "lifo", "lru", "exclusive_first"]
FREE_LIST_POLICIES: tuple[str, ...] = get_args(FreeListPolicy)

T = TypeVar("T")


def picked(values: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """`values[place]` of each: for a table's blocks in a third of the time of a map."""
    return itemgetter(*places)(values) if len(places) > 1 else [values[place] for place in places]


class FreeList(Protocol):
    """Free blocks, in the order in which they will be handed out."""

    is_tail_first: bool
    """A table is released last block first."""

    def take(self) -> BlockId:
        """Hand out the next block. Raises IndexError or KeyError if none is left."""
        ...

    def take_many(self, count: int, /) -> list[BlockId]:
        """Hand out the next `count` blocks, which are there."""
        ...

    def extend(self, block_ids: Sequence[BlockId], /) -> None:
        """Put back the blocks of one release, in walk order."""
        ...

    def remove(self, block_id: BlockId, /) -> None:
        """Pull one block out of the middle (a prefix-cache hit)."""
        ...

    def __iter__(self) -> Iterator[BlockId]:
        """Front to back; for `lifo` from the bottom of the stack to its top."""
        ...


class PlainFifo(deque[BlockId]):
    """A queue for pools without a prefix cache: nothing is pulled out of its middle."""

    is_tail_first = True
    take = deque.popleft

    def take_many(self, count: int, /) -> list[BlockId]:
        return list(islice(iter(self.popleft, None), count))


class PlainLifo(list[BlockId]):
    """A stack for pools without a prefix cache."""

    is_tail_first = False
    take = list.pop

    def take_many(self, count: int, /) -> list[BlockId]:
        start = len(self) - count
        taken = self[start:]
        del self[start:]
        taken.reverse()
        return taken


class PullableFifo:
    """A queue for pools with a prefix cache: a hit costs no search for its place.

    A block that is pulled out keeps its place, which is passed over when its turn comes. Put back it has two, and the
    last one counts.
    """

    is_tail_first = True

    def __init__(self, block_ids: Iterable[BlockId] = ()) -> None:
        self._queue = deque(block_ids)
        self._pulled: dict[BlockId, int] = {}
        """Places to pass over, by block."""
        self._num_pulled = 0

    def take(self) -> BlockId:
        while True:
            block_id = self._queue.popleft()
            if block_id not in self._pulled:
                return block_id
            self._pass_over(block_id)

    def take_many(self, count: int, /) -> list[BlockId]:
        if self._pulled and not self._pulled.keys().isdisjoint(islice(self._queue, count)):
            return [self.take() for _ in range(count)]
        return list(islice(iter(self._queue.popleft, None), count))

    def extend(self, block_ids: Iterable[BlockId], /) -> None:
        self._queue.extend(block_ids)

    def remove(self, block_id: BlockId, /) -> None:
        self._pulled[block_id] = self._pulled.get(block_id, 0) + 1
        self._num_pulled += 1
        if self._num_pulled > len(self._queue) // 2:
            self._queue = deque(self)
            self._pulled.clear()
            self._num_pulled = 0

    def _pass_over(self, block_id: BlockId) -> None:
        self._num_pulled -= 1
        if self._pulled[block_id] == 1:
            del self._pulled[block_id]
        else:
            self._pulled[block_id] -= 1

    def __iter__(self) -> Iterator[BlockId]:
        pulled = self._pulled.copy()
        for block_id in self._queue:
            if pulled.get(block_id):
                pulled[block_id] -= 1
            else:
                yield block_id


class PullableLifo(OrderedDict[BlockId, None]):
    """A stack for pools with a prefix cache, linked, so that a hit leaves the middle in O(1)."""

    is_tail_first = False

    def take(self) -> BlockId:
        return self.popitem()[0]

    def take_many(self, count: int, /) -> list[BlockId]:
        return [self.popitem()[0] for _ in range(count)]

    def extend(self, block_ids: Iterable[BlockId], /) -> None:
        for block_id in block_ids:
            self[block_id] = None

    def remove(self, block_id: BlockId, /) -> None:
        del self[block_id]


class LruFreeList:
    """One queue: blocks without a cached text in front (a stack), those with one behind (least recently used first)."""

    is_tail_first = True

    def __init__(self, block_ids: Iterable[BlockId], texts: Sequence[object]) -> None:
        self._blank = list(block_ids)[::-1]
        self._cached = PullableFifo()
        self._texts = texts
        """By block: None for one without a cached text. It stays as it is while the block is free."""

    def take(self) -> BlockId:
        return self._blank.pop() if self._blank else self._cached.take()

    def take_many(self, count: int, /) -> list[BlockId]:
        blank = self._blank
        if not blank:
            return self._cached.take_many(count)
        start = max(0, len(blank) - count)
        taken = blank[start:]
        taken.reverse()
        del blank[start:]
        if len(taken) < count:
            taken += self._cached.take_many(count - len(taken))
        return taken

    def extend(self, block_ids: Sequence[BlockId]) -> None:
        texts = picked(self._texts, block_ids)
        if None in texts:
            # The first of the walk is to be the foremost, so it is pushed last.
            self._blank += list(compress(block_ids, map(not_, texts)))[::-1]
            block_ids = list(compress(block_ids, texts))
        self._cached.extend(block_ids)

    def remove(self, block_id: BlockId) -> None:
        if self._texts[block_id] is None:
            self._blank.remove(block_id)
        else:
            self._cached.remove(block_id)

    def __iter__(self) -> Iterator[BlockId]:
        return chain(reversed(self._blank), self._cached)


class ExclusiveFirst:
    """Two queues: blocks that one sequence alone used in their last life, then those that were shared."""

    is_tail_first = True

    def __init__(self, block_ids: Iterable[BlockId], was_shared: bytearray) -> None:
        self._exclusive = PullableFifo(block_ids)
        self._shared = PullableFifo()
        self._was_shared = was_shared

    def take(self) -> BlockId:
        try:
            block_id = self._exclusive.take()
        except IndexError:
            block_id = self._shared.take()
        self._was_shared[block_id] = False
        return block_id

    def take_many(self, count: int, /) -> list[BlockId]:
        return [self.take() for _ in range(count)]

    def extend(self, block_ids: Sequence[BlockId]) -> None:
        was_shared = picked(self._was_shared, block_ids)
        self._shared.extend(compress(block_ids, was_shared))
        self._exclusive.extend(compress(block_ids, map(not_, was_shared)))

    def remove(self, block_id: BlockId) -> None:
        (self._shared if self._was_shared[block_id] else self._exclusive).remove(block_id)

    def __iter__(self) -> Iterator[BlockId]:
        return chain(self._exclusive, self._shared)


class BlockPool:
    """Reference counts and the free list of one device.

    A block is free exactly if its reference count is 0. `reserved` blocks at the low end of the ids are never
    handed out. Raises AllocatorError for an unknown policy.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: str = "fifo",
        *,
        num_reserved: int = 0,
        can_pull: bool = False,
        texts: Sequence[object] | None = None,
    ) -> None:
        self.num_blocks = num_blocks - num_reserved
        self.num_free = self.num_blocks
        self.first_block = num_reserved
        self.ref = [0] * num_blocks
        self.was_shared = bytearray(num_blocks)
        """Blocks that more than one sequence used since they were handed out (up to date under `exclusive_first`)."""
        self.num_shared = 0
        """Blocks whose reference count exceeds 1."""
        self.free = self._free_list(range(num_reserved, num_blocks), policy, can_pull, texts or [None] * num_blocks)
        # A deep copy takes a partial along; a bound method of a built-in class would stay with the first pool.
        self.pop: Callable[[], BlockId] = partial(type(self.free).take, self.free)
        """Hand out the next block; whoever must know of it (prefix index, journal) puts itself in front."""
        self.pop_many: Callable[[int], list[BlockId]] = self.free.take_many
        """Hand out `num` blocks, which must be free; whoever wraps `pop` wraps this as well."""

    def _free_list(self, block_ids: range, policy: str, can_pull: bool, texts: Sequence[object]) -> FreeList:
        match policy:
            case "fifo":
                return PullableFifo(block_ids) if can_pull else PlainFifo(block_ids)
            case "lifo":
                return PullableLifo(dict.fromkeys(block_ids)) if can_pull else PlainLifo(block_ids)
            case "lru":
                return LruFreeList(block_ids, texts)
            case "exclusive_first":
                return ExclusiveFirst(block_ids, self.was_shared)
        raise AllocatorError(f"free_list {policy!r} is unknown; it is one of {', '.join(FREE_LIST_POLICIES)}")

    def take(self, count: int) -> list[BlockId]:
        """Hand out `count` blocks with one reference each; the caller has checked that they are there."""
        ref, taken = self.ref, self.pop_many(count)
        for block_id in taken:
            ref[block_id] = 1
        self.num_free -= count
        return taken

    def take_next(self) -> BlockId:
        """Hand out one block with one reference. Raises LookupError if none is left."""
        block_id = self.pop()
        self.ref[block_id] = 1
        self.num_free -= 1
        return block_id

    def share(self, block_id: BlockId, count: int = 1) -> None:
        """Add `count` references to a block that has one."""
        before = self.ref[block_id]
        self.ref[block_id] = before + count
        if before == 1 and count:
            self.num_shared += 1
        self.was_shared[block_id] = True

    def hit_all(self, block_ids: Sequence[BlockId]) -> int:
        """Add a reference to each through the prefix cache; free ones leave the free list. Returns how many did."""
        ref = self.ref
        counts = picked(ref, block_ids)
        num_revived, num_unshared = counts.count(0), counts.count(1)
        for block_id, count in zip(block_ids, counts, strict=True):
            if not count:
                self.free.remove(block_id)
            if count < 2:
                # Not before: it may say where in the free list the block was.
                self.was_shared[block_id] = True
            ref[block_id] = count + 1
        self.num_shared += num_unshared
        self.num_free -= num_revived
        return num_revived

    def release(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Drop one reference of each block of a table; returns those that became free, in walk order.

        Raises AllocatorError if one has none; nothing is changed then.
        """
        ref = self.ref
        freed = walk = list(reversed(block_ids) if self.free.is_tail_first else block_ids)
        counts = picked(ref, walk)
        if counts.count(1) < len(walk):
            if 0 in counts:
                raise AllocatorError(f"block {walk[counts.index(0)]} is freed twice")
            freed = [block_id for block_id, count in zip(walk, counts, strict=True) if count == 1]
            for block_id, count in zip(walk, counts, strict=True):
                ref[block_id] = count - 1
            self.num_shared -= counts.count(2)
        for block_id in freed:
            ref[block_id] = 0
        self.free.extend(freed)
        self.num_free += len(freed)
        return freed
