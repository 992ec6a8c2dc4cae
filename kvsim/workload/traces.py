"""Loading request traces: Azure, Mooncake, BurstGPT, Vidur, ShareGPT, and a plain CSV of our own.

The format is found from the header or the first line, or named. `kvsim.workload.trace_csv` and
`kvsim.workload.trace_json` read the formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from kvsim.workload.spec import hint
from kvsim.workload.trace import Trace, from_start, sorted_by_time
from kvsim.workload.trace_csv import csv_format_of, load_csv
from kvsim.workload.trace_files import RowErrors, fail, open_text
from kvsim.workload.trace_json import (
    format_of_entries,
    format_of_object,
    json_lines,
    json_list,
    load_mooncake,
    load_sharegpt,
)

FORMATS = ("azure", "mooncake", "burstgpt", "vidur", "sharegpt", "csv")


def load_trace(
    path: str | Path,
    trace_format: str | None = None,
    *,
    hash_block_size: int | None = None,
    chars_per_token: float = 4.0,
    on_bad_row: str = "error",
    needs_times: bool = True,
    skipped_by: str | None = "set on_bad_row: skip",
) -> Trace:
    """The trace in a file, whatever its format.

    Raises ScenarioError naming file, row, column, value and cure for anything that cannot be used; with
    `on_bad_row="skip"` bad rows are dropped and counted. `needs_times=False` accepts a plain CSV without `arrival_s`.
    `skipped_by` is what a message tells to do so that bad rows are skipped; None where nothing can be done.
    """
    name = str(path)
    if trace_format is not None and trace_format not in FORMATS:
        fail(
            name,
            f"trace_format {trace_format!r} is not known{hint(trace_format, FORMATS)}; known: {', '.join(FORMATS)}",
        )
    if on_bad_row not in ("error", "skip"):
        fail(name, f"on_bad_row is {on_bad_row!r}; it is error or skip")
    errors = RowErrors(name, on_bad_row, skipped_by)
    with open_text(path) as text:
        found, entries = _format_and_entries(text, name, trace_format)
        if found == "sharegpt":
            trace = load_sharegpt(entries, errors, chars_per_token)
        elif found == "mooncake":
            trace = load_mooncake(entries, errors, hash_block_size)
        else:
            trace = load_csv(text, errors, found, needs_times)
    if not len(trace):
        if not errors.num_skipped and not trace.num_failed:
            what = "its list is empty" if found in ("sharegpt", "mooncake") else "it has a header and no row below it"
            fail(name, f"no request in it: {what}; a trace has at least one request")
        first = f"; the first: {errors.first_skipped}" if errors.first_skipped else ""
        fail(name, f"no usable request in it ({errors.num_skipped} bad rows skipped, {trace.num_failed} failed){first}")
    notes = (*errors.notes(), *trace.notes)
    return from_start(sorted_by_time(replace(trace, num_skipped=errors.num_skipped, notes=notes)))


def _format_and_entries(text: TextIO, path: str, trace_format: str | None) -> tuple[str, Iterable[object]]:
    """The format, as named or as found, and the entries of a JSON file, of which none is read yet."""
    first = _first_line(text)
    if not first.strip():
        fail(path, "is empty; a trace has at least one request")
    if first.lstrip("\ufeff \t").startswith("{") and first.rstrip()[-1] in "{[":
        fail(path, "is one JSON object over several lines; write one object a line, or a list of the requests")
    text.seek(0)
    if first.lstrip().lstrip("\ufeff").startswith("[") and trace_format in (None, "sharegpt", "mooncake"):
        entries = json_list(text, path)
        return format_of_entries(entries) if trace_format is None else (trace_format, entries)
    return trace_format or _format_of(path, first), json_lines(text)


def _first_line(text: TextIO) -> str:
    """The first line that is not blank, or its first 64 KiB."""
    while line := text.readline(1 << 16):
        if line.strip():
            return line
    return ""


def _format_of(path: str, first: str) -> str:
    start = first.lstrip().lstrip("\ufeff")
    found = format_of_object(start) if start.startswith("{") else csv_format_of(first)
    if found is None:
        fail(
            path,
            f"is no known trace: its first line is {first.strip()[:80]!r}. A trace begins with a JSON object or "
            f"with column names, such as arrival_s,prompt_tokens,output_tokens; formats: {', '.join(FORMATS)}",
        )
    return found
