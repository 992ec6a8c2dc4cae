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

from kvsim.types import KvsimError


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
        object.__setattr__(self, "_ends", tuple(accumulate(map(_piece_len, self.pieces))))

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

    def common_length(self, other: TokenStream, start: int = 0) -> int:
        """Leading tokens in which both texts agree, given that they do before `start`.

        Costs O(pieces), not O(tokens), except for literal ids.
        """
        end = min(len(self), len(other))
        mine, theirs = bisect_right(self._ends, start), bisect_right(other._ends, start)
        while start < end:
            own, others = self.pieces[mine], other.pieces[theirs]
            if self._ends[mine] == other._ends[theirs] and own == others and type(own) is type(others):
                # One piece, or the rest of it, that both texts are made of; a segment equals three ids.
                start = self._ends[mine]
                mine, theirs = mine + 1, theirs + 1
                continue
            upto = min(self._ends[mine], other._ends[theirs])
            start += _num_equal(self._slice(mine, start, upto), other._slice(theirs, start, upto))
            if start < upto:
                return start
            mine += self._ends[mine] == upto
            theirs += other._ends[theirs] == upto
        return end

    def _slice(self, index: int, start: int, upto: int) -> tuple[int, ...]:
        """Tokens `start .. upto - 1`, which lie in piece `index`, in canonical form."""
        piece = self.pieces[index]
        piece_start = self._ends[index] - _piece_len(piece)
        return _slice(piece, start - piece_start, upto - piece_start)

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
            upto = min(stop, self._ends[index])
            if start < upto:
                # An empty piece says nothing.
                _merge(parts, self._slice(index, start, upto))
            start, index = upto, index + 1
        return tuple(parts)


def _piece_len(piece: Piece) -> int:
    """Its tokens. Raises KvsimError for what can be no piece of a text."""
    if not isinstance(piece, Segment):
        return len(piece)
    source, _, length = piece
    if source < 1 or length < 0:
        raise KvsimError(f"{piece} is no piece of a text: sources count from 1, lengths from 0")
    return length


def _slice(piece: Piece, start: int, stop: int) -> tuple[int, ...]:
    if isinstance(piece, Segment):
        return (piece.source, piece.start + start, stop - start)
    return (0, *piece[start:stop])


def _num_equal(mine: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Leading tokens in which two canonical slices of one length agree."""
    if mine[0] or theirs[0]:
        return mine[2] if mine == theirs else 0
    for index, (own, other) in enumerate(zip(mine, theirs, strict=True)):
        if own != other:
            return index - 1
    return len(mine) - 1


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
