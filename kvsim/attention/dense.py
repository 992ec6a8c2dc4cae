"""Causal attention over contiguous keys and values: the definition everything paged is measured against."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def dense_attention(q: Array, k: Array, v: Array, *, sliding_window: int | None = None) -> Array:
    """Causal attention of the last `num_queries` tokens of one sequence over all its keys.

    `q` is (num_queries, num_heads, head_dim); `k` and `v` are (num_keys, num_kv_heads, head_dim) with
    num_keys >= num_queries: query `i` stands at position `num_keys - num_queries + i` and sees itself and what
    is before it, with a `sliding_window` only the last `sliding_window` of these. Query head `h` reads key head
    `h // (num_heads / num_kv_heads)` (grouped-query attention; one key head is multi-query attention).
    Inputs of 16 bits are accumulated in float32, and so is the result (num_queries, num_heads, head_dim).
    Raises ValueError where the shapes do not fit.
    """
    num_queries, num_heads, head_dim = q.shape
    num_keys = k.shape[0]
    if num_queries > num_keys:
        raise ValueError(f"{num_queries} queries but {num_keys} keys: a query is one of the sequence's own tokens")
    group = heads_per_kv_head(num_heads, k.shape[1])
    dtype = accumulation_dtype(q)
    keys = np.repeat(k.astype(dtype), group, axis=1)
    values = np.repeat(v.astype(dtype), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q.astype(dtype), keys) * dtype.type(head_dim**-0.5)
    query_positions = np.arange(num_keys - num_queries, num_keys)
    mask = is_visible(query_positions[:, None], np.arange(num_keys)[None, :], sliding_window)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    outputs: Array = np.einsum("hqk,khd->qhd", weights, values)
    return outputs


def is_visible(query_position: Array, key_position: Array, sliding_window: int | None) -> Array:
    """May the query at one position read the key at the other: causal, and inside the window."""
    causal = key_position <= query_position
    if sliding_window is None:
        return causal
    return causal & (key_position > query_position - sliding_window)


def heads_per_kv_head(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that share one key head. Raises ValueError unless they divide evenly."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly")
    return num_heads // num_kv_heads


def accumulation_dtype(q: Array) -> np.dtype[Any]:
    """float32, or the input's own type where that is wider."""
    return np.promote_types(q.dtype, np.float32)
