"""Property tests for KV-cache allocators, ours and yours: see docs/test-your-allocator.md.

Needs Hypothesis (`pip install hypothesis`, or kvsim with its extra `testing`).
"""

from kvsim.testing.adapter import BlockManagerAdapter
from kvsim.testing.check import check_allocator
from kvsim.testing.harness import Features, Harness
from kvsim.testing.machine import AllocatorMachine, machine_for
from kvsim.testing.model import DictModel
from kvsim.testing.shadow import ShadowMemory
from kvsim.types import LawViolation

__all__ = [
    "AllocatorMachine",
    "BlockManagerAdapter",
    "DictModel",
    "Features",
    "Harness",
    "LawViolation",
    "ShadowMemory",
    "check_allocator",
    "machine_for",
]
