"""The block map's recording: which sequence owned which block, at sampled steps of a run.

`BlockMapObserver` watches a run (see `kvsim.sim.server.Observer`) and keeps at most `max_frames` pictures of the
memory, each taken at the start of a step, after it was planned. `recording` turns them into what the page embeds:
differences from frame to frame, as plain lists. Frames that fall on the same instant as events in `events.csv` show
the state after all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.memory.journal import Event, Journal
from kvsim.memory.paged import PagedAllocator
from kvsim.request import Sequence as Seq
from kvsim.request import Status
from kvsim.scheduling.interface import Scheduler
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.types import BlockId, Ns

MAX_FRAMES = 300
MAX_FRAME_BLOCKS = 30_000_000
"""Frames x blocks that are kept: with a million blocks there are fewer frames."""
MAX_LIFE_EVENTS = 150_000
"""Events of the journal that a page embeds; of longer runs a block's life is read from the frames."""

LIFE_CODES = {
    "taken": "t", "ref_inc": "+", "ref_dec": "-", "copied": "c", "cached": "k",
    "hit": "h", "evicted": "e", "swapped_out": "o", "swapped_in": "i", "freed": "f",
}  # fmt: skip

Recording: TypeAlias = dict[str, Any]
"""A block map as JSON; see `recording` for its keys."""


class Paged(NamedTuple):
    """One sequence's table."""

    block_ids: tuple[BlockId, ...]
    num_tokens: int


class Region(NamedTuple):
    """One sequence's address range; `size` is `length` and what the placement rounded up."""

    start: int
    length: int
    size: int
    num_tokens: int


class Frame(NamedTuple):
    """The memory at one instant; `rows` are the sequences on the GPU by number, in a stable order."""

    t_ns: Ns
    step: int
    num_running: int
    num_waiting: int
    num_swapped: int
    rows: dict[int, Paged] | dict[int, Region]
    idle: frozenset[BlockId]
    """Cached-idle blocks."""
    lost: frozenset[BlockId]
    """Blocks that only leaked references hold (`upstream_faults` only)."""
    ended: frozenset[int]
    """Of `rows`, those that ended and keep their memory until their static batch ends."""


class BlockMapObserver:
    """Takes a picture of a scheduler's memory at every k-th step, k doubling whenever there are too many."""

    def __init__(self, scheduler: Scheduler, *, max_frames: int = MAX_FRAMES) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.allocator
        self.is_contiguous = isinstance(self.allocator, ContiguousAllocator)
        self.max_frames = max(2, min(max_frames, MAX_FRAME_BLOCKS // self.allocator.num_blocks))
        self.every = 1
        """Steps from one kept frame to the next."""
        self.num_steps = 0
        """Steps that were planned."""
        self.num_taken = 0
        """Those of them that were taken: a horizon cuts off the last one."""
        self.frames: list[Frame] = []
        self.sequences: list[Seq] = []
        """Those that frames name, by number."""
        self._numbers: dict[int, int] = {}
        self._last: tuple[Ns, StepPlan] | None = None

    def on_submit(self, request: Any, reason: str | None, now: Ns) -> None:
        """A request that waits has no memory yet."""

    def on_abort(self, request_id: str, sequences: tuple[Seq, ...], now: Ns) -> None:
        """Seen in the next frame."""

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        self._last = (end_ns, plan)
        self.num_taken += 1

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        if self.num_steps % self.every == 0:
            self.frames.append(self._frame(now, plan))
            if len(self.frames) >= self.max_frames:
                self.frames = self.frames[::2]
                self.every *= 2
        self.num_steps += 1

    def finish(self) -> None:
        """One more frame, of what is left after the last step."""
        if self._last is not None:
            end_ns, plan = self._last
            self.frames.append(self._frame(end_ns, plan._replace(num_running=0, num_waiting=0, num_swapped=0)))
            self._last = None

    def _frame(self, now: Ns, plan: StepPlan) -> Frame:
        return Frame(
            now,
            plan.step,
            plan.num_running,
            plan.num_waiting,
            plan.num_swapped,
            self._regions() if self.is_contiguous else self._tables(),
            self._idle_blocks(),
            self._lost_blocks(),
            frozenset(self._number(seq) for seq in getattr(self.scheduler, "retained", ())),
        )

    def _resident(self) -> list[tuple[int, Seq]]:
        """Sequences with memory on the GPU, with their numbers; finished members of a static batch included."""
        allocator = self.allocator
        is_swapped = getattr(allocator, "is_swapped", lambda seq_id: False)
        found = []
        for seq in (*self.scheduler.live_sequences(), *getattr(self.scheduler, "retained", ())):
            if allocator.has_table(seq.seq_id) and not is_swapped(seq.seq_id):
                found.append((self._number(seq), seq))
        return found

    def _number(self, seq: Seq) -> int:
        number = self._numbers.get(seq.seq_id)
        if number is None:
            number = self._numbers[seq.seq_id] = len(self.sequences)
            self.sequences.append(seq)
        return number

    def _tables(self) -> dict[int, Paged]:
        before = self.frames[-1].rows if self.frames else {}
        rows = {}
        for number, seq in self._resident():
            row = Paged(tuple(self.allocator.block_table(seq.seq_id)), self.allocator.num_tokens(seq.seq_id))
            earlier = before.get(number)
            if isinstance(earlier, Paged) and earlier.block_ids == row.block_ids:
                row = row._replace(block_ids=earlier.block_ids)  # One tuple for both frames: tables are long.
            rows[number] = row
        return rows

    def _regions(self) -> dict[int, Region]:
        allocator = self.allocator
        assert isinstance(allocator, ContiguousAllocator)
        found = {number: (seq, *allocator.region(seq.seq_id)) for number, seq in self._resident()}
        ends = _next_starts([start for _, start, _ in found.values()], allocator.holes(), allocator.num_blocks)
        return {
            number: Region(start, length, ends[start] - start, allocator.num_tokens(seq.seq_id))
            for number, (seq, start, length) in found.items()
        }

    def _idle_blocks(self) -> frozenset[BlockId]:
        allocator = self.allocator
        if not isinstance(allocator, PagedAllocator) or not allocator.usage().num_cached_idle:
            return frozenset()
        has_text = allocator.index.has_text
        return frozenset(block_id for block_id in allocator.free_block_ids() if has_text(block_id))

    def _lost_blocks(self) -> frozenset[BlockId]:
        allocator = self.allocator
        if not isinstance(allocator, PagedAllocator) or not allocator.num_leaked_blocks:
            return frozenset()
        surplus = allocator.surplus_refs()
        return frozenset(block_id for block_id, count in surplus.items() if count == allocator.ref_count(block_id))


def _next_starts(starts: list[int], holes: Iterable[tuple[int, int]], end: int) -> dict[int, int]:
    """Where the extent that begins at each start ends: regions and holes tile the address space."""
    bounds = sorted({*starts, *(start for start, _ in holes), end})
    after = dict(pairwise(bounds))
    return {start: after[start] for start in starts}


def recording(observer: BlockMapObserver, journal: Journal | None, names: Mapping[str, str], engine: str) -> Recording:
    """The frames as JSON, each as its difference from the one before.

    `frames[i]` is [tables, gone, tokens, idle, lost, copies, ended]: `tables` has, for every sequence whose table
    changed, [sequence, entries kept, first new id, differences of the further ids...] (contiguous: [sequence, start,
    length, size]); `gone` the sequences that left; `tokens` by how much each sequence's stored tokens changed, in the
    order in which sequences appeared; `idle` and `lost` are [added, removed], as differences; `copies` are [from, to]
    since the frame before; `ended` are sequences that ended since then and keep their memory until their static batch
    ends. `t_ns` and `step` are differences too. `names` turns the journal's sequences into requests.
    """
    observer.finish()
    frames, sequences = observer.frames, observer.sequences
    request_ids = list(dict.fromkeys(seq.request.request_id for seq in sequences))
    place = {request_id: index for index, request_id in enumerate(request_ids)}
    events = [] if journal is None else journal.events()
    allocator = observer.allocator
    return {
        "engine": engine,
        "kind": "contiguous" if observer.is_contiguous else "paged",
        "block_size": allocator.block_size,
        "num_blocks": allocator.num_blocks,
        "first_block": getattr(allocator, "num_reserved_blocks", 0),
        "every": observer.every,
        "num_steps": observer.num_taken,
        "t_ns": _differences([frame.t_ns for frame in frames]),
        "step": _differences([frame.step for frame in frames]),
        "running": [frame.num_running for frame in frames],
        "waiting": [frame.num_waiting for frame in frames],
        "swapped": [frame.num_swapped for frame in frames],
        "requests": request_ids,
        "sequences": [
            [place[seq.request.request_id], seq.sample, seq.prompt_len, _most_stored(seq)] for seq in sequences
        ],
        "frames": _encode(frames, _copies_by_frame(events, [frame.t_ns for frame in frames])),
        "lives": _lives(events, names, place),
    }


def _most_stored(seq: Seq) -> int:
    """What a sequence stores in the end: less than was foreseen if it was given up, or is a beam that lost."""
    is_over = seq.status in (Status.FINISHED, Status.ABORTED)
    return min(seq.final_len, seq.num_computed_tokens) if is_over else seq.final_len


def _encode(frames: Sequence[Frame], copies: list[list[list[int]]]) -> list[list[Any]]:
    live: dict[int, Any] = {}
    idle: frozenset[BlockId] = frozenset()
    lost: frozenset[BlockId] = frozenset()
    ended: frozenset[int] = frozenset()
    encoded = []
    for frame, copied in zip(frames, copies, strict=True):
        gone = [number for number in live if number not in frame.rows]
        tokens_before = {number: row.num_tokens for number, row in live.items()}
        for number in gone:
            del live[number]
        tables = [change for number, row in frame.rows.items() if (change := _change(number, live.get(number), row))]
        live.update(frame.rows)
        tokens = [row.num_tokens - tokens_before.get(number, 0) for number, row in live.items()]
        changes = [_set_change(idle, frame.idle), _set_change(lost, frame.lost)]
        encoded.append([tables, gone, tokens, *changes, copied, sorted(frame.ended - ended)])
        idle, lost, ended = frame.idle, frame.lost, frame.ended
    return encoded


def _change(number: int, before: Any, row: Paged | Region) -> list[int] | None:
    if isinstance(row, Region):
        return None if before is not None and before[:3] == row[:3] else [number, *row[:3]]
    if before is not None and before.block_ids == row.block_ids:
        return None
    old = () if before is None else before.block_ids
    kept = 0
    for one, other in zip(old, row.block_ids, strict=False):
        if one != other:
            break
        kept += 1
    return [number, kept, *_differences(row.block_ids[kept:])]


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for before, value in zip((0, *values), values, strict=False)]


def _set_change(before: frozenset[int], now: frozenset[int]) -> list[list[int]]:
    return [_differences(sorted(now - before)), _differences(sorted(before - now))]


def _copies_by_frame(events: Iterable[Event], times: Sequence[Ns]) -> list[list[list[int]]]:
    """The copies since the frame before, those of a frame's own instant included."""
    copies: list[list[list[int]]] = [[] for _ in times]
    index = 0
    for event in events:
        while index < len(times) and times[index] < event.t_ns:
            index += 1
        if index < len(times) and event.event == "copied" and event.other_block_id is not None:
            copies[index].append([event.block_id, event.other_block_id])
    return copies


def _lives(events: Sequence[Event], names: Mapping[str, str], place: dict[str, int]) -> Recording | None:
    """The journal in columns, for the lives of single blocks; requests that no frame shows are added to `place`.

    A drop to no reference is left out: the block is freed by it, which is an event of its own. None if it is too long.
    """
    told = [event for event in events if event.event != "ref_dec" or event.ref_count]
    if not told or len(told) > MAX_LIFE_EVENTS:
        return None
    extra: dict[str, int] = {}
    owners = []
    for event in told:
        request_id = names.get(event.request_id, event.request_id)
        index = place.get(request_id)
        owners.append(extra.setdefault(request_id, len(place) + len(extra)) if index is None else index)
    return {
        "t_us": _differences([event.t_ns // 1000 for event in told]),
        "code": "".join(LIFE_CODES[event.event] for event in told),
        "block": _differences([event.block_id for event in told]),
        "request": _differences(owners),
        "other": [
            [index, event.other_block_id] for index, event in enumerate(told) if event.other_block_id is not None
        ],
        "more_requests": list(extra),
    }
