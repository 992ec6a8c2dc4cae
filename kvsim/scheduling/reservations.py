"""How many slots a contiguous engine sets aside for a request: the three Orca variants of the PagedAttention paper.

A reservation answers with the slots **beyond the prompt**; the region has `prompt_len` plus these.
The textbook case: a request of (P, O) = (2, 4) that is given 8 slots stores 5 in the end. With 3 stored, 2 are
reserved (they will be filled) and 3 are internal fragmentation (they never will).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvsim.request import Request
from kvsim.types import ScenarioError


class Reservation(Protocol):
    """Slots to set aside beyond the prompt for one sample of a request: at least what it will store.

    Prompt and output together never exceed `max_model_len`: generation stops there.
    """

    def __call__(self, request: Request, sample: int = 0) -> int: ...


def _slots_to_fill(request: Request, sample: int, max_model_len: int) -> int:
    """Slots the output fills: the KV of its last token is never computed, and generation stops at `max_model_len`."""
    return min(request.sample_len(sample), max_model_len - request.prompt_len) - 1


def reserve_max(max_model_len: int) -> Reservation:
    """Always `max_model_len` slots in total, whatever the request (Orca Max)."""

    def slots(request: Request, sample: int = 0) -> int:
        return max(0, max_model_len - request.prompt_len)

    return slots


def reserve_pow2(max_model_len: int) -> Reservation:
    """The output rounded up to a power of two, 25 -> 32; at most `max_model_len` with the prompt (Orca Pow2)."""

    def slots(request: Request, sample: int = 0) -> int:
        rounded = 1 << (request.sample_len(sample) - 1).bit_length()
        return max(0, min(rounded, max_model_len - request.prompt_len))

    return slots


def reserve_oracle(max_model_len: int) -> Reservation:
    """Exactly what will be filled, P + O - 1 slots in total (Orca Oracle): its internal fragmentation is 0.

    The O-th token is emitted but never stored, so one slot more would be waste by definition.
    """

    def slots(request: Request, sample: int = 0) -> int:
        return max(0, _slots_to_fill(request, sample, max_model_len))

    return slots


RESERVATIONS: dict[str, Callable[[int], Reservation]] = {
    "max": reserve_max,
    "pow2": reserve_pow2,
    "oracle": reserve_oracle,
}


def make_reservation(name: str, max_model_len: int) -> Reservation:
    """The reservation of that name; raises ScenarioError for an unknown one."""
    if name not in RESERVATIONS:
        raise ScenarioError(f"reservation is {name!r}; it is one of {', '.join(RESERVATIONS)}")
    return RESERVATIONS[name](max_model_len)
