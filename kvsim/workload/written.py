"""Requests written out in the scenario, for small cases that are worked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from kvsim.request import Request, Sampling
from kvsim.tokens import Segment, TokenStream
from kvsim.types import ScenarioError
from kvsim.workload.content import OWN_TEXT, PREFIX_GROUP, SESSION_TEXT
from kvsim.workload.source import ListSource, SessionSource, Source
from kvsim.workload.streams import mix
from kvsim.workload.trace_files import BadRow, parse_int, parse_seconds

KEYS = (
    "id",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "max_output_tokens",
    "prefix_group",
    "prefix_tokens",
    "n",
    "beam_width",
    "priority",
    "session",
    "abort_s",
)


def written_source(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> Source:
    """The requests of a list of mappings; ids default to the position in the list.

    Requests of one `session` share its text and follow each other. Raises ScenarioError naming entry, key and value.
    """
    groups: dict[object, int] = {}
    requests = []
    sessions: dict[object, list[Request]] = {}
    for index, row in enumerate(rows):
        try:
            request = _request(index, row, groups, list(sessions), seed)
        except BadRow as bad:
            raise ScenarioError(f"workload.requests[{index}].{bad.column}: {bad}") from None
        requests.append(request)
        sessions.setdefault(row.get("session", f"alone {index}"), []).append(request)
    _check_ids(requests)
    if any("session" in row for row in rows):
        return SessionSource([WrittenSession(turns) for turns in sessions.values()])
    return ListSource(requests)


def _check_ids(requests: Sequence[Request]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise ScenarioError(f"workload.requests: id {request.request_id!r} is there twice; ids must differ")
        seen.add(request.request_id)


def _request(
    index: int, row: Mapping[str, Any], groups: dict[object, int], sessions: list[object], seed: int
) -> Request:
    if not isinstance(row, Mapping):
        raise BadRow("", row, f"is no mapping; known keys: {', '.join(KEYS)}")
    for key in row:
        if key not in KEYS:
            close = get_close_matches(str(key), KEYS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise BadRow(str(key), row[key], f"has an unknown key{hint}; known: {', '.join(KEYS)}")
    prompt_len = _count(row, "prompt_tokens", 1)
    output_len = _count(row, "output_tokens", 1)
    arrival_ns = parse_seconds("arrival_s", row.get("arrival_s", 0))
    max_output_len = _count(row, "max_output_tokens", output_len, output_len)
    prompt = _prompt(index, row, prompt_len, groups, sessions)
    last = prompt.pieces[-1]
    assert isinstance(last, Segment)
    talks = "session" in row
    return Request(
        request_id=str(row.get("id", index)),
        arrival_ns=arrival_ns,
        prompt=prompt,
        output_len=output_len,
        max_output_len=max_output_len,
        sampling=Sampling(n=_count(row, "n", 1, 1), beam_width=_count(row, "beam_width", 0, 0)),
        priority=parse_int("priority", row.get("priority", 0), -(2**31)),
        output=TokenStream.from_segment(last.source, output_len, last.start + last.length) if talks else None,
        abort_ns=arrival_ns + parse_seconds("abort_s", row["abort_s"]) if row.get("abort_s") is not None else None,
        seed=mix(seed, index) >> 1,
    )


def _count(row: Mapping[str, Any], key: str, low: int, default: int | None = None) -> int:
    value = row.get(key, default)
    if value is None:
        if default is None:
            raise BadRow(key, None, "is missing")
        return default
    return parse_int(key, value, low)


def _prompt(
    index: int, row: Mapping[str, Any], prompt_len: int, groups: dict[object, int], sessions: list[object]
) -> TokenStream:
    shared = _count(row, "prefix_tokens", 0, 0) if row.get("prefix_group") is not None else 0
    if shared > prompt_len:
        raise BadRow("prefix_tokens", shared, f"is more than the prompt's {prompt_len} tokens")
    source = OWN_TEXT + index
    if "session" in row:
        known = row["session"] in sessions
        source = SESSION_TEXT + (sessions.index(row["session"]) if known else len(sessions))
    own = Segment(source, 0, prompt_len - shared)
    if not shared:
        return TokenStream((own,))
    group = groups.setdefault(str(row["prefix_group"]), len(groups))
    return TokenStream((Segment(PREFIX_GROUP + group, 0, shared), own))


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
