"""Operations of whole-layer measurements, whose shapes follow from the model that `kernel` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvsim.catalog import is_model, load_model
from kvsim.cost.shapes import model_shapes
from kvsim.types import ScenarioError


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

RENAMED = {
    "input_layernorm": "layernorm",
    "post_attention_layernorm": "layernorm",
    "mlp_act": "act_fn",
    "attn_rope": "rotary_emb",
    "emb": "embedding",
}
PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
ROW_OPS = ("act_fn", "layernorm", "final_layernorm", "rotary_emb", "qk_norm", "embedding", "sampler")


@lru_cache
def layer_dims(model: str) -> LayerDims | None:
    """The dimensions of a model by name, of those above and of the catalog; None where nobody knows them.

    Models with experts, with a latent KV or without gated MLPs have other operations than these.
    """
    own = {name.lower(): dims for name, dims in LAYER_DIMS.items()}
    if model.lower() in own:
        return own[model.lower()]
    if not is_model(model):
        return None
    geometry = load_model(model)
    try:
        shapes = model_shapes(geometry)
    except ScenarioError:
        return None
    up, down, *others = shapes.matrices[2:]
    if geometry.latent_dim or up.num_experts > 1 or others or up.n != 2 * down.k:
        return None
    return LayerDims(shapes.hidden_size, down.k, shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.vocab_size)


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
