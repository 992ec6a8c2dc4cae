"""Where published and simulated values meet: one tidy table per figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsim.reproduce.figure import Figure, Ours, Row
from kvsim.reproduce.published import Key, Published

DIGITS = 5
ILLUSTRATION = "illustration"
INPUT = "input"


def beside(figure: Figure, ours: Sequence[Ours], published: Mapping[Key, Published]) -> list[Row]:
    """Each simulated value with the published one of the same name; published ones that nothing answers follow."""
    rows = [_row(figure, item, published.get((figure.name, *item[:3]))) for item in ours]
    answered = {row[:4] for row in rows}
    for key, entry in published.items():
        if key[0] == figure.name and key not in answered:
            rows.append(Row(*key, entry.paper, None, None, _mark(figure, key[1], key[2], entry.mark)))
    return rows


def _row(figure: Figure, item: Ours, entry: Published | None) -> Row:
    ours = None if item.value is None else _rounded(item.value)
    mark = _mark(figure, item.series, item.x, entry.mark if entry is not None else "")
    if entry is None:
        return Row(figure.name, *item[:3], "", ours, None, mark)
    difference = None if ours is None else _rounded(entry.difference(ours))
    return Row(figure.name, *item[:3], entry.paper, ours, difference, mark)


def _mark(figure: Figure, series: str, x: str, published: str) -> str:
    if figure.illustration:
        return ILLUSTRATION
    return INPUT if (series, x) in figure.inputs else published


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def to_csv(rows: Iterable[Row]) -> str:
    """The table as text; empty cells where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return text.getvalue()


def from_csv(text: str) -> list[Row]:
    """What `to_csv` wrote."""
    return [
        Row(**{name: _cell(name, line[name]) for name in Row._fields}) for line in csv.DictReader(io.StringIO(text))
    ]


def _cell(name: str, text: str) -> Any:
    if name in ("ours", "difference"):
        return float(text) if text else None
    return text
