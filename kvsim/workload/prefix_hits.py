"""Ideal prefix-cache hits of a trace: which share of its blocks an LRU cache of a given size would find.

Requests come in file order, one at a time, each as a list of block ids. A request matches the longest beginning of
its prompt's list whose ids are all cached. Then each of its ids is touched, last to first, so that the tail of a chain
is older than its head and is evicted before it; then the oldest are evicted until the cache fits. The answer of a
session's turn is cached behind its prompt, for the next turn begins with both; other answers nobody asks for again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from kvsim.types import ScenarioError
from kvsim.workload.trace import Trace, in_file_order

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

CAPACITIES = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 50_000, 100_000, 200_000)
"""Cache sizes in blocks of the default curve; it goes on 300k, 500k, 1M, 3M, ... while a cache is too small."""
MAX_BLOCKS = 50_000_000


@dataclass(frozen=True)
class BlockTrace:
    """Requests as lists of block ids (`ids[offsets[i]:offsets[i + 1]]`) and prompt lengths; equal ids, equal prefix."""

    ids: Ints
    offsets: Ints
    prompts: Ints
    block_size: int
    num_asked: Ints | None = None
    """Of each request's ids the first so many are looked up, behind them are its answer's; None: all are."""

    @property
    def total_blocks(self) -> int:
        """Blocks of the prompts, the partial last ones included."""
        return len(self.ids) if self.num_asked is None else int((-(-self.prompts // self.block_size)).sum())

    @property
    def num_distinct(self) -> int:
        """Blocks an infinite cache ends with."""
        import numpy as np

        return len(np.unique(self.ids))


@dataclass(frozen=True)
class PrefixHits:
    """What a cache of `capacity` blocks (None: infinite) finds; the partial last block counts as a block.

    `capped` hits leave the last token to be computed, as an engine must: at most (prompt - 1) // block size blocks.
    """

    capacity: int | None
    hit_blocks: int
    hit_blocks_capped: int
    hit_tokens: int
    total_blocks: int
    total_tokens: int
    num_evictions: int

    @property
    def block_hit_rate(self) -> float:
        """Share of blocks found."""
        return self.hit_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def block_hit_rate_capped(self) -> float:
        """Share of blocks found if the last token is computed anew."""
        return self.hit_blocks_capped / self.total_blocks if self.total_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of prompt tokens found."""
        return self.hit_tokens / self.total_tokens if self.total_tokens else 0.0


