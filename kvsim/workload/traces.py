"""Loading request traces: Azure, Mooncake, BurstGPT, Vidur, ShareGPT, and a plain CSV of our own.

    plain CSV: arrival_s,prompt_tokens,output_tokens[,max_output_tokens,prefix_group,prefix_tokens,n,priority,session]

The format is found from the header or the first line, or named. A trace is columns (numpy), sorted by time; requests
are made from them one by one, when they are due (`kvsim.workload.table`). Where the times are dates or begin anywhere
(Azure, BurstGPT), the first arrival becomes 0; elsewhere times are kept as they stand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kvsim.types import NS_PER_MS, NS_PER_S
from kvsim.workload.trace_files import (
    EXACT_SECONDS,
    MAX_LINE_CHARS,
    MAX_SECONDS,
    MAX_TOKENS,
    BadRow,
    Chunk,
    CsvRows,
    MissingKey,
    RowErrors,
    fail,
    listed,
    normal,
    open_text,
    parse_int,
    parse_seconds,
    parse_timestamp,
    split_header,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

FORMATS = ("azure", "mooncake", "burstgpt", "vidur", "sharegpt", "csv")
MOONCAKE_BLOCK = 512
MAX_ROWS = 100_000_000
_DECODER = json.JSONDecoder()
_READ_CHARS = 1 << 20
_SPACES = "\ufeff \t\r\n"
_MESSAGE_LISTS = ("conversations", "conversation", "messages")
"""Where published conversations keep their messages."""
_ASKS = frozenset({"human", "user"})
_SETS_OUT = frozenset({"system", "developer"})
_HASH_BLOCKS = (512, 16, 32, 64, 128, 256, 1024, 8)
"""Tokens per hash id that are tried when the scenario names none."""


@dataclass(frozen=True)
class Trace:
    """Requests as columns, one entry a request, sorted by arrival (equal arrivals in file order).

    `arrival_ns` is None where the file has no times; `max_output` where it states none. `prefix_group` and `session`
    are codes (-1: none). The hash ids of request i are `hash_ids[hash_offsets[i]:hash_offsets[i + 1]]`: dense codes,
    numbered in order of first appearance. `file_rank` is each row's place in the file where that is not its place here.
    """

    path: str
    format: str
    arrival_ns: Ints | None
    prompt: Ints
    output: Ints
    max_output: Ints | None = None
    prefix_group: Ints | None = None
    prefix_tokens: Ints | None = None
    n: Ints | None = None
    priority: Ints | None = None
    session: Ints | None = None
    hash_ids: Ints | None = None
    hash_offsets: Ints | None = None
    hash_block_size: int = 0
    file_rank: Ints | None = None
    num_skipped: int = 0
    num_failed: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt)

    def take(self, rows: Ints) -> Trace:
        """The trace of these rows, in this order."""
        return _take(self, rows)

    @property
    def mean_rate(self) -> float | None:
        """Requests per second: gaps over the time they fill; None without two distinct times."""
        if self.arrival_ns is None or len(self) < 2 or self.arrival_ns[-1] == self.arrival_ns[0]:
            return None
        return (len(self) - 1) * NS_PER_S / float(self.arrival_ns[-1] - self.arrival_ns[0])


_COLUMNS = (
    "arrival_ns",
    "prompt",
    "output",
    "max_output",
    "prefix_group",
    "prefix_tokens",
    "n",
    "priority",
    "session",
    "file_rank",
)


def load_trace(
    path: str | Path,
    trace_format: str | None = None,
    *,
    hash_block_size: int | None = None,
    chars_per_token: float = 4.0,
    on_bad_row: str = "error",
    needs_times: bool = True,
) -> Trace:
    """The trace in a file, whatever its format.

    Raises ScenarioError naming file, row, column, value and cure for anything that cannot be used; with
    `on_bad_row="skip"` bad rows are dropped and counted. `needs_times=False` accepts a plain CSV without `arrival_s`.
    """
    name = str(path)
    if trace_format is not None and trace_format not in FORMATS:
        fail(name, f"trace_format {trace_format!r} is not known{_close(trace_format)}; known: {', '.join(FORMATS)}")
    if on_bad_row not in ("error", "skip"):
        fail(name, f"on_bad_row is {on_bad_row!r}; it is error or skip")
    errors = RowErrors(name, on_bad_row)
    with open_text(path) as text:
        first = _first_line(text)
        if not first.strip():
            fail(name, "is empty; a trace has at least one request")
        if first.lstrip("\ufeff \t").startswith("{") and first.rstrip()[-1] in "{[":
            fail(name, "is one JSON object over several lines; write one object a line, or a list of the requests")
        text.seek(0)
        entries: Iterable[object] | None = None
        if first.lstrip().lstrip("\ufeff").startswith("[") and trace_format in (None, "sharegpt", "mooncake"):
            entries = _json_list(text, name)
        if trace_format is not None:
            found = trace_format
        elif entries is None:
            found = _format_of(name, first)
        else:
            found, entries = _format_of_entries(entries)
        if found == "sharegpt":
            trace = _load_sharegpt(_json_lines(text) if entries is None else entries, errors, chars_per_token)
        elif found == "mooncake":
            trace = _load_mooncake(_json_lines(text) if entries is None else entries, errors, hash_block_size)
        else:
            trace = _load_csv(text, errors, found, needs_times)
    if not len(trace):
        if not errors.num_skipped and not trace.num_failed:
            what = "its list is empty" if entries is not None else "it has a header and no row below it"
            fail(name, f"no request in it: {what}; a trace has at least one request")
        first = f"; the first: {errors.first_skipped}" if errors.first_skipped else ""
        fail(name, f"no usable request in it ({errors.num_skipped} bad rows skipped, {trace.num_failed} failed){first}")
    notes = (*errors.notes(), *trace.notes)
    return _sorted(replace(trace, num_skipped=errors.num_skipped, notes=notes))


def _close(name: str) -> str:
    close = get_close_matches(name, FORMATS, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _first_line(text: TextIO) -> str:
    """The first line that is not blank, or its first 64 KiB."""
    while line := text.readline(1 << 16):
        if line.strip():
            return line
    return ""


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
_FROM_ZERO = frozenset({"azure", "burstgpt"})
"""Formats whose clock starts anywhere."""


def _format_of(path: str, first: str) -> str:
    start = first.lstrip().lstrip("\ufeff")
    if start.startswith("{"):
        has_messages = any(f'"{key}"' in start for key in _MESSAGE_LISTS)
        return "sharegpt" if has_messages and '"input_length"' not in start else "mooncake"
    found = {normal(name) for name in split_header(first)[1]}
    scores = {name: sum(bool(column.normal_names & found) for column in cols) for name, cols in _CSV_FORMATS.items()}
    # A shared column (Timestamp) decides nothing, so a format's own columns count double.
    for name, columns in _CSV_FORMATS.items():
        scores[name] += sum(bool(c.normal_names & found) for c in columns if c.fills in ("prompt", "output"))
    best = max(scores, key=lambda name: scores[name])
    # Timestamp alone says nothing: many files have it.
    if scores[best] < (2 if best == "azure" else 1):
        fail(
            path,
            f"is no known trace: its first line is {first.strip()[:80]!r}. A trace begins with a JSON object or "
            f"with column names, such as arrival_s,prompt_tokens,output_tokens; formats: {', '.join(FORMATS)}",
        )
    return best


def _format_of_entries(entries: Iterable[object]) -> tuple[str, Iterable[object]]:
    """A list of conversations, or of the objects that Mooncake's lines hold; and all of its entries."""
    left = iter(entries)
    looked_at: list[object] = []
    first: Mapping[str, object] = {}
    for entry in left:
        looked_at.append(entry)
        if isinstance(entry, dict):
            first = entry
            break
    is_mooncake = "conversations" not in first and bool({"input_length", "output_length", "hash_ids"} & first.keys())
    return "mooncake" if is_mooncake else "sharegpt", chain(looked_at, left)


