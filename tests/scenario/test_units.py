"""Sizes and times as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.scenario.units import format_bytes, format_ns, parse_bytes, parse_ns, parse_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * 2**30),
        ("4GB", 4_000_000_000),
        ("4 gb", 4_000_000_000),
        ("1.5KiB", 1536),
        ("1_000B", 1000),
        (7, 7),
        ("7", 7),
        (1e3, 1000),
        ("0.1KB", 100),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2s", 2 * 10**9),
        ("100ms", 10**8),
        ("1us", 1000),
        ("1µs", 1000),
        ("3ns", 3),
        (0.1, 10**8),
        (10, 10**10),
        ("1min", 60 * 10**9),
        ("1h", 3600 * 10**9),
        ("1e-3", 10**6),
    ],
)
def test_times(text: object, ns: int) -> None:
    assert parse_ns(text) == ns


def test_seconds_are_exact_decimals() -> None:
    assert parse_seconds("100ms") == 0.1


@pytest.mark.parametrize("text", ["", "GiB", "1 2", "0x10", "--1", "1e", True, None, [1], float("nan"), "1e99"])
def test_nonsense_says_how_sizes_are_written(text: object) -> None:
    with pytest.raises(ValueError, match="40GiB"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_sizes_are_written_as_they_are_read(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(1, 10**18))
def test_times_are_written_as_they_are_read(ns: int) -> None:
    assert parse_ns(format_ns(ns)) == ns
