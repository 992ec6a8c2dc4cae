"""Random streams, one per purpose, spawned from the seed by name.

Changing how one stream is used leaves the others alone, and every engine sees the same workload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    import numpy as np

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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
    """All random streams of a run, each named for what it draws: `arrivals`, `sessions.pauses`, `decoding.lengths`."""
    return Streams(seed)


def stream(seed: int, name: str) -> np.random.Generator:
    """A fresh generator that depends on the seed and the name alone; the seed is an integer >= 0."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, crc32(name.encode())])))


def mix(*values: int) -> int:
    """A well-scattered 64-bit number that depends on the values alone (splitmix64): random access without a stream."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + _STEP & _MASK
        state = (state ^ (state >> 30)) * _FIRST & _MASK
        state = (state ^ (state >> 27)) * _SECOND & _MASK
        state ^= state >> 31
    return state


def mix_range(value: int, start: int, stop: int) -> list[int]:
    """`mix(value, i)` for i from `start` to `stop - 1`, all together."""
    import numpy as np

    # Unsigned numbers of 64 bits wrap around, as the mask does.
    state = (np.arange(start, stop, dtype=np.uint64) ^ np.uint64(mix(value))) + np.uint64(_STEP)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: list[int] = (state ^ (state >> np.uint64(31))).tolist()
    return mixed
