"""The terms of the memory equation, and the blocks that layers share."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kvsim.catalog import GIB, GpuSpec
from kvsim.memory.config_fields import optional, widths
from kvsim.memory.geometry import FULL, GeometryError, LayerGroup, ModelGeometry, dtype_bytes
from kvsim.memory.layers import CHUNKED
from kvsim.memory.weights import weight_bytes as count_weight_bytes
from kvsim.types import ScenarioError, shown

SAMPLER_BYTES_PER_LOGIT = 38.24
"""Sampling keeps logits in fp32, sorted values, indices, probabilities and sums at once.

Fitted to the peak activations vLLM logged on an H100 with 1,024 sequences (llm-d-benchmark, config_explorer): 38.2 to
38.3 for vocabularies of 128,256, 151,936 and 201,088.
"""

FORWARD_ROWS = 3
"""Copies of a hidden row, and of an MLP row, that the widest moment of the forward pass holds per token.

The 3.02 GiB that vLLM logged for 29,000 tokens of Llama-3-8B (vllm-project/vllm#10517) are 2.99 GiB with 3 and 3.
"""

NON_TORCH_BYTES = round(0.14 * GIB)
"""CUDA libraries on one GPU: 0.10 to 0.14 GiB in the logs of both sources."""

NON_TORCH_BYTES_PARALLEL = round(0.55 * GIB)
"""The same with tensor parallelism, collective buffers included: 0.55 GiB (vLLM V1), 0.30 GiB (V0)."""

LARGE_GPU_BYTES = 70 * GIB


@dataclass(frozen=True, slots=True)
class Flags:
    """The engine's flags that decide, under vLLM's names."""

    gpu_memory_utilization: float
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    draft: ModelGeometry | None = None
    """The speculative model: its KV of every token is in the same blocks."""

    def bytes_per_token(self, geometry: ModelGeometry) -> int:
        """Bytes that all layers, those of the draft model too, keep of one token on one rank."""
        models = (geometry,) if self.draft is None else (geometry, self.draft)
        return sum(model.bytes_per_token(self.kv_cache_dtype, self.tensor_parallel_size) for model in models)


@dataclass(frozen=True, slots=True)
class Terms:
    """The memory equation, in bytes; None where a term was not needed."""

    kv: int
    total: int | None = None
    budget: int | None = None
    weights: int | None = None
    activations: int | None = None
    non_torch: int | None = None


@dataclass(frozen=True, slots=True)
class Pages:
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
    def of(cls, geometry: ModelGeometry, flags: Flags) -> Pages:
        layer_bytes = geometry.layer_bytes_per_token(flags.kv_cache_dtype, flags.tensor_parallel_size)
        encoder_pages = ceil(geometry.num_encoder_tokens / flags.block_size)
        if flags.draft is not None and any(_windows(model) != {None} for model in (geometry, flags.draft)):
            raise GeometryError("windowed layers beside a speculative model, or in it, are not counted")
        if not geometry.is_hybrid:
            num_pages = _pages_per_request(geometry.groups[0], flags) + encoder_pages
            return cls(flags.bytes_per_token(geometry) * flags.block_size, 1, num_pages)
        layers_per_group = _layers_per_group(geometry.groups)
        num_groups, num_pages = 0, 0
        for group in geometry.groups:
            num_alike = ceil(group.num_layers / layers_per_group)
            num_groups += num_alike
            num_pages += num_alike * (_pages_per_request(group, flags) + encoder_pages)
        block_bytes = num_groups * layers_per_group * layer_bytes * flags.block_size
        return cls(block_bytes, num_groups, num_pages)


def _windows(geometry: ModelGeometry) -> set[int | None]:
    return {group.window for group in geometry.groups}


def _layers_per_group(groups: tuple[LayerGroup, ...]) -> int:
    counts = [group.num_layers for group in groups]
    return max(counts) if max(counts) < 1.25 * min(counts) else min(counts)


def _pages_per_request(group: LayerGroup, flags: Flags) -> int:
    """Blocks of one layer: all tokens, or those it looks back at and one step's; a window may begin inside a block."""
    if group.kind == FULL or group.window is None:
        return ceil(flags.max_model_len / flags.block_size)
    if group.kind == CHUNKED:
        return ceil(min(group.window + flags.max_num_batched_tokens, flags.max_model_len) / flags.block_size)
    num_tokens = min(group.window - 1 + flags.max_num_batched_tokens, flags.max_model_len)
    return ceil(num_tokens / flags.block_size) + 1


def models_len(geometry: ModelGeometry) -> int:
    """The model's own limit. Raises GeometryError where it has none."""
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


def check_flags(utilization: float, **counts: int | None) -> None:
    """Raises ScenarioError for a share that is none, or a count below 1; None counts are not given."""
    if not 0 < utilization <= 1:
        raise ScenarioError(f"gpu_memory_utilization is {utilization}; it must be above 0 and at most 1")
    check_counts(1, **counts)


def check_counts(least: int = 0, **counts: int | None) -> None:
    """Raises ScenarioError for a count below `least` or beyond `MAX_FLAG`; None counts are not given."""
    for name, count in counts.items():
        if count is not None and not least <= count <= MAX_FLAG:
            limit = f"at least {least}" if count < least else f"at most {MAX_FLAG}"
            raise ScenarioError(f"{name} is {shown(count)}; it must be {limit}")


def terms_of(
    geometry: ModelGeometry,
    flags: Flags,
    total: int | None,
    weights: int | None,
    activations: int | None,
    non_torch: int | None,
) -> Terms:
    """The terms as given, or counted and estimated where they are None. Raises ScenarioError without a total."""
    if total is None:
        raise ScenarioError("the KV capacity needs a gpu, or kv_cache_memory_bytes, or num_gpu_blocks_override")
    if weights is None:
        weights = count_weight_bytes(geometry, flags.tensor_parallel_size) + _draft_weights(flags)
    if activations is None:
        activations = estimate_activation_bytes(
            geometry, flags.max_num_batched_tokens, flags.max_num_seqs, flags.tensor_parallel_size
        )
    if non_torch is None:
        is_alone = flags.tensor_parallel_size == flags.pipeline_parallel_size == 1
        non_torch = NON_TORCH_BYTES if is_alone else NON_TORCH_BYTES_PARALLEL
    budget = int(flags.gpu_memory_utilization * total)
    return Terms(budget - weights - activations - non_torch, total, budget, weights, activations, non_torch)


def _draft_weights(flags: Flags) -> int:
    if flags.draft is None:
        return 0
    try:
        return count_weight_bytes(flags.draft, flags.tensor_parallel_size)
    except GeometryError as error:
        raise GeometryError(f"the speculative model: {error} (of both)") from None


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


def num_blocks_at_most(kv_bytes: int, outside_bytes: int, block_bytes: int) -> int:
    """Blocks that fill the KV part and what lies outside the budget."""
    # Rounded down apart: what the budget leaves over is less than a block, and of no use to the cap.
    return max(0, kv_bytes // block_bytes + max(0, outside_bytes) // block_bytes)
