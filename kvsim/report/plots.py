"""Pictures that answer a question at a glance: each function takes a table a run wrote and returns a Figure.

`steps`, `requests`, `compare` and `sweep` are DataFrames with the columns of steps.csv, requests.csv, compare.csv
and sweep.csv; `summary` is the dict of summary.json. Every picture is readable at 600 pixels.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.metrics.intervals import interval_factor
from kvsim.report.series import FloatArray, step_curves, time_weighted_mean
from kvsim.report.style import (
    BLUE,
    CYCLE,
    GREEN,
    ORANGE,
    PARTS,
    RED,
    SKY,
    legend_below,
    new_figure,
    note,
    percent_axis,
    save,
    set_margins,
    styled,
)
from kvsim.result import share

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Summary = Mapping[str, Any]

LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end to end"}
MARKED_PERCENTILES = (50, 90, 99)

LEAST_SHOWN = 0.0005
"""Parts with a smaller share than this are not seen, and not in the legend."""

LONGEST_WORD = 40
"""Characters of a parameter's value at an axis."""

CHARACTERS_ACROSS = 72
"""What fits side by side under the axes."""

MOST_ROWS = 14
"""Names that stand one under the other beside the axes, or tilted under them."""

MOST_BELOW, LONGEST_BELOW = 6, 10
"""Curves, and letters of their names, whose legend fits into a line under the axes; others stand beside them."""

METRIC_UNITS = {
    "request_throughput": "requests/s",
    "request_goodput": "requests/s",
    "output_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "duration": "s",
    "running_mean": "requests",
    "running_peak": "requests",
    "waiting_mean": "requests",
    "sequences_mean": "sequences",
    "block_utilization": "share",
    "workload.arrivals.request_rate": "requests/s",
    "allocator.block_size": "tokens",
}


def memory(steps: pd.DataFrame) -> Figure:
    """Where does the KV memory go? Its six parts over time, stacked to the capacity."""
    with styled():
        figure = new_figure(3.6)
        axes = figure.add_subplot()
        axes.set_title("Where the KV memory is")
        if not len(steps):
            note(axes, _why_empty(steps, "no step ran"))
            return figure
        curves = step_curves(steps, list(PARTS))
        capacity = float(steps[list(PARTS)].iloc[0].sum())
        handles, labels = [], []
        bottom = np.zeros_like(curves.times)
        for name, (label, color) in PARTS.items():
            top = bottom + curves.values[name] / capacity
            mean = time_weighted_mean(steps, steps[name]) / capacity
            if mean > LEAST_SHOWN:
                area = axes.stairs(top[:-1], curves.times, baseline=bottom[:-1], fill=True, color=color, linewidth=0)
                handles.append(area)
                labels.append(f"{label} {share(mean)}")
            bottom = top
        axes.set_xlim(curves.times[0], curves.times[-1])
        axes.set_ylim(0, 1)
        axes.set_xlabel(curves.time_label)
        axes.set_ylabel(f"share of {capacity:,.0f} slots")
        percent_axis(axes)
        legend_below(figure, handles, labels, 3)
        return figure


def running_waiting(steps: pd.DataFrame) -> Figure:
    """How many requests run at once, and how many wait for a place?"""
    with styled():
        figure = new_figure(3.6)
        top, bottom = figure.subplots(2, 1, sharex=True)
        top.set_title("Requests running and waiting")
        if not len(steps):
            note(top, _why_empty(steps, "no step ran"))
            note(bottom, "")
            return figure
        curves = step_curves(steps, ["num_running", "num_waiting", "num_swapped"])
        mean = time_weighted_mean(steps, steps["num_running"])
        peak = int(steps["num_running"].max())
        _steps(top, curves.times, curves.values["num_running"], BLUE, f"running: mean {mean:.1f}, peak {peak}")
        mean = time_weighted_mean(steps, steps["num_waiting"])
        _steps(bottom, curves.times, curves.values["num_waiting"], ORANGE, f"waiting: mean {mean:.1f}")
        if steps["num_swapped"].any():
            _steps(bottom, curves.times, curves.values["num_swapped"], GREEN, "swapped out")
        for axes in (top, bottom):
            axes.set_ylim(bottom=0)
            axes.set_ylabel("requests")
            axes.legend(loc="upper right", ncols=2)
            _whole_numbers(axes)
            _headroom(axes)
        bottom.set_xlim(curves.times[0], curves.times[-1])
        bottom.set_xlabel(curves.time_label)
        return figure


