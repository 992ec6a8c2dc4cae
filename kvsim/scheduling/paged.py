"""The generic engine: every feature of paged attention, with the conventions of `docs/engines.md`.

Prefill and decode share a step (or, with `prefill_first`, prompts go first and alone). Samples fork when the prompt
is computed, blocks become findable at the end of the step that filled them, victims are recomputed or swapped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvsim.request import Sequence, Status
from kvsim.scheduling.builder import PendingStep, PlanBuilder
from kvsim.scheduling.calendar import merged
from kvsim.scheduling.continuous import ContinuousScheduler


class PagedScheduler(ContinuousScheduler):
    """Engine `paged`, and with a `reservation` over a contiguous allocator the Orca engines."""

    def _compose(self, step: PlanBuilder) -> None:
        if self.prefill_first and self._prefill_only(step):
            return
        super()._compose(step)

    def _prefill_only(self, step: PlanBuilder) -> bool:
        """A step of prompts alone; False if there is none to compute."""
        for seq in self.stepwise[:]:
            if seq.status is Status.RUNNING and not seq.is_decoding:
                self._continue_one(seq, step)
        if not step.preempted and not self.swapped:
            self._admit_waiting(step)
        step.is_decode_tick = not step.prefills
        return bool(step.prefills)

    def _note_computed(self, step: PendingStep) -> None:
        """Make the blocks that this step filled findable, in running order."""
        # The tick has advanced: those that cross a boundary at the next one filled their block in this one.
        filled = self.calendar.crossing() if step.is_decode_tick else ()
        if not step.prefills and not step.decodes:
            self._register_filled(filled)
            return
        computed = merged([chunk.seq for chunk in step.prefills], step.decodes)
        if filled and filled[-1].rank < computed[0].rank:
            self._register_filled(filled)
            filled = ()
        for seq in merged(computed, filled):
            if seq.join_tick >= 0:
                self._register_member(seq, self.calendar.position(seq))
            elif seq.status is Status.RUNNING:
                self.allocator.register(seq.seq_id, seq.num_computed_tokens)

    def _register_filled(self, filled: Seq[Sequence]) -> None:
        """Members of the calendar filled a block each."""
        if self._grows_plainly:
            self._fill_members(filled)
            return
        for seq in filled:
            self._register_member(seq, self.calendar.position(seq))
