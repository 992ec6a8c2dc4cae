"""Holds an allocator under test to the protocol: a method that is missing, or returns something else, is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvsim.memory.interface import BlockCopy, BlockMove, KVAllocator, PrefixMatch, Usage
from kvsim.types import AllocStatus, LawViolation

MAX_SHOWN = 120
"""Characters of a value that messages show."""


class _Wanted(NamedTuple):
    """What the protocol wants of a value, in words, and whether one is that."""

    what: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= 0


def _are(kind: type) -> Callable[[Any], bool]:
    """Whether all items have the fields of a kind: an engine may have a class of its own for it."""
    names = kind._fields  # type: ignore[attr-defined]
    return lambda value: isinstance(value, tuple | list) and all(hasattr(i, name) for i in value for name in names)


def _are_ids(value: Any) -> bool:
    return isinstance(value, Iterable) and all(hasattr(item, "__index__") for item in value)


def _is_match(value: Any) -> bool:
    return isinstance(value, PrefixMatch) and _is_count(value.num_tokens) and _are_ids(value.block_ids)


_COUNT = _Wanted("a whole number of at least 0", _is_count)
_TRANSFER = _Wanted(
    "a tuple of BlockMove, or None where there is no room", lambda value: value is None or _are(BlockMove)(value)
)

ATTRIBUTES = {
    "block_size": _Wanted("a whole number of at least 1", lambda value: _is_count(value) and value >= 1),
    "num_blocks": _COUNT,
    "num_free_blocks": _COUNT,
}
METHODS = {
    "can_allocate": _Wanted("an AllocStatus: OK, LATER or NEVER", lambda value: isinstance(value, AllocStatus)),
    "match_prefix": _Wanted("a PrefixMatch, NO_MATCH where there is none", _is_match),
    "allocate": None,
    "append_slots": _Wanted("a tuple of BlockCopy, () where nothing is copied", _are(BlockCopy)),
    "register": None,
    "fork": None,
    "free": None,
    "swap_out": _TRANSFER,
    "swap_in": _TRANSFER,
    "has_table": _Wanted("True or False", lambda value: value is not None),
    "num_tokens": _COUNT,
    "num_slots": _COUNT,
    "block_table": _Wanted("a sequence of block ids", _are_ids),
    "usage": _Wanted("a Usage", lambda value: isinstance(value, Usage)),
    "audit": None,
}
"""What each method returns; None: what it returns is not read."""

SEQUENCES_OF: dict[str, Callable[..., Iterable[Any]]] = {
    "allocate": lambda seq_id, *_: (seq_id,),
    "append_slots": lambda seq_id, *_: (seq_id,),
    "register": lambda *_: (),
    "fork": lambda _, child_id: (child_id,),
    "free": lambda *_: (),
    "swap_out": lambda seq_ids: seq_ids,
    "swap_in": lambda seq_ids: seq_ids,
}
"""The commands, and whose tables each may make or change."""

UNCLAIMED = {
    "fork": "fork",
    "swap_out": "swap",
    "swap_in": "swap",
    "match_prefix": "prefix_cache",
    "register": "prefix_cache",
}
"""Methods of which nothing is asked if the feature is not claimed."""


class Typed:
    """An allocator seen through the protocol; everything raises LawViolation that it does not allow."""

    def __init__(self, allocator: Any) -> None:
        if isinstance(allocator, type):
            raise LawViolation(f"protocol: the factory returned the class {allocator.__name__}, not an allocator")
        self._allocator = allocator
        self._name = type(allocator).__name__
        self.history: list[str] = []
        """Every command, with what came of it."""

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return self._checked(name, "is", self._given(name), ATTRIBUTES[name])
        if name not in METHODS:
            return getattr(self._allocator, name)
        method = self._method(name)
        self.__dict__[name] = method
        return method

    def _given(self, name: str) -> Any:
        if not hasattr(type(self._allocator), name) and not hasattr(self._allocator, name):
            raise LawViolation(
                f"protocol: {self._name} has no {name}; kvsim.memory.KVAllocator says what an allocator offers"
            )
        try:
            return getattr(self._allocator, name)
        except NotImplementedError as error:
            raise self._missing(name, error) from error

    def _method(self, name: str) -> Callable[..., Any]:
        method, wanted = self._given(name), METHODS[name]
        if not callable(method):
            raise LawViolation(f"protocol: {self._name}.{name} is {_shown(method)}; it is a method")

        def call(*args: Any, **keywords: Any) -> Any:
            if name not in SEQUENCES_OF:
                return checked(*args, **keywords)
            prefix = keywords.get("prefix")
            hit = f", hit {list(prefix.block_ids)}" if prefix is not None and prefix.num_tokens else ""
            self.history.append(f"{name}({', '.join(map(repr, args))}{hit})")
            try:
                value = checked(*args, **keywords)
            except Exception as error:
                self.history[-1] += f" raises {type(error).__name__}"
                raise
            self.history[-1] += f" -> {_shown(value)}" if wanted is not None else ""
            for seq_id in SEQUENCES_OF[name](*args):
                self.history[-1] += f"; table of {seq_id!r}: {self._table_of(seq_id)}"
            return value

        def checked(*args: Any, **keywords: Any) -> Any:
            try:
                value = method(*args, **keywords)
            except TypeError:
                if problem := _misfit(method, args, keywords):
                    raise LawViolation(
                        f"protocol: {self._name}.{name} takes {problem}; it must take {_parameters(name)}"
                    ) from None
                raise
            except NotImplementedError as error:
                raise self._missing(name, error) from error
            return value if wanted is None else self._checked(name, "returned", value, wanted)

        return call

    def _table_of(self, seq_id: Any) -> str:
        try:
            return _shown(list(self._allocator.block_table(seq_id)))
        except Exception:  # What is wrong with it is told by the comparison that follows.
            return "?"

    def _missing(self, name: str, error: NotImplementedError) -> LawViolation:
        why = f": {error}" if str(error) else ""
        cure = f"; leave it out with {UNCLAIMED[name]}=False" if name in UNCLAIMED else ""
        return LawViolation(f"protocol: {self._name}.{name} is not implemented{why}{cure}")

    def _checked(self, name: str, verb: str, value: Any, wanted: _Wanted) -> Any:
        if isinstance(value, Usage):
            for field, number in value._asdict().items():
                if not _is_count(number):
                    raise LawViolation(
                        f"protocol: {self._name}.{name} {verb} {field}={_shown(number)}; it must be {_COUNT.what}"
                    )
        if not wanted.holds(value):
            raise LawViolation(f"protocol: {self._name}.{name} {verb} {_shown(value)}; it must be {wanted.what}")
        return value


def _misfit(method: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """A method's parameters, and why a call does not fit them; empty where it does, or where they are not known."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        return f"{signature}: {error}"
    return ""


def _parameters(name: str) -> str:
    """A method's parameters without self and types, as a call may give them."""
    parameters = list(inspect.signature(getattr(KVAllocator, name)).parameters.values())[1:]
    return ", ".join(parameter.name for parameter in parameters)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
