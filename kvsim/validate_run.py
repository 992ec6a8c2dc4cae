"""A recorded engine run, simulated: predicted against measured.

A run is a folder with `meta.json` (the engine's arguments), `requests.jsonl` (times per request) and `timeseries.csv`
(running, waiting, KV usage by the second). Queue times come from the run; everything else is predicted. Measured times
are read by the comparison alone.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from kvsim.types import NS_PER_S, Ns, ScenarioError

if TYPE_CHECKING:
    from kvsim.catalog import GpuSpec
    from kvsim.cost.from_run import Gap, Overhead
    from kvsim.cost.kernels import GemmTiles, KernelCost
    from kvsim.cost.profile import Profile
    from kvsim.memory.geometry import ModelGeometry
    from kvsim.request import Request, Sequence
    from kvsim.scheduling.plan import StepOutcome, StepPlan, StepShape
    from kvsim.sim.run import Simulation
    from kvsim.workload.source import Source
    from kvsim.workload.traces import Trace

HASH_BLOCK = 16
ASYNC_SINCE = (0, 14)
"""vLLM schedules asynchronously by default from this version on."""

METRICS = (
    "makespan_s",
    "output_throughput",
    "mean_ttft_ms",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
)


_MOST = (1 << 31) - 1
_MOST_BYTES = 1 << 50
_MOST_RANKS = 1024
_MOST_SECONDS = 1e12
_REQUEST_KEYS = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")

_SERIES = ("running", "waiting", "kv_cache_pct")
_NO_ENGINE = 100.0
"""A measured time that is so many times the predicted one, or so small a part of it, is in another unit."""
_UNITS: Mapping[float, str] = {1e3: "milliseconds", 1e6: "microseconds", 1e9: "nanoseconds"}

_DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
"""What vLLM's --dtype takes."""
_USED = frozenset(
    {
        "model", "async_scheduling", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "data_parallel_size",
        "tensor_parallel_size", "block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_dtype",
        "kv_cache_memory_bytes", "num_gpu_blocks_override", "dtype", "enable_chunked_prefill", "scheduling_policy",
        "long_prefill_token_threshold", "scheduler_reserve_full_isl", "watermark",
    }
)  # fmt: skip
"""Arguments of the engine that the simulation follows."""
_WITHOUT_BEARING = frozenset(
    {
        "allowed_local_media_path", "api_key", "chat_template", "disable_log_requests", "disable_log_stats",
        "download_dir", "enable_log_requests", "hf_token", "host", "load_format", "port", "prefix_caching_hash_algo",
        "revision", "root_path", "runner", "seed", "served_model_name", "skip_tokenizer_init", "task", "tokenizer",
        "tokenizer_mode", "tokenizer_revision", "trust_remote_code",
    }
)  # fmt: skip
"""Arguments that decide neither what a step computes nor how long it takes."""
_AT_REST: Mapping[str, object] = {
    "cpu_offload_gb": 0,
    "disable_cascade_attn": False,
    "disable_sliding_window": False,
    "enable_expert_parallel": False,
    "enable_lora": False,
    "enforce_eager": False,
    "max_long_partial_prefills": 1,
    "max_num_partial_prefills": 1,
    "pipeline_parallel_size": 1,
    "swap_space": 0,
}
"""Values at which an argument that is not simulated asks for nothing."""


@dataclass(frozen=True)
class _Keys:
    """An object of `meta.json`, read key by key: null counts as absent, numbers may be text."""

    path: Path
    prefix: str
    values: Mapping[str, Any]

    def inner(self, key: str) -> _Keys:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(key, "a JSON object")
        return _Keys(self.path, f"{self.prefix}{key}.", value or {})

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
    def keys(self) -> _Keys:
        """`meta.json`, for reading."""
        return _Keys(self.folder / "meta.json", "", self.meta)

    @property
    def engine_kwargs(self) -> _Keys:
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
    told = [str(row["request_id"]) for _, row in rows if row.get("request_id") is not None]
    if len(set(told)) < len(told):
        twice = next(name for name in told if told.count(name) > 1)
        raise ScenarioError(
            f"{folder / 'requests.jsonl'}: request_id {twice} is there {told.count(twice)} times; keep one row per "
            f"request"
        )
    if max(request.last_token_s for request in requests) <= min(request.queued_s for request in requests):
        raise ScenarioError(
            f"{folder / 'requests.jsonl'}: all times are the same; they must be the engine's, in seconds"
        )
    series = _read_series(folder / "timeseries.csv")
    return RecordedRun(folder, meta, requests, series, _series_offset_s(_Keys(folder / "meta.json", "", meta), rows))


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
    for number, line in enumerate(_text_of(path).splitlines(), start=1):
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


def _series_offset_s(meta: _Keys, rows: Seq[tuple[int, Mapping[str, Any]]]) -> float:
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


