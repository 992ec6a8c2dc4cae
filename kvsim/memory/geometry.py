"""What a model stores per token, from its Hugging Face `config.json`: the arithmetic between bytes and blocks.

`bytes_per_token = 2 * num_kv_layers * num_key_value_heads * head_dim * dtype_bytes` (K and V), or one latent of
`kv_lora_rank + qk_rope_head_dim` elements per layer where the model uses multi-head latent attention (MLA). Layers
without attention, and those that read the KV of earlier ones, are none of the `num_kv_layers`; layers of unequally many
KV heads are summed. A field that is missing is an error that names it; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvsim.memory.config_fields import (
    MAX_LAYERS,
    Config,
    GeometryError,
    flag,
    found,
    optional,
    required,
    section,
)
from kvsim.memory.layers import (
    FULL,
    LayerGroup,
    config_of_stage,
    heads_per_layer,
    kept_layers,
    layer_groups,
    refuse_uneven_widths,
    stages_of,
)
from kvsim.memory.model_len import max_model_len
from kvsim.types import shown

__all__ = ["DTYPE_BYTES", "FULL", "GeometryError", "LayerGroup", "ModelGeometry", "dtype_bytes", "num_gpu_blocks"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float": 4,
    "fp32": 4,
    "float16": 2,
    "half": 2,
    "fp16": 2,
    "bfloat16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Element sizes by the names that configurations and vLLM's `--kv-cache-dtype` use."""

