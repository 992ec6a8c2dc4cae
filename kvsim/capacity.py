"""From a model, a GPU and an engine's flags to blocks and concurrency: is the KV cache big enough, and if not, why.

    KV bytes = gpu_memory_utilization * total - weights - peak activations - non-torch
    blocks   = floor(KV bytes / (block_size * bytes_per_token))

The first line is vLLM's own arithmetic. Weights are counted from the configuration. Peak activations and the memory
outside PyTorch are **estimates** with the coefficients below, unless given; how far off they are is in
docs/accuracy-capacity.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from kvsim.catalog import GIB, MIB, GpuSpec, load_gpu, load_model
from kvsim.memory.config_fields import optional, shown, widths
from kvsim.memory.geometry import DS_MLA, FULL, GeometryError, LayerGroup, ModelGeometry, dtype_bytes
from kvsim.memory.layers import CHUNKED, unexplained_state
from kvsim.memory.weights import weight_bytes as count_weight_bytes
from kvsim.types import ScenarioError

SAMPLER_BYTES_PER_LOGIT = 38.24
"""Sampling keeps logits in fp32, sorted values, indices, probabilities and sums at once.

Fitted to the peak activations vLLM logged on an H100 with 1,024 sequences (llm-d-benchmark, config_explorer): 38.2 to
38.3 for vocabularies of 128,256, 151,936 and 201,088.
"""

FORWARD_ROWS = 3
"""Copies of a hidden row, and of an MLP row, that the widest moment of the forward pass holds per token.

