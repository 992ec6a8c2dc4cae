"""Every law of the memory, recomputed from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsim.memory.paged import PagedAllocator


def audit(allocator: PagedAllocator) -> None:
    """Check the memory laws. Raises LawViolation."""
