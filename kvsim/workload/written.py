"""Requests written out in the scenario, for small cases that are worked by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsim.request import Namespace, Request, Sampling
from kvsim.tokens import Segment, TokenStream
from kvsim.types import ScenarioError
from kvsim.workload.content import OWN_TEXT, PREFIX_GROUP, SESSION_TEXT, GroupTexts, shares_of
from kvsim.workload.source import ListSource, SessionSource, Source
from kvsim.workload.streams import mix
from kvsim.workload.trace_files import (
    MAX_SAMPLES,
    MAX_TOKENS,
    BadRow,
    MissingKey,
    UnknownKey,
    parse_int,
    parse_seconds,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

KEYS = (
    "id", "arrival_s", "prompt_tokens", "output_tokens", "max_output_tokens", "prefix_group", "prefix_tokens", "n",
    "beam_width", "priority", "session", "lora", "salt", "abort_s",
)  # fmt: skip


def written_source(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> Source:
    """The requests of a list of mappings; ids default to the position in the list.

    Requests of one `session` share its text and follow each other. Raises ScenarioError naming entry, key and value.
    """
    for index, bad in bad_cells(rows):
        raise ScenarioError(f"workload.requests[{index}]{bad.column and f'.{bad.column}'}: {bad}")
    groups: dict[str, int] = {}
    requests = []
    sessions: dict[str, list[Request]] = {}
    for index, row in enumerate(rows):
        request = _request(index, row, groups, list(sessions), seed)
        requests.append(request)
        session = _name(row, "session")
        # A session's name is a text: no number stands for one.
        sessions.setdefault(f"alone {index}" if session is None else f"session {session}", []).append(request)
    if any(row.get("session") is not None for row in rows):
        return SessionSource([WrittenSession(turns) for turns in sessions.values()])
    source = ListSource(requests)
    source.shares = partial(shares_of, _group_texts(requests), namespaces=_namespaces(requests))
    return source


def _group_texts(requests: Sequence[Request]) -> GroupTexts:
    """The same prompts as columns."""
    import numpy as np

    pieces = [request.prompt.pieces[0] for request in requests]
    shared = [piece if isinstance(piece, Segment) and piece.source >= PREFIX_GROUP else None for piece in pieces]
    return GroupTexts(
        np.array([request.prompt_len for request in requests], dtype=np.int64),
        np.array([-1 if piece is None else piece.source - PREFIX_GROUP for piece in shared], dtype=np.int64),
        np.array([0 if piece is None else piece.length for piece in shared], dtype=np.int64),
    )


def _namespaces(requests: Sequence[Request]) -> Ints:
    """A number for the LoRA and the salt of each request."""
    import numpy as np

    numbers: dict[Namespace, int] = {}
    return np.array([numbers.setdefault(one.namespace, len(numbers)) for one in requests], dtype=np.int64)


def bad_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, BadRow]]:
    """The number of each entry that cannot be used, and what is wrong with which of its keys."""
    seen: dict[str, int] = {}
    for index, row in enumerate(rows):
        try:
            request_id = _request(index, row, {}, [], 0).request_id
            if request_id in seen:
                raise BadRow("id", request_id, f"is there twice: entry {seen[request_id]} has it too; ids must differ")
        except BadRow as bad:
            yield index, bad
        else:
            seen[request_id] = index


def _request(index: int, row: Mapping[str, Any], groups: dict[str, int], sessions: list[str], seed: int) -> Request:
    if not isinstance(row, Mapping):
        raise BadRow("", row, f"is no mapping; known keys: {', '.join(KEYS)}")
    for key in row:
        if key not in KEYS:
            raise UnknownKey(str(key), row[key], KEYS)
    prompt_len = _count(row, "prompt_tokens", 1)
    output_len = _count(row, "output_tokens", 1)
    arrival_ns = parse_seconds("arrival_s", 0 if row.get("arrival_s") is None else row["arrival_s"])
    max_output_len = _count(row, "max_output_tokens", output_len, output_len)
    prompt = _prompt(index, row, prompt_len, groups, sessions)
    last = prompt.pieces[-1]
    assert isinstance(last, Segment)
    talks = row.get("session") is not None
    request_id = _name(row, "id")
    return Request(
        request_id=str(index) if request_id is None else request_id,
        arrival_ns=arrival_ns,
        prompt=prompt,
        output_len=output_len,
        max_output_len=max_output_len,
        sampling=_sampling(row, talks),
        priority=_count(row, "priority", -(2**31), 0),
        output=TokenStream.from_segment(last.source, output_len, last.start + last.length) if talks else None,
        namespace=Namespace(lora=_name(row, "lora"), salt=_name(row, "salt")),
        abort_ns=arrival_ns + parse_seconds("abort_s", row["abort_s"]) if row.get("abort_s") is not None else None,
        seed=mix(seed, index) >> 1,
    )


def _count(row: Mapping[str, Any], key: str, low: int, default: int | None = None, high: int = MAX_TOKENS) -> int:
    value = row.get(key, default)
    if value is None:
        if default is None:
            raise MissingKey(key, row)
        return default
    return parse_int(key, value, low, high)


def _name(row: Mapping[str, Any], key: str) -> str | None:
    """A text, or a number read as one; None where there is none."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(key, value, "is no name; write a text or a number")
    return str(value)


def _sampling(row: Mapping[str, Any], talks: bool) -> Sampling:
    n, beam_width = _count(row, "n", 1, 1, MAX_SAMPLES), _count(row, "beam_width", 0, 0, MAX_SAMPLES)
    if n > 1 and beam_width > 0:
        raise BadRow("beam_width", beam_width, f"and n ({n}) exclude each other: a request is sampled or searched")
    if talks and max(n, beam_width) > 1:
        name = "n" if n > 1 else "beam_width"
        raise BadRow(name, max(n, beam_width), "is for single requests: a session goes on with one answer")
    return Sampling(n=n, beam_width=beam_width)


def _prompt(
    index: int, row: Mapping[str, Any], prompt_len: int, groups: dict[str, int], sessions: list[str]
) -> TokenStream:
    group, session = _name(row, "prefix_group"), _name(row, "session")
    shared = _count(row, "prefix_tokens", 0, 0)
    if shared > prompt_len:
        raise BadRow("prefix_tokens", shared, f"is more than the prompt's {prompt_len} tokens")
    if shared and group is None:
        raise BadRow("prefix_tokens", shared, "needs a prefix_group that says whose prefix it is")
    source = OWN_TEXT + index
    if session is not None:
        name = f"session {session}"
        source = SESSION_TEXT + (sessions.index(name) if name in sessions else len(sessions))
    own = Segment(source, 0, prompt_len - shared)
    if not shared or group is None:
        return TokenStream((own,))
    return TokenStream((Segment(PREFIX_GROUP + groups.setdefault(group, len(groups)), 0, shared), own))


class WrittenSession:
    """Requests of the same session: each comes at its time, but not before the last answer."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    @property
    def num_turns(self) -> int:
        return len(self._requests)

    def due_ns(self, turn: int, previous_end: int) -> int:
        return max(self._requests[turn].arrival_ns, previous_end)

    def request(self, turn: int, arrival_ns: int) -> Request:
        request = self._requests[turn]
        abort_ns = request.abort_ns
        if abort_ns is not None:
            abort_ns += arrival_ns - request.arrival_ns
        return replace(request, arrival_ns=arrival_ns, abort_ns=abort_ns)
