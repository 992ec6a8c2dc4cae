"""The recorder: notes what plans and outcomes say happened. It derives nothing that a summary can derive later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from kvsim.metrics.columns import CHUNK_ROWS, RowTable
from kvsim.metrics.gaps import NO_TICK, Gaps
from kvsim.metrics.ledger import Clock, Ledger, Parts, check_parts, recount
from kvsim.metrics.requests import NEVER, NOT_ARRIVED, EndedRequests, RequestLog
from kvsim.metrics.steps import STEP_FIELDS, Planned, check_chunk, column_of, step_chunk, step_times
from kvsim.metrics.sums import Integrals, Totals
from kvsim.request import FINISHED, Request, Sequence, Status
from kvsim.scheduling.interface import Scheduler
from kvsim.scheduling.plan import Admission, Preemption, Rejection, StepOutcome, StepPlan, pushed_out
from kvsim.types import LawViolation, Ns

_NO_EVENTS = StepOutcome()[1:]

MOST_PLANNED = 2
"""Plans that are not applied yet: in asynchronous scheduling the one that runs, and the next."""

_Applied: TypeAlias = tuple[Ns, Ns, int, int, Planned]
"""A step that was applied: start, end, tokens emitted, and those of them that came one decode tick after another."""


def _num_refused(preempted: tuple[Preemption, ...]) -> int:
    """The groups that were to be swapped out and could not be."""
    return len(pushed_out(tuple([entry for entry in preempted if entry.was_refused])))


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
        self._planned: deque[Planned] = deque()
        """What was not applied yet: one plan, or two in asynchronous scheduling."""
        self._applied: list[_Applied] = []
        """Steps that are not in columns yet."""
        self._block_size = scheduler.allocator.block_size
        self._window_blocks = int(getattr(scheduler.allocator, "window_blocks", 0))
        """Distinct blocks of a table that goes round in a ring; 0 without a window."""

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
        stored = ledger.stored
        if self._window_blocks:
            # A table that goes round its window names its own blocks again: that is no sharing.
            stored, num_slots = ledger.in_windows(plan)
            usage = usage._replace(num_logical=num_slots // self._block_size)
        # Who shares a tail names its block again.
        may_be_odd = ledger.may_be_odd or usage.num_logical != usage.num_used
        parts = ledger.odd_parts(plan, usage) if may_be_odd else None
        self._planned.append((plan, usage, stored, ledger.over, parts))
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
        totals = self.totals
        totals.num_emitted_tokens += sum(num_emitted)
        emitting = (end_ns for end_ns, num in zip(reversed(ends), reversed(num_emitted), strict=True) if num)
        totals.last_token_ns = next(emitting, totals.last_token_ns)
        times = step_times(starts, ends, num_regular)
        self.gaps.add_ticks(times)
        num_evicted = totals.num_evicted_blocks
        chunk = step_chunk(times, planned, self._block_size, num_evicted, is_caching=self._is_caching)
        if self.keeps_steps:
            self.steps.add_chunk(chunk)
        check_chunk(chunk, self.capacity, totals.num_steps)
        self.integrals.add(chunk, [plan.head_wait for plan, _, _, _, _ in planned])
        totals.add(chunk)

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
        """What was reserved for those who ended early was never filled."""
        for correction in self.ledger.corrections:
            spans_ns = self.ledger.spans_of(correction)
            self.integrals.move_part("reserved", "internal_frag", correction.num_slots, spans_ns)
        if not self.keeps_steps or not self.ledger.corrections:
            return
        matrix = self.steps.matrix()
        reserved, internal = column_of(matrix, "reserved"), column_of(matrix, "internal_frag")
        for first, last, num_slots in self.ledger.corrections:
            reserved[first:last] -= num_slots
            internal[first:last] += num_slots
        # A run that is cut off in its first step has no rows.
        if self.check and len(matrix) and reserved.min() < 0:
            raise LawViolation(f"law 12: reserved slots are negative at step {int(reserved.argmin())}")
