"""`--set a.b=c`: values from the command line, laid over those of the file."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvsim.types import ScenarioError, shown
from kvsim.yaml_loader import MAX_DEPTH, Key, dotted, parse_value

MAX_SHOWN = 120
"""Characters of an option that messages repeat."""


class Override(NamedTuple):
    """One value from the command line or a call; `text` is how it was written: `--set a.b=c`, `--engine paged`."""

    key: Key
    value: Any
    text: str


def parse_overrides(texts: Iterable[str]) -> tuple[Override, ...]:
    """`["allocator.block_size=32"]` as overrides. Raises ScenarioError for a text that is not `key=value`."""
    return tuple(_parse(text) for text in texts)


def override_of(name: str, value: Any, text: str | None = None) -> Override:
    """An override with a Python value, as `kvsim.run(..., **{name: value})` gives it."""
    value = plain(value)
    text = f"{name}={value!r:.100}" if text is None else text
    return Override(_key(name, text), value, text)


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as Python's own: a value may come from `np.arange`."""
    return value.tolist() if hasattr(value, "tolist") else value


def apply_overrides(data: dict[str, Any], overrides: Iterable[Override]) -> None:
    """Write the values into `data`, making the mappings above them. Raises ScenarioError where there is no place."""
    for override in overrides:
        _set(data, override)


def _parse(text: str) -> Override:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ScenarioError(f"--set {text:.{MAX_SHOWN}}: must be key=value, such as --set allocator.block_size=32")
    text = f"--set {text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...'}"
    return Override(_key(name.strip(), text), parse_value(value, text), text)


def _key(name: str, text: str) -> Key:
    parts = name.split(".")
    if len(parts) > MAX_DEPTH or not all(part.strip() for part in parts):
        raise ScenarioError(
            f"{text}: {shown(name)} is not a key; write names with dots between, such as memory.swap_space"
        )
    return tuple(int(part) if part.isdecimal() and len(part) < 9 else part for part in parts)


def _set(data: dict[str, Any], override: Override) -> None:
    current: Any = data
    for depth in range(len(override.key) - 1):
        place = _place(current, override, depth)
        if isinstance(current, dict) and current.get(place) is None:
            current[place] = {}
        current = current[place]
    # A copy: the engine's preset is laid under a block, and the same change is used for the next engine.
    current[_place(current, override, len(override.key) - 1)] = copy.deepcopy(override.value)


def _place(current: Any, override: Override, depth: int) -> str | int:
    """The name or the index that part `depth` of the key has in `current`, which the parts before it lead to."""
    part, path = override.key[depth], dotted(override.key[:depth])
    if isinstance(current, dict):
        # Keys of mappings are texts, such as the priorities of a workload.
        return part if part in current else str(part)
    if not isinstance(current, list):
        raise ScenarioError(f"{override.text}: {path} is the single value {current!r:.60}; it has no keys")
    if not isinstance(part, int) or part >= len(current):
        raise ScenarioError(f"{override.text}: {path} is a list of {len(current)}; give an index below that")
    return part
