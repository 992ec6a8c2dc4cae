"""Sweeps end to end: rows, resuming, failures, files; in this process, in others, and as a command."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from sweeps.sweeping import (
    BLOCKS,
    SMALL,
    assert_no_worker_outlives,
    files_of,
    kvsim_command,
    points_in,
    scenario_file,
    slow_scenario,
    start_sweep,
    wait_for_points,
)

import kvsim
from kvsim.cli import main
from kvsim.sweeps import run as sweep_run
from kvsim.sweeps.executors import executor_for
from kvsim.sweeps.tables import aggregate
from kvsim.types import KvsimError, ScenarioError


def test_rows_are_those_of_single_runs() -> None:
    result = kvsim.sweep(SMALL, BLOCKS, seeds=[3, 9], jobs=1)
    assert [(row["allocator.block_size"], row["seed"]) for row in result.rows] == [(8, 3), (8, 9), (16, 3), (16, 9)]
    alone = kvsim.run(SMALL, **{"allocator.block_size": 16, "seed": 9}).summary
    row = result.rows[3]
    for name in ("duration", "mean_ttft_ms", "block_utilization", "num_preemptions", "running_mean"):
        assert row[name] == alone[name]
    assert row["kv.token_states"] == alone["kv"]["token_states"]


def test_processes_give_the_same_bytes_as_this_process(tmp_path: Path) -> None:
    kvsim.sweep(SMALL, BLOCKS, seeds=2, jobs=1, out=tmp_path / "one", plots=True)
    kvsim.sweep(SMALL, BLOCKS, seeds=2, jobs=2, out=tmp_path / "two", plots=True)
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert one == two
    assert {"sweep.csv", "sweep_agg.csv", "scenario.yaml", "sweep_mean_ttft_ms.png"} <= set(one)


def test_means_and_intervals_over_seeds() -> None:
    rows = [
        {"k": 1, "seed": seed, "status": "ok", "reason": "", "x": value, "y": None, "flag": True}
        for seed, value in enumerate([1.0, 2.0, 3.0])
    ]
    rows += [{"k": 2, "seed": 0, "status": "ok", "reason": "", "x": 5}, {"k": 2, "seed": 1, "status": "failed"}]
    first, second = aggregate(rows, ["k"])
    # s = 1, t(0.975, 2) = 4.30265..., n = 3
    assert first["x"] == 2.0
    assert first["x.ci95"] == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert first["num_seeds"] == 3
    assert "y" not in first
    assert "flag" not in first
    assert (second["x"], second["x.ci95"], second["num_seeds"]) == (5, None, 1)


def test_a_figure_that_only_some_seeds_have_is_kept() -> None:
    rows = [{"k": 1, "seed": 0, "status": "ok", "x": 1}, {"k": 1, "seed": 1, "status": "ok", "x": 1, "late": 4}]
    assert aggregate(rows, ["k"])[0]["late"] == 4


def test_a_sweep_has_its_points_and_their_means_as_tables() -> None:
    swept = kvsim.sweep(SMALL, BLOCKS, seeds=2, jobs=1)
    points, means = swept.table, swept.aggregated
    assert means["allocator.block_size"].tolist() == [8, 16]
    assert means["num_seeds"].tolist() == [2, 2]
    by_size = points.groupby("allocator.block_size")["mean_ttft_ms"].mean()
    assert means["mean_ttft_ms"].tolist() == pytest.approx(by_size.tolist())


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    work = sweep_run.work
    monkeypatch.setattr(sweep_run, "work", lambda task: calls.append(task) or work(task))
    kvsim.sweep(SMALL, BLOCKS, seeds=2, jobs=1, out=tmp_path / "out")
    assert len(calls) == 4
    before = files_of(tmp_path / "out")
    kvsim.sweep(SMALL, BLOCKS, seeds=2, jobs=1, out=tmp_path / "out")
    assert len(calls) == 4
    assert files_of(tmp_path / "out") == before
    kvsim.sweep(SMALL, {"allocator.block_size": [8, 16, 32]}, seeds=3, jobs=1, out=tmp_path / "out")
    assert len(calls) == 9


def test_warnings_are_those_of_the_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They name what the user wrote, not the copy that a worker reads; each is said once, with its first point."""
    path = tmp_path / "swap.yaml"
    path.write_text(
        "memory: {num_gpu_blocks_override: 40}\n"
        "scheduler: {preemption: swap, max_model_len: 1000}\n"
        "workload:\n"
        "  num_requests: 3\n"
        "  lengths: {type: fixed, prompt: 100, output: 3}\n"
    )
    vary = ["--vary", "engine=paged,vllm-v1", "--vary", "scheduler.max_model_len=50,500"]
    assert main(["sweep", str(path), *vary, "--jobs", "1", "--no-plots", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"warning: 2 of 4 points, the first is engine=paged, scheduler.max_model_len=50, seed=0: {path}:2:13: "
        "scheduler.preemption: is swap, and memory.swap_space is 0: victims are recomputed",
        "warning: 2 of 4 points, the first is engine=paged, scheduler.max_model_len=50, seed=0: "
        "--vary scheduler.max_model_len=50: scheduler.max_model_len: is 50, and every prompt has at least 100 tokens: "
        "all will be rejected",
        "warning: 2 of 4 points, the first is engine=paged, scheduler.max_model_len=50, seed=0: "
        "requests rejected because they can never be served: 3; the first is '0': "
        "the prompt has 100 tokens, max_model_len is 50",
        f"warning: 2 of 4 points, the first is engine=vllm-v1, scheduler.max_model_len=50, seed=0: {path}:2:13: "
        "scheduler.preemption: not used: scheduler vllm-v1 has no such key",
    ]
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [len(json.loads(row["warnings"])) for row in rows] == [3, 1, 3, 1]


def test_hardware_that_is_not_priced_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "workload: {num_requests: 3, lengths: {type: fixed, prompt: 9, output: 3}}\n"
        "cost: {type: linear}\n"
        "sweep: {vary: {gpu: [a100-80gb, h100-80gb], allocator.block_size: [8, 16]}, seeds: 2}\n"
    )
    expected = f"warning: {path}:2:1: cost: is linear: step times are the same for every gpu; "
    sweep = ["sweep", str(path), "--jobs", "1", "--no-plots", "--out", str(tmp_path / "out")]
    for args in (sweep, ["validate", str(path)]):
        assert main(args) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(expected)
    assert main(["run", str(path), "--no-plots", "--out", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "{", '{"summary": 3, "error": ""}', "[]", "null"])
