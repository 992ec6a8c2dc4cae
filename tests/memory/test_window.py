"""Sliding windows: a table goes round a ring of its own blocks, also when it is shared, copied and swapped."""

from __future__ import annotations

import random

import pytest

from kvsim.memory import PagedAllocator
from kvsim.testing import ShadowMemory
from kvsim.types import LawViolation, OutOfBlocks

BLOCK_SIZE, WINDOW = 4, 12


class Windowed:
    """An allocator with a window, and a shadow memory in which each sequence must read back its last tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.allocator = PagedAllocator(14, BLOCK_SIZE, num_host_blocks=8, sliding_window=WINDOW)
        self.shadow = ShadowMemory(BLOCK_SIZE)
        self.texts: dict[int, list[int]] = {}
        self.next_token = 0

    def write(self, seq: int, number: int) -> None:
        start = len(self.texts[seq])
        tokens = list(range(self.next_token, self.next_token + number))
        self.next_token += number
        self.texts[seq] += tokens
        self.shadow.write(self.allocator.block_table(seq), start, tokens)

    def step(self, seq: int) -> None:
        allocator, rng = self.allocator, self.rng
        known = list(self.texts)
        action = rng.choice(["allocate", "append", "append", "append", "fork", "free", "swap"])
        if action == "allocate" or not known:
            allocator.allocate(seq, number := rng.randint(1, 20))
            self.texts[seq] = []
            self.write(seq, number)
            return
        picked = rng.choice(known)
        if action == "append" and not allocator.is_swapped(picked):
            number = rng.choice([1, 1, 1, 3, 4, 9, 30])
            needed = allocator.num_blocks_to_append(picked, number)
            free = allocator.num_free_blocks
            self.shadow.copy(allocator.append_slots(picked, number))
            assert free - allocator.num_free_blocks == needed
            self.write(picked, number)
        elif action == "fork":
            allocator.fork(picked, seq)
            self.texts[seq] = self.texts[picked].copy()
        elif action == "free":
            allocator.free(picked)
            del self.texts[picked]
        elif action == "swap" and allocator.is_swapped(picked):
            self.shadow.swap_in(allocator.swap_in([picked]) or ())
        elif action == "swap":
            self.shadow.swap_out(allocator.swap_out([picked]) or ())

    def check(self) -> None:
        self.allocator.audit()
        for seq, text in self.texts.items():
            self.shadow.check(
                seq,
                self.allocator.block_table(seq),
                text,
                is_swapped=self.allocator.is_swapped(seq),
                first=max(0, len(text) - WINDOW),
            )


@pytest.mark.parametrize("seed", range(20))
def test_each_sequence_reads_back_its_window(seed: int) -> None:
    windowed = Windowed(seed)
    for seq in range(150):
        try:
            windowed.step(seq)
        except OutOfBlocks:
            windowed.allocator.free(victim := next(iter(windowed.texts)))
            del windowed.texts[victim]
        windowed.check()
    for seq in list(windowed.texts):
        windowed.allocator.free(seq)
    windowed.allocator.audit()
    assert (windowed.allocator.num_free_blocks, windowed.allocator.num_free_host_blocks) == (14, 8)
    assert windowed.allocator.num_filled_slots == 0


def test_an_unshared_window_never_holds_more_than_its_ring() -> None:
    allocator = PagedAllocator(3, BLOCK_SIZE, sliding_window=WINDOW)
    allocator.allocate(0, 1)
    for _ in range(100):
        assert allocator.append_slots(0) == ()
    assert allocator.usage().num_used == 3


def test_reading_below_the_window_is_an_error() -> None:
    windowed = Windowed(0)
    windowed.allocator.allocate(0, 5)
    windowed.texts[0] = []
    windowed.write(0, 5)
    windowed.allocator.append_slots(0, 10)
    windowed.write(0, 10)
    with pytest.raises(LawViolation, match="position 0"):
        windowed.shadow.check(0, windowed.allocator.block_table(0), windowed.texts[0], is_swapped=False)
