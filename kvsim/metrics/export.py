"""The tables a run writes, with exactly the columns of the documentation.

Columns are turned into text one at a time and joined row by row: several times faster than a DataFrame's writer.
Times become seconds and milliseconds here, exactly (shortest text that reads back to the same float).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.metrics.columns import IntArray
from kvsim.metrics.recorder import NEVER, STEP_COLUMN, EndedRequests, Recorder
from kvsim.types import NS_PER_MS, NS_PER_S

STEP_COLUMNS = (
    "step",
    "start_s",
    "duration_ms",
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_preempted",
    "used_blocks",
    "token_states",
    "reserved",
    "internal_frag",
    "external_frag",
    "cached_idle",
    "free",
    "block_utilization",
    "num_copies",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "prefix_hit_tokens",
    "evicted_blocks",
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

TextColumn = list[str]


def step_texts(recorder: Recorder) -> dict[str, TextColumn]:
    """The step table as text, column by column; call after `recorder.close()`."""
    matrix = recorder.steps.matrix()
    columns: dict[str, TextColumn] = {}
    for name in STEP_COLUMNS:
        if name == "step":
            columns[name] = list(map(str, range(len(matrix))))
        elif name == "start_s":
            columns[name] = _scaled(matrix[:, STEP_COLUMN["start_ns"]], NS_PER_S)
        elif name == "duration_ms":
            columns[name] = _scaled(matrix[:, STEP_COLUMN["duration_ns"]], NS_PER_MS)
        elif name == "block_utilization":
            columns[name] = _utilization(matrix)
        else:
            columns[name] = list(map(str, matrix[:, STEP_COLUMN[name]].tolist()))
    return columns


def request_texts(recorder: Recorder) -> dict[str, TextColumn]:
    """The request table as text, in order of arrival (then of id as given), unfinished requests included."""
    ended = recorder.ended
    ended.table.take_chunk()
    matrix = ended.table.matrix()
    order = np.lexsort((np.arange(len(matrix)), matrix[:, 0]))

    def column(name: str) -> IntArray:
        values: IntArray = matrix[order, EndedRequests.FIELDS.index(name)]
        return values

    arrival, first, finish = column("arrival_ns"), column("first_token_ns"), column("finish_ns")
    scheduled, longest = column("first_scheduled_ns"), column("longest_output")
    done = np.array([ended.statuses[index] == "finished" for index in order], dtype=bool)
    has_tpot = done & (longest > 1)
    tpot = (finish - first) / np.maximum(longest - 1, 1) / NS_PER_MS
    texts: dict[str, TextColumn] = {
        "request_id": [_quoted(ended.request_ids[index]) for index in order],
        "arrival_s": _scaled(arrival, NS_PER_S),
        "prompt_tokens": _plain(column("prompt_tokens")),
        "output_tokens": _plain(column("output_tokens")),
        "status": [ended.statuses[index] for index in order],
        "reason": [_quoted(ended.reasons[index]) for index in order],
        "first_scheduled_s": _scaled(scheduled, NS_PER_S, scheduled != NEVER),
        "first_token_s": _scaled(first, NS_PER_S, first != NEVER),
        "finish_s": _scaled(finish, NS_PER_S, finish != NEVER),
        "ttft_ms": _scaled(first - arrival, NS_PER_MS, first != NEVER),
        "tpot_ms": [repr(value) if has else "" for value, has in zip(tpot.tolist(), has_tpot.tolist(), strict=True)],
        "e2el_ms": _scaled(finish - arrival, NS_PER_MS, done),
        "queue_ms": _scaled(scheduled - arrival, NS_PER_MS, scheduled != NEVER),
    }
    for name in REQUEST_COLUMNS[len(texts) :]:
        texts[name] = _plain(column(name))
    return texts


def write_table(path: Path, columns: Mapping[str, TextColumn]) -> None:
    """One CSV file with a header line and Unix line ends."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join(columns) + "\n")
        rows = zip(*columns.values(), strict=True)
        file.writelines(line + "\n" for line in map(",".join, rows))


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
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_cell(record.get(name)) for name in names] for record in records)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def _plain(values: IntArray) -> TextColumn:
    return list(map(str, values.tolist()))


def _scaled(values: IntArray, unit: int, known: Iterable[bool] | None = None) -> TextColumn:
    texts = list(map(repr, (values / unit).tolist()))
    if known is None:
        return texts
    return [text if is_known else "" for text, is_known in zip(texts, known, strict=True)]


def _utilization(matrix: IntArray) -> TextColumn:
    filled, slots = matrix[:, STEP_COLUMN["token_states"]], matrix[:, STEP_COLUMN["allocated_slots"]]
    shares = np.round(filled / np.maximum(slots, 1), UTILIZATION_DIGITS).tolist()
    return [repr(share) if has else "" for share, has in zip(shares, (slots > 0).tolist(), strict=True)]


def _quoted(text: str) -> str:
    if not any(mark in text for mark in ',"\n\r'):
        return text
    buffer = StringIO()
    csv.writer(buffer, lineterminator="").writerow([text])
    return buffer.getvalue()