@dataclass(frozen=True)
class Setting:
    """What the engine ran with, and where each value comes from (`notes`)."""

    engine: str
    model: str
    gpu: str
    profile: str | Profile
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    enable_prefix_caching: bool
    tensor_parallel_size: int
    kv_cache_dtype: str
    notes: tuple[str, ...]
    dtype: str = "auto"
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    gpu_memory_bytes: int = 0
    warnings: tuple[str, ...] = ()
    """What of the engine's arguments the simulation leaves out."""

    @property
    def gpu_spec(self) -> GpuSpec:
        """The GPU, of the catalog or with its memory alone."""
        from kvsim.catalog import GpuSpec, gpu_names, load_gpu

        if self.gpu in gpu_names():
            return load_gpu(self.gpu)
        return GpuSpec(self.gpu, self.gpu_memory_bytes, 0.0, 0.0, 0, 0.0)

    @property
    def geometry(self) -> ModelGeometry:
        """The model, in the number format that the engine ran it in."""
        from dataclasses import replace

        from kvsim.catalog import load_model

        geometry = load_model(self.model)
        return geometry if self.dtype == "auto" else replace(geometry, dtype=self.dtype)


def setting_of(
    run: RecordedRun, *, gpu: str | None = None, profile: str | Profile | None = None, model: str | None = None
) -> Setting:
    """Read the engine's arguments; defaults are vLLM's. Raises ScenarioError for what cannot be told."""
    from kvsim.capacity import default_max_num_batched_tokens, default_max_num_seqs
    from kvsim.catalog import load_model, model_names
    from kvsim.scenario.schema import CacheDtype

    kwargs = run.engine_kwargs
    notes: list[str] = []
    model = model or kwargs.text("model") or run.keys.text("model")
    if not model:
        raise ScenarioError(f"{run.folder / 'meta.json'}: names no model; give --model")
    geometry = load_model(model)
    spec, gpu_note = _gpu_of(run, gpu, profile)
    notes.append(gpu_note)
    engine = _engine_of(run, notes)
    total = run.keys.inner("hardware").integer("device_total_memory_bytes", _MOST_BYTES) or spec.total_memory_bytes
    max_num_seqs = kwargs.integer("max_num_seqs") or default_max_num_seqs(spec, total)
    max_model_len = _max_model_len(kwargs, geometry)
    is_chunked = kwargs.truth("enable_chunked_prefill") is not False
    max_tokens = kwargs.integer("max_num_batched_tokens")
    if max_tokens is None:
        # Without chunks the longest prompt has to fit into one step.
        max_tokens = max(default_max_num_batched_tokens(spec, total), 0 if is_chunked else max_model_len)
    num_replicas = kwargs.integer("data_parallel_size") or 1
    if num_replicas > 1:
        raise ScenarioError(
            f"{run.folder / 'meta.json'}: data_parallel_size is {num_replicas}; a run of one replica is what can be "
            f"predicted: which replica served which request is not in the record"
        )
    dtype = kwargs.choice("dtype", _DTYPES) or "auto"
    kv_cache_dtype = kwargs.choice("kv_cache_dtype", get_args(CacheDtype)) or "auto"
    cache = _cache_of(run)
    blocks = _num_gpu_blocks(
        run,
        cache,
        notes,
        {
            "model": geometry,
            "gpu": spec,
            "total_memory_bytes": total,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_tokens,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
        },
    )
    return Setting(
        engine=engine,
        model=geometry.name if geometry.name in model_names() else model,
        gpu=spec.name,
        profile=profile or spec.name,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
        num_gpu_blocks=blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        tensor_parallel_size=kwargs.integer("tensor_parallel_size", _MOST_RANKS) or 1,
        kv_cache_dtype=kv_cache_dtype,
        notes=tuple(notes),
        dtype=dtype,
        enable_chunked_prefill=is_chunked,
        scheduling_policy=kwargs.choice("scheduling_policy", ("fcfs", "priority")) or "fcfs",
        long_prefill_token_threshold=kwargs.integer("long_prefill_token_threshold", least=0) or 0,
        scheduler_reserve_full_isl=kwargs.truth("scheduler_reserve_full_isl") is not False,
        watermark=kwargs.watermark() or 0.0,
        gpu_memory_bytes=total,
        warnings=(*_unused(kwargs), *_other_formats(run.folder / "meta.json", dtype)),
    )


def _unused(kwargs: _Keys) -> list[str]:
    """One line that names every argument the simulation does not follow; nothing where there is none."""
    unused = []
    for key, value in kwargs.values.items():
        told = str(value).strip().lower()
        if value is None or key in _USED or key in _WITHOUT_BEARING:
            continue
        if key in _AT_REST and told in (str(_AT_REST[key]).lower(), f"{_AT_REST[key]}.0"):
            continue
        close = get_close_matches(key, _USED, n=1, cutoff=0.85)
        unused.append(f"{key}: {value!r:.60}" + (f" (did you mean {close[0]}?)" if close else ""))
    if not unused:
        return []
    return [
        f"{kwargs.path}: the simulation does not follow these of engine_kwargs: {', '.join(unused)}; the run may "
        f"differ by what they do"
    ]


def _other_formats(path: Path, dtype: str) -> list[str]:
    from kvsim.memory.geometry import dtype_bytes

    if dtype == "auto" or dtype_bytes(dtype) == 2:
        return []
    return [
        f"{path}: engine_kwargs.dtype is {dtype}: the KV cache is counted in it, but matrix products are priced as "
        f"16-bit ones, which is all that profiles hold; the engine was slower than predicted"
    ]


