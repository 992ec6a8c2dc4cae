"""Closed forms of kernel time: launch overhead plus a smooth maximum of what could bind.

Each form takes parameters and columns (NumPy arrays or numbers, broadcast together) and returns microseconds.
Bandwidths are in GB/s, rates in TFLOP/s. The fit tries a form's `tiles` one by one; the other parameters are positive
and fitted in the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Columns: TypeAlias = Mapping[str, Any]
Params: TypeAlias = Mapping[str, float]

_US_PER_BYTE_AT_1_GBPS = 1e-3
_FEW_LOOK_UPS = 16
_US_PER_FLOP_AT_1_TFLOPS = 1e-6


def smooth_max(sharpness: float, *terms: Any) -> Any:
    """(x^p + y^p + ...)^(1/p) with p = 1 + sharpness: the sum at p = 1, the maximum as p grows."""
    power = 1.0 + sharpness
    largest = maximum(1e-12, *terms)
    return largest * sum((term / largest) ** power for term in terms) ** (1.0 / power)


def maximum(*values: Any) -> Any:
    """The largest, of numbers (fast: the simulation asks for one step at a time) or of arrays."""
    if any(isinstance(value, np.ndarray) for value in values):
        return np.maximum.reduce(np.broadcast_arrays(*values))
    return max(values)


def minimum(left: Any, right: Any) -> Any:
    """The smaller of two, of numbers or of arrays."""
    is_array = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return np.minimum(left, right) if is_array else min(left, right)


def _tiles(count: Any, tile: float) -> Any:
    if isinstance(count, np.ndarray):
        return np.ceil(np.maximum(count, 1) / tile)
    return math.ceil(max(count, 1) / tile)


def _kv_tiles(length: Any, tile: float, is_ragged: bool) -> Any:
    """Tiles that one sequence's KV takes.

    For a mean over different lengths: the straight line through the lengths that were measured (powers of two, and the
    token itself, so always just beyond a whole tile). The last tiles are half full only on average, but cores wait for
    the longest sequence, and a recorded run agrees better with the line than with half a tile.
    """
    if not is_ragged:
        return _tiles(length, tile)
    whole = (length - 1) / tile
    return maximum(1.0, whole + minimum(whole, 1.0))


def gemm_us(p: Params, c: Columns) -> Any:
    """`tokens` x `k` times `k` x `n`, two bytes an element: weights are read, or tensor cores bind."""
    m, n, k = c["tokens"], c["n"], c["k"]
    compute = 2.0 * m * n * k / p["tflops"] * _US_PER_FLOP_AT_1_TFLOPS
    memory = 2.0 * (n * k + m * k + m * n) / p["gbps"] * _US_PER_BYTE_AT_1_GBPS
    return p["launch_us"] + smooth_max(p["sharpness"], compute, memory)


def decode_attention_us(p: Params, c: Columns) -> Any:
    """One query token per sequence: KV bytes, the number of KV tiles, or the length of one sequence binds.

    `ragged` (optional) says that `ctx_len` is a mean over sequences of different lengths, as no benchmark has it.
    Whole layers (parameter `alone_gbps`) also see the kernels around the attention kernel.
    """
    b, ctx, kv = c["batch"], c["ctx_len"], c["kv_heads"]
    kv_bytes = 2.0 * b * ctx * kv * c["head_dim"] * c["kv_bytes"]
    tiles = b * kv * _kv_tiles(ctx + 1, p["tile_n"], c.get("ragged", False)) * p["tile_us"]
    rows = b * c["heads"] * p["row_us"]
    serial = np.sqrt(ctx) * p["serial_us"]
    # Without grouped queries the kernel may not split a sequence over the cores, and walks it.
    walk = np.where(np.asarray(c["heads"]) == kv, ctx * p["walk_us"], 0.0)
    launch: Any = p["launch_us"]
    if "alone_gbps" in p:
        # A single sequence saves a launch, and its KV comes from the L2 cache even where a batch of as many bytes
        # does not; more than one tile is split over the cores, and a second kernel adds the parts up.
        is_alone = np.asarray(b) <= 1
        memory = kv_bytes / np.where(is_alone, p["alone_gbps"], p["gbps"]) * _US_PER_BYTE_AT_1_GBPS
        launch = launch + np.where(is_alone, 0.0, p["batch_us"]) + np.where(ctx >= p["tile_n"], p["combine_us"], 0.0)
    else:
        # Benchmarks call the kernel again on the same KV: what fits the L2 cache comes from there.
        cached = 1.0 / (1.0 + (kv_bytes / (p["l2_mb"] * 1e6)) ** 4)
        memory = kv_bytes * (cached / p["l2_gbps"] + (1.0 - cached) / p["gbps"]) * _US_PER_BYTE_AT_1_GBPS
    return launch + smooth_max(p["sharpness"], memory, tiles, rows, serial, walk)


def prefill_attention_us(p: Params, c: Columns) -> Any:
    """`batch` chunks of `seq_len` tokens, each on top of `prefix` cached ones, causal."""
    b, s, prefix, heads, dim = c["batch"], c["seq_len"], c["prefix"], c["heads"], c["head_dim"]
    rows = _tiles(s, p["tile_m"]) * p["tile_m"]
    keys = _tiles(s + prefix, p["tile_n"]) * p["tile_n"]
    compute = 4.0 * b * heads * dim * rows * (prefix + (s + p["tile_n"]) / 2) / p["tflops"] * _US_PER_FLOP_AT_1_TFLOPS
    moved = 4.0 * b * s * heads * dim + 2.0 * b * (s + prefix) * c["kv_heads"] * dim * c["kv_bytes"]
    memory = moved / p["gbps"] * _US_PER_BYTE_AT_1_GBPS
    serial = keys * p["serial_us"]
    return p["launch_us"] + smooth_max(p["sharpness"], compute, memory, serial)


def mixed_attention_us(p: Params, c: Columns) -> Any:
    """`batch` decodes of `ctx_len` tokens and `chunk` prompt tokens in the same call of the unsplit kernel.

    A decode occupies a whole query tile there, and the longest sequence is walked serially. The prompt tokens belong
    to `num_chunks` equal chunks (one, in the measurements).
    """
    chunks = c.get("num_chunks", 1.0)
    b, ctx, s, prefix = c["batch"], c["ctx_len"], c["chunk"] / chunks, c["prefix"]
    heads, dim, kv = c["heads"], c["head_dim"], c["kv_heads"]
    rows = chunks * _tiles(s, p["tile_m"]) * p["tile_m"]
    compute = 4.0 * heads * dim * rows * (prefix + (s + p["tile_n"]) / 2) / p["tflops"] * _US_PER_FLOP_AT_1_TFLOPS
    decode_tiles = b * heads * _kv_tiles(ctx + 1, p["tile_n"], c.get("ragged", False)) * p["tile_us"]
    moved = 2.0 * (b * ctx + chunks * (s + prefix)) * kv * dim * c["kv_bytes"]
    memory = moved / p["gbps"] * _US_PER_BYTE_AT_1_GBPS
    serial = _tiles(maximum(s + prefix, ctx), p["tile_n"]) * p["tile_n"] * p["serial_us"]
    return p["launch_us"] + smooth_max(p["sharpness"], compute + decode_tiles, memory, serial)


def all_reduce_us(p: Params, c: Columns) -> Any:
    """Custom kernels for small messages (one-shot, then two-shot), a ring of NCCL's beyond a limit.

    One-shot: every GPU reads all of every other. The limits are those in vLLM's source: one-shot below 512 KiB on four
    GPUs and 256 KiB on eight, custom kernels below `switch_bytes` (8 MiB). With `per_gpu_limits` (Hopper) they reach
    further, 64 MiB on two GPUs and 32 MiB on four; on eight, from 256 KiB to 32 MiB, the switch adds up (multimem).
    """
    gpus, size = np.asarray(c["num_gpus"], dtype=float), np.asarray(c["bytes"], dtype=float)
    link = 2.0 * (gpus - 1) / gpus * size * _US_PER_BYTE_AT_1_GBPS
    one_shot = p["hop_us"] * (gpus - 1) + (gpus - 1) * size * _US_PER_BYTE_AT_1_GBPS / p["gbps"]
    two_shot = p["two_shot_us"] + p["hop_us"] * (gpus - 1) + link / p["gbps"]
    is_one_shot = (gpus <= 2) | (size < np.where(gpus <= 4, 2.0**19, 2.0**18))
    small = p["launch_us"] + smooth_max(p["sharpness"], np.where(is_one_shot, one_shot, two_shot), p["floor_us"])
    large = p["ring_launch_us"] + p["ring_hop_us"] * (gpus - 1) + link / p["ring_gbps"]
    if not p.get("per_gpu_limits"):
        return np.where(size < p["switch_bytes"], small, large)
    multimem = smooth_max(p["sharpness"], size / p["multimem_gbps"] * _US_PER_BYTE_AT_1_GBPS, p["multimem_us"])
    small = np.where((gpus > 4) & (size >= 2.0**18), p["launch_us"] + multimem, small)
    return np.where(size <= np.where(gpus <= 2, 2.0**26, 2.0**25), small, large)


def elementwise_us(p: Params, c: Columns) -> Any:
    """`tokens` rows of `width` elements move through memory once.

    Look-ups (parameter `look_up_us`) of at most 16 rows take a kernel of PyTorch's that goes from one to the next.
    """
    memory = 2.0 * c["tokens"] * c["width"] / p["gbps"] * _US_PER_BYTE_AT_1_GBPS
    many = p["launch_us"] + smooth_max(p["sharpness"], memory, c["tokens"] * p["row_us"])
    if "look_up_us" not in p:
        return many
    tokens = np.asarray(c["tokens"])
    few = p["few_us"] + tokens * p["look_up_us"]
    return np.where(tokens <= _FEW_LOOK_UPS, few, many)


@dataclass(frozen=True)
class Form:
    """One operation: its formula, where the fit starts, and the columns its correction is a function of."""

    formula: Callable[[Params, Columns], Any]
    start: Params
    features: tuple[str, ...]
    tiles: Mapping[str, tuple[float, ...]]
    layer_starts: Mapping[str, Params] = field(default_factory=dict)
    """By kind of operation: where the fit of whole-layer measurements of the engine itself starts, if they have
    parameters of their own. What another framework measured keeps the plain form."""
    only_with: Mapping[str, str] = field(default_factory=dict)
    """Parameters that count only where a choice among the `tiles` is not zero, and the name of that choice."""


_TILE = (32.0, 64.0, 128.0, 256.0)

FORMS: Mapping[str, Form] = {
    "gemm": Form(gemm_us, {"launch_us": 5, "tflops": 200, "gbps": 1500, "sharpness": 2}, ("tokens", "n", "k"), {}),
    "decode_attention": Form(
        decode_attention_us,
        {
            "launch_us": 8,
            "gbps": 1500,
            "tile_us": 0.02,
            "row_us": 0.002,
            "serial_us": 0.05,
            "walk_us": 0.005,
            "l2_mb": 50,
            "l2_gbps": 2500,
            "sharpness": 2,
        },
        ("batch", "ctx_len", "heads", "kv_heads", "kv_bytes"),
        {"tile_n": _TILE},
        {
            "decode_attention": {
                "launch_us": 8,
                "gbps": 1500,
                "tile_us": 0.02,
                "row_us": 0.002,
                "serial_us": 0.05,
                "walk_us": 0.005,
                "combine_us": 3,
                "batch_us": 3,
                "alone_gbps": 1500,
                "sharpness": 2,
            }
        },
    ),
    "prefill_attention": Form(
        prefill_attention_us,
        {"launch_us": 8, "tflops": 200, "gbps": 1500, "serial_us": 0.02, "sharpness": 2},
        ("batch", "seq_len", "prefix", "heads", "kv_heads", "kv_bytes"),
        {"tile_m": (64.0, 128.0, 256.0), "tile_n": _TILE},
    ),
    "mixed_attention": Form(
        mixed_attention_us,
        {"launch_us": 8, "tflops": 100, "gbps": 1500, "tile_us": 0.02, "serial_us": 0.03, "sharpness": 2},
        ("batch", "ctx_len", "chunk", "prefix", "heads", "kv_heads", "kv_bytes"),
        {"tile_m": (64.0, 128.0, 256.0), "tile_n": _TILE},
    ),
    "all_reduce": Form(
        all_reduce_us,
        {
            "launch_us": 4,
            "gbps": 200,
            "hop_us": 0.2,
            "two_shot_us": 3,
            "floor_us": 0.5,
            "sharpness": 2,
            "ring_launch_us": 20,
            "ring_gbps": 200,
            "ring_hop_us": 1,
            "multimem_us": 6,
            "multimem_gbps": 200,
        },
        ("bytes", "num_gpus"),
        {"switch_bytes": tuple(float(2**i) for i in range(19, 26)), "per_gpu_limits": (0.0, 1.0)},
        only_with={"multimem_us": "per_gpu_limits", "multimem_gbps": "per_gpu_limits"},
    ),
    "elementwise": Form(
        elementwise_us,
        {"launch_us": 2, "gbps": 1000, "row_us": 0.001, "sharpness": 2},
        ("tokens", "width"),
        {},
        {
            "embedding": {
                "launch_us": 2,
                "gbps": 1000,
                "row_us": 0.001,
                "sharpness": 2,
                "few_us": 2,
                "look_up_us": 0.2,
            }
        },
    ),
}
