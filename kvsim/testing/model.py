"""A dict-based model of paged memory: no free list, no counters, no block ids, only who holds which cell.

A cell is a name for "one block's worth of content". How many tables name it is counted afresh each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from kvsim.types import SeqId

Cell = int


class ModelSequence:
    """What one sequence says, how much of it is stored, and in which cells."""

    def __init__(self, text: tuple[int, ...], namespace: int, num_tokens: int, cells: list[Cell]) -> None:
        self.text = text
        self.namespace = namespace
        self.num_tokens = num_tokens
        self.cells = cells
        self.is_swapped = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The stored tokens."""
        return self.text[: self.num_tokens]


class TailCopy(NamedTuple):
    """A copy-on-write that must happen."""

    src: Cell
    dst: Cell
    num_tokens: int


class DictModel:
    """Predicts, for every command, whether it fits, what is copied, and who shares what afterwards."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.sequences: dict[SeqId, ModelSequence] = {}
        self._names = count()

    def refs(self, *, is_swapped: bool = False) -> Counter[Cell]:
        """Tables that name each cell of one device."""
        tables = (seq.cells for seq in self.sequences.values() if seq.is_swapped == is_swapped)
        return Counter(cell for cells in tables for cell in cells)

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self.refs())

    @property
    def num_host_free(self) -> int:
        return self.num_host_blocks - len(self.refs(is_swapped=True))

    def num_cells(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def new_cells(self, number: int) -> list[Cell]:
        return [next(self._names) for _ in range(number)]

    def allocate(
        self, seq_id: SeqId, text: tuple[int, ...], namespace: int, num_tokens: int, hit_cells: Sequence[Cell] = ()
    ) -> ModelSequence:
        """A new sequence over hit cells and then new ones."""
        cells = [*hit_cells, *self.new_cells(self.num_cells(num_tokens) - len(hit_cells))]
        seq = self.sequences[seq_id] = ModelSequence(text, namespace, num_tokens, cells)
        return seq

    def is_tail_copied(self, seq_id: SeqId) -> bool:
        """The next token of the sequence goes into a partial block that others share."""
        seq = self.sequences[seq_id]
        return seq.num_tokens % self.block_size != 0 and self.refs()[seq.cells[-1]] > 1

    def num_needed(self, seq_id: SeqId, num_tokens: int) -> int:
        """Blocks that storing `num_tokens` more tokens takes."""
        seq = self.sequences[seq_id]
        return self.num_cells(seq.num_tokens + num_tokens) - len(seq.cells) + self.is_tail_copied(seq_id)

    def append(self, seq_id: SeqId, num_tokens: int) -> TailCopy | None:
        """Store tokens; returns the copy that must come first."""
        seq = self.sequences[seq_id]
        copy = None
        if self.is_tail_copied(seq_id):
            (new,) = self.new_cells(1)
            copy = TailCopy(seq.cells[-1], new, seq.num_tokens % self.block_size)
            seq.cells[-1] = new
        seq.num_tokens += num_tokens
        seq.cells += self.new_cells(self.num_cells(seq.num_tokens) - len(seq.cells))
        return copy

    def fork(self, parent_id: SeqId, child_id: SeqId, text: tuple[int, ...]) -> None:
        parent = self.sequences[parent_id]
        child = ModelSequence(text, parent.namespace, parent.num_tokens, parent.cells.copy())
        child.is_swapped = parent.is_swapped
        self.sequences[child_id] = child

    def free(self, seq_id: SeqId) -> None:
        del self.sequences[seq_id]

    def distinct(self, seq_ids: Iterable[SeqId]) -> list[Cell]:
        """Cells of the sequences, each once, in the order in which their tables name them."""
        return list(dict.fromkeys(cell for seq_id in seq_ids for cell in self.sequences[seq_id].cells))

    def move(self, seq_ids: Sequence[SeqId]) -> dict[Cell, Cell]:
        """Swap the sequences to the other device, sharing kept; returns old cell -> new cell."""
        new_cell = {cell: self.new_cells(1)[0] for cell in self.distinct(seq_ids)}
        for seq_id in seq_ids:
            seq = self.sequences[seq_id]
            seq.cells = [new_cell[cell] for cell in seq.cells]
            seq.is_swapped = not seq.is_swapped
        return new_cell