def _max_model_len(kwargs: _Keys, geometry: ModelGeometry) -> int:
    """vLLM takes the model's own limit for no value, and what fits for "auto" and -1 (here: the model's own, too)."""
    told = kwargs.values.get("max_model_len")
    length = None if str(told).strip() in ("auto", "-1") else kwargs.integer("max_model_len")
    return length or geometry.max_model_len or 1 << 20


def _gpu_of(run: RecordedRun, gpu: str | None, profile: str | Profile | None) -> tuple[GpuSpec, str]:
    """The GPU: as told, as the run says, or as its folder is called.

    One that the catalog lacks will do where a profile is given: what else is needed of it is its memory.
    """
    from kvsim.catalog import GpuSpec, gpu_names, load_gpu

    hardware = run.keys.inner("hardware")
    device = gpu or hardware.text("device_name")
    origin = "as told" if gpu is not None else "from meta.json"
    if device:
        try:
            return load_gpu(device), f"GPU {device}: {origin}"
        except ScenarioError as error:
            found = _named_in(device, gpu_names())
            if found is not None and gpu is None:
                return load_gpu(found), f"GPU {found}: from meta.json ({device})"
            total = hardware.integer("device_total_memory_bytes", _MOST_BYTES)
            if profile is not None and total is not None:
                return GpuSpec(device, total, 0.0, 0.0, 0, 0.0), f"GPU {device}: {origin}, unknown to the catalog"
            raise ScenarioError(
                f"{error} A run on another GPU needs a profile of it (--profile, made by `kvsim calibrate`) and "
                f"hardware.device_total_memory_bytes in {run.folder / 'meta.json'}."
            ) from None
    found = _named_in(run.folder.resolve().name, gpu_names())
    if found is None:
        raise ScenarioError(
            f"{run.folder / 'meta.json'}: names no hardware, nor does the folder's name: give --gpu, one of "
            f"{', '.join(gpu_names())}"
        )
    return load_gpu(found), f"GPU {found}: from the folder's name"


def _named_in(text: str, names: Seq[str]) -> str | None:
    """The catalog name that whole words of `text` spell: no "a10" in "A100_run".

    "A100_run" names the card without its memory: the larger one is what people mean.
    """
    words = re.findall("[a-z0-9]+", text.lower())
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, min(i + 4, len(words)) + 1)}
    parts = {name: name.lower().split("-") for name in names}
    found = [name for name in names if "".join(parts[name]) in runs]
    if found:
        return max(found, key=len)
    family = [name for name in names if parts[name][0] in runs and parts[name][0] != "rtx"]
    exact = [name for name in family if set(parts[name][1:]) <= set(words)]
    return max(exact or family, default=None)


def _engine_of(run: RecordedRun, notes: list[str]) -> str:
    told = run.engine_kwargs.truth("async_scheduling")
    if told is not None:
        engine = "vllm-v1-async" if told else "vllm-v1"
        notes.append(f"engine {engine}: async_scheduling is {str(told).lower()} in the run's arguments")
        return engine
    key = "vllm_version" if run.meta.get("vllm_version") is not None else "version"
    version = run.keys.text(key)
    numbers = re.match(r"\s*v?(\d+)\.(\d+)", version or "")
    if version and not numbers:
        raise run.keys.bad(key, 'a version such as "0.19.0" (or say engine_kwargs.async_scheduling)')
    if numbers and (int(numbers[1]), int(numbers[2])) < ASYNC_SINCE:
        notes.append(f"engine vllm-v1: vLLM {version} schedules synchronously by default")
        return "vllm-v1"
    what = f"vLLM {version} schedules" if version else "no version in meta.json; vLLM since 0.14 schedules"
    notes.append(f"engine vllm-v1-async: {what} asynchronously by default")
    return "vllm-v1-async"


@dataclass(frozen=True)
class _Cache:
    logged: _Keys
    block_size: int
    enable_prefix_caching: bool


def _cache_of(run: RecordedRun) -> _Cache:
    """The cache's settings: as the engine logged them, as it was told, or its defaults."""
    logged, kwargs = run.keys.inner("kv_cache"), run.engine_kwargs
    if not logged.values:
        logged = run.keys.inner("cache_config")
    block_size = logged.integer("block_size", 1 << 20) or kwargs.integer("block_size", 1 << 20) or 16
    told = (keys.truth("enable_prefix_caching") for keys in (logged, kwargs))
    return _Cache(logged, block_size, next((value for value in told if value is not None), True))


