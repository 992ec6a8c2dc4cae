"""The public kit finds every seeded fault, and finds nothing in the real allocator."""

from __future__ import annotations

import pytest
from mutants.mutant_allocators import MUTANTS, Unaudited

from kvsim.memory import NO_MATCH, PagedAllocator, PrefixKeys
from kvsim.testing import LawViolation, check_allocator
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError

MAX_EXAMPLES = 400


def small(cls: type[PagedAllocator]) -> PagedAllocator:
    return cls(10, 4, num_host_blocks=8, enable_prefix_caching=True)


@pytest.mark.parametrize("cls", [Unaudited, *MUTANTS.values()], ids=lambda cls: cls.__name__)
def test_survives_20_ordinary_operations(cls: type[PagedAllocator]) -> None:
    allocator = cls(40, 4, num_host_blocks=40, enable_prefix_caching=True)
    texts = {name: PrefixKeys(TokenStream.from_segment(source, 40), None, 4) for source, name in enumerate("abcd", 1)}
    allocator.allocate("a", 6, keys=texts["a"])
    allocator.append_slots("a")
    allocator.append_slots("a")
    allocator.append_slots("a")
    allocator.allocate("b", 7, keys=texts["b"])
    allocator.append_slots("b", 3)
    allocator.register("a", 9)
    allocator.fork("a", "c", keys=texts["c"])
    allocator.append_slots("c")
    allocator.append_slots("a", 5)
    allocator.swap_out(["b"])
    allocator.swap_in(["b"])
    allocator.append_slots("b")
    allocator.free("c")
    allocator.register("a", 14)
    allocator.free("a")
    match = allocator.match_prefix(texts["a"], 10)
    allocator.allocate("d", 10, keys=texts["a"], prefix=match if match.num_tokens < 10 else NO_MATCH)
    allocator.append_slots("d")
    allocator.free("b")
    allocator.free("d")


def num_examples_needed(cls: type[PagedAllocator]) -> int:
    """Histories until the kit finds the fault."""
    made: list[PagedAllocator] = []

    def factory() -> PagedAllocator:
        made.append(small(cls))
        return made[-1]

    # A broken allocator may also die of itself, before any law is looked at.
    with pytest.raises((LawViolation, AllocatorError, LookupError, AttributeError)) as found:
        check_allocator(factory, max_examples=MAX_EXAMPLES, eviction="lru", shrink=False)
    print(f"{cls.__name__:30} {len(made):4} {type(found.value).__name__} {found.value}")
    return len(made)


@pytest.mark.parametrize("cls", MUTANTS.values(), ids=lambda cls: cls.__name__)
def test_kit_finds(cls: type[PagedAllocator]) -> None:
    assert num_examples_needed(cls) <= MAX_EXAMPLES


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 25
