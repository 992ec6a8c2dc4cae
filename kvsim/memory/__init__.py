"""The memory library: KV-cache allocators without a clock, usable alone.

>>> from kvsim.memory import PagedAllocator
>>> allocator = PagedAllocator(num_blocks=5, block_size=4)
>>> allocator.allocate("a", 6)
>>> allocator.fork("a", "b")
>>> allocator.append_slots("a")
(BlockCopy(src=1, dst=2, num_tokens=2),)
>>> allocator.block_table("a"), allocator.block_table("b")
((0, 2), (0, 1))
"""

from kvsim.memory.block_table import Slot, TableDelta, slot_of, table_delta, upload_bytes
from kvsim.memory.contiguous import ContiguousAllocator, NoHole
from kvsim.memory.interface import (
    NO_MATCH,
    BlockCopy,
    BlockMove,
    KeyChain,
    KVAllocator,
    PrefixMatch,
    RegionMove,
    Transfer,
    Usage,
)
from kvsim.memory.journal import Journal
from kvsim.memory.paged import PagedAllocator
from kvsim.memory.prefix_cache import PrefixKeys

__all__ = [
    "NO_MATCH",
    "BlockCopy",
    "BlockMove",
    "ContiguousAllocator",
    "Journal",
    "KVAllocator",
    "KeyChain",
    "NoHole",
    "PagedAllocator",
    "PrefixKeys",
    "PrefixMatch",
    "RegionMove",
    "Slot",
    "TableDelta",
    "Transfer",
    "Usage",
    "slot_of",
    "table_delta",
    "upload_bytes",
]