def _num_gpu_blocks(run: RecordedRun, cache: _Cache, notes: list[str], terms: Mapping[str, Any]) -> int:
    """As logged, as told, or as `terms`, the keywords of the capacity formula, have it; `notes` get which."""
    from kvsim.capacity import capacity

    kwargs, block_size = run.engine_kwargs, cache.block_size
    # Read before anything is returned: a value that makes no sense is refused wherever the number comes from.
    utilization = cache.logged.share("gpu_memory_utilization") or kwargs.share("gpu_memory_utilization") or 0.9
    override = kwargs.integer("num_gpu_blocks_override")
    kv_bytes = kwargs.integer("kv_cache_memory_bytes", _MOST_BYTES)
    num_ranks = kwargs.integer("tensor_parallel_size", _MOST_RANKS) or 1
    logged_blocks = cache.logged.integer("num_gpu_blocks")
    if logged_blocks:
        notes.append(f"{logged_blocks} KV blocks: from meta.json")
        return logged_blocks
    logged_tokens, log_name = _logged_kv_tokens(run.folder)
    if logged_tokens >= block_size:
        notes.append(f"{logged_tokens // block_size} KV blocks: {logged_tokens:,} tokens in {log_name}")
        return logged_tokens // block_size
    if override is not None:
        num_blocks, source = override, "num_gpu_blocks_override in the run's arguments"
    else:
        num_blocks = capacity(
            **terms,
            gpu_memory_utilization=utilization,
            block_size=block_size,
            tensor_parallel_size=num_ranks,
            kv_cache_memory_bytes=kv_bytes,
        ).num_gpu_blocks
        source = (
            f"from the capacity formula at utilization {utilization:g}"
            if kv_bytes is None
            else f"kv_cache_memory_bytes {kv_bytes:,} in the run's arguments"
        )
    if num_blocks < 1:
        key, value = (
            ("gpu_memory_utilization", f"{utilization:g}")
            if kv_bytes is None
            else ("kv_cache_memory_bytes", f"{kv_bytes:,}")
        )
        raise ScenarioError(
            f"{run.folder / 'meta.json'}: {key} {value} leaves no KV block: write what the engine ran with, or the "
            f"number that it logged as kv_cache.num_gpu_blocks"
        )
    notes.append(f"{num_blocks} KV blocks: {source}")
    if num_blocks * block_size < terms["max_model_len"]:
        notes.append(
            f"these blocks hold less than one sequence of {terms['max_model_len']:,} tokens, which vLLM refuses: the "
            f"run had more memory or a shorter limit than meta.json says"
        )
    return num_blocks


def _logged_kv_tokens(folder: Path) -> tuple[int, str]:
    """The tokens of the cache that vLLM prints at its start, from a log in the run's folder; (0, "") without one."""
    for path in sorted([*folder.glob("*.log"), *folder.glob("*.txt")]):
        found = re.search(r"GPU KV cache size:\s*([\d,]+)\s*tokens", path.read_text(encoding="utf-8", errors="replace"))
        if found:
            return int(found[1].replace(",", "")), path.name
    return 0, ""


@dataclass
class StepLog:
    """One entry per executed step: when it ended, what it was, and how full the engine was."""

    start_ns: list[Ns] = field(default_factory=list)
    end_ns: list[Ns] = field(default_factory=list)
    shapes: list[StepShape] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def on_submit(self, request: Request, reason: str | None, now: Ns) -> None:
        """Requests are read from the recorder."""

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        """Nothing to note before a step has run."""

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        """Note the step."""
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.shapes.append(plan.shape)
        self.running.append(plan.num_running)
        self.waiting.append(plan.num_waiting)

    def on_abort(self, request_id: str, sequences: tuple[Sequence, ...], now: Ns) -> None:
        """Recorded runs abort nothing."""


@dataclass(frozen=True)
class Prediction:
    """A simulated run: per request (in workload order) seconds after the first queued one, and the steps."""

    setting: Setting
    queued_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    output_len: np.ndarray
    steps: StepLog
    used_blocks: np.ndarray
    cost: KernelCost
    num_preemptions: int
    notes: tuple[str, ...] = ()
    """What of the workload the run did otherwise."""

    def metrics(self) -> dict[str, float]:
        """The comparison's metrics of the prediction."""
        return _metrics(self.queued_s, self.first_token_s, self.last_token_s, self.output_len)

    def step_of(self, token_s: np.ndarray) -> np.ndarray:
        """The step at whose end each token came."""
        ends = np.array(self.steps.end_ns, dtype=float)
        return np.searchsorted(ends, token_s * NS_PER_S - 0.5)

    def series(self, times_s: np.ndarray) -> dict[str, np.ndarray]:
        """Running, waiting and KV usage in per cent at the given times after the first queued request."""
        ends = np.array(self.steps.end_ns, dtype=float) / NS_PER_S
        index = np.searchsorted(ends, times_s, side="right") - 1
        usable = self.setting.num_gpu_blocks - 1
        columns = {
            "running": np.array(self.steps.running, dtype=float),
            "waiting": np.array(self.steps.waiting, dtype=float),
            "kv_cache_pct": 100.0 * self.used_blocks / max(1, usable),
        }
        last = len(ends) - 1
        inside = (index >= 0) & (times_s <= ends[-1])
        return {name: np.where(inside, values[np.clip(index, 0, last)], 0.0) for name, values in columns.items()}


