"""The reproduction: published values and ours stay apart, bars hold, the committed tables are what comes out."""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.reproduce import FIGURES, reproduce
from kvsim.reproduce.engine2023 import (
    SEQUENCE_OVERHEAD_US,
    STEP_OVERHEAD_US,
    Engine2023Cost,
    fit_sequence_us,
    fit_step_us,
)
from kvsim.reproduce.fig13 import PER_STEP
from kvsim.reproduce.fig15 import saving_at
from kvsim.reproduce.figure import Ours, Row, Scale
from kvsim.reproduce.page import REMARKS, page, sentence
from kvsim.reproduce.published import Published, published, read_published
from kvsim.reproduce.recipe import (
    ALL_AT_ONCE,
    BEAM_THETA,
    MEAN_LENGTHS,
    SAVED_AT_WIDTH_2,
    VLLM,
    lengths_of,
    scenario,
)
from kvsim.reproduce.run import PAGE, Reproduction, figures_named
from kvsim.reproduce.sustained import Search, crossing, search
from kvsim.reproduce.table import beside, from_csv, to_csv
from kvsim.reproduce.work import lengths_of_one
from kvsim.scheduling.plan import StepShape
from kvsim.types import ScenarioError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kvsim" / "reproduce"
COMMITTED = ROOT / "results" / "reproduce"
JOINS = {"published", "table", "run", "page", "__init__"}
"""Modules that know published values; they make no `ours`."""

FAST = ("table1", "fig18a", "fig19")
"""Run again in the ordinary suite; the others in the slow one."""

TINY = {"workload.num_requests": 24}


def ours_of(rows: list[Row]) -> list[float | None]:
    return [row.ours for row in rows]


def test_halving_the_memory_changes_ours() -> None:
    whole = reproduce(["fig2"], quick=True, jobs=1, changes=TINY)
    half = reproduce(["fig2"], quick=True, jobs=1, changes=TINY | {"memory.kv_cache_memory_bytes": "6GiB"})
    assert ours_of(whole.rows) != ours_of(half.rows)


def test_changing_the_published_values_does_not_change_ours() -> None:
    lies = {key: entry._replace(paper="1") for key, entry in published().items()}
    honest = reproduce(["table1", "fig2"], quick=True, jobs=1, changes=TINY)
    lied_to = reproduce(["table1", "fig2"], quick=True, jobs=1, changes=TINY, known=lies)
    assert ours_of(honest.rows) == ours_of(lied_to.rows)
    assert [row.difference for row in honest.rows] != [row.difference for row in lied_to.rows]


def test_no_module_that_makes_ours_can_reach_the_published_values() -> None:
    for path in sorted(PACKAGE.glob("*.py")):
        if path.stem in JOINS:
            continue
        tree = ast.parse(path.read_text("utf-8"))
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        reached = {
            module.removeprefix("kvsim.reproduce.") for module in modules if module.startswith("kvsim.reproduce")
        }
        reached |= names if "kvsim.reproduce" in modules else set()
        assert not reached & JOINS, f"{path.name} imports {sorted(reached & JOINS)}"
        assert "published.csv" not in path.read_text("utf-8")


def test_difference_is_counted_from_the_nearer_end_of_a_range() -> None:
    entry = Published("16.2..30.5", "S", "3")
    assert [entry.difference(ours) for ours in (20.0, 15.2, 32.5)] == [0.0, pytest.approx(-1.0), pytest.approx(2.0)]
    assert entry.is_met(33.5)
    assert not entry.is_met(33.6)


def test_a_bar_in_percent_is_of_the_published_value() -> None:
    entry = Published("50", "S", "12%")
    assert entry.is_met(56.0)
    assert not entry.is_met(43.9)
    assert Published("50", "S", "").is_met(1.0) is None


def test_every_published_value_has_a_number_a_mark_and_a_figure() -> None:
    for (figure, *_), entry in published().items():
        low, high = entry.bounds
        assert low <= high
        assert entry.mark in ("S", "M")
        assert figure in FIGURES


def test_a_published_value_that_nothing_answers_is_shown_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text("figure,series,x,quantity,paper,mark,bar\nfig2,orca-max,token states,share (%),20.4,S,5\n")
    rows = beside(FIGURES["fig2"], [Ours("vllm-v0", "token states", "share (%)", 95.9)], read_published(path))
    assert rows == [
        Row("fig2", "vllm-v0", "token states", "share (%)", "", 95.9, None, ""),
        Row("fig2", "orca-max", "token states", "share (%)", "20.4", None, None, "S"),
    ]
    assert from_csv(to_csv(rows)) == rows


