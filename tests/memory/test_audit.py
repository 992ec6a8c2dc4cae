"""The audit: each law, broken by hand in an otherwise sound allocator, is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsim.memory import PagedAllocator, PrefixKeys
from kvsim.tokens import TokenStream
from kvsim.types import LawViolation


def busy() -> PagedAllocator:
    """Two sharers of 6 tokens, one cached text in use, one idle, one sequence on the host."""
    allocator = PagedAllocator(12, 4, num_host_blocks=4, enable_prefix_caching=True)
    for source, seq in enumerate(("idle", "cached"), start=1):
        allocator.allocate(seq, 8, keys=PrefixKeys(TokenStream.from_segment(source, 8), None, 4))
        allocator.register(seq, 8)
    allocator.free("idle")
    allocator.allocate("parent", 6)
    allocator.fork("parent", "child")
    allocator.allocate("host", 5)
    allocator.swap_out(["host"])
    allocator.audit()
    return allocator


def _block(allocator: PagedAllocator, seq: str, index: int = 0) -> int:
    return allocator.block_table(seq)[index]


def _lose_a_free_block(allocator: PagedAllocator) -> None:
    allocator.pool.free.take()


def _miscount_the_free(allocator: PagedAllocator) -> None:
    allocator.pool.num_free -= 1


def _free_a_block_twice(allocator: PagedAllocator) -> None:
    allocator.pool.ref[_block(allocator, "parent")] += 1


def _use_a_free_block(allocator: PagedAllocator) -> None:
    allocator.tables()["cached"].block_ids[1] = allocator.free_block_ids()[0]


def _name_a_stranger(allocator: PagedAllocator) -> None:
    allocator.host.ref[0] = 0


def _hold_too_much(allocator: PagedAllocator) -> None:
    allocator.tables()["cached"].num_tokens = 4


def _disagree_on_the_fill(allocator: PagedAllocator) -> None:
    allocator.tables()["child"].num_tokens = 7


def _forget_a_text(allocator: PagedAllocator) -> None:
    allocator.index.run_of[_block(allocator, "cached")] = None


def _swap_two_texts(allocator: PagedAllocator) -> None:
    allocator.tables()["cached"].block_ids.reverse()


def _miscount(allocator: PagedAllocator) -> None:
    allocator._num_logical += 1


BREAKS: list[tuple[Callable[[PagedAllocator], None], int]] = [
    (_lose_a_free_block, 4),
    (_miscount_the_free, 4),
    (_free_a_block_twice, 4),
    (_use_a_free_block, 4),
    (_name_a_stranger, 4),
    (_hold_too_much, 13),
    (_disagree_on_the_fill, 8),
    (_forget_a_text, 11),
    (_swap_two_texts, 11),
    (_miscount, 12),
]


@pytest.mark.parametrize(("break_it", "law"), BREAKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_broken_law_is_named(break_it: Callable[[PagedAllocator], None], law: int) -> None:
    allocator = busy()
    break_it(allocator)
    with pytest.raises(LawViolation, match=rf"^law {law}: "):
        allocator.audit()


def test_a_table_that_names_a_block_twice_is_found() -> None:
    allocator = PagedAllocator(4, 4)
    allocator.allocate("a", 6)
    table = allocator.tables()["a"].block_ids
    allocator.pool.ref[table[1]] = 0
    allocator.pool.free.extend([table[1]])
    table[1] = table[0]
    with pytest.raises(LawViolation, match=r"^law 8: the table of 'a' names a block twice"):
        allocator.audit()
