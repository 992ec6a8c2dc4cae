"""A request of the vllm-v0 engine and its sequences, which run, wait and are swapped as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from kvsim.request import Request, Sequence, Status


class SequenceGroup:
    """One request and its samples or beams, in group order: the parent, then children in fork order.

    `live` are the sequences that still run, wait or are swapped; all of them have the same length. `order` is the group's place in running order, set when it joins: by arrival, ties by joining.
    """

    __slots__ = ("is_settled", "live", "num_sequences", "order", "request", "width_limit")

    def __init__(self, request: Request, parent: Sequence) -> None:
        self.request = request
        self.width_limit = request.sampling.num_sequences
        self.live: list[Sequence] = [parent]
        self.num_sequences = 1
        """Sequences made so far, ended ones included; the next child has this number."""
        self.order = 0
        self.is_settled = False
        """Its tails are its own, so that from here on it needs a block at block boundaries alone."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_beam(self) -> bool:
        return self.request.sampling.beam_width > 0

    @property
    def is_finished(self) -> bool:
        return not self.live

    @property
    def width(self) -> int:
        """Sequences it may run at once in the rest of its life: what the sequence limit and the victim rule count."""
        if self.is_beam or self.width_limit > self.num_sequences:
            return self.width_limit
        return len(self.live)

    @property
    def num_tokens(self) -> int:
        """Known tokens of each of its live sequences."""
        return self.live[0].num_tokens

    def set_status(self, status: Status) -> None:
        for seq in self.live:
            seq.status = status

    def __repr__(self) -> str:
        return f"<SequenceGroup {self.request_id} live={[seq.sample for seq in self.live]}>"


class BeamAction(NamedTuple):
    """One move of a beam search: `fork` beam number `beam`, or `free` it. Beams are numbered in fork order from 0."""

    kind: Literal["fork", "free"]
    beam: int


BeamPolicy: TypeAlias = Callable[[SequenceGroup, int], tuple[BeamAction, ...]]
"""`policy(group, step)`: the ordered moves after the group's output token number `step` (from 0).

Every live beam has that token already. A child forked here gets the next number; beams that reached their
output length are freed by the scheduler afterwards. Must depend on its arguments alone.
"""


def keep_all_beams(group: SequenceGroup, step: int) -> tuple[BeamAction, ...]:
    """Fork the parent to the full width after the first token; every beam survives to its end."""
    if step > 0:
        return ()
    return (BeamAction("fork", 0),) * (group.width_limit - 1)
