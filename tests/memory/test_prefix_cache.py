"""The prefix cache against the rule as it is written: a list of carriers for every text up to the end of a block."""

from __future__ import annotations

import random

import pytest

from kvsim.memory import PagedAllocator, PrefixKeys
from kvsim.memory.block_pool import FREE_LIST_POLICIES
from kvsim.memory.journal import Journal
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, AllocStatus

SIZE = 2
TEXTS = [
    (1,) * 16,
    (1,) * 16,
    (1,) * 16,
    (*(1,) * 6, *(2,) * 10),
    (*(1,) * 6, *(2,) * 4, *(1,) * 6),
    (2,) * 10,
]
"""What requests say, prompt and output: they part after some blocks, or not at all."""


class PlainCache:
    """Every block is told of at once, and found by its whole text."""

    def __init__(self) -> None:
        self.carriers: dict[tuple[int, ...], list[int]] = {}
        self.text_of: dict[int, tuple[int, ...]] = {}

    def register(self, table: tuple[int, ...], text: tuple[int, ...], num_tokens: int) -> None:
        for index in range(num_tokens // SIZE):
            if table[index] not in self.text_of:
                prefix = self.text_of[table[index]] = text[: (index + 1) * SIZE]
                self.carriers.setdefault(prefix, []).append(table[index])

    def forget(self, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            if block_id in self.text_of:
                self.carriers[self.text_of.pop(block_id)].remove(block_id)

    def find(self, text: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        found: list[int] = []
        for index in range((num_tokens - 1) // SIZE):
            carriers = self.carriers.get(text[: (index + 1) * SIZE])
            if not carriers:
                break
            found.append(carriers[0])
        return tuple(found)


class Twins:
    """An allocator, and beside it the plain cache that is told of everything it does."""

    def __init__(self, num_blocks: int, free_list: str, is_watched: bool) -> None:
        journal = Journal() if is_watched else None
        self.allocator = PagedAllocator(
            num_blocks, SIZE, enable_prefix_caching=True, free_list=free_list, journal=journal
        )
        self.plain = PlainCache()
        self.running: dict[int, int] = {}
        """The text of every sequence."""
        self.keys = [PrefixKeys(TokenStream.from_ids(text), None, SIZE) for text in TEXTS]
        self.num_started = 0

    def look(self, number: int) -> None:
        text = TEXTS[number]
        match = self.allocator.match_prefix(self.keys[number], len(text))
        assert match.block_ids == self.plain.find(text, len(text))

    def start(self, number: int, num_tokens: int, is_told: bool) -> None:
        """Who was preempted comes back with the keys that it had, and a twin of it may run."""
        match = self.allocator.match_prefix(self.keys[number], num_tokens)
        assert match.block_ids == self.plain.find(TEXTS[number], num_tokens)
        if self.allocator.can_allocate(num_tokens, prefix=match) is not AllocStatus.OK:
            return
        seq = self.num_started
        self.num_started += 1
        self.allocator.allocate(seq, num_tokens, keys=self.keys[number], prefix=match)
        self.running[seq] = number
        table = self.allocator.block_table(seq)
        self.plain.forget(table[len(match.block_ids) :])
        if is_told:
            self.register(seq)

    def register(self, seq: int, num_tokens: int | None = None) -> None:
        num_tokens = num_tokens or self.allocator.num_tokens(seq)
        self.allocator.register(seq, num_tokens)
        self.plain.register(self.allocator.block_table(seq), TEXTS[self.running[seq]], num_tokens)

    def decode(self, is_alone: bool) -> None:
        """A token for each: a block for those that need one, then those that fill one make it findable."""
        lengths = {seq: self.allocator.num_tokens(seq) for seq in self.running}
        lengths = {seq: length for seq, length in lengths.items() if length < len(TEXTS[self.running[seq]])}
        crossing = [seq for seq, length in lengths.items() if length % SIZE == 0]
        for seq in crossing[: self.allocator.grow_each(crossing)]:
            self.plain.forget(self.allocator.block_table(seq)[-1:])
        filling = [seq for seq, length in lengths.items() if length % SIZE]
        if is_alone:
            for seq in filling:
                self.allocator.append_slots(seq, 1)
                self.register(seq)
            return
        self.allocator.fill_each(filling)
        for seq in filling:
            self.plain.register(self.allocator.block_table(seq), TEXTS[self.running[seq]], lengths[seq] + 1)

    def take_back(self, seq: int) -> None:
        """The last token is not computed after all."""
        table, num_kept = self.allocator.block_table(seq), self.allocator.num_tokens(seq) - 1
        if not self.allocator.is_shared(table[-1]):
            self.allocator.unregister(seq, num_kept)
            self.plain.forget(table[num_kept // SIZE :])

    def end(self, seq: int) -> None:
        self.allocator.free(seq)
        del self.running[seq]

    def compare(self) -> None:
        """The same blocks carry the same text, in the same order."""
        carriers: dict[object, list[int]] = {}
        for block_id, (run, place) in self.allocator.index.places():
            carriers.setdefault((run, place), []).append(block_id)
        assert sorted(carriers.values()) == sorted(filter(None, self.plain.carriers.values()))
        assert self.allocator.num_hashed_blocks == len(self.plain.text_of)
        self.allocator.audit()

    def do(self, name: str, number: int) -> None:
        text = number % len(TEXTS)
        seq = list(self.running)[number % len(self.running)] if self.running else None
        match name:
            case "start":
                self.start(text, 1 + number % 9, is_told=number % 4 > 0)
            case "register" if seq is not None:
                self.register(seq)
            case "decode":
                self.decode(is_alone=number % 4 == 0)
            case "look":
                self.look(text)
            case "end" if seq is not None:
                self.end(seq)
            case "take back" if seq is not None:
                self.take_back(seq)
            case "preempt" if seq is not None:
                self.take_back(seq)
                self.end(seq)
        assert self.allocator.usage().num_cached_idle == sum(
            not self.allocator.ref_count(block_id) for block_id in self.plain.text_of
        )


COMMANDS = ("start", "start", "register", *("decode",) * 6, "look", "end", "preempt", "take back")


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("free_list", FREE_LIST_POLICIES)
def test_blocks_are_found_as_if_each_were_told_of_at_once(free_list: str, is_watched: bool) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        twins = Twins(rng.choice((12, 24, 40)), free_list, is_watched)
        for _ in range(150):
            twins.do(rng.choice(COMMANDS), rng.randrange(1 << 16))
            if rng.random() < 0.05:
                twins.compare()
        for number in range(len(TEXTS)):
            twins.look(number)
        twins.compare()


def test_whom_another_overtook_on_an_equal_text_keeps_its_turn() -> None:
    """The first one's run ends where the second, which is ahead, left it: it goes on in the run of the second."""
    twins = Twins(20, "fifo", is_watched=False)
    for number in range(3):
        twins.start(number, 8, is_told=False)
    for seq, num_tokens in ((0, 2), (1, 6), (0, 4), (2, 4), (0, 6), (2, 6)):
        twins.register(seq, num_tokens)
    twins.compare()


def test_a_child_knows_what_its_parent_registered() -> None:
    """Also what the index has not asked the parent for yet."""
    allocator = PagedAllocator(4, 4, enable_prefix_caching=True)
    keys = PrefixKeys(TokenStream.from_segment(1, 16), None, 4)
    allocator.allocate("parent", 4, keys=keys)
    allocator.register("parent", 4)
    allocator.append_slots("parent", 4)
    allocator.register("parent", 8)
    allocator.fork("parent", "child", keys=keys)
    allocator.free("parent")
    allocator.unregister("child", 0)
    assert allocator.num_hashed_blocks == 0
    allocator.audit()


def test_a_block_that_others_found_stays_registered() -> None:
    allocator = PagedAllocator(4, 4, enable_prefix_caching=True)
    keys = PrefixKeys(TokenStream.from_segment(1, 16), None, 4)
    allocator.allocate("a", 8, keys=keys)
    allocator.register("a", 8)
    allocator.allocate("b", 5, keys=keys, prefix=allocator.match_prefix(keys, 5))
    for num_kept in (0, -1):
        with pytest.raises(AllocatorError, match=r"'a' cannot take blocks \[0, 1\] back: others share them"):
            allocator.unregister("a", num_kept)
    assert allocator.num_hashed_blocks == 2
    allocator.unregister("a", 4)
    assert allocator.match_prefix(keys, 9).block_ids == (0,)
    allocator.free("b")
    allocator.unregister("a", -1)
    assert allocator.num_hashed_blocks == 0
    allocator.audit()


def test_nobody_is_asked_for_a_decoded_block_before_somebody_looks() -> None:
    """The block costs no call of the index until a text comes by it."""
    allocator = PagedAllocator(10, 4, enable_prefix_caching=True)
    keys = PrefixKeys(TokenStream.from_segment(1, 40), None, 4)
    allocator.allocate("a", 4, keys=keys)
    allocator.register("a", 4)
    for _ in range(2):
        allocator.grow_each(["a"])
        allocator.fill_each(["a"])
    assert allocator.index.num_hashed == 1
    assert allocator.match_prefix(keys, 13).num_tokens == 12
    assert allocator.index.num_hashed == 3
