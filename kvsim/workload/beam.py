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

from kvsim.workload.streams import mix

_UNIT = 2.0**-53


def parents(seed: int, step: int, width: int, theta: float = 1.0) -> tuple[int, ...]:
    """For each of `width` survivors of step number `step` the index of the beam it continues, ascending.

    A pure function: the same arguments give the same parents on every engine. `seed` is the request's.
    """
    if width <= 1 or theta <= 0:
        return tuple(range(width))
    shares = _shares(seed, step, width, theta)
    offset = _uniform(seed, step, 2 * width)
    survivors: list[int] = []
    total = 0.0
    for beam, share in enumerate(shares):
        total += share * width
        survivors.extend([beam] * (math.floor(total - offset) + 1 - len(survivors)))
    # Rounding errors of the sum must not lose the last survivor.
    survivors.extend([width - 1] * (width - len(survivors)))
    return tuple(survivors[:width])


def _shares(seed: int, step: int, width: int, theta: float) -> list[float]:
    scores = [_normal(seed, step, beam) for beam in range(width)]
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
