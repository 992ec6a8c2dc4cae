"""Textbook figures and exact claims about paging, value by value (docs/folklore.md names them by number)."""

from __future__ import annotations

import pytest
from support import play, request

from kvsim.memory import PagedAllocator
from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.memory.geometry import ModelGeometry
from kvsim.request import Sampling
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.reservations import reserve_max
from kvsim.scheduling.static import StaticScheduler

GIB = 2**30
KIB = 2**10


def geometry(num_hidden_layers=32, num_key_value_heads=32, head_dim=128):
    return ModelGeometry.from_config(
        {
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_key_value_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
            "torch_dtype": "float16",
        }
    )


def contiguous(engine, num_slots, max_model_len, **keywords):
    def make(allocator, **more):
        return engine(ContiguousAllocator(num_slots), reservation=reserve_max(max_model_len), **keywords, **more)

    return make


def play_contiguous(requests, engine, num_slots, max_model_len, **keywords):
    return play(
        requests, num_blocks=1, block_size=1, scheduler=contiguous(engine, num_slots, max_model_len, **keywords)
    )


def test_claims_2_and_26_three_kinds_of_waste():
    """(P, O) = (2, 4) stores 5 in the end; given 8: with 3 stored, 2 are reserved and 3 are internal waste."""
    out = play_contiguous([request("a", 2, 4)], PagedScheduler, 8, 8)
    with_three = out.steps[out.steps.token_states == 3].iloc[0]
    assert (with_three.reserved, with_three.internal_frag, with_three.external_frag) == (2, 3, 0)


def test_claim_27_nine_tokens_in_blocks_of_four():
    out = play([request("a", 9, 1)], num_blocks=10, block_size=4)
    row = out.steps.iloc[0]
    assert row.used_blocks == 3
    assert row.internal_frag + row.reserved == 3


def test_claim_30_continuous_batching_fills_the_places_of_those_that_end():
    """Two places, A needs 3 rounds, B 1, C 2: static idles twice, continuous lets C in at round 2."""
    requests = [request("A", 4, 3), request("B", 4, 1), request("C", 4, 2)]
    static = play_contiguous(requests, StaticScheduler, 64, 16, max_num_seqs=2)
    continuous = play(requests, num_blocks=64, block_size=4, max_num_seqs=2)
    assert static.steps.num_running.tolist() == [2, 1, 1, 1, 1]
    assert (static.end_ms("A"), static.end_ms("B"), static.end_ms("C")) == (3, 1, 5)
    assert continuous.steps.num_running.tolist() == [2, 2, 2]
    assert continuous["C"].first_scheduled_s == 0.001
    assert continuous.end_ms("C") == 3


def test_claim_1_bytes_of_a_token():
    llama = geometry()
    assert llama.bytes_per_token() == 512 * KIB
    assert llama.bytes_per_token() * 2048 == GIB
    assert llama.bytes_per_token() * 32 * 4096 == 64 * GIB


def test_claim_11_blocks_of_40_gib():
    assert 40 * GIB // (32 * geometry().bytes_per_token()) == 2560


def test_claim_6_a_million_entries_of_eight_bytes():
    assert 1_000_000 * 8 == 8_000_000  # 8 MB beside 1,000,000 blocks x 16 tokens x 512 KiB of KV
    assert 8_000_000 / (1_000_000 * 16 * geometry().bytes_per_token()) < 1e-6


@pytest.mark.parametrize(("tokens", "blocks"), [(2, 1), (5000, 313)])
def test_claim_10_memory_follows_the_tokens(tokens, blocks):
    allocator = PagedAllocator(400, 16)
    allocator.allocate("a", 2)
    for stored in range(3, tokens + 1):
        allocator.append_slots("a")
        assert len(allocator.block_table("a")) == -(-stored // 16)
    assert len(allocator.block_table("a")) == blocks


def test_claim_15_four_candidates_over_a_4000_token_prefix():
    """2 GB instead of 8: one copy of the prefix at 512 KiB a token."""
    out = play([request("a", 4000, 2, sampling=Sampling(n=4))], num_blocks=1100, block_size=16)
    shared = out.steps.token_states.iloc[0] * 512 * KIB
    assert shared / 1e9 == pytest.approx(2.1, abs=0.05)
    assert out.steps.used_blocks.iloc[1] == 250 + 4
    assert 4 * shared / 1e9 == pytest.approx(8.4, abs=0.05)


@pytest.mark.parametrize(("block_size", "waste"), [(64, 0.06), (32, 0.03), (16, 0.015)])
def test_claim_20_tail_waste_is_half_a_block(block_size, waste):
    """Over all lengths around 500 the mean waste is half a block: 6.4, 3.2 and 1.6 % of the tokens."""
    lengths = range(500 - 64, 500 + 64)
    wasted = [-(-length // block_size) * block_size - length for length in lengths]
    assert sum(wasted) / len(wasted) == pytest.approx((block_size - 1) / 2)
    assert sum(wasted) / sum(lengths) == pytest.approx(waste, abs=0.004)


def test_claim_9_table_updates_are_one_per_block():
    out = play([request("a", 16, 1601)], num_blocks=200, block_size=16)
    assert out.summary["block_table_updates"] == -(-1616 // 16)


def with_blocks_3_and_0(num_tokens):
    """An allocator of five blocks of four in which sequence A has table [3, 0] and block 4 is the next one free."""
    allocator = PagedAllocator(5, 4)
    allocator.allocate("first", 4)
    allocator.allocate("rest", 8)
    allocator.free("first")
    allocator.allocate("A", 4)
    allocator.allocate("hold", 4)
    allocator.append_slots("A", num_tokens - 4)
    allocator.free("hold")
    return allocator


def test_block_table_3_0_4():
    allocator = with_blocks_3_and_0(8)
    assert allocator.append_slots("A") == ()
    assert list(allocator.block_table("A")) == [3, 0, 4]
    assert tuple(allocator.slot("A", 8)) == (4, 0)


def test_claim_16_only_a_partial_tail_is_copied_at_the_first_write():
    """A and B share [3, 0] with 6 tokens: A appends and has [3, 4], B appends in place, block 3 stays shared."""
    allocator = with_blocks_3_and_0(6)
    allocator.fork("A", "B")
    assert allocator.append_slots("A") == ((0, 4, 2),)
    assert allocator.append_slots("B") == ()
    assert list(allocator.block_table("A")) == [3, 4]
    assert list(allocator.block_table("B")) == [3, 0]
    assert [allocator.ref_count(block_id) for block_id in (3, 0, 4)] == [2, 1, 1]
