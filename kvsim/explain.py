"""The life of one request in words: when it waited and for what, when and why it was preempted, what it hit.

`LifeStory` observes a run (see `kvsim.sim.server.Observer`) and keeps events about one request alone; waits of many
steps are one event, and preemptions beyond the first few are counted, not told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvsim.request import Request, Sequence
from kvsim.scheduling.interface import Scheduler
from kvsim.scheduling.plan import LIMITS, Preemption, PrefillChunk, StepOutcome, StepPlan, pushed_out
from kvsim.types import NS_PER_MS, NS_PER_S, KvsimError, Ns

_FOR_MEMORY = ("blocks", "promises")
"""Reasons to wait of which the engine can say what is missing."""

_NUM_TOLD = 3
"""Preemptions told in full at the beginning; the last one is told too."""


@dataclass(slots=True)
class _Event:
    ns: Ns
    text: str
    cycle: int
    """Steps before the event that preempted the request."""


class _Planned(NamedTuple):
    """What a step does with the request."""

    chunks: list[int]
    """Tokens it computes, chunk by chunk."""
    num_again: int
    """How many of them were computed before."""
    num_pushed_out: int


class _Wait:
    """One stay in line: how long for what, the head of the line setting the reason."""

    def __init__(self, since_ns: Ns) -> None:
        self.since_ns = since_ns
        self.spans: dict[str, Ns] = {}
        self.head_ns: Ns = 0
        self.need = ""
        """What it needed when it was first refused blocks at the head of the line."""
        self.blockers: dict[str, None] = {}
        """Requests that stood at the head meanwhile."""
        self._seen_ns = since_ns
        self._reason = "the step under way"
        self._is_head = False

    def see(self, now: Ns, reason: str, head: str, *, is_head: bool) -> None:
        """A step begins without the request, for this reason."""
        self.close(now)
        self._reason, self._is_head = reason, is_head
        if head and not is_head:
            self.blockers[head] = None

    def close(self, now: Ns) -> None:
        """Book the time since the last look."""
        span = now - self._seen_ns
        if span:
            self.spans[self._reason] = self.spans.get(self._reason, 0) + span
            self.head_ns += span * self._is_head
        self._seen_ns = now


class LifeStory:
    """Observes a run for the sake of one request; `text()` tells its life so far. Changes nothing."""

    def __init__(self, request_id: str, scheduler: Scheduler) -> None:
        self.request_id = request_id
        self.scheduler = scheduler
        self.request: Request | None = None
        self.end_ns: Ns | None = None
        self.num_preemptions = 0
        """Steps that preempted it."""
        self.num_pushed_out = 0
        """Preemptions as requests.csv counts them: samples that go together are one, others may go in the same step."""
        self.num_recomputed_tokens = 0
        self.num_hit_tokens = 0
        self.num_output_tokens = 0
        self.waited_ns = 0
        self.first_token_ns: Ns | None = None
        self._events: list[_Event] = []
        self._wait: _Wait | None = None
        self._chunks: list[int] = []
        self._planned: dict[int, _Planned] = {}
        """By step under way: what it does with the request."""
        self._seqs: dict[int, Sequence] = {}
        self._inherited: dict[int, int] = {}
        """Tokens that a beam took over from its parent, by sequence: emitted once, by the parent."""
        self._stored_before: dict[int, int] = {}
        """Tokens that a recompute threw away, by sequence: the most it ever had."""
        self._last_ns: Ns = 0

    def on_submit(self, request: Request, reason: str | None, now: Ns) -> None:
        self._last_ns = max(self._last_ns, now)
        if request.request_id != self.request_id:
            return
        self.request = request
        self._tell(request.arrival_ns, f"arrives with {_count(request.prompt_len, 'prompt token')}{_forks(request)}")
        if reason is not None:
            self._tell(now, f"is rejected at once: {reason}")
            self.end_ns = now
        else:
            self._wait = _Wait(request.arrival_ns)

    def on_abort(self, request_id: str, sequences: tuple[Sequence, ...], now: Ns) -> None:
        if request_id == self.request_id:
            self._stop_waiting(now)
            self._count_output(sequences)
            self._tell(now, f"is aborted by its client, with {_count(self.num_output_tokens, 'token')} in hand")
            self._end(now)

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        self._last_ns = max(self._last_ns, now)
        if self.request is None or self.end_ns is not None:
            return
        if preempted := self._mine(plan.preempted):
            self._on_preempted(preempted, now)
        if admitted := self._mine(plan.admitted):
            self._on_admitted(plan, admitted, now)
        if mine := [seq for seq in plan.resumed if self._is_mine(seq)]:
            self._stop_waiting(now)
            self._tell(now, f"is swapped in again{_sequences(len(mine))} and goes on where it was")
        chunks = self._mine(plan.prefills)
        if chunks or preempted:
            sizes, num_again = [chunk.num_tokens for chunk in chunks], sum(map(self._num_again, chunks))
            self._planned[plan.step] = _Planned(sizes, num_again, len(pushed_out(tuple(preempted))))
        if rejected := self._mine(plan.rejected):
            self._stop_waiting(now)
            self._tell(now, f"is given up by the engine: {rejected[0].reason}")
            self._end(now)
        if self._wait is not None:
            self._see_waiting(self._wait, plan, now)

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        self._last_ns = max(self._last_ns, end_ns)
        if self.request is None or self.end_ns is not None:
            return
        if planned := self._planned.pop(plan.step, None):
            self._chunks += planned.chunks
            self.num_recomputed_tokens += planned.num_again
        started = list(filter(self._is_mine, outcome.started))
        # A token in flight reaches a victim too.
        if started or (self.first_token_ns is None and any(map(self._is_mine, outcome.delivered))):
            self._on_started(started, end_ns)
        if children := [fork.child for fork in outcome.forks if self._is_mine(fork.child)]:
            if self.request.sampling.beam_width:
                self._inherited = {seq.seq_id: seq.num_output_tokens for seq in children} | self._inherited
            self._seqs.update((seq.seq_id, seq) for seq in children)
            if self.first_token_ns == end_ns:
                self._tell(end_ns, f"forks {_count(len(children), 'child', 'children')}, all sharing its blocks")
        self._count_output(filter(self._is_mine, outcome.ended + outcome.pruned))
        if self.request_id in outcome.finished_requests:
            self._end(end_ns)
            self._tell(end_ns, self._farewell(end_ns))

    def text(self) -> str:
        """The story. Raises KvsimError if the request never arrived."""
        if self.request is None:
            raise KvsimError(f"request {self.request_id!r} never arrived in this run; ids are in requests.csv")
        lines = [f"request {self.request_id}"]
        lines += [f"{event.ns / NS_PER_S:12.6f} s  {event.text}" for event in self._told()]
        if self.end_ns is None:
            lines.append(f"{self._last_ns / NS_PER_S:12.6f} s  {self._unfinished()}")
        lines.append(self._totals())
        return "\n".join(lines)

    def _count_output(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that ended: what they emitted themselves."""
        self.num_output_tokens += sum(seq.num_output_tokens - self._inherited.get(seq.seq_id, 0) for seq in sequences)

    def _on_preempted(self, preempted: list[Preemption], now: Ns) -> None:
        self.num_preemptions += 1
        self.num_pushed_out += len(pushed_out(tuple(preempted)))
        stored = sum(entry.num_stored_tokens for entry in preempted)
        how = "swapped out to the host" if preempted[0].is_swap else "thrown out, to be computed again"
        if preempted[0].was_refused:
            usage = self.scheduler.allocator.usage()
            num_free = usage.num_host_blocks - usage.num_host_used
            how += f" (it could not be swapped out: {num_free} of {usage.num_host_blocks} host blocks are free)"
        tokens = _count(stored, "stored token")
        if len(preempted) > 1:
            tokens += f" ({len(preempted)} sequences, each with what it shares)"
        self._tell(now, f"is preempted: blocks ran out and it is the engine's victim. {tokens} {_are(stored)} {how}")
        for entry in () if preempted[0].is_swap else preempted:
            before = self._stored_before.get(entry.seq.seq_id, 0)
            self._stored_before[entry.seq.seq_id] = max(before, entry.num_stored_tokens)
        self._wait = _Wait(now)

    def _on_admitted(self, plan: StepPlan, admitted: list[Any], now: Ns) -> None:
        self._stop_waiting(now)
        self._seqs.update((entry.seq.seq_id, entry.seq) for entry in admitted)
        hit = sum(entry.num_hit_tokens for entry in admitted)
        again = " again" if admitted[0].is_resumed else ""
        is_cached = getattr(self.scheduler.allocator, "enable_prefix_caching", False)
        self.num_hit_tokens += hit * is_cached
        where = "hits in the prefix cache" if is_cached else "shared between its sequences"
        hits = f"; {_count(hit, 'token')} {_are(hit)} {where}" if hit else ""
        self._tell(now, f"is admitted{again}{_sequences(len(admitted))}, {plan.num_running} running{hits}")
        self._chunks = []

    def _num_again(self, chunk: PrefillChunk) -> int:
        """Tokens of a chunk that were stored before a preemption."""
        stored_before = self._stored_before.get(chunk.seq.seq_id, 0)
        return max(0, min(chunk.start + chunk.num_tokens, stored_before) - chunk.start)

    def _on_started(self, started: list[Sequence], now: Ns) -> None:
        chunks, self._chunks = self._chunks, []
        size = sum(chunks)
        parts = f" in {len(chunks)} pieces" if len(chunks) > 1 and len(chunks) > len(self._seqs) else ""
        if self.first_token_ns is None:
            self.first_token_ns = now
            self._tell(now, f"has computed {_count(size, 'token')}{parts} and emits its first token")
        elif num_new := sum(seq.num_output_tokens == 1 for seq in started):
            whose = "another sample" if num_new == 1 else f"{num_new} more samples"
            self._tell(now, f"has computed {_count(size, 'token')}{parts} and emits the first token of {whose}")
        else:
            self._tell(now, f"has computed {_count(size, 'token')}{parts} again and goes on")

    def _see_waiting(self, wait: _Wait, plan: StepPlan, now: Ns) -> None:
        if self._is_set_aside():
            # Others pass, so nobody is in front.
            wait.see(now, self._goal("LoRA limit"), self.request_id, is_head=True)
            return
        head, reason = self._head(), self._reason(plan)
        is_head = head == self.request_id
        # In a step with a preemption some engines admit nobody, whatever there is room for.
        if is_head and reason in _FOR_MEMORY and not wait.need and not plan.preempted:
            wait.need = self.scheduler.describe_block()
        wait.see(now, self._goal(reason), head, is_head=is_head)

    def _reason(self, plan: StepPlan) -> str:
        """What the head of the line was refused for: as the engine says, else as its limits show."""
        if plan.head_wait:
            return plan.head_wait
        if plan.waits_for_memory:
            return "blocks"
        max_num_seqs = getattr(self.scheduler, "max_num_seqs", None)
        seats = max(plan.num_running, plan.num_sequences, getattr(self.scheduler, "num_seats", 0))
        if max_num_seqs is not None and seats >= max_num_seqs:
            return "sequence limit"
        budget = getattr(self.scheduler, "max_num_batched_tokens", None)
        if budget is not None and plan.shape.num_tokens >= budget:
            return "token budget"
        return "blocks" if plan.preempted else "its turn"

    def _head(self) -> str:
        """The request that is served next: swapped ones first, and nobody whom others pass."""
        for name in ("swapped", "waiting"):
            for group in getattr(self.scheduler, name, ()):
                if self._lets_others_pass(group):
                    continue
                member = group[0] if isinstance(group, list | tuple) else group
                return str(member.request.request_id)
        return ""

    def _lets_others_pass(self, group: Any) -> bool:
        """Whether its adapter has no place in the batch: the engine skips it."""
        is_set_aside = getattr(self.scheduler, "is_set_aside", None)
        return is_set_aside is not None and bool(is_set_aside(group))

    def _is_set_aside(self) -> bool:
        """Whether others pass this request."""
        return getattr(self.scheduler, "max_loras", 0) > 0 and any(
            group.request_id == self.request_id and self._lets_others_pass(group)
            for group in getattr(self.scheduler, "waiting", ())
        )

    def _stop_waiting(self, now: Ns) -> None:
        if self._wait is not None:
            self._wait.close(now)
            if now > self._wait.since_ns:
                self._tell(now, f"waited {_describe(self._wait, now)}")
            self.waited_ns += now - self._wait.since_ns
        self._wait = None

    def _goal(self, reason: str) -> str:
        if reason in LIMITS:
            return f"the {reason} ({LIMITS[reason]} = {getattr(self.scheduler, LIMITS[reason], '?')})"
        if reason in ("running batch", "gate"):
            return f"the {reason}"
        if reason != "blocks":
            return reason
        return "free blocks" if self.scheduler.allocator.block_size > 1 else "free slots"

    def _farewell(self, now: Ns) -> str:
        assert self.request is not None
        took = _span(now - self.request.arrival_ns)
        return f"ends with {_count(self.num_output_tokens, 'output token')}, {took} after its arrival"

    def _end(self, now: Ns) -> None:
        self.end_ns = now
        self._wait = None

    def _unfinished(self) -> str:
        if self._wait is None:
            return "is still running when the run ends"
        self._wait.close(self._last_ns)
        return f"still waits when the run ends, by then {_describe(self._wait, self._last_ns)}"

    def _totals(self) -> str:
        waits_ns = 0 if self._wait is None else self._last_ns - self._wait.since_ns
        # A step that would end after the horizon does not happen.
        num_undone = sum(step.num_pushed_out for step in self._planned.values()) if self.end_ns is None else 0
        parts = [
            f"waited {_span(self.waited_ns + waits_ns)} in all",
            _count(self.num_pushed_out - num_undone, "preemption"),
            f"{_count(self.num_recomputed_tokens, 'token')} recomputed",
            f"{_count(self.num_hit_tokens, 'token')} hit",
        ]
        return "in sum: " + ", ".join(parts)

    def _told(self) -> Iterable[_Event]:
        """All events, or, of many preemptions, the first few and the last with what lies between counted."""
        last = self.num_preemptions
        if last <= _NUM_TOLD + 2:
            yield from self._events
            return
        yield from (event for event in self._events if event.cycle <= _NUM_TOLD)
        hidden = [event for event in self._events if _NUM_TOLD < event.cycle < last]
        times = last - 1 - _NUM_TOLD
        span = _span(hidden[-1].ns - hidden[0].ns)
        yield _Event(hidden[0].ns, f"is preempted {times} times more and comes back each time, within {span}", 0)
        yield from (event for event in self._events if event.cycle >= last)

    def _tell(self, now: Ns, text: str) -> None:
        self._events.append(_Event(now, text, self.num_preemptions))

    def _is_mine(self, seq: Sequence) -> bool:
        return seq.request.request_id == self.request_id

    def _mine(self, entries: Iterable[Any]) -> list[Any]:
        return [entry for entry in entries if self._is_mine(entry.seq)]


def _describe(wait: _Wait, now: Ns) -> str:
    """How long, for what, and behind whom."""
    total = now - wait.since_ns
    spans = sorted(wait.spans.items(), key=lambda item: -item[1])
    if len(spans) == 1:
        text = f"{_span(total)} for {spans[0][0]}"
    else:
        text = f"{_span(total)}: " + ", ".join(f"{_span(span)} for {goal}" for goal, span in spans)
    if wait.blockers:
        first, *others = wait.blockers
        text += f"; behind {first}" + (f" and {_count(len(others), 'other request')}" if others else "")
    if wait.head_ns and wait.blockers:
        text += f"; {_span(wait.head_ns)} of it at the head of the line"
    return text + (f" ({wait.need})" if wait.need else "")


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _sequences(number: int) -> str:
    return f" with {number} sequences" if number > 1 else ""


def _forks(request: Request) -> str:
    if request.sampling.beam_width:
        return f", for a beam search of width {request.sampling.beam_width}"
    return f", for {request.sampling.n} samples" if request.sampling.n > 1 else ""


def _span(ns: Ns) -> str:
    return f"{ns / NS_PER_S:.3f} s" if ns >= NS_PER_S else f"{ns / NS_PER_MS:.3f} ms"
