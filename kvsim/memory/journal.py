"""A journal of what happened to every GPU block, and what can be read from it afterwards.

The library has no clock: whoever drives the allocator sets `Journal.now_ns` before a command, and may say to which
request a sequence belongs. An allocator without a journal does not know that there is such a thing.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.files import csv_cell
from kvsim.memory.block_pool import BlockPool
from kvsim.types import NS_PER_S, BlockId, KvsimError, Ns, SeqId

COLUMNS = ("t_s", "event", "block_id", "request_id", "ref_count", "other_block_id")

EVENTS = (
    "taken", "ref_inc", "ref_dec", "copied", "cached", "hit", "evicted", "swapped_out", "swapped_in", "freed",
)  # fmt: skip
"""`hit` is a reference through the prefix cache. `other_block_id` is the copy, or the host block of a swap."""

_SERVING = (
    ("allocate", 0, "seq_id"),
    ("append_slots", 0, "seq_id"),
    ("register", 0, "seq_id"),
    ("free", 0, "seq_id"),
    ("fork", 1, "child_id"),
)
"""Commands, and which of their arguments is the sequence that they serve."""

_GAINS = frozenset({"taken", "ref_inc", "hit"})


class Event(NamedTuple):
    """One thing that happened to one block; `ref_count` is the count after it."""

    t_ns: Ns
    event: str
    block_id: BlockId
    request_id: str
    ref_count: int
    other_block_id: BlockId | None = None


class Journal:
    """Collects events in memory. `request_of` names the request of a sequence; by default its own id."""

    def __init__(self, request_of: Callable[[SeqId], str] = str) -> None:
        self.now_ns: Ns = 0
        """The instant that the next events are tagged with."""
        self.request_of = request_of
        self.request_id = ""
        self._rows: list[tuple[Ns, str, BlockId, str, int, BlockId | None]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def events(self) -> list[Event]:
        return [Event(*row) for row in self._rows]

    def record(self, event: str, block_id: BlockId, ref_count: int, other_block_id: BlockId | None = None) -> None:
        self._rows.append((self.now_ns, event, block_id, self.request_id, ref_count, other_block_id))

    def name(self, seq_id: SeqId) -> None:
        """Events from here on are this sequence's doing."""
        self.request_id = self.request_of(seq_id)

    def naming(self, command: Callable[..., Any], place: int, keyword: str) -> Callable[..., Any]:
        """The command, saying first on whose behalf it acts: its argument number `place`, called `keyword`."""
        # As a wrapper of the command, so that nobody takes it for another one (see `stands_for`).
        return update_wrapper(partial(self._do_named, command, place, keyword), command)

    def _do_named(self, command: Callable[..., Any], place: int, keyword: str, /, *args: Any, **kwargs: Any) -> Any:
        self.name(args[place] if len(args) > place else kwargs[keyword])
        return command(*args, **kwargs)

    def write_csv(self, path: Path, names: Mapping[str, str] | None = None) -> None:
        """Write `events.csv`: one row per event, in order; `names` turns sequences into requests."""
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(",".join(COLUMNS) + "\n")
            for t_s, event, block_id, owner, ref_count, other in self.rows(names or {}):
                file.write(f"{t_s},{event},{block_id},{csv_cell(owner)},{ref_count},{other}\n")

    def rows(self, names: Mapping[str, str]) -> Iterator[tuple[str, str, int, str, int, int | str]]:
        """Events under `COLUMNS`; times in seconds."""
        for t_ns, event, block_id, owner, ref_count, other in self._rows:
            request_id = names.get(owner, owner)
            yield f"{t_ns / NS_PER_S:.9f}", event, block_id, request_id, ref_count, "" if other is None else other


def observe(allocator: Any, journal: Journal) -> None:
    """Tell the journal whom a paged allocator serves and which block it hands out; unobserved it pays nothing."""
    for name, place, keyword in _SERVING:
        setattr(allocator, name, journal.naming(getattr(allocator, name), place, keyword))
    pop = partial(_pop_and_record, allocator.pool.pop, journal)
    allocator.pool.pop, allocator.pool.pop_many = pop, partial(_pop_many, pop)


