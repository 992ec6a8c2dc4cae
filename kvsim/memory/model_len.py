"""The longest text a model is run with unless told otherwise: how vLLM derives `max_model_len` from a `config.json`.

The smallest of the lengths that families give under names of their own counts, or `model_max_length` where there is
one, times the factor of a rotary scaling. Llama 3's and Phi's scalings are in the length already, and Gemma 3's too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvsim.memory.config_fields import Config, GeometryError, optional, section, words
from kvsim.types import shown

LENGTHS = (
    "max_position_embeddings",
    "n_positions",  # GPT-2, GPT-J, StarCoder
    "max_seq_len",  # MPT, DBRX
    "seq_length",  # ChatGLM, Qwen, BLOOM
    "max_sequence_length",
    "max_seq_length",
    "max_position_embedding",  # Step3
    "max_target_positions",  # Whisper
    "seq_len",
)

_SCALED_ALREADY = ("su", "longrope", "llama3")
"""Kinds of rotary scaling whose configurations give the scaled length."""

_MAX_FACTOR = 1 << 20


def max_model_len(config: Config) -> int | None:
    """Tokens of the longest text, prompt and output together; None where the configuration does not say."""
    lengths = [length for name in LENGTHS if (length := optional(config, name)) is not None]
    longest = optional(config, "model_max_length") or min(lengths, default=None)
    if longest is None or str(config.get("model_type")).startswith("gemma3"):
        return longest
    factor = 1.0
    for scaling in _rotary_scalings(config):
        kind = words(scaling, "rope_type") or words(scaling, "type")
        if kind in _SCALED_ALREADY:
            continue
        factor = _factor(scaling, factor)
        if kind == "yarn":
            longest = optional(scaling, "original_max_position_embeddings") or longest
    return int(longest * factor)


def _rotary_scalings(config: Config) -> Iterable[Config]:
    """The scaling of all layers, or one for each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = section(config, name) or {}
        kinds = [kind for kind in scaling if isinstance(scaling[kind], Mapping)]
        yield from (scaling[kind] for kind in kinds) if kinds else (scaling,)


def _factor(scaling: Config, usual: float) -> float:
    value: Any = scaling.get("factor")
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MAX_FACTOR:
        raise GeometryError(
            f"factor of the rotary scaling is {shown(value)}; it must be a number from 1 to {_MAX_FACTOR}"
        )
    return float(value)
