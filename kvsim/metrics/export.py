"""The tables a run writes, with exactly the columns of the documentation.

Rows are formatted from columns a thousand at a time: several times faster than a DataFrame's writer.
Times become seconds and milliseconds here, exactly (shortest text that reads back to the same float).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from kvsim.files import csv_cell
from kvsim.metrics.columns import CHUNK_ROWS, IntArray
from kvsim.metrics.percentiles import FloatArray
from kvsim.metrics.recorder import Recorder
from kvsim.metrics.requests import NEVER, STATUS_CODE, STATUSES
from kvsim.metrics.steps import LOAD_FIELDS, MEMORY_FIELDS, TRAFFIC_FIELDS, column_of
from kvsim.request import Status
from kvsim.types import NS_PER_MS, NS_PER_S

STEP_COLUMNS = (
    "step",
    "start_s",
    "duration_ms",
    *LOAD_FIELDS,
    *MEMORY_FIELDS,
    "block_utilization",
    *TRAFFIC_FIELDS,
)

REQUEST_COLUMNS = (
    "request_id",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "status",
    "reason",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "ttft_ms",
    "tpot_ms",
    "e2el_ms",
    "queue_ms",
    "num_preemptions",
    "recomputed_tokens",
    "prefix_hit_tokens",
    "num_cow_copies",
    "peak_blocks",
)

UTILIZATION_DIGITS = 6

Column: TypeAlias = IntArray | FloatArray | list[str]
"""Integers, floats (NaN: nothing to say), or texts."""


def step_columns(recorder: Recorder) -> dict[str, Column]:
    """The step table, column by column; call after `recorder.close()`."""
    matrix = recorder.steps.matrix()
    slots = column_of(matrix, "allocated_slots")
    share = np.round(column_of(matrix, "token_states") / np.maximum(slots, 1), UTILIZATION_DIGITS)
    derived: dict[str, Column] = {
        "step": np.arange(len(matrix), dtype=np.int64),
        "start_s": column_of(matrix, "start_ns") / NS_PER_S,
        "duration_ms": column_of(matrix, "duration_ns") / NS_PER_MS,
        "block_utilization": np.where(slots > 0, share, np.nan),
    }
    return {name: derived[name] if name in derived else column_of(matrix, name) for name in STEP_COLUMNS}


def request_columns(recorder: Recorder) -> dict[str, Column]:
    """The request table in order of submission, unfinished requests included."""
    ended = recorder.ended
    order = np.argsort(ended.table.column("index"))

    def field(name: str) -> IntArray:
        return ended.table.column(name)[order]

    places = order.tolist()
    arrival, scheduled = field("arrival_ns"), field("first_scheduled_ns")
    first, finish, num_gaps = field("first_token_ns"), field("finish_ns"), field("longest_output") - 1
    codes = field("status")
    done, is_rejected = codes == STATUS_CODE[Status.FINISHED], codes == STATUS_CODE[Status.REJECTED]
    derived: dict[str, Column] = {
        "request_id": [ended.request_ids[place] for place in places],
        "arrival_s": arrival / NS_PER_S,
        "status": [STATUSES[code] for code in codes.tolist()],
        "reason": [ended.reasons[place] for place in places],
        "first_scheduled_s": np.where(scheduled != NEVER, scheduled / NS_PER_S, np.nan),
        "first_token_s": np.where(first != NEVER, first / NS_PER_S, np.nan),
        "finish_s": np.where((finish != NEVER) & ~is_rejected, finish / NS_PER_S, np.nan),
        "ttft_ms": np.where(first != NEVER, (first - arrival) / NS_PER_MS, np.nan),
        "tpot_ms": np.where(done & (num_gaps > 0), (finish - first) / np.maximum(num_gaps, 1) / NS_PER_MS, np.nan),
        "e2el_ms": np.where(done, (finish - arrival) / NS_PER_MS, np.nan),
        "queue_ms": np.where(scheduled != NEVER, (scheduled - arrival) / NS_PER_MS, np.nan),
    }
    return {name: derived[name] if name in derived else field(name) for name in REQUEST_COLUMNS}


def write_table(path: Path, columns: Mapping[str, Column]) -> None:
    """One CSV file with a header line and Unix line ends."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(columns) + "\n")
        num_rows = len(next(iter(columns.values()), ()))
        for start in range(0, num_rows, CHUNK_ROWS):
            _write_rows(file, [column[start : start + CHUNK_ROWS] for column in columns.values()])


def _write_rows(file: TextIO, columns: Sequence[Column]) -> None:
    """Rows through one format, in which what all of them have in common stands already."""
    parts, moving = [], []
    for column in columns:
        part, values = _format(column)
        parts.append(part)
        if values is not None:
            moving.append(values)
    line = ",".join(parts) + "\n"
    if moving:
        file.writelines(map(line.__mod__, zip(*moving, strict=True)))
    else:
        file.write(line % () * len(columns[0]))


def _format(column: Column) -> tuple[str, list[Any] | None]:
    """How to write a column's values, and the values; None if all are the one that the format holds."""
    if isinstance(column, list):
        if len(set(column)) == 1:
            return csv_cell(column[0]).replace("%", "%%"), None
        joined = "".join(column)
        return "%s", column if csv_cell(joined) == joined else list(map(csv_cell, column))
    if column.dtype.kind == "i":
        return (str(column[0]), None) if column.min() == column.max() else ("%d", column.tolist())
    if np.isnan(column).any():
        return "%s", [repr(value) if value == value else "" for value in column.tolist()]
    return "%r", column.tolist()


def write_json(path: Path, value: Any) -> None:
    """Pretty JSON with a final line end; NaN is refused."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def flatten(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined with dots; lists as JSON text."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            flat[prefix + key] = json.dumps(value)
        else:
            flat[prefix + key] = value
    return flat


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Flat records as CSV: the columns of all records in order of first sight; None is an empty cell."""
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", encoding="utf-8", newline="") as file:
        for row in (names, *([_cell(record.get(name)) for name in names] for record in records)):
            file.write(",".join(map(csv_cell, row)) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
