"""Paged memory without preemption: a request is admitted only if what it may need fits beside every promise made."""

from __future__ import annotations

from kvsim.memory.interface import PrefixMatch
from kvsim.request import Group
from kvsim.scheduling.builder import PlanBuilder
from kvsim.scheduling.paged import PagedScheduler


class NoEvictScheduler(PagedScheduler):
    """Engine `no-evict`: blocks for prompt + max output (of every sequence) are promised at admission."""

    may_preempt = False

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that the running requests may come to hold, those they hold included."""
        return sum(self._num_promised(group) for group in self.running.values())

    def _num_promised(self, group: Group) -> int:
        return self._num_worst_blocks(group, self._max_stored_tokens(group.request))

    def _describe_need(self, group: Group) -> str:
        return f"a promise of {self._num_promised(group)} blocks"

    def _describe_pool(self) -> str:
        return f"promised {self.num_promised_blocks} of {self.allocator.num_blocks}"

    def _has_room(self, group: Group, num_tokens: int, prefix: PrefixMatch, step: PlanBuilder) -> bool:
        watermark = self.watermark_blocks if self.running else 0
        free = self.allocator.num_blocks - watermark - self.num_promised_blocks
        if self._num_promised(group) > free:
            step.head_wait = "promises"
            step.head_slots = self._num_promised(group) * self.allocator.block_size
            return False
        return super()._has_room(group, num_tokens, prefix, step)
