"""What the engine of a recorded run ran with: its arguments as logged, as told, or by default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from kvsim.types import ScenarioError
from kvsim.validate_run.recorded import Keys, RecordedRun

if TYPE_CHECKING:
    from kvsim.catalog import GpuSpec
    from kvsim.cost.profile import Profile
    from kvsim.memory.geometry import ModelGeometry

ASYNC_SINCE = (0, 14)
"""vLLM schedules asynchronously by default from this version on."""
_MOST_BYTES = 1 << 50
_MOST_RANKS = 1024

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
        from kvsim.catalog import load_model

        geometry = load_model(self.model)
        return geometry if self.dtype == "auto" else replace(geometry, dtype=self.dtype)


def setting_of(
    run: RecordedRun, *, gpu: str | None = None, profile: str | Profile | None = None, model: str | None = None
) -> Setting:
    """Read the engine's arguments; defaults are vLLM's. Raises ScenarioError for what cannot be told."""
    from kvsim.catalog import load_model, model_names
    from kvsim.scenario.schema import CacheDtype

    kwargs, meta = run.engine_kwargs, run.folder / "meta.json"
    model = model or kwargs.text("model") or run.keys.text("model")
    if not model:
        raise ScenarioError(f"{meta}: names no model; give --model")
    geometry = load_model(model)
    gpu_spec, gpu_note = _gpu_of(run, gpu, profile)
    engine, engine_note = _engine_of(run)
    limits = _limits_of(run, geometry, gpu_spec)
    num_replicas = kwargs.integer("data_parallel_size") or 1
    if num_replicas > 1:
        raise ScenarioError(
            f"{meta}: data_parallel_size is {num_replicas}; a run of one replica is what can be "
            f"predicted: which replica served which request is not in the record"
        )
    dtype = kwargs.choice("dtype", _DTYPES) or "auto"
    kv_cache_dtype = kwargs.choice("kv_cache_dtype", get_args(CacheDtype)) or "auto"
    cache = _cache_of(run)
    num_gpu_blocks, block_notes = _num_gpu_blocks(run, cache, geometry, gpu_spec, limits, dtype, kv_cache_dtype)
    return Setting(
        engine=engine,
        model=geometry.name if geometry.name in model_names() else model,
        gpu=gpu_spec.name,
        profile=profile or gpu_spec.name,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_gpu_blocks=num_gpu_blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        tensor_parallel_size=kwargs.integer("tensor_parallel_size", _MOST_RANKS) or 1,
        kv_cache_dtype=kv_cache_dtype,
        notes=(gpu_note, engine_note, *block_notes),
        dtype=dtype,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        scheduling_policy=kwargs.choice("scheduling_policy", ("fcfs", "priority")) or "fcfs",
        long_prefill_token_threshold=kwargs.integer("long_prefill_token_threshold", least=0) or 0,
        scheduler_reserve_full_isl=kwargs.truth("scheduler_reserve_full_isl") is not False,
        watermark=kwargs.watermark() or 0.0,
        gpu_memory_bytes=limits.total_memory_bytes,
        warnings=(*_unused(kwargs), *_other_formats(meta, dtype)),
    )


def _unused(kwargs: Keys) -> list[str]:
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


@dataclass(frozen=True)
class _Limits:
    """How much the scheduler takes on, and the memory by which vLLM chooses its defaults for that."""

    total_memory_bytes: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool
    max_num_batched_tokens: int


def _limits_of(run: RecordedRun, geometry: ModelGeometry, gpu: GpuSpec) -> _Limits:
    from kvsim.capacity import default_max_num_batched_tokens, default_max_num_seqs

    kwargs = run.engine_kwargs
    total = run.keys.inner("hardware").integer("device_total_memory_bytes", _MOST_BYTES) or gpu.total_memory_bytes
    max_num_seqs = kwargs.integer("max_num_seqs") or default_max_num_seqs(gpu, total)
    max_model_len = _max_model_len(kwargs, geometry)
    is_chunked = kwargs.truth("enable_chunked_prefill") is not False
    max_tokens = kwargs.integer("max_num_batched_tokens")
    if max_tokens is None:
        # Without chunks the longest prompt has to fit into one step.
        max_tokens = max(default_max_num_batched_tokens(gpu, total), 0 if is_chunked else max_model_len)
    return _Limits(total, max_num_seqs, max_model_len, is_chunked, max_tokens)


def _max_model_len(kwargs: Keys, geometry: ModelGeometry) -> int:
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


def _engine_of(run: RecordedRun) -> tuple[str, str]:
    """The engine, and how it is known."""
    told = run.engine_kwargs.truth("async_scheduling")
    if told is not None:
        engine = "vllm-v1-async" if told else "vllm-v1"
        return engine, f"engine {engine}: async_scheduling is {str(told).lower()} in the run's arguments"
    key = "vllm_version" if run.meta.get("vllm_version") is not None else "version"
    version = run.keys.text(key)
    numbers = re.match(r"\s*v?(\d+)\.(\d+)", version or "")
    if version and not numbers:
        raise run.keys.bad(key, 'a version such as "0.19.0" (or say engine_kwargs.async_scheduling)')
    if numbers and (int(numbers[1]), int(numbers[2])) < ASYNC_SINCE:
        return "vllm-v1", f"engine vllm-v1: vLLM {version} schedules synchronously by default"
    what = f"vLLM {version} schedules" if version else "no version in meta.json; vLLM since 0.14 schedules"
    return "vllm-v1-async", f"engine vllm-v1-async: {what} asynchronously by default"


@dataclass(frozen=True)
class _Cache:
    """The cache's settings, with what decides its size where the engine did not log that."""

    block_size: int
    enable_prefix_caching: bool
    logged_blocks: int | None
    utilization: float
    override: int | None
    """`num_gpu_blocks_override`"""
    kv_bytes: int | None
    """`kv_cache_memory_bytes`"""
    num_ranks: int


