"""`kvsim schema`: an editor accepts what kvsim accepts, and marks what kvsim refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsim.scenario.layout import json_schema
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.types import ScenarioError

jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def editor() -> Any:
    return jsonschema.Draft202012Validator(json_schema())


def test_the_schema_is_one(editor: Any) -> None:
    editor.check_schema(editor.schema)


def test_shipped_scenarios_are_not_marked(editor: Any, repo_root: Path) -> None:
    for path in sorted((repo_root / "scenarios").glob("*.yaml")):
        assert [error.message for error in editor.iter_errors(yaml.safe_load(path.read_text()))] == [], path.name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workload.lengths", {"type": "fixed", "prompt": 3, "output": 4}),
        ("workload.lengths", {"type": "uniform", "prompt": [3, 4], "output": [1, 1]}),
        ("scheduler.gate", "a.b:c"),
        ("scheduler.gate", None),
        ("allocator.watermark", 0),
    ],
)
def test_what_is_accepted(editor: Any, key: str, value: Any) -> None:
    block, name = key.split(".")
    scenario = {block: {name: value}}
    scenario_from_dict(scenario)
    assert list(editor.iter_errors(scenario)) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("workload.lengths", {"type": "fixed", "prompt": [3, 4], "output": 4}, "prompt of fixed lengths is one number"),
        ("workload.lengths", {"type": "fixed", "prompt": 0, "output": 4}, "must be at least 1"),
        ("workload.lengths", {"type": "uniform", "prompt": 3, "output": [1, 2]}, "must be two lengths: "),
        ("workload.lengths", {"type": "uniform", "prompt": [1, 2, 3], "output": [1, 2]}, "must be two lengths: "),
        ("workload.window", [1, 2, 3], "must be two times"),
        ("scheduler.gate", "nobody", "must be package.module:name"),
        ("allocator.watermark", 1, "must be below 1"),
    ],
)
def test_what_is_refused(editor: Any, key: str, value: Any, message: str) -> None:
    block, name = key.split(".")
    scenario = {block: {name: value}}
    with pytest.raises(ScenarioError, match=message):
        scenario_from_dict(scenario)
    assert list(editor.iter_errors(scenario)) != []


def test_a_window_may_be_written_with_units(editor: Any) -> None:
    assert list(editor.iter_errors({"workload": {"trace": "t.csv", "window": ["10s", "1.5s"]}})) == []