def _load_csv(text: TextIO, errors: RowErrors, trace_format: str, needs_times: bool) -> Trace:
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


_NEAR = 0.75
_SHORTEST_PART = 4


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
            return 1 if not text.strip() else parse_int(column, text, 1, 10_000)
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
        high = 10_000 if column.kind == "samples" else MAX_TOKENS
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


@dataclass
class _Lines:
    """A Mooncake trace under construction."""

    times: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    codes: dict[int | str, int] = field(default_factory=dict)
    has_ids: bool = False
    unnamed: list[int] = field(default_factory=list)
    """Numbers of the rows without hash ids, as long as no row has any."""
    first_unnamed: MissingKey | None = None
    num_in_seconds: int = 0

    def add(self, row: Mapping[str, Any], number: int) -> None:
        """Append object `number`; raises BadRow and leaves the columns as they were."""
        for column in ("timestamp", "input_length", "output_length"):
            if column not in row:
                raise MissingKey(column, row)
        # Qwen-Bailian's lines are Mooncake's with the chat's number in each, and with seconds.
        in_seconds = "chat_id" in row
        time = parse_seconds("timestamp", row["timestamp"], NS_PER_S if in_seconds else NS_PER_MS)
        prompt = parse_int("input_length", row["input_length"], 1)
        output = parse_int("output_length", row["output_length"], 1)
        ids = self._ids(row)
        if "hash_ids" not in row:
            self.first_unnamed = self.first_unnamed or MissingKey("hash_ids", row)
            self.unnamed.append(number)
        self.num_in_seconds += in_seconds
        self.times.append(time)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.ids.extend(self.codes.setdefault(id_, len(self.codes)) for id_ in ids)
        self.offsets.append(len(self.ids))

    def _ids(self, row: Mapping[str, Any]) -> list[int | str]:
        if "hash_ids" not in row:
            if self.has_ids:
                raise MissingKey("hash_ids", row)
            return []
        ids = row["hash_ids"]
        if not isinstance(ids, list):
            raise BadRow("hash_ids", ids, "is not a list")
        for id_ in ids:
            if isinstance(id_, bool) or not isinstance(id_, int | str):
                raise BadRow("hash_ids", id_, "is neither a whole number nor a name")
        self.has_ids = True
        return ids

    def drop_unnamed(self, errors: RowErrors) -> None:
        """Report the rows before the first one with hash ids as bad, and forget them; nothing where no row has any."""
        if not self.has_ids or self.first_unnamed is None:
            return
        for number in self.unnamed:
            errors.report(f"row {number}", self.first_unnamed)
        num_dropped = len(self.unnamed)
        del self.times[:num_dropped], self.prompts[:num_dropped], self.outputs[:num_dropped]
        del self.offsets[:num_dropped]
        self.first_unnamed = None
        self.unnamed.clear()


