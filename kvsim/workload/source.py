"""Where requests come from: open loop, closed loop with bounded concurrency, and sessions.

A source is pulled by the simulation's clients. `next_ns` is the earliest arrival not yet taken, `take_due` hands
out what has arrived, and `on_end` tells a closed loop that a request has left (finished, rejected or aborted).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from kvsim.request import Request
from kvsim.types import Ns
from kvsim.workload.content import Shares


class Source(Protocol):
    """Requests in order of time; those of one instant in the order of the file, or of their sessions."""

    notes: tuple[str, ...]
    """What the user should know about the workload (skipped rows, cut lengths): warnings of the summary."""

    @property
    def num_left(self) -> int:
        """Requests not yet taken, whether or not they are due without a completion."""
        ...

    def next_ns(self) -> Ns | None:
        """Earliest arrival not yet taken; None if nothing comes unless a request ends first."""
        ...

    def take_due(self, now: Ns) -> list[Request]:
        """Take all requests that have arrived at `now`."""
        ...

    def on_end(self, request_id: str, now: Ns) -> None:
        """A request that was taken has ended, in whatever way; to be told once for each."""
        ...


class RequestTable(Protocol):
    """Requests in order of arrival, which may be made when their turn comes."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class TableSource:
    """Open loop over a table of requests."""

    def __init__(self, table: RequestTable, notes: Iterable[str] = ()) -> None:
        self.notes = tuple(notes)
        self.shares: Callable[[int], Shares] | None = None
        """By the size of a block: what requests have in common; None if nobody says."""
        self._num_left = len(table)
        self._requests = iter(table)
        self._head = next(self._requests, None)

    @property
    def num_left(self) -> int:
        return self._num_left

    def next_ns(self) -> Ns | None:
        return None if self._head is None else self._head.arrival_ns

    def take_due(self, now: Ns) -> list[Request]:
        due: list[Request] = []
        while self._head is not None and self._head.arrival_ns <= now:
            due.append(self._head)
            self._head = next(self._requests, None)
        self._num_left -= len(due)
        return due

    def on_end(self, request_id: str, now: Ns) -> None:
        """Nobody waits for an answer in an open loop."""


class ListSource(TableSource):
    """Open loop over given requests; equal arrivals keep the order of the list."""

    def __init__(self, requests: Iterable[Request], notes: Iterable[str] = ()) -> None:
        super().__init__(sorted(requests, key=lambda request: request.arrival_ns), notes)


class ConcurrencySource:
    """At most `max_concurrency` requests of `inner` at once: the others wait at the client, first come first sent.

    As in `vllm bench serve`, a request that had to wait there arrives when it is sent: its TTFT does not contain
    the wait.
    """

    def __init__(self, inner: Source, max_concurrency: int) -> None:
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency is {max_concurrency}; it must be at least 1")
        self.notes = inner.notes
        self.shares: Callable[[int], Shares] | None = getattr(inner, "shares", None)
        self._inner = inner
        self._held: deque[Request] = deque()
        self._free_since: list[Ns] = [0] * max_concurrency
        """When each free place became free, as a heap."""

    @property
    def num_left(self) -> int:
        return self._inner.num_left + len(self._held)

    def next_ns(self) -> Ns | None:
        arrival = self._held[0].arrival_ns if self._held else self._inner.next_ns()
        if arrival is None or not self._free_since:
            return None
        return max(arrival, self._free_since[0])

    def take_due(self, now: Ns) -> list[Request]:
        self._held.extend(self._inner.take_due(now))
        due: list[Request] = []
        while self._held and self._free_since and self._free_since[0] <= now:
            due.append(_sent_at(self._held.popleft(), heapq.heappop(self._free_since)))
        return due

    def on_end(self, request_id: str, now: Ns) -> None:
        heapq.heappush(self._free_since, now)
        self._inner.on_end(request_id, now)


def _sent_at(request: Request, free_since: Ns) -> Request:
    """The request as the server sees it: a wait at the client moves its arrival, and its patience, with it."""
    wait = free_since - request.arrival_ns
    if wait <= 0:
        return request
    abort_ns = None if request.abort_ns is None else request.abort_ns + wait
    return replace(request, arrival_ns=free_since, abort_ns=abort_ns)


class Session(Protocol):
    """One conversation, or one agent's loop: turns that follow each other."""

    @property
    def num_turns(self) -> int: ...

    def due_ns(self, turn: int, previous_end: Ns) -> Ns:
        """When turn `turn` is sent, if the one before it ended at `previous_end` (0 for turn 0)."""
        ...

    def request(self, turn: int, arrival_ns: Ns) -> Request:
        """The turn's request; its id is unique in the run."""
        ...


class SessionSource:
    """Closed loop: the next turn of a session comes after the last answer (and a pause).

    Turns that are due at one instant come in the order in which the sessions are given.
    """

    def __init__(self, sessions: Seq[Session], notes: Iterable[str] = ()) -> None:
        self.notes = tuple(notes)
        self.shares: Callable[[int], Shares] | None = None
        self._sessions = sessions
        self._due = [(session.due_ns(0, 0), index, 0) for index, session in enumerate(sessions) if session.num_turns]
        heapq.heapify(self._due)
        self._talking: dict[str, tuple[int, int]] = {}
        self._num_left = sum(session.num_turns for session in sessions)

    @property
    def num_left(self) -> int:
        return self._num_left

    def next_ns(self) -> Ns | None:
        return self._due[0][0] if self._due else None

    def take_due(self, now: Ns) -> list[Request]:
        due: list[Request] = []
        while self._due and self._due[0][0] <= now:
            arrival_ns, index, turn = heapq.heappop(self._due)
            request = self._sessions[index].request(turn, arrival_ns)
            self._talking[request.request_id] = (index, turn)
            self._num_left -= 1
            due.append(request)
        return due

    def on_end(self, request_id: str, now: Ns) -> None:
        index, turn = self._talking.pop(request_id)
        if turn + 1 < self._sessions[index].num_turns:
            heapq.heappush(self._due, (self._sessions[index].due_ns(turn + 1, now), index, turn + 1))
