"""Reading a trace file as text: compression, encodings, delimiters, rows, and errors that name their place."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from kvsim.types import NS_PER_MS, NS_PER_S, Ns, ScenarioError, shown

MAX_TOKENS = 2**31 - 1
MAX_SAMPLES = 10_000
"""Sequences of one request: each is modelled by itself."""
MAX_SECONDS = 9e9
"""Times are 64-bit nanoseconds: about 290 years either way."""
EXACT_SECONDS = 2e6
"""Up to here a double, times 1e9, rounds to the right nanosecond."""

_GZIP_MAGIC = b"\x1f\x8b"
_UNREAD = {
    "is packed with bzip2": re.compile(rb"BZh[1-9]1AY&"),
    "is packed with xz": re.compile(rb"\xfd7zXZ\x00"),
    "is packed with zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "is a zip archive": re.compile(rb"PK\x03\x04"),
    "is a Parquet table": re.compile(rb"PAR1\x15"),
}
"""How files begin that people have tables in, and that are not read."""
_BOMS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_DELIMITERS = ",;\t"
_QUOTED = re.compile(r'"[^"]*"')
_TIMESTAMP = re.compile(
    r"([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})[ T]+([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]+))?"
    r"\s*(Z|UTC|GMT|[+-][0-9]{2}(?::?[0-9]{2})?)?",
    re.IGNORECASE,
)
_YEARS = range(1700, 2250)


class BadRow(Exception):
    """One row cannot be used; `column` and `value` say which cell is to blame."""

    def __init__(self, column: str, value: object, problem: str) -> None:
        super().__init__(f"{shown(value)} {problem}")
        self.column = column
        self.value = value
        self.problem = problem


class MissingKey(BadRow):
    """An object of a JSON trace has no such key, or null there."""

    def __init__(self, column: str, row: Mapping[str, object]) -> None:
        super().__init__(column, None, "is missing")
        self.args = (f"is missing; keys found: {listed(key for key, value in row.items() if value is not None)}",)


class UnknownKey(BadRow):
    """An object has a key that none of its kind has."""

    def __init__(self, column: str, value: object, known: Iterable[str]) -> None:
        super().__init__(column, value, "is of an unknown key")
        close = get_close_matches(column, list(known), n=1)
        self.args = ("unknown key" + (f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"),)


class RowErrors:
    """What to do with a bad row: raise a ScenarioError that names the place, or count it and go on."""

    def __init__(self, path: str, on_bad_row: str, skipped_by: str | None) -> None:
        self.path = path
        self.num_skipped = 0
        self.first_skipped = ""
        self._skip = on_bad_row == "skip"
        self._cure = f"correct the row, or {skipped_by}" if skipped_by else "correct the row"

    def report(self, place: str, bad: BadRow) -> None:
        """Bad row at `place`, such as "row 3 (line 4)": raises unless bad rows are skipped."""
        text = f"{place}, column {shown(bad.column)}: {bad}"
        if not self._skip:
            raise ScenarioError(f"{self.path}: {text}; {self._cure}")
        self.num_skipped += 1
        self.first_skipped = self.first_skipped or text

    def restart(self) -> None:
        """Forget what was skipped: the file is read again."""
        self.num_skipped = 0
        self.first_skipped = ""

    def notes(self) -> list[str]:
        """The count of skipped rows in words; empty if there were none."""
        if not self.num_skipped:
            return []
        return [f"{self.path}: {self.num_skipped} bad rows skipped, the first: {self.first_skipped}"]


def fail(path: str, problem: str) -> NoReturn:
    """Raise the ScenarioError of a file that cannot be used at all."""
    raise ScenarioError(f"{path}: {problem}")


def listed(names: Iterable[str]) -> str:
    """Names in quotes, cut where they are many or long."""
    texts = [shown(name) for name in names]
    more = f", and {len(texts) - 20} more" if len(texts) > 20 else ""
    return ", ".join(texts[:20]) + more if texts else "none"


def _opened(path: str | Path) -> io.BufferedReader:
    try:
        # A pipe or a device may never end.
        if os.path.exists(path) and not os.path.isfile(path):
            fail(str(path), "cannot be read: it is no regular file")
        return open(path, "rb")
    except ValueError as error:
        fail(str(path), f"is no file name: {error}")


MAX_LINE_CHARS = 2**26
"""A line that is longer is no row: compressed zeros, or a file of another kind."""


class _TooMuch(Exception):
    """A file has more text in one piece than any trace."""


class _BoundedText(io.TextIOWrapper):
    """Text whose lines have an end."""

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        line = super().readline(MAX_LINE_CHARS if size is None or size < 0 else size)
        if len(line) == MAX_LINE_CHARS:
            raise _TooMuch(f"has a line of more than {MAX_LINE_CHARS:,} characters; this is no trace")
        return line

    def __next__(self) -> str:  # type: ignore[override]
        if line := self.readline():
            return line
        raise StopIteration


@contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """The file as text: gzip and byte-order marks are recognised, undecodable bytes become U+FFFD.

    Raises ScenarioError where it cannot be opened or where its compressed data are damaged.
    """
    try:
        with _opened(path) as raw:
            # Peeking keeps the position, so that the decoder sees the file from its start.
            head = raw.peek(8)[:8]
            packed = head.startswith(_GZIP_MAGIC)
            if problem := next((text for text, begin in _UNREAD.items() if begin.match(head)), None):
                fail(str(path), f"{problem}; give it as text, as it is or packed with gzip")
            buffered = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
            with _BoundedText(buffered, encoding=_encoding(buffered), errors="replace", newline="") as text:
                yield text
    except _TooMuch as error:
        fail(str(path), str(error))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        fail(str(path), f"its compressed data are damaged ({error}); copy or download it again")
    except OSError as error:
        fail(str(path), f"cannot be read: {error.strerror or error}")


def _encoding(buffered: io.BufferedReader[Any]) -> str:
    head = buffered.peek(4)[:4]
    return next((name for bom, name in _BOMS.items() if head.startswith(bom)), "utf-8")


def normal(name: str) -> str:
    """A column's name without case, spaces and punctuation: `Request tokens` and `request_tokens` are one."""
    return "".join(char for char in name.casefold() if char.isalnum())


