"""What a model stores per token, from its Hugging Face `config.json`: the arithmetic between bytes and blocks.

`bytes_per_token = 2 * num_kv_layers * num_key_value_heads * head_dim * dtype_bytes` (K and V), or one latent of
`kv_lora_rank + qk_rope_head_dim` elements per layer where the model uses multi-head latent attention (MLA). Layers
without attention, and those that read the KV of earlier ones, are none of the `num_kv_layers`. A field that is
missing is an error that names it; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsim.types import ScenarioError

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

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

ATTENTION_NAMES = {"attention": FULL, FULL: FULL, SLIDING: SLIDING, CHUNKED: CHUNKED}
"""Kinds of layers that keep KV, by the names that `layer_types` uses."""

NO_KV = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
"""Kinds of layers whose state does not grow with the text."""


class GeometryError(ScenarioError):
    """A model configuration lacks a field, or holds one that cannot be used."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises GeometryError for an unknown name."""
    name = dtype.removeprefix("torch.").lower()
    if name not in DTYPE_BYTES:
        raise GeometryError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that keep KV alike: all of it, or a window of the last `window` tokens."""

    kind: str
    num_layers: int
    window: int | None = None


@dataclass(frozen=True)
class ModelGeometry:
    """The shape of a model's KV cache. Make it with `from_config`, or by keyword for a made-up model.

    `latent_dim` > 0 means MLA. `groups` lists full and windowed layers, in order of first appearance; layers that keep
    no KV of their own are in none of them.
    Sizes per token are those of one rank where `tensor_parallel_size` is given: KV heads are split over the ranks and
    replicated beyond their number; a latent is on every rank.
    """

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    dtype: str
    name: str = ""
    num_attention_heads: int | None = None
    latent_dim: int = 0
    groups: tuple[LayerGroup, ...] = ()
    max_model_len: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The (text) configuration it was read from: what `weights.count_params` reads."""

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} is {getattr(self, name)}; it must be at least 1")
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
        text = text_config(config)
        num_layers = _positive(text, "num_hidden_layers", "n_layer", "num_layers")
        dtype = dtype or _dtype_name(text, config)
        latent_dim = _latent_dim(text)
        num_heads = _optional(text, "num_attention_heads", "n_head")
        if latent_dim:
            num_kv_heads, head_dim = 1, latent_dim
        else:
            num_kv_heads, head_dim = _num_kv_heads(text, num_heads), _head_dim(text, num_heads)
        return cls(
            num_hidden_layers=num_layers,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            name=name or str(config.get("_name_or_path", "")),
            num_attention_heads=num_heads,
            latent_dim=latent_dim,
            groups=_layer_groups(text, num_layers),
            max_model_len=_optional(text, "max_position_embeddings", "n_positions", "max_sequence_length"),
            config={"quantization_config": config.get("quantization_config")} | dict(text),
        )

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep KV of their own."""
        return sum(group.num_layers for group in self.groups)

    def kv_heads_per_rank(self, tensor_parallel_size: int = 1) -> int:
        """KV heads one rank keeps. Raises GeometryError where heads cannot be split evenly."""
        if tensor_parallel_size < 1:
            raise GeometryError(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1")
        heads, ranks = self.num_key_value_heads, tensor_parallel_size
        if self.num_attention_heads is not None and self.num_attention_heads % ranks:
            raise GeometryError(f"{self.num_attention_heads} attention heads cannot be split over {ranks} ranks")
        if self.latent_dim:
            return 1
        if heads % ranks and ranks % heads:
            raise GeometryError(f"{heads} KV heads cannot be split over {ranks} ranks evenly")
        return max(1, heads // ranks)

    def layer_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes one layer keeps of one token, on one rank."""
        element_bytes = dtype_bytes(self.dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
        num_vectors = 1 if self.latent_dim else 2
        return num_vectors * self.kv_heads_per_rank(tensor_parallel_size) * self.head_dim * element_bytes

    def bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Bytes all layers keep of one token, on one rank."""
        return self.num_kv_layers * self.layer_bytes_per_token(kv_cache_dtype, tensor_parallel_size)

    def group_bytes_per_token(self, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> dict[str, int]:
        """The same for each kind of layer: full ones keep every token, windowed ones the last `window`."""
        layer_bytes = self.layer_bytes_per_token(kv_cache_dtype, tensor_parallel_size)
        return {group.kind: group.num_layers * layer_bytes for group in self.groups}

    @property
    def sliding_window(self) -> int | None:
        """The window, if every layer has one (then blocks behind it can be freed); else None."""
        windows = [group.window for group in self.groups]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def is_hybrid(self) -> bool:
        """Layers of more than one kind."""
        return len(self.groups) > 1


def num_gpu_blocks(kv_bytes: int, block_size: int, bytes_per_token: int) -> int:
    """Whole blocks that fit: floor(kv_bytes / (block_size * bytes_per_token)); 0 for a negative budget."""
    if block_size < 1 or bytes_per_token < 1:
        raise GeometryError(f"block_size {block_size} and bytes_per_token {bytes_per_token} must be at least 1")
    return max(0, kv_bytes) // (block_size * bytes_per_token)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration (multimodal ones nest it)."""
    for key in ("text_config", "language_config", "llm_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping):
            inherited = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
            return inherited | dict(nested)
    return config


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise GeometryError(f"{name} is {value!r}; it must be a whole number of at least 1")
            return value
    return None


def _positive(config: Mapping[str, Any], *names: str) -> int:
    value = _optional(config, *names)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise GeometryError(f"the model configuration lacks {names[0]}{also}; found {_found(config)}")
    return value


def _found(config: Mapping[str, Any]) -> str:
    return ", ".join(sorted(str(key) for key in config)) or "nothing"


def _dtype_name(text: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    for config in (text, whole):
        for key in ("dtype", "torch_dtype"):
            if config.get(key) is not None:
                return str(config[key]).removeprefix("torch.")
    raise GeometryError(f"the model configuration lacks dtype (or torch_dtype); found {_found(text)}")


def _latent_dim(config: Mapping[str, Any]) -> int:
    if config.get("kv_lora_rank") is None:
        return 0
    return _positive(config, "kv_lora_rank") + _positive(config, "qk_rope_head_dim")


def _num_kv_heads(config: Mapping[str, Any], num_heads: int | None) -> int:
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1
    given = _optional(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    if given is not None:
        return given
    if num_heads is None:
        raise GeometryError(
            f"the model configuration lacks num_key_value_heads (or num_attention_heads); found {_found(config)}"
        )
    return num_heads


def _head_dim(config: Mapping[str, Any], num_heads: int | None) -> int:
    given = _optional(config, "head_dim", "kv_channels")
    if given is not None:
        return given
    if num_heads is None:
        raise GeometryError(f"the model configuration lacks head_dim (or num_attention_heads); found {_found(config)}")
    hidden_size = _positive(config, "hidden_size", "n_embd", "d_model")
    if hidden_size % num_heads:
        raise GeometryError(
            f"the model configuration lacks head_dim, and hidden_size {hidden_size} is no multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _layer_groups(config: Mapping[str, Any], num_layers: int) -> tuple[LayerGroup, ...]:
    without = _layers_without_kv(config, num_layers)
    kinds = [kind for layer, kind in enumerate(_layer_kinds(config, num_layers)) if layer not in without]
    kinds = [kind for kind in kinds if kind not in NO_KV]
    if not kinds:
        raise GeometryError(
            f"the model configuration has {num_layers} layers and none that keeps keys and values: there is no KV "
            f"cache to model; check layer_types and num_kv_shared_layers"
        )
    groups = []
    for kind in dict.fromkeys(kinds):
        groups.append(LayerGroup(kind, kinds.count(kind), _window_of(kind, config)))
    return tuple(groups)


def _layers_without_kv(config: Mapping[str, Any], num_layers: int) -> set[int]:
    """Layers that have no attention by their number, or share the KV of an earlier layer."""
    shared = _count(config, "num_kv_shared_layers", num_layers) if config.get("num_kv_shared_layers") else 0
    without = set(range(num_layers - shared, num_layers))
    period = _optional(config, "attn_layer_period")
    if period is not None:
        offset = _count(config, "attn_layer_offset", period - 1)
        without |= {layer for layer in range(num_layers) if layer % period != offset}
    interval = _optional(config, "full_attention_interval")
    if interval is not None:
        without |= {layer for layer in range(num_layers) if (layer + 1) % interval}
    return without


def _count(config: Mapping[str, Any], name: str, most: int) -> int:
    value = config.get(name)
    if value is None:
        raise GeometryError(f"the model configuration lacks {name}; found {_found(config)}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise GeometryError(f"{name} is {value!r}; it must be a whole number from 0 to {most}")
    return value


def _window_of(kind: str, config: Mapping[str, Any]) -> int | None:
    if kind == SLIDING:
        return _positive(config, "sliding_window")
    return _positive(config, "attention_chunk_size") if kind == CHUNKED else None


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """The kind of every layer; families differ in how they say it."""
    window = config.get("sliding_window")
    is_off = config.get("use_sliding_window") is False
    listed = config.get("layer_types")
    if listed is not None:
        return _listed_kinds(listed, num_layers, is_off)
    if window is None or is_off:
        return [FULL] * num_layers
    pattern = _optional(config, "sliding_window_pattern", "_sliding_window_pattern")
    model_type = str(config.get("model_type", ""))
    if model_type == "gemma2":
        pattern = pattern or 2
    if model_type.startswith("gemma3") and pattern is None:
        raise GeometryError(
            "the model configuration has sliding_window but lacks layer_types (or sliding_window_pattern)"
        )
    if pattern is not None:
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    if config.get("max_window_layers") is not None:
        first_sliding = min(num_layers, int(config["max_window_layers"]))
        return [FULL] * first_sliding + [SLIDING] * (num_layers - first_sliding)
    return [SLIDING] * num_layers


def _listed_kinds(listed: Any, num_layers: int, is_off: bool) -> list[str]:
    kinds = [str(kind) for kind in listed]
    if len(kinds) != num_layers:
        raise GeometryError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    if unknown := sorted(set(kinds) - {*ATTENTION_NAMES, *NO_KV}):
        known = ", ".join((*ATTENTION_NAMES, *NO_KV))
        raise GeometryError(f"layer_types has {', '.join(unknown)}; known are {known}")
    if is_off:
        return [kind if kind in NO_KV else FULL for kind in kinds]
    return [ATTENTION_NAMES.get(kind, kind) for kind in kinds]
