"""Traces in CSV: Azure, BurstGPT, Vidur, and a plain one of our own.

    plain CSV: arrival_s,prompt_tokens,output_tokens[,max_output_tokens,prefix_group,prefix_tokens,n,priority,session]

Where the times are dates or begin anywhere (Azure, BurstGPT), the first arrival becomes 0; elsewhere they are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, TextIO

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
    """A column of a CSV format: the field of `Trace` it fills, its known names, and how its cells are read."""

    fills: str
    names: tuple[str, ...]
    kind: str
    required: bool = True

    @property
    def normal_names(self) -> frozenset[str]:
        """Its names without case and punctuation."""
        return frozenset(normal(name) for name in self.names)


_ARRIVAL_NAMES = ("arrival_s", "arrival", "arrival_time_s", "arrived_at", "arrival_timestamp")
_PROMPT_NAMES = ("prompt_tokens", "input_tokens", "prompt_len", "input_len", "prompt_size")
_OUTPUT_NAMES = ("output_tokens", "output_len", "token_size")
"""The last of each are those of SplitwiseSim."""
_CSV_FORMATS: dict[str, tuple[Column, ...]] = {
    "azure": (
        Column("arrival_ns", ("TIMESTAMP",), "timestamp"),
        Column("prompt", ("ContextTokens",), "tokens"),
        Column("output", ("GeneratedTokens",), "tokens"),
    ),
    "burstgpt": (
        Column("arrival_ns", ("Timestamp",), "timestamp"),
        Column("prompt", ("Request tokens",), "tokens"),
        Column("output", ("Response tokens",), "tokens"),
    ),
    "vidur": (
        Column("arrival_ns", ("arrived_at",), "seconds", required=False),
        Column("prompt", ("num_prefill_tokens",), "tokens"),
        Column("output", ("num_decode_tokens",), "tokens"),
    ),
    "csv": (
        Column("arrival_ns", _ARRIVAL_NAMES, "seconds"),
        Column("prompt", _PROMPT_NAMES, "tokens"),
        Column("output", _OUTPUT_NAMES, "tokens"),
        Column("max_output", ("max_output_tokens",), "max", required=False),
        Column("prefix_group", ("prefix_group",), "label", required=False),
        Column("prefix_tokens", ("prefix_tokens",), "count", required=False),
        Column("n", ("n",), "samples", required=False),
        Column("priority", ("priority",), "priority", required=False),
        Column("session", ("session", "session_id"), "label", required=False),
    ),
}
_SESSION_NAMES = frozenset({"session", "sessionid"})
_SECONDS_PER_YEAR = 365.25 * 86400
_NEAR = 0.75
"""How alike two names are, as difflib counts it, where one may be meant for the other."""
_SHORTEST_PART = 4
"""Letters of a name that may be meant by a longer one that contains it."""
_FROM_ZERO = frozenset({"azure", "burstgpt"})
"""Formats whose clock starts anywhere."""


def csv_format_of(header: str) -> str | None:
    """The format whose columns a header names; None where it names too few of any."""
    found = {normal(name) for name in split_header(header)[1]}
    scores = {name: sum(bool(column.normal_names & found) for column in cols) for name, cols in _CSV_FORMATS.items()}
    # A shared column (Timestamp) decides nothing, so a format's own columns count double.
    for name, columns in _CSV_FORMATS.items():
        scores[name] += sum(bool(c.normal_names & found) for c in columns if c.fills in ("prompt", "output"))
    best = max(scores, key=lambda name: scores[name])
    # Timestamp alone says nothing: many files have it.
    return best if scores[best] >= (2 if best == "azure" else 1) else None


def load_csv(text: TextIO, errors: RowErrors, trace_format: str, needs_times: bool) -> Trace:
    """The trace in a CSV of one of the formats; `needs_times=False` accepts a plain one without times."""
    table, columns = _read_columns(text, errors, trace_format, needs_times)
    if trace_format in _FROM_ZERO and len(columns["arrival_ns"]):
        if (allowed := _allowed_times(columns["arrival_ns"])) is not None:
            # Their differences overflow: read again, now that it is known which rows are out of place.
            text.seek(0)
            errors.restart()
            table, columns = _read_columns(text, errors, trace_format, needs_times, allowed)
        columns["arrival_ns"] = columns["arrival_ns"] - columns["arrival_ns"].min()
    notes = (*table.notes(errors.path), *_unread(errors.path, trace_format, table.header))
    return Trace(
        errors.path,
        trace_format,
        columns.pop("arrival_ns", None),
        columns.pop("prompt"),
        columns.pop("output"),
        num_failed=table.num_failed,
        notes=notes,
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


def _allowed_times(times: Ints) -> tuple[int, int] | None:
    """The times that fit one trace, around the median of all; None where all of them do."""
    import numpy as np

    longest = round(MAX_SECONDS * NS_PER_S)
    if int(times.max()) - int(times.min()) <= longest:
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
    for column in _CSV_FORMATS[trace_format]:
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
            fail(
                path, f"column {column.names[0]!r} is missing (read as {trace_format}); columns found: {listed(header)}"
            )
    if "prefix_tokens" in places and "prefix_group" not in places:
        fail(path, "column 'prefix_tokens' needs a column 'prefix_group' that says whose prefix it is")
    if "prefix_group" in places and "prefix_tokens" not in places:
        fail(path, "column 'prefix_group' needs a column 'prefix_tokens' that says how long the shared prefix is")
    return places


def _unread(path: str, trace_format: str, header: list[str]) -> list[str]:
    """A line for each column that is not read and looks like one that would be; others are nobody's mistake."""
    columns = _CSV_FORMATS[trace_format]
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


def _cell(kind: str, column: str, text: str) -> int:
    """One cell as an integer; labels are handled apart."""
    match kind:
        case "timestamp":
            return parse_timestamp(column, text)
        case "seconds":
            return parse_seconds(column, text)
        case "tokens":
            return parse_int(column, text, 1)
        case "max":
            return 0 if not text.strip() else parse_int(column, text, 1)
        case "samples":
            return 1 if not text.strip() else parse_int(column, text, 1, MAX_SAMPLES)
        case "priority":
            return 0 if not text.strip() else parse_int(column, text, -MAX_TOKENS)
        case _:
            return 0 if not text.strip() else parse_int(column, text, 0)


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

    def notes(self, path: str) -> tuple[str, ...]:
        """The count of failed requests in words."""
        return (f"{path}: {self.num_failed} failed requests (0 response tokens) skipped",) if self.num_failed else ()

    def _fast(self, rows: list[list[str]]) -> dict[str, Ints] | None:
        """The chunk's columns, or None if any cell needs a closer look."""
        width = len(self.header)
        if any(len(row) != width for row in rows):
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
                if self._allowed is not None:
                    raise ValueError
                return np.array([parse_timestamp("", cell) for cell in cells], dtype=np.int64)
            case "seconds":
                times = np.array(cells, dtype=np.float64)
                if not (np.all(times >= 0) and np.all(times <= EXACT_SECONDS)):
                    raise ValueError
                return np.rint(times * NS_PER_S).astype(np.int64)
        numbers = np.array(cells, dtype=np.float64)
        low = 1 if column.kind in ("tokens", "samples", "max") else -MAX_TOKENS if column.kind == "priority" else 0
        high = MAX_SAMPLES if column.kind == "samples" else MAX_TOKENS
        if not (np.all(numbers >= low) and np.all(numbers <= high) and np.all(numbers == np.floor(numbers))):
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
                values[fills] = _cell(column.kind, self.header[index], row[index])
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
