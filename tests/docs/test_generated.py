"""The reference pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvsim.cli import COMMANDS

GENERATOR = Path(__file__).resolve().parents[2] / "docs" / "_gen" / "generate.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_pages_are_up_to_date(generator: ModuleType) -> None:
    assert list(generator.out_of_date()) == [], "run: python docs/_gen/generate.py"


def test_every_command_is_documented(generator: ModuleType) -> None:
    page = generator.commands_page()
    assert all(f"## kvsim {name}\n" in page for name in COMMANDS)


def test_every_key_has_a_row(generator: ModuleType) -> None:
    from kvsim.scenario.schema import Scenario

    page = generator.scenario_page()
    definitions = Scenario.model_json_schema()["$defs"]
    keys = {key for block in definitions.values() for key in block["properties"]} - {"type"}
    assert all(f"| `{key}` |" in page for key in keys)


def test_every_key_says_what_it_takes(generator: ModuleType) -> None:
    """A value's description is never empty, and a pair is not called a list of any length."""
    rows = [line.split(" | ") for line in generator.scenario_page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if not row[1].strip() or row[1].startswith((" ", "or ")) or row[1] == "a list"] == []
    taken = {row[0]: row[1] for row in rows}
    assert taken["| `gate`"] == "`package.module:name`"
    assert taken["| `window`"].startswith("two in a list")


def test_defaults_that_are_paths_are_told(generator: ModuleType) -> None:
    page = generator.commands_page()
    sections = dict(part.split("\n", 1) for part in page.split("\n## kvsim ")[1:])
    assert "Default: results/reproduce." in sections["reproduce"]
    assert "Default: scenario.yaml." in sections["init"]
    assert "default results/NAME-advice." in sections["advise"]
    assert "`kvsim --version`" in page
