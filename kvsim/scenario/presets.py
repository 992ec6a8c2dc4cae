"""What `engine: NAME` stands for: defaults that the scenario's own `allocator:` and `scheduler:` blocks override."""

from __future__ import annotations

from typing import Any

_VLLM_V1: dict[str, dict[str, Any]] = {
    "allocator": {
        "type": "paged",
        "free_list": "lru",
        "enable_prefix_caching": True,
        "null_block": True,
        "watermark": 0.0,
    },
    "scheduler": {"max_num_batched_tokens": 8192},
}


def _orca(reservation: str) -> dict[str, Any]:
    return {
        "allocator": {"type": "contiguous", "placement": "buddy"},
        "scheduler": {"type": "continuous", "reservation": reservation},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "paged": {"allocator": {"type": "paged"}, "scheduler": {"type": "continuous"}},
    "vllm-v0": {"allocator": {"type": "paged", "free_list": "lifo"}, "scheduler": {"type": "vllm-v0"}},
    "vllm-v1": {"allocator": _VLLM_V1["allocator"], "scheduler": {"type": "vllm-v1", **_VLLM_V1["scheduler"]}},
    "vllm-v1-async": {
        "allocator": _VLLM_V1["allocator"],
        "scheduler": {"type": "vllm-v1-async", **_VLLM_V1["scheduler"]},
    },
    "orca-max": _orca("max"),
    "orca-pow2": _orca("pow2"),
    "orca-oracle": _orca("oracle"),
    "static": {"allocator": {"type": "contiguous", "placement": "buddy"}, "scheduler": {"type": "static"}},
    "no-evict": {"allocator": {"type": "paged", "watermark": 0.0}, "scheduler": {"type": "no-evict"}},
}

COMPARED = ("paged", "orca-max", "orca-pow2", "orca-oracle", "static")
"""The engines that `kvsim compare` and `kvsim.compare` run unless told otherwise."""
