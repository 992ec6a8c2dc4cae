"""From a model, a GPU and an engine's flags to blocks and concurrency: is the KV cache big enough, and if not, why.

    KV bytes = gpu_memory_utilization * total - weights - peak activations - non-torch
    blocks   = floor(KV bytes / (block_size * bytes_per_token))

The first line is vLLM's own arithmetic. Weights are counted from the configuration. Peak activations and the memory
outside PyTorch are **estimates** with the coefficients below, unless given; how far off they are is in
docs/accuracy-capacity.md.
"""

from __future__ import annotations

from kvsim.capacity.formula import capacity, kv_cache_bytes, window_gain
from kvsim.capacity.report import CapacityReport
from kvsim.capacity.terms import default_max_num_batched_tokens, default_max_num_seqs, estimate_activation_bytes

__all__ = [
    "CapacityReport",
    "capacity",
    "default_max_num_batched_tokens",
    "default_max_num_seqs",
    "estimate_activation_bytes",
    "kv_cache_bytes",
    "window_gain",
]
