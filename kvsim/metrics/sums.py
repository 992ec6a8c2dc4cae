"""What a run comes to: counters, and sums over time of what its steps were."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from kvsim.metrics.columns import IntArray
from kvsim.metrics.ledger import Parts
from kvsim.metrics.requests import NEVER
from kvsim.metrics.steps import PARTS, column_of
from kvsim.types import Ns

_MEMORY_WAITS = frozenset(("", "blocks", "promises"))
"""What the head of the line waits for while memory is short, or nobody says."""


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

    def add(self, chunk: IntArray) -> None:
        """Count the steps of a chunk, and what was moved in them."""
        self.num_steps += len(chunk)
        self.running_peak = max(self.running_peak, int(column_of(chunk, "num_running").max()))
        self.num_cow_copies += int(column_of(chunk, "num_copies").sum())
        self.num_swapped_out_blocks += int(column_of(chunk, "swapped_out_blocks").sum())
        self.num_swapped_in_blocks += int(column_of(chunk, "swapped_in_blocks").sum())
        self.num_evicted_blocks += int(column_of(chunk, "evicted_blocks").sum())
        self.block_table_updates += int(column_of(chunk, "num_table_updates").sum())
        self.peak_table_entries = max(self.peak_table_entries, int(column_of(chunk, "num_table_entries").max()))


@dataclass(slots=True)
class Integrals:
    """Sums over steps of (value x duration in ns): time-weighted means are these over the elapsed time."""

    elapsed_ns: int = 0
    parts: list[int] = field(default_factory=lambda: [0] * len(Parts._fields))
    saturated_ns: int = 0
    """Time in which a request waited."""
    saturated_parts: list[int] = field(default_factory=lambda: [0] * len(Parts._fields))
    limited_ns: dict[str, int] = field(default_factory=dict)
    """By what the head of the line waited for, where that was not memory (see `StepPlan.head_wait`)."""
    running: int = 0
    sequences: int = 0
    waiting: int = 0
    allocated_slots: int = 0
    logical_blocks: int = 0
    stored_tokens: int = 0
    """Tokens that the tables hold and that will be read, each table for itself."""
    used_blocks: int = 0

    def add(self, chunk: IntArray, head_waits: Seq[str]) -> None:
        """Add the steps of a chunk; `head_waits` says what the head of the line waited for in each."""
        duration = column_of(chunk, "duration_ns")
        saturated = np.where(column_of(chunk, "num_waiting") > 0, duration, 0)
        self.elapsed_ns += int(duration.sum())
        self.saturated_ns += int(saturated.sum())
        for index, part in enumerate(chunk[:, PARTS].T):
            self.parts[index] += _product(duration, part)
            self.saturated_parts[index] += _product(saturated, part)
        self.running += _product(duration, column_of(chunk, "num_running"))
        self.sequences += _product(duration, column_of(chunk, "num_sequences"))
        self.waiting += _product(duration, column_of(chunk, "num_waiting"))
        self.allocated_slots += _product(duration, column_of(chunk, "allocated_slots"))
        self.logical_blocks += _product(duration, column_of(chunk, "logical_blocks"))
        self.stored_tokens += _product(duration, column_of(chunk, "stored_tokens"))
        self.used_blocks += _product(duration, column_of(chunk, "used_blocks"))
        for limit in sorted(set(head_waits) - _MEMORY_WAITS):
            held = np.array([one == limit for one in head_waits])
            self.limited_ns[limit] = self.limited_ns.get(limit, 0) + int(saturated[held].sum())

    def move_part(self, source: str, target: str, num_slots: int, spans_ns: tuple[int, int]) -> None:
        """Hindsight: slots counted as one part were another over spans of all the time, and of the saturated time."""
        from_index, to_index = Parts._fields.index(source), Parts._fields.index(target)
        for parts, span_ns in zip((self.parts, self.saturated_parts), spans_ns, strict=True):
            parts[from_index] -= num_slots * span_ns
            parts[to_index] += num_slots * span_ns


def _product(weights: IntArray, values: IntArray) -> int:
    """Sum of weight x value, none of them negative; exact, also where it does not fit into 64 bits."""
    if int(weights.sum()) * int(values.max()) < 2**63:
        return int(weights @ values)
    return sum(map(operator.mul, weights.tolist(), values.tolist()))
