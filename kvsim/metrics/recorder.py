"""The recorder: turns plans and outcomes into columns. It derives nothing that a summary can derive later.

Gaps between tokens (ITL) cost nothing per token. All running decodes emit at every decode tick, so the gap
between two ticks counts as often as tokens were emitted at the later one; only sequences whose first decode
follows a prefill, a pause or a skipped step have a gap of their own, and those are events.
"""

from __future__ import annotations

import operator
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvsim.memory.interface import Usage
from kvsim.metrics.columns import CHUNK_ROWS, IntArray, RowTable, int_array, packed
from kvsim.metrics.ledger import Clock, Ledger, Parts, check_parts, plain_parts, recount
from kvsim.request import FINISHED, WAITING, Request, Sequence, Status
from kvsim.scheduling.interface import Scheduler
from kvsim.scheduling.plan import (
    Admission,
    Preemption,
    Rejection,
    StepOutcome,
    StepPlan,
    StepShape,
    pushed_out,
)
from kvsim.types import LawViolation, Ns

STEP_FIELDS = (
    "start_ns",
    "duration_ns",
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_preempted",
    "used_blocks",
    "token_states",
    "reserved",
    "internal_frag",
    "external_frag",
    "cached_idle",
    "free",
    "num_copies",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "prefix_hit_tokens",
    "evicted_blocks",
    "num_sequences",
    "num_table_updates",
    "num_table_rows",
    "num_table_entries",
    "allocated_slots",
    "largest_hole",
    "logical_blocks",
)
STEP_COLUMN = {name: index for index, name in enumerate(STEP_FIELDS)}

_NO_EVENTS = StepOutcome()[1:]

MOST_PLANNED = 2
"""Plans that are not applied yet: in asynchronous scheduling the one that runs, and the next."""

MEMORY_WAITS = frozenset(("", "blocks", "promises"))
"""What the head of the line waits for while memory is short, or nobody says."""

NEVER = -1
"""A time that did not come."""

NO_TICK = -1
"""For the number of regular tokens of a step that was no decode tick."""

NOT_ARRIVED = "not_arrived"
"""Status of requests that the horizon cut off before they arrived."""


