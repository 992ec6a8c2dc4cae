"""A recorded run as it was logged: its folder read, every value checked."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.types import ScenarioError

_MOST = (1 << 31) - 1
_MOST_SECONDS = 1e12
_REQUEST_KEYS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True)
class Keys:
    """An object of `meta.json`, read key by key: null counts as absent (None), numbers may be text.

    A value of another kind, or out of range, is a ScenarioError that names the file, the key and what it must be.
    """

    path: Path
    prefix: str
    values: Mapping[str, Any]

    def inner(self, key: str) -> Keys:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(key, "a JSON object")
        return Keys(self.path, f"{self.prefix}{key}.", value or {})

    def integer(self, key: str, most: int = _MOST, least: int = 1) -> int | None:
        number = self._number(key)
        if number is None:
            return None
        if not number.is_integer() or not least <= number <= most:
            raise self.bad(key, f"a whole number from {least} to {most:,}")
        return int(number)

    def choice(self, key: str, known: Seq[str]) -> str | None:
        told = self.text(key)
        if told is None:
            return None
        name = told.strip().lower().removeprefix("torch.")
        if name not in known:
            raise self.bad(key, f"one of {', '.join(known)}")
        return name

    def watermark(self) -> float | None:
        number = self._number("watermark")
        if number is not None and not 0.0 <= number < 1.0:
            raise self.bad("watermark", "a share of at least 0, below 1")
        return number

    def share(self, key: str) -> float | None:
        number = self._number(key)
        if number is not None and not 0.0 < number <= 1.0:
            raise self.bad(key, "a share above 0, at most 1")
        return number

    def truth(self, key: str) -> bool | None:
        value = self.values.get(key)
        told = value.strip().lower() if isinstance(value, str) else value
        if told is None or isinstance(told, bool):
            return told
        if told in ("true", "false"):
            return bool(told == "true")
        raise self.bad(key, "true or false")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        raise self.bad(key, "a text")

    def _number(self, key: str) -> float | None:
        value = self.values.get(key)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.bad(key, "a number")
        return number

    def bad(self, key: str, wanted: str) -> ScenarioError:
        return ScenarioError(
            f"{self.path}: {self.prefix}{key} is {self.values.get(key)!r}; it must be {wanted}: write what the engine "
            f"ran with, or leave the key out where that was its default"
        )


@dataclass(frozen=True)
class RecordedRequest:
    """One line of `requests.jsonl`; times in seconds on the engine's clock."""

    request_id: str
    input_len: int
    output_len: int
    queued_s: float
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True)
class RecordedRun:
    """A run as it was logged. `series` holds the columns of `timeseries.csv`, empty where there is none."""

    folder: Path
    meta: Mapping[str, Any]
    requests: tuple[RecordedRequest, ...]
    series: Mapping[str, np.ndarray]
    series_offset_s: float
    """Seconds of the series' clock at the first queued request."""

    @property
    def keys(self) -> Keys:
        """`meta.json`, for reading."""
        return Keys(self.folder / "meta.json", "", self.meta)

    @property
    def engine_kwargs(self) -> Keys:
        """The engine's arguments in it."""
        return self.keys.inner("engine_kwargs")

    @property
    def first_queued_s(self) -> float:
        return min(request.queued_s for request in self.requests)


def load_run(folder: str | Path) -> RecordedRun:
    """Read a recorded run. Raises ScenarioError naming the file and line that cannot be used."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: no such folder; a recorded run holds meta.json and requests.jsonl")
    meta = _read_json(folder / "meta.json")
    rows = _read_lines(folder / "requests.jsonl")
    requests = tuple(_recorded(folder / "requests.jsonl", number, row) for number, row in rows)
    if not requests:
        raise ScenarioError(f"{folder / 'requests.jsonl'}: no request in it")
    told = Counter(str(row["request_id"]) for _, row in rows if row.get("request_id") is not None)
    for name, count in told.most_common(1):
        if count > 1:
            raise ScenarioError(
                f"{folder / 'requests.jsonl'}: request_id {name} is there {count} times; keep one row per request"
            )
    if max(request.last_token_s for request in requests) <= min(request.queued_s for request in requests):
        raise ScenarioError(
            f"{folder / 'requests.jsonl'}: all times are the same; they must be the engine's, in seconds"
        )
    series = _read_series(folder / "timeseries.csv")
    return RecordedRun(folder, meta, requests, series, _series_offset_s(Keys(folder / "meta.json", "", meta), rows))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(_text_of(path))
    except ValueError as error:
        raise ScenarioError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ScenarioError(f"{path}: must be a JSON object, not {type(value).__name__}")
    return value


def _text_of(path: Path) -> str:
    """The file's text; gzip and byte-order marks are recognised."""
    from kvsim.workload.trace_files import open_text

    if not path.is_file():
        raise ScenarioError(f"{path}: no such file; a recorded run holds meta.json and requests.jsonl")
    with open_text(path) as handle:
        text = handle.read()
    if "\0" in text:
        raise ScenarioError(f"{path}: not a text file, or UTF-16 without its mark: save it as UTF-8")
    return text


