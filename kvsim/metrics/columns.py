"""Columns of integers that grow row by row and cost eight bytes a number."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]

CHUNK_ROWS = 1024


def packed(values: Seq[int]) -> IntArray:
    """The integers as an array, several times as fast as numpy takes them one by one; it cannot be written.

    Raises struct.error for what is no integer of 64 bits.
    """
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), np.int64)


def int_array(values: Seq[int]) -> IntArray:
    """The same for values that may be whole floats."""
    try:
        return packed(values)
    except struct.error:
        return np.fromiter(values, np.int64, len(values))


class RowTable:
    """Rows of integers under named columns, kept as numpy chunks; a row costs one tuple until its chunk is made.

    `narrow` tables keep each chunk's columns in the smallest type that holds them: for what is kept of every request
    and read once.
    """

    def __init__(self, names: tuple[str, ...], *, narrow: bool = False) -> None:
        self.names = names
        self.narrow = narrow
        self.rows: list[tuple[int, ...]] = []
        """Those that are not in a chunk yet."""
        self.chunks: list[IntArray] = []
        self._narrow_chunks: list[list[IntArray]] = []

    def take_chunk(self) -> None:
        """Make a chunk of the pending rows, if there are any."""
        if self.rows:
            numbers = int_array(tuple(chain.from_iterable(self.rows)))
            self.rows.clear()
            self.add_chunk(numbers.reshape(-1, len(self.names)).copy())

    def add_chunk(self, chunk: IntArray) -> None:
        """Rows that are columns already (rows x columns), behind those that are in chunks."""
        if self.narrow:
            self._narrow_chunks.append([_narrowed(column) for column in chunk.T])
        else:
            self.chunks.append(chunk)

    def matrix(self) -> IntArray:
        """All rows (rows x columns)."""
        self.take_chunk()
        if self._narrow_chunks:
            return np.column_stack([self.column(name) for name in self.names])
        if not self.chunks:
            return np.empty((0, len(self.names)), dtype=np.int64)
        if len(self.chunks) > 1:
            self.chunks = [np.concatenate(self.chunks)]
        return self.chunks[0]

    def column(self, name: str) -> IntArray:
        """One column of all rows, without putting the whole table together."""
        self.take_chunk()
        index = self.names.index(name)
        parts = [columns[index] for columns in self._narrow_chunks] or [chunk[:, index] for chunk in self.chunks]
        if not parts:
            return np.empty(0, dtype=np.int64)
        return np.concatenate(parts, dtype=np.int64, casting="safe")


def _narrowed(column: IntArray) -> IntArray:
    """The same integers in the smallest signed type that holds them."""
    low, high = int(column.min()), int(column.max())
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return column.astype(dtype)
    return column.copy()