class RequestLog:
    """What happened to one request; times in ns, `NEVER` where it did not happen."""

    __slots__ = (
        "finish_ns",
        "first_scheduled_ns",
        "first_token_ns",
        "index",
        "longest_output",
        "num_cow_copies",
        "num_output_tokens",
        "num_preemptions",
        "num_recomputed_tokens",
        "peak_blocks",
        "prefix_hit_tokens",
        "reason",
        "request",
        "sequences",
        "status",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        """Its number in order of submission."""
        self.status = WAITING
        self.reason = ""
        self.first_scheduled_ns = NEVER
        self.first_token_ns = NEVER
        self.finish_ns = NEVER
        self.num_output_tokens = 0
        self.longest_output = 0
        """Tokens of its longest sample."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.prefix_hit_tokens = 0
        self.num_cow_copies = 0
        self.peak_blocks = 0
        self.sequences: list[Sequence] | None = None
        """Its sequences with tables, once it has several."""


_Planned: TypeAlias = tuple[StepPlan, Usage, int, int, Parts | None]
"""A step that was planned: what memory holds then, tokens stored, slots over, and the parts if they are odd."""

_Applied: TypeAlias = tuple[Ns, Ns, int, int, _Planned]
"""A step that was applied: start, end, tokens emitted, and those of them that came one decode tick after another."""


class StepTimes(NamedTuple):
    """Columns of steps: when they began and ended, and their regular tokens (`NO_TICK`: it was no decode tick)."""

    starts: IntArray
    ends: IntArray
    num_regular: IntArray


def _column(values: tuple[int, ...]) -> IntArray:
    first, num_rows = values[0], len(values)
    # Most columns of most runs stand still, and counting is several times as fast as converting.
    if values[-1] == first and values.count(first) == num_rows:
        return np.full(num_rows, first, np.int64)
    return int_array(values)


def _times(values: tuple[Ns, ...]) -> IntArray:
    """Points in time; floats, if a cost model counts in those."""
    try:
        return packed(values)
    except struct.error:
        return np.array(values)


def _product(weights: IntArray, values: IntArray) -> int:
    """Sum of weight x value, none of them negative; exact, also where it does not fit into 64 bits."""
    if int(weights.sum()) * int(values.max()) < 2**63:
        return int(weights @ values)
    return sum(map(operator.mul, weights.tolist(), values.tolist()))


def _num_refused(preempted: tuple[Preemption, ...]) -> int:
    """The groups that were to be swapped out and could not be."""
    return len(pushed_out(tuple([entry for entry in preempted if entry.was_refused])))


def _sums(values: tuple[Any, ...], count: Callable[[Any], int]) -> IntArray:
    """A count of what happened in each step; nothing did in most."""
    if not any(values):
        return np.zeros(len(values), np.int64)
    return _column(tuple([count(value) if value else 0 for value in values]))


@dataclass(slots=True)
class Totals:
    """Counters of a run."""

    num_preemptions: int = 0
    num_refused_swaps: int = 0
    """Preemptions that were to be swaps and could not be, for want of room on the host."""
    num_recomputed_tokens: int = 0
    num_cow_copies: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_evicted_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    block_table_updates: int = 0
    peak_table_entries: int = 0
    num_emitted_tokens: int = 0
    last_token_ns: Ns = NEVER
    """End of the last step that emitted a token: whoever gives up later prolongs nothing."""
    num_steps: int = 0
    running_peak: int = 0


@dataclass(slots=True)
class Integrals:
    """Sums over steps of (value x duration in ns): time-weighted means are these over the elapsed time."""

    elapsed_ns: int = 0
    parts: list[int] = field(default_factory=lambda: [0] * 6)
    saturated_ns: int = 0
    saturated_parts: list[int] = field(default_factory=lambda: [0] * 6)
    limited_ns: dict[str, int] = field(default_factory=dict)
    """By what the head of the line waited for, where that was not memory (see `StepPlan.head_wait`)."""
    running: int = 0
    sequences: int = 0
    waiting: int = 0
    allocated_slots: int = 0
    logical_blocks: int = 0
    used_blocks: int = 0


class Recorder:
    """Observes one run. `record` names the tables kept: a subset of {"steps", "requests"}."""

    def __init__(
        self, scheduler: Scheduler, *, record: Iterable[str] = ("steps", "requests"), check: bool = False
    ) -> None:
        kept = frozenset(record)
        self.scheduler = scheduler
        self._usage = scheduler.allocator.usage
        self.ledger = Ledger(scheduler, self._on_release)
        self.capacity = self.ledger.capacity
        self.check = check
        self.keeps_requests = "requests" in kept
        self.steps = RowTable(STEP_FIELDS)
        self.keeps_steps = "steps" in kept
        self.totals = Totals()
        self.integrals = Integrals()
        self.live: dict[str, RequestLog] = {}
        self.ended = EndedRequests(keep_rows=self.keeps_requests)
        self.gaps = Gaps()
        self._high_water: dict[int, int] = {}
        self._recomputed: dict[int, list[tuple[str, int]]] = {}
        """By step, for the last steps that did: (request, tokens) computed again."""
        self._inherited: dict[int, int] = {}
        """Tokens that a beam took over from its parent: emitted once, by the parent."""
        self._is_caching = bool(getattr(scheduler.allocator, "enable_prefix_caching", False))
        self._splits_samples = getattr(scheduler, "splits_samples", False)
        self._num_forked = 0
        """Live requests that have had several sequences with tables."""
        self._num_submitted = 0
        self._planned: deque[_Planned] = deque()
        """What was not applied yet: one plan, or two in asynchronous scheduling."""
        self._applied: list[_Applied] = []
        """Steps that are not in columns yet."""
        self._num_evicted = 0
        self._block_size = scheduler.allocator.block_size
        self._window_blocks = int(getattr(scheduler.allocator, "window_blocks", 0))
        """Distinct blocks of a table that goes round in a ring; 0 without a window."""

    def shared_slot_integral(self) -> int:
        """Slots that sharing saved, summed over time (slots x ns): logical entries that name a block again."""
        return (self.integrals.logical_blocks - self.integrals.used_blocks) * self._block_size

    def on_submit(self, request: Request, reason: str | None, now: Ns) -> None:
        """A request arrived; `reason` says why it was rejected."""
        log = RequestLog(request, self._num_submitted)
        self._num_submitted += 1
        if reason is None:
            self.live[request.request_id] = log
            if (request.abort_ns is not None or request.sampling.beam_width) and not self.ledger.dates_growth:
                self.flush()
                sums = self.integrals
                self.ledger.expect_early_ends(Clock(self.totals.num_steps, sums.elapsed_ns, sums.saturated_ns))
        else:
            self._end(log, Status.REJECTED, reason, now)

    def on_abort(self, request_id: str, sequences: tuple[Sequence, ...], now: Ns) -> None:
        """A client gave up; its sequences (settled) have lost their tables."""
        self.ledger.on_abort(sequences)
        log = self.live.pop(request_id, None)
        if log is None:
            return
        for seq in sequences:
            log.num_output_tokens += self._num_emitted_by(seq)
            self.gaps.on_stop(seq)
            self._high_water.pop(seq.seq_id, None)
        self._end(log, Status.ABORTED, "aborted by the client", now)

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        """The step begins: measure memory and note what the plan decided."""
        usage = self._usage()
        ledger = self.ledger
        if plan.is_quiet:
            ledger.count_quiet(plan)
        else:
            ledger.count(plan)
            self._on_moves(plan, now)
        # Who shares a tail names its block again.
        may_be_odd = ledger.may_be_odd or usage.num_logical != usage.num_used
        parts = ledger.odd_parts(plan, usage) if may_be_odd else None
        self._planned.append((plan, usage, ledger.stored, ledger.over, parts))
        if self._num_forked:
            self._on_forked_growth(plan)
        if self.check:
            self._check(plan, parts or ledger.parts(plan, usage))

    def _on_moves(self, plan: StepPlan, now: Ns) -> None:
        """Requests that changed their place in this plan, and what is computed again."""
        for rejection in plan.rejected:
            self._on_rejected(rejection, now)
        if plan.preempted:
            self._on_preempted(plan.preempted)
        for admission in plan.admitted:
            self._on_admitted(admission, now)
        if plan.resumed:
            self._on_resumed(plan)
        if self._high_water:
            self._on_chunks(plan)
        if plan.copies:
            self._on_copies(plan)
        if plan.skipped:
            self.gaps.on_skipped(plan.skipped)

    def _on_resumed(self, plan: StepPlan) -> None:
        """Who was swapped out in the middle of a recompute goes on with that: its next token ends a prefill."""
        computes = {chunk.seq.seq_id for chunk in plan.prefills}
        for seq in plan.resumed:
            is_decoding = seq.num_uncomputed_tokens <= 0 or seq in plan.skipped
            if is_decoding and seq.seq_id not in computes:
                self.gaps.on_resume(seq)

    def _on_rejected(self, rejection: Rejection, now: Ns) -> None:
        """An engine gave up on a request that it had taken in (vllm-v0 ignores a prompt it cannot hold)."""
        log = self.live.pop(rejection.seq.request.request_id, None)
        if log is not None:
            log.num_output_tokens = rejection.seq.num_output_tokens
            self.gaps.on_stop(rejection.seq)
            self._end(log, Status.REJECTED, rejection.reason, now)

    def _on_preempted(self, preempted: tuple[Preemption, ...]) -> None:
        """Samples that go together are one preemption."""
        self.totals.num_refused_swaps += _num_refused(preempted)
        for group in pushed_out(preempted):
            self.totals.num_preemptions += 1
            self.live[group.request.request_id].num_preemptions += 1
        for entry in preempted:
            seq, num_stored = entry.seq, entry.num_stored_tokens
            self.gaps.on_pause(seq)
            if not entry.is_swap and num_stored > self._high_water.get(seq.seq_id, 0):
                self._high_water[seq.seq_id] = num_stored

    def _on_admitted(self, admission: Admission, now: Ns) -> None:
        seq = admission.seq
        log = self.live[seq.request.request_id]
        if log.first_scheduled_ns == NEVER:
            log.first_scheduled_ns = now
        if self._splits_samples and seq.request.sampling.n > 1:
            self._on_sample(log, seq)
        if not admission.is_resumed:
            log.prefix_hit_tokens += admission.num_hit_tokens
            self.totals.prefix_cache_hits += admission.num_hit_tokens
            if self._is_caching:
                self.totals.prefix_cache_queries += seq.prompt_len

    def _on_sample(self, log: RequestLog, seq: Sequence) -> None:
        """A sample gets a table of its own, beside those of its siblings."""
        if log.sequences is None:
            log.sequences = []
            self._num_forked += 1
        if seq not in log.sequences:
            log.sequences.append(seq)

    def _on_chunks(self, plan: StepPlan) -> None:
        """What was stored before a preemption is computed again; kept with its plan until that is under way."""
        recomputed = self._recomputed
        for chunk in plan.prefills:
            stored_before = self._high_water.get(chunk.seq.seq_id, 0)
            again = min(chunk.start + chunk.num_tokens, stored_before) - chunk.start
            if again > 0:
                recomputed.setdefault(plan.step, []).append((chunk.seq.request.request_id, again))
                self._recompute(chunk.seq.request.request_id, again)
        while len(recomputed) > MOST_PLANNED:
            del recomputed[next(iter(recomputed))]

    def _recompute(self, request_id: str, num_tokens: int) -> None:
        self.totals.num_recomputed_tokens += num_tokens
        self.live[request_id].num_recomputed_tokens += num_tokens

    def _on_release(self, seq: Sequence, num_slots: int) -> None:
        """A table goes; it only ever grew, so its size is its peak."""
        log = self.live.get(seq.request.request_id)
        num_blocks = -(-num_slots // self._block_size)
        if log is not None and log.sequences is None and num_blocks > log.peak_blocks:
            log.peak_blocks = num_blocks

    def _on_forked_growth(self, plan: StepPlan) -> None:
        """Samples of a request share blocks: count the distinct ones."""
        block_table = self.scheduler.allocator.block_table
        admitted = [admission.seq for admission in plan.admitted]
        for request_id in dict.fromkeys(seq.request.request_id for seq in (*plan.grown, *plan.resumed, *admitted)):
            log = self.live[request_id]
            if log.sequences is not None:
                on_gpu = [seq.seq_id for seq in log.sequences if seq.status is Status.RUNNING]
                held = {block_id for seq_id in on_gpu for block_id in block_table(seq_id)}
                log.peak_blocks = max(log.peak_blocks, len(held))

    def on_horizon(self) -> None:
        """A step that would end after the horizon does not happen: nothing is pushed out, computed or copied."""
        for plan, *_ in self._planned:
            for request_id, num_tokens in self._recomputed.get(plan.step, ()):
                if request_id in self.live:
                    self._recompute(request_id, -num_tokens)
            self.totals.num_refused_swaps -= _num_refused(plan.preempted)
            for group in pushed_out(plan.preempted):
                # In asynchronous scheduling a victim may have ended meanwhile, with the step before.
                if (log := self.live.get(group.request.request_id)) is not None:
                    self.totals.num_preemptions -= 1
                    log.num_preemptions -= 1
            if plan.copies:
                self._on_copies(plan, -1)

    def _on_copies(self, plan: StepPlan, sign: int = 1) -> None:
        """Count a plan's copies for those who write, or take them back with `sign` -1."""
        copied = {copy.dst for copy in plan.copies}
        for seq in dict.fromkeys((*plan.grown, *plan.resumed)):
            num_copied = len(copied.intersection(self.scheduler.allocator.block_table(seq.seq_id)))
            if num_copied:
                self.live[seq.request.request_id].num_cow_copies += sign * num_copied

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        """The step is over and its tokens are out."""
        planned = self._planned.popleft()
        while planned[0] is not plan:
            planned = self._planned.popleft()
        num_emitted, num_regular = outcome.num_emitted_tokens, NO_TICK
        if outcome[1:] != _NO_EVENTS:
            num_regular = self.gaps.on_step(plan, outcome, end_ns)
            self._on_events(outcome, end_ns)
        elif plan.is_decode_tick:
            num_regular = self.gaps.on_tick(num_emitted, plan.skipped, end_ns)
        applied = self._applied
        applied.append((start_ns, end_ns, num_emitted, num_regular, planned))
        if self.ledger.dates_growth:
            self.ledger.on_step(end_ns - start_ns, plan.num_waiting > 0)
        if len(applied) >= CHUNK_ROWS:
            self.flush()

    def _on_events(self, outcome: StepOutcome, end_ns: Ns) -> None:
        """Sequences that began to emit, forked or ended with this step."""
        self.ledger.on_outcome(outcome)
        live = self.live
        for fork in outcome.forks:
            self._on_fork(fork.parent, fork.child)
        for seq in outcome.started + outcome.delivered:
            log = live[seq.request.request_id]
            if log.first_token_ns == NEVER:
                log.first_token_ns = end_ns
        for seq in outcome.ended + outcome.pruned:
            self._on_sequence_end(seq)
        for request_id in outcome.finished_requests:
            self._end(live.pop(request_id), FINISHED, "", end_ns)

    def _on_fork(self, parent: Sequence, child: Sequence) -> None:
        log = self.live[parent.request.request_id]
        if log.sequences is None:
            log.sequences = [parent]
            self._num_forked += 1
            log.peak_blocks = max(log.peak_blocks, self._num_blocks(parent.num_computed_tokens))
        log.sequences.append(child)
        if child.request.sampling.beam_width:
            # A beam that forks anew, after a recompute, has emitted tokens of its own since.
            self._inherited.setdefault(child.seq_id, child.num_output_tokens)

    def _num_emitted_by(self, seq: Sequence) -> int:
        """Tokens that the sequence emitted itself."""
        return seq.num_output_tokens - (self._inherited.pop(seq.seq_id, 0) if self._inherited else 0)

    def _note_peak(self, seq: Sequence, log: RequestLog) -> None:
        """A sequence that the run leaves unfinished holds its blocks still."""
        allocator = self.scheduler.allocator
        if log.sequences is None and allocator.has_table(seq.seq_id):
            log.peak_blocks = max(log.peak_blocks, self._num_blocks(allocator.num_slots(seq.seq_id)))

    def _num_blocks(self, num_slots: int) -> int:
        """Distinct blocks of a table with `num_slots` slots."""
        num_blocks = -(-num_slots // self._block_size)
        return min(num_blocks, self._window_blocks) if self._window_blocks else num_blocks

    def _on_sequence_end(self, seq: Sequence) -> None:
        log = self.live[seq.request.request_id]
        log.num_output_tokens += self._num_emitted_by(seq)
        if seq.num_output_tokens > log.longest_output:
            log.longest_output = seq.num_output_tokens
        # A sample of one token ends as the others are forked, and never was among them.
        if log.sequences is not None and seq in log.sequences:
            log.sequences.remove(seq)
        self._high_water.pop(seq.seq_id, None)

    def _end(self, log: RequestLog, status: Status, reason: str, now: Ns) -> None:
        log.status = status
        log.reason = reason
        log.finish_ns = now
        if log.sequences is not None:
            log.sequences = None
            self._num_forked -= 1
        self.ended.add(log, status)

    def _check(self, plan: StepPlan, parts: Parts) -> None:
        self.scheduler.allocator.audit()
        check_parts(parts, self.capacity, plan.step)
        counted = recount(self.scheduler)
        if parts[:3] != counted:
            raise LawViolation(f"law 12: step {plan.step}: incremental ledger {parts[:3]}, recounted {counted}")

    def flush(self) -> None:
        """Turn the pending steps into columns, and fold these into the integrals and counters."""
        if not self._applied:
            return
        starts, ends, num_emitted, num_regular, planned = zip(*self._applied, strict=True)
        self._applied.clear()
        self.totals.num_emitted_tokens += sum(num_emitted)
        emitting = (end_ns for end_ns, num in zip(reversed(ends), reversed(num_emitted), strict=True) if num)
        self.totals.last_token_ns = next(emitting, self.totals.last_token_ns)
        times = StepTimes(_times(starts), _times(ends), int_array(num_regular))
        self.gaps.add_ticks(times)
        chunk = self._step_chunk(times, *zip(*planned, strict=True))
        if self.keeps_steps:
            self.steps.add_chunk(chunk)
        self._integrate(chunk)

    def _step_chunk(
        self,
        times: StepTimes,
        plans: tuple[StepPlan, ...],
        usages: tuple[Usage, ...],
        stored: tuple[int, ...],
        over: tuple[int, ...],
        parts: tuple[Parts | None, ...],
    ) -> IntArray:
        """The columns of `STEP_FIELDS`."""
        # Transposed: each field of these holds the column of that field.
        plan: Any = StepPlan._make(zip(*plans, strict=True))
        shape: Any = StepShape._make(zip(*plan.shape, strict=True))
        usage: Any = Usage._make(map(_column, zip(*usages, strict=True)))
        evicted_before, self._num_evicted = self._num_evicted, usages[-1].num_evicted
        stored_states = _column(stored) - _column(plan.num_superfluous)
        columns: dict[str, IntArray] = {
            "start_ns": times.starts,
            "duration_ns": times.ends - times.starts,
            "num_running": _column(plan.num_running),
            "num_waiting": _column(plan.num_waiting),
            "num_swapped": _column(plan.num_swapped),
            "num_prefill_tokens": _sums(shape.prefills, lambda prefills: sum([n for _, n in prefills])),
            "num_decode_tokens": _column(shape.num_decodes),
            "num_preempted": _sums(plan.preempted, lambda preempted: len(pushed_out(preempted))),
            "used_blocks": usage.num_used,
            **dict(zip(Parts._fields, plain_parts(stored_states, _column(over), usage, self._block_size), strict=True)),
            "num_copies": _column(shape.num_copies),
            "swapped_out_blocks": _column(shape.num_swapped_out_blocks),
            "swapped_in_blocks": _column(shape.num_swapped_in_blocks),
            "prefix_hit_tokens": _sums(plan.admitted, lambda admitted: sum([one.num_hit_tokens for one in admitted])),
            "evicted_blocks": np.diff(usage.num_evicted, prepend=evicted_before),
            "num_sequences": _column(plan.num_sequences),
            "num_table_updates": _column(shape.num_table_updates),
            "num_table_rows": _column(shape.num_table_rows),
            "num_table_entries": _column(shape.num_table_entries),
            "allocated_slots": usage.num_used * self._block_size,
            "largest_hole": usage.largest_hole,
            "logical_blocks": usage.num_logical,
        }
        self._note_limits(plan.head_wait, np.where(columns["num_waiting"] > 0, columns["duration_ns"], 0))
        chunk = np.column_stack([columns[name] for name in STEP_FIELDS])
        first = STEP_COLUMN[Parts._fields[0]]
        for row, odd in enumerate(parts):
            if odd is not None:
                chunk[row, first : first + len(odd)] = odd
        return chunk

    def _note_limits(self, head_waits: tuple[str, ...], saturated: IntArray) -> None:
        """How long the head of the line was held back by something else than memory."""
        limited = self.integrals.limited_ns
        for limit in sorted(set(head_waits) - MEMORY_WAITS):
            held = np.array([one == limit for one in head_waits])
            limited[limit] = limited.get(limit, 0) + int(saturated[held].sum())

    def _integrate(self, chunk: IntArray) -> None:
        self._check_chunk(chunk)

        def column(name: str) -> IntArray:
            values: IntArray = chunk[:, STEP_COLUMN[name]]
            return values

        sums, totals = self.integrals, self.totals
        duration = column("duration_ns")
        saturated = np.where(column("num_waiting") > 0, duration, 0)
        sums.elapsed_ns += int(duration.sum())
        sums.saturated_ns += int(saturated.sum())
        first = STEP_COLUMN["token_states"]
        for index in range(6):
            sums.parts[index] += _product(duration, chunk[:, first + index])
            sums.saturated_parts[index] += _product(saturated, chunk[:, first + index])
        sums.running += _product(duration, column("num_running"))
        sums.sequences += _product(duration, column("num_sequences"))
        sums.waiting += _product(duration, column("num_waiting"))
        sums.allocated_slots += _product(duration, column("allocated_slots"))
        sums.logical_blocks += _product(duration, column("logical_blocks"))
        sums.used_blocks += _product(duration, column("used_blocks"))
        totals.num_steps += len(chunk)
        totals.running_peak = max(totals.running_peak, int(column("num_running").max()))
        totals.num_cow_copies += int(column("num_copies").sum())
        totals.num_swapped_out_blocks += int(column("swapped_out_blocks").sum())
        totals.num_swapped_in_blocks += int(column("swapped_in_blocks").sum())
        totals.num_evicted_blocks += int(column("evicted_blocks").sum())
        totals.block_table_updates += int(column("num_table_updates").sum())
        totals.peak_table_entries = max(totals.peak_table_entries, int(column("num_table_entries").max()))

    def _check_chunk(self, chunk: IntArray) -> None:
        """Law 12 for every step of a chunk. Raises LawViolation."""
        first = STEP_COLUMN["token_states"]
        parts = chunk[:, first : first + 6]
        broken = (parts.min(axis=1) < 0) | (parts.sum(axis=1) != self.capacity)
        if broken.any():
            row = int(broken.argmax())
            check_parts(Parts(*map(int, parts[row])), self.capacity, self.totals.num_steps + row)

    def close(self, not_arrived: Iterable[Request] = ()) -> None:
        """The run is over: list what it left unfinished, fold what is pending, and apply hindsight."""
        self._close_requests(not_arrived)
        self.flush()
        self._apply_hindsight()

    def _close_requests(self, not_arrived: Iterable[Request]) -> None:
        rank = {Status.WAITING: 0, Status.SWAPPED: 1, Status.RUNNING: 2}
        for seq in self.scheduler.live_sequences():
            log = self.live[seq.request.request_id]
            log.num_output_tokens += self._num_emitted_by(seq)
            self._note_peak(seq, log)
            group = seq.group
            if group is not None and seq is group.seqs[0]:
                # Samples that wait for their parent's prompt, after a recompute, have emitted tokens.
                log.num_output_tokens += sum(map(self._num_emitted_by, group.unforked))
            if rank[seq.status] > rank[log.status]:
                log.status = seq.status
        for log in self.live.values():
            self.ended.add(log, log.status)
        self.live.clear()
        for request in not_arrived:
            self.ended.add(RequestLog(request, self._num_submitted), NOT_ARRIVED)
            self._num_submitted += 1

    def _apply_hindsight(self) -> None:
        for correction in self.ledger.corrections:
            amount = correction.num_slots
            sums = (self.integrals.parts, self.integrals.saturated_parts)
            for parts, span in zip(sums, self.ledger.spans_of(correction), strict=True):
                parts[1] -= amount * span
                parts[2] += amount * span
        if self.keeps_steps and self.ledger.corrections:
            matrix = self.steps.matrix()
            reserved, internal = STEP_COLUMN["reserved"], STEP_COLUMN["internal_frag"]
            for correction in self.ledger.corrections:
                matrix[correction.first : correction.last, reserved] -= correction.num_slots
                matrix[correction.first : correction.last, internal] += correction.num_slots
            # A run that is cut off in its first step has no rows.
            if self.check and len(matrix) and matrix[:, reserved].min() < 0:
                raise LawViolation(f"law 12: reserved slots are negative at step {int(matrix[:, reserved].argmin())}")


class Gaps:
    """Inter-token gaps as (value in ns, how often)."""

    def __init__(self) -> None:
        self.table = RowTable(("gap_ns", "count"), narrow=True)
        self._last_tick_ns = NEVER
        self._counted_until_ns = NEVER
        """The last tick whose regular gaps are in the table."""
        self._fresh: dict[int, Ns] = {}
        """Decoding sequences whose next token follows an emission that was not the last tick."""
        self._paused: dict[int, Ns] = {}
        """Preempted sequences that had emitted: the time of their last token."""

    def on_pause(self, seq: Sequence) -> None:
        """A preempted sequence keeps the time of its last token; one that had none, or is still paused, has no news."""
        last = self._fresh.pop(seq.seq_id, None)
        if seq.num_output_tokens > 0 and seq.seq_id not in self._paused:
            self._paused[seq.seq_id] = self._last_tick_ns if last is None else last

    def on_resume(self, seq: Sequence) -> None:
        """A swapped sequence decodes again without a prefill."""
        paused_ns = self._paused.pop(seq.seq_id, None)
        if paused_ns is not None:
            self._fresh[seq.seq_id] = paused_ns

    def on_stop(self, seq: Sequence) -> None:
        self._fresh.pop(seq.seq_id, None)
        self._paused.pop(seq.seq_id, None)

    def on_skipped(self, skipped: tuple[Sequence, ...]) -> None:
        """They go on from their last token; in asynchronous scheduling the first one may still be in flight."""
        for seq in skipped:
            if seq.num_output_tokens > 0 and seq.seq_id not in self._paused:
                self._fresh.setdefault(seq.seq_id, self._last_tick_ns)

    def on_step(self, plan: StepPlan, outcome: StepOutcome, end_ns: Ns) -> int:
        """A step with events; returns its regular tokens, as `on_tick` does, or `NO_TICK`."""
        for seq in outcome.delivered:
            self._on_delivered(seq, end_ns)
        num_regular, held_back = NO_TICK, outcome.held_back
        if held_back:
            self.on_skipped(held_back)
        if plan.is_decode_tick:
            num_decoded = outcome.num_emitted_tokens - len(outcome.started) - len(outcome.delivered)
            num_regular = self.on_tick(num_decoded if num_decoded > 0 else 0, plan.skipped + held_back, end_ns)
        if outcome.started:
            self._on_started(outcome, end_ns)
        for seq in outcome.pruned:
            self.on_stop(seq)
        return num_regular

    def on_tick(self, num_decoded: int, skipped: tuple[Sequence, ...], end_ns: Ns) -> int:
        """`num_decoded` tokens came from sequences that decoded in this step, all running ones but the skipped.

        Returns how many of them had their last token at the decode tick before: `add_ticks` counts their gaps.
        """
        self._last_tick_ns = end_ns
        if not self._fresh:
            return num_decoded
        left_out = [seq.seq_id for seq in skipped]
        kept = {seq_id: self._fresh.pop(seq_id) for seq_id in left_out if seq_id in self._fresh}
        self.table.rows += [(end_ns - start_ns, 1) for start_ns in self._fresh.values()]
        num_decoded -= len(self._fresh)
        self._fresh = kept
        return num_decoded if num_decoded > 0 else 0

    def add_ticks(self, times: StepTimes) -> None:
        """Steps in a row: a regular token's gap is the time between two decode ticks."""
        is_tick = times.num_regular != NO_TICK
        ends, counts = times.ends[is_tick], times.num_regular[is_tick]
        if len(ends):
            gaps = np.diff(ends, prepend=self._counted_until_ns)
            self._counted_until_ns = int(ends[-1])
            if counts.any():
                self.table.add_chunk(np.column_stack([gaps, counts])[counts > 0])
        self.table.take_chunk()

    def _on_delivered(self, seq: Sequence, end_ns: Ns) -> None:
        """The token in flight reaches a sequence that was preempted meanwhile."""
        paused_ns = self._paused.get(seq.seq_id)
        if paused_ns is not None:
            self.table.rows.append((end_ns - paused_ns, 1))
        self._paused[seq.seq_id] = end_ns

    def _on_started(self, outcome: StepOutcome, end_ns: Ns) -> None:
        for seq in outcome.started:
            paused_ns = self._paused.pop(seq.seq_id, None)
            if paused_ns is not None:
                self.table.rows.append((end_ns - paused_ns, 1))
            self._fresh[seq.seq_id] = end_ns
        for fork in outcome.forks:
            if fork.parent.seq_id in self._fresh:
                self._fresh[fork.child.seq_id] = end_ns
        for seq in outcome.ended:
            self.on_stop(seq)


STATUSES = (
    Status.FINISHED.value,
    Status.REJECTED.value,
    Status.ABORTED.value,
    Status.RUNNING.value,
    Status.WAITING.value,
    Status.SWAPPED.value,
    NOT_ARRIVED,
)
STATUS_CODE = {status: code for code, status in enumerate(STATUSES)}


class EndedRequests:
    """Finished, rejected and aborted requests as columns of integers, with their texts beside them.

    Without `keep_rows` only what the summary needs is kept: a few dozen bytes a request.
    """

    SUMMARY_FIELDS = (
        "status",
        "arrival_ns",
        "prompt_tokens",
        "first_token_ns",
        "finish_ns",
        "priority",
        "longest_output",
    )
    FIELDS = (
        *SUMMARY_FIELDS,
        "index",
        "output_tokens",
        "first_scheduled_ns",
        "num_preemptions",
        "recomputed_tokens",
        "prefix_hit_tokens",
        "num_cow_copies",
        "peak_blocks",
    )

    def __init__(self, *, keep_rows: bool) -> None:
        self.keep_rows = keep_rows
        self.table = RowTable(self.FIELDS if keep_rows else self.SUMMARY_FIELDS, narrow=True)
        self.request_ids: list[str] = []
        self.reasons: list[str] = []
        self.count: dict[str, int] = dict.fromkeys(STATUSES, 0)
        self.num_cut = 0
        """Finished requests that met `max_model_len` before they had said all they had to say."""
        self.first_rejected: tuple[str, str] | None = None
        """The first rejected request and the reason: kept without rows too, for the warning."""

    def add(self, log: RequestLog, status: str) -> None:
        """A request is over, or the run is."""
        request = log.request
        self.count[status] += 1
        if status == FINISHED:
            self.num_cut += log.longest_output < request.longest_output_len
        elif status == Status.REJECTED and self.first_rejected is None:
            self.first_rejected = (request.request_id, log.reason)
        row = (
            STATUS_CODE[status],
            request.arrival_ns,
            request.prompt_len,
            log.first_token_ns,
            log.finish_ns,
            request.priority,
            log.longest_output,
            # Beyond the fields of the summary.
            log.index,
            log.num_output_tokens,
            log.first_scheduled_ns,
            log.num_preemptions,
            log.num_recomputed_tokens,
            log.prefix_hit_tokens,
            log.num_cow_copies,
            log.peak_blocks,
        )
        if self.keep_rows:
            self.request_ids.append(request.request_id)
            self.reasons.append(log.reason)
            self.table.rows.append(row)
        else:
            self.table.rows.append(row[: len(self.SUMMARY_FIELDS)])
        if len(self.table.rows) >= CHUNK_ROWS:
            self.table.take_chunk()