def test_a_damaged_point_is_computed_again(tmp_path: Path, text: str) -> None:
    kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path / "out")
    before = files_of(tmp_path / "out")
    next((tmp_path / "out" / "points").iterdir()).write_text(text)
    kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path / "out")
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_point_says_why_and_the_others_go_on(tmp_path: Path, jobs: int) -> None:
    vary = {"scheduler.victim": ["last_admitted", "no_such_module_anywhere:victim"], "cost.step_ms": [6, 7]}
    result = kvsim.sweep(SMALL, vary, jobs=jobs, out=tmp_path / "out")
    assert [row["status"] for row in result.rows] == ["ok", "ok", "failed", "failed"]
    assert "no_such_module_anywhere" in result.rows[2]["reason"]
    assert result.num_failed == 2
    with (tmp_path / "out" / "sweep.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok", "ok", "failed", "failed"]


def test_a_point_that_kills_its_process_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly_policy.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    vary = {"scheduler.victim": ["deadly_policy:victim", "last_admitted"], "allocator.block_size": [8, 16]}
    result = kvsim.sweep(SMALL, vary, jobs=2, out=tmp_path / "out")
    assert [row["status"] for row in result.rows] == ["failed", "failed", "ok", "ok"]
    assert "died" in result.rows[0]["reason"]
    assert len(list((tmp_path / "out" / "points").iterdir())) == 2


