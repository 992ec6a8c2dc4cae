"""The columns of steps: what a run was doing in each, and where its memory was, many steps at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

import numpy as np

from kvsim.memory.interface import Usage
from kvsim.metrics.columns import IntArray, int_array, packed
from kvsim.metrics.gaps import StepTimes
from kvsim.metrics.ledger import Parts, check_parts, plain_parts
from kvsim.scheduling.plan import Admission, StepPlan, StepShape, pushed_out
from kvsim.types import Ns

LOAD_FIELDS = (
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_preempted",
)
MEMORY_FIELDS = ("used_blocks", *Parts._fields)
TRAFFIC_FIELDS = (
    "num_copies",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "prefix_hit_tokens",
    "evicted_blocks",
)
STEP_FIELDS = (
    "start_ns",
    "duration_ns",
    *LOAD_FIELDS,
    *MEMORY_FIELDS,
    *TRAFFIC_FIELDS,
    # What steps.csv does not show, and sums are made of.
    "num_sequences",
    "num_table_updates",
    "num_table_entries",
    "allocated_slots",
    "logical_blocks",
    "stored_tokens",
)
STEP_COLUMN = {name: index for index, name in enumerate(STEP_FIELDS)}
PARTS = slice(STEP_COLUMN[Parts._fields[0]], STEP_COLUMN[Parts._fields[-1]] + 1)
"""The columns of the ledger's parts."""

Planned: TypeAlias = tuple[StepPlan, Usage, int, int, Parts | None]
"""A step that was planned: what memory holds then, tokens stored, slots over, and the parts if they are odd.

What memory holds and what is stored count each table for itself, within its sliding window if there is one.
"""


def step_times(starts: Seq[Ns], ends: Seq[Ns], num_regular: Seq[int]) -> StepTimes:
    return StepTimes(_times(starts), _times(ends), int_array(num_regular))


def step_chunk(
    times: StepTimes, planned: Seq[Planned], block_size: int, num_evicted_before: int, *, is_caching: bool
) -> IntArray:
    """Steps in a row as a matrix (steps x `STEP_FIELDS`).

    Without a prefix cache (`is_caching`) nobody hits it: what samples that come back share is no hit.
    """
    plans, usages, stored, over, parts = zip(*planned, strict=True)
    # Transposed: each field of these holds the column of that field.
    plan: Any = StepPlan._make(zip(*plans, strict=True))
    shape: Any = StepShape._make(zip(*plan.shape, strict=True))
    usage: Any = Usage._make(map(_column, zip(*usages, strict=True)))
    admitted = plan.admitted if is_caching else ((),) * len(plans)
    stored_states = _column(stored) - _column(plan.num_superfluous)
    columns: dict[str, IntArray] = {
        "start_ns": times.starts,
        "duration_ns": times.ends - times.starts,
        "num_running": _column(plan.num_running),
        "num_waiting": _column(plan.num_waiting),
        "num_swapped": _column(plan.num_swapped),
        "num_prefill_tokens": _counts(shape.prefills, lambda prefills: sum([n for _, n in prefills])),
        "num_decode_tokens": _column(shape.num_decodes),
        "num_preempted": _counts(plan.preempted, lambda preempted: len(pushed_out(preempted))),
        "used_blocks": usage.num_used,
        **dict(zip(Parts._fields, plain_parts(stored_states, _column(over), usage, block_size), strict=True)),
        "num_copies": _column(shape.num_copies),
        "swapped_out_blocks": _column(shape.num_swapped_out_blocks),
        "swapped_in_blocks": _column(shape.num_swapped_in_blocks),
        "prefix_hit_tokens": _counts(admitted, _num_hit_tokens),
        "evicted_blocks": np.diff(usage.num_evicted, prepend=num_evicted_before),
        "num_sequences": _column(plan.num_sequences),
        "num_table_updates": _column(shape.num_table_updates),
        "num_table_entries": _column(shape.num_table_entries),
        "allocated_slots": usage.num_used * block_size,
        "logical_blocks": usage.num_logical,
        "stored_tokens": stored_states,
    }
    chunk = np.column_stack([columns[name] for name in STEP_FIELDS])
    for row, odd in enumerate(parts):
        if odd is not None:
            chunk[row, PARTS] = odd
    return chunk


def column_of(chunk: IntArray, name: str) -> IntArray:
    """One of `STEP_FIELDS` (a view)."""
    values: IntArray = chunk[:, STEP_COLUMN[name]]
    return values


def check_chunk(chunk: IntArray, capacity: int, first_step: int) -> None:
    """Law 12 for every step of a chunk. Raises LawViolation."""
    parts = chunk[:, PARTS]
    broken = (parts.min(axis=1) < 0) | (parts.sum(axis=1) != capacity)
    if broken.any():
        row = int(broken.argmax())
        check_parts(Parts(*map(int, parts[row])), capacity, first_step + row)


def _column(values: tuple[int, ...]) -> IntArray:
    first, num_rows = values[0], len(values)
    # Most columns of most runs stand still, and counting is several times as fast as converting.
    if values[-1] == first and values.count(first) == num_rows:
        return np.full(num_rows, first, np.int64)
    return int_array(values)


def _times(values: Seq[Ns]) -> IntArray:
    """Points in time; floats, if a cost model counts in those."""
    try:
        return packed(values)
    except struct.error:
        return np.array(values)


def _num_hit_tokens(admitted: tuple[Admission, ...]) -> int:
    return sum([admission.num_hit_tokens for admission in admitted])


def _counts(values: tuple[Any, ...], count: Callable[[Any], int]) -> IntArray:
    """A count of what happened in each step; nothing did in most."""
    if not any(values):
        return np.zeros(len(values), np.int64)
    return _column(tuple([count(value) if value else 0 for value in values]))
