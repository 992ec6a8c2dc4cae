"""When each decoding sequence of the vllm-v0 engine next needs a block, and when it ends, known in advance.

Every running sequence takes every decode step (a tick), so both follow from the tick at which it joined. The
fields of a sequence lag behind while it is in here; `settle` brings them up to date.
"""

from __future__ import annotations

from operator import attrgetter

from kvsim.request import Sequence

by_rank = attrgetter("rank")


class Calendar:
    """Block boundaries and ends of the running sequences, by tick; sums over all of them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tick = 0
        """Decode steps planned so far: the number of the next one."""
        self.num_members = 0
        self.sum_stored = 0
        """Stored tokens of all members, up to date."""
        self.num_ticked_emitted = 0
        """Ticks whose tokens were emitted: one less than `tick` within a decode step."""
        self._boundaries: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Sequence, None]] = {}

    def join(self, seq: Sequence, *, ends: bool) -> None:
        """Take a sequence in, up to date, that decodes from the next tick on; `ends` if its last tick is known."""
        seq.join_tick = self.tick
        seq.join_computed = seq.num_computed_tokens
        self.num_members += 1
        self.sum_stored += seq.num_computed_tokens
        if ends:
            self._ends.setdefault(self._last_tick(seq), {})[seq] = None

    def watch_boundaries(self, seq: Sequence) -> None:
        """From the next tick on, list a member when it starts a new block."""
        self._boundaries[self._phase(seq)][seq] = None

    def leave(self, seq: Sequence) -> None:
        """Let a member go, up to date."""
        self.settle(seq)
        self.num_members -= 1
        self.sum_stored -= seq.num_computed_tokens
        self._boundaries[self._phase(seq)].pop(seq, None)
        last_tick = self._last_tick(seq)
        if ending := self._ends.get(last_tick):
            ending.pop(seq, None)
        seq.join_tick = -1

    def settle(self, seq: Sequence) -> None:
        """Bring a member's own counts up to date."""
        seq.num_computed_tokens = seq.join_computed + self.tick - seq.join_tick
        emitted = seq.join_computed + max(0, self.num_ticked_emitted - seq.join_tick)
        seq.num_output_tokens = emitted + 1 - seq.prompt_len

    def advance(self) -> None:
        """Plan one decode step: every member stores a token."""
        self.tick += 1
        self.sum_stored += self.num_members

    def emit(self) -> list[Sequence]:
        """The tokens of the planned decode step are out; returns the members it was the last one for."""
        self.num_ticked_emitted = self.tick
        return list(self._ends.pop(self.tick - 1, ()))

    def crossing(self) -> dict[Sequence, None]:
        """Members that start a new block at the next tick, in no special order."""
        return self._boundaries[self.tick % self.block_size]

    def is_crossing(self, seq: Sequence) -> bool:
        return seq in self._boundaries[self.tick % self.block_size]

    def _phase(self, seq: Sequence) -> int:
        return (seq.join_tick - seq.join_computed) % self.block_size

    def _last_tick(self, seq: Sequence) -> int:
        return seq.join_tick + seq.output_len - (seq.join_computed + 1 - seq.prompt_len) - 1