def test_trouble_of_the_machine_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(task: object) -> object:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(sweep_run, "work", out_of_memory)
        assert kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path / "out").num_failed == 2
    assert kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path / "out").num_failed == 0


def test_an_interrupt_leaves_the_table_of_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    work = sweep_run.work

    def interrupted(task: Any) -> Any:
        calls.append(task)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return work(task)

    monkeypatch.setattr(sweep_run, "work", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kvsim.sweep(SMALL, BLOCKS, seeds=3, jobs=1, out=tmp_path / "out")
    with (tmp_path / "out" / "sweep.csv").open() as file:
        assert [row["seed"] for row in csv.DictReader(file)] == ["3", "4"]


def test_pictures_of_another_grid_go(tmp_path: Path) -> None:
    (tmp_path / "points").mkdir()
    (tmp_path / "heatmap_old.png").write_bytes(b"old")
    (tmp_path / "mine.png").write_bytes(b"mine")
    kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path, plots=True)
    names = {path.name for path in tmp_path.glob("*.png")}
    assert {"mine.png", "sweep_mean_ttft_ms.png"} <= names
    assert "heatmap_old.png" not in names


def test_blocks_and_ranges_are_values_too(tmp_path: Path) -> None:
    lengths = [{"type": "fixed", "prompt": 5, "output": 3}, {"type": "preset", "name": "alpaca"}]
    vary = {"workload.lengths": lengths, "allocator": [{"block_size": 8}, {"block_size": 4}]}
    result = kvsim.sweep(SMALL, vary, jobs=1, out=tmp_path, plots=True)
    assert [row["status"] for row in result.rows] == ["ok"] * 4
    pictures = files_of(tmp_path)
    assert "heatmap_output_throughput.png" in pictures
    assert main(["plot", str(tmp_path)]) == 0
    assert files_of(tmp_path) == pictures


def test_one_sweep_at_a_time_writes_into_a_folder(tmp_path: Path) -> None:
    from kvsim.sweeps.store import owned

    with owned(tmp_path / "out"), pytest.raises(ScenarioError, match="another sweep"):
        kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path / "out")


def test_results_of_another_command_are_not_mixed_with_points(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kvsim.run(SMALL, out=out)
    with pytest.raises(ScenarioError, match=r"holds the results of kvsim run, .*--out DIR.*--force"):
        kvsim.sweep(SMALL, BLOCKS, jobs=1, out=out)
    assert (out / "summary.json").exists()
    assert not (out / "points").exists()
    kvsim.sweep(SMALL, BLOCKS, jobs=1, out=out, force=True)
    assert (out / "sweep.csv").exists()
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize("name", ["scenario.yaml", "sweep_agg.csv", "heatmap_mine.png"])
def test_files_of_the_users_are_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ScenarioError, match=f"{name}: is no sweep's"):
        kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_leftovers_of_a_killed_sweep_go(tmp_path: Path) -> None:
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / ".x.json.kvsim-tmp").write_text("half")
    (tmp_path / ".pictures.kvsim-tmp").mkdir()
    kvsim.sweep(SMALL, BLOCKS, jobs=1, out=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith("tmp")]


def test_the_folder_holds_the_scenario_that_made_it(tmp_path: Path) -> None:
    kvsim.sweep(SMALL, BLOCKS, seeds=2, jobs=1, out=tmp_path / "one")
    kvsim.sweep(tmp_path / "one" / "scenario.yaml", jobs=1, out=tmp_path / "two")
    one, two = files_of(tmp_path / "one"), files_of(tmp_path / "two")
    assert one["sweep.csv"] == two["sweep.csv"]


@pytest.mark.parametrize("out", ["/proc/nowhere/x", "{file}", "{file}/x"])
def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScenarioError, match=r"cannot be written \(.*\); choose another folder"):
        kvsim.sweep(SMALL, BLOCKS, jobs=1, out=out.format(file=tmp_path / "file"))


