"""Kernel measurements from CSV: checked rows, sorted into the operations the cost model knows.

One row is one kernel call of one layer. Whole-layer rows (`qkv_proj`, `act_fn`, ...) name a model in `kernel`; its
dimensions turn them into GEMM shapes and row widths.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvsim.cost.forms import FORMS
from kvsim.types import ScenarioError

REQUIRED = ("gpu", "framework", "version", "kernel", "op", "latency_us")
_KEY_COLUMNS = REQUIRED[:5]
"""They say which fit a row belongs to."""
_DELIMITERS = ",;\t"
_MOST = float(1 << 50)
_MOST_US = 1e9


@dataclass(frozen=True)
class LayerDims:
    """The dimensions of one transformer that decide its GEMM shapes."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


# From the models' public config.json.
LAYER_DIMS: Mapping[str, LayerDims] = {
    "Llama-2-7b": LayerDims(4096, 11008, 32, 32, 128, 32000),
    "Meta-Llama-3-8B": LayerDims(4096, 14336, 32, 8, 128, 128256),
    "Llama-3.1-8B": LayerDims(4096, 14336, 32, 8, 128, 128256),
    "Qwen3-32B": LayerDims(5120, 25600, 64, 8, 128, 151936),
}

TWO_BYTE_FORMATS = ("bf16", "bfloat16", "fp16", "float16", "half", "f16")
_ONE_BYTE_FORMATS = ("fp8", "int8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2")

_RENAMED = {
    "input_layernorm": "layernorm",
    "post_attention_layernorm": "layernorm",
    "mlp_act": "act_fn",
    "attn_rope": "rotary_emb",
    "emb": "embedding",
}
PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
ROW_OPS = ("act_fn", "layernorm", "final_layernorm", "rotary_emb", "qk_norm", "embedding", "sampler")
_COLUMNS_OF = {
    "gemm": ("tokens", "n", "k"),
    "decode_attention": ("batch", "ctx_len", "heads", "kv_heads", "head_dim"),
    "mixed_attention": ("batch", "ctx_len", "prefill_chunk", "prefill_kv_prefix", "heads", "kv_heads", "head_dim"),
    "all_reduce": ("bytes", "num_gpus"),
}
_KNOWN = {
    *REQUIRED, *(name for names in _COLUMNS_OF.values() for name in names), "seq_len", "tp", "page_size", "dtype",
    "kv_dtype", "source",
}  # fmt: skip