def utilization(steps: pd.DataFrame, block_size: int | None = None, summary: Summary | None = None) -> Figure:
    """How full are the allocated blocks, and how full should they be?

    The theory is 1 - B / (2 x time-weighted mean length): on average half of each sequence's last block is empty.
    It is taken from `summary` where it is there, else from the steps and `block_size` (without sharing). Contiguous
    memory (block size 1) has no such theory.
    """
    if block_size is None and summary is not None:
        block_size = summary.get("block_size")
    with styled():
        figure = new_figure(3.0)
        axes = figure.add_subplot()
        unit = "slots" if block_size == 1 else "blocks"
        axes.set_title(f"How full the allocated {unit} are")
        if not len(steps) or steps["block_utilization"].isna().all():
            note(axes, _why_empty(steps, "no block was allocated"))
            return figure
        curves = step_curves(steps, ["block_utilization"])
        filled, theory = _filled_share(steps, summary), _theory(steps, block_size, summary)
        _steps(axes, curves.times, curves.values["block_utilization"], BLUE, f"measured, mean {share(filled)}")
        lowest = float(steps["block_utilization"].quantile(0.01))
        if theory is not None:
            axes.axhline(theory, color=RED, linestyle="--", label=f"theory 1 - B/(2 x mean length) = {share(theory)}")
            lowest = min(lowest, theory)
        axes.set_xlim(curves.times[0], curves.times[-1])
        floor = max(0.0, 1 - 1.5 * (1 - lowest)) if lowest < 0.99 else 0.98
        axes.set_ylim(floor, 1.0)
        axes.set_xlabel(curves.time_label)
        axes.set_ylabel("filled share of allocated slots")
        _percent_ticks(axes, 1 - floor)
        legend_below(figure, *axes.get_legend_handles_labels(), 2)
        return figure


def latency(requests: pd.DataFrame, summary: Summary | None = None) -> Figure:
    """How long do requests wait and take? Share of the completed ones that were as fast, with p50, p90 and p99.

    The marked percentiles come from `summary` where it is given, so that picture and table cannot differ.
    """
    with styled():
        figure = new_figure(2.9)
        set_margins(figure, top_inches=0.62)
        panels = figure.subplots(1, 3, sharey=True)
        figure.suptitle("Latency of completed requests", x=0.123, y=0.97, ha="left", fontsize=10, fontweight="bold")
        completed = requests[requests["status"] == "finished"] if len(requests.columns) else requests
        for axes, (name, title), color in zip(panels, LATENCIES.items(), (BLUE, GREEN, RED), strict=True):
            axes.set_title(title, fontweight="normal", fontsize=9)
            if not len(completed):
                note(axes, _why_empty(requests, "none"))
                continue
            values = np.sort(completed[f"{name}_ms"].dropna().to_numpy(np.float64))
            _distribution(axes, values, _marks(values, name, summary), color)
        panels[0].set_ylabel("share of requests")
        percent_axis(panels[0])
        return figure


def compare_memory(compare: pd.DataFrame) -> Figure:
    """Where does each engine's KV memory go while requests wait? One stacked bar per engine."""
    with styled():
        figure = new_figure(3.8)
        axes = figure.add_subplot()
        axes.set_title("KV memory while requests wait, by engine")
        shares, never_waited, idle = _memory_shares(compare)
        if all(idle):
            note(axes, "no step ran")
            return figure
        names = [f"{name}*" if calm else name for name, calm in zip(compare["engine"], never_waited, strict=True)]
        places, bottom = np.arange(len(compare)), np.zeros(len(compare))
        for part, (label, color) in PARTS.items():
            if shares[part].any():
                axes.bar(places, shares[part], 0.62, bottom=bottom, color=color, label=label)
                _label_segments(axes, bottom, shares[part], color)
            bottom = bottom + shares[part]
        for place in np.flatnonzero(idle).tolist():
            axes.text(place, 0.01, "no step ran", ha="center", va="bottom", fontsize=8, rotation=90)
        axes.set_xticks(places, names)
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of KV capacity")
        if any(never_waited):
            axes.set_xlabel("* no request ever waited: mean over all steps")
        percent_axis(axes)
        axes.grid(axis="x", visible=False)
        extra = _tilt_if_many(axes, len(names)) - (0.0 if any(never_waited) else 0.2)
        legend_below(figure, *axes.get_legend_handles_labels(), 3, extra_inches=extra)
        return figure


