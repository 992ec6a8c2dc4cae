"""A request trace as columns (numpy), sorted by time; requests are made from them when due (`kvsim.workload.table`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from kvsim.types import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """Requests as columns, one entry a request, sorted by arrival (equal arrivals in file order).

    `arrival_ns` is None where the file has no times; `max_output` where it states none. `prefix_group` and `session`
    are codes (-1: none). The hash ids of request i are `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`: dense codes,
    numbered in order of first appearance. `file_rank` is each row's place in the file where that is not its place here.
    """

    path: str
    format: str
    arrival_ns: Ints | None
    prompt: Ints
    output: Ints
    max_output: Ints | None = None
    prefix_group: Ints | None = None
    prefix_tokens: Ints | None = None
    n: Ints | None = None
    priority: Ints | None = None
    session: Ints | None = None
    hash_ids: Ints | None = None
    hash_offsets: Ints | None = None
    hash_block_size: int = 0
    file_rank: Ints | None = None
    num_skipped: int = 0
    num_failed: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt)

    def take(self, rows: Ints) -> Trace:
        """The trace of these rows, in this order."""
        import numpy as np

        values = {field.name: getattr(self, field.name) for field in fields(self) if "hash" not in field.name}
        columns: dict[str, Any]
        columns = {name: column[rows] for name, column in values.items() if isinstance(column, np.ndarray)}
        if self.hash_ids is not None and self.hash_offsets is not None:
            counts = np.diff(self.hash_offsets)[rows]
            offsets = np.concatenate(([0], np.cumsum(counts)))
            starts = np.repeat(self.hash_offsets[:-1][rows] - offsets[:-1], counts)
            columns["hash_ids"] = self.hash_ids[starts + np.arange(offsets[-1])]
            columns["hash_offsets"] = offsets
        return replace(self, **columns)

    @property
    def mean_rate(self) -> float | None:
        """Requests per second: gaps over the time they fill; None without two distinct times."""
        if self.arrival_ns is None or len(self) < 2 or self.arrival_ns[-1] == self.arrival_ns[0]:
            return None
        return (len(self) - 1) * NS_PER_S / float(self.arrival_ns[-1] - self.arrival_ns[0])


def sorted_by_time(trace: Trace) -> Trace:
    """The same requests by arrival; rows that were out of order are counted in a note."""
    import numpy as np

    times = trace.arrival_ns
    if times is None or bool(np.all(times[1:] >= times[:-1])):
        return trace
    num_late = int(np.sum(times[1:] < times[:-1]))
    note = f"{trace.path}: {num_late} rows are earlier than the row before them; sorted by time"
    order = np.argsort(times, kind="stable")
    return replace(trace.take(order), file_rank=order, notes=(*trace.notes, note))


_FROM_ZERO = frozenset({"azure", "burstgpt"})
"""Formats whose clock starts anywhere."""
_DATED_NS = 10**8 * NS_PER_S
"""Times from here on are dates, as seconds since 1970: no trace starts three years after its own beginning."""


def from_start(trace: Trace) -> Trace:
    """The same requests, sorted by time, on a clock that starts with them; seconds since some start are kept."""
    times = trace.arrival_ns
    if times is None or (trace.format not in _FROM_ZERO and 0 <= times[0] < _DATED_NS):
        return trace
    return replace(trace, arrival_ns=times - times[0])


def in_file_order(trace: Trace) -> Trace:
    """The same requests in the order of the file."""
    import numpy as np

    return trace if trace.file_rank is None else trace.take(np.argsort(trace.file_rank, kind="stable"))
