"""What every scheduler does: take requests, plan a step, apply what it produced.

A scheduler owns its sequences and queues. It must not read a clock, draw random numbers of its own, or look at
`output_len` for anything but the end of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from kvsim.memory.interface import KVAllocator
from kvsim.request import Request, Sequence
from kvsim.scheduling.plan import Rejection, StepOutcome, StepPlan
from kvsim.types import Ns


class Scheduler(Protocol):
    """Plans engine iterations; see the loop in `kvsim.sim.server`."""

    allocator: KVAllocator

    def submit(self, request: Request) -> Rejection | None:
        """Take a request in; a rejection says why it can never be served, with both numbers."""
        ...

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End a request wherever it is and free its blocks; empty if it is unknown or has ended (harmless)."""
        ...

    @property
    def has_work(self) -> bool:
        """Some request is waiting, running or swapped."""
        ...

    def schedule(self, now: Ns) -> StepPlan:
        """Decide one iteration. Tokens planned here count as stored from here on."""
        ...

    def complete(self, plan: StepPlan) -> StepOutcome:
        """Apply the iteration's tokens: forks, finished sequences free their blocks."""
        ...

    def live_sequences(self) -> Seq[Sequence]:
        """Every sequence that has a table or waits, settled; for audits, abort and reports, not for the hot path."""
        ...

    def describe_block(self) -> str:
        """One sentence on the head of the queue: what it needs and what the pool has (for deadlock reports)."""
        ...
