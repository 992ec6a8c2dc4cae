"""The recipes: every command of docs/recipes.md prints what the page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes", DOCS / "_gen" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECIPES = _generator()
COMMANDS = RECIPES.recipes((DOCS / "recipes.md").read_text("utf-8"))
QUICK = ("capacity", "trace", "run")


def _marks(command: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if command.split()[1] in QUICK else (pytest.mark.deep,)


@pytest.mark.parametrize(
    ("command", "output"),
    [pytest.param(command, output, id=command, marks=_marks(command)) for command, output in COMMANDS],
)
def test_a_recipe_prints_what_the_page_says(command: str, output: str) -> None:
    assert RECIPES.output_of(command) == output


def test_every_recipe_has_its_output() -> None:
    assert len(COMMANDS) >= 10
    assert all(output.strip() for _, output in COMMANDS)
