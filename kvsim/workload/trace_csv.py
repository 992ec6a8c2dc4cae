"""Traces in CSV: Azure, BurstGPT, Vidur, and a plain one of our own, whose columns docs/scenario.md explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, TextIO

from kvsim.types import NS_PER_S
from kvsim.workload.trace import Trace
from kvsim.workload.trace_files import (
    EXACT_SECONDS,
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_TOKENS,
    BadRow,
    Chunk,
    CsvRows,
    RowErrors,
    fail,
    listed,
    normal,
    parse_int,
    parse_seconds,
    parse_timestamp,
    split_header,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Column:
    """A column of a CSV format: the field of `Trace` it fills, its known names, and how its cells are read.

    Counts are `low .. high`; an empty cell, where there may be one, stands for the count `empty`. A timestamp is a date
    or any number of seconds, a moment a date or seconds from 0 on.
    """

    fills: str
    names: tuple[str, ...]
    kind: Literal["count", "seconds", "moment", "timestamp", "label"] = "count"
    required: bool = True
    low: int = 1
    high: int = MAX_TOKENS
    empty: int | None = None

    @property
    def normal_names(self) -> frozenset[str]:
        """Its names without case and punctuation."""
        return frozenset(normal(name) for name in self.names)

    def read(self, name: str, cell: str) -> int:
        """One cell that is no label as an integer; `name` is what the file calls the column. Raises BadRow."""
        if self.kind == "timestamp":
            return parse_timestamp(name, cell)
        if self.kind == "moment":
            return parse_timestamp(name, cell, low=0.0)
        if self.kind == "seconds":
            return parse_seconds(name, cell)
        if self.empty is not None and not cell.strip():
            return self.empty
        return parse_int(name, cell, self.low, self.high)


_ARRIVAL_NAMES = ("arrival_s", "arrival", "arrival_time_s", "arrived_at", "timestamp", "arrival_timestamp")
_PROMPT_NAMES = ("prompt_tokens", "input_tokens", "prompt_len", "input_len", "prompt_size")
_OUTPUT_NAMES = ("output_tokens", "completion_tokens", "output_len", "token_size")
"""The last of each are those of SplitwiseSim."""
CSV_FORMATS: dict[str, tuple[Column, ...]] = {
    "azure": (
        Column("arrival_ns", ("TIMESTAMP",), "timestamp"),
        Column("prompt", ("ContextTokens",)),
        Column("output", ("GeneratedTokens",)),
    ),
    "burstgpt": (
        Column("arrival_ns", ("Timestamp",), "timestamp"),
        Column("prompt", ("Request tokens",)),
        Column("output", ("Response tokens",)),
    ),
    "vidur": (
        Column("arrival_ns", ("arrived_at",), "seconds", required=False),
        Column("prompt", ("num_prefill_tokens",)),
        Column("output", ("num_decode_tokens",)),
    ),
    "csv": (
        Column("arrival_ns", _ARRIVAL_NAMES, "moment"),
        Column("prompt", _PROMPT_NAMES),
        Column("output", _OUTPUT_NAMES),
        Column("max_output", ("max_output_tokens",), required=False, empty=0),
        Column("prefix_group", ("prefix_group",), "label", required=False, empty=-1),
        Column("prefix_tokens", ("prefix_tokens",), required=False, low=0, empty=0),
        Column("n", ("n",), required=False, high=MAX_SAMPLES, empty=1),
        Column("priority", ("priority",), required=False, low=-MAX_TOKENS, empty=0),
        Column("session", ("session", "session_id"), "label", required=False, empty=-1),
    ),
}
OPTIONAL_COLUMNS = tuple(column for column in CSV_FORMATS["csv"] if not column.required)
"""Of a plain CSV, in the order in which they are written."""
_SESSION_NAMES = frozenset({"session", "sessionid"})
_ONLY_WRITTEN = frozenset({"lora", "salt", "aborts"})
"""What requests that are written out have beside their times and lengths, and no trace has."""
_SECONDS_PER_YEAR = 365.25 * 86400
_NEAR = 0.75
"""How alike two names are, as difflib counts it, where one may be meant for the other."""
_SHORTEST_PART = 4
"""Letters of a name that may be meant by a longer one that contains it."""


def csv_format_of(header: str) -> str | None:
    """The format whose columns a header names; None where it names too few of any."""
    found = {normal(name) for name in split_header(header)[1]}
    scores = {name: sum(bool(column.normal_names & found) for column in cols) for name, cols in CSV_FORMATS.items()}
    # A shared column (Timestamp) decides nothing, so a format's own columns count double.
    for name, columns in CSV_FORMATS.items():
        scores[name] += sum(bool(c.normal_names & found) for c in columns if c.fills in ("prompt", "output"))
    best = max(scores, key=lambda name: scores[name])
    # A time alone says nothing: many files have one.
    return best if scores[best] > 1 else None


def load_csv(text: TextIO, errors: RowErrors, trace_format: str, needs_times: bool) -> Trace:
    """The trace in a CSV of one of the formats; `needs_times=False` accepts a plain one without times."""
    table, columns = _read_columns(text, errors, trace_format, needs_times)
    if (allowed := _allowed_times(columns.get("arrival_ns"))) is not None:
        # Their differences overflow: read again, now that it is known which rows are out of place.
        text.seek(0)
        errors.restart()
        table, columns = _read_columns(text, errors, trace_format, needs_times, allowed)
    failed = f"{errors.path}: {table.num_failed} failed requests (0 response tokens) skipped"
    notes = _unread(errors.path, trace_format, table.header)
    return Trace(
        errors.path,
        trace_format,
        columns.pop("arrival_ns", None),
        columns.pop("prompt"),
        columns.pop("output"),
        num_failed=table.num_failed,
        notes=(failed, *notes) if table.num_failed else tuple(notes),
        **columns,  # type: ignore[arg-type]
    )


def _read_columns(
    text: TextIO, errors: RowErrors, trace_format: str, needs_times: bool, allowed: tuple[int, int] | None = None
) -> tuple[_Columns, dict[str, Ints]]:
    rows = CsvRows(text, errors)
    places = _places(errors.path, trace_format, rows.header, needs_times)
    table = _Columns(places, rows.header, errors, failures=trace_format == "burstgpt", allowed=allowed)
    for chunk in rows.chunks():
        table.add(chunk)
    return table, table.finish()


def _allowed_times(times: Ints | None) -> tuple[int, int] | None:
    """The times that fit one trace, around the median of all; None where all of them do."""
    import numpy as np

    longest = round(MAX_SECONDS * NS_PER_S)
    if times is None or not len(times) or int(times.max()) - int(times.min()) <= longest:
        return None
    ordered = np.sort(times).tolist()
    middle = ordered[len(ordered) // 2]
    low, high = 0, len(ordered) - 1
    while ordered[high] - ordered[low] > longest:
        if ordered[high] - middle > middle - ordered[low]:
            high -= 1
        else:
            low += 1
    return ordered[low], ordered[high]


def _places(path: str, trace_format: str, header: list[str], needs_times: bool) -> dict[str, tuple[int, Column]]:
    """For each field of the trace its column number; raises where a required column is missing or there twice."""
    names = [normal(name) for name in header]
    places: dict[str, tuple[int, Column]] = {}
    missing = []
    for column in CSV_FORMATS[trace_format]:
        found = [index for index, name in enumerate(names) if name in column.normal_names]
        if len(found) > 1:
            fail(
                path,
                f"column {column.names[0]!r} is there {len(found)} times, as "
                f"{listed(header[index] for index in found)}; keep one",
            )
        if found:
            places[column.fills] = (found[0], column)
        elif column.required and (needs_times or column.fills != "arrival_ns" or trace_format != "csv"):
            missing.append(column.names[0])
    if missing:
        is_or_are = "column {} is" if len(missing) == 1 else "columns {} are"
        fail(
            path,
            f"{is_or_are.format(listed(missing))} missing (read as {trace_format}); columns found: {listed(header)}",
        )
    if "prefix_tokens" in places and "prefix_group" not in places:
        fail(path, "column 'prefix_tokens' needs a column 'prefix_group' that says whose prefix it is")
    if "prefix_group" in places and "prefix_tokens" not in places:
        fail(path, "column 'prefix_group' needs a column 'prefix_tokens' that says how long the shared prefix is")
    return places


def _unread(path: str, trace_format: str, header: list[str]) -> list[str]:
    """A line for each column that is not read and looks like one that would be; others are nobody's mistake."""
    columns = CSV_FORMATS[trace_format]
    known = frozenset().union(*(column.normal_names for column in columns))
    found = {normal(name) for name in header}
    absent = {
        name: column.names[0] for column in columns if not column.normal_names & found for name in column.normal_names
    }
    notes = []
    for name in header:
        plain = normal(name)
        if plain == "beamwidth":
            notes.append(
                f"{path}: column {name!r} is not read; workload.sampling.beam_width sets the beams of every request"
            )
        elif plain in _ONLY_WRITTEN:
            notes.append(f"{path}: column {name!r} is not read; only requests written out (workload.requests) have it")
        elif plain in _SESSION_NAMES and plain not in known:
            notes.append(
                f"{path}: column {name!r} is not read in the {trace_format} format: every request comes at its own time"
            )
        elif plain and plain not in known and (meant := _meant(plain, absent)):
            notes.append(f"{path}: column {name!r} is not read (did you mean {meant!r}?)")
    return notes


