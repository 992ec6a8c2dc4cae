"""A run as a Chrome / Perfetto trace: open `timeline.json` in https://ui.perfetto.dev or chrome://tracing.

Every request has a track, from arrival to end, with what it was doing below; samples and beams that were forked off
have tracks of their own beside it. Counters show blocks used, requests running and waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kvsim.request import Request, Sequence
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.types import Ns

if TYPE_CHECKING:
    import pandas as pd

Event: TypeAlias = dict[str, Any]
TrackKey: TypeAlias = tuple[str, int]
"""Request id and sample."""

NS_PER_EVENT_UNIT = 1000
"""Trace events count microseconds."""

ENGINE_PID, REQUESTS_PID = 1, 2

COUNTERS = {"blocks used": ("used_blocks",), "requests": ("num_running", "num_waiting")}

COLORS = {
    "waiting": "grey",
    "prefill": "thread_state_running",
    "decode": "good",
    "preempted": "terrible",
    "swapped": "bad",
}
"""Names of the trace viewer's own palette."""


class Span(NamedTuple):
    """What a sequence was doing from `start_ns` to `end_ns`: waiting, prefill, decode, preempted or swapped."""

    request_id: str
    sample: int
    name: str
    start_ns: Ns
    end_ns: Ns
    num_tokens: int = 0
    """Tokens of a prefill chunk."""


