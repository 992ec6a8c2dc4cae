"""`kvsim report` and `kvsim plot`: results folders after the fact, and what a page is made of."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.report.blockmap import LIFE_CODES
from kvsim.report.page import FIGURES, PARTS, compare_page, run_page
from kvsim.result import RunResult
from kvsim.runs import Options, compare, run

SCENARIO: dict[str, Any] = {
    "name": "small",
    "memory": {"num_gpu_blocks_override": 60},
    "allocator": {"block_size": 4},
    "scheduler": {"max_model_len": 64},
    "workload": {
        "num_requests": 12,
        "arrivals": {"type": "poisson", "request_rate": 200},
        "lengths": {"type": "uniform", "prompt": [3, 30], "output": [2, 20]},
    },
}
RUN_PICTURES = ("memory.png", "running.png", "utilization.png", "latency.png")
WITH_PAGE = Options(plots=False, report=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a page."""
    out = tmp_path_factory.mktemp("run") / "out"
    run(SCENARIO, out=out, options=Options(report=True))
    return out


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change, without its page."""
    copy = tmp_path / "out"
    shutil.copytree(original, copy)
    (copy / "report.html").unlink()
    return copy


def test_the_page_comes_out_the_same_afterwards(folder: Path, original: Path) -> None:
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_bytes() == (original / "report.html").read_bytes()


def test_pictures_are_drawn_again(folder: Path, original: Path) -> None:
    for name in RUN_PICTURES:
        (folder / name).unlink()
    assert main(["plot", str(folder)]) == 0
    for name in RUN_PICTURES:
        assert (folder / name).read_bytes() == (original / name).read_bytes()


def test_a_folder_without_its_scenario_gets_a_page_without_a_map(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "scenario.yaml").unlink()
    assert main(["report", str(folder)]) == 0
    assert "no block map" in capsys.readouterr().err
    text = (folder / "report.html").read_text()
    assert "block-map-title" not in text
    assert "no block map: scenario.yaml is not in the folder" in text


def test_a_run_that_does_not_come_out_again_gets_no_map(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"completed": summary["completed"] - 1}))
    assert main(["report", str(folder)]) == 0
    assert "gives other figures now" in capsys.readouterr().err
    assert "block-map-title" not in (folder / "report.html").read_text()


@pytest.mark.parametrize("command", ["plot", "report"])
@pytest.mark.parametrize("name", ["steps.csv", "requests.csv"])
@pytest.mark.parametrize(
    "keep", ["header", "part of the header", "part of a row", "cells of a row", "half", "too many"]
)
def test_a_table_that_is_cut_off_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, keep: str
) -> None:
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text(
        {
            "header": lines[0],
            "part of the header": lines[0][:20],
            "part of a row": "".join(lines)[:-3],
            "cells of a row": "".join(lines[:-1]) + lines[-1].rsplit(",", 2)[0] + "\n",
            "half": "".join(lines[: len(lines) // 2]),
            "too many": "".join([lines[0].rsplit(",", 2)[0], "\n", *lines[1:]]),
        }[keep]
    )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([command, str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder / name}: ")
    assert "cut off" in error
    assert "run the scenario again" in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_table_without_times_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = (folder / "steps.csv").read_text().splitlines()
    rows = [re.sub(r"^(\d+),[^,]+", r"\1,", row) for row in rows]
    (folder / "steps.csv").write_text("\n".join([header, *rows, ""]))
    assert main(["plot", str(folder)]) == 2
    assert "its files are damaged, or not of one run" in capsys.readouterr().err


def test_requests_that_never_arrived_may_lack_a_row(tmp_path: Path) -> None:
    """Behind a full client they have none, in an open loop they have one."""
    for concurrency in (None, 1):
        out = tmp_path / str(concurrency)
        run(SCENARIO, out=out, horizon="30ms", **{"workload.max_concurrency": concurrency})
        summary = json.loads((out / "summary.json").read_text())
        assert summary["num_not_arrived"] > 0
        assert main(["plot", str(out)]) == 0


def test_a_trace_that_is_gone_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "scenario.yaml").read_text()
    (folder / "scenario.yaml").write_text(text.replace("trace: null", "trace: gone.csv"))
    assert main(["report", str(folder)]) == 0
    assert "cannot be repeated" in capsys.readouterr().err


def test_comparison(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compared = compare(SCENARIO, ("paged", "orca-max"), out=out, options=WITH_PAGE)
    assert all((out / engine / "report.html").is_file() for engine in compared.runs)
    before = (out / "report.html").read_text()
    assert '"engine":"paged"' in before
    assert '"engine":"orca-max"' in before
    assert main(["plot", str(out)]) == 0
    for name in ("compare_memory.png", "paged/memory.png", "orca-max/latency.png"):
        assert (out / name).is_file()
    assert main(["report", str(out)]) == 0
    after = (out / "report.html").read_text()
    assert after.count("data:image/png;base64,") == 4
    assert after.split("kvsim-data")[1] == before.split("kvsim-data")[1]


@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_comparison_that_is_cut_off_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = tmp_path / "out"
    compare(SCENARIO, ("paged", "orca-max"), out=out)
    table = out / "compare.csv"
    whole = table.read_text()
    for text, expected in (
        (whole[: whole.index("orca-max")], "has no row of orca-max"),
        (whole[:-5], "is cut off in the middle of a line"),
    ):
        table.write_text(text)
        assert main([command, str(out)]) == 2
        assert f"{table}: {expected}" in capsys.readouterr().err
    table.write_text(whole)
    (out / "orca-max" / "summary.json").write_text("{}")
    assert main([command, str(out)]) == 2
    assert not [*out.glob("*.png"), *out.glob("*.html")], "where one run is damaged nothing is written"


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import kvsim

    out = tmp_path / "out"
    kvsim.sweep(SCENARIO, {"allocator.block_size": [4, 8]}, jobs=1, out=out)
    assert main(["plot", str(out)]) == 0
    assert (out / "sweep_output_throughput.png").is_file()
    assert main(["report", str(out)]) == 2
    assert "is a sweep" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plot", "report"])
def test_other_folders_are_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "has none of summary.json" in capsys.readouterr().err
    assert main([command, str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("[1, 2]")
    assert main([command, str(tmp_path)]) == 2
    assert "is not the summary of a run" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{")
    assert main([command, str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("table", "pictures"), [("steps", RUN_PICTURES[:3]), ("requests", RUN_PICTURES[3:])])
def test_one_table_is_drawn_without_the_other(table: str, pictures: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(SCENARIO, out=out, options=Options(report=True, record=(table,)))
    assert sorted(path.name for path in out.glob("*.png")) == sorted(pictures)
    page = (out / "report.html").read_bytes()
    assert page.count(b"data:image/png;base64,") == len(pictures)
    for picture in pictures:
        (out / picture).unlink()
    assert main(["plot", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").read_bytes() == page
    for draw in (result.plot.memory, result.plot.running_waiting, result.plot.utilization, result.plot.latency):
        assert draw().axes


def test_tables_that_were_not_recorded_cannot_be_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "steps.csv").unlink()
    (folder / "requests.csv").unlink()
    assert main(["plot", str(folder)]) == 2
    assert "there is no steps.csv or requests.csv" in capsys.readouterr().err


def test_warnings_that_name_another_place_are_no_other_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the resolved scenario warns of is found in other lines, or, where the key is left out, not at all."""
    out = tmp_path / "out"
    values = {"scheduler.preemption": "swap", "allocator.watermark": 0.1}
    compared = compare(SCENARIO, ("paged", "static"), out=out, **values)
    assert all(run.summary["warnings"] for run in compared.runs.values())
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().err == ""
    assert '"engine":"paged"' in (out / "report.html").read_text()
    assert '"engine":"static"' in (out / "report.html").read_text()