The same issues' 3.02 GiB for 29,000 tokens of Llama-3-8B (vllm-project/vllm#10517) are 2.99 GiB with 3 and 3.
"""

NON_TORCH_BYTES = round(0.14 * GIB)
"""CUDA libraries on one GPU: 0.10 to 0.14 GiB in the logs of both sources."""

NON_TORCH_BYTES_PARALLEL = round(0.55 * GIB)
"""The same with tensor parallelism, collective buffers included: 0.55 GiB (vLLM V1), 0.30 GiB (V0)."""

HEAD_ROOM = 0.20
"""Share of the blocks to leave free at the expected peak."""

LARGE_GPU_BYTES = 70 * GIB

USUAL_BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Sizes to advise, in tokens: what engines offer, and the smaller ones for a cache that holds next to nothing."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Where the memory of one GPU goes, in bytes, and what the KV part of it can hold.

    Per-token and per-block sizes are those of one GPU: a tensor-parallel rank of the longest pipeline stage. `problem`
    says why the engine would refuse to start and which number to change; None where it fits. `None` bytes were not
    needed (the KV size was given).
    """

    model: str
    gpu: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    bytes_per_token: int
    block_bytes: int
    total_memory_bytes: int | None
    budget_bytes: int | None
    weight_bytes: int | None
    activation_bytes: int | None
    non_torch_bytes: int | None
    kv_bytes: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    """Blocks that `swap_space` holds."""
    num_blocks_per_request: int
    """Blocks one request of `max_model_len` tokens holds at most."""
    max_concurrency: float
    """Requests of `max_model_len` tokens that fit at once."""
    problem: str | None
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.num_gpu_blocks * self.block_size

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def start_up_lines(self) -> tuple[str, str]:
        """The two lines vLLM logs when it starts."""
        return (
            f"GPU KV cache size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x",
        )

    @property
    def outside_bytes(self) -> int | None:
        """Memory that `gpu_memory_utilization` leaves alone (CUDA graphs, fragmentation, other processes)."""
        if self.total_memory_bytes is None or self.budget_bytes is None:
            return None
        return self.total_memory_bytes - self.budget_bytes

    @property
    def num_blocks_that_fit(self) -> int:
        """Blocks the memory leaves room for, whatever `num_gpu_blocks_override` says."""
        return max(0, self.kv_bytes) // self.block_bytes

    @property
    def num_blocks_at_most(self) -> int | None:
        """Blocks that would use up what lies outside the budget too, to the last byte."""
        if self.outside_bytes is None:
            return None
        return _num_blocks_at_most(self.kv_bytes, self.outside_bytes, self.block_bytes)

    @property
    def num_squeezing_blocks(self) -> int | None:
        """Blocks beyond this cap that would use up what lies outside the budget, to the last byte."""
        return None if self.num_blocks_at_most is None else max(0, self.num_blocks_at_most - self.num_gpu_blocks)

    @property
    def num_blocks_with_head_room(self) -> int:
        """Blocks to plan the peak for: the rest is the head-room that keeps preemption away."""
        return int(self.num_gpu_blocks * (1 - HEAD_ROOM))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data (JSON): every field above, sizes in bytes, and the derived figures."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "num_tokens": self.num_tokens,
            "max_concurrency": round(self.max_concurrency, 4),
            "start_up_lines": list(self.start_up_lines),
            "outside_bytes": self.outside_bytes,
            "num_blocks_that_fit": self.num_blocks_that_fit,
            "num_blocks_at_most": self.num_blocks_at_most,
            "num_squeezing_blocks": self.num_squeezing_blocks,
            "num_blocks_with_head_room": self.num_blocks_with_head_room,
            "fits": self.fits,
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """The report as text."""
        lines = [self._title(), "", *self._memory_lines(), "", *self.start_up_lines, "", *self._advice()]
        lines += [f"Note: {note}" for note in self.notes]
        if self.problem is not None:
            lines.append(f"DOES NOT FIT: {self.problem}")
        return "\n".join(lines) + "\n"

    def _title(self) -> str:
        ranks = f", one of {self.tensor_parallel_size} ranks" if self.tensor_parallel_size > 1 else ""
        stages = f", one of {self.pipeline_parallel_size} stages" if self.pipeline_parallel_size > 1 else ""
        return f"{self.model} on {self.gpu or 'a given KV cache'}{ranks}{stages}"

    def _memory_lines(self) -> list[str]:
        rows: list[tuple[str, int | None]] = [
            ("total as the runtime sees it", self.total_memory_bytes),
            (f"budget ({self.gpu_memory_utilization:g} of it)", self.budget_bytes),
            ("- weights", self.weight_bytes),
            ("- peak activations", self.activation_bytes),
            ("- outside PyTorch", self.non_torch_bytes),
            ("= KV cache", self.kv_bytes),
        ]
        lines = [f"{label:<30}{size / GIB:>10.2f} GiB" for label, size in rows if size is not None]
        lines.append(f"{'one token':<30}{self.bytes_per_token:>10,} bytes ({self.kv_cache_dtype})")
        lines.append(f"{f'one block of {self.block_size} tokens':<30}{self.block_bytes:>10,} bytes")
        lines.append(f"{'blocks':<30}{self.num_gpu_blocks:>10,}")
        if self.num_cpu_blocks:
            lines.append(f"{'blocks of swap space':<30}{self.num_cpu_blocks:>10,}")
        return lines

    def _advice(self) -> list[str]:
        if not self.num_gpu_blocks:
            return []  # There is nothing to plan with.
        planned = self.num_blocks_with_head_room
        lines = [
            f"Plan the peak for {planned:,} blocks ({planned * self.block_size:,} tokens) and leave {HEAD_ROOM:.0%} "
            f"free: a cache that runs full preempts and recomputes."
        ]
        if self.outside_bytes is not None:
            is_own = self.num_gpu_blocks == self.num_blocks_that_fit
            larger = "A larger block cap" if is_own else f"A block cap above {self.num_blocks_that_fit:,}"
            lines.append(
                f"{larger} squeezes the {self.outside_bytes / GIB:.2f} GiB outside the budget (CUDA graphs, "
                f"fragmentation, other processes): 100 blocks more take {100 * self.block_bytes / GIB:.2f} GiB, and at "
                f"{self.num_blocks_at_most:,} blocks nothing is left."
            )
        return lines