def split_header(line: str) -> tuple[str, list[str]]:
    """The delimiter of a CSV and the names in its first line; what stands in quotes is one name."""
    line = line.strip().strip("\ufeff")
    unquoted = _QUOTED.sub("", line)
    delimiter = max(_DELIMITERS, key=unquoted.count)
    try:
        cells = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        cells = line.split(delimiter)
    return delimiter, [name.strip().strip('"').strip() for name in cells]


class Chunk(NamedTuple):
    """Some rows of a CSV, the number of the first (from 1), and the line each one ends on."""

    first_row: int
    rows: list[list[str]]
    lines: list[int]

    def place(self, index: int) -> str:
        """Where row `index` of the chunk is found, in words."""
        return f"row {self.first_row + index} (line {self.lines[index]})"


class CsvRows:
    """The rows of a CSV in chunks; the first line that is not blank is the header, blank lines are no rows."""

    def __init__(self, text: TextIO, errors: RowErrors, chunk_rows: int = 16384) -> None:
        self._errors = errors
        self._chunk_rows = chunk_rows
        self._header_lines = 0
        delimiter, self.header = split_header(self._read_header(text))
        self._reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True)
        self._num_rows = 0

    def _read_header(self, text: TextIO) -> str:
        for line in text:
            self._header_lines += 1
            if line.strip().strip("\ufeff"):
                return line
        return ""

    def chunks(self) -> Iterator[Chunk]:
        """All rows; a row's width is not looked at, save that surplus empty cells at its end are dropped."""
        chunk = Chunk(1, [], [])
        while (row := self._next()) is not None:
            chunk.rows.append(row if len(row) <= len(self.header) else self._trimmed(row))
            chunk.lines.append(self._line)
            if len(chunk.rows) == self._chunk_rows:
                yield chunk
                chunk = Chunk(self._num_rows + 1, [], [])
        if chunk.rows:
            yield chunk

    @property
    def _line(self) -> int:
        return self._header_lines + self._reader.line_num

    def _next(self) -> list[str] | None:
        while True:
            try:
                row = next(self._reader)
            except StopIteration:
                return None
            except csv.Error as error:
                place = f"row {self._num_rows + 1} (line {self._line})"
                self._errors.report(place, BadRow(self.header[0], "", f"is no CSV ({error})"))
                continue
            if row and (row[0].strip() or any(cell.strip() for cell in row)):
                self._num_rows += 1
                return row

    def _trimmed(self, row: list[str]) -> list[str]:
        while len(row) > len(self.header) and not row[-1].strip():
            row = row[:-1]
        return row


