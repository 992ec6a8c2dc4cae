"""Units, identifiers and errors shared by every layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import TypeAlias

Ns: TypeAlias = int
"""A point in simulated time, or a span of it, in integer nanoseconds."""

BlockId: TypeAlias = int
SeqId: TypeAlias = Hashable

Progress: TypeAlias = Callable[[int, int], None]
"""Told now and then how much is done, and of how much."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000


def shown(value: object, limit: int = 60) -> str:
    """A value as Python writes it, cut to fit a message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits.
        text = f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class KvsimError(Exception):
    """Base of every error a user can cause; its text names the culprit, the value and the cure."""


class ScenarioError(KvsimError):
    """A scenario, a command line value or an input file cannot be used."""


class AllocatorError(KvsimError):
    """A caller broke the allocator's contract (unknown sequence, double free, write into a shared full block)."""


class OutOfBlocks(AllocatorError):
    """A command needed more blocks than are free; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        # Whoever copies an exception (pickle, simpy) calls its class with its args.
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"needs {self.needed} blocks, {self.free} are free"


class LawViolation(AssertionError):
    """A law of the memory or of the engine does not hold; the text begins with the law's number."""


class Terminated(SystemExit):
    """A polite kill (SIGTERM), raised wherever it finds the program: a `sys.exit` of the user's own code is another."""


class AllocStatus(StrEnum):
    """Answer to "can this sequence get its memory": now, later, or never (the pool is too small)."""

    OK = "OK"
    LATER = "LATER"
    NEVER = "NEVER"