def predict(
    run: RecordedRun,
    workload: str | Path,
    setting: Setting,
    *,
    decode_overhead_us: float | None = None,
    mixed_overhead_us: float | None = None,
    gemm_tiles: GemmTiles | None = None,
) -> Prediction:
    """Simulate the run's requests as they were queued. `None` overheads are those of the profile.

    Raises ScenarioError if the workload does not match the run.
    """
    from kvsim.metrics.export import request_columns, step_columns
    from kvsim.registry import Pool, make_allocator, make_scheduler
    from kvsim.sim.run import simulate

    scenario = _scenario(setting)
    pool = Pool(scenario)
    scheduler = make_scheduler(scenario, make_allocator(scenario, pool), pool)
    cost = _kernel_cost(setting, decode_overhead_us, mixed_overhead_us, gemm_tiles)
    source, order, source_notes = _source(run, workload, setting)
    log = StepLog()
    simulation: Simulation = simulate(scheduler, cost, source, observers=(log,))
    columns = request_columns(simulation.recorder)
    rows = {str(name): index for index, name in enumerate(columns["request_id"])}
    place = np.array([rows[str(i)] for i in range(len(order))])[np.argsort(order)]
    unfinished = [i for i in place if columns["status"][i] != "finished"]
    if unfinished:
        reason = columns["reason"][unfinished[0]] or columns["status"][unfinished[0]]
        raise ScenarioError(f"{workload}: {len(unfinished)} requests do not finish in the simulation: {reason}")
    times = {name: np.asarray(columns[name], dtype=float)[place] for name in ("arrival_s", "first_token_s", "finish_s")}
    used = np.asarray(step_columns(simulation.recorder)["used_blocks"], dtype=float)
    return Prediction(
        setting,
        times["arrival_s"],
        times["first_token_s"],
        times["finish_s"],
        np.asarray(columns["output_tokens"], dtype=float)[place],
        log,
        used[: len(log.end_ns)],
        cost,
        int(np.sum(columns["num_preemptions"])),
        source_notes,
    )


def _kernel_cost(
    setting: Setting, decode_overhead_us: float | None, mixed_overhead_us: float | None, tiles: GemmTiles | None
) -> KernelCost:
    from kvsim.cost.kernels import KernelCost, vllm_graph_sizes
    from kvsim.cost.profile import measured_elsewhere

    cost = KernelCost.from_profile(
        setting.profile,
        setting.geometry,
        block_size=setting.block_size,
        tensor_parallel_size=setting.tensor_parallel_size,
        kv_cache_dtype=setting.kv_cache_dtype,
        overhead_us=decode_overhead_us,
        mixed_overhead_us=mixed_overhead_us,
        gemm_tiles=tiles,
        cuda_graph_sizes=vllm_graph_sizes(setting.max_num_seqs),
        adds_cpu_time=setting.engine == "vllm-v1",
    )
    elsewhere = measured_elsewhere(cost.times.profile, setting.gpu_spec)
    if elsewhere is not None:
        cost.notes.append(elsewhere)
    return cost


def _scenario(setting: Setting) -> Any:
    from kvsim.scenario.resolve import scenario_from_dict

    return scenario_from_dict(
        {
            "name": "validate-run",
            "engine": setting.engine,
            "model": setting.model,
            "gpu": setting.gpu
            if setting.gpu_spec.memory_bandwidth
            else {"name": setting.gpu, "memory": setting.gpu_memory_bytes},
            "tensor_parallel_size": setting.tensor_parallel_size,
            "kv_cache_dtype": setting.kv_cache_dtype,
            "memory": {"num_gpu_blocks_override": setting.num_gpu_blocks},
            "allocator": {
                "block_size": setting.block_size,
                "enable_prefix_caching": setting.enable_prefix_caching,
                "watermark": setting.watermark,
            },
            "scheduler": {
                "max_num_seqs": setting.max_num_seqs,
                "max_num_batched_tokens": setting.max_num_batched_tokens,
                "max_model_len": setting.max_model_len,
                "scheduling_policy": setting.scheduling_policy,
                "enable_chunked_prefill": setting.enable_chunked_prefill,
                "long_prefill_token_threshold": setting.long_prefill_token_threshold,
                "scheduler_reserve_full_isl": setting.scheduler_reserve_full_isl,
            },
        },
        source="the recorded run",
    ).scenario


def _source(run: RecordedRun, workload: str | Path, setting: Setting) -> tuple[Source, np.ndarray, tuple[str, ...]]:
    """The workload's requests at the run's queue times; the order in which they were queued; and what differs."""
    from kvsim.workload.builder import _trace_source
    from kvsim.workload.spec import WorkloadSpec
    from kvsim.workload.streams import streams

    trace, order, notes = _queued_trace(run, workload, setting)
    return _trace_source(WorkloadSpec(trace=str(workload)), trace, streams(0)), order, notes