PACKED_BYTES: dict[str, tuple[int, int]] = {
    "int4": (2, 1),
    "nvfp4": (16, 9),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Formats of a KV cache that pack elements: (elements of one pack, bytes of it).

Scales are included in NVFP4 and in llama.cpp's (q8_0, ...); those of int4, as of the other integers, are not.
"""

_CONFIG_OF_A_STAGE = {"tie_word_embeddings": True, "first_k_dense_replace": 0}
"""The first stage has the embedding, the last one the head; DeepSeek's dense layers are all in the first."""

DS_MLA, DS_MLA_LATENT = "fp8_ds_mla", 512 + 64
"""vLLM's own format for the latent of DeepSeek V3 and V3.2, and the elements of that latent."""

DS_MLA_BYTES = 512 + 4 * 4 + 64 * 2
"""A latent in 8 bits with a 32-bit scale for every 128 elements, and the rotary part in 16 bits."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises GeometryError for an unknown name."""
    name = dtype.removeprefix("torch.").lower()
    if name not in DTYPE_BYTES:
        raise GeometryError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def cache_bytes(dtype: str, num_elements: int) -> int:
    """Bytes that elements take in a KV cache, rounded up. Raises GeometryError for an unknown name."""
    name = dtype.removeprefix("torch.").lower()
    if name in PACKED_BYTES:
        num_packed, num_bytes = PACKED_BYTES[name]
        return -(-num_elements * num_bytes // num_packed)
    if name not in DTYPE_BYTES:
        raise GeometryError(f"unknown dtype {dtype!r}; known are {', '.join((*DTYPE_BYTES, *PACKED_BYTES, DS_MLA))}")
    return num_elements * dtype_bytes(name)


@dataclass(frozen=True)
class ModelGeometry:
    """The shape of a model's KV cache. Make it with `from_config`, or by keyword for a made-up model.

    `latent_dim` > 0 means MLA; `index_dim` > 0 that an indexer keeps a key of that many elements beside each latent.
    `groups` lists full and windowed layers, in order of first appearance; layers that keep no KV of their own are in
    none of them. `num_encoder_tokens` > 0 means that every layer keeps the KV of so many tokens of an encoder's output
    for each request, beside those of its own text. `num_key_value_heads` is that of the widest layer. `dtype` is None
    where the configuration lacks it: what needs it is an error then, and what is told another one is not.
    Sizes per token are those of one rank where `tensor_parallel_size` is given: KV heads are split over the ranks and
    replicated beyond their number; a latent is on every rank.
    """

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    dtype: str | None
    name: str = ""
    num_attention_heads: int | None = None
    latent_dim: int = 0
    index_dim: int = 0
    groups: tuple[LayerGroup, ...] = ()
    num_encoder_tokens: int = 0
    max_model_len: int | None = None
    stage_layers: range | None = None
    """Of a pipeline stage of a model whose layers differ: which they are, from 0."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The (text) configuration it was read from: what `weights.count_params` reads."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype is not None:
            dtype_bytes(self.dtype)
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(FULL, self.num_hidden_layers),))
        if not 1 <= self.num_kv_layers <= self.num_hidden_layers:
            raise GeometryError(
                f"layer groups have {self.num_kv_layers} layers, num_hidden_layers is {self.num_hidden_layers}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, name: str = "", dtype: str | None = None) -> ModelGeometry:
        """Read a Hugging Face `config.json` (as a mapping); a nested `text_config` is used where there is one.

        `dtype` overrides the configuration's. Raises GeometryError naming the field that is missing or wrong.
        """
        if not isinstance(config, Mapping):
            raise GeometryError(f"a model configuration is a mapping, this is {shown(config)}")
        text = text_config(config)
        has_encoder = flag(text, "is_encoder_decoder", default=False)
        names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        num_layers = required(text, *(_DECODER_LAYERS if has_encoder else ()), *names, most=MAX_LAYERS)
        num_layers *= _ATTENTIONS_PER_LAYER.get(str(text.get("model_type")), 1)
        dtype = dtype or _dtype_name(text, config)
        latent_dim = _latent_dim(text)
        num_heads = optional(text, "decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads")
        heads: list[int] = []
        if latent_dim:
            num_kv_heads, head_dim = 1, latent_dim
        else:
            heads = heads_per_layer(text, num_layers, num_heads)
            num_kv_heads = max(heads) if any(heads) else _num_kv_heads(text, num_heads)
            head_dim = _head_dim(text, num_heads)
            refuse_uneven_widths(text, num_kv_heads, head_dim)
        given_name = config.get("_name_or_path")
        return cls(
            num_hidden_layers=num_layers,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            name=name or (given_name if isinstance(given_name, str) else ""),
            num_attention_heads=num_heads,
            latent_dim=latent_dim,
            index_dim=(optional(text, "index_head_dim") or 0) if latent_dim else 0,
            groups=layer_groups(text, num_layers, heads),
            num_encoder_tokens=_num_encoder_tokens(text) if has_encoder else 0,
            max_model_len=max_model_len(text),
            config={"quantization_config": config.get("quantization_config")} | dict(text),
        )

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep KV of their own."""
        return sum(group.num_layers for group in self.groups)

    def element_dtype(self, kv_cache_dtype: str = "auto") -> str:
        """The dtype of weights, or the KV cache's own where it has one. Raises GeometryError where none is known."""
        if kv_cache_dtype != "auto":
            return kv_cache_dtype
        if self.dtype is None:
            raise GeometryError(
                f"the model configuration lacks dtype (or torch_dtype); found {found(self.config)}: give dtype"
            )
        return self.dtype

    def kv_heads_per_rank(self, tensor_parallel_size: int = 1, num_kv_heads: int | None = None) -> int:
        """KV heads one rank keeps, of the model's or of `num_kv_heads`. Raises GeometryError for an uneven split."""
        if tensor_parallel_size < 1:
            raise GeometryError(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1")
        heads, ranks = num_kv_heads or self.num_key_value_heads, tensor_parallel_size
        if self.num_attention_heads is not None and self.num_attention_heads % ranks:
            raise GeometryError(f"{self.num_attention_heads} attention heads cannot be split over {ranks} ranks")
        if self.latent_dim:
            return 1
        if heads % ranks and ranks % heads:
            raise GeometryError(f"{heads} KV heads cannot be split over {ranks} ranks evenly")
        return max(1, heads // ranks)

    def layer_bytes_per_token(
        self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1, num_kv_heads: int | None = None
    ) -> int:
        """Bytes one layer keeps of one token, on one rank: a layer of the model's KV heads, or of `num_kv_heads`."""
        dtype = self.element_dtype(kv_cache_dtype)
        num_heads = self.kv_heads_per_rank(tensor_parallel_size, num_kv_heads)
        if dtype == DS_MLA:
            if self.latent_dim != DS_MLA_LATENT:
                raise GeometryError(f"{DS_MLA} stores latents of 512 + 64 elements, which this model does not have")
            return DS_MLA_BYTES + self.index_bytes_per_token
        num_vectors = 1 if self.latent_dim else 2
        return num_vectors * cache_bytes(dtype, num_heads * self.head_dim) + self.index_bytes_per_token

    def stage(self, pipeline_parallel_size: int, tensor_parallel_size: int = 1) -> ModelGeometry:
        """The pipeline stage that keeps most (of equal layers: the one with the most), and one of the two embeddings.

        Raises GeometryError where there are more stages than layers, or it is not known what a stage keeps.
        """
        if pipeline_parallel_size == 1:
            return self
        if not 1 <= pipeline_parallel_size <= self.num_hidden_layers:
            raise GeometryError(
                f"pipeline_parallel_size is {pipeline_parallel_size}; it must be from 1 to {self.num_hidden_layers}, "
                f"the number of layers"
            )
        if len(self.groups) > 1 or self.num_kv_layers < self.num_hidden_layers:
            return self._fullest_stage(pipeline_parallel_size, tensor_parallel_size)
        num_layers = -(-self.num_hidden_layers // pipeline_parallel_size)
        groups = (replace(self.groups[0], num_layers=num_layers),)
        config = {**self.config, **_CONFIG_OF_A_STAGE, "num_hidden_layers": num_layers}
        return replace(self, num_hidden_layers=num_layers, groups=groups, config=config)

    def _fullest_stage(self, num_stages: int, tensor_parallel_size: int) -> ModelGeometry:
        """Of layers that keep all tokens, none, or those of unequally many heads: the stage that keeps most."""
        config, num_layers = self.config, self.num_hidden_layers
        has_readers = optional(config, "num_kv_shared_layers", least=0) or flag(config, "use_cla", default=False)
        heads = [] if self.latent_dim else heads_per_layer(config, num_layers, self.num_attention_heads)
        if self.is_hybrid or has_readers or self.groups != layer_groups(config, num_layers, heads):
            raise GeometryError(
                "layers that keep unequally much KV are not split over pipeline stages where some have a window, or "
                "read the KV of others: write a configuration of the layers of one stage, and ask for that"
            )
        kept = kept_layers(config, num_layers, heads)
        sizes = {layer: self.kv_heads_per_rank(tensor_parallel_size, num) for layer, (_, num) in kept.items()}
        # Of stages that keep as much, the one with more layers has more weights, and less room for it.
        stages = stages_of(num_layers, num_stages)
        layers = max(stages, key=lambda stage: (sum(sizes.get(layer, 0) for layer in stage), len(stage)))
        of_stage = {layer: kept[layer] for layer in layers if layer in kept}
        sorts = [*of_stage.values()]
        group_of = {(group.kind, group.num_kv_heads): group for group in self.groups}
        return replace(
            self,
            num_hidden_layers=len(layers),
            groups=tuple(replace(group_of[sort], num_layers=sorts.count(sort)) for sort in dict.fromkeys(sorts)),
            config={**config_of_stage(config, layers, of_stage), **_CONFIG_OF_A_STAGE},
            stage_layers=layers,
        )

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of an indexer's key in one layer: 8 bits an element, and a 32-bit scale for every 128 of them."""
        return self.index_dim + 4 * -(-self.index_dim // 128)

    def bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes all layers keep of one token, on one rank."""
        return sum(self.group_bytes_per_token(kv_cache_dtype, tensor_parallel_size).values())

    def group_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> dict[str, int]:
        """The same for each kind of layer: full ones keep every token, windowed ones the last `window`."""
        sizes: dict[str, int] = {}
        for group in self.groups:
            layer_bytes = self.layer_bytes_per_token(kv_cache_dtype, tensor_parallel_size, group.num_kv_heads)
            sizes[group.kind] = sizes.get(group.kind, 0) + group.num_layers * layer_bytes
        return sizes

    @property
    def sliding_window(self) -> int | None:
        """The window, if every layer has one (then blocks behind it can be freed); else None."""
        windows = [group.window for group in self.groups]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def is_hybrid(self) -> bool:
        """Layers of more than one kind."""
        return len({(group.kind, group.window) for group in self.groups}) > 1

    @property
    def is_uneven(self) -> bool:
        """Layers with unequally many KV heads."""
        return any(group.num_kv_heads is not None for group in self.groups)


def num_gpu_blocks(kv_bytes: int, block_size: int, bytes_per_token: int) -> int:
    """Whole blocks that fit: floor(kv_bytes / (block_size * bytes_per_token)); 0 for a negative budget."""
    if block_size < 1 or bytes_per_token < 1:
        raise GeometryError(f"block_size {block_size} and bytes_per_token {bytes_per_token} must be at least 1")
    return max(0, kv_bytes) // (block_size * bytes_per_token)


def text_config(config: Config) -> Config:
    """The language model's part of a configuration (multimodal ones nest it; Qwen's Omni twice, in its thinker)."""
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        nested = section(config, key)
        if nested is not None:
            inherited = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
            inner = inherited | dict(nested)
            return text_config(inner) if key == "thinker_config" else inner
    return config


def _dtype_name(text: Config, whole: Config) -> str | None:
    for config in (text, whole):
        for key in ("dtype", "torch_dtype"):
            value = config.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise GeometryError(f"{key} is {shown(value)}; it must be a name such as bfloat16")
                return value.removeprefix("torch.")
    return None


def _latent_dim(config: Config) -> int:
    if config.get("kv_lora_rank") is None:
        return 0
    return required(config, "kv_lora_rank") + required(config, "qk_rope_head_dim")


_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")

_ATTENTIONS_PER_LAYER = {"longcat_flash": 2}
"""Families whose layers have more than one attention, each with KV of its own."""


def _num_encoder_tokens(config: Config) -> int:
    """The longest output of the encoder: of 30 s of speech (Whisper), or of a text."""
    return required(config, "max_source_positions", "max_position_embeddings", "n_positions")


_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",  # Falcon
    "n_kv_heads",  # Mistral's params.json
    "multi_query_group_num",  # ChatGLM
    "num_attention_groups",  # Step3
)


def _kv_heads_of_attn_config(config: Config) -> int | None:
    """The KV heads of MPT and DBRX, which describe their attention in a mapping of its own."""
    attention = section(config, "attn_config") or {}
    if attention.get("attn_type") == "multiquery_attention":
        return 1
    return optional(attention, "kv_n_heads")


def _num_kv_heads(config: Config, num_heads: int | None) -> int:
    is_new = flag(config, "new_decoder_architecture", default=False)
    if flag(config, "multi_query", default=False) and not is_new:
        return 1
    if not flag(config, "multi_query_attention", default=True):
        return _known_heads(config, num_heads)  # ChatGLM then has groups of one head each.
    given = optional(config, *_KV_HEADS) or _kv_heads_of_attn_config(config)
    return _known_heads(config, num_heads) if given is None else given


def _known_heads(config: Config, num_heads: int | None) -> int:
    if num_heads is None:
        raise GeometryError(
            f"the model configuration lacks num_key_value_heads (or num_attention_heads); found {found(config)}"
        )
    return num_heads


def _head_dim(config: Config, num_heads: int | None) -> int:
    given = optional(config, "head_dim", "attention_head_dim", "kv_channels", "d_kv")
    if given is not None:
        return given
    if num_heads is None:
        raise GeometryError(f"the model configuration lacks head_dim (or num_attention_heads); found {found(config)}")
    hidden_size = required(config, "hidden_size", "n_embd", "d_model", "n_embed", "dim")
    if hidden_size % num_heads:
        raise GeometryError(
            f"the model configuration lacks head_dim, and hidden_size {hidden_size} is no multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads
