"""Moves of a beam search in the vllm-v0 engine, in the order in which that engine makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from kvsim.request import Group
from kvsim.scheduling.policies import BeamPolicy


class BeamAction(NamedTuple):
    """Fork beam number `beam`, or free it. Beams are numbered in fork order; the parent is 0."""

    kind: Literal["fork", "free"]
    beam: int


BeamMoves: TypeAlias = Callable[[Group, int], list[BeamAction]]
"""`moves(group, step)`: the ordered moves after the group's output token number `step` (from 0).

Every beam has that token already. A child forked here gets the next number; beams that reached their output
length are freed by the scheduler afterwards.
"""


def moves_of(policy: BeamPolicy) -> BeamMoves:
    """The moves that follow from how many children each beam has: childless beams are freed first.

    Beams that have reached their output length have no children.
    """

    def moves(group: Group, step: int) -> list[BeamAction]:
        if group.seqs[0].num_output_tokens >= group.seqs[0].output_len:
            return []
        beams = [seq.sample for seq in group.seqs]
        counts = policy(group.request.seed, step, len(beams), group.request.sampling.beam_width)
        freed = [BeamAction("free", beam) for beam, count in zip(beams, counts, strict=True) if not count]
        # A beam is its own last child.
        forked = [BeamAction("fork", beam) for beam, count in zip(beams, counts, strict=True) for _ in range(count - 1)]
        return freed + forked

    return moves
