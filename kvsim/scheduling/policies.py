"""What a scheduler may decide otherwise, as plain functions: queue order, victim, preemption mode, gate, beams.

A scenario replaces any of them by `package.module:name`. They see groups (requests as the engine runs them) and
must depend on their arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Reversible
from random import Random
from typing import Protocol, TypeAlias

from kvsim.memory.interface import KVAllocator
from kvsim.request import Group

QueueOrder: TypeAlias = Callable[[Group], tuple[object, ...]]
"""Sort key of the waiting queue, smallest first; None in its place is first come, first served."""

PreemptionMode: TypeAlias = Callable[[Group, KVAllocator], bool]
"""Shall this victim be swapped to the host (True), or recomputed?"""

Gate: TypeAlias = Callable[[Group, KVAllocator], bool]
"""May the head of the queue be admitted now? Asked beside the scheduler's own tests; False stops admission."""

BeamPolicy: TypeAlias = Callable[[int, int, int, int], list[int]]
"""`policy(seed, step, num_beams, width)`: how many children each beam leaves after output token `step`; sum = width."""


class Running(Reversible[Group], Protocol):
    """Running groups in the order in which they joined; iterates both ways."""

    def __len__(self) -> int: ...


Victim: TypeAlias = Callable[[Running], Group]
"""Who gives its blocks back when they run out."""


def by_priority(group: Group) -> tuple[object, ...]:
    """Most urgent first, then earliest, then smallest id as a string."""
    request = group.request
    return (request.priority, request.arrival_ns, request.request_id)


def last_admitted(running: Running) -> Group:
    """Preempt the youngest: it has the least work to lose."""
    return next(iter(reversed(running)))


def least_urgent(running: Running) -> Group:
    """Preempt the largest (priority, arrival); on a full tie the one that joined last."""
    return max(reversed(running), key=_urgency)


def least_urgent_oldest(running: Running) -> Group:
    """As `least_urgent`, but on a full tie the one that joined first (vLLM V1).

    Two requests that tie can take each other's blocks in turn for ever: whoever comes back has joined last.
    """
    return max(running, key=_urgency)


BLIND_VICTIMS: tuple[Victim, ...] = (last_admitted, least_urgent, least_urgent_oldest)
"""Those that look at no sequence: the counters of the calendar's members need not be brought up to date for them."""


def _urgency(group: Group) -> tuple[int, int]:
    return (group.request.priority, group.request.arrival_ns)


def recompute(group: Group, allocator: KVAllocator) -> bool:
    """Throw the victim's blocks away."""
    return False


def swap(group: Group, allocator: KVAllocator) -> bool:
    """Move the victim's blocks to the host; without room there it is recomputed all the same."""
    return True


def swap_forked(group: Group, allocator: KVAllocator) -> bool:
    """Swap groups whose sequences share blocks, recompute single sequences (the paper's engine)."""
    return len(group.seqs) > 1


PREEMPTION_MODES: dict[str, PreemptionMode] = {"recompute": recompute, "swap": swap, "swap_forked": swap_forked}


def random_beams(seed: int, step: int, num_beams: int, width: int) -> list[int]:
    """Every survivor descends from a beam chosen at random, by the request's own seed."""
    rng = Random(seed * 1_000_003 + step)
    children = [0] * num_beams
    for _ in range(width):
        children[rng.randrange(num_beams)] += 1
    return children
