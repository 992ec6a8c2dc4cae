"""Applying a step: tokens are emitted, samples fork, beams branch, and who has all its tokens gives its blocks back."""

from __future__ import annotations

from bisect import insort

from kvsim.request import FINISHED, RUNNING, Group, Sequence
from kvsim.scheduling.builder import OutcomeBuilder, PendingStep, quiet_outcome
from kvsim.scheduling.calendar import RANKS_PER_GROUP, by_rank
from kvsim.scheduling.engine_state import EngineState
from kvsim.scheduling.plan import Fork, StepOutcome, StepPlan


class TokenEmission(EngineState):
    """The second half of an iteration."""

    def complete(self, plan: StepPlan) -> StepOutcome:
        """Apply the oldest plan that is not applied yet; a plan in which nothing runs may be left out."""
        if plan.is_quiet or plan.shape.num_decodes or plan.prefills:
            return self._apply(self._in_flight.popleft())
        return StepOutcome()

    def _apply(self, step: PendingStep) -> StepOutcome:
        """Emit the tokens of a step: forks, joins, ends."""
        if step.is_decode_tick:
            self.calendar.applied()
        if self.enable_prefix_caching:
            self._note_computed(step)
        if not (step.prefills or step.decodes or step.tick in self.calendar.finish_at or self.num_beam_groups):
            if step.num_bulk:
                self._num_fruitless = 0
            return quiet_outcome(step.num_bulk)
        outcome = OutcomeBuilder(step.num_bulk)
        if step.prefills:
            self._apply_prefills(step, outcome)
        self._apply_decodes(step, outcome)
        for group in outcome.beam_groups:
            self._advance_beams(group, outcome)
        if self.num_beam_groups and step.is_decode_tick:
            self._hold_back(outcome)
        outcome.ended.extend(self.calendar.ending(step.tick) if step.is_decode_tick else ())
        if outcome.ended:
            self._end_all(outcome)
        if outcome.num_emitted:
            self._num_fruitless = 0
        return outcome.build()

    def _note_computed(self, step: PendingStep) -> None:
        """The tokens of a step are computed, and not yet emitted (prefix caching)."""

    def _apply_prefills(self, step: PendingStep, outcome: OutcomeBuilder) -> None:
        for chunk in step.prefills:
            seq = chunk.seq
            group = seq.group
            if seq.status is not RUNNING or group is None:
                continue
            children: list[Sequence] = []
            if group.unforked and seq.num_computed_tokens == seq.prompt_len:
                children = self._fork_samples(group, outcome)
            if not chunk.is_last:
                continue
            for one in (seq, *children):
                if not group.is_beam:
                    one.is_decoding = True
                    outcome.started.append(one)
                self._emit(one, outcome)

    def _apply_decodes(self, step: PendingStep, outcome: OutcomeBuilder) -> None:
        for seq in step.decodes:
            if seq.status is RUNNING:
                self._emit(seq, outcome)

    def _fork_samples(self, group: Group, outcome: OutcomeBuilder) -> list[Sequence]:
        """Let the other samples share the blocks of the computed prompt."""
        leader, children = group.seqs[0], group.unforked
        group.unforked = []
        for child in children:
            self._fork(group, leader, child, outcome)
        return children

    def _fork(self, group: Group, parent: Sequence, child: Sequence, outcome: OutcomeBuilder) -> None:
        allocator = self.allocator
        keys = self._keys(child) if self.enable_prefix_caching and not group.is_beam else None
        allocator.fork(parent.seq_id, child.seq_id, keys=keys)
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = RUNNING
        group.seqs.append(child)
        child.rank = group.order * RANKS_PER_GROUP + group.next_place
        group.next_place += 1
        insort(self.stepwise, child, key=by_rank)
        self.num_table_entries += self._count_entries((child,))
        self._forked.append(child)
        outcome.forks.append(Fork(parent, child))

    def _emit(self, seq: Sequence, outcome: OutcomeBuilder) -> None:
        """A token for a sequence that had its turn; from its next one on, the calendar counts it."""
        group = seq.group
        if group is not None and group.is_beam:
            if group not in outcome.beam_groups:
                outcome.beam_groups.append(group)
            return
        outcome.num_emitted += 1
        seq.num_output_tokens += 1
        if seq.num_output_tokens >= seq.output_len:
            outcome.ended.append(seq)
        elif self.uses_calendar and not self._has_fresh_fork(seq, outcome):
            self.stepwise.remove(seq)
            self.calendar.join(seq)

    def _has_fresh_fork(self, seq: Sequence, outcome: OutcomeBuilder) -> bool:
        """Its tail may be shared, so its next token may need a copy."""
        return bool(outcome.forks) and any(fork.parent.group is seq.group for fork in outcome.forks)

    def _advance_beams(self, group: Group, outcome: OutcomeBuilder) -> None:
        """Once every beam has computed its tokens: one token each, then the survivors' children."""
        if any(self._num_wanted(beam) > 0 for beam in group.seqs):
            return
        outcome.advanced.append(group)
        beams = group.seqs[:]
        for beam in beams:
            beam.num_output_tokens += 1
            if not beam.is_decoding:
                beam.is_decoding = True
                outcome.started.append(beam)
        outcome.num_emitted += len(beams)
        if beams[0].num_output_tokens >= beams[0].output_len:
            outcome.ended.extend(beams)
            return
        width, step = group.request.sampling.beam_width, beams[0].num_output_tokens - 1
        children = self.beam_policy(group.request.seed, step, len(beams), width)
        for beam, num_children in zip(beams, children, strict=True):
            if not num_children:
                self._end(beam, outcome)
                outcome.pruned.append(beam)
        for beam, num_children in zip(beams, children, strict=True):
            for _ in range(num_children - 1):
                self._fork_beam(group, beam, outcome)

    def _hold_back(self, outcome: OutcomeBuilder) -> None:
        """Beams of which one has not had its turn yet emit nothing at this tick."""
        for group in self.running.values():
            if group.is_beam and group not in outcome.advanced:
                outcome.held_back += group.seqs

    def _fork_beam(self, group: Group, parent: Sequence, outcome: OutcomeBuilder) -> None:
        child = self._make_sequence(group.request, group.next_place)
        child.output_len, child.final_len = parent.output_len, parent.final_len
        child.group = group
        child.is_decoding = True
        child.num_output_tokens = parent.num_output_tokens
        self._fork(group, parent, child, outcome)

    def _end_all(self, outcome: OutcomeBuilder) -> None:
        if len(outcome.ended) > 1:
            outcome.ended.sort(key=by_rank)
        for seq in outcome.ended:
            self._end(seq, outcome)

    def _end(self, seq: Sequence, outcome: OutcomeBuilder) -> None:
        """A running sequence has all its tokens (or is pruned): its blocks are free at once."""
        group = seq.group
        assert group is not None
        if seq.join_tick >= 0:
            self._leave_calendar(seq)
        else:
            self.stepwise.remove(seq)
        self._free(seq)
        seq.status = FINISHED
        self.num_seats -= group.num_seats
        group.seqs.remove(seq)
        if group.seqs:
            self.num_seats += group.num_seats
            return
        del self.running[group.order]
        self.num_beam_groups -= group.is_beam
        self._leave_request(group, outcome)

    def _leave_request(self, group: Group, outcome: OutcomeBuilder) -> None:
        request_id = group.request.request_id
        self._note_move(group)
        groups = self.groups[request_id]
        if len(groups) > 1:
            groups.remove(group)
            return
        del self.groups[request_id]
        outcome.finished_requests.append(request_id)
