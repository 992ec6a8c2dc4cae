"""Values of a model's `config.json`, each checked by type and range where it is read.

The file comes from anywhere: nothing in it is trusted, and what cannot be right is an error that names the key, the
value and what would do. `cure` is added to such an error: what the reader could be given instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from kvsim.types import ScenarioError, shown

Config: TypeAlias = Mapping[str, Any]

MAX_LAYERS = 10_000
"""Layers are counted one by one."""

MAX_COUNT = 1 << 40
"""Far beyond any width, vocabulary or context there is, and small enough for exact arithmetic."""


class GeometryError(ScenarioError):
    """A model configuration lacks a field, or holds one that cannot be used."""


def found(config: Config) -> str:
    """The keys that are there, for a message about one that is not."""
    return ", ".join(sorted(str(key) for key, value in config.items() if value is not None)) or "nothing"


def whole(name: str, value: object, *, least: int = 1, most: int = MAX_COUNT, cure: str = "") -> int:
    """`value` as a whole number from `least` to `most`. Raises GeometryError for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        is_too_large = isinstance(value, int) and value > most
        limits = f"from {least} to {most}" if is_too_large or most != MAX_COUNT else f"of at least {least}"
        raise GeometryError(f"{name} is {shown(value)}; it must be a whole number {limits}{cure}")
    return value


def optional(config: Config, *names: str, least: int = 1, most: int = MAX_COUNT, cure: str = "") -> int | None:
    """The whole number under the first of `names` that is there (and not null); None where none is."""
    for name in names:
        if config.get(name) is not None:
            return whole(name, config[name], least=least, most=most, cure=cure)
    return None


def required(config: Config, *names: str, least: int = 1, most: int = MAX_COUNT, cure: str = "") -> int:
    """The same; raises GeometryError where none is there."""
    value = optional(config, *names, least=least, most=most, cure=cure)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise GeometryError(f"the model configuration lacks {names[0]}{also}; found {found(config)}{cure}")
    return value


def flag(config: Config, name: str, *, default: bool, cure: str = "") -> bool:
    """A switch. Raises GeometryError for a value that is neither true nor false."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool) and value not in (0, 1):
        raise GeometryError(f"{name} is {shown(value)}; it must be true or false{cure}")
    return bool(value)


def words(config: Config, name: str, *, cure: str = "") -> str | None:
    """A name; None where it is missing. Raises GeometryError for a value that is no text."""
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise GeometryError(f"{name} is {shown(value)}; it must be a text{cure}")
    return value


def listing(config: Config, name: str, *, within: str = "", cure: str = "") -> list[Any] | None:
    """A list; None where it is missing. Raises GeometryError, which names the key `within` another, for the rest."""
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise GeometryError(f"{within}{name} is {shown(value)}; it must be a list{cure}")
    return list(value)


def section(config: Config, name: str, *, within: str = "", cure: str = "") -> Config | None:
    """A mapping; None where it is missing. Raises GeometryError, which names the key `within` another, for the rest."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise GeometryError(f"{within}{name} is {shown(value)}; it must be a mapping of keys and values{cure}")
    return value


def per_layer(config: Config, name: str, num_layers: int) -> list[Any] | None:
    """A list with one entry per layer; None where it is missing. Raises GeometryError for another length."""
    listed = listing(config, name)
    if listed is not None and len(listed) != num_layers:
        raise GeometryError(f"{name} has {len(listed)} entries, num_hidden_layers is {num_layers}: one each")
    return listed


def widths(config: Config, name: str, *, least: int = 1, cure: str = "") -> list[int] | None:
    """A width that is one for all layers, or a list with one each; None where it is missing."""
    value = config.get(name)
    if isinstance(value, list | tuple) and value:
        return [whole(f"{name}[{index}]", entry, least=least, cure=cure) for index, entry in enumerate(value)]
    return None if value is None else [whole(name, value, least=least, cure=cure)]
