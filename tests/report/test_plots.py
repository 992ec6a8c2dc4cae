"""Pictures show what the tables say, are the same bytes every time, and touch nobody's settings."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from report.frames import BLOCK_SIZE, CAPACITY, PARTS, make_compare, make_requests, make_steps, make_sweep

from kvsim.report import plots
from kvsim.report.series import step_curves, time_weighted_mean

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def texts(figure) -> str:
    """Everything a reader can read in a figure."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_run_plots_are_written_and_equal_bytes(tmp_path):
    arguments = (make_steps(), make_requests(), {"block_size": BLOCK_SIZE})
    first = plots.write_run_plots(*arguments, tmp_path / "a")
    second = plots.write_run_plots(*arguments, tmp_path / "b")
    assert [path.name for path in first] == ["memory.png", "running.png", "utilization.png", "latency.png"]
    for one, other in zip(first, second, strict=True):
        content = one.read_bytes()
        assert content.startswith(PNG_MAGIC)
        assert b"Software" not in content
        assert content == other.read_bytes()


def test_a_users_settings_change_nothing_and_stay(tmp_path):
    import matplotlib

    expected = plots.save(plots.memory(make_steps()), tmp_path / "a.png").read_bytes()
    with matplotlib.rc_context({"font.size": 22, "axes.facecolor": "black"}):
        got = plots.save(plots.memory(make_steps()), tmp_path / "b.png").read_bytes()
        assert matplotlib.rcParams["font.size"] == 22
    assert got == expected


