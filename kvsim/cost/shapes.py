"""The kernels of one transformer layer on one of several GPUs, from the model's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvsim.memory.config_fields import Config, optional, widths, words
from kvsim.memory.geometry import DS_MLA, PACKED_BYTES, ModelGeometry
from kvsim.memory.layers import attending_windows
from kvsim.types import ScenarioError, shown

_UNGATED = {"opt", "gpt2", "gpt_neox", "gptj", "falcon", "bloom", "phi", "mpt", "gpt_bigcode", "starcoder2"}
_HAS_QK_NORM = {"qwen3", "qwen3_moe"}


@dataclass(frozen=True)
class Matrix:
    """Weights `n` x `k`; `num_experts` of them of which each token uses `experts_per_token` (1 of 1: dense)."""

    n: int
    k: int
    num_experts: int = 1
    experts_per_token: int = 1


@dataclass(frozen=True)
class ModelShapes:
    """What the cost model needs to know of a model, on one rank."""

    num_layers: int
    matrices: tuple[Matrix, ...]
    """Of one layer."""
    row_ops: tuple[tuple[str, int, int], ...]
    """(kind, width, times) in one layer."""
    head: Matrix
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: float
    """Bytes of one stored element; half of them for a latent, which is read once and not as K and V."""
    windows: tuple[tuple[int, int | None], ...]
    """(number of layers, window or None)."""
    bytes_per_token: int
    num_kv_tensors: int
    """That a block is spread over: K and V of every layer that keeps them, or its latent."""
    all_reduces_per_layer: int
    tensor_parallel_size: int
    notes: tuple[str, ...] = ()


def model_shapes(geometry: ModelGeometry, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto") -> ModelShapes:
    """Shapes of `geometry` on one of `tensor_parallel_size` GPUs.

    Raises ScenarioError naming the fields of config.json that are missing.
    """
    if geometry.is_uneven:
        raise ScenarioError(
            f"{_named(geometry)} has layers of unequally many KV heads: a kernel cost model "
            f"prices layers that are alike. Use cost: {{type: linear}}"
        )
    tp = tensor_parallel_size
    hidden = _field(geometry, "hidden_size", "n_embd", "d_model")
    vocab = _field(geometry, "vocab_size")
    num_heads = geometry.num_attention_heads or _field(geometry, "num_attention_heads", "n_head")
    kv_heads = geometry.kv_heads_per_rank(tp)
    head_dim = geometry.head_dim
    heads = max(1, num_heads // tp)
    mlp, gated, mlp_notes = _mlp(geometry, hidden, tp)
    attention = _latent_projections(geometry, hidden, heads) or (
        Matrix((heads + 2 * kv_heads) * head_dim, hidden),
        Matrix(hidden, heads * head_dim),
    )
    rotary = 2 * (heads + kv_heads) * (_latent_widths(geometry)[1] if geometry.latent_dim else head_dim)
    rows = [
        ("layernorm", 4 * hidden, 2),
        ("rotary_emb", rotary, 1),
        ("act_fn", (3 if gated else 2) * sum(_active_width(down) for down in mlp[1::2]), 1),
    ]
    if words(geometry.config, "model_type") in _HAS_QK_NORM:
        rows.append(("qk_norm", rotary, 1))
    windows = _windows(geometry)
    layer_bytes = geometry.layer_bytes_per_token(kv_cache_dtype, tp) - geometry.index_bytes_per_token
    return ModelShapes(
        num_layers=geometry.num_hidden_layers,
        matrices=(*attention, *mlp),
        row_ops=tuple(rows),
        head=Matrix(vocab // tp, hidden),
        hidden_size=hidden,
        vocab_size=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_bytes=layer_bytes / (2 * kv_heads * head_dim),
        windows=windows,
        bytes_per_token=geometry.bytes_per_token(kv_cache_dtype, tp),
        num_kv_tensors=(1 if geometry.latent_dim else 2) * geometry.num_kv_layers,
        all_reduces_per_layer=2 if tp > 1 else 0,
        tensor_parallel_size=tp,
        notes=(*_approximations(geometry, windows, geometry.element_dtype(kv_cache_dtype)), *mlp_notes),
    )


def _latent_widths(geometry: ModelGeometry) -> tuple[int | None, int, int | None]:
    """Of multi-head latent attention: a head's query without its rotary part, that part, and a head's value."""
    config = geometry.config
    rotary = optional(config, "qk_rope_head_dim") or geometry.latent_dim
    return optional(config, "qk_nope_head_dim"), rotary, optional(config, "v_head_dim")


def _latent_projections(geometry: ModelGeometry, hidden: int, heads: int) -> tuple[Matrix, ...]:
    """The projections of multi-head latent attention; none for other attention, or where their widths are not given.

    Those into the latents are on every rank, of the others it has those of its heads.
    """
    nope, rotary, value = _latent_widths(geometry)
    if not geometry.latent_dim or nope is None or value is None:
        return ()
    query_rank = optional(geometry.config, "q_lora_rank", least=0) or 0
    return (
        Matrix(query_rank + geometry.latent_dim, hidden),
        Matrix(heads * (nope + rotary), query_rank or hidden),
        # Multiplied with the latents, or with queries and outputs instead: the weights are the same.
        Matrix(heads * (nope + value), geometry.latent_dim - rotary),
        Matrix(hidden, heads * value),
    )


def _windows(geometry: ModelGeometry) -> tuple[tuple[int, int | None], ...]:
    """(number of layers, window) of those that attend to the text."""
    if geometry.num_kv_layers < geometry.num_hidden_layers:
        # A layer that keeps no KV of its own may read another's.
        return tuple(attending_windows(geometry.config, geometry.num_hidden_layers))
    return tuple((group.num_layers, group.window) for group in geometry.groups)


def _approximations(
    geometry: ModelGeometry, windows: tuple[tuple[int, int | None], ...], cache_dtype: str
) -> Iterator[str]:
    """What of the model is priced as something simpler."""
    if geometry.latent_dim:
        yield "MLA attention is priced as attention with one KV head of the latent's size"
        if None in _latent_widths(geometry):
            yield "its projections, too: the model configuration lacks qk_nope_head_dim or v_head_dim"
    if geometry.index_dim:
        yield "sparse attention is priced as attention to all tokens, and its indexer not at all"
    if cache_dtype in PACKED_BYTES or cache_dtype == DS_MLA:
        yield f"attention over a cache in {cache_dtype} is priced by the bytes it reads, and unpacking them is not"
    if geometry.config.get("quantization_config"):
        yield "quantised weights are priced as 16-bit ones"
    without = geometry.num_hidden_layers - sum(num_layers for num_layers, _ in windows)
    if without:
        yield f"{without} layers without attention to the text are priced by the matrices of the others"


def _active_width(down: Matrix) -> int:
    return down.k * down.experts_per_token


def _mlp(geometry: ModelGeometry, hidden: int, tp: int) -> tuple[tuple[Matrix, ...], bool, list[str]]:
    config = geometry.config
    gated = words(config, "model_type") not in _UNGATED
    num_experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts"), 1)
    if num_experts == 1:
        return _pair(hidden, _field(geometry, "intermediate_size", "ffn_dim", "n_inner") // tp, gated), gated, []
    per_token = _first(config, ("num_experts_per_tok", "experts_per_token", "num_selected_experts"), 2)
    width = optional(config, "moe_intermediate_size", least=0) or _field(geometry, "intermediate_size")
    notes = ["experts are priced from the bytes and operations of those that a step touches, not from measurements"]
    if _has_dense_layers(config):
        notes.append("layers without experts are priced as those with them")
    shared = _shared_width(config, width) // tp
    every_token = _pair(hidden, shared, gated) if shared else ()
    return (*_pair(hidden, width // tp, gated, num_experts, per_token), *every_token), gated, notes


def _pair(hidden: int, width: int, gated: bool, num_experts: int = 1, per_token: int = 1) -> tuple[Matrix, Matrix]:
    """The way up and the way down."""
    up = Matrix((2 if gated else 1) * width, hidden, num_experts, per_token)
    return up, Matrix(hidden, width, num_experts, per_token)


def _shared_width(config: Config, width: int) -> int:
    """Of the experts that every token passes, all together; 0 where there are none."""
    given = optional(config, "shared_expert_intermediate_size", least=0)
    if given is not None:
        return given
    is_llama4 = (words(config, "model_type") or "").startswith("llama4")
    return _first(config, ("n_shared_experts", "num_shared_experts"), 1 if is_llama4 else 0) * width


def _has_dense_layers(config: Config) -> bool:
    steps = _first(config, ("interleave_moe_layer_step", "decoder_sparse_step"), 1)
    return steps > 1 or bool(_first(config, ("first_k_dense_replace",), 0)) or bool(config.get("mlp_only_layers"))


def _first(config: Config, names: tuple[str, ...], default: int) -> int:
    return next((value for name in names if (value := optional(config, name, least=0))), default)


def _named(geometry: ModelGeometry) -> str:
    return f"model {geometry.name!r}" if geometry.name else "the model"


def _field(geometry: ModelGeometry, *names: str) -> int:
    """A width of every layer; a list with one each will do where all are the same."""
    for name in names:
        each = widths(geometry.config, name, least=0)
        if each is not None and len(set(each)) > 1:
            raise ScenarioError(
                f"{_named(geometry)}: {name} is {shown(each)}: a kernel cost model prices "
                f"layers that are alike. Use cost: {{type: linear}}"
            )
        if each is not None and each[0]:
            return each[0]
    raise ScenarioError(
        f"{_named(geometry)} lacks {names[0]}: a kernel cost model needs hidden_size, "
        f"intermediate_size, vocab_size and num_attention_heads. Name a catalog model or a config.json, or use "
        f"cost: {{type: linear}}"
    )
