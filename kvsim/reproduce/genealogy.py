"""Who descends from whom among the beams of many requests at once, and what that shares; no engine, no memory.

Beams are kept in the order of their family tree, so that siblings are neighbours. Then the tokens that neighbours have
in common tell everything: of a beam's blocks those are its own that do not lie wholly in what it has in common with
its left neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvsim.reproduce.recipe import SEED, lengths_of

BLOCK_SIZE = 16
Ints: TypeAlias = NDArray[np.int64]
Choose: TypeAlias = Callable[[int, Ints], Ints]
"""`choose(step, prompts)`: parents (requests x width), ascending, of the survivors after output token `step` (from 1).

`prompts` are the prompt lengths of the requests that go on; of those that were asked about before they are the first.
"""


def lengths(dataset: str, num_requests: int) -> tuple[Ints, Ints]:
    """Prompt and output lengths as the reproduction's scenarios draw them, longest output first."""
    from kvsim.workload.lengths import draw_lengths
    from kvsim.workload.spec import LengthsSpec

    spec: dict[str, Any] = lengths_of(dataset)
    prompts, outputs = draw_lengths(LengthsSpec(**spec), np.random.default_rng(SEED), num_requests)
    order = np.argsort(-np.asarray(outputs), kind="stable")
    return np.asarray(prompts, np.int64)[order], np.asarray(outputs, np.int64)[order]


def saved(prompts: Ints, outputs: Ints, width: int, choose: Choose) -> float:
    """1 - blocks allocated / blocks without sharing, in percent, summed over all steps of all requests.

    Outputs descend. A step is counted once each of its beams holds its token.
    """
    common = np.repeat(prompts[:, None], width - 1, axis=1)
    used = without_sharing = 0
    for step in range(1, int(outputs[0])):
        alive = int(np.count_nonzero(outputs > step))
        texts = prompts[:alive] + step
        blocks = -(-texts // BLOCK_SIZE)
        used += int(blocks.sum() + (blocks[:, None] - common[:alive] // BLOCK_SIZE).sum())
        without_sharing += width * int(blocks.sum())
        common[:alive] = in_common(common[:alive], texts, choose(step, prompts[:alive]))
    return 100 * (1 - used / without_sharing)


def in_common(common: Ints, texts: Ints, parents: Ints) -> Ints:
    """Tokens that each survivor has in common with the next, from the same figure of their parents.

    `common` is requests x (width - 1), `texts` the parents' lengths in tokens, `parents` requests x width, ascending.
    """
    num_requests, width = parents.shape
    between = np.empty((num_requests, width, width), np.int64)
    for left in range(width):
        between[:, left, left] = texts
        for right in range(left + 1, width):
            between[:, left, right] = np.minimum(between[:, left, right - 1], common[:, right - 1])
    return between[np.arange(num_requests)[:, None], parents[:, :-1], parents[:, 1:]]
