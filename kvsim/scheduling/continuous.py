"""Iteration-level batching: what every continuous engine has in common.

A step is planned in phases: continue the running sequences, resume the swapped ones, admit the waiting ones.
`num_computed_tokens` catches up with the known tokens: one rule for prompts, chunks, prefix hits and recompute.
The running loop has one body; it is applied to the sequences that are due. In the plain loop everyone is due at
every step; with the calendar a decoding sequence is due when it needs a block (or fills one, if that is when it is
registered), and is counted in bulk otherwise.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import Any

from kvsim.memory.interface import BlockCopy, stands_for
from kvsim.request import RUNNING, Group, Sequence, Status
from kvsim.scheduling import policies
from kvsim.scheduling.admission import RequestAdmission
from kvsim.scheduling.builder import NOBODY_WAITS, UNLIMITED, PendingStep, PlanBuilder, quiet_plan
from kvsim.scheduling.calendar import by_rank, merged
from kvsim.scheduling.engine_state import set_status
from kvsim.scheduling.plan import Preemption, PrefillChunk, StepPlan, TableUpdate
from kvsim.types import KvsimError, Ns, OutOfBlocks

_seq_id = attrgetter("seq_id")


class LivelockError(KvsimError):
    """Requests are preempted again and again and nobody emits a token."""


class ContinuousScheduler(RequestAdmission):
    """Plans iterations; see `EngineState` for the keywords."""

    def schedule(self, now: Ns) -> StepPlan:
        crossing = self._quiet_crossing()
        if crossing is not None:
            return self._schedule_quiet(crossing)
        step = self._begin_step()
        self._compose(step)
        return self._end_step(step)

    def _quiet_crossing(self) -> Seq[Sequence] | None:
        """Who needs a block, if only members of the calendar run, nobody is let in, and blocks are left; else None."""
        if self.stepwise or self.swapped or not self._is_plain or self._forked:
            return None
        calendar = self.calendar
        if not 0 < calendar.num_seqs <= self.max_num_batched_tokens or (self.waiting and self._refusal is None):
            return None
        crossing = calendar.crossing()
        num_left = self.allocator.num_free_blocks - len(crossing)
        is_quiet = num_left >= 0 and (not self.waiting or self._is_refused_again(num_left))
        return crossing if is_quiet else None

    def _is_refused_again(self, num_free_blocks: int) -> bool:
        """The head of the line is the one that was refused, and there is no more room for it than there was."""
        refusal = self._refusal
        if refusal is None or refusal.group is not self.waiting.head():
            return False
        return num_free_blocks <= refusal.num_free_blocks and self.calendar.num_seqs < self.max_num_batched_tokens

    def _schedule_quiet(self, crossing: Seq[Sequence]) -> StepPlan:
        """All phases at once, for a step in which every running sequence decodes and goes on."""
        calendar = self.calendar
        tick, num_seqs = calendar.tick, calendar.num_seqs
        num_grown = self._grow_crossing()
        assert num_grown == len(crossing), "every member of the calendar crosses into one new block"
        self.num_table_entries += num_grown
        self._note_quiet(tick)
        calendar.advance()
        self._in_flight.append(PendingStep(tick, num_seqs))
        self.num_steps += 1
        self.num_fast_steps += 1
        return quiet_plan(
            self.num_steps - 1,
            tick,
            num_seqs,
            calendar.context_tokens,
            tuple(crossing),
            self.num_table_entries,
            self._count_requests(),
            self._refusal.head if self._refusal and self.waiting else NOBODY_WAITS,
        )

    def _note_quiet(self, tick: int) -> None:
        """Blocks were handed out in a quiet step: what an engine does beside."""

    def _begin_step(self) -> PlanBuilder:
        threshold = self.long_prefill_token_threshold
        if not threshold or len(self.running) + len(self.waiting) + len(self.swapped) <= 1:
            threshold = UNLIMITED
        self._refusal = None
        step = PlanBuilder(self.num_steps, self.calendar.tick, self.max_num_batched_tokens, threshold)
        for seq in self._forked:
            # Who ended as soon as it was there needs no row.
            if seq.status is RUNNING:
                step.note_row(seq, self._count_entries((seq,)))
        self._forked.clear()
        self.num_steps += 1
        return step

    def _compose(self, step: PlanBuilder) -> None:
        self._continue_running(step)
        if not step.preempted:
            if self.swapped:
                self._resume_swapped(step)
            if self.waiting:
                self._admit_waiting(step)

    def _continue_running(self, step: PlanBuilder) -> None:
        for seq in self._due(step):
            if seq.status is not RUNNING:
                continue
            if seq.join_tick >= 0:
                self._continue_member(seq, step)
            else:
                self._continue_one(seq, step)

    def _due(self, step: PlanBuilder) -> Seq[Sequence]:
        """The running sequences that have something (left) to do in this step, in running order."""
        calendar = self.calendar
        if calendar.num_seqs and not self._is_uniform(step):
            self._dissolve_calendar()
        step.budget -= calendar.num_seqs
        step.charges_members = True
        if self.stepwise:
            members = () if self.reservation else self._due_members()
            return merged(self.stepwise, members)
        self.num_fast_steps += 1
        if self.reservation:
            return ()
        return self._continue_members(step) if self._grows_plainly else self._due_members()[:]

    def _due_members(self) -> Seq[Sequence]:
        """Members of the calendar that have something to do in this step."""
        return self.calendar.crossing()

    def _continue_members(self, step: PlanBuilder) -> Seq[Sequence]:
        """`_continue_member` for all who are due, as long as there are blocks; returns those who are left."""
        crossing = self.calendar.crossing()
        return crossing[self._cross_many(crossing, step) :]

    def _is_uniform(self, step: PlanBuilder) -> bool:
        """Every member of the calendar finds a token of budget left when its turn comes."""
        rest = step.budget - self.calendar.num_seqs
        if rest < 0:
            return False
        for seq in self.stepwise:
            rest -= min(self._num_wanted(seq), step.threshold)
            if rest < 0:
                last = next(reversed(self.running.values()))
                return last.seqs[-1] is seq
        return True

    def _dissolve_calendar(self) -> None:
        """Let every member be due: the plain loop runs for this step."""
        for seq in self.calendar.members():
            self._leave_calendar(seq)
            self._settle(seq)
            insort(self.stepwise, seq, key=by_rank)

    def _continue_member(self, seq: Sequence, step: PlanBuilder) -> None:
        """A decoding sequence of the calendar needs a block."""
        num_tokens = seq.join_offset + step.tick + 1
        self._grow(seq, num_tokens - self.allocator.num_tokens(seq.seq_id), step)

    def _cross_many(self, crossing: Seq[Sequence], step: PlanBuilder) -> int:
        """Give a block to each who crosses, as long as there are blocks; returns to how many."""
        num_new = self._grow_crossing()
        step.grown += crossing[:num_new]
        step.num_crossed = num_new
        self.num_table_entries += num_new
        step.num_new_entries += num_new
        step.num_new_rows += num_new
        return num_new

    def _grow_crossing(self) -> int:
        """Each who crosses at this tick stores a token in a new block; returns how many there were blocks for."""
        seq_ids = self.calendar.crossing_ids()
        allocator: Any = self.allocator
        return allocator.grow_each(seq_ids) if seq_ids else 0

    def _fill_members(self, members: Seq[Sequence]) -> None:
        """Each fills its last block, which is findable from here on."""
        if members:
            allocator: Any = self.allocator
            allocator.fill_each(list(map(_seq_id, members)))

    def _continue_one(self, seq: Sequence, step: PlanBuilder) -> None:
        """A sequence computes its next token, or the next chunk of its prefill."""
        wanted = self._num_wanted(seq)
        if wanted <= 0:
            return
        num_tokens = min(wanted, step.threshold, step.budget)
        if num_tokens <= 0:
            if seq.is_decoding:
                step.skipped.append(seq)
            return
        start = seq.num_computed_tokens
        if not self._grow(seq, num_tokens, step):
            return
        self._note_planned(seq, start + num_tokens)
        step.budget -= num_tokens
        if seq.is_decoding:
            step.decodes.append(seq)
        else:
            is_last = start + num_tokens == seq.prompt_len + seq.num_output_tokens
            step.prefills.append(PrefillChunk(seq, start, num_tokens, is_last))

    def _grow(self, seq: Sequence, num_tokens: int, step: PlanBuilder) -> bool:
        """Give a running sequence its slots, preempting others or itself while blocks are short."""
        allocator = self.allocator
        num_blocks = allocator.num_slots(seq.seq_id) // allocator.block_size
        while True:
            try:
                copies = allocator.append_slots(seq.seq_id, num_tokens)
                break
            except OutOfBlocks:
                if not self._preempt_for(seq, step):
                    return False
        num_new = allocator.num_slots(seq.seq_id) // allocator.block_size - num_blocks
        if num_new or copies:
            step.copies.extend(copies)
            self._note_growth(seq, num_new, len(copies), step)
        return True

    def _preempt_for(self, seq: Sequence, step: PlanBuilder) -> bool:
        """Preempt one victim; False if that was the sequence's own group."""
        if self.victim not in policies.BLIND_VICTIMS:
            self.calendar.settle_all()
        victim = self.victim(self.running.values())
        self._preempt(victim, step, had_turn=any(self._had_turn(one, seq, step) for one in victim.seqs))
        return victim is not seq.group

    @staticmethod
    def _had_turn(seq: Sequence, now: Sequence, step: PlanBuilder) -> bool:
        """It was given its tokens of this step, in which `now` has its turn: whoever comes before, in the calendar."""
        if seq.join_tick >= 0:
            return step.charges_members and seq.rank < now.rank
        return seq in step.decodes or any(chunk.seq is seq for chunk in step.prefills)

    def _note_growth(self, seq: Sequence, num_new: int, num_copies: int, step: PlanBuilder) -> None:
        self.num_table_entries += num_new
        is_old = step.note_growth(seq, num_new, num_copies)
        if self.detail and is_old:
            num_changed = num_new + num_copies
            table = self.allocator.block_table(seq.seq_id)
            start = len(table) - num_changed
            step.updates.append(TableUpdate(seq, start, tuple(table[start:])))

    def _preempt(self, group: Group, step: PlanBuilder, *, had_turn: bool) -> None:
        """Take a running group's blocks away; it goes to the front of the line, or to the host."""
        for seq in group.seqs:
            if seq.join_tick >= 0 and step.charges_members:
                step.budget += 1
            self._settle(seq)
        copies = self._drop_copies(group, step) if step.copies else ()
        self._stop_running(group)
        can_leave = bool(self.wants_swap(group, self.allocator)) and (not had_turn or self._retract(group, copies))
        is_swap = can_leave and self._swap_out(group, step)
        for seq in group.seqs:
            step.preempted.append(Preemption(seq, is_swap, seq.num_computed_tokens, can_leave and not is_swap))
            step.drop(seq)
            seq.num_preemptions += 1
            if not is_swap:
                self._reset(seq)
        group.was_preempted = True
        self._num_fruitless += 1
        self._check_progress(group)
        if is_swap:
            set_status(group.seqs, Status.SWAPPED)
            self.swapped.add_front(group)
        else:
            set_status(group.seqs, Status.WAITING)
            group.seqs, group.unforked = group.members[:1], group.members[1:]
            self.waiting.add_front(group)

    def _drop_copies(self, group: Group, step: PlanBuilder) -> Seq[BlockCopy]:
        """Nobody reads what was to be copied for a victim; its blocks may be handed out again in this very step."""
        named = {block_id for seq in group.seqs for block_id in self.allocator.block_table(seq.seq_id)}
        dropped = [copy for copy in step.copies if copy.dst in named]
        step.copies = [copy for copy in step.copies if copy.dst not in named]
        return dropped

    def _reset(self, seq: Sequence) -> None:
        """A victim of recompute keeps its tokens and loses everything else."""
        self._free(seq)
        seq.num_computed_tokens = 0
        seq.num_placeholders = 0
        seq.is_decoding = False

    def _swap_out(self, group: Group, step: PlanBuilder) -> bool:
        """Move a victim to the host; False if there is no room."""
        allocator = self.allocator
        num_entries = self._count_entries(group.seqs)
        moves = allocator.swap_out([seq.seq_id for seq in group.seqs])
        if moves is None:
            return False
        self.num_table_entries -= num_entries
        step.swap_out.extend(moves)
        return True

    def _retract(self, group: Group, copies: Seq[BlockCopy]) -> bool:
        """Whoever had its turn holds slots of this step, which are no stored tokens; False if they cannot go back.

        A member of the calendar may hold none of which the allocator was told: the answer is the same.
        """
        allocator: Any = self.allocator
        leaves_ring = getattr(allocator, "upstream_faults", False) and getattr(allocator, "window_blocks", 0) > 0
        if leaves_ring or not stands_for(allocator, "retract", ("append_slots",)):
            return False
        surplus = {seq: allocator.num_tokens(seq.seq_id) - seq.num_computed_tokens for seq in group.seqs}
        num_entries = self._count_entries(group.seqs)
        for seq, num_tokens in surplus.items():
            if num_tokens:
                allocator.retract(seq.seq_id, num_tokens, copies)
        self.num_table_entries -= num_entries - self._count_entries(group.seqs)
        return True

    def _check_progress(self, group: Group) -> None:
        limit = 1000 + 10 * len(self.groups)
        if self.upstream_faults or self._num_fruitless <= limit:
            return
        tokens, allocator = group.num_known_tokens, self.allocator
        raise LivelockError(
            f"livelock: {self._num_fruitless} preemptions in a row and not one token emitted; the last victim is "
            f"request {group.request_id!r}, which needs {-(-tokens // allocator.block_size)} blocks for {tokens} "
            f"tokens, the pool has {allocator.num_blocks}: enlarge the pool, or lower max_num_seqs"
        )

    def _resume_swapped(self, step: PlanBuilder) -> None:
        """Bring swapped groups back, first come first, while they fit with room for their next tokens."""
        while self.swapped and step.budget > 0:
            group = self.swapped.head()
            if self.num_seats + group.num_seats > self.max_num_seqs:
                step.head_wait = "sequence limit"
                return
            # Alone it goes on even where its sequences have to take turns.
            if self.running and len(group.seqs) > step.budget:
                step.head_wait = "token budget"
                return
            if not self._fits_back(group):
                step.waits_for_memory = True
                step.head_wait = "blocks"
                return
            self.swapped.pop_head()
            step.swap_in.extend(self.allocator.swap_in([seq.seq_id for seq in group.seqs]) or ())
            self._start_running(group)
            self.num_table_entries += self._count_entries(group.seqs)
            for seq in group.seqs:
                step.note_row(seq, self._count_entries((seq,)))
            step.resumed.extend(group.seqs)
            for seq in group.seqs:
                self._continue_one(seq, step)

    def _end_step(self, step: PlanBuilder) -> StepPlan:
        """Count the step's tokens as stored, and write the plan down."""
        calendar = self.calendar
        counts = self._count_requests()
        if step.is_decode_tick and calendar.num_seqs and step.is_quiet and not self.detail and self.uses_calendar:
            step.num_bulk = calendar.num_seqs
            calendar.advance()
            self._in_flight.append(step)
            return quiet_plan(
                step.step,
                step.tick,
                step.num_bulk,
                calendar.context_tokens,
                tuple(step.grown),
                self.num_table_entries,
                counts,
                step.head,
            )
        has_entries = bool(step.prefills or step.decodes)
        context = self._count_stored(step) if has_entries else 0
        if step.is_decode_tick and (has_entries or calendar.num_seqs):
            step.num_bulk = calendar.num_seqs
            calendar.advance()
            context += calendar.context_tokens
        decodes = self._list_decodes(step) if self.detail or not self.uses_calendar else None
        updates = self._list_updates(step) if self.detail else ()
        if has_entries:
            self._note_step(step)
        if has_entries or step.num_bulk:
            self._in_flight.append(step)
        return step.build(
            context,
            self.num_table_entries,
            decodes,
            updates,
            counts,
        )

    def _count_stored(self, step: PlanBuilder) -> int:
        """The step's own entries have their tokens stored from here on; returns what its decodes attend to."""
        for chunk in step.prefills:
            chunk.seq.num_computed_tokens += chunk.num_tokens
        context = 0
        for seq in step.decodes:
            seq.num_computed_tokens += 1
            context += seq.num_computed_tokens
        return context

    def _note_step(self, step: PlanBuilder) -> None:
        """A step was planned and its tokens count as stored."""

    def _list_decodes(self, step: PlanBuilder) -> tuple[Sequence, ...]:
        if not step.num_bulk:
            return tuple(step.decodes)
        members = self.calendar.members()
        for seq in members:
            self.calendar.settle(seq)
        return tuple(merged(step.decodes, members))

    def _list_updates(self, step: PlanBuilder) -> tuple[TableUpdate, ...]:
        """Table entries that changed, in an order in which they can be applied: whole tables, then new tails.

        Who was forked or swapped in may have grown in the same step; the whole table has that tail already.
        """
        whole = [admission.seq for admission in step.admitted] + step.new_rows
        updates = [TableUpdate(seq, 0, tuple(self.allocator.block_table(seq.seq_id))) for seq in whole]
        return (*updates, *step.updates)
