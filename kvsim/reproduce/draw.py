"""Pictures with the published points beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsim.report.style import BLUE, CYCLE, GREEN, GREY, ORANGE, PURPLE, RED, SKY
from kvsim.reproduce.figure import Row, bounds_of
from kvsim.reproduce.sustained import BOUND_S, LATENCY

PAPER_COLOR = "#555555"
ENGINE_COLORS = {"orca-max": RED, "orca-pow2": ORANGE, "orca-oracle": GREEN, "vllm-v0": BLUE}
PART_COLORS = (BLUE, SKY, RED, ORANGE, GREY, PURPLE)


def paper_value(row: Row) -> float | None:
    """The published number; None where there is none, or a range."""
    return None if not row.paper or ".." in row.paper else float(row.paper)


def bars(picture: Any, rows: Sequence[Row], label: str) -> None:
    """Pairs of bars: paper (a published range floats), ours."""
    axes = picture.subplots()
    papers = [(place, *bounds_of(row.paper)) for place, row in enumerate(rows) if row.paper]
    axes.bar(
        [place - 0.2 for place, *_ in papers],
        [high - low if high > low else high for _, low, high in papers],
        0.36,
        bottom=[low if high > low else 0.0 for _, low, high in papers],
        color=GREY,
        label="paper",
    )
    axes.bar(
        [place + 0.2 for place in range(len(rows))], [row.ours or 0.0 for row in rows], 0.36, color=BLUE, label="kvsim"
    )
    for place, row in enumerate(rows):
        if row.ours is not None:
            axes.annotate(f"{row.ours:.4g}", (place + 0.2, row.ours), ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(range(len(rows)), [row.series for row in rows])
    axes.set_ylabel(label)
    axes.margins(y=0.12)
    axes.legend()


def latency_curves(picture: Any, rows: Sequence[Row], panels: Mapping[str, str]) -> None:
    """Normalised latency against the rate, a panel for each `suffix: title`, a line for each engine in it."""
    for axes, (suffix, title) in zip(_panels(picture, len(panels)), panels.items(), strict=True):
        mine = [row for row in rows if row.quantity == LATENCY and row.series.endswith(suffix)]
        for series in dict.fromkeys(row.series for row in mine):
            points, engine = [row for row in mine if row.series == series], series.removesuffix(suffix)
            axes.plot(
                [float(row.x) for row in points],
                [row.ours for row in points],
                marker="o",
                ms=3,
                color=ENGINE_COLORS[engine],
                label=engine,
            )
        axes.axhline(BOUND_S, color=PAPER_COLOR, lw=0.8, ls="--")
        axes.set_title(title, fontsize=8.5)
        axes.set_ylim(0, 2.5 * BOUND_S)
        axes.set_xlabel("requests/s")
        axes.set_xlim(left=0)
    first = picture.axes[0]
    first.set_ylabel("normalised latency (s/token)")
    first.legend(fontsize=7.5, loc="upper left")


def _panels(picture: Any, number: int) -> Sequence[Any]:
    axes = picture.subplots(1, number, sharey=True)
    return [axes] if number == 1 else list(axes)


def stacks(picture: Any, rows: Sequence[Row], parts: Sequence[str], label: str) -> None:
    """Stacked bars for every series: paper and ours side by side, or ours alone where nothing was published."""
    axes = picture.subplots()
    series = list(dict.fromkeys(row.series for row in rows))
    is_compared = any(row.paper for row in rows)
    if is_compared:
        _stack(axes, rows, series, parts, -0.2, paper_value, "//")
        axes.set_title("hatched: paper; plain: kvsim", fontsize=8.5)
    _stack(axes, rows, series, parts, 0.2 if is_compared else 0.0, lambda row: row.ours, "")
    size = 9 if len(series) < 6 else 7
    axes.set_xticks(range(len(series)), [name.replace(", ", "\n") for name in series], fontsize=size)
    axes.set(ylabel=f"{label} (%)", ylim=(0, 100))
    picture.legend(*axes.get_legend_handles_labels(), ncols=3, loc="outside lower center")


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


def lines(picture: Any, rows: Sequence[Row], label: str, x_label: str, *, is_log: bool = False) -> None:
    """A line per series over numeric x; published points as crosses, published ranges as bars through them."""
    axes = picture.subplots()
    series = list(dict.fromkeys(row.series for row in rows))
    for name, color in zip(series, CYCLE * 3, strict=False):
        points = [row for row in rows if row.series == name]
        known = [row for row in points if row.ours is not None]
        axes.plot(
            [float(row.x) for row in known], [row.ours for row in known], marker="o", ms=4, color=color, label=name
        )
        for row in points:
            if row.paper:
                low, high = bounds_of(row.paper)
                axes.plot([float(row.x)] * 2, [low, high], color=color, lw=4, alpha=0.25, solid_capstyle="butt")
        papers = [row for row in points if paper_value(row) is not None]
        axes.plot([float(row.x) for row in papers], [paper_value(row) for row in papers], "x", color=color, ms=7)
    if is_log:
        axes.set_xscale("log", base=2)
        ticks = sorted({float(row.x) for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yscale("log")
    axes.set(xlabel=x_label, ylabel=label)
    axes.legend()
    if any(row.paper for row in rows):
        axes.set_title("crosses and shaded ranges: paper; lines: kvsim", fontsize=8.5)
