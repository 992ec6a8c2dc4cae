"""Swap against recompute: the worked example K51."""

from __future__ import annotations

import pytest

from kvsim.cost.swap import (
    HostLink,
    break_even_tokens_per_s,
    recompute_ns,
    round_trip_ns,
)

K51_ROUND_TRIP_MS = {1: 30.49, 8: 12.99, 16: 11.83, 32: 11.38, 128: 10.90}  # and their 1000, 125, 63, 32, 8 blocks


def round_trip(block_size: int) -> int:
    return round_trip_ns(1000, block_size, 131072, bandwidth_gb_s=25.0, call_us=10.0)


@pytest.mark.parametrize(("block_size", "expected_ms"), K51_ROUND_TRIP_MS.items())
def test_k51_the_round_trip_falls_with_the_block_size(block_size: int, expected_ms: float) -> None:
    # at 16: 63 blocks, 2 x (63 x 10 us + 63 x 16 x 131072 B / 25 GB/s) = 1.26 + 10.57 ms
    assert round(round_trip(block_size) / 1e6, 2) == expected_ms


def test_k51_recompute_does_not_see_blocks() -> None:
    assert recompute_ns(1000, 8000.0) == 125_000_000


def test_k51_break_even_speeds() -> None:
    assert round(break_even_tokens_per_s(1000, round_trip(16)) / 1e3, 1) == 84.5
    assert round(break_even_tokens_per_s(1000, round_trip(1)) / 1e3, 1) == 32.8


def test_one_direction_is_calls_plus_bytes() -> None:
    # 10 blocks of 2 MiB: 10 x 10 us + 20,971,520 B / 25 GB/s = 100 us + 838.86 us
    assert round(HostLink(25.0, 10.0).swap_ns(10, 2 * 1024 * 1024)) == 938_861


def test_copies_per_block_multiply_the_calls_only() -> None:
    one, many = HostLink(25.0, 2.0, 1), HostLink(25.0, 2.0, 64)
    assert many.swap_ns(3, 1000) - one.swap_ns(3, 1000) == pytest.approx(3 * 63 * 2000)
