"""The orders of the free list against the rules as they are written, over one plain list."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsim.memory.block_pool import FREE_LIST_POLICIES, BlockPool

NUM_BLOCKS = 9


class PlainPool:
    """One list, searched and rebuilt as the rules say."""

    def __init__(self, policy: str, first_block: int) -> None:
        self.policy = policy
        self.free = list(range(first_block, NUM_BLOCKS))
        self.ref = [0] * NUM_BLOCKS
        self.was_shared = [False] * NUM_BLOCKS
        self.texts: list[str | None] = [None] * NUM_BLOCKS

    def take(self, count: int) -> list[int]:
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        block_id = self.free[-1] if self.policy == "lifo" else self.free[0]
        if self.policy == "exclusive_first":
            block_id = next((block_id for block_id in self.free if not self.was_shared[block_id]), block_id)
        self.free.remove(block_id)
        self.ref[block_id] = 1
        self.was_shared[block_id] = False
        self.texts[block_id] = None
        return block_id

    def refer(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            if not self.ref[block_id]:
                self.free.remove(block_id)
            self.ref[block_id] += 1
            self.was_shared[block_id] = True

    def release(self, table: list[int]) -> list[int]:
        walk = table if self.policy == "lifo" else table[::-1]
        freed = []
        for block_id in walk:
            self.ref[block_id] -= 1
            if not self.ref[block_id]:
                freed.append(block_id)
        is_put_in_front = [self.policy == "lru" and self.texts[block_id] is None for block_id in freed]
        front = [block_id for block_id, in_front in zip(freed, is_put_in_front, strict=True) if in_front]
        back = [block_id for block_id, in_front in zip(freed, is_put_in_front, strict=True) if not in_front]
        self.free = front + self.free + back
        return freed


COMMANDS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "share", "release", "release", "fill", "hit"]), st.integers(0, 40)),
    max_size=60,
)


@pytest.mark.parametrize("can_pull", [True, False])
@pytest.mark.parametrize("policy", FREE_LIST_POLICIES)
@example(commands=[("take", 1), ("fill", 0), ("release", 0), ("hit", 0)], num_reserved=0)
@given(commands=COMMANDS, num_reserved=st.integers(0, 1))
def test_every_order_is_that_of_its_rule(policy: str, can_pull: bool, commands, num_reserved: int) -> None:
    plain = PlainPool(policy, num_reserved)
    pool = BlockPool(NUM_BLOCKS, policy, num_reserved=num_reserved, can_pull=can_pull, texts=plain.texts)
    tables: list[list[int]] = []
    for name, number in commands:
        table = tables[number % len(tables)] if tables else []
        match name:
            case "take":
                count = min(number % 4, len(plain.free))
                taken = pool.take(count)
                assert taken == plain.take(count)
                tables.append(taken)
            case "share" if table:
                for block_id in table:
                    pool.share(block_id)
                plain.refer(table)
                tables.append(table.copy())
            case "release" if table:
                tables.remove(table)
                assert pool.release(table) == plain.release(table)
            case "fill" if table:
                for block_id in table[: 1 + number % 3]:
                    plain.texts[block_id] = "cached"
            case "hit" if can_pull and any(plain.texts):
                hits = [block_id for block_id, text in enumerate(plain.texts) if text][: 1 + number % 3]
                num_idle = sum(not plain.ref[block_id] for block_id in hits)
                assert pool.hit_all(hits) == num_idle
                plain.refer(hits)
                tables.append(hits)
        assert pool.ref == plain.ref
        assert pool.num_shared == sum(count > 1 for count in plain.ref)
        assert pool.num_free == len(plain.free)
        assert _in_order_of_use(policy, pool) == _in_order_of_use(policy, plain)


def _in_order_of_use(policy: str, pool: BlockPool | PlainPool) -> list[int]:
    """Free blocks as they will be handed out, of a pool whose own list may name them in two queues."""
    free = list(pool.free)
    if policy == "exclusive_first":
        free.sort(key=lambda block_id: pool.was_shared[block_id])
    return free[::-1] if policy == "lifo" else free