def projection_shape(op: str, dims: LayerDims, tp: int = 1) -> tuple[int, int]:
    """(n, k) of a projection's weights on one of `tp` GPUs."""
    attention_width = dims.num_heads * dims.head_dim
    kv_width = max(dims.num_kv_heads // tp, 1) * dims.head_dim
    return {
        "qkv_proj": (attention_width // tp + 2 * kv_width, dims.hidden_size),
        "o_proj": (dims.hidden_size, attention_width // tp),
        "gate_up_proj": (2 * dims.intermediate_size // tp, dims.hidden_size),
        "down_proj": (dims.hidden_size, dims.intermediate_size // tp),
        "lm_head": (dims.vocab_size // tp, dims.hidden_size),
    }[op]


def row_width(op: str, dims: LayerDims, tp: int = 1) -> int:
    """Elements that one token moves through memory in a row-wise operation on one of `tp` GPUs."""
    heads = dims.num_heads // tp + max(dims.num_kv_heads // tp, 1)
    return {
        "act_fn": 3 * dims.intermediate_size // tp,
        "layernorm": 4 * dims.hidden_size,
        "final_layernorm": 4 * dims.hidden_size,
        "rotary_emb": 2 * heads * dims.head_dim,
        "qk_norm": 2 * heads * dims.head_dim,
        "embedding": 2 * dims.hidden_size,
        "sampler": dims.vocab_size,
    }[op]


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

    def take(self, index: np.ndarray) -> Group:
        columns = {name: values[index] for name, values in self.columns.items()}
        return Group(self.key, columns, self.latency_us[index], self.kinds[index], self.gpu)


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


def read_rows(path: str | Path) -> list[tuple[int, dict[str, str]]]:
    """Rows of a measurements file, each with the line it ends on.

    Case, spaces and punctuation of a known column's name do not count, nor does the case of an operation; blank lines
    are no rows. Raises ScenarioError naming the file, and the column that is missing or there twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ScenarioError(f"{path}: no such measurements file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            first = handle.readline()
            handle.seek(0)
            reader = csv.reader(handle, delimiter=max(_DELIMITERS, key=first.count), skipinitialspace=True)
            header = [_column_name(name) for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScenarioError(f"{path}: not a CSV text file: {error}") from None
    _check_header(path, header)
    if not rows:
        raise ScenarioError(f"{path}: no rows below the header")
    for line, row in rows:
        if len(row) != len(header):
            raise ScenarioError(f"{path}: line {line}: {len(row)} cells where the header has {len(header)}")
    cells = [(line, dict(zip(header, (cell.strip() for cell in row), strict=True))) for line, row in rows]
    for _, row_cells in cells:
        row_cells["op"] = row_cells["op"].lower()
    return cells


def _column_name(text: str) -> str:
    """The known column that a header's cell spells, else the cell as it stands."""
    plain = "".join(char for char in text.casefold() if char.isalnum())
    return next((name for name in _KNOWN if name.replace("_", "") == plain), text.strip())


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise ScenarioError(
            f"{path}: column {missing[0]!r} is missing; a measurements file has {', '.join(REQUIRED)} "
            f"and the columns of its operations; this one has {', '.join(header) or 'no header'}"
        )
    twice = [name for name in header if name in _KNOWN and header.count(name) > 1]
    if twice:
        raise ScenarioError(f"{path}: column {twice[0]!r} is there {header.count(twice[0])} times; keep one")


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
        row_op, dtype = cells.text("op"), _number_format(cells.text("dtype"))
        if dtype and dtype not in TWO_BYTE_FORMATS:
            name = f"{row_op} {dtype}"
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
            f"{path}: no row of {gpu} has a 16-bit number format; column 'dtype' has "
            f"{', '.join(sorted({name.rpartition(' ')[2] for name in skipped}))}, and a profile is fitted to rows of "
            f"{', '.join(TWO_BYTE_FORMATS)}"
        )
    groups = [_merge(key, collected[key], gpu) for key in sorted(collected)]
    num_rows = sum(len(v) for v in collected.values())
    block_sizes = {name: max(sorted(set(sizes)), key=sizes.count) for name, sizes in pages.items()}
    return Measurements(gpu, groups, num_rows, list(sources), block_sizes, skipped)


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
        for column in _KEY_COLUMNS:
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
        value = self._float("latency_us")
        if not 0 < value <= _MOST_US:
            raise self.fail(
                "latency_us",
                f"{self.text('latency_us')!r} must be a number above 0, at most {_MOST_US:.0f} (microseconds): "
                f"correct the cell, or take the row out",
            )
        return value

    def _float(self, column: str) -> float:
        text = self.text(column)
        if not text:
            raise self.fail(column, f"empty, but operation {self.row['op']!r} needs it")
        try:
            return float(text)
        except ValueError:
            raise self.fail(column, f"{text!r} is not a number") from None

    def text(self, column: str) -> str:
        return self.row.get(column, "")


def _classify(cells: _Cells) -> tuple[GroupKey, dict[str, float]]:
    row_op = cells.text("op")
    op = _RENAMED.get(row_op, row_op)
    framework, kernel, version = cells.text("framework"), cells.text("kernel"), cells.text("version")
    if op in ("decode_attention", "prefill_attention", "mixed_attention"):
        kernel = "whole-layer" if "prefill_chunk" in cells.row else kernel
        return GroupKey(op, op, framework, kernel, version), _attention_columns(op, cells)
    if op in _COLUMNS_OF:
        columns = {name: cells.number(name, positive=True) for name in _COLUMNS_OF[op]}
        return GroupKey(op, op, framework, kernel, version), columns
    return _layer_operation(op, cells)


def _attention_columns(op: str, cells: _Cells) -> dict[str, float]:
    columns = {name: cells.number(name, positive=True) for name in ("heads", "kv_heads", "head_dim")}
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
    # The head and the sampler see one row per sequence: their rows count a batch.
    tokens = cells.number("tokens" if cells.text("tokens") or not cells.text("batch") else "batch", positive=True)
    framework, model, version = cells.text("framework"), cells.text("kernel"), cells.text("version")
    dims = LAYER_DIMS.get(model)
    tp = int(cells.number("tp", positive=True, default=1.0))
    if dims is not None and op in PROJECTIONS:
        n, k = projection_shape(op, dims, tp)
        return GroupKey("gemm", "gemm", framework, "whole-layer", version), {"tokens": tokens, "n": n, "k": k}
    if dims is not None and op in ROW_OPS:
        width = row_width(op, dims, tp)
        return GroupKey("elementwise", op, framework, "whole-layer", version), {"tokens": tokens, "width": width}
    # An operation whose shape nobody told: a function of the tokens, good for this very model only.
    return GroupKey("elementwise", f"{model}:{op}", framework, model, version), {"tokens": tokens, "width": 1.0}


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
    return Group(key, {name: table[:, i] for i, name in enumerate(features)}, latencies, kinds, gpu)
