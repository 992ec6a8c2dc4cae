"""Writing a trace back as a file: our plain CSV, or Mooncake's lines where prompts are named by hash ids."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from kvsim.files import whole_file
from kvsim.types import NS_PER_MS, NS_PER_S, ScenarioError
from kvsim.workload.trace import Trace
from kvsim.workload.trace_csv import OPTIONAL_COLUMNS

_PACKED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip"})


def lost_columns(trace: Trace, path: str | Path) -> list[str]:
    """What the format of `path` cannot hold of this trace, by the names of our plain CSV."""
    if not str(path).endswith(".jsonl"):
        return [] if trace.hash_ids is None else ["hash_ids"]
    told = [(column, getattr(trace, column.fills)) for column in OPTIONAL_COLUMNS]
    # Unstated, the output itself is the maximum.
    unsaid = {column: trace.output if column.fills == "max_output" else column.empty for column in OPTIONAL_COLUMNS}
    return [one.names[0] for one, values in told if values is not None and bool((values != unsaid[one]).any())]


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace to `path`: `.jsonl` as Mooncake's lines, anything else as a plain CSV (hash ids are lost there).

    The file appears whole or not at all. Raises ScenarioError where it cannot be written, or is the trace itself.
    """
    if os.path.exists(path) and os.path.exists(trace.path) and os.path.samefile(path, trace.path):
        raise ScenarioError(f"{path}: is the trace itself; write to another file")
    if Path(path).suffix.lower() in _PACKED:
        raise ScenarioError(f"{path}: traces are written unpacked; name the file {Path(path).stem}, and pack that")
    if trace.arrival_ns is None and str(path).endswith(".jsonl"):
        raise ScenarioError(f"{path}: {trace.path} has no arrival times, which these lines need; write a .csv")
    write = _write_lines if str(path).endswith(".jsonl") else _write_csv
    try:
        with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as text:
            write(trace, text)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be written: {error.strerror}; choose another place") from error


def _write_csv(trace: Trace, text: TextIO) -> None:
    columns: dict[str, Iterable[object]] = {}
    if trace.arrival_ns is not None:
        columns["arrival_s"] = map(_seconds, trace.arrival_ns.tolist())
    columns |= {"prompt_tokens": trace.prompt.tolist(), "output_tokens": trace.output.tolist()}
    for column in OPTIONAL_COLUMNS:
        if (values := getattr(trace, column.fills)) is not None:
            cells = values.tolist()
            columns[column.names[0]] = ("" if cell < 0 else cell for cell in cells) if column.kind == "label" else cells
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))


def _write_lines(trace: Trace, text: TextIO) -> None:
    assert trace.arrival_ns is not None
    for index, time in enumerate(trace.arrival_ns.tolist()):
        row = {
            "timestamp": time / NS_PER_MS if time % NS_PER_MS else time // NS_PER_MS,
            "input_length": int(trace.prompt[index]),
            "output_length": int(trace.output[index]),
        }
        if trace.hash_ids is not None and trace.hash_offsets is not None:
            begin, end = trace.hash_offsets[index : index + 2]
            row["hash_ids"] = trace.hash_ids[begin:end].tolist()
        text.write(json.dumps(row) + "\n")


def _seconds(time_ns: int) -> str:
    """An exact decimal fraction without trailing zeros."""
    whole, rest = divmod(time_ns, NS_PER_S)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".") if rest else str(whole)