def test_the_sustained_rate_is_where_the_curve_passes_the_bound() -> None:
    assert crossing([1.0, 2.0], [0.05, 5.0], bound=0.5) == pytest.approx(1.5)
    assert crossing([1.0, 2.0], [0.6, 5.0], bound=0.5) == 1.0
    assert crossing([1.0, 2.0], [0.1, 0.2], bound=0.5) == 2.0


def test_a_search_tries_rates_around_the_saturated_throughput() -> None:
    asked = []

    def latency_at(scenario: dict) -> float:
        asked.append(scenario["workload"]["arrivals"]["request_rate"])
        return 0.05 if asked[-1] < 11 else 2.0

    found = search(Search({"workload": {}}, 100.0), latency_at, lambda scenario: 10.0)
    assert asked == [8.5, 10.0, 11.5], "it stops at the first rate that is too high"
    assert 10.0 < found["sustained_rate"] < 11.5


@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"beam_width": 3}])
def test_latency_is_divided_by_the_length_of_one_output(sampling: dict) -> None:
    from kvsim.runs import run

    lengths = {"type": "fixed", "prompt": 20, "output": 7}
    one = scenario(VLLM, lengths, ALL_AT_ONCE, 2, sampling=sampling or None, record=("summary", "requests"))
    assert list(lengths_of_one(run(one).requests["output_tokens"], one)) == [7, 7]


@pytest.mark.parametrize("dataset", ["sharegpt", "alpaca"])
def test_lengths_have_the_published_means(dataset: str) -> None:
    import numpy as np

    from kvsim.workload.lengths import draw_lengths
    from kvsim.workload.spec import LengthsSpec

    drawn = draw_lengths(LengthsSpec(**lengths_of(dataset)), np.random.default_rng(5), 200_000)
    for lengths, mean in zip(drawn, MEAN_LENGTHS[dataset], strict=True):
        assert float(lengths.mean()) == pytest.approx(mean, rel=0.01)


def test_step_time_of_2023_is_the_kernels_and_two_overheads() -> None:
    bare = Engine2023Cost("opt-13b", step_us=0.0, sequence_us=0.0)
    full = Engine2023Cost("opt-13b", step_us=100.0, sequence_us=10.0)
    slow = Engine2023Cost("opt-13b", step_us=0.0, sequence_us=0.0, attention_factor=2.0)
    shape = StepShape(num_decodes=8, context_tokens=4000)
    assert full.step_ns(shape) - bare.step_ns(shape) == 180_000
    attention_ns = bare.step_ns(shape) - bare.step_ns(shape._replace(context_tokens=8))
    assert slow.step_ns(shape) - bare.step_ns(shape) == attention_ns > 0
    assert slow.step_ns(StepShape(prefills=((0, 64),))) == bare.step_ns(StepShape(prefills=((0, 64),)))


def test_the_constant_overhead_is_the_fitted_one() -> None:
    assert fit_step_us() == pytest.approx(STEP_OVERHEAD_US, abs=25.0)


def test_the_constant_of_the_experiment_is_set_by_figure_13a() -> None:
    rows = {(row.series, row.x): row for row in committed("fig13a")}
    assert rows["vllm-v0", PER_STEP].ours == pytest.approx(float(rows["vllm-v0", "2/s"].paper), rel=0.03)


def test_the_overhead_per_sequence_is_found_by_halving() -> None:
    found = fit_sequence_us(lambda scenario: 6.0 - (scenario["cost"]["sequence_us"] - 400) / 1000, 0.0)
    assert found == pytest.approx(410, abs=4)


@pytest.mark.deep
def test_the_overhead_per_sequence_is_the_fitted_one() -> None:
    from kvsim.runs import run

    fitted = fit_sequence_us(lambda scenario: run(scenario).summary["request_throughput"], STEP_OVERHEAD_US, 6)
    assert fitted == pytest.approx(SEQUENCE_OVERHEAD_US, rel=0.1)


@pytest.mark.deep
@pytest.mark.parametrize("dataset", BEAM_THETA)
def test_theta_is_set_by_the_saving_at_width_2(dataset: str) -> None:
    from kvsim.runs import run

    theta, published_saving = BEAM_THETA[dataset], SAVED_AT_WIDTH_2[dataset]
    savings = [100 * run(saving_at(theta * share, dataset)).summary["sharing_saving"] for share in (0.8, 1.25)]
    assert savings[0] < published_saving < savings[1]


