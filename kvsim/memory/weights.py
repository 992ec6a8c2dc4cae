"""How many parameters a model has and how many bytes they take, counted from its configuration, matrix by matrix.

Known families are listed in `FAMILIES`; another one, or a missing field, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from kvsim.memory.config_fields import Config, flag, listing, optional, section, whole, words
from kvsim.memory.geometry import GeometryError, ModelGeometry, dtype_bytes
from kvsim.types import shown

CURE = ": give weight_bytes"
"""What helps against every fault of the fields that only the weights need."""

MAX_BITS = 32
"""Of one quantised element."""


class ParamCount(NamedTuple):
    """Parameters by how they are stored: quantised formats leave embeddings and the rest as they are."""

    embedding: int = 0
    """Token and position embeddings and the output head."""
    linear: int = 0
    """Weight matrices of attention and dense MLPs."""
    expert: int = 0
    """Weight matrices of routed experts."""
    other: int = 0
    """Norms, biases, routers: replicated on every rank."""
    replicated: int = 0
    """Weight matrices that every rank keeps whole: those into the latent, which heads cannot split."""

    @property
    def total(self) -> int:
        return sum(self)


def count_params(geometry: ModelGeometry) -> ParamCount:
    """Parameters of the model. Raises GeometryError for a family or field it would have to guess."""
    config = geometry.config
    family = words(config, "model_type", cure=CURE)
    if family is None:
        raise GeometryError(
            "the model configuration lacks model_type, so its weights cannot be counted: give weight_bytes"
        )
    if family not in FAMILIES:
        raise GeometryError(
            f"model_type {family!r} is not among those whose weights can be counted ({', '.join(sorted(FAMILIES))}): "
            f"give weight_bytes"
        )
    if geometry.is_uneven:
        raise GeometryError(f"layers have unequally many KV heads, so their weights cannot be counted{CURE}")
    return FAMILIES[family](_Fields(config))


def weight_bytes(geometry: ModelGeometry, tensor_parallel_size: int = 1) -> int:
    """Bytes of weights on one rank: matrices and embeddings are split; norms, biases and latents are replicated."""
    count = count_params(geometry)
    plain = Fraction(dtype_bytes(geometry.element_dtype()))
    quantised = _quantised_bytes(section(geometry.config, "quantization_config", cure=CURE), plain)
    split = count.embedding * plain + count.linear * quantised.linear + count.expert * quantised.expert
    whole = count.other * plain + count.replicated * quantised.linear
    return int(split / tensor_parallel_size + whole)


class _ElementBytes(NamedTuple):
    linear: Fraction
    expert: Fraction


def _quantised_bytes(quantization: Config | None, plain: Fraction) -> _ElementBytes:
    """Bytes of one element of a linear layer and of an expert, scales and zero points included."""
    if not quantization:
        return _ElementBytes(plain, plain)
    method = quantization.get("quant_method")
    if method == "mxfp4":
        # 4 bits each and one 8-bit exponent per 32; only the experts are converted.
        return _ElementBytes(plain, Fraction(4, 8) + Fraction(1, 32))
    if method in ("fp8", "fbgemm_fp8"):
        size = 1 + _scale_of_a_block(quantization)
        return _ElementBytes(size, size)
    if method in ("awq", "gptq"):
        size = _grouped_bytes(quantization)
        return _ElementBytes(size, size)
    if method == "compressed-tensors":
        size = _compressed_tensors_bytes(quantization)
        return _ElementBytes(size, size)
    raise GeometryError(
        f"quantization_config.quant_method is {shown(method)}; known are awq, gptq, fp8, fbgemm_fp8, mxfp4, "
        f"compressed-tensors: give weight_bytes"
    )


def _scale_of_a_block(quantization: Config) -> Fraction:
    """Bytes that the fp32 scale of every `weight_block_size` adds to an element; without blocks too few to count."""
    name = "quantization_config.weight_block_size"
    block = listing(quantization, "weight_block_size", within="quantization_config.", cure=f", [rows, columns]{CURE}")
    if block is None:
        return Fraction(0)
    if len(block) != 2:
        raise GeometryError(f"{name} is {shown(block)}; it must be [rows, columns]{CURE}")
    rows, columns = (whole(f"{name}[{index}]", size, cure=CURE) for index, size in enumerate(block))
    return Fraction(4, rows * columns)


def _grouped_bytes(quantization: Config) -> Fraction:
    """Integers of `bits`, and per group one fp16 scale and one zero point."""
    bits = _first_of(quantization, ("bits", "w_bit"), least=1, most=MAX_BITS)
    group_size = _first_of(quantization, ("group_size", "q_group_size"), least=-1)
    overhead = Fraction(2 * 8 + bits, 8 * group_size) if group_size > 0 else Fraction(0)
    return Fraction(bits, 8) + overhead


def _first_of(quantization: Config, names: tuple[str, ...], **limits: int) -> int:
    for name in names:
        if quantization.get(name) is not None:
            return whole(f"quantization_config.{name}", quantization[name], cure=CURE, **limits)
    raise GeometryError(f"quantization_config lacks {names[0]}{CURE}")


def _compressed_tensors_bytes(quantization: Config) -> Fraction:
    """Elements of the first group's weights, and one fp16 scale per group of them."""
    name = "quantization_config.config_groups"
    groups = section(quantization, "config_groups", within="quantization_config.", cure=CURE) or {}
    for key, group in groups.items():
        if not isinstance(group, Mapping):
            raise GeometryError(f"{name}.{key} is {shown(group)}; it must be a mapping{CURE}")
        weights = section(group, "weights", within=f"{name}.{key}.", cure=CURE) or {}
        if weights.get("num_bits") is None:
            break
        bits = whole(f"{name}.{key}.weights.num_bits", weights["num_bits"], most=MAX_BITS, cure=CURE)
        group_size = 0
        if weights.get("group_size") is not None:
            group_size = whole(f"{name}.{key}.weights.group_size", weights["group_size"], least=-1, cure=CURE)
        return Fraction(bits, 8) + (Fraction(2, group_size) if group_size > 0 else 0)
    raise GeometryError(f"quantization_config lacks config_groups.*.weights.num_bits{CURE}")