def _queued_trace(
    run: RecordedRun, workload: str | Path, setting: Setting
) -> tuple[Trace, np.ndarray, tuple[str, ...]]:
    from dataclasses import replace

    from kvsim.workload.traces import in_file_order

    trace = in_file_order(_load_workload(workload))
    notes = trace.notes
    wanted = np.array([request.input_len for request in run.requests])
    rows = _workload_rows(run, np.asarray(trace.prompt), wanted, workload)
    if len(rows) < len(trace):
        notes += (
            f"{len(trace) - len(rows)} of the workload's {len(trace)} requests are not in the run: they are not "
            f"simulated, and what load they were to the engine is not predicted",
        )
    trace = trace.take(rows)
    if not np.array_equal(np.asarray(trace.prompt), wanted):
        at = int(np.flatnonzero(np.asarray(trace.prompt) != wanted)[0])
        raise ScenarioError(
            f"{workload}: row {int(rows[at]) + 1} has {int(trace.prompt[at])} prompt tokens, request "
            f"{run.requests[at].request_id} of the run {int(wanted[at])}: not the workload of this run, or in "
            "another order: a request is the row whose number ends its id, else the row at its own place"
        )
    trace, changed = _with_outputs(run, trace, setting)
    notes += changed
    start = run.first_queued_s
    queued = np.array([round((request.queued_s - start) * NS_PER_S) for request in run.requests], dtype=np.int64)
    order = np.argsort(queued, kind="stable")
    queued_trace = replace(trace.take(order), arrival_ns=queued[order], file_rank=None)
    return queued_trace, order, notes


def _with_outputs(run: RecordedRun, trace: Trace, setting: Setting) -> tuple[Trace, tuple[str, ...]]:
    """The run's own output lengths: an end-of-sequence token or max_tokens may have ended what the workload says."""
    from dataclasses import replace

    outputs = np.array([request.output_len for request in run.requests], dtype=np.int64)
    too_long = np.flatnonzero(np.asarray(trace.prompt) + outputs > setting.max_model_len)
    if len(too_long):
        request = run.requests[int(too_long[0])]
        raise ScenarioError(
            f"{run.folder / 'requests.jsonl'}: request {request.request_id} has input_toks {request.input_len} and "
            f"output_toks {request.output_len}, max_model_len is {setting.max_model_len}: correct the row, or "
            f"max_model_len in meta.json"
        )
    num_other = int(np.sum(outputs != np.asarray(trace.output)))
    if not num_other:
        return trace, ()
    stated = None if trace.max_output is None else np.maximum(trace.max_output, outputs)
    note = (
        f"{num_other} of {len(outputs)} requests put out more or less than the workload says: simulated as in the run"
    )
    return replace(trace, output=outputs, max_output=stated), (note,)


