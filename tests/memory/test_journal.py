"""The journal: what is written for each block, and what can be read from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvsim.memory import PagedAllocator, PrefixKeys
from kvsim.memory.journal import (
    COLUMNS,
    Event,
    Journal,
    block_times,
    double_decrements,
    histogram,
    life_of,
    never_returned,
    read_csv,
)
from kvsim.tokens import TokenStream
from kvsim.types import NS_PER_S, KvsimError


def short(journal: Journal) -> list[tuple[str, int, str, int, int | None]]:
    return [event[1:] for event in journal.events()]


def observed(num_blocks: int = 6, **options: object) -> tuple[PagedAllocator, Journal]:
    journal = Journal()
    return PagedAllocator(num_blocks, 4, journal=journal, **options), journal  # type: ignore[arg-type]


def test_copy_on_write_in_full() -> None:
    allocator, journal = observed()
    allocator.allocate("p", 6)
    allocator.fork("p", "c")
    journal.now_ns = 5
    allocator.append_slots("p")
    allocator.free("c")
    assert short(journal) == [
        ("taken", 0, "p", 1, None),
        ("taken", 1, "p", 1, None),
        ("ref_inc", 0, "c", 2, None),
        ("ref_inc", 1, "c", 2, None),
        ("taken", 2, "p", 1, None),
        ("copied", 1, "p", 2, 2),
        ("ref_dec", 1, "p", 1, None),
        ("ref_dec", 1, "c", 0, None),
        ("ref_dec", 0, "c", 1, None),
        ("freed", 1, "c", 0, None),
    ]
    assert [event.t_ns for event in journal.events()] == [0] * 4 + [5] * 6
    assert [event.event for event in life_of(journal.events(), 2)] == ["taken", "copied"]


def test_cache_events() -> None:
    allocator, journal = observed(2, enable_prefix_caching=True)
    text = PrefixKeys(TokenStream.from_segment(1, 8), None, 4)
    allocator.allocate("a", 5, keys=text)
    allocator.register("a", 5)
    allocator.free("a")
    allocator.allocate("b", 5, keys=text, prefix=allocator.match_prefix(text, 5))
    allocator.free("b")
    allocator.allocate("c", 8)
    events = [event[:2] for event in short(journal)]
    assert events == [
        ("taken", 0), ("taken", 1), ("cached", 0), ("ref_dec", 1), ("ref_dec", 0), ("freed", 1), ("freed", 0),
        ("hit", 0), ("taken", 1), ("ref_dec", 1), ("ref_dec", 0), ("freed", 1), ("freed", 0),
        ("taken", 1), ("evicted", 0), ("taken", 0),
    ]  # fmt: skip


def test_who_grows_and_fills_with_others_is_named() -> None:
    allocator, journal = observed(enable_prefix_caching=True)
    for name, source in (("a", 1), ("b", 2)):
        allocator.allocate(name, 4, keys=PrefixKeys(TokenStream.from_segment(source, 12), None, 4))
    num_before = len(journal)
    allocator.grow_each(["a", "b"])
    allocator.fill_each(["a", "b"])
    assert [event[:3] for event in short(journal)[num_before:]] == [
        ("taken", 2, "a"), ("taken", 3, "b"),
        ("cached", 0, "a"), ("cached", 2, "a"), ("cached", 1, "b"), ("cached", 3, "b"),
    ]  # fmt: skip
    allocator.free("a")
    assert double_decrements(journal.events()) == []


def test_swaps_name_the_host_block() -> None:
    allocator, journal = observed(4, num_host_blocks=4)
    allocator.allocate("a", 6, sharers=("b",))
    allocator.swap_out(["a", "b"])
    allocator.swap_in(["a", "b"])
    assert ("swapped_out", 1, "b", 0, 1) in short(journal)
    assert ("swapped_in", 2, "b", 2, 0) in short(journal)
    assert double_decrements(journal.events()) == []
    assert [(held.block_id, held.ref_count, held.holders) for held in never_returned(journal.events())] == [
        (2, 2, ("a", "b")),
        (3, 2, ("a", "b")),
    ]


def test_a_swap_of_several_names_each() -> None:
    allocator, journal = observed(4, num_host_blocks=4)
    allocator.allocate("a", 4)
    allocator.allocate("b", 4)
    allocator.swap_out(["a", "b"])
    allocator.swap_in(["b", "a"])
    swaps = [event[:3] for event in short(journal) if event[0].startswith("swapped")]
    assert swaps == [
        ("swapped_out", 0, "a"), ("swapped_out", 1, "b"), ("swapped_in", 2, "b"), ("swapped_in", 3, "a")
    ]  # fmt: skip


def test_never_returned_and_double_decrement() -> None:
    events = [
        Event(0, "taken", 7, "a", 1),
        Event(1, "ref_inc", 7, "b", 2),
        Event(2, "taken", 8, "a", 1),
        Event(3, "ref_dec", 7, "b", 1),
        Event(4, "ref_dec", 7, "b", 0),
        Event(4, "freed", 7, "b", 0),
    ]
    assert [(held.block_id, held.taken_by, held.taken_ns) for held in never_returned(events)] == [(8, "a", 2)]
    assert [tuple(found) for found in double_decrements(events)] == [(4, 7, "b", 0)]


def test_times_of_a_cached_and_of_a_plain_block() -> None:
    second = NS_PER_S
    events = [
        Event(0, "taken", 0, "a", 1),
        Event(second, "cached", 0, "a", 1),
        Event(2 * second, "ref_dec", 0, "a", 0),
        Event(2 * second, "freed", 0, "a", 0),
        Event(5 * second, "hit", 0, "b", 1),
        Event(6 * second, "freed", 0, "b", 0),
        Event(9 * second, "evicted", 0, "c", 0),
        Event(9 * second, "taken", 0, "c", 1),
        Event(10 * second, "freed", 0, "c", 0),
    ]
    times = block_times(events)
    assert times.lifetime_s == (9.0, 1.0)
    assert times.idle_before_evict_s == (3.0,)
    assert times.reuse_gap_s == (5.0,)


def test_a_text_that_was_taken_back_keeps_no_block_alive() -> None:
    allocator, journal = observed(1, enable_prefix_caching=True)
    allocator.allocate("a", 4, keys=PrefixKeys(TokenStream.from_segment(1, 4), None, 4))
    allocator.register("a", 4)
    allocator.unregister("a", 0)
    journal.now_ns = 1 * NS_PER_S
    allocator.free("a")
    journal.now_ns = 3 * NS_PER_S
    allocator.allocate("b", 4)
    journal.now_ns = 5 * NS_PER_S
    allocator.free("b")
    assert block_times(journal.events()).lifetime_s == (1.0, 2.0)


def test_histogram_bins_are_1_2_5() -> None:
    assert histogram([]) == []
    assert [tuple(bin_) for bin_ in histogram([0.0015, 0.002, 0.02])] == [
        (0.002, 2), (0.005, 0), (0.01, 0), (0.02, 1),
    ]  # fmt: skip
    assert histogram([1e9])[0].upto_s == float("inf")


def test_csv_there_and_back(tmp_path: Path) -> None:
    allocator, journal = observed()
    journal.now_ns = 1_500_000_001
    allocator.allocate("p", 6)
    allocator.fork("p", "c")
    allocator.append_slots("p")
    path = tmp_path / "events.csv"
    journal.write_csv(path)
    assert path.read_text().splitlines()[:2] == [",".join(COLUMNS), "1.500000001,taken,0,p,1,"]
    assert read_csv(path) == journal.events()
    journal.write_csv(path, names := {"p": "日,本\r", "c": 'a\n"b"'})
    assert {event.request_id for event in read_csv(path)} == set(names.values())


def test_broken_csv_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("t_s,event,block_id,request_id,ref_count\n")
    with pytest.raises(KvsimError, match="other_block_id"):
        read_csv(path)
    path.write_text(",".join(COLUMNS) + "\n1.0,taken,zero,a,1,\n")
    with pytest.raises(KvsimError, match=r"events\.csv:2"):
        read_csv(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1.0,tkaen,0,a,1,", "event 'tkaen' is not known (did you mean 'taken'?); known: taken, ref_inc"),
        ("1.0,,0,a,1,", "event '' is not known; known: taken"),
        ("1.0", "event None is not known"),
        ("x,taken,0,a,1,", "t_s is 'x'; it must be a number of seconds"),
        ("inf,taken,0,a,1,", "t_s is 'inf'; it must be a number of seconds"),
        ("1.0,taken,0,a,1.5,", "ref_count is '1.5'; it must be a whole number"),
        ("1.0,copied,0,a,1,x", "other_block_id is 'x'; it must be a whole number"),
    ],
)
def test_a_bad_cell_of_the_csv_is_named(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "events.csv"
    path.write_text("\ufeff" + ",".join(COLUMNS) + f"\n1.0,taken,0,a,1,\n\n{row}\n")
    with pytest.raises(KvsimError, match=re.escape(f"events.csv:4: {said}")):
        read_csv(path)


def test_an_observed_allocator_does_the_same() -> None:
    allocator, _ = observed(4)
    plain = PagedAllocator(4, 4)
    for each in (allocator, plain):
        each.allocate(seq_id=0, num_tokens=6)
        each.fork(parent_id=0, child_id=1)
        each.append_slots(1)
        each.free(0)
    assert allocator.free_block_ids() == plain.free_block_ids()
    assert allocator.block_table(1) == plain.block_table(1)
