"""The generic engine: every feature of paged attention, with the conventions of `docs/engines.md`.

Prefill and decode share a step (or, with `prefill_first`, prompts go first and alone). Samples fork when the prompt
is computed, blocks become findable at the end of the step that filled them, victims are recomputed or swapped.
"""

from __future__ import annotations

from kvsim.request import Status
from kvsim.scheduling.builder import PlanBuilder
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
