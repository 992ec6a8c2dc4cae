"""Measured latencies that no GPU can have had: mostly times in another unit than their column says."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvsim.catalog import load_gpu
from kvsim.cost.measured_columns import LATENCY_UNITS
from kvsim.cost.measurements import Group
from kvsim.types import ScenarioError

_BEYOND_PEAK = 3.0
_CACHED = 10.0
"""A benchmark calls a kernel again on the same data, which then come from the caches."""
_ANY_FLOPS, _ANY_BYTES = 2e16, 1e14
"""Per second: more than any accelerator computes, or reads even from its caches."""
_SHARE_OF_PEAK = 0.01
_NO_FLOPS, _NO_BYTES = 5e11, 5e9
"""Per second: less than any GPU that serves a model reaches at its best."""
_LONG_US = 1000.0
"""A kernel that lasts so long is not bound by its launch."""


def _work(group: Group) -> tuple[np.ndarray, np.ndarray] | None:
    """Floating-point operations and bytes of each row, at least; None for operations of another kind."""
    c = group.columns
    if group.key.op == "gemm":
        m, n, k = c["tokens"], c["n"], c["k"]
        return 2.0 * m * n * k, 2.0 * (n * k + m * k + m * n)
    if group.key.op == "decode_attention":
        elements = c["batch"] * c["ctx_len"] * c["head_dim"]
        return 4.0 * elements * c["heads"], 2.0 * elements * c["kv_heads"] * c["kv_bytes"]
    if group.key.op == "prefill_attention":
        s, prefix, rows = c["seq_len"], c["prefix"], c["batch"] * c["head_dim"]
        flops = 4.0 * rows * c["heads"] * s * (prefix + s / 2)
        return flops, rows * (4.0 * s * c["heads"] + 2.0 * (s + prefix) * c["kv_heads"] * c["kv_bytes"])
    if group.key.op == "mixed_attention":
        chunk, prefix, dim = c["chunk"], c["prefix"], c["head_dim"]
        stored = c["batch"] * c["ctx_len"] + chunk + prefix
        flops = 4.0 * c["heads"] * dim * chunk * (prefix + chunk / 2)
        return flops, 2.0 * stored * c["kv_heads"] * dim * c["kv_bytes"]
    if group.key.op == "elementwise" and ":" not in group.key.kind:
        return np.zeros(len(group.latency_us)), 2.0 * c["tokens"] * c["width"]
    return None


def implausible_rows(path: str | Path, group: Group, column: str) -> list[str]:
    """A warning where rows are faster than the GPU (than any GPU, where the catalog lacks it), or all far too slow."""
    work = _work(group)
    if work is None:
        return []
    flops, moved = (1e6 * part / group.latency_us for part in work)
    try:
        gpu = load_gpu(group.gpu)
        most = _BEYOND_PEAK * gpu.peak_fp16_flops, _CACHED * gpu.memory_bandwidth
        least = _SHARE_OF_PEAK * gpu.peak_fp16_flops, _SHARE_OF_PEAK * gpu.memory_bandwidth
        known = f"the datasheet of {gpu.name} has {gpu.peak_fp16_flops / 1e12:g} and {gpu.memory_bandwidth / 1e9:g}"
    except ScenarioError:
        most, least = (_ANY_FLOPS, _ANY_BYTES), (_NO_FLOPS, _NO_BYTES)
        known = "no GPU is near that"
    beyond = np.maximum(flops / most[0], moved / most[1])
    is_slow = flops.max() < least[0] and moved.max() < least[1] and group.latency_us.max() > _LONG_US
    if beyond.max() <= 1.0 and not is_slow:
        return []
    at = int(beyond.argmax())
    shape = ", ".join(f"{name} {values[at]:g}" for name, values in group.columns.items())
    many = "all" if is_slow else f"{int((beyond > 1.0).sum())}"
    return [
        f"{path}: {many} of {len(beyond)} rows of {group.key.kind} are too {'slow' if is_slow else 'fast'} for "
        f"{column}: {group.latency_us[at]:g} us for {shape} is {flops[at] / 1e12:.3g} TFLOP/s and "
        f"{moved[at] / 1e9:.3g} GB/s, and {known}; correct the rows, or say their unit in the column's name "
        f"({', '.join(LATENCY_UNITS)})"
    ]