def _read_lines(path: Path) -> list[tuple[int, Mapping[str, Any]]]:
    rows = []
    # Not `splitlines`: a text in a row may hold other separators, such as U+2028.
    for number, line in enumerate(re.split("\r\n?|\n", _text_of(path)), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ScenarioError(f"{path}: line {number}: not JSON: {error}") from None
            if not isinstance(row, Mapping):
                raise ScenarioError(f"{path}: line {number}: must be a JSON object")
            rows.append((number, row))
    return rows


def _recorded(path: Path, number_of_line: int, row: Mapping[str, Any]) -> RecordedRequest:
    def number(key: str) -> float:
        value = row.get(key)
        if key not in row:
            raise ScenarioError(
                f"{path}: line {number_of_line}: {key} is missing; a request has {', '.join(_REQUEST_KEYS)}, this one "
                f"has {', '.join(map(str, row)) or 'nothing'}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST_SECONDS:
            raise bad(key, "it must be a number, at most 1e12 (times in seconds)")
        return float(value)

    def tokens(key: str) -> int:
        value = number(key)
        if not value.is_integer() or not 1 <= value <= _MOST:
            raise bad(key, "it must be a whole number, at least 1: leave out requests that failed")
        return int(value)

    def bad(key: str, what: str) -> ScenarioError:
        return ScenarioError(f"{path}: line {number_of_line}: {key} is {row.get(key)!r}; {what}")

    request = RecordedRequest(
        str(row.get("request_id", number_of_line - 1)),
        tokens("input_toks"),
        tokens("output_toks"),
        number("queued_ts"),
        number("first_token_ts"),
        number("last_token_ts"),
    )
    if request.first_token_s < request.queued_s:
        raise bad(
            "first_token_ts", f"it must not be before queued_ts, {row['queued_ts']!r}: all three are of one clock"
        )
    if request.last_token_s < request.first_token_s:
        raise bad("last_token_ts", f"it must not be before first_token_ts, {row['first_token_ts']!r}")
    if row.get("arrival_time") is not None:
        number("arrival_time")
    return request


def _read_series(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        return {}
    lines = _text_of(path).splitlines(keepends=True)
    first = lines[0] if lines else ""
    reader = csv.reader(lines, delimiter=max(",;\t", key=first.count))
    try:
        header = [name.strip() for name in next(reader, [])]
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ScenarioError(
            f"{path}: cannot be read as CSV ({error}); leave the file out where there is none"
        ) from None
    twice = [name for name in header if name and header.count(name) > 1]
    if twice:
        raise ScenarioError(f"{path}: column {twice[0]!r} is there {header.count(twice[0])} times; keep one")
    if not rows:
        return {}
    places = [(index, name) for index, name in enumerate(header) if name]
    return {
        name: np.array([_series_cell(path, line, name, row[index : index + 1]) for line, row in rows])
        for index, name in places
    }


def _series_cell(path: Path, line: int, column: str, cell: Seq[str]) -> float:
    """A number; NaN where the cell is empty or absent, which no time may be."""
    text = cell[0].strip() if cell else ""
    number: float | None
    try:
        number = float(text or "nan")
    except ValueError:
        number = None
    if number is None or (column == "t" and not math.isfinite(number)):
        raise ScenarioError(
            f"{path}: line {line}, column {column!r}: {text!r} is not a number; correct the cell"
            + ("" if column == "t" else ", or leave it empty where nothing was logged")
        )
    return number


def _series_offset_s(meta: Keys, rows: Seq[tuple[int, Mapping[str, Any]]]) -> float:
    """The series counts from the start of the run; the first request came this much later (0 where nobody says)."""
    from datetime import UTC, datetime

    arrivals = [row["arrival_time"] for _, row in rows if row.get("arrival_time") is not None]
    text = meta.text("started_at")
    if text is None:
        return 0.0
    try:
        date = datetime.fromisoformat(text.replace("Z", "+00:00"))
        # What names no time zone must not depend on this machine's.
        started = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise meta.bad("started_at", 'a date such as "2026-04-25T18:47:18Z"') from None
    offset = min(arrivals, default=started) - started
    return offset if 0.0 <= offset < 60.0 else 0.0