def parse_number(column: str, text: object) -> float:
    """A finite number in a cell; else BadRow."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise BadRow(column, text, "is not a number")
    if isinstance(text, str) and not text.strip():
        raise BadRow(column, text, "is empty")
    try:
        number = float(text)
    except (ValueError, OverflowError):
        raise BadRow(column, text, "is not a number") from None
    if not math.isfinite(number):
        raise BadRow(column, text, "is not a finite number")
    return number


def parse_int(column: str, text: object, low: int, high: int = MAX_TOKENS) -> int:
    """A whole number of `low .. high` in a cell; else BadRow."""
    number = parse_number(column, text)
    if number != int(number):
        raise BadRow(column, text, "is not a whole number")
    if not low <= number <= high:
        raise BadRow(column, text, f"is not in {low} .. {high}")
    return int(number)


def parse_seconds(column: str, text: object, unit_ns: int = NS_PER_S, low: float = 0.0) -> Ns:
    """A time in units of `unit_ns` nanoseconds as integer nanoseconds; earlier than `low` is a BadRow."""
    number = parse_number(column, text)
    if number < low:
        raise BadRow(column, text, "is negative" if low == 0 else "is too early")
    if abs(number) * unit_ns > MAX_SECONDS * NS_PER_S:
        raise BadRow(column, text, f"is too large for a time{_unit_hint(number, unit_ns)}")
    if isinstance(text, str) and abs(number) * unit_ns > EXACT_SECONDS * NS_PER_S:
        return round(Decimal(text.strip()) * unit_ns)
    return round(number * unit_ns)


def _unit_hint(number: float, unit_ns: int) -> str:
    """The smaller unit in which the number would be a time, as a question; empty if there is none."""
    for name, name_ns in (("milliseconds", NS_PER_MS), ("microseconds", 1000), ("nanoseconds", 1)):
        if name_ns < unit_ns and abs(number) * name_ns <= MAX_SECONDS * NS_PER_S:
            return f"; {name}? divide by {unit_ns // name_ns}"
    return ""


def parse_timestamp(column: str, text: object, low: float = -MAX_SECONDS) -> Ns:
    """A date and time (ISO 8601, any number of fractional digits, zone or none = UTC), or seconds, as nanoseconds.

    Seconds before `low` are a BadRow.
    """
    match = _TIMESTAMP.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        try:
            return parse_seconds(column, text, low=low)
        except BadRow as bad:
            if bad.problem != "is not a number":
                raise
            raise BadRow(column, text, "is neither a date with time nor a number of seconds") from None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    seconds = _day_seconds(column, text, year, month, day) + _clock_seconds(column, text, hour, minute, second)
    return (seconds - _zone_seconds(zone)) * NS_PER_S + (int(f"{fraction:0<9.9}") if fraction else 0)


def _day_seconds(column: str, text: Any, year: str, month: str, day: str) -> int:
    try:
        ordinal = date(int(year), int(month), int(day)).toordinal()
    except ValueError:
        ordinal = 0
    if not ordinal or int(year) not in _YEARS:
        raise BadRow(column, text, "is no date of the calendar")
    return (ordinal - _EPOCH) * 86400


def _clock_seconds(column: str, text: Any, hour: str, minute: str, second: str) -> int:
    # A leap second counts as the first second of the next minute.
    if int(hour) > 23 or int(minute) > 59 or int(second) > 60:
        raise BadRow(column, text, "is no time of the day")
    return int(hour) * 3600 + int(minute) * 60 + int(second)


def _zone_seconds(zone: str | None) -> int:
    if zone is None or zone[0] not in "+-":
        return 0
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600 + int(digits[2:] or 0) * 60
    return -seconds if zone[0] == "-" else seconds


_EPOCH = date(1970, 1, 1).toordinal()
