"""What a replay of one recorded case says: it agrees, or where it first departs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first recorded value that the replay does not reproduce.

    `step` is the record's number (operation or engine step), `field` its name in the case format, and `state`
    whatever helps to see why (tables, queues, free lists), by name.
    """

    step: int
    field: str
    expected: object
    got: object
    state: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one case: `num_fields` recorded values were compared, up to the first mismatch if there is one."""

    name: str
    num_fields: int
    mismatch: Mismatch | None = None

    @property
    def agrees(self) -> bool:
        return self.mismatch is None


def is_same(expected: object, got: object) -> bool:
    """Equal as JSON: to Python true and 1.0 are 1 as well."""
    return expected == got and json.dumps(expected, sort_keys=True) == json.dumps(got, sort_keys=True)


def agrees_in(name: str, expected: Mapping[str, object], got: Mapping[str, object]) -> bool:
    """Both records have the field, with the same value, or both lack it: null is not absent."""
    return (name in expected) == (name in got) and is_same(expected.get(name), got.get(name))