def capacity(
    model: ModelGeometry | str | Path | Mapping[str, Any],
    gpu: GpuSpec | str | Mapping[str, Any] | None = None,
    *,
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
    memory. A fit that is impossible is a report with `problem`; values that make no sense raise ScenarioError.
    """
    geometry = _geometry(model, dtype).stage(pipeline_parallel_size)
    spec = None if gpu is None else gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
    total = total_memory_bytes if total_memory_bytes is not None else spec.total_memory_bytes if spec else None
    _check(
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
    _check_terms(
        swap_space=swap_space,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        non_torch_bytes=non_torch_bytes,
    )
    flags = _Flags(
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        max_model_len=max_model_len if max_model_len is not None else _models_len(geometry),
        max_num_seqs=max_num_seqs if max_num_seqs is not None else default_max_num_seqs(spec, total),
        max_num_batched_tokens=max_num_batched_tokens
        if max_num_batched_tokens is not None
        else default_max_num_batched_tokens(spec, total),
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    pages = _Pages.of(geometry, flags)
    if kv_cache_memory_bytes is not None:
        terms = _Terms(total, None, None, None, None, kv_cache_memory_bytes)
    elif total is None and num_gpu_blocks_override is not None:
        terms = _Terms(None, None, None, None, None, num_gpu_blocks_override * pages.block_bytes)
    else:
        terms = _terms(geometry, flags, total, weight_bytes, activation_bytes, non_torch_bytes)
    return _report(geometry, spec, flags, pages, terms, num_gpu_blocks_override, swap_space)


def command(
    model: str, gpu: GpuSpec | str | None = None, *, base_dir: Path | None = None, **flags: Any
) -> CapacityReport:
    """The verb `kvsim capacity`: as `capacity`, with names or paths as typed; print `render()` or `to_dict()`."""
    geometry = load_model(model, base_dir=base_dir)
    try:
        return capacity(geometry, gpu, **flags)
    except GeometryError as error:
        raise GeometryError(f"{model}: {error}") from None


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
    flags = _Flags(
        gpu_memory_utilization=1.0,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
    )
    pages = _Pages.of(geometry, flags)
    full_block_bytes = block_size * geometry.bytes_per_token(kv_cache_dtype, tensor_parallel_size)
    full_bytes = ceil(max_model_len / block_size) * full_block_bytes
    return full_bytes / (pages.share_per_request * pages.block_bytes)


@dataclass(frozen=True, slots=True)
class _Flags:
    gpu_memory_utilization: float
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class _Terms:
    """The memory equation, in bytes; None where a term was not needed."""

    total: int | None
    budget: int | None
    weights: int | None
    activations: int | None
    non_torch: int | None
    kv: int


@dataclass(frozen=True, slots=True)
class _Pages:
    """How layers share blocks.

    Layers of one kind form one group. Where kinds differ (full and windowed), vLLM cuts them into groups of equally
    many layers that draw blocks from one pool; a shorter last group is padded.
    """

    block_bytes: int
    """Bytes that `block_size` tokens take in all groups."""
    num_groups: int
    num_pages: int
    """Pages, each a block of one group, that one request of `max_model_len` holds at most."""

    @property
    def share_per_request(self) -> float:
        """The same in blocks of all groups together."""
        return self.num_pages / self.num_groups

    @property
    def num_per_request(self) -> int:
        """The same, rounded up."""
        return -(-self.num_pages // self.num_groups)

    @classmethod
    def of(cls, geometry: ModelGeometry, flags: _Flags) -> _Pages:
        layer_bytes = geometry.layer_bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
        if not geometry.is_hybrid:
            bytes_per_token = geometry.bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
            return cls(bytes_per_token * flags.block_size, 1, _pages_per_request(geometry.groups[0], flags))
        layers_per_group = _layers_per_group(geometry.groups)
        num_groups, num_pages = 0, 0
        for group in geometry.groups:
            num_alike = ceil(group.num_layers / layers_per_group)
            num_groups += num_alike
            num_pages += num_alike * _pages_per_request(group, flags)
        block_bytes = num_groups * layers_per_group * layer_bytes * flags.block_size
        return cls(block_bytes, num_groups, num_pages)


def _layers_per_group(groups: tuple[LayerGroup, ...]) -> int:
    counts = [group.num_layers for group in groups]
    return max(counts) if max(counts) < 1.25 * min(counts) else min(counts)


def _pages_per_request(group: LayerGroup, flags: _Flags) -> int:
    """Blocks of one layer: all tokens, or those it looks back at and one step's; a window may begin inside a block."""
    if group.kind == FULL or group.window is None:
        return ceil(flags.max_model_len / flags.block_size)
    if group.kind == CHUNKED:
        return ceil(min(group.window + flags.max_num_batched_tokens, flags.max_model_len) / flags.block_size)
    num_tokens = min(group.window - 1 + flags.max_num_batched_tokens, flags.max_model_len)
    return ceil(num_tokens / flags.block_size) + 1


def _geometry(model: ModelGeometry | str | Path | Mapping[str, Any], dtype: str) -> ModelGeometry:
    geometry = model if isinstance(model, ModelGeometry) else load_model(model)
    if dtype == "auto":
        # vLLM runs float32 checkpoints in half precision unless told otherwise.
        is_float32 = geometry.dtype is not None and dtype_bytes(geometry.dtype) == 4
        return replace(geometry, dtype="float16") if is_float32 else geometry
    return replace(geometry, dtype=dtype)


def _models_len(geometry: ModelGeometry) -> int:
    if geometry.max_model_len is None:
        raise GeometryError("the model configuration lacks max_position_embeddings: give max_model_len")
    return geometry.max_model_len


def _is_large(gpu: GpuSpec | None, total: int | None) -> bool:
    """vLLM's own distinction: 70 GiB or more, and no A100."""
    return total is not None and total >= LARGE_GPU_BYTES and not (gpu is not None and gpu.name.startswith("a100"))


def default_max_num_seqs(gpu: GpuSpec | None, total_memory_bytes: int | None) -> int:
    """vLLM V1's default: 1,024 on large GPUs, else 256."""
    return 1024 if _is_large(gpu, total_memory_bytes) else 256


def default_max_num_batched_tokens(gpu: GpuSpec | None, total_memory_bytes: int | None) -> int:
    """vLLM V1's default for `vllm serve`: 8,192 on large GPUs, else 2,048."""
    return 8192 if _is_large(gpu, total_memory_bytes) else 2048


MAX_FLAG = 1 << 60
"""Of anything that is counted, bytes or tokens: more than any machine has."""


def _check(utilization: float, **counts: int | None) -> None:
    if not 0 < utilization <= 1:
        raise ScenarioError(f"gpu_memory_utilization is {utilization}; it must be above 0 and at most 1")
    _check_terms(1, **counts)


def _check_terms(least: int = 0, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and not least <= count <= MAX_FLAG:
            limit = f"at least {least}" if count < least else f"at most {MAX_FLAG}"
            raise ScenarioError(f"{name} is {shown(count)}; it must be {limit}")


def _terms(
    geometry: ModelGeometry,
    flags: _Flags,
    total: int | None,
    weights: int | None,
    activations: int | None,
    non_torch: int | None,
) -> _Terms:
    if total is None:
        raise ScenarioError("the KV capacity needs a gpu, or kv_cache_memory_bytes, or num_gpu_blocks_override")
    if weights is None:
        weights = count_weight_bytes(geometry, flags.tensor_parallel_size)
    if activations is None:
        activations = estimate_activation_bytes(
            geometry, flags.max_num_batched_tokens, flags.max_num_seqs, flags.tensor_parallel_size
        )
    if non_torch is None:
        is_alone = flags.tensor_parallel_size == flags.pipeline_parallel_size == 1
        non_torch = NON_TORCH_BYTES if is_alone else NON_TORCH_BYTES_PARALLEL
    budget = int(flags.gpu_memory_utilization * total)
    return _Terms(total, budget, weights, activations, non_torch, budget - weights - activations - non_torch)


def estimate_activation_bytes(
    geometry: ModelGeometry, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel_size: int = 1
) -> int:
    """Peak activations of vLLM's profiling step: the wider of the forward pass and sampling (an estimate).

    Raises GeometryError where the configuration lacks hidden_size, vocab_size or the MLP's width.
    """
    hidden, vocab = _needed(geometry, "hidden_size"), _needed(geometry, "vocab_size")
    element_bytes = dtype_bytes(geometry.element_dtype())
    mlp = _mlp_width(geometry) / tensor_parallel_size
    forward = max_num_batched_tokens * FORWARD_ROWS * (hidden + mlp) * element_bytes
    rows = max_num_batched_tokens + 2 * max_num_seqs
    sampling = rows * hidden * element_bytes + max_num_seqs * vocab * SAMPLER_BYTES_PER_LOGIT
    return int(max(forward, sampling))


_GIVE_ACTIVATIONS = ": give activation_bytes (or kv_cache_memory_bytes)"


def _needed(geometry: ModelGeometry, name: str) -> int:
    """The value, or the largest one where layers have one each."""
    each = widths(geometry.config, name, cure=_GIVE_ACTIVATIONS)
    if each is None:
        raise GeometryError(f"the model configuration lacks {name}{_GIVE_ACTIVATIONS}")
    return max(each)


def _mlp_width(geometry: ModelGeometry) -> int:
    """Elements of the widest MLP row of one token: the dense one, or its experts together."""

    def at_least_0(name: str) -> int | None:
        return optional(geometry.config, name, least=0, cure=_GIVE_ACTIVATIONS)

    if geometry.config.get("ffn_dim") is not None:
        return _needed(geometry, "ffn_dim")
    dense = _needed(geometry, "intermediate_size")
    num_routed, width = at_least_0("num_experts_per_tok") or 1, at_least_0("moe_intermediate_size")
    if width is None:
        return dense * num_routed
    return max(dense, (num_routed + (at_least_0("n_shared_experts") or 0)) * width)


def _report(
    geometry: ModelGeometry,
    gpu: GpuSpec | None,
    flags: _Flags,
    pages: _Pages,
    terms: _Terms,
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
        bytes_per_token=geometry.bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size),
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
        problem=_problem(geometry, flags, pages, terms, num_gpu_blocks_override),
        notes=_notes(geometry, flags, pages, num_blocks, num_that_fit),
    )


def _num_blocks_at_most(kv_bytes: int, outside_bytes: int, block_bytes: int) -> int:
    # Rounded down apart: what the budget leaves over is less than a block, and of no use to the cap.
    return max(0, kv_bytes // block_bytes + max(0, outside_bytes) // block_bytes)


def _problem(geometry: ModelGeometry, flags: _Flags, pages: _Pages, terms: _Terms, override: int | None) -> str | None:
    """Why the engine would refuse to start, and which number to change."""
    num_that_fit, needed = max(0, terms.kv) // pages.block_bytes, pages.num_per_request
    num_blocks = num_that_fit if override is None else override
    if terms.total is not None and terms.budget is not None:
        at_most = _num_blocks_at_most(terms.kv, terms.total - terms.budget, pages.block_bytes)
        if num_blocks > at_most and num_that_fit >= needed:
            return (
                f"num_gpu_blocks_override {num_blocks} is beyond the memory of the GPU: {at_most} blocks would fill it "
                f"to the last byte. Lower num_gpu_blocks_override to {num_that_fit} or less, which "
                f"gpu_memory_utilization {flags.gpu_memory_utilization:g} leaves room for."
            )
        if num_blocks > at_most:
            num_blocks = num_that_fit  # A smaller override would not help: the memory must grow first.
    if num_blocks >= needed:
        return None
    if terms.kv <= 0:
        cures = _cures_of_memory(geometry, flags, pages, terms)
        return f"nothing is left for KV ({terms.kv / GIB:.2f} GiB). Change one of: {'; '.join(cures)}."
    if num_blocks <= 0:
        return (
            f"no block fits: one of {flags.block_size} tokens takes {_size(pages.block_bytes)}, and {_size(terms.kv)} "
            f"are left for KV. Change one of: {'; '.join(_cures_of_a_large_block(geometry, flags, pages, terms))}."
        )
    if override == num_blocks and (terms.total is None or num_that_fit >= needed):
        cures = [f"raise num_gpu_blocks_override to {needed} or more"]
    else:
        cures = _cures_of_memory(geometry, flags, pages, terms)
        if override is None and (smaller := _smaller_block_that_fits(geometry, flags, terms)):
            cures.insert(0, f"lower block_size to {smaller}")
    longest = _longest_that_fits(geometry, flags, num_blocks)
    if longest:
        cures.insert(0, f"lower max_model_len to {longest} or less")
    num_tokens = num_blocks * flags.block_size
    return (
        f"max_model_len {flags.max_model_len} > {num_tokens} tokens of KV cache: one such request needs "
        f"{needed} blocks, {num_blocks} are there. Change one of: {'; '.join(cures)}."
    )


def _cures_of_memory(geometry: ModelGeometry, flags: _Flags, pages: _Pages, terms: _Terms) -> list[str]:
    missing = pages.num_per_request * pages.block_bytes - terms.kv
    return _cures_of_the_budget(geometry, flags, terms, missing) or [f"give the KV cache {_size(missing)} more"]


def _cures_of_a_large_block(geometry: ModelGeometry, flags: _Flags, pages: _Pages, terms: _Terms) -> list[str]:
    """Smaller blocks, if need be with shorter requests: more memory would be a poor cure where there is some."""
    if smaller := _smaller_block_that_fits(geometry, flags, terms):
        return [f"lower block_size to {smaller}"]
    return _with_smaller_blocks(geometry, flags, terms) + _cures_of_memory(geometry, flags, pages, terms)


def _size(num_bytes: int) -> str:
    """Bytes as a person reads them: GiB, or MiB and bytes where two decimals of a GiB say too little."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB" if num_bytes >= MIB / 10 else f"{num_bytes:,} bytes"


def _smaller_block_that_fits(geometry: ModelGeometry, flags: _Flags, terms: _Terms) -> int | None:
    """The largest usual block below this one with which a request of `max_model_len` fits; None where none does."""
    for block_size in _smaller_blocks(flags):
        pages = _Pages.of(geometry, replace(flags, block_size=block_size))
        if terms.kv // pages.block_bytes >= pages.num_per_request:
            return block_size
    return None


def _with_smaller_blocks(geometry: ModelGeometry, flags: _Flags, terms: _Terms) -> list[str]:
    """Smaller blocks and shorter requests together, where that is a cure."""
    for block_size in _smaller_blocks(flags):
        smaller = replace(flags, block_size=block_size)
        num_blocks = terms.kv // _Pages.of(geometry, smaller).block_bytes
        if num_blocks > 0 and (longest := _longest_that_fits(geometry, smaller, num_blocks)):
            return [f"lower block_size to {block_size} and max_model_len to {longest} or less"]
    return []


def _smaller_blocks(flags: _Flags) -> list[int]:
    return [size for size in USUAL_BLOCKS if size < flags.block_size]


def _longest_that_fits(geometry: ModelGeometry, flags: _Flags, num_blocks: int) -> int:
    """The largest max_model_len whose request fits; 0 if none does."""

    def does_not_fit(max_model_len: int) -> bool:
        return _Pages.of(geometry, replace(flags, max_model_len=max_model_len)).num_per_request > num_blocks

    return bisect_left(range(1, flags.max_model_len + 1), True, key=does_not_fit)


def _cures_of_the_budget(geometry: ModelGeometry, flags: _Flags, terms: _Terms, missing: int) -> list[str]:
    if terms.total is None or terms.budget is None:
        return []
    cures = []
    utilization = (terms.budget + missing) / terms.total
    if utilization <= 1:
        cures.append(f"raise gpu_memory_utilization to {ceil(utilization * 1000) / 1000:g} or more")
    if terms.activations is not None and terms.activations > missing:
        cures.append("lower max_num_seqs or max_num_batched_tokens (peak activations)")
    num_ranks = _enough_ranks(geometry, flags, terms.total)
    if num_ranks is not None:
        cures.append(f"raise tensor_parallel_size to {num_ranks}")
    needed = (terms.budget + missing) / flags.gpu_memory_utilization / GIB
    cures.append(f"use a GPU of {needed:.1f} GiB or more")
    cures.append("use fewer bits (kv_cache_dtype fp8, quantised weights)")
    return cures


def _enough_ranks(geometry: ModelGeometry, flags: _Flags, total: int) -> int | None:
    """The smallest doubling of tensor_parallel_size at which the model fits, if its heads can be split so."""
    for doubling in range(1, 7):
        more = replace(flags, tensor_parallel_size=flags.tensor_parallel_size << doubling)
        try:
            pages = _Pages.of(geometry, more)
            kv_bytes = _terms(geometry, more, total, None, None, None).kv
        except GeometryError:
            return None
        if kv_bytes >= pages.num_per_request * pages.block_bytes:
            return more.tensor_parallel_size
    return None


def _notes(
    geometry: ModelGeometry, flags: _Flags, pages: _Pages, num_blocks: int, num_that_fit: int
) -> tuple[str, ...]:
    notes = []
    if num_blocks > num_that_fit:
        squeezed = (num_blocks - num_that_fit) * pages.block_bytes
        notes.append(
            f"num_gpu_blocks_override asks for {num_blocks - num_that_fit:,} blocks ({squeezed / GIB:.2f} GiB) more "
            f"than the memory arithmetic leaves: they squeeze activations and whatever lies outside the budget"
        )
    if geometry.max_model_len is not None and flags.max_model_len > geometry.max_model_len:
        notes.append(f"max_model_len {flags.max_model_len} is beyond the model's own {geometry.max_model_len}")
    if geometry.is_hybrid:
        kinds = ", ".join(
            f"{group.num_layers} {group.kind.removesuffix('_attention')}"
            + (f" (last {group.window:,} tokens)" if group.window else "")
            for group in geometry.groups
        )
        notes.append(
            f"layers: {kinds}; windowed ones hold no more than their window and one step of tokens. A block here is of "
            f"all {pages.num_groups} groups of layers; vLLM counts one per group, {pages.num_groups} times as many"
        )
        used_bytes = flags.block_size * geometry.bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
        if pages.block_bytes > used_bytes:
            notes.append(
                f"layer groups of equal size leave {1 - used_bytes / pages.block_bytes:.0%} of every block to padding"
            )
    if geometry.num_kv_layers < geometry.num_hidden_layers:
        notes.append(
            f"{geometry.num_kv_layers} of {geometry.num_hidden_layers} layers keep KV of their own; the state per "
            f"sequence that layers without attention hold, which does not grow, is not counted"
        )
    if key := unexplained_state(geometry.config, geometry.num_hidden_layers, geometry.num_kv_layers):
        notes.append(
            f"the model configuration has {key}, but no key that kvsim understands says which layers have attention: "
            f"all of them are counted"
        )
    if geometry.config.get("cross_attention_layers"):
        notes.append("the KV of an image, which cross-attention layers keep for every sequence, is not counted")
    if geometry.is_uneven:
        heads = ", ".join(f"{group.num_layers} of {group.num_kv_heads}" for group in geometry.groups)
        notes.append(f"layers keep unequally many KV heads ({heads}): a block holds what each of them needs")
    if geometry.index_dim:
        index_bytes = geometry.num_kv_layers * geometry.index_bytes_per_token
        notes.append(
            f"{index_bytes:,} of the bytes of one token are keys of the indexer of sparse attention: "
            f"{geometry.index_dim} 8-bit elements and their scales per layer, whatever the dtype of the cache. vLLM "
            f"stores the latent of such a model as {DS_MLA}, unless told bfloat16"
        )
    if geometry.latent_dim:
        notes.append("the latent is kept by every rank: tensor parallelism does not make it smaller")
    return tuple(notes)
