"""Writing a trace back as a file: our plain CSV, or Mooncake's lines where prompts are named by hash ids."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from kvsim.files import whole_file
from kvsim.types import NS_PER_MS, NS_PER_S, ScenarioError
from kvsim.workload.trace import Trace

_CSV_COLUMNS = {
    "max_output_tokens": "max_output",
    "prefix_group": "prefix_group",
    "prefix_tokens": "prefix_tokens",
    "n": "n",
    "priority": "priority",
    "session": "session",
}
_CODES = frozenset({"prefix_group", "session"})


def lost_columns(trace: Trace, path: str | Path) -> list[str]:
    """What the format of `path` cannot hold of this trace, by the names of our plain CSV."""
    if not str(path).endswith(".jsonl"):
        return [] if trace.hash_ids is None else ["hash_ids"]
    unsaid = {
        "max_output_tokens": trace.output,  # unstated, the output itself is the maximum
        "prefix_group": -1,
        "prefix_tokens": 0,
        "n": 1,
        "priority": 0,
        "session": -1,
    }
    columns = {name: getattr(trace, fills) for name, fills in _CSV_COLUMNS.items()}
    return [name for name, values in columns.items() if values is not None and bool((values != unsaid[name]).any())]


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace to `path`: `.jsonl` as Mooncake's lines, anything else as a plain CSV (hash ids are lost there).

    The file appears whole or not at all. Raises ScenarioError where it cannot be written, or is the trace itself.
    """
    if os.path.exists(path) and os.path.exists(trace.path) and os.path.samefile(path, trace.path):
        raise ScenarioError(f"{path}: is the trace itself; write to another file")
    if trace.arrival_ns is None and str(path).endswith(".jsonl"):
        raise ScenarioError(f"{path}: {trace.path} has no arrival times, which these lines need; write a .csv")
    write = _write_lines if str(path).endswith(".jsonl") else _write_csv
    try:
        with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as text:
            write(trace, text)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be written: {error.strerror}") from error


def _write_csv(trace: Trace, text: TextIO) -> None:
    optional = {name: getattr(trace, fills) for name, fills in _CSV_COLUMNS.items()}
    columns: dict[str, Iterator[object]] = (
        {}
        if trace.arrival_ns is None
        else {"arrival_s": (_decimal(time, NS_PER_S) for time in trace.arrival_ns.tolist())}
    )
    columns |= {"prompt_tokens": iter(trace.prompt.tolist()), "output_tokens": iter(trace.output.tolist())}
    for name, values in optional.items():
        if values is not None:
            cells = values.tolist()
            columns[name] = ("" if value < 0 else value for value in cells) if name in _CODES else iter(cells)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))


def _write_lines(trace: Trace, text: TextIO) -> None:
    assert trace.arrival_ns is not None
    ids = [] if trace.hash_ids is None else trace.hash_ids.tolist()
    offsets = [0] * (len(trace) + 1) if trace.hash_offsets is None else trace.hash_offsets.tolist()
    for index, time in enumerate(trace.arrival_ns.tolist()):
        row = {
            "timestamp": time / NS_PER_MS if time % NS_PER_MS else time // NS_PER_MS,
            "input_length": int(trace.prompt[index]),
            "output_length": int(trace.output[index]),
        }
        if trace.hash_ids is not None:
            row["hash_ids"] = ids[offsets[index] : offsets[index + 1]]
        text.write(json.dumps(row) + "\n")


def _decimal(value: int, unit: int) -> str:
    """An exact decimal fraction without trailing zeros."""
    whole, rest = divmod(value, unit)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".") if rest else str(whole)