def test_an_engine_in_which_nobody_waited_shows_all_the_time(tmp_path: Path) -> None:
    runs = compare(SCENARIO, ("paged", "static"), **{"workload.arrivals.request_rate": 20.0}).runs
    calm, busy = runs["paged"].summary, runs["static"].summary
    assert calm["kv_saturated"]["token_states"] is None
    assert busy["kv_saturated"]["token_states"] is not None
    row = re.search(r'<tr><th scope="row">token states</th>(.*?)</tr>', compare_page(runs))
    assert row is not None
    shares = re.findall(r"([0-9.]+) %", row[1])
    assert shares == [
        f"{100 * share:.1f}" for share in (calm["kv"]["token_states"], busy["kv_saturated"]["token_states"])
    ]


def test_the_page_says_what_was_run_and_what_became_of_it() -> None:
    one = run(SCENARIO, engine="orca-max", horizon="30ms", **{"workload.num_requests": 1}).summary
    assert one["num_unfinished"] == 1
    text = run_page(RunResult(one), draw_missing=False)
    assert "seed 0, 1 request, 240 slots of KV memory." in text
    assert "<dt>cut off</dt><dd class='value'>1</dd>" in text
    assert "60 KV blocks of 4 slots" in run_page(run(SCENARIO), draw_missing=False)