def test_pyplot_is_never_loaded():
    code = (
        "import sys; from kvsim.report import plots; assert 'matplotlib' not in sys.modules; "
        "import pandas; plots.latency(pandas.DataFrame({'status': [], 'ttft_ms': [], 'tpot_ms': [], 'e2el_ms': []})); "
        "assert 'matplotlib.figure' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_memory_shows_shares_and_capacity():
    steps = make_steps()
    figure = plots.memory(steps)
    shown = texts(figure)
    mean = time_weighted_mean(steps, steps["token_states"]) / CAPACITY
    assert f"token states {100 * mean:.1f} %" in shown
    assert "share of 16,000 slots" in shown
    assert "external fragmentation" not in shown
    assert "time (s); blank where nothing ran" in shown


def test_stacked_parts_reach_the_capacity_after_sampling():
    curves = step_curves(make_steps(50_000), list(PARTS))
    total = sum(curves.values[name] for name in PARTS)
    known = total[~np.isnan(total)]
    assert len(curves.times) <= 2100
    np.testing.assert_allclose(known, CAPACITY)


def test_sampling_keeps_the_time_weighted_mean():
    steps = make_steps(50_000)
    curves = step_curves(steps, ["num_running", "num_waiting"])
    widths = np.diff(curves.times)
    for name in ("num_running", "num_waiting"):
        value = curves.values[name][:-1]
        known = ~np.isnan(value)
        mean = (value[known] * widths[known]).sum() / widths[known].sum()
        assert mean == pytest.approx(time_weighted_mean(steps, steps[name]), rel=2e-3)


def test_a_step_curve_by_hand():
    steps = pd.DataFrame({"start_s": [1.0, 2.0, 7.0], "duration_ms": [1000.0, 2000.0, 1000.0], "x": [3, 5, 4]})
    curves = step_curves(steps, ["x"])
    assert curves.times.tolist() == [1.0, 2.0, 4.0, 7.0, 8.0]
    np.testing.assert_array_equal(curves.values["x"], [3, 5, np.nan, 4, 4])
    assert time_weighted_mean(steps, [3, 5, 4]) == pytest.approx((3 + 10 + 4) / 4)


@pytest.mark.parametrize(("seconds", "unit", "last"), [(0.5, "ms", 500.0), (60, "s", 60.0), (9000, "h", 2.5)])
def test_the_time_axis_has_a_fitting_unit(seconds, unit, last):
    steps = pd.DataFrame({"start_s": [0.0], "duration_ms": [seconds * 1e3], "x": [1]})
    curves = step_curves(steps, ["x"])
    assert curves.unit == unit
    assert curves.times[-1] == pytest.approx(last)


def test_running_names_mean_and_peak():
    steps = make_steps()
    shown = texts(plots.running_waiting(steps))
    assert f"peak {steps['num_running'].max()}" in shown
    assert "swapped out" not in shown
    assert "swapped out" in texts(plots.running_waiting(steps.assign(num_swapped=1)))


def test_utilization_stands_beside_its_theory():
    steps = pd.DataFrame(
        {
            "start_s": [0.0],
            "duration_ms": [2000.0],
            "num_running": [2],
            "token_states": [1000],
            "block_utilization": [0.97],
        }
    )
    # Two sequences of 500 tokens, blocks of 32: half a block of 500 tokens is 3.2 %.
    assert "= 96.8 %" in texts(plots.utilization(steps, 32))
    summary = {"block_utilization": 0.9612, "block_utilization_theory": 0.984}
    shown = texts(plots.utilization(steps, 32, summary))
    assert "mean 96.1 %" in shown
    assert "= 98.4 %" in shown
    assert "theory" not in texts(plots.utilization(steps))


def test_latency_marks_are_linear_percentiles_or_the_summarys():
    requests = (
        make_requests()
        .iloc[:4]
        .assign(status="finished", ttft_ms=[40.0, 10.0, 30.0, 20.0], tpot_ms=[np.nan] * 4, e2el_ms=[20_000.0] * 4)
    )
    shown = texts(plots.latency(requests))
    assert "p50 25 ms\np90 37 ms\np99 39.7 ms" in shown
    assert "none" in shown
    assert "p50 20 s" in shown
    assert "p50 26 ms" in texts(plots.latency(requests, {"median_ttft_ms": 26.0}))


def test_compare_memory_labels_shares_and_calm_engines():
    shown = texts(plots.compare_memory(make_compare()))
    for share in ("20.4", "57.3", "35.7", "96.3"):
        assert share in shown
    assert "no-evict*" in shown
    assert "paged*" not in shown
    assert "no request ever waited" in shown


def test_compare_plots_are_written(tmp_path):
    paths = plots.write_compare_plots(make_compare(), tmp_path)
    assert [path.name for path in paths] == [
        "compare_memory.png",
        "compare_running.png",
        "compare_throughput.png",
        "compare_latency.png",
    ]
    assert "21" in texts(plots.compare_running(make_compare()))


def test_sweep_curves_show_mean_and_interval():
    figure = plots.sweep_curves(pd.DataFrame({"block": [8, 8, 8, 16], "speed": [1.0, 2.0, 3.0, 5.0]}), "block", "speed")
    axes = figure.axes[0]
    assert axes.lines[0].get_ydata().tolist() == [2.0, 5.0]
    outline = axes.collections[0].get_paths()[0].vertices
    # Student's t for two degrees of freedom: 4.303 x 1 / sqrt(3).
    assert outline[outline[:, 0] == 8, 1].max() == pytest.approx(2 + 4.3027 / 3**0.5, rel=1e-4)
    assert outline[outline[:, 0] == 16, 1].tolist() == pytest.approx([5.0] * (outline[:, 0] == 16).sum())


def test_sweep_plots_are_written_and_empty_metrics_left_out(tmp_path):
    paths = plots.write_sweep_plots(make_sweep(), ["allocator.block_size", "workload.arrivals.request_rate"], tmp_path)
    assert [path.name for path in paths] == [
        "sweep_output_throughput.png",
        "heatmap_output_throughput.png",
        "sweep_mean_ttft_ms.png",
        "heatmap_mean_ttft_ms.png",
    ]
    figure = plots.sweep_curves(
        make_sweep(), "allocator.block_size", "mean_ttft_ms", by="workload.arrivals.request_rate"
    )
    shown = texts(figure)
    assert "mean TTFT (ms)" in shown
    assert "block size (tokens)" in shown
    assert "request rate (requests/s)" in shown


def test_a_picture_says_over_which_keys_it_takes_the_mean():
    """A key that varies together with one that is shown is none of them."""
    sweep = make_sweep()
    size, rate = "allocator.block_size", "workload.arrivals.request_rate"
    sweep.insert(0, "name", sweep[size].map("of {}".format))
    sweep.insert(0, "sampling.n", [[1], [2]] * 22 + [[1]])
    titles = [
        plots.sweep_curves(sweep, size, "mean_ttft_ms").axes[0].get_title("left"),
        plots.sweep_curves(sweep, size, "mean_ttft_ms", by=rate).axes[0].get_title("left"),
        plots.sweep_heatmap(sweep, size, rate, "mean_ttft_ms").axes[0].get_title("left"),
        plots.sweep_curves(make_sweep(), size, "mean_ttft_ms", by=rate).axes[0].get_title("left"),
    ]
    assert titles[0].endswith("\nmean over n, request rate")
    assert titles[1].endswith("\nmean over n")
    assert titles[2].endswith("\nmean over n")
    assert "mean over" not in titles[3]


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_band_is_over_seeds_and_no_other_key(seeds):
    """Rates differ by 100, seeds by 2: of one seed there is no interval, of two it is that of the means 60 and 62."""
    rows = [(size, rate, seed, rate + 2.0 * seed) for size in (8, 16) for rate in (10, 110) for seed in range(seeds)]
    sweep = pd.DataFrame(rows, columns=["block_size", "rate", "seed", "y"])
    band = plots.sweep_curves(sweep, "block_size", "y").axes[0].collections[0].get_paths()[0].vertices[:, 1]
    half = 0.0 if seeds == 1 else 12.706
    assert (band.min(), band.max()) == pytest.approx((59 + seeds - half, 59 + seeds + half), abs=0.01)


def test_words_as_a_parameter(tmp_path):
    sweep = pd.DataFrame({"engine": ["paged", "orca-max"], "output_throughput": [10.0, 5.0]})
    assert "orca-max" in texts(plots.sweep_curves(sweep, "engine", "output_throughput"))
    plots.write_sweep_plots(sweep, ["engine"], tmp_path)


def test_a_legend_hides_no_curve(tmp_path):
    """Two curves with broad bands leave no place for one, and it was put over them."""
    rows = [
        {"x": x, "size": size, "seed": seed, "speed": 10 * x + seed * 40 + index * 5}
        for x in (1, 2, 3)
        for index, size in enumerate(("2GiB", "4GiB"))
        for seed in (0, 1)
    ]
    figure = plots.sweep_curves(pd.DataFrame(rows), "x", "speed", by="size")
    figure.savefig(tmp_path / "curves.png")
    legend = figure.legends[0].get_window_extent()
    assert not legend.overlaps(figure.axes[0].get_window_extent())
    assert not legend.overlaps(figure.axes[0].xaxis.label.get_window_extent())


def test_long_names_are_broken_behind_their_signs():
    rows = [{"victim": f"my_policies:{name}", "speed": 1.0} for name in ("fewest_known", "biggest", "cheapest")]
    axes = plots.sweep_curves(pd.DataFrame(rows), "victim", "speed").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "my_policies:fewest_\nknown",
        "my_policies:biggest",
        "my_policies:cheapest",
    ]


