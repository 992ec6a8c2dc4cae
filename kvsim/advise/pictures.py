"""The pictures of advice: one for each answer that has a curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.advise.advise import Advice
from kvsim.advise.lab import SLO_SHARE, Runs
from kvsim.advise.paging import CONTIGUOUS
from kvsim.report.style import BLUE, GREEN, ORANGE, RED, legend_below, new_figure, percent_axis, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(advice: Advice, folder: Path) -> dict[str, str]:
    """Write a PNG for each answer with a curve; file names by topic."""
    names = {}
    for answer in advice.answers:
        if answer.curves and (picture := _PICTURES.get(answer.topic)) is not None:
            with styled():
                figure = picture(answer.curves)
            names[answer.topic] = save(figure, folder / f"{answer.topic}.png").name
    return names


def _block_size(curves: dict[str, Any]) -> Figure:
    from matplotlib.ticker import PercentFormatter

    trials: dict[int, Runs] = curves["trials"]
    figure = new_figure(2.8)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(wspace=0.35)
    sizes = list(trials)
    _points(left, sizes, [runs.mean("mean_e2el_ms") for runs in trials.values()], BLUE)
    left.set_title("mean end-to-end latency (ms)")
    _points(right, sizes, [runs.mean("block_utilization") for runs in trials.values()], GREEN)
    right.set_title("filled share of blocks")
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("block size (tokens)")
    return figure


def _rate(curves: dict[str, Any]) -> Figure:
    figure = new_figure(2.8)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(wspace=0.35)
    ladder: list[Runs] = curves["ladder"]
    _points(left, curves["rates"], [runs.attainment for runs in ladder], BLUE)
    left.axhline(SLO_SHARE, color=RED, linewidth=0.8)
    left.axvline(curves["recommended"], color=RED, linewidth=0.8)
    left.set_title("requests that meet the SLO")
    left.set_ylim(0, 1.05)
    percent_axis(left)
    _points(right, curves["rates"], [runs.mean("request_throughput") for runs in ladder], GREEN, "served")
    _points(right, curves["rates"], [runs.mean("request_goodput") for runs in ladder], ORANGE, "meeting the SLO")
    right.set_title("requests/s")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel(f"offered ({curves['unit']})")
    handles, labels = right.get_legend_handles_labels()
    legend_below(figure, handles, labels, 2)
    figure.subplots_adjust(wspace=0.25)
    return figure


def _cache(curves: dict[str, Any]) -> Figure:
    figure = new_figure(2.8)
    axes = figure.add_subplot()
    gib = curves["block_bytes"] / 2**30
    runs = [run for run in curves["tried"] if not run.error]
    axes.plot(
        [run.values[curves["key"]] * gib for run in runs], [run.attainment for run in runs], "o", ms=3, color=BLUE
    )
    axes.axhline(SLO_SHARE, color=RED, linewidth=0.8)
    axes.axvline(curves["recommended"] * gib, color=RED, linewidth=0.8)
    axes.set_title("requests that meet the SLO, every run of the search")
    axes.set_xlabel("KV cache (GiB)")
    axes.set_ylim(0, 1.05)
    percent_axis(axes)
    return figure


def _paging(curves: dict[str, Any]) -> Figure:
    bars = {"paged": curves["paged"]} | {CONTIGUOUS[name]: runs for name, runs in curves["rivals"].items()}
    return _bars(bars, (("output_throughput", "output tokens/s"), ("running_mean", "requests at once")))


def _sharing(curves: dict[str, Any]) -> Figure:
    bars = {"off": curves["off"], "on": curves["on"], "on, endless": curves["endless"]}
    return _bars(bars, (("mean_ttft_ms", "mean TTFT (ms) by prefix caching"), ("output_throughput", "output tokens/s")))


def _bars(bars: dict[str, Runs], metrics: tuple[tuple[str, str], ...]) -> Figure:
    figure = new_figure(2.6)
    figure.subplots_adjust(wspace=0.3)
    for axes, (name, title) in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        means = [runs.mean(name) for runs in bars.values()]
        axes.bar(list(bars), [mean.mean for mean in means], yerr=[mean.half_width for mean in means], color=BLUE)
        axes.set_title(title)
        axes.tick_params(axis="x", labelsize=7)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(bottom=0)
    return figure


def _points(axes: Axes, xs: list[Any], ys: list[Any], color: str, label: str = "") -> None:
    axes.errorbar(
        xs,
        [y.mean for y in ys],
        yerr=[y.half_width for y in ys],
        color=color,
        marker="o",
        markersize=3,
        capsize=2,
        label=label or None,
    )


_PICTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "block_size": _block_size,
    "rate": _rate,
    "cache": _cache,
    "paging": _paging,
    "sharing": _sharing,
}
