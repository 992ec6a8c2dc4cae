"""Which beams survive a step of beam search, and whose children they are: a seeded model without a language model.

Real beam search keeps the best `width` of `width * vocabulary` candidates. How many of a beam's children survive
depends on how far its score is ahead. Here the scores of the beams of one step differ by normal noise of standard
deviation `theta` (in nats), a beam's expected share of the survivors is the softmax of its score, and the shares are
rounded to whole children by systematic resampling: each beam gets its share rounded down or up.

`theta` is the model's one parameter, and what it does to sharing is this: 0 gives every beam exactly one child, so
that beams never meet again and share no more than the prompt. The larger it is, the more survivors descend from few
parents, the more recent their common ancestor, and the more blocks are shared. Infinity lets one beam take all: the
survivors share everything but the last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvsim.workload.streams import mix

_UNIT = 2.0**-53


def children(seed: int, step: int, num_beams: int, width: int, theta: float = 1.0) -> list[int]:
    """How many of the `width` survivors of step number `step` continue each of `num_beams` beams.

    A pure function: the same arguments give the same children on every engine. `seed` is the request's.
    """
    offset = _uniform(seed, step, 2 * num_beams)
    counts: list[int] = []
    total, given = 0.0, 0
    for share in _shares(seed, step, num_beams, theta):
        total += share * width
        upto = min(width, max(given, math.floor(total - offset) + 1))
        counts.append(upto - given)
        given = upto
    # Rounding errors of the sum must not lose the last survivor.
    counts[-1] += width - given
    return counts


def parents(seed: int, step: int, width: int, theta: float = 1.0) -> tuple[int, ...]:
    """For each of `width` survivors, of as many beams, the index of the beam it continues, ascending."""
    counts = children(seed, step, width, width, theta)
    return tuple(beam for beam, count in enumerate(counts) for _ in range(count))


def beam_policy(theta: float = 1.0) -> Callable[[int, int, int, int], list[int]]:
    """The model with its parameter fixed, as schedulers take it: `policy(seed, step, num_beams, width)`."""

    def policy(seed: int, step: int, num_beams: int, width: int) -> list[int]:
        return children(seed, step, num_beams, width, theta)

    return policy


def _shares(seed: int, step: int, num_beams: int, theta: float) -> list[float]:
    if theta <= 0:
        return [1 / num_beams] * num_beams
    scores = [_normal(seed, step, beam) for beam in range(num_beams)]
    best = max(scores)
    if math.isinf(theta):
        weights = [float(score == best) for score in scores]
    else:
        weights = [math.exp(theta * (score - best)) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def _uniform(seed: int, step: int, draw: int) -> float:
    """A number in (0, 1) that depends on the arguments alone."""
    return ((mix(seed, step, draw) >> 11) + 0.5) * _UNIT


def _normal(seed: int, step: int, beam: int) -> float:
    radius = math.sqrt(-2 * math.log(_uniform(seed, step, 2 * beam)))
    return radius * math.cos(2 * math.pi * _uniform(seed, step, 2 * beam + 1))
