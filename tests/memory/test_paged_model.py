"""The paged allocator against its rules over plain lists: random histories of all that it can be told, refusals too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from memory.plain_paged import PlainPaged, Refused, Text, TooFew

from kvsim.memory import NO_MATCH, Journal, PagedAllocator, PrefixKeys, PrefixMatch
from kvsim.memory.block_pool import FREE_LIST_POLICIES
from kvsim.memory.journal import double_decrements, never_returned
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, OutOfBlocks


def outcome(call: Callable[[], Any], refusal: type[Exception]) -> tuple[Any, Exception | None]:
    """What a call answers, or how it refuses."""
    try:
        return call(), None
    except refusal as error:
        return None, error


class Beside:
    """An allocator and the plain lists, which are told the same and must answer the same."""

    def __init__(self, seed: int, policy: str) -> None:
        rng = self.rng = random.Random(seed)
        self.size, null = rng.choice((1, 1, 2, 3, 4)), rng.random() < 0.3
        num_blocks, num_host = rng.choice((1, 2, 3, 5, 8, 14, 25)) + null, rng.choice((0, 2, 6, 12))
        caching = rng.random() < 0.85
        self.journal = Journal() if rng.random() < 0.3 else None
        self.allocator = PagedAllocator(
            num_blocks,
            self.size,
            num_host_blocks=num_host,
            enable_prefix_caching=caching,
            free_list=policy,
            null_block=null,
            journal=self.journal,
        )
        self.allocator.take_evicted()
        self.plain = PlainPaged(num_blocks, self.size, num_host, caching, policy, int(null))
        self.known: list[tuple[Text, PrefixKeys]] = []
        self.matches = [NO_MATCH]
        self.num_started = 0

    def both(self, ask: Callable[[], Any], expect: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether both did it, and what they said."""
        answer, error = outcome(ask, AllocatorError)
        expected, refusal = outcome(expect, Refused)
        assert (error is None) == (refusal is None), error or refusal
        assert isinstance(error, OutOfBlocks) == isinstance(refusal, TooFew), error
        if isinstance(error, OutOfBlocks) and refusal is not None:
            assert error.args == refusal.args
        assert answer == expected
        return error is None, answer

    def text(self, start: Text = ()) -> tuple[Text, PrefixKeys]:
        """Of few, so that equal ones meet: that of another request with its keys, or one that parts from it."""
        rng = self.rng
        if self.known and not start and rng.random() < 0.6:
            start, keys = rng.choice(self.known[-8:])
            if rng.random() < 0.5:
                return start, keys
            start = start[: rng.randint(0, len(start))]
        text = start + tuple(rng.randrange(2) for _ in range(rng.randint(not start, 5 * self.size)))
        self.known.append((text, PrefixKeys(TokenStream.from_ids(text), None, self.size)))
        return self.known[-1]

    def look(self, text: Text, keys: PrefixKeys, num_tokens: int) -> PrefixMatch:
        match = self.allocator.match_prefix(keys, num_tokens)
        assert match == self.plain.match(text, num_tokens)
        self.matches.append(match)
        return match

    def new(self) -> int:
        self.num_started += 1
        return self.num_started

    def allocate(self) -> None:
        rng, allocator, plain = self.rng, self.allocator, self.plain
        text, keys = self.text()
        num_tokens = rng.choice((len(text), rng.randint(0, len(text))))
        match = self.look(text, keys, num_tokens)
        match = rng.choice((match, match, match, NO_MATCH, rng.choice(self.matches[-6:])))
        seq = rng.choice(list(plain.sequences)) if plain.sequences and rng.random() < 0.05 else self.new()
        sharers = [self.new() for _ in range(rng.choice((0, 0, 0, 2)))]
        self.both(
            lambda: allocator.allocate(seq, num_tokens, keys=keys, prefix=match, sharers=sharers),
            lambda: plain.allocate([seq, *sharers], num_tokens, text, match),
        )

    def append(self, seq: int) -> None:
        allocator, plain, rng = self.allocator, self.plain, self.rng
        num_tokens = rng.choice((1, 1, 1, 2, self.size, 2 * self.size + 1, 0))
        if seq in plain.sequences and not plain.sequences[seq].is_swapped and num_tokens:
            needed = plain.num_needed(plain.sequences[seq], num_tokens)
            assert allocator.num_blocks_to_append(seq, num_tokens) == needed
        is_done, copies = self.both(
            lambda: allocator.append_slots(seq, num_tokens), lambda: plain.append(seq, num_tokens)
        )
        if is_done and rng.random() < 0.2:
            if rng.random() < 0.5:
                self.register(seq)
            self.both(
                lambda: allocator.retract(seq, num_tokens, copies), lambda: plain.retract(seq, num_tokens, copies)
            )

    def register(self, seq: int) -> None:
        stored = self.plain.sequences[seq].num_tokens if seq in self.plain.sequences else 1
        num_tokens = self.rng.choice((stored, stored, self.rng.randint(0, stored + 1)))
        self.both(lambda: self.allocator.register(seq, num_tokens), lambda: self.plain.register(seq, num_tokens))

    def fork(self, seq: int) -> None:
        sequence, child = self.plain.sequences.get(seq), self.new()
        stored = sequence.text[: sequence.num_tokens] if sequence else ()
        if sequence is None or len(stored) < sequence.num_tokens or self.rng.random() < 0.2:
            self.both(lambda: self.allocator.fork(seq, child), lambda: self.plain.fork(seq, child, ()))
            return
        text, keys = self.text(stored)
        self.both(lambda: self.allocator.fork(seq, child, keys=keys), lambda: self.plain.fork(seq, child, text))

    def step(self) -> None:
        rng, allocator, plain = self.rng, self.allocator, self.plain
        running = [seq for seq, sequence in plain.sequences.items() if not sequence.is_swapped]
        swapped = [seq for seq in plain.sequences if seq not in running]
        seq = rng.choice([*running * 5, *swapped, -1])
        some = rng.sample(running, rng.randint(0, len(running))) + [-1] * (rng.random() < 0.05)
        back = rng.sample(swapped, rng.randint(0, len(swapped)))
        match rng.choice(("allocate", "append", "append", "grow", "fill", "register", "unregister", "fork", "free",
                          "out", "in", "look")):  # fmt: skip
            case "allocate":
                self.allocate()
            case "append":
                self.append(seq)
            case "grow":
                self.both(lambda: allocator.grow_each(some), lambda: plain.grow_each(some))
            case "fill":
                self.both(lambda: allocator.fill_each(some), lambda: plain.fill_each(some))
            case "register":
                self.register(seq)
            case "unregister":
                num_tokens = rng.randint(0, 3 * self.size)
                self.both(lambda: allocator.unregister(seq, num_tokens), lambda: plain.unregister(seq, num_tokens))
            case "fork":
                self.fork(seq)
            case "free":
                self.both(lambda: allocator.free(seq), lambda: plain.free(seq))
            case "out":
                self.both(lambda: allocator.swap_out(some[:3]), lambda: plain.swap(some[:3], is_out=True))
            case "in":
                self.both(lambda: allocator.swap_in(back), lambda: plain.swap(back, is_out=False))
            case "look":
                text, keys = self.text()
                self.look(text, keys, rng.randint(0, len(text) + 2))

    def compare(self) -> None:
        allocator, plain = self.allocator, self.plain
        assert list(allocator.free_block_ids()) == plain.gpu.in_order()
        assert list(allocator.free_host_block_ids()) == plain.host.free
        assert (allocator.ref_counts(), allocator.host_ref_counts()) == (plain.gpu.ref, plain.host.ref)
        assert {*allocator.seq_ids()} == {*plain.sequences}
        for seq, sequence in plain.sequences.items():
            seen = (allocator.block_table(seq), allocator.num_tokens(seq), allocator.is_swapped(seq))
            assert seen == (tuple(sequence.blocks), sequence.num_tokens, sequence.is_swapped)
        usage, num_idle = allocator.usage(), sum(not plain.gpu.ref[block_id] for block_id in plain.texts)
        assert (usage.num_free + usage.num_cached_idle, usage.num_cached_idle) == (len(plain.gpu.free), num_idle)
        assert usage.num_shared == sum(count > 1 for count in plain.gpu.ref)
        assert allocator.take_evicted() == plain.evicted
        plain.evicted.clear()
        if self.rng.random() < 0.5:
            # Asked seldom: what nobody looks at is not registered yet.
            assert allocator.num_hashed_blocks == len(plain.texts)
            allocator.audit()
        if self.journal is not None:
            self.compare_journal(self.journal)

    def compare_journal(self, journal: Journal) -> None:
        events = journal.events()
        holders: dict[int, Counter[str]] = {}
        for seq, sequence in self.plain.sequences.items():
            for block_id in () if sequence.is_swapped else sequence.blocks:
                holders.setdefault(block_id, Counter())[str(seq)] += 1
        assert double_decrements(events) == []
        assert {held.block_id: Counter(held.holders) for held in never_returned(events)} == holders
        assert sum(event.event == "evicted" for event in events) == self.allocator.num_evicted


@pytest.mark.parametrize("policy", FREE_LIST_POLICIES)
def test_all_that_it_is_told_is_done_by_its_rules(policy: str) -> None:
    for seed in range(50):
        twins = Beside(seed, policy)
        looks = twins.rng.choice((0.02, 0.2, 1.0))
        for _ in range(100):
            twins.step()
            if twins.rng.random() < looks:
                twins.compare()
        for seq in list(twins.plain.sequences):
            twins.allocator.free(seq)
            twins.plain.free(seq)
        twins.compare()
