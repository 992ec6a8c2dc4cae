"""Kernel measurements from CSV: checked rows, sorted into the operations the cost model knows.

One row is one kernel call of one layer. Whole-layer rows (`qkv_proj`, `act_fn`, ...) name a model in `kernel`; its
dimensions turn them into GEMM shapes and row widths.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

import numpy as np

from kvsim.cost.forms import FORMS
from kvsim.cost.layer_ops import PROJECTIONS, RENAMED, ROW_OPS, layer_dims, projection_shape, row_width
from kvsim.cost.measured_columns import COLUMNS_OF, KNOWN, LATENCY_UNITS, SORTS, check_header, column_names
from kvsim.types import ScenarioError
from kvsim.workload.trace_files import open_text

_DELIMITERS = ",;\t|"
_MOST = float(1 << 50)
_MOST_US = 1e9
_UNIT_WORDS = {
    "latency_us": "microseconds", "latency_ns": "nanoseconds", "latency_ms": "milliseconds", "latency_s": "seconds"
}  # fmt: skip

TWO_BYTE_FORMATS = ("bf16", "bfloat16", "fp16", "float16", "half", "f16")
_ONE_BYTE_FORMATS = ("fp8", "int8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "float8_e4m3fn", "float8_e5m2")
_KV_FORMATS = ("", "auto", *TWO_BYTE_FORMATS, *_ONE_BYTE_FORMATS)


@dataclass(frozen=True, order=True)
class GroupKey:
    """What one fit is made for."""

    op: str
    kind: str
    framework: str
    kernel: str
    version: str


@dataclass
class Group:
    """Columns of the rows of one fit; `kinds` keeps the input's name of each row's operation."""

    key: GroupKey
    columns: dict[str, np.ndarray]
    latency_us: np.ndarray
    kinds: np.ndarray
    gpu: str = ""
    widest: tuple[float, str] = (1.0, "")
    """Of rows with equal columns: the largest latency over the smallest, and which columns these are."""

    def take(self, index: np.ndarray) -> Group:
        columns = {name: values[index] for name, values in self.columns.items()}
        return Group(self.key, columns, self.latency_us[index], self.kinds[index], self.gpu, self.widest)


@dataclass
class Measurements:
    """The rows of one file for one GPU."""

    gpu: str
    groups: list[Group]
    num_rows: int
    sources: list[str]
    block_sizes: dict[str, int] = field(default_factory=dict)
    """Tokens per KV block in each framework's decode rows (the most common value)."""
    skipped: dict[str, int] = field(default_factory=dict)
    latency_column: str = "latency_us"
    unread: tuple[str, ...] = ()
    """Columns that no fit takes into account."""


