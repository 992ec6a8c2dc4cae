"""Words of messages: values cut to fit, and what a misspelt word may have meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean block_size?` for a close known word, else nothing."""
    close = get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def likeness(word: object, other: str) -> float:
    """How alike two words are: 1 for the same, 0 for nothing in common."""
    return SequenceMatcher(None, str(word), other).ratio()


def natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key by which `2` comes before `10`."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part) for part in parts if part]
