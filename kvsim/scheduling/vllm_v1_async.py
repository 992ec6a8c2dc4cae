"""Asynchronous scheduling: step t + 1 is planned before the output of step t is known.

A thin difference over `vllm_v1`. Planning counts a token as sampled (a placeholder) that the step in flight will
deliver. A request whose last token is in flight is left out of the next plan, and keeps its blocks meanwhile; a stop
token is not foreseen and costs one superfluous step. A victim still gets the token in flight.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq

from kvsim.request import Sequence, Status
from kvsim.scheduling.builder import OutcomeBuilder, PendingStep, PlanBuilder
from kvsim.scheduling.calendar import by_rank
from kvsim.scheduling.continuous import ContinuousScheduler
from kvsim.scheduling.plan import StepPlan
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler


class VllmV1AsyncScheduler(VllmV1Scheduler):
    """Engine `vllm-v1-async`: call `schedule`, then `complete` with the plan before; every plan is completed once."""

    plans_ahead = True
    """The server plans a step while the one before runs."""
    num_stale_tokens = 0
    """Tokens that were delivered to a preempted request."""
    num_discarded_entries = 0
    """Entries of applied steps whose request had ended meanwhile."""

    def _quiet_crossing(self) -> Seq[Sequence] | None:
        """Nor does anybody end with the step in flight."""
        return None if self.calendar.tick - 1 in self.calendar.finish_at else super()._quiet_crossing()

    def _note_quiet(self, tick: int) -> None:
        if self.enable_prefix_caching:
            for seq in self.calendar.crossing():
                self.allocator.register(seq.seq_id, seq.join_offset + tick)

    def _begin_step(self) -> PlanBuilder:
        for seq in self.calendar.ending(self.calendar.tick - 1):
            if self._is_last_in_flight(seq):
                self._leave_calendar(seq)
                self._settle(seq)
                insort(self.stepwise, seq, key=by_rank)
        return super()._begin_step()

    def _end_step(self, step: PlanBuilder) -> StepPlan:
        num_superfluous = len(self.calendar.finish_at.get(step.tick - 1, ())) if step.is_decode_tick else 0
        plan = super()._end_step(step)
        num_superfluous += sum(1 for seq in step.decodes if seq.num_computed_tokens > seq.final_len)
        return plan._replace(num_superfluous=num_superfluous) if num_superfluous else plan

    def _is_last_in_flight(self, seq: Sequence) -> bool:
        """Its last token by length is scheduled; a stop token is not foreseen."""
        if seq.join_tick >= 0:
            self.calendar.settle(seq)
        num_planned = seq.num_output_tokens + seq.num_placeholders
        return seq.num_placeholders > 0 and num_planned >= self._max_output_len(seq.request)

    def _num_wanted(self, seq: Sequence) -> int:
        return 0 if self._is_last_in_flight(seq) else super()._num_wanted(seq)

    def _continue_one(self, seq: Sequence, step: PlanBuilder) -> None:
        if self._is_last_in_flight(seq):
            step.skipped.append(seq)
        else:
            super()._continue_one(seq, step)

    def _due_members(self) -> Seq[Sequence]:
        return self.calendar.crossing()

    def _continue_members(self, step: PlanBuilder) -> Seq[Sequence]:
        left = ContinuousScheduler._continue_members(self, step)
        if self.enable_prefix_caching:
            for seq in step.grown:
                self.allocator.register(seq.seq_id, seq.join_offset + step.tick)
        return left

    def _continue_member(self, seq: Sequence, step: PlanBuilder) -> None:
        """A member needs a block; the one before was completed by a token that has been delivered by now."""
        ContinuousScheduler._continue_member(self, seq, step)
        if self.enable_prefix_caching and seq.join_tick >= 0:
            self.allocator.register(seq.seq_id, seq.join_offset + step.tick)

    def _note_step(self, step: PlanBuilder) -> None:
        """Tokens sampled by this step are placeholders; who ends its prefill decodes from the next step on."""
        for seq in step.decodes:
            seq.num_placeholders += 1
        for chunk in step.prefills:
            seq = chunk.seq
            if not chunk.is_last:
                continue
            seq.num_placeholders += 1
            seq.is_decoding = True
            if self.uses_calendar:
                self.stepwise.remove(seq)
                self.calendar.join(seq)

    def _apply_prefills(self, step: PendingStep, outcome: OutcomeBuilder) -> None:
        for chunk in step.prefills:
            seq = chunk.seq
            if not chunk.is_last:
                self.num_discarded_entries += self._is_gone(seq)
                continue
            if seq.status is Status.RUNNING:
                outcome.started.append(seq)
            self._deliver(seq, outcome)

    def _apply_decodes(self, step: PendingStep, outcome: OutcomeBuilder) -> None:
        for seq in step.decodes:
            self._deliver(seq, outcome)
        outcome.delivered.sort(key=by_rank)

    def _is_gone(self, seq: Sequence) -> bool:
        return seq.status is not Status.RUNNING and seq.status is not Status.WAITING

    def _deliver(self, seq: Sequence, outcome: OutcomeBuilder) -> None:
        """The token of a step in flight arrives: at a running, a preempted or a vanished sequence."""
        if self._is_gone(seq):
            self.num_discarded_entries += 1
            return
        outcome.num_emitted += 1
        if seq.join_tick >= 0:
            return
        seq.num_output_tokens += 1
        if seq.status is Status.RUNNING:
            seq.num_placeholders -= 1
        else:
            self.num_stale_tokens += 1
            outcome.delivered.append(seq)
        if seq.num_output_tokens >= seq.output_len:
            outcome.ended.append(seq)

    def _end(self, seq: Sequence, outcome: OutcomeBuilder) -> None:
        group = seq.group
        assert group is not None
        if seq.status is Status.RUNNING:
            if self.enable_prefix_caching:
                self._settle(seq)
                self.allocator.register(seq.seq_id, seq.final_len)
            super()._end(seq, outcome)
            return
        self.waiting.remove(group)
        seq.status = Status.FINISHED
        self._leave_request(group, outcome)