class TimelineObserver:
    """Watches a run and notes what every sequence is doing; needs no detail in the plans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[TrackKey, tuple[str, Ns]] = {}
        self._waiting: dict[str, Request] = {}
        """Requests that were never admitted so far."""
        self._end_ns: Ns = 0
        """The latest instant that was seen: steps end, and requests come after the last of them."""

    def on_submit(self, request: Request, reason: str | None, now: Ns) -> None:
        self._end_ns = max(self._end_ns, now)
        if reason is None:
            self._waiting[request.request_id] = request

    def on_abort(self, request_id: str, sequences: tuple[Sequence, ...], now: Ns) -> None:
        self._end_waiting(request_id, now)
        for key in [key for key in self._open if key[0] == request_id]:
            self._close(key, now)

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        self._end_ns = max(self._end_ns, now)
        for preemption in plan.preempted:
            self._enter(preemption.seq, "swapped" if preemption.is_swap else "preempted", now)
        for seq in plan.resumed:
            self._enter(seq, "decode", now)
        for admission in plan.admitted:
            self._admit(admission.seq, now)
        for rejection in plan.rejected:
            self._end_waiting(rejection.seq.request.request_id, now)
            self._close(_key(rejection.seq), now)

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        self._end_ns = end_ns
        for chunk in plan.prefills:
            self.spans.append(Span(*_key(chunk.seq), "prefill", start_ns, end_ns, chunk.num_tokens))
        started = set(map(_key, outcome.started))
        for fork in outcome.forks:
            if _key(fork.child) in self._open:
                self._close(_key(fork.child), end_ns)
            elif _key(fork.child) not in started:
                self._enter(fork.child, "decode", end_ns)
        for seq in outcome.started:
            self._enter(seq, "decode", end_ns)
        for seq in (*outcome.ended, *outcome.pruned):
            self._close(_key(seq), end_ns)

    def finish(self, end_ns: Ns | None = None) -> list[Span]:
        """All spans, those still open closed at `end_ns` (else at the latest instant seen), in order of their start."""
        end_ns = self._end_ns if end_ns is None else end_ns
        for request_id in list(self._waiting):
            self._end_waiting(request_id, end_ns)
        for key in list(self._open):
            self._close(key, end_ns)
        return sorted(self.spans, key=lambda span: (span.start_ns, span.end_ns))

    def _admit(self, seq: Sequence, now: Ns) -> None:
        self._waiting.pop(seq.request.request_id, None)
        if _key(seq) in self._open:
            self._close(_key(seq), now)
        else:
            self.spans.append(Span(*_key(seq), "waiting", seq.request.arrival_ns, now))

    def _end_waiting(self, request_id: str, now: Ns) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.spans.append(Span(request_id, 0, "waiting", request.arrival_ns, now))

    def _enter(self, seq: Sequence, name: str, now: Ns) -> None:
        self._close(_key(seq), now)
        self._open[_key(seq)] = (name, now)

    def _close(self, key: TrackKey, now: Ns) -> None:
        if key in self._open:
            name, start_ns = self._open.pop(key)
            if now > start_ns:
                self.spans.append(Span(*key, name, start_ns, now))


def write_timeline(
    path: Path | str, requests: pd.DataFrame, spans: TimelineObserver | Iterable[Span], steps: pd.DataFrame
) -> Path:
    """Write a run as trace-event JSON.

    `requests` and `steps` have the columns of requests.csv and steps.csv (either may be empty); the spans are those
    of a `TimelineObserver`. Times are those of requests.csv, in microseconds.
    """
    path = Path(path)
    spans = spans.finish() if isinstance(spans, TimelineObserver) else list(spans)
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        lines = (json.dumps(event, allow_nan=False) for event in trace_events(requests, spans, steps))
        for index, line in enumerate(lines):
            file.write(line if index == 0 else ",\n" + line)
        file.write("\n]}\n")
    return path


def trace_events(requests: pd.DataFrame, spans: list[Span], steps: pd.DataFrame) -> Iterator[Event]:
    """The events of `write_timeline`: names of tracks, counters, requests, and what they were doing."""
    tracks = _tracks(requests, spans)
    yield _named("process_name", ENGINE_PID, 0, "engine")
    yield _named("process_name", REQUESTS_PID, 0, "requests")
    for (request_id, sample), track in tracks.items():
        yield _named("thread_name", REQUESTS_PID, track, f"{request_id} sample {sample}" if sample else request_id)
        yield _event("M", "thread_sort_index", REQUESTS_PID, track, args={"sort_index": track})
    yield from _counters(steps)
    yield from _lives(requests, tracks)
    for span in spans:
        args = {"tokens": span.num_tokens} if span.name == "prefill" else {}
        yield _event(
            "X",
            span.name,
            REQUESTS_PID,
            tracks[span.request_id, span.sample],
            ts=span.start_ns / NS_PER_EVENT_UNIT,
            dur=(span.end_ns - span.start_ns) / NS_PER_EVENT_UNIT,
            cname=COLORS[span.name],
            args=args,
        )


def _tracks(requests: pd.DataFrame, spans: list[Span]) -> dict[TrackKey, int]:
    """A number per track, in order of arrival; the samples of a request stand together."""
    request_ids = requests["request_id"] if len(requests) else ()
    samples: dict[str, set[int]] = {str(request_id): {0} for request_id in request_ids}
    for span in spans:
        samples.setdefault(span.request_id, {0}).add(span.sample)
    keys = [(request_id, sample) for request_id, numbers in samples.items() for sample in sorted(numbers)]
    return {key: track for track, key in enumerate(keys, 1)}


def _counters(steps: pd.DataFrame) -> Iterator[Event]:
    """One counter event wherever a value changes, and zeros at the end of the last step."""
    if not len(steps):
        return
    starts = _microseconds(steps["start_s"])
    end = round(float(starts[-1]) + float(steps["duration_ms"].iloc[-1]) * 1e3, 3)
    for name, columns in COUNTERS.items():
        values = steps[list(columns)].to_numpy(np.int64)
        is_new = np.append(True, (values[1:] != values[:-1]).any(axis=1))
        for ts, row in zip(starts[is_new].tolist(), values[is_new].tolist(), strict=True):
            yield _event("C", name, ENGINE_PID, 0, ts=ts, args=dict(zip(columns, row, strict=True)))
        yield _event("C", name, ENGINE_PID, 0, ts=end, args=dict.fromkeys(columns, 0))


def _lives(requests: pd.DataFrame, tracks: dict[TrackKey, int]) -> Iterator[Event]:
    """A slice per request from arrival to end, with its figures; a mark where it never ended or was turned away."""
    if not len(requests):
        return
    arrivals = _microseconds(requests["arrival_s"])
    ends = _microseconds(requests["finish_s"])
    for row, arrival, end in zip(requests.to_dict("records"), arrivals.tolist(), ends.tolist(), strict=True):
        track = tracks[str(row["request_id"]), 0]
        args = {name: value for name, value in row.items() if isinstance(value, str) or value == value}
        if row["status"] in ("finished", "aborted") and end == end:
            dur = round(end - arrival, 3)
            yield _event("X", str(row["request_id"]), REQUESTS_PID, track, ts=arrival, dur=dur, args=args)
        else:
            yield _event("i", str(row["status"]), REQUESTS_PID, track, ts=arrival, s="t", args=args)


def _microseconds(seconds: pd.Series[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Times in s as microseconds, rounded to the nanosecond they stand for."""
    return np.round(seconds.to_numpy(np.float64) * 1e6, 3)


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return _event("M", kind, pid, tid, args={"name": name})


def _event(phase: str, name: str, pid: int, tid: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, **more}


def _key(seq: Sequence) -> TrackKey:
    return (seq.request.request_id, seq.sample)
