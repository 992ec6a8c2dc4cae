"""The block-boundary calendar: which decoding sequences have something to do in this step.

A decoding sequence takes every decode tick, so the tick at which it next needs a block and the tick at which it
ends are known when it joins. Members are therefore not touched in between: their counters lag behind, and
`settle` brings them up to date. Order within a bucket is running order, so whoever asks gets the sequences in the
order in which a loop over all running sequences would meet them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from operator import attrgetter

from kvsim.request import Sequence

by_rank = attrgetter("rank")
"""Sort key: running order."""

RANKS_PER_GROUP = 1 << 32
"""A sequence's rank is its group's place in running order times this, and its own place in the group."""


class Calendar:
    """Decoding sequences by the tick of their next block boundary and of their end.

    `tick` counts decode ticks, the one being planned included as soon as `advance` was called for it.
    `num_in_flight` ticks were planned and not yet applied. `context_tokens` is the sum of the members' stored tokens.
    """

    __slots__ = ("block_size", "context_tokens", "finish_at", "id_ring", "num_in_flight", "num_seqs", "ring", "tick")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tick = 0
        self.num_in_flight = 0
        self.num_seqs = 0
        self.context_tokens = 0
        self.ring: list[list[Sequence]] = [[] for _ in range(block_size)]
        self.id_ring: list[list[int]] = [[] for _ in range(block_size)]
        """The sequence ids of each bucket, in the same order: what the allocator is asked with."""
        self.finish_at: dict[int, list[Sequence]] = {}

    def join(self, seq: Sequence) -> None:
        """A settled sequence decodes one token at every tick from now on."""
        computed = seq.num_computed_tokens
        offset = computed - self.tick
        finish_tick = seq.final_len - offset - 1
        seq.join_tick, seq.join_offset, seq.finish_tick = self.tick, offset, finish_tick
        bucket = -offset % self.block_size
        members = self.ring[bucket]
        place = bisect_right(members, seq.rank, key=by_rank)
        members.insert(place, seq)
        self.id_ring[bucket].insert(place, seq.seq_id)
        self.finish_at.setdefault(finish_tick, []).append(seq)
        self.num_seqs += 1
        self.context_tokens += computed

    def leave(self, seq: Sequence) -> None:
        """A member stops decoding; it is settled."""
        self.settle(seq)
        bucket = -seq.join_offset % self.block_size
        members = self.ring[bucket]
        place = bisect_left(members, seq.rank, key=by_rank)
        del members[place], self.id_ring[bucket][place]
        ending = self.finish_at.get(seq.finish_tick)
        if ending is not None:
            ending.remove(seq)
            if not ending:
                del self.finish_at[seq.finish_tick]
        seq.join_tick = -1
        self.num_seqs -= 1
        self.context_tokens -= seq.num_computed_tokens

    def settle(self, seq: Sequence) -> None:
        """Bring a member's counters up to date."""
        computed = seq.join_offset + self.tick
        seq.num_computed_tokens = computed
        since_prefill = self.tick - seq.join_tick + 1
        in_flight = self.num_in_flight
        seq.num_placeholders = in_flight if in_flight < since_prefill else since_prefill
        seq.num_output_tokens = computed - seq.prompt_len + 1 - seq.num_placeholders

    def settle_all(self) -> None:
        """Bring every member's counters up to date: not for the hot path."""
        for bucket in self.ring:
            for seq in bucket:
                self.settle(seq)

    def crossing(self) -> list[Sequence]:
        """Members whose token of this tick needs a new block, in running order (not a copy)."""
        return self.ring[self.tick % self.block_size]

    def crossing_ids(self) -> list[int]:
        """The sequence ids of `crossing` (not a copy)."""
        return self.id_ring[self.tick % self.block_size]

    def filling(self) -> list[Sequence]:
        """Members whose token of this tick fills a block, in running order (not a copy)."""
        return self.ring[(self.tick + 1) % self.block_size]

    def position(self, seq: Sequence) -> int:
        """Stored tokens of a member before this tick's token."""
        return seq.join_offset + self.tick

    def advance(self) -> None:
        """Every member takes this tick."""
        self.tick += 1
        self.num_in_flight += 1
        self.context_tokens += self.num_seqs

    def applied(self) -> None:
        """The oldest planned tick was applied."""
        self.num_in_flight -= 1

    def ending(self, tick: int) -> list[Sequence]:
        """Members that end with the token of `tick` (a copy)."""
        ending = self.finish_at.get(tick)
        return ending[:] if ending else []

    def members(self) -> list[Sequence]:
        """All members in running order: not for the hot path."""
        return sorted((seq for bucket in self.ring for seq in bucket), key=by_rank)


def merged(first: Seq[Sequence], second: Seq[Sequence]) -> list[Sequence]:
    """Two selections of running sequences as one in running order, nobody twice."""
    if not first:
        return list(second)
    if not second:
        return list(first)
    return sorted(dict.fromkeys([*first, *second]), key=by_rank)