def compare_running(compare: pd.DataFrame) -> Figure:
    """How many requests does each engine run at once?"""
    return _grouped_bars(
        compare,
        {"running_mean": ("mean", BLUE), "running_peak": ("peak", SKY)},
        "Requests running at once, by engine",
        "requests",
    )


def compare_throughput(compare: pd.DataFrame) -> Figure:
    """How many tokens a second does each engine deliver?"""
    columns = {"output_throughput": ("output tokens", BLUE)}
    return _grouped_bars(compare, columns, "Output throughput, by engine", "tokens/s")


def compare_latency(compare: pd.DataFrame) -> Figure:
    """How long do requests take in each engine? Logarithmic, since engines differ by orders of magnitude."""
    columns = {
        "median_ttft_ms": ("TTFT p50", SKY),
        "p99_ttft_ms": ("TTFT p99", BLUE),
        "median_tpot_ms": ("TPOT p50", ORANGE),
        "p99_tpot_ms": ("TPOT p99", RED),
    }
    return _grouped_bars(compare, columns, "Latency, by engine", "ms", is_log=True)


def sweep_curves(sweep: pd.DataFrame, x: str, metric: str, *, by: str | None = None) -> Figure:
    """How does a metric depend on a parameter? Mean and 95 % interval over seeds; a curve per value of `by`.

    Over other keys that the sweep varies the mean is taken as well, and the title says so.
    """
    with styled():
        figure = new_figure(3.4, fits_itself=True)
        axes = figure.add_subplot()
        axes.set_title(f"{_plain_name(metric)} against {_plain_name(x)}{_averaged(sweep, x, by)}")
        sweep = _with_parameters(sweep, x, by)
        groups = [("", sweep)]
        if by is not None:
            groups = [(str(key), rows) for key, rows in sweep.groupby(by, sort=True, observed=True)]
        points = _positions(sweep[x])
        for index, (label, rows) in enumerate(groups):
            # One marker more than colours: no two curves look the same.
            color, marker = CYCLE[index % len(CYCLE)], "osD^vPX*"[index % 8]
            mean, half = _mean_and_interval(rows, x, metric)
            at = np.array([points[key] for key in mean.index])
            axes.plot(at, mean, color=color, marker=marker, markersize=4, label=label)
            axes.fill_between(at, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
        _parameter_axis(axes, points)
        axes.set_xlabel(_with_unit(x))
        axes.set_ylabel(_with_unit(metric))
        if by is not None:
            # Never inside: curves and their bands leave no place free that is surely large enough.
            is_short = len(groups) <= MOST_BELOW and max(len(label) for label, _ in groups) <= LONGEST_BELOW
            place: Any = "outside lower center" if is_short else "outside right upper"
            num_columns = len(groups) if is_short else -(-len(groups) // 16)
            figure.legend(title=_with_unit(by), loc=place, title_fontsize=8.5, ncols=num_columns)
        return figure


def sweep_heatmap(sweep: pd.DataFrame, x: str, y: str, metric: str) -> Figure:
    """How does a metric depend on two parameters? Its mean over seeds as a map."""
    with styled():
        figure = new_figure(3.8, fits_itself=True)
        axes = figure.add_subplot()
        axes.set_title(f"{_with_unit(metric)}{_averaged(sweep, x, y)}")
        table = _with_parameters(sweep.assign(**{metric: sweep[metric].astype(float)}), x, y).pivot_table(
            index=y, columns=x, values=metric, aggfunc="mean", dropna=False, observed=True
        )
        image = axes.imshow(table.to_numpy(), origin="lower", aspect="auto", cmap="cividis")
        figure.colorbar(image, ax=axes, label=_with_unit(metric))
        _name_ticks(axes, range(table.shape[1]), list(table.columns), CHARACTERS_ACROSS * 3 // 4)
        rows = [_short(value) for value in table.index]
        every = -(-len(rows) // MOST_ROWS)
        axes.set_yticks(range(table.shape[0]), ["" if index % every else name for index, name in enumerate(rows)])
        axes.set_xlabel(_with_unit(x))
        axes.set_ylabel(_with_unit(y))
        axes.grid(False)
        if table.size <= 80:
            _label_cells(axes, table.to_numpy())
        return figure


def write_run_plots(steps: pd.DataFrame, requests: pd.DataFrame, summary: Summary, out_dir: Path | str) -> list[Path]:
    """Write memory.png, running.png, utilization.png and latency.png; returns their paths.

    A table that was not recorded (it has no columns) has no pictures.
    """
    figures: dict[str, Figure] = {}
    if len(steps.columns):
        figures |= {
            "memory": memory(steps),
            "running": running_waiting(steps),
            "utilization": utilization(steps, summary=summary),
        }
    if len(requests.columns):
        figures["latency"] = latency(requests, summary)
    return _save_all(figures, out_dir)


def write_compare_plots(compare: pd.DataFrame, out_dir: Path | str) -> list[Path]:
    """Write compare_memory.png, compare_running.png, compare_throughput.png and compare_latency.png."""
    figures = {
        "compare_memory": compare_memory(compare),
        "compare_running": compare_running(compare),
        "compare_throughput": compare_throughput(compare),
        "compare_latency": compare_latency(compare),
    }
    return _save_all(figures, out_dir)


SWEEP_METRICS = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "running_mean", "block_utilization")
"""What the pictures of a sweep show: these answer most questions."""


def write_sweep_plots(
    sweep: pd.DataFrame, parameters: list[str], out_dir: Path | str, *, metrics: list[str] | None = None
) -> list[Path]:
    """Write a curve per metric against the first parameter, and, with a second one, a heat map beside it.

    `metrics` default to `SWEEP_METRICS`; columns the sweep lacks or that are empty are left out.
    """
    figures: dict[str, Figure] = {}
    for metric in metrics or SWEEP_METRICS:
        if metric not in sweep or sweep[metric].isna().all():
            continue
        by = parameters[1] if len(parameters) > 1 else None
        figures[f"sweep_{metric}"] = sweep_curves(sweep, parameters[0], metric, by=by)
        if by is not None:
            figures[f"heatmap_{metric}"] = sweep_heatmap(sweep, parameters[0], by, metric)
    return _save_all(figures, out_dir)


def _save_all(figures: Mapping[str, Figure], out_dir: Path | str) -> list[Path]:
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _why_empty(table: pd.DataFrame, reason: str) -> str:
    """What an empty picture says: the reason, unless the table was not recorded."""
    return reason if len(table.columns) else "not recorded"


def _steps(axes: Axes, times: FloatArray, values: FloatArray, color: str, label: str) -> None:
    axes.plot(times, values, drawstyle="steps-post", color=color, label=label)


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _headroom(axes: Axes) -> None:
    """Room for the legend above the curve."""
    axes.set_ylim(top=max(1.0, axes.get_ylim()[1] * 1.25))


def _percent_ticks(axes: Axes, span: float) -> None:
    """Percentages at the ticks; over a short axis with tenths, or neighbours would read the same."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if span > 0.05:
        percent_axis(axes)
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))


def _filled_share(steps: pd.DataFrame, summary: Summary | None) -> float:
    if summary is not None and summary.get("block_utilization") is not None:
        return float(summary["block_utilization"])
    allocated = steps["token_states"] / steps["block_utilization"]
    return time_weighted_mean(steps, steps["token_states"]) / time_weighted_mean(steps, allocated)


def _theory(steps: pd.DataFrame, block_size: int | None, summary: Summary | None) -> float | None:
    if block_size == 1:
        return None
    if summary is not None and summary.get("block_utilization_theory") is not None:
        return float(summary["block_utilization_theory"])
    sequences = time_weighted_mean(steps, steps["num_running"])
    if block_size is None or not sequences > 0:
        return None
    mean_length = time_weighted_mean(steps, steps["token_states"]) / sequences
    return 1 - block_size / (2 * mean_length) if mean_length > 0 else None


def _marks(values: FloatArray, name: str, summary: Summary | None) -> dict[int, float]:
    """Percentiles to mark: the summary's own, else linear ones of the values."""
    marks: dict[int, float] = {}
    for percentile in MARKED_PERCENTILES if len(values) else ():
        key = f"median_{name}_ms" if percentile == 50 else f"p{percentile}_{name}_ms"
        stated = summary.get(key) if summary is not None else None
        marks[percentile] = float(np.percentile(values, percentile)) if stated is None else float(stated)
    return marks


def _distribution(axes: Axes, values: FloatArray, marks: Mapping[int, float], color: str) -> None:
    """Share of requests at most this slow; the text says what the marks stand at."""
    if not len(values):
        note(axes, "none")
        return
    unit_ms, unit = (1000.0, "s") if values[-1] >= 10_000 else (1.0, "ms")
    shares = np.arange(1, len(values) + 1) / len(values)
    thin = np.unique(np.linspace(0, len(values) - 1, min(len(values), 1000)).astype(int))
    # From zero on: of a single request there would be no line at all.
    slow, upto = np.append(values[0], values[thin]) / unit_ms, np.append(0.0, shares[thin])
    axes.plot(slow, upto, drawstyle="steps-post", color=color)
    axes.plot([value / unit_ms for value in marks.values()], [p / 100 for p in marks], "o", color=color, markersize=4)
    text = "\n".join(f"p{percentile} {_short(value / unit_ms)} {unit}" for percentile, value in marks.items())
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
    # Where no curve is: it rises from its fastest request on.
    at, side = (0.97, "right") if values[0] < 0.6 * values[-1] else (0.05, "left")
    axes.text(at, 0.06, text, transform=axes.transAxes, ha=side, va="bottom", fontsize=8, bbox=box)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.04 * slow[-1]))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel(unit)
    axes.locator_params(axis="x", nbins=4)


def _memory_shares(compare: pd.DataFrame) -> tuple[dict[str, FloatArray], list[bool], list[bool]]:
    """Shares of the parts while requests waited; over all steps for engines in which none ever did.

    Beside them, which engines those are, and which never ran a step.
    """
    saturated = {part: _numbers(compare, f"kv_saturated.{part}") for part in PARTS}
    overall = {part: _numbers(compare, f"kv.{part}") for part in PARTS}
    calm = np.isnan(saturated["token_states"])
    shares = {part: np.nan_to_num(np.where(calm, overall[part], saturated[part])) for part in PARTS}
    idle = np.isnan(saturated["token_states"]) & np.isnan(overall["token_states"])
    return shares, (calm & ~idle).tolist(), idle.tolist()


def _numbers(frame: pd.DataFrame, column: str) -> FloatArray:
    import pandas as pd

    if column not in frame:
        return np.full(len(frame), np.nan)
    return pd.to_numeric(frame[column], errors="coerce").to_numpy(np.float64)


def _label_segments(axes: Axes, bottom: FloatArray, heights: FloatArray, color: str) -> None:
    ink = "white" if color in (BLUE, RED, GREEN) else "black"
    for index, (low, height) in enumerate(zip(bottom, heights, strict=True)):
        if height >= 0.045:
            axes.text(index, low + height / 2, f"{100 * height:.1f}", ha="center", va="center", color=ink, fontsize=8)


def _grouped_bars(
    compare: pd.DataFrame,
    columns: Mapping[str, tuple[str, str]],
    title: str,
    unit: str,
    *,
    is_log: bool = False,
) -> Figure:
    with styled():
        figure = new_figure(3.2)
        axes = figure.add_subplot()
        axes.set_title(title)
        places, width = np.arange(len(compare)), 0.8 / len(columns)
        many = len(compare) * len(columns) > 14
        for index, (column, (label, color)) in enumerate(columns.items()):
            values = _numbers(compare, column)
            at = places + (index - (len(columns) - 1) / 2) * width
            bars = axes.bar(at, np.nan_to_num(values), width * 0.94, color=color, label=label)
            _label_bars(axes, bars, at.tolist(), values, fontsize=6.5 if many else 8, rotation=90 if many else 0)
        has_bars = any((_numbers(compare, column) > 0).any() for column in columns)
        if is_log and has_bars:
            axes.set_yscale("log")
        axes.margins(y=0.22 if many else 0.1)
        if not has_bars:
            axes.set_ylim(0, 1)
        axes.set_xticks(places, [str(name) for name in compare["engine"]])
        axes.set_ylabel(unit)
        axes.grid(axis="x", visible=False)
        extra = _tilt_if_many(axes, len(compare))
        if len(columns) > 1:
            legend_below(figure, *axes.get_legend_handles_labels(), len(columns), extra_inches=extra - 0.2)
        else:
            set_margins(figure, bottom_inches=0.32 + extra)
        return figure


def _label_bars(axes: Axes, bars: Any, places: Iterable[float], values: FloatArray, **style: Any) -> None:
    """The value on each bar; of none at the foot of the axes, which may be logarithmic and have no zero."""
    axes.bar_label(bars, [_short(value) if value > 0 else "" for value in values], padding=1, **style)
    for place, value in zip(places, values, strict=True):
        if not value > 0:
            text, foot = "-" if np.isnan(value) else _short(value), axes.get_xaxis_transform()
            axes.text(place, 0.005, text, transform=foot, ha="center", va="bottom", **style)


def _tilt_if_many(axes: Axes, num_names: int) -> float:
    """Tilt the names under many bars; returns the inches that this takes."""
    if num_names <= 6:
        return 0.0
    axes.tick_params(axis="x", labelrotation=25)
    return 0.3


def _mean_and_interval(rows: pd.DataFrame, x: str, metric: str) -> tuple[pd.Series[float], FloatArray]:
    """Mean per value of `x`, and half the 95 % interval of that mean (Student's t; 0 where there is one value).

    The interval is that over seeds: what other keys change, over which the mean is taken too, is no chance.
    """
    if "seed" in rows and x != "seed":
        rows = (
            rows.astype({metric: float})
            .groupby([x, "seed"], as_index=False, observed=True, dropna=False)[[metric]]
            .mean()
        )
    values = rows[metric].astype(float).groupby(rows[x], sort=True, observed=True)
    mean, count = values.mean(), values.count()
    factor = np.array([interval_factor(max(int(num), 2)) for num in count])
    spread = values.std().fillna(0.0).to_numpy(np.float64)
    half: FloatArray = factor * spread / np.sqrt(np.maximum(count.to_numpy(np.float64), 1.0))
    return mean, half


def _averaged(sweep: pd.DataFrame, *shown: str | None) -> str:
    """A second line for the title: the keys that a sweep varies (the columns before its seeds) beside those shown."""
    names = list(sweep.columns)
    keys = names[: names.index("seed")] if "seed" in names else []
    point = [sweep[name].map(repr) for name in shown if name is not None]
    others = [key for key in keys if key not in shown and sweep[key].map(repr).groupby(point).nunique().max() > 1]
    return "\nmean over " + ", ".join(map(_plain_name, others)) if others else ""


def _with_parameters(sweep: pd.DataFrame, *names: str | None) -> pd.DataFrame:
    """Parameters that are not numbers throughout as words, which keep the order in which the sweep has them.

    So 8GiB stands before 12GiB, and a value may be null, a list or a block.
    """
    import pandas as pd

    words = {}
    for name in names:
        if name is not None and not all(map(_is_number, sweep[name].tolist())):
            texts = [_word(value) for value in sweep[name].tolist()]
            words[name] = pd.Categorical(texts, categories=list(dict.fromkeys(texts)), ordered=True)
    return sweep.assign(**words)


def _is_number(value: Any) -> bool:
    """A number that has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _word(value: Any) -> str:
    """A value as text; an empty cell of sweep.csv is null, beside which whole numbers are read as 8.0."""
    if value is None or value != value:
        return "null"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _positions(column: pd.Series[Any]) -> dict[Any, float]:
    """Where each value of a parameter stands: at its number, or side by side if it is a word."""
    if column.dtype == "category":
        return {word: float(index) for index, word in enumerate(column.cat.categories)}
    return {value: float(value) for value in sorted(column.unique().tolist())}


def _parameter_axis(axes: Axes, points: Mapping[Any, float]) -> None:
    """Powers are spaced evenly (logarithmic), and every value of the sweep has its tick."""
    from matplotlib.ticker import NullLocator

    places, is_word = list(points.values()), any(isinstance(value, str) for value in points)
    if len(places) >= 3 and places[0] > 0 and places[-1] / places[0] >= 8:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if len(places) <= 12 or is_word:
        _name_ticks(axes, places, list(points), CHARACTERS_ACROSS)


def _wrapped(name: str, room: int) -> str:
    """The name in lines of at most `room` characters, broken behind spaces and signs where that will do."""
    lines = [""]
    for piece in re.split(r"(?<=[\s:_./,-])", name):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return "\n".join(part for line in lines for part in textwrap.wrap(line, room))


def _name_ticks(axes: Axes, places: Sequence[float], values: Sequence[Any], num_characters: int) -> None:
    """Ticks named by their values, no name over another: words are broken or tilted, numbers left out."""
    names = [_short(value) for value in values]
    room = num_characters // len(names)
    if any(isinstance(value, str) for value in values) and max(map(len, names)) >= room:
        if room >= 12:
            axes.set_xticks(places, [_wrapped(name, room - 1) for name in names])
        else:
            every = -(-len(names) // MOST_ROWS)
            shown = ["" if index % every else _cut(name, LONGEST_WORD // 2) for index, name in enumerate(names)]
            axes.set_xticks(places, shown, rotation=30, ha="right", rotation_mode="anchor")
        return
    at = np.log(places) if axes.get_xscale() == "log" else np.asarray(places, np.float64)
    free_from = -np.inf
    for index, place in enumerate((at - at[0]) / (at[-1] - at[0] or 1.0) * num_characters):
        if place - len(names[index]) / 2 < free_from:
            names[index] = ""
        else:
            free_from = place + len(names[index]) / 2 + 0.5
    axes.set_xticks(places, names)


def _label_cells(axes: Axes, cells: FloatArray) -> None:
    middle = np.nanmin(cells) / 2 + np.nanmax(cells) / 2
    for (row, column), value in np.ndenumerate(cells):
        if not np.isnan(value):
            ink = "black" if value > middle else "white"
            axes.text(column, row, _short(value), ha="center", va="center", color=ink, fontsize=7.5)


def _short(value: Any) -> str:
    """At most three significant digits, no exponent up to a million; of a long text its beginning."""
    if isinstance(value, str | bool):
        return _cut(str(value), LONGEST_WORD)
    number = float(value)
    if abs(number) >= 1000 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.3g}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _plain_name(key: str) -> str:
    """`workload.arrivals.request_rate` is read as "request rate", `mean_ttft_ms` as "mean TTFT"."""
    words = key if key.startswith("kv") else key.rsplit(".", 1)[-1]
    words = words.removesuffix("_ms").removesuffix("_s").replace("_", " ")
    for name in ("ttft", "tpot", "itl", "e2el"):
        words = words.replace(name, name.upper())
    return words


def _with_unit(key: str) -> str:
    unit = METRIC_UNITS.get(key)
    if unit is None:
        unit = "ms" if key.endswith("_ms") else "s" if key.endswith("_s") else None
    if unit is None and key.startswith(("kv.", "kv_saturated.")):
        unit = "share"
    return _plain_name(key) if unit is None else f"{_plain_name(key)} ({unit})"


__all__ = [
    "compare_latency", "compare_memory", "compare_running", "compare_throughput", "latency", "memory",
    "running_waiting", "save", "sweep_curves", "sweep_heatmap", "utilization", "write_compare_plots",
    "write_run_plots", "write_sweep_plots",
]  # fmt: skip
