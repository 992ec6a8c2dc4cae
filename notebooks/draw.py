"""Small pictures for the notebooks and the documentation: slots, block tables, who runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from kvsim.report.style import new_figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#882255")
EMPTY = "#f2f2f2"
WASTE = {"reserved": "#56B4E9", "internal": "#D55E00", "external": "#E69F00"}


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = new_figure(height, fits_itself=True)
    figure.set_figwidth(width)
    axes = figure.add_subplot()
    axes.set_axis_off()
    return figure, axes


def _cell(axes: Axes, x: float, y: float, color: str, text: str = "", *, ink: str = "black", width: float = 1) -> None:
    axes.add_patch(Rectangle((x + 0.04, y + 0.06), width - 0.08, 0.88, facecolor=color, edgecolor="#777777", lw=0.6))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8, color=ink)


def waste(regions: Sequence[tuple[str, int, int, int]], num_slots: int, hole_is_lost: bool = False) -> Figure:
    """The address space of a contiguous engine.

    `regions` are (name, stored, in the end, given): of the slots given to a request some are stored, some will be,
    and the rest never. A region without a name is a hole, as is what follows the last one: free, or lost if nobody
    who waits fits in.
    """
    figure, axes = _axes(7.2, 1.3)
    hole = WASTE["external"] if hole_is_lost else EMPTY
    at = 0
    for name, stored, final, given in regions:
        for slot in range(given):
            kind = "stored" if slot < stored else "reserved" if slot < final else "internal"
            color = COLORS[0] if kind == "stored" else WASTE[kind]
            _cell(axes, at + slot, 0, color if name else hole, name if slot < stored else "", ink="white")
        at += given
    for slot in range(at, num_slots):
        _cell(axes, slot, 0, hole)
    kinds = [("stored", COLORS[0]), ("reserved: will be filled", WASTE["reserved"])]
    kinds += [("internal: never will", WASTE["internal"])]
    kinds += [("external: a hole too small", WASTE["external"]) if hole_is_lost else ("free", EMPTY)]
    for index, (label, color) in enumerate(kinds):
        x = index * num_slots / 4
        axes.add_patch(Rectangle((x, -0.82), 0.5, 0.24, facecolor=color, edgecolor="#777777", lw=0.6))
        axes.text(x + 0.7, -0.7, label, va="center", fontsize=8)
    axes.set_xlim(0, num_slots)
    axes.set_ylim(-1.1, 1)
    return figure


def block_tables(
    tables: Mapping[str, Sequence[int]], stored: Mapping[str, int], num_blocks: int, block_size: int
) -> Figure:
    """Logical blocks of each sequence (left) and where they are in the pool (right); a shared block has two colours."""
    owners: dict[int, list[str]] = {}
    for name, table in tables.items():
        for block_id in table:
            owners.setdefault(block_id, []).append(name)
    colors = dict(zip(tables, COLORS, strict=False))
    height = max(num_blocks, sum(len(table) + 1 for table in tables.values()))
    figure, axes = _axes(5.6, 0.28 * height + 0.3)
    pool_x, y = 7.0, float(height - 1)
    for block_id in range(num_blocks):
        names = owners.get(block_id, [])
        for index, name in enumerate(names or [""]):
            width = 2.0 / max(1, len(names))
            _cell(axes, pool_x + index * width, height - 1 - block_id, colors.get(name, EMPTY), width=width)
        label = f"block {block_id}" + (f"  ref {len(names)}" if len(names) > 1 else "")
        axes.text(pool_x + 2.2, height - 0.5 - block_id, label, va="center", fontsize=8)
    for name, table in tables.items():
        axes.text(0, y + 0.5, f"{name}: {stored[name]} tokens", va="center", fontsize=8.5, fontweight="bold")
        for index, block_id in enumerate(table):
            y -= 1
            fill = min(block_size, stored[name] - index * block_size)
            _cell(axes, 0.6, y, colors[name], f"{fill} of {block_size}", ink="white", width=2)
            start, end = (2.7, y + 0.5), (pool_x - 0.1, height - 0.5 - block_id)
            arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color=colors[name], lw=0.9)
            axes.add_patch(arrow)
        y -= 1
    axes.set_xlim(0, pool_x + 4.2)
    axes.set_ylim(min(0, y), height)
    return figure


def rounds(schedules: Mapping[str, Sequence[Sequence[str]]], places: int = 2) -> Figure:
    """Who computes in which round, one line per place; an empty name is an idle place."""
    names = sorted({name for rows in schedules.values() for row in rows for name in row if name})
    colors = dict(zip(names, COLORS, strict=False))
    length = max(len(rows) for rows in schedules.values())
    height = len(schedules) * (places + 1)
    figure, axes = _axes(5.6, 0.34 * height + 0.2)
    for block, (title, rows) in enumerate(schedules.items()):
        top = height - block * (places + 1) - 1
        axes.text(0, top + 0.35, title, fontsize=8.5, fontweight="bold", va="center")
        for at, row in enumerate(rows):
            for place in range(places):
                name = row[place] if place < len(row) else ""
                _cell(
                    axes,
                    at,
                    top - 1 - place,
                    colors.get(name, EMPTY),
                    name or "idle",
                    ink="white" if name else "#777777",
                )
    axes.set_xlim(0, length)
    axes.set_ylim(0, height)
    return figure