def test_words_stand_in_the_order_of_the_sweep():
    """Not in that of the alphabet, in which 12GiB is before 8GiB; an empty cell of the table is null."""
    sizes = ["8GiB", "12GiB", float("nan"), "100GiB"]
    sweep = pd.DataFrame(
        {"size": sizes * 2, "mode": ["swap"] * 4 + ["drop"] * 4, "speed": [*range(1, 5), *range(2, 6)]}
    )
    figure = plots.sweep_curves(sweep, "size", "speed", by="mode")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8GiB", "12GiB", "null", "100GiB"]
    assert [label.get_text() for label in figure.legends[0].get_texts()] == ["swap", "drop"]
    assert axes.lines[0].get_ydata().tolist() == [1, 2, 3, 4]
    axes = plots.sweep_heatmap(sweep, "size", "mode", "speed").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8GiB", "12GiB", "null", "100GiB"]
    assert axes.images[0].get_array().tolist() == [[1, 2, 3, 4], [2, 3, 4, 5]]


def test_empty_tables_give_pictures_that_say_so(tmp_path):
    steps, requests = make_steps().iloc[:0], make_requests().iloc[:0]
    assert len(plots.write_run_plots(steps, requests, {"block_size": 16}, tmp_path)) == 4
    assert "no step ran" in texts(plots.memory(steps))
    assert "none" in texts(plots.latency(requests))
    plots.write_compare_plots(make_compare().iloc[:0], tmp_path)


def test_one_step_run(tmp_path):
    plots.write_run_plots(make_steps(1), make_requests(1), {"block_size": 16}, tmp_path)


def shown_ticks(axis) -> list[str]:
    """Labels of an axis as drawn, those that are hidden or empty left out."""
    return [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible() and tick.get_text()]


def test_a_panel_without_values_leaves_the_axis_it_shares():
    """One request of one token: there is no time per output token, and the curves of the others are seen."""
    requests = make_requests(1).assign(status="finished", ttft_ms=6.0, tpot_ms=np.nan, e2el_ms=6.0)
    figure = plots.latency(requests)
    figure.canvas.draw()
    first, empty, last = figure.axes
    assert shown_ticks(first.yaxis)[0] == "0%"
    assert "none" in texts(empty)
    for axes in (first, last):
        assert axes.lines[0].get_xydata().tolist() == [[6, 0], [6, 1]]
        assert axes.get_xlim()[1] > 6.2