def _meant(plain: str, absent: Mapping[str, str]) -> str | None:
    """The column that a name was meant for: nearly the same, a part of it, or more than it; None if there is none."""
    if close := get_close_matches(plain, absent, n=1, cutoff=_NEAR):
        return absent[close[0]]
    parts = [
        name for name in absent if min(len(name), len(plain)) >= _SHORTEST_PART and (name in plain or plain in name)
    ]
    return absent[min(parts, key=len)] if parts else None


class _Columns:
    """Columns under construction: whole chunks at once where every cell is plain, row by row where not."""

    def __init__(
        self,
        places: Mapping[str, tuple[int, Column]],
        header: list[str],
        errors: RowErrors,
        failures: bool,
        allowed: tuple[int, int] | None = None,
    ) -> None:
        self._places = places
        self.header = header
        self._errors = errors
        self._failures = failures
        self._allowed = allowed
        self._parts: dict[str, list[Ints]] = {fills: [] for fills in places}
        self._labels: dict[str, dict[str, int]] = {"prefix_group": {}, "session": {}}
        self.num_failed = 0

    def add(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""
        columns = self._fast(chunk.rows) or self._slow(chunk)
        for fills, values in columns.items():
            self._parts[fills].append(values)

    def finish(self) -> dict[str, Ints]:
        """The whole columns."""
        import numpy as np

        empty = np.zeros(0, dtype=np.int64)
        return {fills: np.concatenate(parts) if parts else empty for fills, parts in self._parts.items()}

    def _fast(self, rows: list[list[str]]) -> dict[str, Ints] | None:
        """The chunk's columns, or None if any cell needs a closer look."""
        width = len(self.header)
        if self._allowed is not None or any(len(row) != width for row in rows):
            return None
        num_rows = len(rows)
        if self._failures:
            output = self._places["output"][0]
            rows = [row for row in rows if not _is_zero(row[output])]
        try:
            columns = {
                fills: self._fast_column(column, [row[index] for row in rows])
                for fills, (index, column) in self._places.items()
            }
        except (ValueError, OverflowError, BadRow):
            return None
        if not _consistent(columns):
            return None
        self.num_failed += num_rows - len(rows)
        return columns

    def _fast_column(self, column: Column, cells: list[str]) -> Ints:
        import numpy as np

        match column.kind:
            case "label":
                return np.array([self._label(column.fills, cell) for cell in cells], dtype=np.int64)
            case "timestamp":
                return np.array([parse_timestamp("", cell) for cell in cells], dtype=np.int64)
            case "moment" | "seconds":
                times = np.array(cells, dtype=np.float64)
                if not (np.all(times >= 0) and np.all(times <= EXACT_SECONDS)):
                    raise ValueError
                return np.rint(times * NS_PER_S).astype(np.int64)
        numbers = np.array(cells, dtype=np.float64)
        is_inside = np.all(numbers >= column.low) and np.all(numbers <= column.high)
        if not (is_inside and np.all(numbers == np.floor(numbers))):
            raise ValueError
        return numbers.astype(np.int64)

    def _slow(self, chunk: Chunk) -> dict[str, Ints]:
        import numpy as np

        good: dict[str, list[int]] = {fills: [] for fills in self._places}
        for index, row in enumerate(chunk.rows):
            try:
                values = self._row(row)
            except BadRow as bad:
                self._errors.report(chunk.place(index), bad)
                continue
            if values is None:
                self.num_failed += 1
                continue
            for fills, value in values.items():
                good[fills].append(value)
        return {fills: np.array(values, dtype=np.int64) for fills, values in good.items()}

    def _row(self, row: list[str]) -> dict[str, int] | None:
        """One row's values; None for a request that failed when the trace was taken."""
        if len(row) != len(self.header):
            name = self.header[min(len(row), len(self.header) - 1)]
            raise BadRow(name, ",".join(row), f"has {len(row)} cells, the header names {len(self.header)} columns")
        if self._failures and _is_zero(row[self._places["output"][0]]):
            return None
        values = {}
        for fills, (index, column) in self._places.items():
            if column.kind == "label":
                values[fills] = self._label(fills, row[index])
            else:
                values[fills] = column.read(self.header[index], row[index])
            if fills == "arrival_ns" and self._allowed and not self._allowed[0] <= values[fills] <= self._allowed[1]:
                years = int(MAX_SECONDS / _SECONDS_PER_YEAR)
                raise BadRow(
                    self.header[index], row[index], f"is too far from the other times: a trace spans {years} years"
                )
        _check_row(values)
        return values

    def _label(self, fills: str, cell: str) -> int:
        codes = self._labels[fills]
        name = cell.strip()
        return codes.setdefault(name, len(codes)) if name else -1


def _is_zero(cell: str) -> bool:
    if cell[:1] in "123456789" and cell:
        return False
    try:
        return float(cell) == 0
    except ValueError:
        return False


def _consistent(columns: Mapping[str, Ints]) -> bool:
    """Whether no row contradicts itself (see `_check_row`)."""
    if "prefix_tokens" in columns and bool((columns["prefix_tokens"] > columns["prompt"]).any()):
        return False
    if "prefix_tokens" in columns and bool(((columns["prefix_tokens"] > 0) & (columns["prefix_group"] < 0)).any()):
        return False
    return "max_output" not in columns or bool((columns["max_output"] >= columns["output"]).all())


def _check_row(values: dict[str, int]) -> None:
    if values.get("prefix_tokens", 0) > values["prompt"]:
        raise BadRow("prefix_tokens", values["prefix_tokens"], f"is more than the prompt's {values['prompt']} tokens")
    if values.get("prefix_tokens", 0) and values["prefix_group"] < 0:
        raise BadRow("prefix_tokens", values["prefix_tokens"], "needs a prefix_group that says whose prefix it is")
    if "max_output" in values:
        # An empty cell: no maximum was stated, so the output itself is it.
        values["max_output"] = values["max_output"] or values["output"]
        if values["max_output"] < values["output"]:
            raise BadRow("max_output_tokens", values["max_output"], f"is less than the output's {values['output']}")
