"""Columns of integers that grow row by row and cost eight bytes a number."""

from __future__ import annotations

from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]

CHUNK_ROWS = 1024


class RowTable:
    """Rows of integers under named columns; kept as numpy chunks, or only passed on to `on_chunk`.

    `append` is the bound append of a list: a row costs one tuple. Call `flush_if_full` now and then.
    """

    def __init__(self, names: tuple[str, ...], *, keep: bool = True) -> None:
        self.names = names
        self.keep = keep
        self.rows: list[tuple[int, ...]] = []
        self.chunks: list[IntArray] = []

    def take_chunk(self) -> IntArray | None:
        """The pending rows as a matrix (rows x columns), None if there are none; kept if the table keeps rows."""
        if not self.rows:
            return None
        num_rows, num_columns = len(self.rows), len(self.names)
        numbers = np.fromiter(chain.from_iterable(self.rows), np.int64, num_rows * num_columns)
        chunk = numbers.reshape(num_rows, num_columns)
        self.rows.clear()
        if self.keep:
            self.chunks.append(chunk)
        return chunk

    def matrix(self) -> IntArray:
        """All kept rows (rows x columns); call `take_chunk` first."""
        if not self.chunks:
            return np.empty((0, len(self.names)), dtype=np.int64)
        if len(self.chunks) > 1:
            self.chunks = [np.concatenate(self.chunks)]
        return self.chunks[0]

    def column(self, name: str) -> IntArray:
        """One column of all kept rows, without putting the whole table together; call `take_chunk` first."""
        if not self.chunks:
            return np.empty(0, dtype=np.int64)
        index = self.names.index(name)
        return np.concatenate([chunk[:, index] for chunk in self.chunks])