def _load_mooncake(entries: Iterable[object], errors: RowErrors, hash_block_size: int | None) -> Trace:
    import numpy as np

    if hash_block_size is not None and hash_block_size < 1:
        fail(errors.path, f"hash_block_size is {hash_block_size}; it is at least 1")
    lines = _Lines()
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, _Line) and not entry.text:
            continue
        try:
            lines.add(_object(entry), number)
        except BadRow as bad:
            errors.report(f"row {number}", bad)
    lines.drop_unnamed(errors)
    prompt = np.array(lines.prompts, dtype=np.int64)
    trace = Trace(
        errors.path, "mooncake", np.array(lines.times, dtype=np.int64), prompt, np.array(lines.outputs, dtype=np.int64)
    )
    if lines.num_in_seconds:
        note = (
            f"{errors.path}: {lines.num_in_seconds} rows have a chat_id, as Qwen-Bailian's: their timestamps are "
            "seconds, and every turn comes at its own"
        )
        trace = replace(trace, notes=(note,))
    if not lines.ids:
        return trace
    offsets = np.array(lines.offsets, dtype=np.int64)
    size, notes = _hash_block_size(errors.path, prompt, np.diff(offsets), hash_block_size)
    return replace(
        trace,
        hash_ids=np.array(lines.ids, dtype=np.int64),
        hash_offsets=offsets,
        hash_block_size=size,
        notes=(*trace.notes, *notes),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a file, not yet read as JSON."""

    text: str


def _json_lines(text: TextIO) -> Iterator[_Line]:
    for line in text:
        yield _Line(line.strip().strip("\ufeff"))


class _ListText:
    """The text of a JSON list, read piece by piece, and how far it is decoded."""

    def __init__(self, text: TextIO, path: str) -> None:
        self._text = text
        self._path = path
        self._read = ""
        self._at = 0

    def _more(self) -> bool:
        """Forget what is decoded and read as much again as is left; False at the end of the file."""
        self._read, self._at = self._read[self._at :], 0
        if len(self._read) >= MAX_LINE_CHARS:
            fail(self._path, f"has an entry of more than {MAX_LINE_CHARS:,} characters in its list; this is no trace")
        piece = self._text.read(max(_READ_CHARS, len(self._read)))
        self._read += piece
        return bool(piece)

    def next_char(self) -> str:
        """Pass over spaces and take the character behind them; "" at the end of the file."""
        while True:
            for at in range(self._at, len(self._read)):
                if self._read[at] not in _SPACES:
                    self._at = at + 1
                    return self._read[at]
            self._at = len(self._read)
            if not self._more():
                return ""

    def untake(self) -> None:
        """The character taken last is the next one again."""
        self._at -= 1

    def entry(self, number: int) -> object:
        """Entry `number` of the list; it may go on behind what has been read."""
        value: object = None
        while True:
            problem, left = "", len(self._read) - self._at
            try:
                value, end = _DECODER.raw_decode(self._read, self._at)
                left = len(self._read) - end
            except (ValueError, RecursionError) as error:
                problem = _json_problem(error)
            # "1e+" may be the beginning of another number.
            if (not problem and left > 2) or not self._more():
                break
        if problem:
            self.fail(f"entry {number}: {problem}")
        self._at = len(self._read) - left
        return value

    def fail(self, problem: str) -> NoReturn:
        fail(self._path, f"is no JSON: {problem}")


def _json_list(text: TextIO, path: str) -> Iterator[object]:
    """The entries of one JSON list, each decoded when its turn comes: the whole need not fit into memory."""
    source = _ListText(text, path)
    source.next_char()
    number = 0
    found = source.next_char()
    while found != "]" or number:
        number += 1
        if found:
            source.untake()
        yield source.entry(number)
        if (end := source.next_char()) != ",":
            if end != "]":
                source.fail(f"entry {number} is followed by {end or 'the end of the file'!r}, not by a comma or ]")
            break
        found = source.next_char()
    if source.next_char():
        source.fail("text follows the end of the list")


def _object(entry: object) -> Mapping[str, Any]:
    """An entry of a list, or a line, as the object it should be; else BadRow."""
    place, value = "(entry)", entry
    if isinstance(entry, _Line):
        place = "(line)"
        try:
            value = json.loads(entry.text)
        except (ValueError, RecursionError) as error:
            raise BadRow(place, entry.text, f"is no JSON ({_json_problem(error)})") from None
    if not isinstance(value, dict):
        raise BadRow(place, entry.text if isinstance(entry, _Line) else entry, "is no JSON object")
    return value


def _json_problem(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _hash_block_size(path: str, prompt: Ints, num_ids: Ints, stated: int | None) -> tuple[int, tuple[str, ...]]:
    """Tokens per id: as stated, or the size for which most rows have one id per begun block."""
    import numpy as np

    fits = {}
    for size in (stated,) if stated else _HASH_BLOCKS:
        # Some files name the last, partial block, some do not.
        fits[size] = int(np.sum((num_ids == -(-prompt // size)) | (num_ids == prompt // size)))
    size = max(fits, key=lambda candidate: fits[candidate])
    notes = []
    if stated is None and fits[size] * 2 < len(prompt):
        fail(
            path,
            f"its hash_ids fit no known block size (row 1: {prompt[0]} tokens, {num_ids[0]} ids); "
            "set hash_block_size to the tokens one id stands for",
        )
    if stated is None and size != MOONCAKE_BLOCK:
        notes.append(f"{path}: hash_block_size {size} was found from the rows")
    if odd := len(prompt) - fits[size]:
        notes.append(
            f"{path}: {odd} rows do not have one hash id per {size} tokens; "
            "missing ids count as unshared text, surplus ones stand for no token"
        )
    return size, tuple(notes)


def _load_sharegpt(entries: Iterable[object], errors: RowErrors, chars_per_token: float) -> Trace:
    """First exchange of each conversation; those without a prompt and an answer are left out and counted."""
    import numpy as np

    if not 0 < chars_per_token < MAX_TOKENS:
        fail(errors.path, f"chars_per_token is {chars_per_token}; it is a number above 0, such as 4")
    lengths: list[tuple[int, int]] = []
    num_failed = 0
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, _Line) and not entry.text:
            continue
        try:
            chars = _first_exchange(_object(entry) if isinstance(entry, _Line) else entry)
        except BadRow as bad:
            errors.report(f"row {number}", bad)
            continue
        if chars is None:
            num_failed += 1
        else:
            lengths.append((_tokens(chars[0], chars_per_token), _tokens(chars[1], chars_per_token)))
    columns = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    notes = [f"{errors.path}: lengths are estimates, {chars_per_token:g} characters per token"]
    if num_failed:
        notes.append(f"{errors.path}: {num_failed} conversations without a first exchange skipped")
    return Trace(
        errors.path,
        "sharegpt",
        None,
        columns[:, 0].copy(),
        columns[:, 1].copy(),
        num_failed=num_failed,
        notes=tuple(notes),
    )


def _tokens(num_chars: int, chars_per_token: float) -> int:
    return min(MAX_TOKENS, max(1, round(num_chars / chars_per_token)))


def _first_exchange(entry: object) -> tuple[int, int] | None:
    """Characters of the first message that is answered, with the system prompt before it, and of the answer.

    None if no message is answered, or if one of the two has no text. Who speaks is looked at where it is told.
    """
    if not isinstance(entry, dict):
        raise BadRow("(entry)", entry, "is no conversation; it should be {id, conversations: [{from, value}]}")
    name = next((key for key in _MESSAGE_LISTS if key in entry), None)
    if name is None:
        raise MissingKey("conversations", entry)
    messages = entry[name]
    if not isinstance(messages, list):
        raise BadRow(name, messages, "is not a list")
    system = question = 0
    is_asked = False
    for message in messages:
        role, num_chars = _message(message)
        if role in _SETS_OUT:
            system += num_chars
        elif is_asked and role not in _ASKS:
            return (system + question, num_chars) if question and num_chars else None
        else:
            is_asked = role in _ASKS or not role
            question = num_chars
    return None


def _message(message: object) -> tuple[str, int]:
    """Who speaks ("" where that is not told), and how many characters."""
    if isinstance(message, dict):
        text = message.get("value", message.get("content"))
        role = message.get("from", message.get("role"))
        if isinstance(text, str):
            return (role.strip().lower() if isinstance(role, str) else ""), len(text)
    raise BadRow("value", message, "is no message; it should be {from, value} or {role, content}, with a text")


def _take(trace: Trace, rows: Ints) -> Trace:
    import numpy as np

    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        values = getattr(trace, name)
        columns[name] = None if values is None else values[rows]
    if trace.hash_ids is not None and trace.hash_offsets is not None:
        counts = np.diff(trace.hash_offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        starts = np.repeat(trace.hash_offsets[:-1][rows] - offsets[:-1], counts)
        columns["hash_ids"] = trace.hash_ids[starts + np.arange(offsets[-1])]
        columns["hash_offsets"] = offsets
    return replace(trace, **columns)


def _sorted(trace: Trace) -> Trace:
    import numpy as np

    times = trace.arrival_ns
    if times is None or bool(np.all(times[1:] >= times[:-1])):
        return trace
    num_late = int(np.sum(times[1:] < times[:-1]))
    note = f"{trace.path}: {num_late} rows are earlier than the row before them; sorted by time"
    order = np.argsort(times, kind="stable")
    return replace(trace.take(order), file_rank=order, notes=(*trace.notes, note))


def in_file_order(trace: Trace) -> Trace:
    """The same requests in the order of the file."""
    import numpy as np

    return trace if trace.file_rank is None else trace.take(np.argsort(trace.file_rank, kind="stable"))


def window(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The requests that arrive in [start_s, end_s); `start_s` becomes time 0."""
    import numpy as np

    times = _times(trace, "window")
    if not start_s < end_s:
        fail(trace.path, f"window [{start_s}, {end_s}] is empty: its end must be later than its start")
    start = round(start_s * NS_PER_S)
    end = min(round(min(end_s, MAX_SECONDS) * NS_PER_S), 2**63 - 1)
    rows = np.flatnonzero((times >= start) & (times < end))
    if not len(rows):
        fail(
            trace.path,
            f"no request in window [{start_s}, {end_s}]; "
            f"the trace runs from {times[0] / NS_PER_S:g} to {times[-1] / NS_PER_S:g} s",
        )
    part = trace.take(rows)
    return replace(part, arrival_ns=times[rows] - start)


def first(trace: Trace, num_requests: int) -> Trace:
    """The first `num_requests` requests in order of time (all of them, if there are fewer)."""
    import numpy as np

    if num_requests < 1:
        fail(trace.path, f"first is {num_requests}; it is at least 1")
    return trace.take(np.arange(min(num_requests, len(trace))))


def at_speed(trace: Trace, speed: float) -> Trace:
    """The trace played `speed` times as fast."""
    import numpy as np

    if not 0 < speed < float("inf"):
        fail(trace.path, f"speed is {speed}; it is a number above 0, 2.0 plays the trace twice as fast")
    times = _times(trace, "speed")
    if float(times[-1]) / speed > MAX_SECONDS * NS_PER_S:
        fail(trace.path, f"speed {speed} stretches the trace beyond {MAX_SECONDS:g} s")
    return replace(trace, arrival_ns=np.rint(times / speed).astype(np.int64))


def at_rate(trace: Trace, rate_per_s: float) -> Trace:
    """The trace stretched or compressed to a mean rate; infinite: everything at once."""
    import numpy as np

    if not rate_per_s > 0:
        fail(trace.path, f"rate is {rate_per_s}; it is a number of requests per second above 0")
    if rate_per_s == float("inf"):
        return replace(trace, arrival_ns=np.zeros(len(trace), dtype=np.int64))
    _times(trace, "rate")
    mean_rate = trace.mean_rate
    if mean_rate is None:
        fail(trace.path, "has no mean rate (fewer than two distinct times), so rate cannot rescale it")
    return at_speed(trace, rate_per_s / mean_rate)


def repeated(trace: Trace, times: int) -> Trace:
    """The trace played `times` times, each pass one mean gap after the last: the same texts where they are known."""
    import numpy as np

    if times < 1:
        fail(trace.path, f"repeat is {times}; it is at least 1")
    if times == 1:
        return trace
    if len(trace) * times > MAX_ROWS:
        fail(trace.path, f"repeat {times} makes {len(trace) * times} requests; {MAX_ROWS} are the most")
    rows = np.tile(np.arange(len(trace)), times)
    # Passes follow each other, so that the order of the file no longer says anything.
    whole = replace(trace, file_rank=None).take(rows)
    if whole.arrival_ns is None:
        return whole
    first_ns, last_ns = int(whole.arrival_ns[0]), int(whole.arrival_ns[len(trace) - 1])
    period = last_ns - first_ns + (last_ns - first_ns) // max(1, len(trace) - 1)
    if last_ns + period * times > MAX_SECONDS * NS_PER_S:
        fail(trace.path, f"repeat {times} stretches the trace beyond {MAX_SECONDS:g} s")
    passes = np.repeat(np.arange(times, dtype=np.int64), len(trace))
    session = whole.session
    if session is not None:
        # A conversation of the second pass is another one.
        session = np.where(session < 0, session, session + passes * (int(session.max()) + 1))
    return replace(whole, arrival_ns=whole.arrival_ns + passes * period, session=session)


def _times(trace: Trace, knob: str) -> Ints:
    if trace.arrival_ns is None:
        fail(trace.path, f"has no arrival times, so {knob} means nothing; give workload.arrivals instead")
    return trace.arrival_ns
