"""Conversations and agents' tool loops: each turn's prompt is the history and a new message.

A session is one endless text: turn k's prompt is its beginning up to the end of the k-th message, the answer is what
follows, and the next prompt contains both. So a turn finds all of the history in a prefix cache that kept it. An agent
is the same with other numbers: a "message" is a tool's result, and the pause before it is the tool's run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsim.request import Request
from kvsim.tokens import Segment, TokenStream
from kvsim.types import NS_PER_S, Ns, ScenarioError
from kvsim.workload.content import SESSION_TEXT, GroupTexts, Prefixes
from kvsim.workload.spec import SessionsSpec
from kvsim.workload.streams import Streams
from kvsim.workload.table import Traits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SessionPlan:
    """All sessions of a synthetic workload as columns, one entry a turn; session s owns turns offsets[s:s + 2]."""

    arrivals: Ints
    offsets: Ints
    messages: Ints
    outputs: Ints
    pauses: Ints
    prefixes: Prefixes
    traits: Traits
    truncate_to: int | None = None

    def sessions(self, num_turns: Ints) -> list[SyntheticSession]:
        """Every session, to be played for the first `num_turns[index]` of its turns."""
        return [SyntheticSession(self, index, turns) for index, turns in enumerate(num_turns.tolist())]


class SyntheticSession:
    """One session of a plan."""

    __slots__ = ("_index", "_plan", "num_turns")

    def __init__(self, plan: SessionPlan, index: int, num_turns: int) -> None:
        self._plan = plan
        self._index = index
        self.num_turns = num_turns

    def due_ns(self, turn: int, previous_end: Ns) -> Ns:
        """The session's arrival, then a pause after each answer."""
        if turn == 0:
            return int(self._plan.arrivals[self._index])
        return previous_end + int(self._plan.pauses[self._plan.offsets[self._index] + turn])

    def request(self, turn: int, arrival_ns: Ns) -> Request:
        """The turn's request; its id is `SESSION.TURN`."""
        plan, first = self._plan, int(self._plan.offsets[self._index])
        row = first + turn
        history = int(plan.messages[first:row].sum() + plan.outputs[first:row].sum())
        end = history + int(plan.messages[row])
        start = 0 if plan.truncate_to is None else max(0, end - plan.truncate_to)
        source, output_len = SESSION_TEXT + self._index, int(plan.outputs[row])
        prompt = TokenStream((*plan.prefixes.pieces(self._index), Segment(source, start, end - start)))
        output = TokenStream.from_segment(source, output_len, end)
        return plan.traits.request(row, f"{self._index}.{turn}", arrival_ns, prompt, output_len, output)


def draw_turns(spec: SessionsSpec, rng: Streams, num_requests: int) -> Ints:
    """How many turns each session has, until they are `num_requests` together (the last session may be cut)."""
    import numpy as np

    if spec.num_turns is not None and spec.mean_turns is not None:
        raise ScenarioError("workload.sessions: num_turns and mean_turns exclude each other; keep one")
    mean = spec.num_turns if spec.num_turns is not None else spec.mean_turns if spec.mean_turns is not None else 4
    if not mean >= 1 or mean == float("inf"):
        raise ScenarioError(f"workload.sessions: {mean} turns; a session has at least 1")
    if spec.mean_turns is None:
        turns = np.full(-(-num_requests // int(mean)), int(mean), dtype=np.int64)
    else:
        turns = rng["sessions.turns"].geometric(1 / mean, num_requests)
    ends = np.cumsum(turns)
    num_sessions = int(np.searchsorted(ends, num_requests)) + 1
    turns = turns[:num_sessions].astype(np.int64)
    turns[-1] -= ends[num_sessions - 1] - num_requests
    return turns


def draw_pauses(spec: SessionsSpec, rng: Streams, num_turns: int) -> Ints:
    """The pause before each turn, in nanoseconds (that of a first turn is not used)."""
    import numpy as np

    if not 0 <= spec.think_time <= 1e8:
        raise ScenarioError(f"workload.sessions.think_time is {spec.think_time:g} s; it must be from 0 to 1e8 s")
    if spec.think_time_distribution == "constant":
        return np.full(num_turns, round(spec.think_time * NS_PER_S), dtype=np.int64)
    pauses = rng["sessions.pauses"].standard_exponential(num_turns) * spec.think_time
    return np.rint(pauses * NS_PER_S).astype(np.int64)


def cut_to_context(turns: Ints, prefix: int, messages: Ints, outputs: Ints, spec: SessionsSpec) -> Ints:
    """For each session the number of turns before the first whose prompt and answer exceed `max_context`."""
    import numpy as np

    if spec.max_context is None:
        return turns
    kept = np.zeros_like(turns)
    row = 0
    for session, num_turns in enumerate(turns.tolist()):
        totals = np.cumsum(messages[row : row + num_turns] + outputs[row : row + num_turns])
        if spec.truncate_to is not None:
            before = totals - outputs[row : row + num_turns]
            totals = np.minimum(before, spec.truncate_to) + outputs[row : row + num_turns]
        too_long = np.flatnonzero(totals + prefix > spec.max_context)
        kept[session] = too_long[0] if len(too_long) else num_turns
        row += num_turns
    return kept


class TraceSession:
    """The rows of one session of a trace: a turn comes at its time, but not before the last answer.

    Its prompt is the first `prompt_tokens` tokens of the session's text, behind the prefix its group shares.
    """

    __slots__ = ("_number", "_rows", "_trace")

    def __init__(self, trace: SessionRows, number: int, rows: Ints) -> None:
        self._trace = trace
        self._number = number
        self._rows = rows

    @property
    def num_turns(self) -> int:
        return len(self._rows)

    def due_ns(self, turn: int, previous_end: Ns) -> Ns:
        """Its own time, or the end of the turn before it."""
        return max(int(self._trace.arrivals[self._rows[turn]]), previous_end)

    def request(self, turn: int, arrival_ns: Ns) -> Request:
        """The row's request; its id is the row's number in order of time."""
        row = int(self._rows[turn])
        trace = self._trace
        prompt_len, output_len = int(trace.prompts[row]), int(trace.outputs[row])
        shared = () if trace.groups is None else trace.groups.pieces(row)
        own = prompt_len - sum(piece.length for piece in shared)
        source = SESSION_TEXT + self._number
        prompt = TokenStream((*shared, Segment(source, 0, own)) if own else shared)
        output = TokenStream.from_segment(source, output_len, own)
        return trace.traits.request(row, str(row), arrival_ns, prompt, output_len, output)


@dataclass(frozen=True)
class SessionRows:
    """A trace with a session column, by row in order of time; `codes` are -1 where a row is a session of its own."""

    arrivals: Ints
    prompts: Ints
    outputs: Ints
    codes: Ints
    groups: GroupTexts | None
    traits: Traits

    def sessions(self) -> list[TraceSession]:
        """Every session, in order of its first row."""
        import numpy as np

        alone = self.codes < 0
        codes = np.where(alone, int(self.codes.max(initial=0)) + 1 + np.arange(len(self.codes)), self.codes)
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        groups = sorted(np.split(order, starts[1:]), key=lambda rows: int(rows[0]))
        return [TraceSession(self, number, rows) for number, rows in enumerate(groups)]
