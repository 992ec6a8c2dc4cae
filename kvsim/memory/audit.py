"""Every law of the memory, recomputed from scratch; what the allocator counts as it goes is checked against it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvsim.memory.block_pool import BlockPool
from kvsim.memory.block_table import BlockTable
from kvsim.types import BlockId, LawViolation, SeqId

if TYPE_CHECKING:
    from kvsim.memory.paged_state import PagedState


def audit(allocator: PagedState) -> None:
    """Check laws 4, 8, 11 and 13 and every counter. Costs O(blocks). Raises LawViolation."""
    gpu, host = allocator.tables(), allocator.swapped_tables()
    _check_pool("GPU", allocator.pool, gpu, allocator.surplus_refs())
    _check_pool("host", allocator.host, host, {})
    for seq_id, table in (*gpu.items(), *host.items()):
        _check_table(allocator, seq_id, table)
    fills = fills_of(allocator, gpu)
    fills_of(allocator, host)
    _check_index(allocator, gpu)
    _check_counters(allocator, gpu, fills)


def _require(law: int, holds: bool, text: str) -> None:
    if not holds:
        raise LawViolation(f"law {law}: {text}")


def _check_pool(name: str, pool: BlockPool, tables: dict[SeqId, BlockTable], surplus: dict[BlockId, int]) -> None:
    """Free and referenced blocks are all there are, and a reference count is the number of tables that name it."""
    free = list(pool.free)
    repeated = [block_id for block_id, count in Counter(free).items() if count > 1]
    _require(4, not repeated, f"{name} blocks {repeated} are in the free list more than once")
    named = Counter(block_id for table in tables.values() for block_id in set(table.block_ids))
    is_free = set(free)
    for block_id in range(pool.first_block, pool.first_block + pool.num_blocks):
        ref, expected = pool.ref[block_id], named[block_id] + surplus.get(block_id, 0)
        _require(4, ref == expected, f"{name} block {block_id} has ref count {ref}, but {expected} tables name it")
        _require(4, (ref == 0) == (block_id in is_free), f"{name} block {block_id} has ref count {ref}, and "
                 f"{'is' if block_id in is_free else 'is not'} in the free list")  # fmt: skip
        del named[block_id]
    strays = sorted(named) + sorted(is_free - set(range(pool.first_block, pool.first_block + pool.num_blocks)))
    _require(4, not strays, f"{name} blocks {strays} are not usable blocks, but tables or the free list name them")
    num_shared = sum(1 for ref in pool.ref if ref > 1)
    _require(4, pool.num_shared == num_shared, f"{name} counts {pool.num_shared} shared blocks; there are {num_shared}")


def _check_table(allocator: PagedState, seq_id: SeqId, table: BlockTable) -> None:
    length, expected = len(table.block_ids), -(-table.num_tokens // allocator.block_size)
    _require(13, length == expected, f"sequence {seq_id!r} stores {table.num_tokens} tokens in {length} blocks of "
             f"{allocator.block_size}; {expected} would do")  # fmt: skip
    ring = allocator.window_blocks or length
    aliased = [table.block_ids[index % ring] for index in range(length)]
    _require(8, table.block_ids == aliased, f"the table of {seq_id!r} leaves the ring of {ring} blocks")
    distinct = len(set(table.block_ids))
    _require(8, distinct == min(ring, length), f"the table of {seq_id!r} names a block twice: {table.block_ids}")


def fills_of(allocator: PagedState, tables: dict[SeqId, BlockTable]) -> dict[BlockId, int]:
    """How far each block of the tables is filled. Raises LawViolation where those who share one do not agree."""
    seen: dict[BlockId, tuple[int, int]] = {}
    for seq_id, table in tables.items():
        for index, block_id in enumerate(table.block_ids[: allocator.window_blocks or None]):
            full_to = table.num_tokens - index * allocator.block_size
            place = (index, min(full_to, allocator.block_size))
            known = seen.setdefault(block_id, place)
            _require(8, known == place, f"block {block_id} is entry {place[0]} with {place[1]} tokens for {seq_id!r}, "
                     f"and entry {known[0]} with {known[1]} tokens for another sequence")  # fmt: skip
    return {block_id: fill for block_id, (_, fill) in seen.items()}


def _check_index(allocator: PagedState, tables: dict[SeqId, BlockTable]) -> None:
    """A block's text is that of its path, registered blocks of a table lie on one path, and nothing dangles."""
    index = allocator.index
    carriers = index.places()
    places = dict(carriers)
    known = {block_id: run for block_id, run in enumerate(index.run_of) if run is not None}
    carried = {block_id: place.run for block_id, place in places.items()}
    _require(11, carried == known, "the prefix index and the blocks disagree on who carries which text")
    _require(11, len(carriers) == len(known), "a block carries a text twice")
    _require(11, index.num_hashed == len(known), f"{index.num_hashed} hashed blocks are counted; {len(known)} are")
    for seq_id, table in tables.items():
        last = index.root
        for block_id in table.block_ids[: table.num_registered]:
            place = places.get(block_id)
            _require(11, place is not None and place.before() == last,
                     f"block {block_id} of {seq_id!r} does not continue its prefix in the index")  # fmt: skip
            last = place if place is not None else last
        _require(11, table.num_registered * allocator.block_size <= table.num_tokens,
                 f"sequence {seq_id!r} made {table.num_registered} blocks findable before they were full")  # fmt: skip


def _check_counters(allocator: PagedState, tables: dict[SeqId, BlockTable], fills: dict[BlockId, int]) -> None:
    """The ledger's inputs, which are kept incrementally."""
    ref, run_of, block_size = allocator.pool.ref, allocator.index.run_of, allocator.block_size
    surplus = allocator.surplus_refs()
    usage = allocator.usage()
    expected = {
        "num_free_blocks": len(list(allocator.pool.free)),
        "num_free_host_blocks": len(list(allocator.host.free)),
        "num_cached_idle": sum(1 for block_id in allocator.pool.free if run_of[block_id] is not None),
        "num_logical": sum(len(table.block_ids) for table in tables.values()),
        "num_shared_partial_tails": sum(
            1 for block_id, fill in fills.items() if fill < block_size and ref[block_id] > 1
        ),
        "num_leaked_blocks": sum(1 for block_id, count in surplus.items() if count and ref[block_id] == count),
    }
    counted = {
        "num_free_blocks": allocator.num_free_blocks,
        "num_free_host_blocks": allocator.num_free_host_blocks,
        "num_cached_idle": usage.num_cached_idle,
        "num_logical": usage.num_logical,
        "num_shared_partial_tails": allocator.num_shared_partial_tails,
        "num_leaked_blocks": allocator.num_leaked_blocks,
    }
    for name, value in expected.items():
        law = 4 if name in ("num_free_blocks", "num_free_host_blocks", "num_cached_idle") else 12
        _require(law, counted[name] == value, f"{name} is counted as {counted[name]}; it is {value}")
    parts = usage.num_used + usage.num_cached_idle + usage.num_free
    _require(4, parts == usage.num_blocks, f"used + cached idle + free blocks are {parts} of {usage.num_blocks}")
