"""Answers from a journal that begins in the middle, or in which one request holds a block twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsim.memory.journal import Event, Held, block_times, never_returned, read_csv
from kvsim.types import NS_PER_S, KvsimError


def events(*rows: tuple[int, str, int, str, int]) -> list[Event]:
    return [Event(time * NS_PER_S, event, block, request, count, None) for time, event, block, request, count in rows]


def test_who_holds_a_block_twice_still_holds_it_after_one_drop() -> None:
    held = never_returned(events((1, "taken", 0, "a", 1), (2, "ref_inc", 0, "a", 2), (3, "ref_dec", 0, "a", 1)))
    assert held == [Held(0, 1, NS_PER_S, "a", ("a",))]


def test_a_block_that_was_taken_before_the_journal_began_has_no_life() -> None:
    rows = events((1, "cached", 7, "a", 1), (2, "hit", 7, "b", 2), (3, "evicted", 7, "c", 0), (3, "freed", 7, "c", 0))
    times = block_times(rows)
    assert [len(spans) for spans in (times.lifetime_s, times.idle_before_evict_s, times.reuse_gap_s)] == [0, 0, 0]


def test_gaps_between_hits() -> None:
    rows = events((1, "taken", 0, "a", 1), (1, "cached", 0, "a", 1), (4, "hit", 0, "b", 1), (9, "hit", 0, "c", 1))
    assert list(block_times(rows).reuse_gap_s) == [3, 5]


@pytest.mark.parametrize(("header", "found"), [("a,b", "found a, b"), ("", "found nothing")])
def test_a_table_of_something_else_is_named(tmp_path: Path, header: str, found: str) -> None:
    (tmp_path / "events.csv").write_text(header + "\n")
    with pytest.raises(KvsimError, match=rf"columns t_s, .* are missing; {found}"):
        read_csv(tmp_path / "events.csv")
