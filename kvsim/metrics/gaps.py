"""Inter-token latencies (ITL): the gaps between the tokens of each sequence.

Gaps cost nothing per token. All running decodes emit at every decode tick, so the gap between two ticks counts as
often as tokens were emitted at the later one; only sequences whose first decode follows a prefill, a pause or a
skipped step have a gap of their own, and those are events.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvsim.metrics.columns import IntArray, RowTable
from kvsim.metrics.requests import NEVER
from kvsim.request import Sequence
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.types import Ns

NO_TICK = -1
"""For the number of regular tokens of a step that was no decode tick."""


class StepTimes(NamedTuple):
    """Columns of steps: when they began and ended, and their regular tokens (`NO_TICK`: it was no decode tick)."""

    starts: IntArray
    ends: IntArray
    num_regular: IntArray


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
