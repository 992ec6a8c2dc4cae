"""What a replay of one recorded case says: it agrees, or where it first departs."""

from __future__ import annotations

import dataclasses
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
