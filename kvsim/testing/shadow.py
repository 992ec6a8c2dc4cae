"""A shadow memory: the token that each physical slot holds, as a GPU would have it after the commands so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvsim.memory.interface import BlockCopy, BlockMove
from kvsim.types import BlockId, LawViolation


class ShadowMemory:
    """GPU and host slots; executes the copies and moves that an allocator returns, and nothing else."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._gpu: dict[tuple[BlockId, int], int] = {}
        self._host: dict[tuple[BlockId, int], int] = {}

    def write(self, block_ids: Sequence[BlockId], start: int, tokens: Iterable[int]) -> None:
        """Store tokens at positions `start ..` of a sequence, through its block table."""
        for position, token in enumerate(tokens, start):
            self._gpu[block_ids[position // self.block_size], position % self.block_size] = token

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Execute copy-on-writes in order."""
        for src, dst, num_tokens in copies:
            for offset in range(num_tokens):
                self._put(self._gpu, dst, offset, self._gpu.get((src, offset)))

    def swap_out(self, moves: Iterable[BlockMove]) -> None:
        self._move(self._gpu, self._host, moves)

    def swap_in(self, moves: Iterable[BlockMove]) -> None:
        self._move(self._host, self._gpu, moves)

    def _move(
        self,
        source: dict[tuple[BlockId, int], int],
        target: dict[tuple[BlockId, int], int],
        moves: Iterable[BlockMove],
    ) -> None:
        for src, dst in moves:
            for offset in range(self.block_size):
                self._put(target, dst, offset, source.get((src, offset)))

    @staticmethod
    def _put(memory: dict[tuple[BlockId, int], int], block_id: BlockId, offset: int, token: int | None) -> None:
        if token is None:
            memory.pop((block_id, offset), None)
        else:
            memory[block_id, offset] = token

    def check(
        self, name: object, block_ids: Sequence[BlockId], tokens: Sequence[int], *, is_swapped: bool, first: int = 0
    ) -> None:
        """The sequence reads back exactly its own tokens, from position `first` on. Raises LawViolation (law 8)."""
        memory = self._host if is_swapped else self._gpu
        for position, token in enumerate(tokens[first:], first):
            place = (block_ids[position // self.block_size], position % self.block_size)
            if memory.get(place) != token:
                raise LawViolation(
                    f"law 8: sequence {name!r} reads {memory.get(place)} at position {position} (block {place[0]}, "
                    f"offset {place[1]}); it stored {token}"
                )
