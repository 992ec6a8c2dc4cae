"""Paged attention equals dense attention for any block table; dense attention equals its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.attention import dense_attention, paged_attention, paged_attention_loop

KERNELS = [paged_attention, paged_attention_loop]


def test_one_key_gives_its_value():
    q, k, v = (np.full((1, 1, 2), x, np.float32) for x in (5.0, -3.0, 7.0))
    np.testing.assert_allclose(dense_attention(q, k, v), v)


def test_two_keys_by_hand():
    # Scores 0 and ln 3 (head_dim 1: no scaling), so the weights are 1/4 and 3/4.
    q = np.ones((1, 1, 1))
    k = np.array([0.0, np.log(3.0)]).reshape(2, 1, 1)
    v = np.array([4.0, 8.0]).reshape(2, 1, 1)
    assert dense_attention(q, k, v)[0, 0, 0] == pytest.approx(7.0)


def test_scores_are_scaled_by_the_root_of_the_head_size():
    q = np.ones((1, 1, 4))
    k = np.stack([np.zeros((1, 4)), np.full((1, 4), np.log(3.0) / 2)])
    v = np.stack([np.zeros((1, 4)), np.ones((1, 4))])
    np.testing.assert_allclose(dense_attention(q, k, v), np.full((1, 1, 4), 0.75))


def test_causal_and_window_masks():
    q = np.zeros((3, 1, 1))
    k = np.zeros((3, 1, 1))
    v = np.array([3.0, 6.0, 12.0]).reshape(3, 1, 1)
    assert dense_attention(q, k, v).ravel().tolist() == pytest.approx([3.0, 4.5, 7.0])
    assert dense_attention(q, k, v, sliding_window=2).ravel().tolist() == pytest.approx([3.0, 4.5, 9.0])
    assert dense_attention(q[-1:], k, v, sliding_window=1).ravel().tolist() == pytest.approx([12.0])


def test_grouped_heads_read_their_own_key_head():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 4, 8)), rng.normal(size=(5, 2, 8)), rng.normal(size=(5, 2, 8))
    grouped = dense_attention(q, k, v)
    for head in range(4):
        own = slice(head // 2, head // 2 + 1)
        np.testing.assert_allclose(grouped[:, [head]], dense_attention(q[:, [head]], k[:, own], v[:, own]))


def test_half_precision_is_accumulated_in_float32():
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(300, 2, 16)).astype(np.float16) for _ in range(3))
    result = dense_attention(q[-1:], k, v)
    exact = dense_attention(q[-1:].astype(np.float64), k.astype(np.float64), v.astype(np.float64))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, exact, atol=2e-6)


@st.composite
def batches(draw):
    """A pool of noise (NaN where nothing was written), shuffled tables, contiguous keys and values beside it."""
    block_size = draw(st.integers(1, 9))
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([1, 4, 8]))
    seq_lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    query_lens = [draw(st.integers(1, seq_len)) for seq_len in seq_lens]
    window = draw(st.none() | st.integers(1, 45))
    dtype = draw(st.sampled_from([np.float16, np.float32]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return _make_batch(rng, block_size, num_heads, num_kv_heads, head_dim, seq_lens, query_lens, window, dtype)


def _make_batch(rng, block_size, num_heads, num_kv_heads, head_dim, seq_lens, query_lens, window, dtype):
    needs = [-(-seq_len // block_size) for seq_len in seq_lens]
    ids = rng.permutation(sum(needs) + 3)
    shape = (len(ids), block_size, num_kv_heads, head_dim)
    pools = [np.full(shape, np.nan, dtype) for _ in range(2)]
    tables, dense, start = [], [], 0
    for seq_len, need in zip(seq_lens, needs, strict=True):
        table = ids[start : start + need]
        start += need
        kv = [rng.normal(size=(seq_len, num_kv_heads, head_dim)).astype(dtype) for _ in range(2)]
        position = np.arange(seq_len)
        for pool, values in zip(pools, kv, strict=True):
            pool[table[position // block_size], position % block_size] = values
        tables.append([*table.tolist(), 10**6, -1][: need + int(rng.integers(0, 3))])
        dense.append(kv)
    q = rng.normal(size=(sum(query_lens), num_heads, head_dim)).astype(dtype)
    return q, pools, tables, seq_lens, query_lens, window, dense


def _dense_batch(q, query_lens, dense, window):
    parts = np.split(q, np.cumsum(query_lens)[:-1])
    return np.concatenate(
        [dense_attention(part, k, v, sliding_window=window) for part, (k, v) in zip(parts, dense, strict=True)]
    )


@settings(max_examples=80, deadline=None)
@given(batches())
def test_paged_equals_dense_for_any_table(batch):
    q, (k_pool, v_pool), tables, seq_lens, query_lens, window, dense = batch
    expected = _dense_batch(q, query_lens, dense, window)
    for kernel in KERNELS:
        got = kernel(q, k_pool, v_pool, tables, seq_lens, query_lens, sliding_window=window)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_blocks_and_default_query_lengths(kernel):
    rng = np.random.default_rng(3)
    k_pool, v_pool = rng.normal(size=(2, 4, 4, 2, 8)).astype(np.float32)
    q = rng.normal(size=(2, 2, 8)).astype(np.float32)
    got = kernel(q, k_pool, v_pool, [[3, 0], [3, 1]], [6, 7])
    for row, (table, length) in enumerate([([3, 0], 6), ([3, 1], 7)]):
        k, v = (pool[table].reshape(-1, 2, 8)[:length] for pool in (k_pool, v_pool))
        np.testing.assert_allclose(got[row], dense_attention(q[[row]], k, v)[0], atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_reads_through_a_wrapped_table(kernel):
    # Window of 4 tokens over 2 blocks of 2, used in turn: tokens 2..5 are stored, 0 and 1 are overwritten.
    rng = np.random.default_rng(4)
    k, v = rng.normal(size=(2, 6, 1, 4)).astype(np.float32)
    k_pool, v_pool = (np.stack([kv[4:6], kv[2:4]]) for kv in (k, v))
    q = rng.normal(size=(1, 2, 4)).astype(np.float32)
    got = kernel(q, k_pool, v_pool, [[0, 1, 0]], [6], sliding_window=4)
    np.testing.assert_allclose(got, dense_attention(q, k, v, sliding_window=4), atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes_that_do_not_fit_are_named(kernel):
    pool = np.zeros((2, 4, 2, 8), np.float32)
    q = np.zeros((1, 2, 8), np.float32)
    with pytest.raises(ValueError, match="more than 1 blocks of 4"):
        kernel(q, pool, pool, [[0]], [5])
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        kernel(np.zeros((1, 3, 8), np.float32), pool, pool, [[0]], [3])
    with pytest.raises(ValueError, match="sum to 2"):
        kernel(q, pool, pool, [[0]], [3], [2])
