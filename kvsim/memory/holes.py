"""An address space of slots: which extents are free, and which hole a request gets.

A placement decides both: `FitSpace` keeps the free holes as they are (first fit, best fit, worst fit),
`BuddySpace` cuts the space into aligned powers of two. Extents are pairs (start, size).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

Extent = tuple[int, int]
"""(start, size), in slots."""


class AddressSpace(Protocol):
    """What a placement offers; `size` below is always one that `extent_size` returned."""

    num_slots: int
    num_free: int
    """Slots in no extent."""
    max_extent: int
    """The largest extent an empty space can give."""

    @property
    def largest_hole(self) -> int:
        """The largest extent that can be taken now, 0 if none."""
        ...

    def extent_size(self, num_slots: int) -> int:
        """Slots that a request for `num_slots` takes up, rounding included."""
        ...

    def take(self, size: int) -> int | None:
        """Take a hole of `size` slots and return its start; None (nothing changed) if there is none."""
        ...

    def release(self, start: int, size: int) -> None:
        """Give an extent back; neighbouring holes merge."""
        ...

    def holes(self) -> tuple[Extent, ...]:
        """The free extents, by address."""
        ...

    def packed(self, extents: Sequence[Extent], room: int | None) -> dict[int, int]:
        """Where the taken extents go (old start -> new start, the unmoved left out) so that `room` slots fit.

        Empty if no packing makes that room; room None asks for the tightest packing.
        """
        ...

    def rebuild(self, extents: Iterable[Extent]) -> None:
        """Forget everything and take exactly these extents."""
        ...

    def check(self) -> str | None:
        """What is wrong with the free lists, or None."""
        ...


class FitSpace:
    """Holes of any size, found by first fit, best fit or worst fit; ties go to the lowest address.

    Taking and releasing cost O(log holes) look-ups; first fit scans the holes from the bottom.
    """

    def __init__(self, num_slots: int, rule: str) -> None:
        self.num_slots = num_slots
        self.rule = rule
        self.num_free = num_slots
        self.max_extent = num_slots
        self._size_at: dict[int, int] = {}
        self._starts: list[int] = []
        self._by_size: list[tuple[int, int]] = []
        if num_slots:
            self._add_hole(0, num_slots)

    @property
    def largest_hole(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def extent_size(self, num_slots: int) -> int:
        return num_slots

    def take(self, size: int) -> int | None:
        start = self._find(size)
        if start is None:
            return None
        hole_size = self._drop_hole(start)
        if hole_size > size:
            self._add_hole(start + size, hole_size - size)
        self.num_free -= size
        return start

    def _find(self, size: int) -> int | None:
        if size > self.largest_hole:
            return None
        if self.rule == "first_fit":
            return next(start for start in self._starts if self._size_at[start] >= size)
        wanted = size if self.rule == "best_fit" else self.largest_hole
        return self._by_size[bisect_left(self._by_size, (wanted, -1))][1]

    def release(self, start: int, size: int) -> None:
        self.num_free += size
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._drop_hole(start + size)
        if index > 0:
            below = self._starts[index - 1]
            if below + self._size_at[below] == start:
                size += self._drop_hole(below)
                start = below
        self._add_hole(start, size)

    def _add_hole(self, start: int, size: int) -> None:
        self._size_at[start] = size
        insort(self._starts, start)
        insort(self._by_size, (size, start))

    def _drop_hole(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size

    def holes(self) -> tuple[Extent, ...]:
        return tuple((start, self._size_at[start]) for start in self._starts)

    def packed(self, extents: Sequence[Extent], room: int | None) -> dict[int, int]:
        """Slides down only what lies between the holes whose merging is cheapest."""
        low, high = (0, self.num_slots) if room is None else self._cheapest_window(room)
        moves: dict[int, int] = {}
        for start, size in sorted(extents):
            if low <= start < high:
                if start != low:
                    moves[start] = low
                low += size
        return moves

    def _cheapest_window(self, room: int) -> Extent:
        """From the start of one hole to the start of another, so that holes of `room` slots have the fewest between."""
        holes = self.holes()
        best, best_cost = (0, 0), self.num_slots
        first, gathered = 0, 0
        for last_start, last_size in holes:
            gathered += last_size
            while gathered >= room:
                first_start, first_size = holes[first]
                cost = last_start - first_start - (gathered - last_size)
                if cost < best_cost:
                    best, best_cost = (first_start, last_start), cost
                gathered -= first_size
                first += 1
        return best

    def rebuild(self, extents: Iterable[Extent]) -> None:
        self._size_at, self._starts, self._by_size = {}, [], []
        self.num_free = self.num_slots
        end = 0
        for start, size in sorted(extents):
            if start > end:
                self._add_hole(end, start - end)
            self.num_free -= size
            end = start + size
        if end < self.num_slots:
            self._add_hole(end, self.num_slots - end)

    def check(self) -> str | None:
        holes = self.holes()
        if self._by_size != sorted((size, start) for start, size in holes):
            return "the two orders of the hole list differ"
        for (start, size), (next_start, _) in pairwise(holes):
            if start + size >= next_start:
                return f"holes at {start} and {next_start} overlap or were not merged"
        return None


class BuddySpace:
    """Aligned powers of two, halved on demand and merged with their buddy when both halves are free.

    A space that is no power of two is a row of ever smaller powers (15,728 slots: 8192, 4096, 2048, 1024, 256, 64,
    32, 16), each at an address aligned to itself; requests are rounded up to a power of two. The smallest
    sufficient hole is halved, the lowest address first. (Knuth, The Art of Computer Programming, 2.5.)
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self.max_extent = 1 << num_slots.bit_length() - 1 if num_slots else 0
        self._free: list[list[int]] = []
        """Starts of the holes of 2^k slots, sorted, at index k."""
        self._orders = 0
        """Bit k says whether there is a hole of 2^k slots."""
        self._clear()

    def _clear(self) -> None:
        self.num_free = self.num_slots
        self._free = [[] for _ in range(self.num_slots.bit_length())]
        self._orders = 0
        for start, size in self._roots():
            self._add_hole(size.bit_length() - 1, start)

    def _roots(self) -> list[Extent]:
        roots, start = [], 0
        for order in reversed(range(self.num_slots.bit_length())):
            if self.num_slots >> order & 1:
                roots.append((start, 1 << order))
                start += 1 << order
        return roots

    @property
    def largest_hole(self) -> int:
        return 1 << self._orders.bit_length() - 1 if self._orders else 0

    def extent_size(self, num_slots: int) -> int:
        return 1 << (num_slots - 1).bit_length() if num_slots > 0 else 0

    def take(self, size: int) -> int | None:
        order = size.bit_length() - 1
        sufficient = self._orders >> order
        if not sufficient:
            return None
        source = order + (sufficient & -sufficient).bit_length() - 1
        start = self._free[source][0]
        self._drop_hole(source, start)
        for k in reversed(range(order, source)):
            self._add_hole(k, start + (1 << k))
        self.num_free -= size
        return start

    def release(self, start: int, size: int) -> None:
        self.num_free += size
        order = size.bit_length() - 1
        # The buddy of a whole root lies beyond the space or in a smaller root, so it is never free at this order.
        while self._drop_hole(order, start ^ (1 << order)):
            start &= ~(1 << order)
            order += 1
        self._add_hole(order, start)

    def _add_hole(self, order: int, start: int) -> None:
        insort(self._free[order], start)
        self._orders |= 1 << order

    def _drop_hole(self, order: int, start: int) -> bool:
        starts = self._free[order]
        index = bisect_left(starts, start)
        if index == len(starts) or starts[index] != start:
            return False
        del starts[index]
        if not starts:
            self._orders ^= 1 << order
        return True

    def holes(self) -> tuple[Extent, ...]:
        return tuple(sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts))

    def packed(self, extents: Sequence[Extent], room: int | None) -> dict[int, int]:
        """The largest first, so that nothing is lost between them; an extent that lies well already stays."""
        dense = BuddySpace(self.num_slots)
        moves: dict[int, int] = {}
        for size in sorted({size for _, size in extents}, reverse=True):
            starts = [start for start, other in extents if other == size]
            targets = [dense._take_for_certain(size) for _ in starts]
            misplaced = sorted(set(starts) - set(targets))
            vacant = sorted(set(targets) - set(starts))
            moves.update(zip(misplaced, vacant, strict=True))
        return moves if room is None or dense.largest_hole >= room else {}

    def _take_for_certain(self, size: int) -> int:
        start = self.take(size)
        if start is None:
            raise ValueError(f"extents of {size} slots do not fit into {self.num_slots} slots")
        return start

    def rebuild(self, extents: Iterable[Extent]) -> None:
        self._clear()
        for start, size in extents:
            self._take_at(start, size)

    def _take_at(self, start: int, size: int) -> None:
        order = size.bit_length() - 1
        source = next(k for k in range(order, len(self._free)) if self._drop_hole(k, start >> k << k))
        for k in reversed(range(order, source)):
            self._add_hole(k, (start >> k ^ 1) << k)
        self.num_free -= size

    def check(self) -> str | None:
        for order, starts in enumerate(self._free):
            if bool(starts) != bool(self._orders >> order & 1):
                return f"the orders with holes are {self._orders:b}, order {order} has {len(starts)}"
            if starts != sorted(set(starts)):
                return f"the free list of order {order} is out of order or repeats"
            for start in starts:
                if start % (1 << order):
                    return f"the hole of {1 << order} slots at {start} is not aligned"
                if start ^ (1 << order) in starts:
                    return f"the hole of {1 << order} slots at {start} was not merged with its buddy"
        return None


def make_space(num_slots: int, placement: str) -> AddressSpace:
    """The address space of a placement's name."""
    if placement == "buddy":
        return BuddySpace(num_slots)
    return FitSpace(num_slots, placement)
