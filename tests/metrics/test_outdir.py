"""Results are absent or whole; what was there before survives until they are whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvsim.metrics import outdir
from kvsim.metrics.outdir import MARKS, default_dir, output_dir, results_in
from kvsim.types import ScenarioError


def write(folder: Path, text: str) -> None:
    (folder / "summary.json").write_text(text)


def fill(path: Path, text: str) -> None:
    with output_dir(path) as folder:
        write(folder, text)


def test_it_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with output_dir(out) as folder:
        write(folder, "new")
        assert not out.exists()
        assert folder.parent == out.parent
    assert (out / "summary.json").read_text() == "new"
    assert os.listdir(out.parent) == ["b"]


def test_it_is_found_where_it_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "missing" / ".." / "out"
    with output_dir(out) as folder:
        write(folder, "new")
    assert out.is_dir()


def test_the_previous_result_stays_until_then(tmp_path: Path) -> None:
    out = tmp_path / "r"
    fill(out, "old")
    with output_dir(out) as folder:
        write(folder, "new")
        assert (out / "summary.json").read_text() == "old"
    assert (out / "summary.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_after_an_error_nothing_has_changed(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "r"
    fill(out, "old")

    def fail() -> None:
        with output_dir(out) as folder:
            write(folder, "half")
            raise error

    with pytest.raises(error):
        fail()
    assert (out / "summary.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["r"]


def test_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outdir, "_exchange", lambda one, other: False)
    out = tmp_path / "r"
    fill(out, "old")
    fill(out, "new")
    assert (out / "summary.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["r"]


def test_a_kill_between_two_renames_is_mended_by_the_next_run(tmp_path: Path) -> None:
    left = tmp_path / ".r.kvsim-01234567.old"
    left.mkdir()
    write(left, "old")
    outdir.remove_leftovers(tmp_path / "r")
    assert (tmp_path / "r" / "summary.json").read_text() == "old"


def test_leftovers_of_killed_runs_go_and_living_ones_stay(tmp_path: Path) -> None:
    dead = tmp_path / ".r.kvsim-dead0000"
    dead.mkdir()
    write(dead, "half")
    with output_dir(tmp_path / "r") as mine:
        assert not dead.exists()
        with output_dir(tmp_path / "r") as theirs:
            assert mine.exists()
            write(theirs, "theirs")
        write(mine, "mine")
    assert (tmp_path / "r" / "summary.json").read_text() == "mine"
    assert os.listdir(tmp_path) == ["r"]


def test_a_full_disk_is_explained(tmp_path: Path) -> None:
    out = tmp_path / "r"
    fill(out, "old")
    message = "cannot write the results: No space left .* choose another folder"
    with pytest.raises(ScenarioError, match=message), output_dir(out):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (out / "summary.json").read_text() == "old"


def test_other_errors_of_the_system_are_not_blamed_on_the_results(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), output_dir(tmp_path / "r"):
        Path("/nonexistent/trace.csv").read_text()


def test_a_folder_that_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(ScenarioError, match=r"holds no results of kvsim .*'thesis.txt'"):
        fill(tmp_path / "home", "x")


def test_a_link_to_a_folder_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    fill(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "summary.json").read_text() == "x"


SCRIPT = textwrap.dedent(
    """
    import sys, time
    from kvsim.metrics.outdir import MARKS, default_dir, output_dir, results_in
    with output_dir(sys.argv[1]) as folder:
        for index in range(200):
            (folder / f"{index}.csv").write_text(sys.argv[2])
        (folder / "summary.json").write_text(sys.argv[2])
        print("written", flush=True)
        if sys.argv[3] == "wait":
            time.sleep(60)
    """
)


def test_sigkill_leaves_the_previous_result(tmp_path: Path) -> None:
    out = tmp_path / "r"
    fill(out, "old")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out), "new", "wait"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "summary.json").read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    fill(out, "newer")
    assert (out / "summary.json").read_text() == "newer"
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize("there", MARKS)
def test_results_of_another_command_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in MARKS[there]:
        place = Path("results", "chat", name)
        place.mkdir(parents=True) if name == "points" else place.parent.mkdir(exist_ok=True, parents=True)
        if name != "points":
            place.write_text(there)
    assert results_in("results/chat") == there
    for command in MARKS:
        if command == there:
            assert default_dir("chat", command) == Path("results/chat")
            continue
        assert default_dir("chat", command) == Path(f"results/chat-{command}")
        assert default_dir("chat", command, force=True) == Path("results/chat")
        refusal = pytest.raises(ScenarioError, match=f"results of kvsim {there}, .*--out DIR.*--force")
        with refusal, output_dir("results/chat", command):
            raise AssertionError("it should not begin")
        assert results_in("results/chat") == there
    with output_dir("results/chat", "run" if there != "run" else "compare", force=True) as folder:
        write(folder, "forced")
    assert os.listdir("results/chat") == ["summary.json"]


def test_a_folder_with_a_scenario_of_the_users_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "scenario.yaml").write_text("name: mine")
    with pytest.raises(ScenarioError, match="holds no results of kvsim"):
        fill(tmp_path / "mine", "new")
    assert (tmp_path / "mine" / "scenario.yaml").read_text() == "name: mine"


def test_a_signal_before_the_folder_is_locked_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> int:
        assert folder.is_dir()
        raise SystemExit(143)

    monkeypatch.setattr(outdir, "_try_lock", interrupted)
    with pytest.raises(SystemExit), output_dir(tmp_path / "o"):
        raise AssertionError("never got there")
    assert os.listdir(tmp_path) == []
