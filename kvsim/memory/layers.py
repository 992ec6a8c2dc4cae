"""Which layers of a model keep keys and values, and how: families say it in words of their own.

A layer keeps the KV of all tokens, of a window, or none: because it has no attention, reads the KV of an earlier
layer, or attends to something else than the text. Layers that differ in a way that no `LayerGroup` can express are an
error that names the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvsim.memory.config_fields import (
    Config,
    GeometryError,
    flag,
    listing,
    optional,
    per_layer,
    required,
    section,
    whole,
    words,
)
from kvsim.types import shown

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

ATTENTION_NAMES = {"attention": FULL, FULL: FULL, SLIDING: SLIDING, CHUNKED: CHUNKED}
"""Kinds of layers that keep KV, by the names that `layer_types` uses."""

NO_KV = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
"""Kinds of layers whose state does not grow with the text."""

_BLOCKS_WITH_KV = ("attention", "hybrid")
"""The same for lists of blocks; a hybrid one has attention beside its recurrence."""
_BLOCKS_WITHOUT_KV = (*NO_KV, "mlp", "moe")

_LETTERS = {"*": True, "M": False, "-": False, "E": False}
"""Letters of a `hybrid_override_pattern`, and whether such a layer is attention (the others: Mamba, MLP, experts)."""

_LOCAL_BY_DEFAULT = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Families of which every n-th layer is global, and their n where the file leaves it out."""

_ROTARY_INTERVAL = 4
"""Llama 4: every fourth layer has no rotary embedding, and attends to everything, unless the file says otherwise."""

_SHOULD_BE_LIKE = {
    "v_head_dim": "head_dim",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "head_dim",
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
}
"""Widths of values, and of layers of one kind, and those of keys in the others."""

_OF_A_STATE = ("mamba_", "ssm_", "linear_attn", "linear_conv_", "linear_key_", "linear_num_", "linear_value_")
"""How keys of Mamba and linear attention begin."""

_SAYS_WHICH = (
    "layer_types", "layers_block_type", "block_types", "attn_layer_indices", "full_attn_idxs", "attn_type_list",
    "attn_layer_period", "full_attention_interval", "layer_group_size", "hybrid_override_pattern",
    "linear_attn_config",
)  # fmt: skip
"""Keys that say which layers have attention."""

_BY_LAYER = (
    "attn_layer_offset", "_block_types", "hybrid_layer_pattern", "sliding_window_pattern", "_sliding_window_pattern",
    "max_window_layers", "num_key_value_heads_per_layer", "block_configs", "cross_attention_layers",
)  # fmt: skip
"""Other keys that speak of layers by their number."""

ALIKE = (
    "write a configuration of layers that store alike and as much in all (num_hidden_layers, num_key_value_heads, "
    "head_dim, dtype)"
)
"""The cure where layers differ in a way that cannot be counted."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that keep KV alike: all of it, or a window of the last `window` tokens.

    `num_kv_heads` is None where they have as many KV heads as the model says.
    """

    kind: str
    num_layers: int
    window: int | None = None
    num_kv_heads: int | None = None


def layer_groups(config: Config, num_layers: int, heads: list[int]) -> tuple[LayerGroup, ...]:
    """The layers with KV of their own, by kind, in order of first appearance.

    `heads` are the KV heads of every layer, as `heads_per_layer` has them. Raises GeometryError where no layer keeps
    anything, or layers are uneven in a way that cannot be counted.
    """
    sorts = [*kept_layers(config, num_layers, heads).values()]
    return tuple(
        LayerGroup(kind, sorts.count((kind, num)), window_of(kind, config), num) for kind, num in dict.fromkeys(sorts)
    )


