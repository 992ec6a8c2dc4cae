"""Words of messages: values cut to fit, and what a misspelt word may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean block_size?` for a close known word, else nothing."""
    close = get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def shorten(value: object, limit: int = 60) -> str:
    """A value as Python writes it, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