def _load_workload(workload: str | Path) -> Trace:
    """Its ids stand for 16 tokens each, or for as many as fit the file where those do not."""
    from kvsim.workload.traces import load_trace

    trace = load_trace(workload, hash_block_size=HASH_BLOCK, needs_times=False)
    if trace.hash_ids is None:
        return trace
    num_ids, prompt = np.diff(np.asarray(trace.hash_offsets)), np.asarray(trace.prompt)
    is_right = (num_ids == -(-prompt // HASH_BLOCK)) | (num_ids == prompt // HASH_BLOCK)
    return trace if 2 * is_right.sum() >= len(trace) else load_trace(workload, needs_times=False)


def _workload_rows(run: RecordedRun, prompts: np.ndarray, wanted: np.ndarray, workload: str | Path) -> np.ndarray:
    """The workload row of every request: the number in its id, counted from 0 or from 1, or its place.

    Of these the first whose prompts are the run's; the first at all if there is none.
    """
    num_rows, num_requests = len(prompts), len(run.requests)
    if num_requests > num_rows:
        raise ScenarioError(f"{workload}: {num_rows} requests, the run has {num_requests}")
    tails = ["".join(c for c in request.request_id.rsplit("-", 1)[-1] if c.isdigit()) for request in run.requests]
    numbers = [int(tail) if tail else -1 for tail in tails]
    ways = [np.arange(num_requests)]
    if len(set(numbers)) == len(numbers):
        for first in (1, 0):
            if first <= min(numbers) and max(numbers) - first < num_rows:
                ways.insert(0, np.array(numbers) - first)
    return next((rows for rows in ways if np.array_equal(prompts[rows], wanted)), ways[0])


def _metrics(queued: np.ndarray, first: np.ndarray, last: np.ndarray, output_len: np.ndarray) -> dict[str, float]:
    makespan = float(last.max() - queued.min())
    ttft = 1e3 * (first - queued)
    several = output_len > 1
    tpot = 1e3 * (last - first)[several] / (output_len[several] - 1)
    return {
        "makespan_s": makespan,
        "output_throughput": float(output_len.sum()) / makespan,
        "mean_ttft_ms": float(ttft.mean()),
        "p50_ttft_ms": float(np.percentile(ttft, 50)),
        "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "mean_tpot_ms": float(tpot.mean()) if len(tpot) else math.nan,
        "p99_tpot_ms": float(np.percentile(tpot, 99)) if len(tpot) else math.nan,
        "mean_e2el_ms": float(1e3 * (last - queued).mean()),
    }


def measured_metrics(run: RecordedRun) -> dict[str, float]:
    """The comparison's metrics of the run itself."""
    columns = [
        np.array([getattr(request, name) for request in run.requests], dtype=float)
        for name in ("queued_s", "first_token_s", "last_token_s", "output_len")
    ]
    return _metrics(*columns)


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured. `series_error` is the mean absolute difference over the seconds."""

    metrics: Mapping[str, Mapping[str, float]]
    series: Mapping[str, np.ndarray]
    series_error: Mapping[str, float]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What cannot be right in the record."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: `{metric: {predicted, measured, error_pct}}`, null where a run has no such figure."""
        return {
            name: {key: value if math.isfinite(value) else None for key, value in values.items()}
            for name, values in self.metrics.items()
        }


def compare(run: RecordedRun, prediction: Prediction) -> Comparison:
    """Set a prediction beside the run's own times."""
    predicted, measured = prediction.metrics(), measured_metrics(run)
    metrics = {
        name: {
            "predicted": _rounded(predicted[name]),
            "measured": _rounded(measured[name]),
            "error_pct": round(100.0 * (predicted[name] / measured[name] - 1.0), 2) if measured[name] else math.nan,
        }
        for name in METRICS
    }
    series, errors = _compare_series(run, prediction)
    notes = (*prediction.setting.notes, *prediction.notes, *prediction.cost.warnings())
    warnings = (*_other_units(run, predicted, measured), *_series_elsewhere(run, prediction))
    return Comparison(metrics, series, errors, notes, warnings)


def _other_units(run: RecordedRun, predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """A line where the engine took so long for a token that its times must count something else than seconds."""
    name = "mean_tpot_ms" if math.isfinite(measured["mean_tpot_ms"]) else "mean_ttft_ms"
    factor = measured[name] / predicted[name]
    if 1 / _NO_ENGINE < factor < _NO_ENGINE:
        return []
    unit = min(_UNITS, key=lambda unit: abs(math.log(max(factor, 1e-12) / unit)))
    return [
        f"{run.folder / 'requests.jsonl'}: {name} is {measured[name]:.6g} measured and {predicted[name]:.6g} "
        f"predicted: no engine is that far off, and queued_ts, first_token_ts and last_token_ts must be in seconds"
        f"{f' (these look like {_UNITS[unit]})' if factor > 1 else ''}; divide them, and ask again"
    ]


def _series_elsewhere(run: RecordedRun, prediction: Prediction) -> list[str]:
    """A line where nothing of the series can be compared."""
    if not run.series:
        return []
    path = run.folder / "timeseries.csv"
    if "t" not in run.series or not any(name in run.series for name in _SERIES):
        return [
            f"{path}: it has {', '.join(run.series)}; columns t (seconds from the start of the run) and one of "
            f"{', '.join(_SERIES)} are compared: the series is left out"
        ]
    if _inside(run, prediction).any():
        return []
    times = run.series["t"]
    return [
        f"{path}: no time in column 't' ({times.min():g} to {times.max():g}) lies within the run of "
        f"{prediction.last_token_s.max():.0f} s; it must count seconds from the run's start: the series is left out"
    ]


def _inside(run: RecordedRun, prediction: Prediction) -> np.ndarray:
    times = run.series["t"] - run.series_offset_s
    return np.asarray((times >= 0) & (times <= 1.0 + max(prediction.last_token_s.max(), _last_s(run))))


def _last_s(run: RecordedRun) -> float:
    return max(request.last_token_s for request in run.requests) - run.first_queued_s


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _is_logged(run: RecordedRun, name: str) -> bool:
    """Some second has a value; zeros alone are what an engine writes that does not log it, but nobody may wait."""
    measured = run.series[name]
    known = measured[np.isfinite(measured)]
    return bool(len(known)) and (bool(known.any()) or (name == "waiting" and "running" in run.series))


_SHARE_NOT_PCT = 10.0
"""Usage of at most 1 is a share where the prediction in per cent is so many times larger, else it is small."""


def _compare_series(run: RecordedRun, prediction: Prediction) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    if "t" not in run.series or not _inside(run, prediction).any():
        return {}, {}
    times = run.series["t"] - run.series_offset_s
    predicted = prediction.series(times)
    series, errors = {"t_s": times}, {}
    for name, values in predicted.items():
        measured = run.series.get(name)
        if measured is None or not _is_logged(run, name):
            continue
        known = np.isfinite(measured)
        most = measured[known].max()
        if name == "kv_cache_pct" and most <= 1.0 and values.max() > _SHARE_NOT_PCT * most:
            measured = 100.0 * measured  # logged as a share
        series[name], series[f"{name}_measured"] = values, measured
        errors[name] = round(float(np.abs(values - measured)[known].mean()), 2)
    return series, errors


def plot(comparison: Comparison, path: str | Path) -> None:
    """Running, waiting and KV usage over time, predicted and measured, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in ("running", "waiting", "kv_cache_pct") if name in comparison.series]
    if not names:
        return
    labels = {"running": "running requests", "waiting": "waiting requests", "kv_cache_pct": "KV usage (%)"}
    figure, axes = plt.subplots(len(names), 1, figsize=(8, 2.6 * len(names)), sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        times = comparison.series["t_s"]
        axis.step(times, comparison.series[f"{name}_measured"], where="post", color="black", label="measured")
        axis.step(times, comparison.series[name], where="post", color="#D55E00", label="predicted")
        axis.set(ylabel=labels[name], ylim=(0, None))
        axis.set_title(f"mean difference {comparison.series_error[name]:g}", fontsize=9)
        axis.legend(fontsize=8)
    axes[-1, 0].set_xlabel("seconds after the first request")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


_MAX_GUESSES = 6
_MAX_ROUNDS = 12
_SAME_US, _SAME_SHARE = 20.0, 0.02
"""Overheads that differ by no more than either of these are the same."""


def fit_overhead(
    run: str | Path,
    workload: str | Path | None = None,
    *,
    gpu: str | None = None,
    profile: str | Profile | None = None,
    model: str | None = None,
) -> Overhead:
    """The engine's overhead per step, decode-only and with prompts, from a recorded run's gaps.

    The simulation is repeated with what was found until nothing changes: its steps then lie where the run's did. Raises
    ScenarioError if the run has too few decode-only gaps, or if this does not converge.
    """
    from kvsim.cost.from_run import GEMM_TILES, MOST_US, did_not_converge, overhead_of_gaps, too_slow

    if workload is None:
        raise ScenarioError(f"{run}: the run's requests are needed: give --workload FILE.jsonl")
    recorded = load_run(run)
    setting = setting_of(recorded, gpu=gpu, profile=profile, model=model)
    decode_us = mixed_us = _guess_overhead_us(recorded, workload, setting)
    gemm_tiles: tuple[tuple[int, int], ...] = ()
    for _ in range(_MAX_ROUNDS):
        prediction = predict(
            recorded,
            workload,
            setting,
            decode_overhead_us=decode_us,
            mixed_overhead_us=mixed_us,
            gemm_tiles=gemm_tiles,
        )
        name, before = recorded.folder.name, (decode_us, mixed_us)
        found = [overhead_of_gaps(_gaps(recorded, prediction, tiles), name, tiles, before) for tiles in GEMM_TILES]
        sane = [one for one in found if one is not None]
        if not sane:
            raise ScenarioError(f"{run}: too few gaps between events that hold decode-only steps; the run is too short")
        overhead = min(sane, key=lambda one: one.mixed_spread_us)
        is_same = overhead.gemm_tiles == gemm_tiles
        gemm_tiles, decode_us, mixed_us = overhead.gemm_tiles, overhead.decode_step_us, overhead.mixed_step_us
        if overhead.decode_step_us > MOST_US:
            raise too_slow(run, overhead, "times in requests.jsonl")
        if overhead.settled and is_same and _are_same(before[0], decode_us) and _are_same(before[1], mixed_us):
            return overhead
    raise did_not_converge(run, overhead)


def _are_same(before_us: float, after_us: float) -> bool:
    return abs(after_us - before_us) <= max(_SAME_US, _SAME_SHARE * after_us)


def _guess_overhead_us(run: RecordedRun, workload: str | Path, setting: Setting) -> float:
    """One overhead for every step, from each request's time between its first and last token.

    How many steps lie between these two is known whatever the simulation makes of the rest, so that a large overhead
    shows here while the gaps between different requests' events still hold other steps than the run's.
    """
    cost = _kernel_cost(setting, 0.0, 0.0, ())
    measured_us = np.array([1e6 * (request.last_token_s - request.first_token_s) for request in run.requests])
    guess_us = 0.0
    for _ in range(_MAX_GUESSES):
        before_us = guess_us
        prediction = predict(
            run, workload, setting, decode_overhead_us=before_us, mixed_overhead_us=before_us, gemm_tiles=()
        )
        kernel_us = np.array([cost.step_ns(shape) for shape in prediction.steps.shapes]) / 1e3
        kernel_sum = np.concatenate([[0.0], np.cumsum(kernel_us)])
        first, last = prediction.step_of(prediction.first_token_s), prediction.step_of(prediction.last_token_s)
        several = last > first
        if not several.any():
            return 0.0
        over_us = measured_us - (kernel_sum[last + 1] - kernel_sum[first + 1])
        guess_us = max(0.0, float(np.median(over_us[several] / (last - first)[several])))
        if _are_same(before_us, guess_us):
            break
    return guess_us


def _gaps(run: RecordedRun, prediction: Prediction, tiles: tuple[tuple[int, int], ...]) -> list[Gap]:
    """The run's gaps, with the steps that the simulation puts there, priced without overhead."""
    from kvsim.cost.from_run import gaps_between_events

    cost = _kernel_cost(prediction.setting, 0.0, 0.0, tiles)
    kernel_us = np.array([cost.step_ns(shape) for shape in prediction.steps.shapes]) / 1e3
    is_mixed = np.array([bool(shape.prefills) for shape in prediction.steps.shapes])
    event_s: dict[Any, float] = {}
    step_of: dict[Any, int] = {}
    first, last = prediction.step_of(prediction.first_token_s), prediction.step_of(prediction.last_token_s)
    for index, request in enumerate(run.requests):
        for kind, measured, predicted in (
            ("first", request.first_token_s, first[index]),
            ("last", request.last_token_s, last[index]),
        ):
            event_s[index, kind] = measured
            step_of[index, kind] = int(predicted)
    return gaps_between_events(event_s, step_of, kernel_us, is_mixed)