def test_engines_in_which_nothing_ran_are_said_to_be_so():
    compare = make_compare()
    kv = [column for column in compare if column.startswith("kv")]
    compare.loc[0, [*kv, "running_mean", "output_throughput", "median_tpot_ms"]] = np.nan
    shown = texts(plots.compare_memory(compare))
    assert "no step ran" in shown
    assert f"{compare['engine'][0]}*" not in shown
    compare[kv] = np.nan
    assert "no request ever waited" not in texts(plots.compare_memory(compare))
    for draw in (plots.compare_running, plots.compare_latency):
        figure = draw(compare)
        figure.canvas.draw()
        (axes,) = figure.axes
        feet = [text for text in axes.texts if text.get_text() == "-"]
        assert feet
        box = axes.get_window_extent()
        assert all(box.y0 <= text.get_window_extent().y0 < box.y0 + 10 for text in feet)
    numbers = compare.select_dtypes("number").columns
    axes = plots.compare_throughput(compare.assign(**dict.fromkeys(numbers, np.nan))).axes[0]
    assert axes.get_ylim() == (0, 1)


def test_ticks_of_a_short_axis_read_differently():
    steps = make_steps().assign(block_utilization=0.997)
    figure = plots.utilization(steps, 16, {"block_utilization": 0.997, "block_utilization_theory": 0.998})
    figure.canvas.draw()
    ticks = shown_ticks(figure.axes[0].yaxis)
    assert len(set(ticks)) == len(ticks)
    assert "99.5%" in ticks


def test_work_between_long_pauses_is_seen():
    """Two requests, hours apart: each of a tenth of a second, wide enough to be seen, with its mean over time."""
    starts = np.array([0.0, 0.05, 9999.0, 9999.02])
    steps = make_steps(4).assign(start_s=starts, duration_ms=[50.0, 50.0, 20.0, 80.0], num_running=[1, 3, 5, 10])
    curves = step_curves(steps, ["num_running"])
    wide = 9999.1 * 0.0026 / 3600
    np.testing.assert_allclose(curves.times, [0, wide, 9999 / 3600, 9999 / 3600 + wide])
    np.testing.assert_allclose(curves.values["num_running"], [2, np.nan, 9, 9])
    areas = plots.memory(steps).axes[0].patches
    assert areas
    for area in areas:
        values, edges, _ = area.get_data()
        np.testing.assert_array_equal(edges, curves.times)
        assert np.isfinite(values).tolist() == [True, False, True]


def test_an_infinite_rate_is_a_word():
    rates = pd.DataFrame({"rate": [0.01, 1.0, 100.0, float("inf")], "speed": [1.0, 2, 3, 4]})
    axes = plots.sweep_curves(rates, "rate", "speed").axes[0]
    assert shown_ticks(axes.xaxis) == ["0.01", "1", "100", "inf"]
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 2, 3]


def test_no_two_of_many_curves_look_alike():
    sweep = pd.DataFrame({"x": [1, 2] * 20, "by": np.repeat(np.arange(20), 2), "speed": np.arange(40.0)})
    figure = plots.sweep_curves(sweep, "x", "speed", by="by")
    looks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == 20
    assert "19" in [text.get_text() for text in figure.legends[0].get_texts()]


WORDY = [f"{{'type': 'lognormal', 'prompt_mean': {mean}}}" for mean in range(40)]


@pytest.mark.parametrize(
    "values",
    [range(1, 31), [0, 1, 2, 1000], [0.01, 0.012, 5.0], ["swap", "recompute"], WORDY[:4], WORDY[:9], WORDY],
    ids=["many", "crowded", "close", "words", "blocks", "more blocks", "many blocks"],
)
def test_names_of_ticks_do_not_lie_over_each_other(values):
    rows = [{"x": value, "y": other, "speed": float(other)} for value in values for other in range(40)]
    sweep = pd.DataFrame(rows)
    for figure in (
        plots.sweep_curves(sweep[sweep.y < 2], "x", "speed", by="y"),
        plots.sweep_heatmap(sweep, "x", "y", "speed"),
    ):
        figure.canvas.draw()
        axes = figure.axes[0]
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text()]
            tilted = labels[0].get_rotation() != 0
            boxes = [label.get_window_extent() for label in labels]
            gaps = [
                max(later.x0 - one.x1, later.y0 - one.y1) if not tilted else later.x1 - one.x1 - one.height / 8
                for one, later in pairwise(boxes)
            ]
            assert min(gaps, default=0) >= 0, (axis, [label.get_text() for label in labels])
