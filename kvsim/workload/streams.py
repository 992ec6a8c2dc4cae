"""Random streams, one per purpose, spawned from the seed by name.

Changing how one stream is used leaves the others alone, and every engine sees the same workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    import numpy as np

_MASK = (1 << 64) - 1


class Streams:
    """Named generators of one seed: `streams(7)["arrivals"]` is the same generator at each look-up."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[str, np.random.Generator] = {}

    def __getitem__(self, name: str) -> np.random.Generator:
        if name not in self._generators:
            self._generators[name] = stream(self.seed, name)
        return self._generators[name]


def streams(seed: int) -> Streams:
    """All random streams of a run; those in use are `arrivals`, `lengths`, `content` and `decoding`."""
    return Streams(seed)


def stream(seed: int, name: str) -> np.random.Generator:
    """A fresh generator that depends on the seed and the name alone; the seed is an integer >= 0."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, crc32(name.encode())])))


def mix(*values: int) -> int:
    """A well-scattered 64-bit number that depends on the values alone (splitmix64): random access without a stream."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state
