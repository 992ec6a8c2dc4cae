"""Files are there whole, or as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.files import whole_file
from kvsim.runs import run


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
