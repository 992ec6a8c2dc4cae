"""Files are there whole, or as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvsim.catalog import load_model
from kvsim.cli import main
from kvsim.files import whole_file
from kvsim.runs import run
from kvsim.types import ScenarioError


def fail_half_way(unfinished: Path) -> None:
    with unfinished.open("w") as file:
        file.write("half")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("before", [None, "old"])
def test_after_an_error_a_file_is_as_it_was(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "f"
    if before is not None:
        path.write_text(before)
    with pytest.raises(OSError, match="No space left") as error, whole_file(path) as unfinished:
        fail_half_way(unfinished)
    assert error.value.filename == str(path)
    assert [item.read_text() for item in tmp_path.iterdir()] == ([] if before is None else [before])


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_keeps_its_readers(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(mode)
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
    now = path.stat()
    assert (path.read_text(), now.st_uid, now.st_gid, now.st_mode & 0o777) == ("new", 1234, 2345, 0o640)


def test_a_file_that_cannot_be_given_back_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    real = Path.stat

    def owned_by_another(self: Path, **how: bool) -> os.stat_result:
        found = list(real(self, **how))
        if self == path:
            found[4], found[5] = 1234, 2345
        return os.stat_result(found)

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "stat", owned_by_another)
    monkeypatch.setattr(os, "chown", refuse)
    with whole_file(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "new"


def test_a_pipe_or_a_device_does_not_become_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["init", str(pipe), "--force"]) == 2
    assert capsys.readouterr().err == (
        f"error: {pipe}: cannot be written: it is no regular file; choose another place\n"
    )
    assert pipe.is_fifo()
    assert len(os.listdir(tmp_path)) == 1


def test_the_longest_names_and_links_are_written_to(tmp_path: Path) -> None:
    longest, link = tmp_path / ("x" * 255), tmp_path / "link"
    link.symlink_to(longest)
    with whole_file(link) as unfinished:
        unfinished.write_text("new")
    assert link.is_symlink()
    assert longest.read_text() == "new"
    assert len(os.listdir(tmp_path)) == 2


def test_pictures_survive_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run({"workload": {"requests": [{"prompt_tokens": 4, "output_tokens": 4}]}}, out=out)
    (out / "memory.png").write_text("old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **how: fail_half_way(path))
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main(["plot", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"error: {out / 'memory.png'}: cannot be read or written: No space left on device\n"
    )
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_template_replaces_nothing_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("mine")
    monkeypatch.setattr(Path, "write_text", lambda self, text, **how: fail_half_way(self))
    assert main(["init", str(path), "--force"]) == 2
    monkeypatch.undo()
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["s.yaml"]


def test_a_model_file_has_each_key_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("num_hidden_layers: 2\nnum_key_value_heads: 2\nhead_dim: 8\ndtype: float16\nhead_dim: 16\n")
    with pytest.raises(ScenarioError, match=r"mine\.yaml:5:1: head_dim: given twice \(first on line 3\); keep one"):
        load_model(path)
