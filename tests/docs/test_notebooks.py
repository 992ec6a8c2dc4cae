"""Every notebook runs on a clean kernel, begins with its question, ends with its answer, and has its outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

HERE = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
MAX_BYTES = 3_000_000
"""Of all notebooks together, outputs included."""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_there_are_seven() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06", "07"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_question_and_answer(path: Path) -> None:
    texts = [cell.source for cell in cells(path, "markdown")]
    assert "**Question:" in texts[0]
    assert texts[-1].startswith("## Answer")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_and_say_nothing_of_the_machine(path: Path) -> None:
    code = cells(path, "code")
    assert all(cell.execution_count == number for number, cell in enumerate(code, start=1))
    assert sum(bool(cell.outputs) for cell in code) >= len(code) // 2
    text = path.read_text("utf-8")
    assert "iopub" not in text
    assert str(HERE.parent) not in text


@pytest.mark.deep
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_on_a_clean_kernel_and_says_the_same(path: Path, runner: ModuleType) -> None:
    told = [texts(cell) for cell in cells(path, "code")]
    executed = [cell for cell in runner.execute(path).cells if cell.cell_type == "code"]
    assert not [output for cell in executed for output in cell.outputs if output.output_type == "error"]
    assert [texts(cell) for cell in executed] == told, f"run: python notebooks/run.py {path.name[:2]}"


def texts(cell: Any) -> list[str]:
    """What a cell printed and showed, pictures left out."""
    return [
        output.get("text") or output.data["text/plain"]
        for output in cell.outputs
        if output.output_type == "stream" or "image/png" not in output.data
    ]
