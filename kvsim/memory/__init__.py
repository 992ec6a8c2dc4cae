"""The memory library: KV-cache allocators without a clock, usable alone."""

from kvsim.memory.interface import NO_MATCH, BlockCopy, BlockMove, KVAllocator, PrefixMatch, Transfer, Usage
from kvsim.memory.paged import PagedAllocator
from kvsim.memory.prefix_cache import PrefixKeys

__all__ = [
    "NO_MATCH",
    "BlockCopy",
    "BlockMove",
    "KVAllocator",
    "PagedAllocator",
    "PrefixKeys",
    "PrefixMatch",
    "Transfer",
    "Usage",
]
