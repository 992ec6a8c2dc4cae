"""How the recorder of the paper's engine made its block manager and wrote down the state of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvsim.memory import PagedAllocator
from kvsim.types import SeqId


def allocator_keywords(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `PagedAllocator` that a case's `cfg` asks for."""
    return {
        "num_blocks": cfg["gpu"],
        "block_size": cfg["bs"],
        "num_host_blocks": cfg["cpu"],
        "free_list": "lifo",
        "sliding_window": cfg.get("sw") or None,
        "upstream_faults": True,
    }


def signed_table(allocator: PagedAllocator, seq_id: SeqId) -> list[int]:
    """The sequence's block table, a host block b written as -(b + 1)."""
    table = allocator.block_table(seq_id)
    return [-block_id - 1 for block_id in table] if allocator.is_swapped(seq_id) else list(table)


def held(ref_counts: list[int]) -> list[list[int]]:
    """Pairs [block_id, ref_count] of the blocks that are in use."""
    return [[block_id, ref_count] for block_id, ref_count in enumerate(ref_counts) if ref_count > 0]


def state_hash(allocator: PagedAllocator, tables: Mapping[int, list[int]]) -> str:
    """First 8 hex digits of the sha1 of free lists, tables by label and reference counts."""
    state = [
        list(allocator.free_block_ids()),
        list(allocator.free_host_block_ids()),
        [[label, table] for label, table in tables.items()],
        held(allocator.ref_counts()),
        held(allocator.host_ref_counts()),
    ]
    return hashlib.sha1(json.dumps(state, separators=(",", ":")).encode()).hexdigest()[:8]