def test_unknown_figures_are_named() -> None:
    assert [figure.name for figure in figures_named(["fig13", "table1"])] == ["table1", "fig13a", "fig13b"]
    with pytest.raises(ScenarioError, match="there is no 'fig3'; known are table1"):
        figures_named(["fig3"])
    assert main(["reproduce", "fig3"]) == 2


def test_every_figure_names_its_cases_and_is_smaller_when_quick() -> None:
    for figure in FIGURES.values():
        full, quick = figure.cases(Scale()), figure.cases(Scale(quick=True))
        assert full.keys() == quick.keys()


@pytest.mark.parametrize(
    ("args", "there", "expected"),
    [
        (["table1", "--out", "file"], "file", "error: file: cannot hold the results: File exists; choose another --ou"),
        (["all", "--out", "."], "README.md", "error: README.md: is no page of ours, and would be replaced; choose an"),
    ],
)
def test_a_place_that_cannot_hold_the_results_is_refused_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    there: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(there).write_text("mine")
    monkeypatch.setattr("kvsim.reproduce.run.run_cases", None)
    assert main(["reproduce", *args]) == 2
    assert capsys.readouterr().err.startswith(expected)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_prints_json_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["reproduce", "table1", "fig19", "--quick", "--jobs", "1", "--out", str(tmp_path / "out"), "--json"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert {row["figure"] for row in rows} == {"table1", "fig19"}
    assert set(rows[0]) == set(Row._fields)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["fig19.csv", "fig19.png", "table1.csv", "table1.png"]


def test_the_command_says_how_near_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "table1", "--quick", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert "5 of 5 values lie within their bar." in text
    assert "15.7" in text
    assert (tmp_path / "results" / "reproduce" / "table1.csv").is_file()


def committed(name: str) -> list[Row]:
    return from_csv((COMMITTED / f"{name}.csv").read_text("utf-8"))


def drift(name: str) -> list[str]:
    """Rows that a run of today makes differently from the committed table."""
    known = committed(name)
    now = reproduce([name], quick=True, jobs=1).tables[name]
    assert [row[:5] for row in now] == [row[:5] for row in known]
    return [
        f"{new.series} {new.x} {new.quantity}: {old.ours} is now {new.ours}"
        for old, new in zip(known, now, strict=True)
        if (new.ours is None) != (old.ours is None) or (new.ours or 0.0) != pytest.approx(old.ours or 0.0, rel=1e-3)
    ]


@pytest.mark.parametrize("name", FAST)
def test_the_committed_tables_are_what_comes_out(name: str) -> None:
    assert drift(name) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", [name for name in FIGURES if name not in FAST])
def test_all_committed_tables_are_what_comes_out(name: str) -> None:
    assert drift(name) == []


def test_the_committed_tables_keep_their_bars() -> None:
    missed = []
    for name in FIGURES:
        for row in committed(name):
            entry = published().get((row.figure, row.series, row.x, row.quantity))
            if entry is not None and entry.bar and not entry.is_met(row.ours or 0.0):
                missed.append((name, row.series, row.x))
    assert missed == []


@pytest.mark.parametrize("name", FIGURES)
def test_committed_differences_and_marks_follow_from_the_published_values(name: str) -> None:
    rows = committed(name)
    own = [Ours(row.series, row.x, row.quantity, row.ours) for row in rows]
    for row, again in zip(rows, beside(FIGURES[name], own, published()), strict=True):
        assert row[:4] == again[:4]
        assert (row.paper, row.mark) == (again.paper, again.mark)
        assert row.difference == pytest.approx(again.difference, abs=1e-4 * abs(row.ours or 0.0))


def test_the_committed_page_is_made_from_the_committed_tables() -> None:
    tables = {name: committed(name) for name in FIGURES}
    assert page(Reproduction(tables, quick=True, cpu_s=0.0)) == (COMMITTED / PAGE).read_text("utf-8")


def test_a_reader_finds_every_figure_by_its_number() -> None:
    text = (COMMITTED / PAGE).read_text("utf-8")
    for heading in (
        "Table 1",
        "Figure 2",
        "Figure 12",
        "Figure 13a",
        "Figure 13b",
        "Figure 14",
        "Figure 15",
        "Figure 16",
        "Figure 17",
        "Figure 18a",
        "Figure 18b",
        "Figure 19",
    ):
        assert f"## {heading}:" in text
    for name in FIGURES:
        assert sentence(committed(name)) in text
        assert (COMMITTED / f"{name}.png").is_file()
    assert set(REMARKS) <= set(FIGURES)


def test_committed_tables_have_the_stated_columns() -> None:
    for name in FIGURES:
        with (COMMITTED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            assert next(csv.reader(file)) == list(Row._fields)
