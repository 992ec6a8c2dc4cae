"""The columns of a measurements file, and how else its authors may have called them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from kvsim.types import ScenarioError

SORTS = ("gpu", "framework", "version", "kernel", "op")
"""Columns that say which fit a row belongs to."""
LATENCY = "latency_us"
LATENCY_UNITS: Mapping[str, float] = {LATENCY: 1.0, "latency_ns": 1e-3, "latency_ms": 1e3, "latency_s": 1e6}
"""Microseconds in the unit that each of these columns counts in; a file has one of them."""
REQUIRED = (*SORTS, LATENCY)
COLUMNS_OF: Mapping[str, tuple[str, ...]] = {
    "gemm": ("tokens", "n", "k"),
    "decode_attention": ("batch", "ctx_len", "heads", "kv_heads", "head_dim"),
    "prefill_attention": ("batch", "seq_len", "heads", "kv_heads", "head_dim"),
    "mixed_attention": ("batch", "ctx_len", "prefill_chunk", "prefill_kv_prefix", "heads", "kv_heads", "head_dim"),
    "all_reduce": ("bytes", "num_gpus"),
}
KNOWN = (
    *SORTS, *LATENCY_UNITS, *dict.fromkeys(name for names in COLUMNS_OF.values() for name in names), "tp", "page_size",
    "dtype", "kv_dtype", "source",
)  # fmt: skip
_ALSO: Mapping[str, tuple[str, ...]] = {
    "gpu": ("gpu_name", "device", "device_name"),
    "framework": ("engine", "backend"),
    "kernel": ("kernel_name", "kernel_source"),
    "op": ("op_name", "operation"),
    "tokens": ("num_tokens", "m"),
    "batch": ("batch_size", "num_seqs"),
    "seq_len": ("sequence_length", "input_len", "isl"),
    "ctx_len": ("context_len", "context_length", "kv_len"),
    "heads": ("num_heads", "num_attention_heads"),
    "kv_heads": ("num_kv_heads", "num_key_value_heads"),
    "head_dim": ("head_size",),
    "tp": ("tp_size", "tensor_parallel_size"),
    "page_size": ("block_size",),
    "kv_dtype": ("kv_cache_dtype",),
    "num_gpus": ("num_ranks", "world_size"),
    "bytes": ("size_bytes", "message_bytes"),
    "version": ("framework_version",),
}
"""Names that engines, config.json and benchmark scripts have for the same."""


_LONGEST = 40
"""Of a column's name: what is longer is a line that was not split."""


def _plain(text: str) -> str:
    return "".join(char for char in text.casefold() if char.isalnum())


_SPELT = {_plain(name): name for name in KNOWN}
_OTHERWISE = {_plain(other): name for name, others in _ALSO.items() for other in others}


def column_names(cells: Sequence[str]) -> list[str]:
    """The known column that each cell of a header spells, else the cell as it stands.

    Case, spaces and punctuation do not count. Another name for a column that is there under its own is left alone.
    """
    spelt = [_SPELT.get(_plain(cell), "") for cell in cells]
    names = []
    for cell, name in zip(cells, spelt, strict=True):
        other = _OTHERWISE.get(_plain(cell), "")
        names.append(name or (other if other not in spelt else "") or cell.strip())
    return names


def check_header(path: Path, header: Sequence[str]) -> None:
    """Raises ScenarioError naming the columns that are missing, or the one that is there twice."""
    missing = [name for name in SORTS if name not in header]
    latencies = [name for name in LATENCY_UNITS if name in header]
    if not latencies:
        missing.append(LATENCY)
    if missing:
        raise ScenarioError(
            f"{path}: column {', '.join(map(repr, missing))} is missing{_hint(missing, header)}; a measurements file "
            f"has {', '.join(REQUIRED)} and the columns of its operations; this one has "
            f"{', '.join(header) or 'no header'}"
        )
    twice = [name for name in header if name in KNOWN and header.count(name) > 1]
    if twice:
        raise ScenarioError(f"{path}: column {twice[0]!r} is there {header.count(twice[0])} times; keep one")
    if len(latencies) > 1:
        raise ScenarioError(f"{path}: columns {' and '.join(map(repr, latencies))} both say the latency; keep one")


def _hint(missing: Sequence[str], header: Sequence[str]) -> str:
    """What of the header may be meant by a missing column."""
    rest = [name for name in header if name and len(name) <= _LONGEST and name not in KNOWN]
    hints = []
    if LATENCY in missing:
        timed = [name for name in rest if any(word in _plain(name) for word in ("latency", "time", "duration"))]
        if timed:
            units = ", ".join(LATENCY_UNITS)
            hints.append(f"call {timed[0]!r} by its unit, one of {units}")
    for name in missing:
        near = get_close_matches(name, rest, n=1, cutoff=0.75)
        if near and name != LATENCY:
            hints.append(f"did you mean {name!r} by {near[0]!r}?")
    return f" ({'; '.join(hints)})" if hints else ""
