"""Waiting queues: first come, first served, or sorted by a key."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from kvsim.request import Group
from kvsim.scheduling.policies import QueueOrder


class GroupQueue(Protocol):
    """Groups in the order in which they are to be admitted."""

    def add(self, group: Group) -> None:
        """A group arrives."""
        ...

    def add_front(self, group: Group) -> None:
        """A group that ran comes back."""
        ...

    def put_back(self, groups: Iterable[Group]) -> None:
        """Groups that were set aside return to the front, in their order."""
        ...

    def head(self) -> Group: ...

    def pop_head(self) -> Group: ...

    def remove(self, group: Group) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Group]: ...


class FcfsQueue(deque[Group]):
    """First come, first served; a preempted group goes to the front."""

    add = deque[Group].append
    add_front = deque[Group].appendleft
    pop_head = deque[Group].popleft

    def put_back(self, groups: Iterable[Group]) -> None:
        self.extendleft(reversed(list(groups)))

    def head(self) -> Group:
        return self[0]


class SortedQueue:
    """Smallest key first, whoever comes when."""

    def __init__(self, order: QueueOrder) -> None:
        self._order: Any = order
        self._groups: list[Group] = []

    def add(self, group: Group) -> None:
        insort(self._groups, group, key=self._order)

    add_front = add

    def put_back(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.add(group)

    def head(self) -> Group:
        return self._groups[0]

    def pop_head(self) -> Group:
        return self._groups.pop(0)

    def remove(self, group: Group) -> None:
        self._groups.remove(group)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)


def make_queue(order: QueueOrder | None) -> GroupQueue:
    """A queue in the given order; None is first come, first served."""
    return FcfsQueue() if order is None else SortedQueue(order)
