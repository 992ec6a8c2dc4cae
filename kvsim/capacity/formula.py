"""From a model, a GPU and an engine's flags to a report; the same for a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from kvsim.capacity.notes import notes_of
from kvsim.capacity.problem import problem_of
from kvsim.capacity.report import CapacityReport
from kvsim.capacity.terms import (
    Flags,
    Pages,
    Terms,
    check_counts,
    check_flags,
    default_max_num_batched_tokens,
    default_max_num_seqs,
    models_len,
    terms_of,
)
from kvsim.catalog import GpuSpec, load_gpu, load_model
from kvsim.memory.geometry import GeometryError, ModelGeometry, dtype_bytes
from kvsim.types import ScenarioError


def capacity(
    model: ModelGeometry | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Mapping[str, Any] | None = None,
    *,
    speculative_model: ModelGeometry | str | Path | Mapping[str, Any] | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    swap_space: int = 0,
    weight_bytes: int | None = None,
    activation_bytes: int | None = None,
    non_torch_bytes: int | None = None,
    total_memory_bytes: int | None = None,
) -> CapacityReport:
    """How many KV blocks a model gets on a GPU, with vLLM's flags under vLLM's names; sizes are bytes per rank.

    `max_model_len` defaults to the model's; `max_num_seqs` and `max_num_batched_tokens` to vLLM's for a GPU of that
    size. `kv_cache_memory_bytes` replaces the whole memory arithmetic (then no GPU is needed),
    `num_gpu_blocks_override` its result, and `weight_bytes`, `activation_bytes`, `non_torch_bytes`,
    `total_memory_bytes` single terms (measured ones, or those of a model that cannot be counted). `swap_space` is host
    memory. A `speculative_model` has its weights, and its KV of every token, on the same GPUs. A fit that is impossible
    is a report with `problem`; values that make no sense raise ScenarioError.
    """
    geometry = _geometry(model, dtype).stage(pipeline_parallel_size, max(1, tensor_parallel_size))
    spec = None if gpu is None else gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    total = total_memory_bytes if total_memory_bytes is not None else spec.total_memory_bytes if spec else None
    check_flags(
        gpu_memory_utilization,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        total_memory_bytes=total_memory_bytes,
        tensor_parallel_size=tensor_parallel_size,
    )
    check_counts(
        swap_space=swap_space,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        non_torch_bytes=non_torch_bytes,
    )
    flags = Flags(
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        max_model_len=max_model_len if max_model_len is not None else models_len(geometry),
        max_num_seqs=max_num_seqs if max_num_seqs is not None else default_max_num_seqs(spec, total),
        max_num_batched_tokens=max_num_batched_tokens
        if max_num_batched_tokens is not None
        else default_max_num_batched_tokens(spec, total),
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        draft=None if speculative_model is None else _geometry(speculative_model, "auto"),
    )
    if flags.draft is not None and pipeline_parallel_size > 1:
        raise ScenarioError("a speculative model beside pipeline stages is not counted")
    pages = Pages.of(geometry, flags)
    if kv_cache_memory_bytes is not None:
        terms = Terms(kv_cache_memory_bytes, total)
    elif total is None and num_gpu_blocks_override is not None:
        terms = Terms(num_gpu_blocks_override * pages.block_bytes)
    else:
        terms = terms_of(geometry, flags, total, weight_bytes, activation_bytes, non_torch_bytes)
    report = _report(geometry, spec, flags, pages, terms, num_gpu_blocks_override, swap_space)
    return replace(report, is_activation_estimated=terms.activations is not None and activation_bytes is None)


def _geometry(model: ModelGeometry | str | Path | Mapping[str, Any], dtype: str) -> ModelGeometry:
    geometry = model if isinstance(model, ModelGeometry) else load_model(model)
    if dtype == "auto":
        # vLLM runs float32 checkpoints in half precision unless told otherwise.
        is_float32 = geometry.dtype is not None and dtype_bytes(geometry.dtype) == 4
        return replace(geometry, dtype="float16") if is_float32 else geometry
    return replace(geometry, dtype=dtype)


def _report(
    geometry: ModelGeometry,
    gpu: GpuSpec | None,
    flags: Flags,
    pages: Pages,
    terms: Terms,
    num_gpu_blocks_override: int | None,
    swap_space: int,
) -> CapacityReport:
    num_that_fit = max(0, terms.kv) // pages.block_bytes
    num_blocks = num_that_fit if num_gpu_blocks_override is None else num_gpu_blocks_override
    return CapacityReport(
        model=geometry.name or "model",
        gpu=gpu.name if gpu is not None else None,
        tensor_parallel_size=flags.tensor_parallel_size,
        pipeline_parallel_size=flags.pipeline_parallel_size,
        block_size=flags.block_size,
        kv_cache_dtype=geometry.element_dtype(flags.kv_cache_dtype),
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        bytes_per_token=flags.bytes_per_token(geometry),
        block_bytes=pages.block_bytes,
        total_memory_bytes=terms.total,
        budget_bytes=terms.budget,
        weight_bytes=terms.weights,
        activation_bytes=terms.activations,
        non_torch_bytes=terms.non_torch,
        kv_bytes=terms.kv,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=swap_space // pages.block_bytes,
        num_blocks_per_request=pages.num_per_request,
        max_concurrency=num_blocks / pages.share_per_request,
        problem=problem_of(geometry, flags, pages, terms, num_gpu_blocks_override),
        notes=notes_of(geometry, flags, pages, num_blocks, num_that_fit),
    )


def kv_cache_bytes(geometry: ModelGeometry, gpu: GpuSpec, scenario: Any) -> int:
    """Bytes of KV cache that a scenario's GPU has left for it. Raises ScenarioError where that is nothing.

    Reads `memory.gpu_memory_utilization`, `kv_cache_dtype`, `tensor_parallel_size` and the scheduler's limits. What
    is wrong with the model is a GeometryError.
    """
    limits = scenario.scheduler
    max_model_len = getattr(limits, "max_model_len", None) or geometry.max_model_len
    try:
        report = capacity(
            geometry,
            gpu,
            gpu_memory_utilization=scenario.memory.gpu_memory_utilization,
            max_model_len=max_model_len or 1,
            max_num_seqs=getattr(limits, "max_num_seqs", None),
            max_num_batched_tokens=getattr(limits, "max_num_batched_tokens", None) or max_model_len,
            kv_cache_dtype=scenario.kv_cache_dtype,
            tensor_parallel_size=scenario.tensor_parallel_size,
            weight_bytes=getattr(scenario.model, "weight_bytes", None),
        )
    except GeometryError as error:
        fault, cure = str(error), "or say how much there is with memory.kv_cache_memory_bytes"
        if isinstance(scenario.model, str):
            # Beside the name of a file a scenario can give nothing of the model.
            fault, cure = f"{scenario.model}: {fault.partition(': give ')[0]}", f"mend it, {cure}"
        raise GeometryError(f"{fault}; {cure}") from None
    if report.kv_bytes < 1:
        raise ScenarioError(f"memory: {report.problem}")
    return report.kv_bytes


def window_gain(
    geometry: ModelGeometry,
    *,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
) -> float:
    """How many times the requests of `max_model_len` tokens fit when windowed layers drop what lies behind them."""
    flags = Flags(
        gpu_memory_utilization=1.0,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
    )
    pages = Pages.of(geometry, flags)
    full_block_bytes = block_size * geometry.bytes_per_token(kv_cache_dtype, tensor_parallel_size)
    full_bytes = ceil(max_model_len / block_size) * full_block_bytes
    return full_bytes / (pages.share_per_request * pages.block_bytes)