def kept_layers(config: Config, num_layers: int, heads: list[int]) -> dict[int, tuple[str, int | None]]:
    """The layers with KV of their own by number: their kind, and their KV heads where those are unequal."""
    without = _layers_without_kv(config, num_layers)
    kinds = layer_kinds(config, num_layers)
    kept = [layer for layer in range(num_layers) if layer not in without and kinds[layer] not in NO_KV]
    if heads:
        kept = [layer for layer in kept if heads[layer]]
    if not kept:
        raise GeometryError(
            f"the model configuration has {num_layers} layers and none that keeps keys and values: there is no KV "
            f"cache to model; check layer_types and num_kv_shared_layers, or what lists its attention layers"
        )
    is_uneven = any(heads[layer] != max(heads) for layer in kept) if heads else False
    sorts = {layer: (kinds[layer], heads[layer] if is_uneven else None) for layer in kept}
    if is_uneven and len({kind for kind, _ in sorts.values()}) > 1:
        raise GeometryError(
            f"{_uneven_key(config)} gives layers unequal KV heads, and some of them have a window: the two together "
            f"are not counted; {ALIKE}"
        )
    return sorts


def stages_of(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage, as vLLM shares them out.

    What is left over goes to the stages before the last one, the nearest first: the first and the last stage have the
    embedding and the head beside their layers.
    """
    counts = [num_layers // num_stages] * num_stages
    for index in range(num_layers % num_stages):
        counts[-2 - index] += 1
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def config_of_stage(config: Config, layers: range, kept: Mapping[int, tuple[str, int | None]]) -> dict[str, Any]:
    """The configuration of these layers of a model alone, of which `kept` have KV."""
    kinds = [kept[layer][0] if layer in kept else NO_KV[1] for layer in layers]
    stage = {name: value for name, value in config.items() if name not in (*_SAYS_WHICH, *_BY_LAYER)}
    images = listing(config, "cross_attention_layers") or []
    if of_stage := [int(layer) - layers.start for layer in images if layer in layers]:
        stage["cross_attention_layers"] = of_stage
    return stage | {"num_hidden_layers": len(layers), "layer_types": kinds}


def heads_per_layer(config: Config, num_layers: int, num_heads: int | None) -> list[int]:
    """KV heads of every layer, 0 for one that keeps none, where a configuration says it by layer; empty else."""
    name = _uneven_key(config)
    listed = per_layer(config, name, num_layers) if name else None
    if listed is None or name is None:
        return []
    if name != "block_configs":
        return [whole(f"{name}[{layer}]", num, least=0) for layer, num in enumerate(listed)]
    return [_heads_of_block(f"{name}[{layer}]", block, num_heads) for layer, block in enumerate(listed)]


def _uneven_key(config: Config) -> str | None:
    names = ("num_key_value_heads_per_layer", "block_configs")
    return next((name for name in names if config.get(name) is not None), None)


def _heads_of_block(name: str, block: Any, num_heads: int | None) -> int:
    """KV heads of one entry of `block_configs`, which says how many query heads share one."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise GeometryError(f"{name} is {shown(block)}; it must be a mapping with a mapping attention")
    if flag(attention, "no_op", default=False) or flag(attention, "replace_with_linear", default=False):
        return 0
    if num_heads is None:
        raise GeometryError(f"the model configuration has {name} but lacks num_attention_heads")
    num_sharing = whole(f"{name}.attention.n_heads_in_group", attention.get("n_heads_in_group"), most=num_heads)
    if num_heads % num_sharing:
        raise GeometryError(
            f"{name}.attention.n_heads_in_group is {num_sharing}; it must divide num_attention_heads ({num_heads})"
        )
    return num_heads // num_sharing


def refuse_uneven_widths(config: Config, num_kv_heads: int, head_dim: int) -> None:
    """Raise GeometryError where values are not as wide as keys, or windowed layers not as wide as full ones."""
    usual = {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    for name, like in _SHOULD_BE_LIKE.items():
        given = optional(config, name)
        if given is not None and given != usual[like]:
            raise GeometryError(
                f"{name} is {given}, and {like} {usual[like]}: keys and values, or layers, of unequal width are not "
                f"counted; {ALIKE}"
            )


def attending_windows(config: Config, num_layers: int) -> list[tuple[int, int | None]]:
    """(number of layers, window or None) of the layers that attend to the text, to another layer's KV too."""
    without = _layers_without_attention(config, num_layers)
    kinds = layer_kinds(config, num_layers)
    attending = [kinds[layer] for layer in range(num_layers) if layer not in without and kinds[layer] not in NO_KV]
    return [(attending.count(kind), window_of(kind, config)) for kind in dict.fromkeys(attending)]


def _layers_without_kv(config: Config, num_layers: int) -> set[int]:
    """Layers that have no attention, or attend to what is not theirs or not the text's."""
    layers = range(num_layers)
    shared = optional(config, "num_kv_shared_layers", least=0, most=num_layers) or 0
    without = set(layers[num_layers - shared :])
    if flag(config, "use_cla", default=False):
        factor = required(config, "cla_share_factor")
        without |= {layer for layer in layers if layer % factor}
    return without | _layers_without_attention(config, num_layers)


def _layers_without_attention(config: Config, num_layers: int) -> set[int]:
    """Layers that have no attention by their number, or none to the text."""
    layers = range(num_layers)
    without: set[int] = set()
    period = optional(config, "attn_layer_period")
    if period is not None:
        offset = required(config, "attn_layer_offset", least=0, most=period - 1)
        without |= {layer for layer in layers if layer % period != offset}
    interval = optional(config, "full_attention_interval")
    if interval is not None:
        without |= {layer for layer in layers if (layer + 1) % interval}
    group_size = optional(config, "layer_group_size")
    if group_size is not None:
        # The last of every group has softmax attention, and so have those after the last whole group.
        num_grouped = num_layers - num_layers % group_size
        without |= {layer for layer in layers if (layer + 1) % group_size and layer < num_grouped}
    # Their keys and values are those of an image, however long the text is.
    without |= _numbers(config, "cross_attention_layers", layers) or set()
    for attending in _attending(config, num_layers):
        if attending is not None:
            without |= set(layers) - attending
    return without


def _attending(config: Config, num_layers: int) -> Iterable[set[int] | None]:
    """The layers with attention by each of the ways to list them; None where it is not used."""
    layers = range(num_layers)
    yield _numbers(config, "attn_layer_indices", layers)
    yield _numbers(config, "full_attn_idxs", layers)
    yield _typed(config, num_layers)
    yield _lettered(config, num_layers)
    yield _blocks("layers_block_type", per_layer(config, "layers_block_type", num_layers))
    for name in ("block_types", "_block_types"):
        cycle = listing(config, name)
        if cycle is not None and not cycle:
            raise GeometryError(f"{name} is []; it must name at least one kind of block")
        yield _blocks(name, [cycle[layer % len(cycle)] for layer in layers] if cycle else None)
    linear = section(config, "linear_attn_config")
    if linear is not None and linear.get("full_attn_layers") is not None:
        numbers = _numbers(linear, "full_attn_layers", range(1, num_layers + 1)) or set()
        yield {number - 1 for number in numbers}
    elif linear:
        raise GeometryError("linear_attn_config lacks full_attn_layers, which lists the layers with KV, from 1")


def _numbers(config: Config, name: str, layers: range) -> set[int] | None:
    listed = listing(config, name)
    if listed is None:
        return None
    return {whole(f"{name}[{index}]", number, least=layers[0], most=layers[-1]) for index, number in enumerate(listed)}


def _typed(config: Config, num_layers: int) -> set[int] | None:
    """`attn_type_list`: 1 for softmax attention, 0 for linear one."""
    listed = per_layer(config, "attn_type_list", num_layers)
    if listed is None:
        return None
    kinds = [whole(f"attn_type_list[{layer}]", kind, least=0, most=1) for layer, kind in enumerate(listed)]
    return {layer for layer, kind in enumerate(kinds) if kind}


def _lettered(config: Config, num_layers: int) -> set[int] | None:
    """`hybrid_override_pattern`: a letter per layer."""
    pattern = words(config, "hybrid_override_pattern")
    if pattern is None:
        return None
    if unknown := sorted(set(pattern) - set(_LETTERS)):
        raise GeometryError(f"hybrid_override_pattern has {', '.join(unknown)}; known are {', '.join(_LETTERS)}")
    if len(pattern) != num_layers:
        raise GeometryError(
            f"hybrid_override_pattern has {len(pattern)} letters, num_hidden_layers is {num_layers}: one each"
        )
    return {layer for layer, letter in enumerate(pattern) if _LETTERS[letter]}


def _blocks(name: str, listed: list[Any] | None) -> set[int] | None:
    if listed is None:
        return None
    _known(name, listed, (*_BLOCKS_WITH_KV, *_BLOCKS_WITHOUT_KV))
    return {layer for layer, kind in enumerate(listed) if kind in _BLOCKS_WITH_KV}


def _known(name: str, listed: list[Any], known: tuple[str, ...]) -> None:
    strange = [kind for kind in listed if kind not in known]
    if strange:
        names = dict.fromkeys(kind if isinstance(kind, str) else shown(kind) for kind in strange)
        raise GeometryError(f"{name} has {shown_list(names)}; known are {', '.join(known)}")


def shown_list(names: Iterable[str]) -> str:
    """Names in a row, the first ones if there are many."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")


def unexplained_state(config: Config, num_layers: int, num_kv_layers: int) -> str | None:
    """A key that speaks of layers with a constant state, where nothing that is understood says which they are."""
    if num_kv_layers < num_layers or any(config.get(name) is not None for name in _SAYS_WHICH):
        return None
    return next((name for name in sorted(map(str, config)) if name.startswith(_OF_A_STATE)), None)


def window_of(kind: str, config: Config) -> int | None:
    """Tokens that a layer of that kind looks back at; None for all."""
    if kind == SLIDING:
        return required(config, "sliding_window", "attention_window_size")
    return required(config, "attention_chunk_size") if kind == CHUNKED else None


def layer_kinds(config: Config, num_layers: int) -> list[str]:
    """The kind of every layer, as if each had attention where the file does not list kinds."""
    is_off = not flag(config, "use_sliding_window", default=True)
    listed = per_layer(config, "layer_types", num_layers)
    if listed is not None:
        return _listed_kinds(listed, is_off)
    if config.get("block_types", config.get("_block_types")) is not None and config.get("attention_window_size"):
        # Recurrent blocks with local attention between them.
        return [SLIDING] * num_layers
    if config.get("sliding_window") is None or is_off:
        return _chunked_kinds(config, num_layers)
    pattern = per_layer(config, "hybrid_layer_pattern", num_layers)
    if pattern is not None:
        flags = [whole(f"hybrid_layer_pattern[{layer}]", kind, least=0, most=1) for layer, kind in enumerate(pattern)]
        return [SLIDING if kind else FULL for kind in flags]
    every = optional(config, "sliding_window_pattern", "_sliding_window_pattern")
    every = every or _LOCAL_BY_DEFAULT.get(words(config, "model_type") or "")
    if every is not None:
        return [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]
    first_sliding = min(num_layers, optional(config, "max_window_layers", least=0) or 0)
    return [FULL] * first_sliding + [SLIDING] * (num_layers - first_sliding)


def _listed_kinds(listed: list[Any], is_off: bool) -> list[str]:
    _known("layer_types", listed, (*ATTENTION_NAMES, *NO_KV))
    if is_off:
        return [kind if kind in NO_KV else FULL for kind in listed]
    return [ATTENTION_NAMES.get(kind, kind) for kind in listed]


def _chunked_kinds(config: Config, num_layers: int) -> list[str]:
    """Chunks where there is a rotary embedding, all tokens where there is none; without chunks all of them."""
    if optional(config, "attention_chunk_size") is None:
        return [FULL] * num_layers
    listed = per_layer(config, "no_rope_layers", num_layers) if config.get("no_rope_layers") != [] else None
    if listed is None:
        every = optional(config, "no_rope_layer_interval")
        if every is None and (words(config, "model_type") or "").startswith("llama4"):
            every = _ROTARY_INTERVAL
        if every is None:
            raise GeometryError(
                "the model configuration has attention_chunk_size but lacks layer_types (or no_rope_layers), which say "
                "in which layers"
            )
        return [CHUNKED if (layer + 1) % every else FULL for layer in range(num_layers)]
    rotary = [whole(f"no_rope_layers[{layer}]", entry, least=0, most=1) for layer, entry in enumerate(listed)]
    return [CHUNKED if entry else FULL for entry in rotary]
