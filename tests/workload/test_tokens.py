"""Texts made of segments and literal ids: what two of them have in common, however they are cut into pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsim.tokens import Piece, Segment, TokenStream
from kvsim.types import KvsimError

segments = st.builds(Segment, st.integers(1, 2), st.integers(0, 2), st.integers(0, 4))
literals = st.lists(st.integers(0, 1), max_size=4).map(tuple)
texts = st.lists(st.one_of(segments, literals), max_size=5)


def tokens_of(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Every token by name: (0, id), or (source, position)."""
    named: list[tuple[int, int]] = []
    for piece in pieces:
        if isinstance(piece, Segment):
            named += [(piece.source, piece.start + index) for index in range(piece.length)]
        else:
            named += [(0, token_id) for token_id in piece]
    return named


def common_prefix(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    length = 0
    for own, other in zip(first, second, strict=False):
        if own != other:
            break
        length += 1
    return length


@given(texts, texts, st.integers(0, 20))
@example([Segment(5, 7, 3)], [(5, 7, 3)], 0)
@example([(1, 0), Segment(1, 0, 1)], [(1, 0, 1)], 2)
def test_common_length_is_that_of_the_tokens(first: list[Piece], second: list[Piece], start: int) -> None:
    """A segment is no three ids, although its fields are."""
    expected = common_prefix(tokens_of(first), tokens_of(second))
    start = min(start, expected)
    one, other = TokenStream(tuple(first)), TokenStream(tuple(second))
    assert one.common_length(other, start) == expected
    assert other.common_length(one, start) == expected


@given(texts, st.data())
def test_the_cut_into_pieces_does_not_show(pieces: list[Piece], data: st.DataObject) -> None:
    cut: list[Piece] = []
    for piece in pieces:
        at = data.draw(st.integers(0, len(piece) if isinstance(piece, tuple) and not isinstance(piece, Segment) else 4))
        if isinstance(piece, Segment):
            at = min(at, piece.length)
            cut += [Segment(piece.source, piece.start, at), Segment(piece.source, piece.start + at, piece.length - at)]
        else:
            cut += [piece[:at], piece[at:]]
    whole, parts = TokenStream(tuple(pieces)), TokenStream(tuple(cut))
    assert whole.common_length(parts) == len(whole) == len(parts)
    assert whole.content(0, len(whole)) == parts.content(0, len(parts))


@given(texts, st.integers(0, 20), st.integers(0, 20))
@example([(0,), Segment(2, 0, 0), (1,)], 0, 2)
@example([Segment(1, 0, 2), (), Segment(1, 2, 2)], 1, 3)
def test_empty_pieces_say_nothing(pieces: list[Piece], start: int, length: int) -> None:
    """Any span of a text has the content that it has when the text is made of single tokens."""
    single: list[Piece] = [Segment(source, value, 1) if source else (value,) for source, value in tokens_of(pieces)]
    start = min(start, len(single))
    stop = min(start + length, len(single))
    assert TokenStream(tuple(pieces)).content(start, stop) == TokenStream(tuple(single)).content(start, stop)


@pytest.mark.parametrize("segment", [Segment(0, 0, 16), Segment(-1, 0, 16), Segment(1, 0, -1)])
def test_what_is_no_segment_is_refused(segment: Segment) -> None:
    """Source 0 is that of literal ids: texts of it had nothing in common with themselves."""
    with pytest.raises(KvsimError, match=rf"{re.escape(str(segment))} is no piece of a text: sources count from 1"):
        TokenStream((segment,))
