"""Attention over a KV pool, block tables and lengths, written twice.

`paged_attention_loop` is the one to read: it does what a paged kernel does, block by block.
`paged_attention` computes the same for a whole batch at once and is the one to run.

Both take a pool of shape (num_blocks, block_size, num_kv_heads, head_dim), one block table per sequence, and the
number of tokens each sequence has. The queries of all sequences are packed one after another; a sequence's
`query_len` queries are its last tokens: 1 for a decode, more for a prefill chunk on top of a cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.attention.dense import Array, accumulation_dtype, heads_per_kv_head, is_visible

BlockTables = Sequence[Sequence[int]] | Array
Lengths = Sequence[int] | Array


def paged_attention_loop(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: BlockTables,
    seq_lens: Lengths,
    query_lens: Lengths | None = None,
    *,
    sliding_window: int | None = None,
) -> Array:
    """Attention through block tables, one query and one block at a time.

    Shapes: `q` (sum of `query_lens`, num_heads, head_dim); the result has the same. `query_lens` is all ones where
    it is not given. Entries of a table beyond the sequence's length, or wholly outside the window, are never
    looked at. Raises ValueError where a table is too short or the shapes do not fit.
    """
    seq_lens, query_lens = _checked_lengths(q, k_pool, block_tables, seq_lens, query_lens)
    outputs = np.zeros(q.shape, accumulation_dtype(q))
    row = 0
    for table, seq_len, query_len in zip(block_tables, seq_lens, query_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            outputs[row] = _attend(q[row], k_pool, v_pool, table, position, sliding_window)
            row += 1
    return outputs


def _attend(
    q: Array, k_pool: Array, v_pool: Array, table: Sequence[int] | Array, position: int, sliding_window: int | None
) -> Array:
    """One query (num_heads, head_dim) over the blocks it can see, with a softmax that never sees all scores at once."""
    num_heads, head_dim = q.shape
    block_size = k_pool.shape[1]
    group = heads_per_kv_head(num_heads, k_pool.shape[2])
    dtype = accumulation_dtype(q)
    query = q.astype(dtype) * dtype.type(head_dim**-0.5)
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)

    running_max = np.full(num_heads, -np.inf, dtype)
    running_sum = np.zeros(num_heads, dtype)
    accumulator = np.zeros((num_heads, head_dim), dtype)
    for block_index in range(first // block_size, position // block_size + 1):
        block_id = table[block_index]
        scores = np.full((block_size, num_heads), -np.inf, dtype)
        values = np.zeros((block_size, num_heads, head_dim), dtype)
        for slot in range(block_size):
            if not first <= block_index * block_size + slot <= position:
                continue  # The mask: before the window, or the unfilled tail of the last block.
            key = np.repeat(k_pool[block_id, slot].astype(dtype), group, axis=0)
            scores[slot] = (query * key).sum(axis=-1)
            values[slot] = np.repeat(v_pool[block_id, slot].astype(dtype), group, axis=0)

        # A higher maximum makes all earlier weights too large by the same factor.
        new_max = np.maximum(running_max, scores.max(axis=0))
        correction = np.exp(running_max - new_max)
        weights = np.exp(scores - new_max)
        running_sum = running_sum * correction + weights.sum(axis=0)
        accumulator = accumulator * correction[:, None] + (weights[:, :, None] * values).sum(axis=0)
        running_max = new_max
    return accumulator / running_sum[:, None]


def paged_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: BlockTables,
    seq_lens: Lengths,
    query_lens: Lengths | None = None,
    *,
    sliding_window: int | None = None,
) -> Array:
    """The same as `paged_attention_loop`, for the whole batch at once: gather the blocks, mask, softmax.

    Sequences are padded to the longest one, so a batch of very unequal lengths costs memory.
    """
    seq_lens, query_lens = _checked_lengths(q, k_pool, block_tables, seq_lens, query_lens)
    if not len(q):
        return np.zeros(q.shape, accumulation_dtype(q))
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[2]
    group = heads_per_kv_head(num_heads, num_kv_heads)
    rows, columns = _packed_index(query_lens)
    num_seqs, max_queries = len(seq_lens), int(query_lens.max())

    queries = _pad_queries(q, rows, columns, (num_seqs, max_queries, num_kv_heads, group, head_dim))
    query_positions = (seq_lens - query_lens)[:, None] + np.arange(max_queries)[None, :]
    key_positions = np.arange(-(-int(seq_lens.max()) // k_pool.shape[1]) * k_pool.shape[1])
    is_query: Array = np.less(np.arange(max_queries)[None, :], query_lens[:, None])
    mask = is_visible(query_positions[:, :, None], key_positions[None, None, :], sliding_window)
    mask = mask & is_query[:, :, None]

    tables = _pad_tables(block_tables, len(key_positions) // k_pool.shape[1], len(k_pool))
    is_read: Array = np.any(mask, axis=1, keepdims=True).reshape(num_seqs, -1, 1, 1)
    keys = _gather(k_pool, tables, is_read, queries.dtype)
    values = _gather(v_pool, tables, is_read, queries.dtype)
    scores = np.einsum("sqgnd,skgd->sgnqk", queries, keys, optimize=True)
    weights = _softmax(scores, mask[:, None, None])
    outputs = np.einsum("sgnqk,skgd->sqgnd", weights, values, optimize=True)
    packed: Array = outputs[rows, columns].reshape(q.shape)
    return packed


def _checked_lengths(
    q: Array, k_pool: Array, block_tables: BlockTables, seq_lens: Lengths, query_lens: Lengths | None
) -> tuple[Array, Array]:
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    query_lens = np.ones_like(seq_lens) if query_lens is None else np.asarray(query_lens, dtype=np.int64)
    if not len(block_tables) == len(seq_lens) == len(query_lens):
        raise ValueError(f"{len(block_tables)} tables, {len(seq_lens)} lengths, {len(query_lens)} query lengths")
    if query_lens.sum() != len(q):
        raise ValueError(f"query lengths sum to {query_lens.sum()}, but there are {len(q)} queries")
    for index, (table, seq_len, query_len) in enumerate(zip(block_tables, seq_lens, query_lens, strict=True)):
        if not 0 <= query_len <= seq_len:
            raise ValueError(f"sequence {index}: {query_len} queries among {seq_len} tokens")
        if len(table) * k_pool.shape[1] < seq_len:
            raise ValueError(
                f"sequence {index}: {seq_len} tokens need more than {len(table)} blocks of {k_pool.shape[1]}"
            )
    return seq_lens, query_lens


def _packed_index(query_lens: Array) -> tuple[Array, Array]:
    """Sequence and place within it of every packed query."""
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    starts = np.cumsum(query_lens) - query_lens
    return rows, np.arange(len(rows)) - starts[rows]


def _pad_queries(q: Array, rows: Array, columns: Array, shape: tuple[int, ...]) -> Array:
    dtype = accumulation_dtype(q)
    padded = np.zeros((*shape[:2], q.shape[1] * q.shape[2]), dtype)
    padded[rows, columns] = q.reshape(len(q), -1).astype(dtype) * dtype.type(q.shape[2] ** -0.5)
    return padded.reshape(shape)


def _pad_tables(block_tables: BlockTables, num_columns: int, num_blocks: int) -> Array:
    """A rectangular table; entries that do not exist point to block 0 and are masked."""
    padded = np.zeros((len(block_tables), num_columns), np.int64)
    for row, table in enumerate(block_tables):
        entries = np.asarray(table[:num_columns], dtype=np.int64)
        padded[row, : len(entries)] = np.where((entries >= 0) & (entries < num_blocks), entries, 0)
    return padded


def _gather(pool: Array, tables: Array, is_read: Array, dtype: np.dtype[Any]) -> Array:
    """Keys or values of every sequence in logical order; what nobody reads is zero, whatever the pool holds there."""
    gathered = pool[tables]
    flat = gathered.reshape(len(tables), -1, *pool.shape[2:])
    zeroed: Array = np.where(is_read, flat, 0).astype(dtype)
    return zeroed


def _softmax(scores: Array, mask: Array) -> Array:
    """Softmax over the last axis; a row that sees nothing (padding) is all zero."""
    scores = np.where(mask, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(highest), 0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    normalised: Array = weights / np.where(total == 0, 1, total)
    return normalised
