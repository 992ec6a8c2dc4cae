"""Pictures with the published points beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvsim.report.style import BLUE, CYCLE, GREY, ORANGE, RED, SKY
from kvsim.reproduce.figure import Row

PAPER_COLOR = "#555555"
PART_COLORS = (BLUE, SKY, RED, ORANGE, GREY)


def paper_value(row: Row) -> float | None:
    """The published number, or the middle of its range."""
    if not row.paper:
        return None
    low, _, high = row.paper.partition("..")
    return (float(low) + float(high or low)) / 2


def paper_reach(row: Row) -> float:
    """Half the width of the published range; 0 for a number."""
    low, _, high = row.paper.partition("..")
    return (float(high or low) - float(low)) / 2 if row.paper else 0.0


def bars(picture: Any, rows: Sequence[Row], label: str) -> None:
    """Pairs of bars: paper, ours."""
    axes = picture.subplots()
    places = range(len(rows))
    papers = [(place, row) for place, row in zip(places, rows, strict=True) if row.paper]
    axes.bar(
        [place - 0.2 for place, _ in papers],
        [paper_value(row) for _, row in papers],
        0.36,
        yerr=[paper_reach(row) for _, row in papers],
        color=GREY,
        ecolor=PAPER_COLOR,
        label="paper",
    )
    axes.bar([place + 0.2 for place in places], [row.ours or 0.0 for row in rows], 0.36, color=BLUE, label="kvsim")
    for place, row in zip(places, rows, strict=True):
        if row.ours is not None:
            axes.annotate(f"{row.ours:.4g}", (place + 0.2, row.ours), ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(list(places), [row.series for row in rows])
    axes.set_ylabel(label)
    axes.margins(y=0.12)
    axes.legend()


def stacks(picture: Any, rows: Sequence[Row], parts: Sequence[str], label: str) -> None:
    """Stacked bars: paper and ours side by side for every series; published parts that are unknown are left out."""
    axes = picture.subplots()
    series = list(dict.fromkeys(row.series for row in rows))
    for shift, value_of, hatch in ((-0.2, paper_value, "//"), (0.2, lambda row: row.ours, "")):
        _stack(axes, rows, series, parts, shift, value_of, hatch)
    axes.set_xticks(range(len(series)), [name.replace(" ", "\n", 1) for name in series])
    axes.set(ylabel=f"{label} (%)", ylim=(0, 100))
    axes.set_title("hatched: paper; plain: kvsim")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _stack(
    axes: Any,
    rows: Sequence[Row],
    series: Sequence[str],
    parts: Sequence[str],
    shift: float,
    value_of: Callable[[Row], float | None],
    hatch: str,
) -> None:
    bottoms = [0.0] * len(series)
    for part, color in zip(parts, PART_COLORS, strict=False):
        heights = [_of(rows, name, part, value_of) for name in series]
        places = [place + shift for place in range(len(series))]
        axes.bar(
            places,
            heights,
            0.36,
            bottom=bottoms,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            label=None if hatch else part,
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _of(rows: Sequence[Row], series: str, part: str, value_of: Callable[[Row], float | None]) -> float:
    return next((value_of(row) or 0.0 for row in rows if (row.series, row.x) == (series, part)), 0.0)


def lines(
    picture: Any, rows: Sequence[Row], label: str, x_label: str, *, log_x: bool = False, log_y: bool = False
) -> None:
    """A line per series over numeric x; published points as crosses, published ranges as bars through them."""
    axes = picture.subplots()
    series = list(dict.fromkeys(row.series for row in rows))
    for name, color in zip(series, CYCLE * 3, strict=False):
        points = [row for row in rows if row.series == name]
        known = [row for row in points if row.ours is not None]
        axes.plot(
            [float(row.x) for row in known], [row.ours for row in known], marker="o", ms=4, color=color, label=name
        )
        papers = [row for row in points if row.paper]
        if papers:
            axes.errorbar(
                [float(row.x) for row in papers],
                [paper_value(row) for row in papers],
                yerr=[paper_reach(row) for row in papers],
                fmt="x",
                color=color,
                ms=7,
            )
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({float(row.x) for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if log_y:
        axes.set_yscale("log")
    axes.set(xlabel=x_label, ylabel=label)
    axes.legend()
    if any(row.paper for row in rows):
        axes.set_title("crosses: paper; lines: kvsim")
