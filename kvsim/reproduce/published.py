"""The published figures, read from `published.csv`: a number or a range, its mark, and how near we mean to come.

Only `table` and the page import this; no code that makes `ours` does.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvsim.reproduce.figure import bounds_of

Key = tuple[str, str, str, str]
"""(figure, series, x, quantity)"""


class Published(NamedTuple):
    """`bar` is a tolerance: `5` in the quantity's unit, `12%`, `0`; empty where none was set."""

    paper: str
    mark: str
    bar: str

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high); equal for a single number."""
        return bounds_of(self.paper)

    def difference(self, ours: float) -> float:
        """Ours - paper; 0 inside a range."""
        low, high = self.bounds
        return ours - high if ours > high else ours - low if ours < low else 0.0

    def is_met(self, ours: float) -> bool | None:
        """Whether the bar is; None where there is none."""
        if not self.bar:
            return None
        low, high = self.bounds
        number = float(self.bar.rstrip("%"))
        allowed = (low if ours < low else high) * number / 100 if self.bar.endswith("%") else number
        return abs(self.difference(ours)) <= allowed + 1e-9


@cache
def published() -> dict[Key, Published]:
    """All of them, in the file's order."""
    return read_published(Path(__file__).with_name("published.csv"))


def read_published(path: Path) -> dict[Key, Published]:
    """A file of the columns figure,series,x,quantity,paper,mark,bar."""
    with path.open(newline="", encoding="utf-8") as file:
        return {
            (line["figure"], line["series"], line["x"], line["quantity"]): Published(
                line["paper"], line["mark"], line["bar"]
            )
            for line in csv.DictReader(file)
        }