def test_a_comparison_speaks_of_the_kinds_of_memory_that_are_in_it(tmp_path: Path) -> None:
    for engines, has_both in (
        (("paged", "vllm-v0"), False),
        (("orca-max", "static"), False),
        (("paged", "static"), True),
    ):
        out = tmp_path / engines[1]
        compare(SCENARIO, engines, out=out, options=WITH_PAGE)
        text = (out / "report.html").read_text()
        assert "12 requests under 2 engines" in text
        assert ("contiguous memory in whole regions" in text) == has_both


def test_the_page_reaches_for_nothing(original: Path) -> None:
    text = (original / "report.html").read_text()
    assert "default-src 'none'" in text
    head, data = text.split('id="kvsim-data"')
    assert "http://" not in head + data.split("</script>", 1)[1]
    assert "https://" not in head + data.split("</script>", 1)[1]
    assert text.count("<img ") == text.count('src="data:image/png;base64,')
    assert "{{" not in head


def test_figures_are_those_of_the_summary(original: Path) -> None:
    summary = json.loads((original / "summary.json").read_text())
    assert {figure.key for figure in FIGURES} <= summary.keys()
    assert set(PARTS) == set(summary["kv"])
    text = (original / "report.html").read_text()
    assert f"<dd class='value'>{summary['completed']}</dd>" in text
    assert f"{100 * summary['kv']['token_states']:.1f} %" in text


def test_every_event_has_a_letter_and_words() -> None:
    from importlib.resources import files

    from kvsim.memory.journal import EVENTS

    script = files("kvsim.report").joinpath("static", "blockmap.js").read_text("utf-8")
    words = script[script.index("const LIFE_WORDS = {") : script.index("const sums")]
    assert set(LIFE_CODES) == set(EVENTS)
    assert len(set(LIFE_CODES.values())) == len(EVENTS)
    for letter in LIFE_CODES.values():
        assert f"{letter}: (" in words or f'"{letter}": (' in words


def test_pages_without_files_or_maps() -> None:
    result = run(SCENARIO)
    text = run_page(result, draw_missing=False)
    assert "<h1>kvsim: small</h1>" in text
    assert "kvsim-data" not in text
    assert "compared" in compare_page({"paged": result}, draw_missing=False)


@pytest.mark.deep
def test_the_quickstart_s_page_is_small(repo_root: Path, tmp_path: Path) -> None:
    run(repo_root / "scenarios" / "quickstart.yaml", out=tmp_path / "out", options=Options(report=True))
    assert (tmp_path / "out" / "report.html").stat().st_size < 5_000_000