def _cache_of(run: RecordedRun) -> _Cache:
    """As the engine logged them, as it was told, or its defaults; what makes no sense is refused, used or not."""
    logged, kwargs = run.keys.inner("kv_cache"), run.engine_kwargs
    if not logged.values:
        logged = run.keys.inner("cache_config")
    block_size = logged.integer("block_size", 1 << 20) or kwargs.integer("block_size", 1 << 20) or 16
    told = (keys.truth("enable_prefix_caching") for keys in (logged, kwargs))
    return _Cache(
        block_size,
        next((value for value in told if value is not None), True),
        utilization=logged.share("gpu_memory_utilization") or kwargs.share("gpu_memory_utilization") or 0.9,
        override=kwargs.integer("num_gpu_blocks_override"),
        kv_bytes=kwargs.integer("kv_cache_memory_bytes", _MOST_BYTES),
        num_ranks=kwargs.integer("tensor_parallel_size", _MOST_RANKS) or 1,
        logged_blocks=logged.integer("num_gpu_blocks"),
    )


def _num_gpu_blocks(
    run: RecordedRun,
    cache: _Cache,
    geometry: ModelGeometry,
    gpu: GpuSpec,
    limits: _Limits,
    dtype: str,
    kv_cache_dtype: str,
) -> tuple[int, list[str]]:
    """As logged, as told, or as the capacity formula has it; and which of them, in words."""
    from kvsim.capacity import capacity

    if cache.logged_blocks:
        return cache.logged_blocks, [f"{cache.logged_blocks} KV blocks: from meta.json"]
    logged_tokens, log_name = _logged_kv_tokens(run.folder)
    if num_blocks := logged_tokens // cache.block_size:
        return num_blocks, [f"{num_blocks} KV blocks: {logged_tokens:,} tokens in {log_name}"]
    if cache.override is not None:
        num_blocks, source = cache.override, "num_gpu_blocks_override in the run's arguments"
    else:
        num_blocks = capacity(
            geometry,
            gpu,
            total_memory_bytes=limits.total_memory_bytes,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=cache.utilization,
            block_size=cache.block_size,
            tensor_parallel_size=cache.num_ranks,
            kv_cache_memory_bytes=cache.kv_bytes,
        ).num_gpu_blocks
        source = (
            f"from the capacity formula at utilization {cache.utilization:g}"
            if cache.kv_bytes is None
            else f"kv_cache_memory_bytes {cache.kv_bytes:,} in the run's arguments"
        )
    if num_blocks < 1:
        raise _no_block(run, cache)
    notes = [f"{num_blocks} KV blocks: {source}"]
    if num_blocks * cache.block_size < limits.max_model_len:
        notes.append(
            f"these blocks hold less than one sequence of {limits.max_model_len:,} tokens, which vLLM refuses: the "
            f"run had more memory or a shorter limit than meta.json says"
        )
    return num_blocks, notes


def _no_block(run: RecordedRun, cache: _Cache) -> ScenarioError:
    told = (
        f"gpu_memory_utilization {cache.utilization:g}"
        if cache.kv_bytes is None
        else f"kv_cache_memory_bytes {cache.kv_bytes:,}"
    )
    return ScenarioError(
        f"{run.folder / 'meta.json'}: {told} leaves no KV block: write what the engine ran with, or the "
        f"number that it logged as kv_cache.num_gpu_blocks"
    )


def _logged_kv_tokens(folder: Path) -> tuple[int, str]:
    """The tokens of the cache that vLLM prints at its start, from a log in the run's folder; (0, "") without one."""
    for path in sorted([*folder.glob("*.log"), *folder.glob("*.txt")]):
        found = re.search(r"GPU KV cache size:\s*([\d,]+)\s*tokens", path.read_text(encoding="utf-8", errors="replace"))
        if found:
            return int(found[1].replace(",", "")), path.name
    return 0, ""
