"""One look for every picture: colours that colour-blind eyes tell apart, units on axes, no global state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.files import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, RED, ORANGE, GREEN, PURPLE, YELLOW, GREY = (
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#F0E442",
    "#DADADA",
)
"""The palette of Okabe and Ito (2008), and a grey."""

CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, "#000000")

PARTS = {
    "token_states": ("token states", BLUE),
    "reserved": ("reserved", SKY),
    "internal_frag": ("internal fragmentation", RED),
    "external_frag": ("external fragmentation", ORANGE),
    "cached_idle": ("cached, idle", GREEN),
    "free": ("free", GREY),
}
"""The ledger's parts from the bottom of a stack to its top, with label and colour."""

WIDTH_INCHES = 6.0
DPI = 150

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
    "svg.hashsalt": "kvsim",
}


@contextmanager
def styled() -> Iterator[None]:
    """The look, whatever the user's own matplotlib settings are; they are back afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        yield


def new_figure(height_inches: float, *, fits_itself: bool = False) -> Figure:
    """A figure of its own, without pyplot: nothing to close, safe in any thread and notebook.

    Margins are fixed, so that pictures stand in line; with `fits_itself` they are measured (slower).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI, layout="constrained" if fits_itself else None)
    FigureCanvasAgg(figure)
    # Without pyplot nothing tells a notebook how to show a figure.
    setattr(figure, "_repr_png_", lambda: _png(figure))  # noqa: B010
    if not fits_itself:
        set_margins(figure)
    return figure


def _png(figure: Figure) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    # Half the dots of a file: a notebook with a dozen pictures stays small.
    figure.savefig(buffer, format="png", dpi=0.6 * DPI, metadata={"Software": None})
    return buffer.getvalue()


def set_margins(figure: Figure, *, top_inches: float = 0.34, bottom_inches: float = 0.52) -> None:
    """Room above the axes for titles, and below them for ticks, label and legend."""
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.74 / WIDTH_INCHES,
        right=1 - 0.14 / WIDTH_INCHES,
        top=1 - top_inches / height,
        bottom=bottom_inches / height,
        wspace=0.12,
        hspace=0.12,
    )


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG whose bytes depend on nothing but the figure."""
    with styled():
        save_picture(figure, path, dpi=DPI, metadata={"Software": None})
    return path


def legend_below(
    figure: Figure, handles: list[Any], labels: list[str], num_columns: int, *, extra_inches: float = 0.0
) -> None:
    """A legend under the axes, where it hides nothing; `extra_inches` are for tilted ticks above it."""
    num_rows = -(-len(handles) // num_columns)
    set_margins(figure, bottom_inches=0.52 + 0.2 * num_rows + extra_inches)
    figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=0.2,
        ncols=num_columns,
        handlelength=1.4,
        columnspacing=1.4,
    )


def percent_axis(axes: Axes) -> None:
    """Shares 0..1 are shown as percentages."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def note(axes: Axes, text: str) -> None:
    """Say in the middle of an empty picture why it is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#555555")
    # Hidden, not removed: panels beside it may share the axis.
    axes.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
    axes.grid(False)