def _pop_and_record(pop: Callable[[], BlockId], journal: Journal) -> BlockId:
    block_id = pop()
    journal.record("taken", block_id, 1)
    return block_id


def _pop_many(pop: Callable[[], BlockId], count: int) -> list[BlockId]:
    return [pop() for _ in range(count)]


class JournaledPool(BlockPool):
    """A block pool that tells a journal about every change of a reference count."""

    def __init__(self, journal: Journal, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._journal = journal

    def share(self, block_id: BlockId, count: int = 1) -> None:
        before = self.ref[block_id]
        super().share(block_id, count)
        for added in range(1, count + 1):
            self._journal.record("ref_inc", block_id, before + added)

    def hit_all(self, block_ids: Sequence[BlockId]) -> int:
        num_revived = 0
        for block_id in block_ids:
            num_revived += super().hit_all((block_id,))
            self._journal.record("hit", block_id, self.ref[block_id])
        return num_revived

    def release(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        for block_id in reversed(block_ids) if self.free.is_tail_first else block_ids:
            self._journal.record("ref_dec", block_id, self.ref[block_id] - 1)
        freed = super().release(block_ids)
        for block_id in freed:
            self._journal.record("freed", block_id, 0)
        return freed


def read_csv(path: Path) -> list[Event]:
    """Read an `events.csv`. Raises KvsimError naming the file, the line and what is wrong."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _parse_all(csv.DictReader(file), path)
    except OSError as error:
        raise KvsimError(
            f"{path}: cannot be read ({error.strerror}); give the events.csv of a run with --debug"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise KvsimError(f"{path}: is no CSV file ({error}); give the events.csv of a run with --debug") from None


def _parse_all(reader: csv.DictReader[str], path: Path) -> list[Event]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        found = ", ".join(reader.fieldnames or ()) or "nothing"
        raise KvsimError(f"{path}: columns {', '.join(missing)} are missing; found {found}")
    return [_parse(row, f"{path}:{reader.line_num}") for row in reader]


def _parse(row: Mapping[str, str | None], place: str) -> Event:
    event = row["event"]
    if event not in EVENTS:
        close = get_close_matches(event or "", EVENTS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise KvsimError(f"{place}: event {event!r:.100} is not known{hint}; known: {', '.join(EVENTS)}")
    t_ns = _number(row, "t_s", lambda text: round(float(text) * NS_PER_S), place)
    block_id, ref_count = (_number(row, name, int, place) for name in ("block_id", "ref_count"))
    other = _number(row, "other_block_id", int, place) if row["other_block_id"] else None
    return Event(t_ns, event, block_id, row["request_id"] or "", ref_count, other)


def _number(row: Mapping[str, str | None], column: str, read: Callable[[str], int], place: str) -> int:
    try:
        return read(row[column] or "")
    except (ValueError, OverflowError):
        wanted = "a number of seconds" if column == "t_s" else "a whole number"
        raise KvsimError(f"{place}: {column} is {row[column]!r:.100}; it must be {wanted}: correct the cell") from None


class Held(NamedTuple):
    """A block that was taken and never returned."""

    block_id: BlockId
    ref_count: int
    taken_ns: Ns
    taken_by: str
    holders: tuple[str, ...]
    """Requests that added a reference and did not drop it."""


class DoubleDecrement(NamedTuple):
    """A request dropped a reference that it did not hold."""

    t_ns: Ns
    block_id: BlockId
    request_id: str
    ref_count: int


def never_returned(events: Iterable[Event]) -> list[Held]:
    """Blocks whose last reference had not been dropped when the journal ended, by id."""
    taken: dict[BlockId, Event] = {}
    last_count: dict[BlockId, int] = {}
    balance: dict[BlockId, Counter[str]] = {}
    for event in events:
        block_id = event.block_id
        if event.event == "taken" or (event.event == "hit" and not last_count.get(block_id)):
            taken[block_id], balance[block_id] = event, Counter()
        if event.event in _GAINS:
            balance.setdefault(block_id, Counter())[event.request_id] += 1
        elif event.event == "ref_dec":
            balance.setdefault(block_id, Counter())[event.request_id] -= 1
        else:
            continue
        last_count[block_id] = event.ref_count
    return [
        Held(block_id, count, taken[block_id].t_ns, taken[block_id].request_id, tuple(sorted(+balance[block_id])))
        for block_id, count in sorted(last_count.items())
        if count > 0 and block_id in taken
    ]


def double_decrements(events: Iterable[Event]) -> list[DoubleDecrement]:
    """Every drop of a reference by a request that held none on that block, in order."""
    held: Counter[tuple[BlockId, str]] = Counter()
    found = []
    for event in events:
        place = (event.block_id, event.request_id)
        if event.event in _GAINS:
            held[place] += 1
        elif event.event == "ref_dec":
            if held[place] > 0:
                held[place] -= 1
            else:
                found.append(DoubleDecrement(event.t_ns, event.block_id, event.request_id, event.ref_count))
    return found


def life_of(events: Iterable[Event], block_id: BlockId) -> list[Event]:
    """All that happened to one block, copies and swaps into it included."""
    return [
        event
        for event in events
        if event.block_id == block_id or (event.event == "copied" and event.other_block_id == block_id)
    ]


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Spans in seconds, one per occurrence.

    A life begins when a block is handed out. It ends when its cached text is evicted, or when it becomes free without
    one. An access is the handing out or a prefix-cache hit; `idle_before_evict_s` runs from the last moment at which
    somebody referenced the block to its eviction.
    """

    lifetime_s: tuple[float, ...]
    idle_before_evict_s: tuple[float, ...]
    reuse_gap_s: tuple[float, ...]


@dataclass(slots=True)
class _Life:
    """One block since it was handed out."""

    taken_ns: Ns
    last_access_ns: Ns
    last_freed_ns: Ns = -1
    is_cached: bool = False


def block_times(events: Iterable[Event]) -> BlockTimes:
    """The lifetimes, idle times before eviction, and gaps between accesses of every block."""
    lives: dict[BlockId, _Life] = {}
    lifetimes: list[Ns] = []
    idle: list[Ns] = []
    gaps: list[Ns] = []
    for event in events:
        life = lives.get(event.block_id)
        if event.event == "taken":
            if life is not None and life.last_freed_ns >= life.taken_ns:
                # Handed out without an eviction: its text had been taken back before it became free.
                lifetimes.append(life.last_freed_ns - life.taken_ns)
            lives[event.block_id] = _Life(event.t_ns, event.t_ns)
            continue
        if life is None:
            continue
        if event.event == "cached":
            life.is_cached = True
        elif event.event == "hit":
            gaps.append(event.t_ns - life.last_access_ns)
            life.last_access_ns = event.t_ns
        elif event.event == "freed":
            life.last_freed_ns = event.t_ns
        elif event.event == "evicted":
            idle.append(event.t_ns - life.last_freed_ns)
        if event.event == "evicted" or (event.event == "freed" and not life.is_cached):
            lifetimes.append(event.t_ns - life.taken_ns)
            del lives[event.block_id]
    return BlockTimes(_seconds(lifetimes), _seconds(idle), _seconds(gaps))


def _seconds(spans_ns: list[Ns]) -> tuple[float, ...]:
    return tuple(span / NS_PER_S for span in spans_ns)


class HistogramBin(NamedTuple):
    """Values above the previous bin's edge and up to `upto_s`."""

    upto_s: float
    num_values: int


_EDGES_S: tuple[float, ...] = (*(step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)), float("inf"))


def histogram(values_s: Iterable[float]) -> list[HistogramBin]:
    """Counts over edges 1, 2, 5, 10, ... ms to 5000 s and infinity; empty bins at both ends are left out."""
    counts = [0] * len(_EDGES_S)
    for value in values_s:
        counts[next(place for place, edge in enumerate(_EDGES_S) if value <= edge)] += 1
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return []
    return [HistogramBin(_EDGES_S[place], counts[place]) for place in range(filled[0], filled[-1] + 1)]