class _Fields:
    """A configuration that complains when asked for what it lacks."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.hidden = self["hidden_size"]
        self.num_layers = self["num_hidden_layers"]
        self.vocab = self["vocab_size"]

    def __getitem__(self, name: str) -> int:
        value = optional(self.config, name, cure=CURE)
        if value is None:
            raise GeometryError(f"the model configuration lacks {name}, so its weights cannot be counted{CURE}")
        return value

    def get(self, name: str, default: int, *, least: int = 0) -> int:
        value = optional(self.config, name, least=least, cure=CURE)
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """A switch whose default is that of the family's configuration class."""
        return flag(self.config, name, default=default, cure=CURE)

    @property
    def num_heads(self) -> int:
        return self["num_attention_heads"]

    @property
    def num_kv_heads(self) -> int:
        return self.get("num_key_value_heads", self.num_heads, least=1)

    @property
    def head_dim(self) -> int:
        return self.get("head_dim", self.hidden // self.num_heads, least=1)


def _embedding(f: _Fields, tied_by_default: bool) -> int:
    num_matrices = 1 if f.flag("tie_word_embeddings", tied_by_default) else 2
    return num_matrices * f.vocab * f.hidden


def _attention(f: _Fields) -> int:
    """Query, key, value and output matrices of one layer."""
    return 2 * f.hidden * f.head_dim * (f.num_heads + f.num_kv_heads)


def _qkv_width(f: _Fields) -> int:
    return f.head_dim * (f.num_heads + 2 * f.num_kv_heads)


def _gated_mlp(f: _Fields, width: int) -> int:
    """Gate, up and down matrices."""
    return 3 * f.hidden * width


def _dense(f: _Fields, *, per_layer_other: int, tied_by_default: bool = False) -> ParamCount:
    """Pre-norm transformer with a gated MLP; `per_layer_other` are its norms and biases."""
    return ParamCount(
        embedding=_embedding(f, tied_by_default),
        linear=f.num_layers * (_attention(f) + _gated_mlp(f, f["intermediate_size"])),
        other=f.num_layers * per_layer_other + f.hidden,
    )


def _llama(f: _Fields) -> ParamCount:
    biases = _qkv_width(f) + f.hidden if f.flag("attention_bias", False) else 0
    if f.flag("mlp_bias", False):
        biases += 2 * f["intermediate_size"] + f.hidden
    return _dense(f, per_layer_other=2 * f.hidden + biases)


def _qwen2(f: _Fields) -> ParamCount:
    return _dense(f, per_layer_other=2 * f.hidden + _qkv_width(f))


def _qwen3(f: _Fields) -> ParamCount:
    biases = _qkv_width(f) + f.hidden if f.flag("attention_bias", False) else 0
    return _dense(f, per_layer_other=2 * f.hidden + 2 * f.head_dim + biases)


def _gemma(f: _Fields) -> ParamCount:
    return _dense(f, per_layer_other=2 * f.hidden, tied_by_default=True)


def _gemma2(f: _Fields) -> ParamCount:
    return _dense(f, per_layer_other=4 * f.hidden, tied_by_default=True)


def _gemma3(f: _Fields) -> ParamCount:
    return _dense(f, per_layer_other=4 * f.hidden + 2 * f.head_dim, tied_by_default=True)


def _internlm2(f: _Fields) -> ParamCount:
    biases = _qkv_width(f) + f.hidden if f.flag("bias", True) else 0
    return _dense(f, per_layer_other=2 * f.hidden + biases)


def _glm4(f: _Fields) -> ParamCount:
    biases = _qkv_width(f) if f.flag("attention_bias", False) else 0
    return _dense(f, per_layer_other=4 * f.hidden + biases)


def _cohere(f: _Fields) -> ParamCount:
    """Attention and MLP beside each other, behind one norm."""
    qk_norms = f.head_dim * (f.num_heads + f.num_kv_heads) if f.flag("use_qk_norm", False) else 0
    biases = _qkv_width(f) + f.hidden if f.flag("attention_bias", False) else 0
    return _dense(f, per_layer_other=f.hidden + qk_norms + biases, tied_by_default=True)


def _plain_mlp(f: _Fields, *, num_norms: int, tied_by_default: bool, head_bias: int = 0) -> ParamCount:
    """Layer norms with biases, and an MLP of two matrices, with biases everywhere."""
    width = f.get("intermediate_size", 4 * f.hidden, least=1)
    biases = _qkv_width(f) + f.hidden + width + f.hidden
    return ParamCount(
        embedding=_embedding(f, tied_by_default),
        linear=f.num_layers * (_attention(f) + 2 * f.hidden * width),
        other=f.num_layers * (biases + num_norms * 2 * f.hidden) + 2 * f.hidden + head_bias,
    )


def _gpt_neox(f: _Fields) -> ParamCount:
    return _plain_mlp(f, num_norms=2, tied_by_default=False)


def _starcoder2(f: _Fields) -> ParamCount:
    return _plain_mlp(f, num_norms=2, tied_by_default=True)


def _phi(f: _Fields) -> ParamCount:
    return _plain_mlp(f, num_norms=1, tied_by_default=False, head_bias=f.vocab)


def _mixtral(f: _Fields) -> ParamCount:
    num_experts = f["num_local_experts"]
    return ParamCount(
        embedding=_embedding(f, False),
        linear=f.num_layers * _attention(f),
        expert=f.num_layers * num_experts * _gated_mlp(f, f["intermediate_size"]),
        other=f.num_layers * (2 * f.hidden + num_experts * f.hidden) + f.hidden,
    )


def _phimoe(f: _Fields) -> ParamCount:
    """As Mixtral, with biases in attention, norms and head."""
    plain = _mixtral(f)
    biases = _qkv_width(f) + f.hidden if f.flag("attention_bias", False) else 0
    head_bias = f.vocab if f.flag("lm_head_bias", False) else 0
    return plain._replace(other=plain.other + f.num_layers * (biases + 2 * f.hidden) + f.hidden + head_bias)


def _num_sparse(f: _Fields) -> int:
    """Layers with experts: every `decoder_sparse_step`-th, save for those that are listed as dense."""
    every = f.get("decoder_sparse_step", 1, least=1)
    listed = listing(f.config, "mlp_only_layers", cure=CURE) or []
    dense_layers = {whole(f"mlp_only_layers[{i}]", layer, least=0, cure=CURE) for i, layer in enumerate(listed)}
    return sum(layer not in dense_layers and (layer + 1) % every == 0 for layer in range(f.num_layers))


def _qwen2_moe(f: _Fields) -> ParamCount:
    """Routed experts, and a shared one behind a gate of its own."""
    num_experts, num_sparse = f["num_experts"], _num_sparse(f)
    num_dense = f.num_layers - num_sparse
    dense = num_dense * _gated_mlp(f, f["intermediate_size"]) if num_dense else 0
    shared = num_sparse * _gated_mlp(f, f["shared_expert_intermediate_size"])
    routers = num_sparse * (num_experts + 1) * f.hidden
    return ParamCount(
        embedding=_embedding(f, False),
        linear=f.num_layers * _attention(f) + dense + shared,
        expert=num_sparse * num_experts * _gated_mlp(f, f["moe_intermediate_size"]),
        other=f.num_layers * (2 * f.hidden + _qkv_width(f)) + routers + f.hidden,
    )


def _llama4(f: _Fields) -> ParamCount:
    """Every `interleave_moe_layer_step`-th layer has routed experts and a shared one."""
    num_experts, width = f["num_local_experts"], f["intermediate_size"]
    num_sparse = f.num_layers // f.get("interleave_moe_layer_step", 1, least=1)
    num_dense = f.num_layers - num_sparse
    dense = num_dense * _gated_mlp(f, f["intermediate_size_mlp"]) if num_dense else 0
    return ParamCount(
        embedding=_embedding(f, False),
        linear=f.num_layers * _attention(f) + dense + num_sparse * _gated_mlp(f, width),
        expert=num_sparse * num_experts * _gated_mlp(f, width),
        other=f.num_layers * 2 * f.hidden + num_sparse * num_experts * f.hidden + f.hidden,
    )


def _qwen3_moe(f: _Fields) -> ParamCount:
    num_experts, num_sparse = f["num_experts"], _num_sparse(f)
    num_dense = f.num_layers - num_sparse
    dense = num_dense * _gated_mlp(f, f["intermediate_size"]) if num_dense else 0
    return ParamCount(
        embedding=_embedding(f, False),
        linear=f.num_layers * _attention(f) + dense,
        expert=num_sparse * num_experts * _gated_mlp(f, f["moe_intermediate_size"]),
        other=f.num_layers * (2 * f.hidden + 2 * f.head_dim) + num_sparse * num_experts * f.hidden + f.hidden,
    )


def _gpt_oss(f: _Fields) -> ParamCount:
    num_experts, width = f["num_local_experts"], f["intermediate_size"]
    attention_other = _qkv_width(f) + f.hidden + f.num_heads  # biases, and one attention sink per head
    expert_biases = num_experts * (2 * width + f.hidden)
    router = num_experts * (f.hidden + 1)
    return ParamCount(
        embedding=_embedding(f, False),
        linear=f.num_layers * _attention(f),
        expert=f.num_layers * num_experts * _gated_mlp(f, width),
        other=f.num_layers * (2 * f.hidden + attention_other + expert_biases + router) + f.hidden,
    )


def _opt(f: _Fields) -> ParamCount:
    ffn, embed_dim = f["ffn_dim"], f.get("word_embed_proj_dim", f.hidden, least=1)
    positions = (f["max_position_embeddings"] + 2) * f.hidden  # two rows are kept for padding
    projections = 2 * embed_dim * f.hidden if embed_dim != f.hidden else 0
    head = 0 if f.flag("tie_word_embeddings", True) else f.vocab * embed_dim
    biases = 4 * f.hidden + ffn + f.hidden
    last_norm = 2 * f.hidden if f.flag("do_layer_norm_before", True) else 0
    return ParamCount(
        embedding=f.vocab * embed_dim + head + positions,
        linear=f.num_layers * (4 * f.hidden * f.hidden + 2 * f.hidden * ffn) + projections,
        other=f.num_layers * (biases + 4 * f.hidden) + last_norm,
    )


def _deepseek(f: _Fields) -> ParamCount:
    """MLA and, from layer `first_k_dense_replace` on, shared and routed experts (the draft head is not loaded)."""
    num_dense = min(f.num_layers, f.get("first_k_dense_replace", 0))
    num_sparse = f.num_layers - num_dense
    num_experts, width = f["n_routed_experts"], f["moe_intermediate_size"]
    shared = _gated_mlp(f, f.get("n_shared_experts", 0) * width)
    dense = num_dense * _gated_mlp(f, f["intermediate_size"]) if num_dense else 0
    attention, into_latent, norms = _latent_attention(f)
    # One correction bias per expert where the router scores without an auxiliary loss.
    bias = num_experts if f.config.get("topk_method") == "noaux_tc" else 0
    return ParamCount(
        embedding=_embedding(f, False),
        linear=f.num_layers * attention + dense + num_sparse * shared,
        expert=num_sparse * num_experts * _gated_mlp(f, width),
        other=f.num_layers * (2 * f.hidden + norms) + num_sparse * (num_experts * f.hidden + bias) + f.hidden,
        replicated=f.num_layers * into_latent,
    )


def _latent_attention(f: _Fields) -> tuple[int, int, int]:
    """(matrices with heads, those into the latents, norms) of one layer of multi-head latent attention."""
    nope, rope, value = f["qk_nope_head_dim"], f["qk_rope_head_dim"], f["v_head_dim"]
    latent, heads = f["kv_lora_rank"], f.num_heads
    q_rank = f.get("q_lora_rank", 0)
    query_in = q_rank or f.hidden
    query = query_in * heads * (nope + rope)
    key_value = latent * heads * (nope + value)
    into_latent = f.hidden * (q_rank + latent + rope)
    return query + key_value + heads * value * f.hidden, into_latent, q_rank + latent


FAMILIES: dict[str, Callable[[_Fields], ParamCount]] = {
    "baichuan": _llama,
    "cohere": _cohere,
    "cohere2": _cohere,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "internlm2": _internlm2,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "llama4_text": _llama4,
    "mistral": _llama,
    "mixtral": _mixtral,
    "opt": _opt,
    "phi": _phi,
    "phi3": _llama,
    "phimoe": _phimoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "starcoder2": _starcoder2,
}
"""Parameter counts by `model_type`."""