def test_nothing_varied_is_said() -> None:
    with pytest.raises(ScenarioError, match="nothing is varied"):
        kvsim.sweep(SMALL)


def test_the_command_writes_tables_and_says_what_failed(tmp_path: Path) -> None:
    sweep = {"vary": {"cost.step_ms": [6, 7], "scheduler.victim": ["last_admitted", "nowhere:victim"]}, "seeds": 2}
    scenario = scenario_file(tmp_path, sweep=sweep)
    done = kvsim_command("sweep", scenario, "--jobs", "1", "--no-plots", "--json", "--out", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert [row["status"] for row in json.loads(done.stdout)] == ["ok", "ok", "failed", "failed"] * 2
    assert "nowhere" in done.stderr


@pytest.mark.parametrize(
    ("options", "origin"),
    [
        (["--vary", "cost.step_ms=6,-1"], "--vary cost.step_ms=-1: cost.step_ms: is -1"),
        (["--vary", "allocator.block_size=8,2000000"], "--vary allocator.block_size=2000000: allocator.block_size"),
        (["--vary", "engine=paged,pagd"], "--vary engine=pagd: engine: is 'pagd'"),
        (["--vary", "seed.x=1"], "--vary seed.x=1: seed is the single value 3"),
        ([], "sweep.vary cost.step_ms=-5: cost.step_ms: is -5"),
    ],
)
def test_a_value_that_cannot_be_is_said_before_anything_runs(tmp_path: Path, options: list[str], origin: str) -> None:
    scenario = scenario_file(tmp_path, sweep={"vary": {"cost.step_ms": [6, -5]}})
    done = kvsim_command("sweep", scenario, "--jobs", "1", *options, "--out", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sweep: ")
    assert f"\n{origin}" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--vary", "nonsense"],
        ["--vary", "allocator.blok_size=1,2"],
        ["--vary", "allocator.block_size=8,16", "--seeds", "none"],
        ["--vary", "allocator.block_size=8,16", "--out", "/proc/nowhere/x"],
        [],
    ],
)
def test_bad_input_ends_with_a_message(tmp_path: Path, options: list[str]) -> None:
    done = kvsim_command("sweep", scenario_file(tmp_path), "--jobs", "1", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_with_130_and_a_usable_table(tmp_path: Path) -> None:
    process = start_sweep(slow_scenario(tmp_path), tmp_path / "out", "--jobs", "2")
    wait_for_points(process, tmp_path / "out", 2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert 2 <= len(rows) < 12
    assert all(row["status"] == "ok" for row in rows)


@pytest.mark.deep
def test_killed_at_ten_moments_it_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    import random

    dice = random.Random(20)
    scenario = slow_scenario(tmp_path)
    undisturbed = start_sweep(scenario, tmp_path / "whole", "--jobs", "2")
    began = time.monotonic()
    undisturbed.communicate(timeout=600)
    took_s = time.monotonic() - began
    assert undisturbed.returncode == 0
    for round_number in range(10):
        out = tmp_path / f"killed-{round_number}"
        process = start_sweep(scenario, out, "--jobs", "2")
        time.sleep(dice.uniform(0.2, 1.0) * took_s)
        process.kill()
        process.communicate(timeout=60)
        assert_no_worker_outlives(process.pid)
        kept = points_in(out)
        again = start_sweep(scenario, out, "--jobs", "2")
        again.communicate(timeout=600)
        assert again.returncode == 0
        assert files_of(out) == files_of(tmp_path / "whole")
        assert kept.items() <= points_in(out).items()


def test_a_worker_that_dies_is_said_to_have() -> None:
    """`advise` and `reproduce` have no rows to say it in."""

    def die() -> None:
        with executor_for(2) as executor:
            assert executor is not None
            executor.submit(os._exit, 1).result()

    with pytest.raises(KvsimError, match="a worker process died: out of memory"):
        die()
