"""What a sequence says: token ids, or named segments that stand for them.

A synthetic workload never makes up text. A `Segment` names a run of tokens in an endless imaginary
text (`source`), so that "system prompt 3, positions 0..1023" costs three integers however long it is,
and two prompts share a prefix exactly if their pieces are equal there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias


class Segment(NamedTuple):
    """Tokens `start .. start + length - 1` of the endless text `source` (an integer >= 1)."""

    source: int
    start: int
    length: int


Piece: TypeAlias = Segment | tuple[int, ...]
"""Either a segment, or literal token ids."""

Content: TypeAlias = tuple[tuple[int, ...], ...]
"""The canonical content of a span: equal spans of equal text have equal contents."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """An immutable text of `len(stream)` tokens, made of pieces."""

    pieces: tuple[Piece, ...] = ()
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", tuple(accumulate(_piece_len(piece) for piece in self.pieces)))

    @classmethod
    def from_ids(cls, token_ids: Iterable[int]) -> TokenStream:
        """A stream of literal token ids."""
        return cls((tuple(token_ids),))

    @classmethod
    def from_segment(cls, source: int, length: int, start: int = 0) -> TokenStream:
        """A stream of `length` tokens of the endless text `source`."""
        return cls((Segment(source, start, length),))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __add__(self, other: TokenStream) -> TokenStream:
        return TokenStream(self.pieces + other.pieces)

    def content(self, start: int, stop: int) -> Content:
        """Canonical content of tokens `start .. stop - 1`: a tuple of `(source, start, length)` and `(0, *ids)`.

        Neighbouring slices of one text are merged, so that the cutting into pieces does not show.
        Costs O(pieces touched), not O(tokens), except for literal ids.
        """
        index = bisect_right(self._ends, start)
        if index < len(self.pieces) and start < stop <= self._ends[index]:
            # Most blocks of a synthetic text lie within one segment.
            piece = self.pieces[index]
            if isinstance(piece, Segment):
                return ((piece.source, piece.start + start - self._ends[index] + piece.length, stop - start),)
        parts: list[tuple[int, ...]] = []
        while start < stop and index < len(self.pieces):
            piece, piece_end = self.pieces[index], self._ends[index]
            piece_start = piece_end - _piece_len(piece)
            upto = min(stop, piece_end)
            _merge(parts, _slice(piece, start - piece_start, upto - piece_start))
            start, index = upto, index + 1
        return tuple(parts)


def _piece_len(piece: Piece) -> int:
    return piece.length if isinstance(piece, Segment) else len(piece)


def _slice(piece: Piece, start: int, stop: int) -> tuple[int, ...]:
    if isinstance(piece, Segment):
        return (piece.source, piece.start + start, stop - start)
    return (0, *piece[start:stop])


def _merge(parts: list[tuple[int, ...]], part: tuple[int, ...]) -> None:
    if parts and parts[-1][0] == part[0]:
        last = parts[-1]
        if part[0] == 0:
            parts[-1] = last + part[1:]
            return
        if last[1] + last[2] == part[1]:
            parts[-1] = (last[0], last[1], last[2] + part[2])
            return
    parts.append(part)