def read_rows(path: str | Path) -> list[tuple[int, dict[str, str]]]:
    """Rows of a measurements file (CSV, gzipped or not), each with the line it ends on.

    Columns may go by other names (`measured_columns`), frameworks and operations are lower-case, blank lines are no
    rows. Raises ScenarioError naming the file, and the column that is missing or there twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ScenarioError(f"{path}: no such measurements file")
    try:
        with open_text(path) as handle:
            first = handle.readline()
            if "\0" in first:
                raise ScenarioError(f"{path}: not a text file, or UTF-16 without its mark: save it as UTF-8 CSV")
            reader = csv.reader(
                chain([first], handle), delimiter=max(_DELIMITERS, key=first.count), skipinitialspace=True
            )
            header = column_names(next(reader, []))
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ScenarioError(f"{path}: not a CSV text file: {error}") from None
    check_header(path, header)
    if not rows:
        raise ScenarioError(f"{path}: no rows below the header; a measurements file has one row per kernel call")
    for line, row in rows:
        if len(row) != len(header):
            raise ScenarioError(
                f"{path}: line {line}: {len(row)} cells where the header has {len(header)}: fill the line up, or take "
                f"it out"
            )
    cells = [(line, dict(zip(header, (cell.strip() for cell in row), strict=True))) for line, row in rows]
    for _, row_cells in cells:
        row_cells["op"], row_cells["framework"] = row_cells["op"].lower(), row_cells["framework"].lower()
    return cells


def load_measurements(path: str | Path, gpu: str | None = None) -> Measurements:
    """Group the rows of `path` by operation, framework, kernel and version.

    `gpu` picks one of several GPUs in the file. Rows of other number formats than two-byte ones (one-byte KV is
    known; an empty `dtype` is a two-byte one) are counted in `skipped`. Raises ScenarioError with file, line and column
    for a value that cannot be used, or if every row is skipped.
    """
    path = Path(path)
    rows = [_Cells(path, line, row) for line, row in read_rows(path)]
    for cells in rows:
        cells.check_key()
    spellings = _the_gpu(path, [cells.row for cells in rows], gpu)
    gpu = spellings[0]
    collected: dict[GroupKey, list[tuple[dict[str, float], float, str]]] = {}
    skipped: dict[str, int] = {}
    pages: dict[str, list[int]] = {}
    sources: dict[str, None] = {}
    for cells in rows:
        if cells.row["gpu"] not in spellings:
            continue
        row_op, other = cells.text("op"), _other_format(cells.row)
        if other:
            name = f"{row_op} {other}"
            skipped[name] = skipped.get(name, 0) + 1
            continue
        key, columns = _classify(cells)
        latency = cells.latency_us()
        if key.op == "decode_attention" and cells.text("page_size"):
            pages.setdefault(key.framework, []).append(int(cells.number("page_size", positive=True)))
        collected.setdefault(key, []).append((columns, latency, row_op))
        sources[cells.text("source") or path.name] = None
    if not collected:
        raise ScenarioError(
            f"{path}: no row of {gpu} has a 16-bit number format; column 'dtype' (or 'kv_dtype') has "
            f"{', '.join(sorted({name.rpartition(' ')[2] for name in skipped}))}, and a profile is fitted to rows of "
            f"{', '.join(TWO_BYTE_FORMATS)}"
        )
    groups = [_merge(key, collected[key], gpu) for key in sorted(collected)]
    num_rows = sum(len(v) for v in collected.values())
    block_sizes = {name: max(sorted(set(sizes)), key=sizes.count) for name, sizes in pages.items()}
    latency_column = next(name for name in LATENCY_UNITS if name in rows[0].row)
    unread = tuple(name for name in rows[0].row if name and name not in KNOWN)
    return Measurements(gpu, groups, num_rows, list(sources), block_sizes, skipped, latency_column, unread)


def _the_gpu(path: Path, rows: Sequence[Mapping[str, str]], wanted: str | None) -> list[str]:
    """All spellings of the one GPU whose rows are meant."""
    names = sorted({row["gpu"] for row in rows})
    if wanted is not None:
        found = [name for name in names if _plain(name) == _plain(wanted)]
        if not found:
            raise ScenarioError(f"{path}: no row has gpu {wanted!r}; it has {', '.join(names)}")
        return found
    if len({_plain(name) for name in names}) > 1:
        raise ScenarioError(f"{path}: rows of several GPUs ({', '.join(names)}): name one with --gpu")
    return names


def _other_format(row: Mapping[str, str]) -> str:
    """The number format of a row that no fit takes, empty for the others."""
    dtype, kv_dtype = _number_format(row.get("dtype", "")), _number_format(row.get("kv_dtype", ""))
    if dtype and dtype not in TWO_BYTE_FORMATS:
        return dtype
    return "" if kv_dtype in _KV_FORMATS else f"with KV of {kv_dtype}"


def _number_format(text: str) -> str:
    return text.strip().lower().removeprefix("torch.")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


class _Cells:
    """One row with errors that say where."""

    def __init__(self, path: Path, line: int, row: Mapping[str, str]) -> None:
        self.path, self.line, self.row = path, line, row

    def fail(self, column: str, what: str) -> ScenarioError:
        return ScenarioError(f"{self.path}: line {self.line}, column {column!r}: {what}")

    def check_key(self) -> None:
        """Raises where a row does not say which fit it belongs to: it would be left out of all."""
        for column in SORTS:
            if not self.row[column]:
                raise self.fail(column, f"empty; every row names its {column}: fill it in, or take the row out")

    def number(self, column: str, *, positive: bool = False, default: float | None = None) -> float:
        """A size or a count."""
        text = self.text(column)
        if not text and default is not None:
            return default
        value = self._float(column)
        least = 1 if positive else 0
        if not least <= value <= _MOST or value != int(value):
            raise self.fail(column, f"{text!r} must be a whole number from {least} to {_MOST:.0f}: correct the cell")
        return value

    def latency_us(self) -> float:
        column = next(name for name in LATENCY_UNITS if name in self.row)
        unit_us = LATENCY_UNITS[column]
        value = self._float(column)
        if not 0 < value * unit_us <= _MOST_US:
            raise self.fail(
                column,
                f"{self.text(column)!r} must be a number above 0, at most {_MOST_US / unit_us:.0f} "
                f"({_UNIT_WORDS[column]}): correct the cell, or take the row out",
            )
        return value * unit_us

    def _float(self, column: str) -> float:
        text = self.text(column)
        if not text:
            raise self.fail(column, f"empty, but operation {self.row['op']!r} needs it: fill it in")
        try:
            return float(text)
        except ValueError:
            raise self.fail(
                column,
                f"{text!r} is not a number: write digits and a decimal point, no unit and no thousands separator",
            ) from None

    def text(self, column: str) -> str:
        return self.row.get(column, "")


def _classify(cells: _Cells) -> tuple[GroupKey, dict[str, float]]:
    row_op = cells.text("op")
    op = RENAMED.get(row_op, row_op)
    framework, kernel, version = cells.text("framework"), cells.text("kernel"), cells.text("version")
    if op in ("decode_attention", "prefill_attention", "mixed_attention"):
        kernel = "whole-layer" if "prefill_chunk" in cells.row else kernel
        return GroupKey(op, op, framework, kernel, version), _attention_columns(op, cells)
    if op in COLUMNS_OF:
        columns = {name: cells.number(name, positive=True) for name in COLUMNS_OF[op]}
        return GroupKey(op, op, framework, kernel, version), columns
    return _layer_operation(op, cells)


def _attention_columns(op: str, cells: _Cells) -> dict[str, float]:
    columns = {name: cells.number(name, positive=True) for name in ("heads", "kv_heads", "head_dim")}
    if columns["heads"] % columns["kv_heads"]:
        raise cells.fail(
            "kv_heads",
            f"{cells.text('kv_heads')!r} must divide heads, {cells.text('heads')!r}: KV heads serve equally many "
            f"query heads; correct the row, or the header if the two columns have each other's names",
        )
    columns["kv_bytes"] = 1.0 if _number_format(cells.text("kv_dtype")) in _ONE_BYTE_FORMATS else 2.0
    if op == "decode_attention":
        columns["batch"] = cells.number("batch", positive=True)
        columns["ctx_len"] = cells.number("ctx_len", positive=True)
    elif op == "mixed_attention":
        columns["batch"] = cells.number("batch", positive=True)
        columns["ctx_len"] = cells.number("ctx_len", positive=True)
        columns["chunk"] = cells.number("prefill_chunk", positive=True)
        columns["prefix"] = cells.number("prefill_kv_prefix", default=0.0)
    elif cells.text("prefill_chunk"):
        columns["batch"] = 1.0
        columns["seq_len"] = cells.number("prefill_chunk", positive=True)
        columns["prefix"] = cells.number("prefill_kv_prefix", default=0.0)
    else:
        columns["batch"] = cells.number("batch", positive=True)
        columns["seq_len"] = cells.number("seq_len", positive=True)
        columns["prefix"] = cells.number("ctx_len", default=0.0)
    return columns


def _layer_operation(op: str, cells: _Cells) -> tuple[GroupKey, dict[str, float]]:
    """A row of a whole-layer measurement; `kernel` names the model, so that shapes can be derived."""
    if op not in (*PROJECTIONS, *ROW_OPS):
        _check_operation(op, cells)
    # The head and the sampler see one row per sequence: their rows count a batch.
    tokens = cells.number("tokens" if cells.text("tokens") or not cells.text("batch") else "batch", positive=True)
    framework, model, version = cells.text("framework"), cells.text("kernel"), cells.text("version")
    dims = layer_dims(model)
    tp = int(cells.number("tp", positive=True, default=1.0))
    if dims is not None and op in PROJECTIONS:
        n, k = projection_shape(op, dims, tp)
        return GroupKey("gemm", "gemm", framework, "whole-layer", version), {"tokens": tokens, "n": n, "k": k}
    if dims is not None and op in ROW_OPS:
        width = row_width(op, dims, tp)
        return GroupKey("elementwise", op, framework, "whole-layer", version), {"tokens": tokens, "width": width}
    # An operation whose shape nobody told: a function of the tokens, good for this very model only.
    return GroupKey("elementwise", f"{model}:{op}", framework, model, version), {"tokens": tokens, "width": 1.0}


def _check_operation(op: str, cells: _Cells) -> None:
    """An operation that nobody knows may be a part of a layer; it is not one if it counts no tokens."""
    known = (*COLUMNS_OF, *PROJECTIONS, *ROW_OPS)
    near = [name for name in COLUMNS_OF if name.startswith(op)] or get_close_matches(op, COLUMNS_OF, n=1, cutoff=0.75)
    if near or not cells.text("tokens"):
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise cells.fail("op", f"{op!r} is no known operation: {meant}known are {', '.join(known)}")


def _merge(key: GroupKey, rows: Iterable[tuple[dict[str, float], float, str]], gpu: str) -> Group:
    """Rows with equal columns become one, at the geometric mean of their latencies."""
    features = sorted(set(FORMS[key.op].features) | {"head_dim"} if "attention" in key.op else FORMS[key.op].features)
    merged: dict[tuple[float, ...], tuple[list[float], str]] = {}
    for columns, latency, kind in rows:
        point = tuple(columns[name] for name in features)
        merged.setdefault(point, ([], kind))[0].append(math.log(latency))
    points = sorted(merged)
    table = np.array(points, dtype=float).reshape(len(points), len(features))
    latencies = np.exp([sum(merged[p][0]) / len(merged[p][0]) for p in points])
    kinds = np.array([merged[p][1] for p in points])
    widest = max(points, key=lambda point: max(merged[point][0]) - min(merged[point][0]))
    ratio = math.exp(max(merged[widest][0]) - min(merged[widest][0]))
    shape = ", ".join(f"{name} {value:g}" for name, value in zip(features, widest, strict=True))
    table_of = {name: table[:, i] for i, name in enumerate(features)}
    return Group(key, table_of, latencies, kinds, gpu, (ratio, shape))