def block_trace(trace: Trace, block_size: int = 16) -> BlockTrace | None:
    """The prompts as block ids, or None where the trace does not tell what they share.

    Hash ids stand for blocks of their own size; prefix groups and sessions are cut into blocks of `block_size`.
    """
    import numpy as np

    if block_size < 1:
        raise ScenarioError(f"block size is {block_size}; it is at least 1")
    trace = in_file_order(trace)
    if trace.hash_ids is not None and trace.hash_offsets is not None:
        return BlockTrace(trace.hash_ids, trace.hash_offsets, trace.prompt, trace.hash_block_size)
    if trace.prefix_group is None and trace.session is None:
        return None
    num_asked, num_blocks = None, -(-trace.prompt // block_size)
    if trace.session is not None:
        # A partial block is found by nobody, even where an answer has filled it.
        num_asked = np.where(trace.session < 0, num_blocks, trace.prompt // block_size)
        num_blocks = np.maximum(num_blocks, _stored_tokens(trace) // block_size)
    offsets = np.concatenate(([0], np.cumsum(num_blocks)))
    if offsets[-1] > MAX_BLOCKS:
        raise ScenarioError(
            f"{trace.path}: {offsets[-1]} blocks of {block_size} tokens are too many for the prefix "
            f"curve ({MAX_BLOCKS}); look at a part of it (first, window)"
        )
    ids = _block_ids(trace, block_size, num_blocks, offsets)
    return BlockTrace(ids, offsets, trace.prompt, block_size, num_asked)


def _stored_tokens(trace: Trace) -> Ints:
    """Of each row's text what a later turn may find: the prompt, of a session's turn the answer but its last token."""
    import numpy as np

    assert trace.session is not None
    return trace.prompt + np.where(trace.session >= 0, trace.output - 1, 0)


def _block_ids(trace: Trace, block_size: int, num_blocks: Ints, offsets: Ints) -> Ints:
    """Ids of blocks that are the beginning of a shared text; every other block is one of its own (negative)."""
    import numpy as np

    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], num_blocks)
    ids = -1 - np.arange(offsets[-1])
    width = int(num_blocks.max(initial=1))
    first_code = 0
    for codes, shared_tokens in _shared_texts(trace):
        shared = np.repeat(np.where(codes >= 0, shared_tokens // block_size, 0), num_blocks)
        inside = (position < shared) & (ids < 0)
        ids[inside] = ((first_code + np.repeat(codes, num_blocks)) * width + position)[inside]
        first_code += int(codes.max(initial=0)) + 1
    return ids


def _shared_texts(trace: Trace) -> Iterable[tuple[Ints, Ints]]:
    """(whose text a prompt begins with, for how many tokens); a session's text comes behind its group's prefix."""
    import numpy as np

    prefix, group = np.zeros_like(trace.prompt), np.full_like(trace.prompt, -1)
    if trace.prefix_group is not None and trace.prefix_tokens is not None:
        prefix = np.where(trace.prefix_group >= 0, trace.prefix_tokens, 0)
        group = np.where(prefix > 0, trace.prefix_group, -1)
        yield group, prefix
    if trace.session is not None:
        # Behind another prefix the same text makes other blocks.
        texts = np.stack((trace.session, group, prefix))
        codes = np.unique(texts, axis=1, return_inverse=True)[1].reshape(-1)
        yield np.where(trace.session >= 0, codes, -1), _stored_tokens(trace)


def prefix_hits(blocks: BlockTrace, capacity: int | None = None, order: Literal["rev", "fwd"] = "rev") -> PrefixHits:
    """Hits of one cache size (None: infinite); `order` is the order of touching within a request."""
    return prefix_curve(blocks, [capacity], order)[0]


def prefix_curve(
    blocks: BlockTrace, capacities: Iterable[int | None] | None = None, order: Literal["rev", "fwd"] = "rev"
) -> list[PrefixHits]:
    """Hits for each cache size (default: `CAPACITIES` and the infinite one), one pass over the trace each."""
    num_distinct = blocks.num_distinct
    if capacities is None:
        capacities = _default_capacities(num_distinct)
    requests = _requests(blocks, order)
    bound = _infinite(requests, blocks.num_asked)
    curve = []
    for capacity in capacities:
        if capacity is not None and capacity < 1:
            raise ScenarioError(f"cache capacity is {capacity} blocks; it is at least 1")
        if capacity is None or capacity >= num_distinct:
            matched, num_evictions = bound, 0
        else:
            matched, num_evictions = _finite(requests, bound, capacity, order)
        curve.append(_hits(blocks, capacity, matched, num_evictions))
    return curve


def _default_capacities(num_distinct: int) -> list[int | None]:
    capacities: list[int | None] = list(CAPACITIES)
    step = 100_000
    while num_distinct > max(size for size in capacities if size is not None):
        capacities += [3 * step, 5 * step, 10 * step]
        step *= 10
    return [*capacities, None]


def _requests(blocks: BlockTrace, order: str) -> list[list[int]]:
    if order not in ("rev", "fwd"):
        raise ScenarioError(f"touching order is {order!r}; it is rev or fwd")
    ids, offsets = blocks.ids.tolist(), blocks.offsets.tolist()
    return [ids[start:end] for start, end in pairwise(offsets)]


def _infinite(requests: list[list[int]], num_asked: Ints | None) -> list[int]:
    """Blocks each request matches if nothing is ever evicted: the bound of every cache."""
    cached: set[int] = set()
    matched = []
    for ids, num in zip(requests, map(len, requests) if num_asked is None else num_asked.tolist(), strict=True):
        matched.append(next((index for index, id_ in enumerate(ids[:num]) if id_ not in cached), num))
        cached.update(ids)
    return matched


def _finite(requests: list[list[int]], bound: list[int], capacity: int, order: str) -> tuple[list[int], int]:
    cached: OrderedDict[int, None] = OrderedDict()
    touch, evict = cached.move_to_end, cached.popitem
    matched = []
    num_evictions = 0
    for ids, most in zip(requests, bound, strict=True):
        found = 0
        while found < most and ids[found] in cached:
            found += 1
        matched.append(found)
        for id_ in reversed(ids) if order == "rev" else ids:
            cached[id_] = None
            touch(id_)
        for _ in range(len(cached) - capacity):
            evict(last=False)
            num_evictions += 1
    return matched, num_evictions


def _hits(blocks: BlockTrace, capacity: int | None, matched: list[int], num_evictions: int) -> PrefixHits:
    import numpy as np

    found = np.array(matched, dtype=np.int64)
    size, prompts = blocks.block_size, blocks.prompts
    return PrefixHits(
        capacity=capacity,
        hit_blocks=int(found.sum()),
        hit_blocks_capped=int(np.minimum(found, (prompts - 1) // size).sum()),
        hit_tokens=int(np.minimum(found * size, prompts).sum()),
        total_blocks=blocks.total_blocks,
        total_tokens=int(prompts.sum()),
        num_evictions=num_evictions,
    )
