"""Recorded decisions of vLLM V1, both schedulers, through both loops; and a replay that notices every departure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.conform.v1 import make_driver, replay
from tests.conftest import SHARED, needs_shared

FOLDERS = {"v1": 62, "v1-async": 40}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@needs_shared
@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_recorded_field_agrees(folder: str, engine_loop: str) -> None:
    paths = sorted((SHARED / "golden" / folder).glob("*.json"))
    assert len(paths) >= FOLDERS[folder]
    results = [replay(load(path), engine_loop=engine_loop) for path in paths]
    assert [result.mismatch for result in results if not result.agrees] == []
    assert all(result.num_fields > 10 for result in results)


WITHOUT_DETAIL = ("t", "fr", "q", "nc", "fq", "f", "p", "w", "e", "a", "k", "am", "rs", "o")


@needs_shared
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_calendar_agrees_without_detail(folder: str) -> None:
    """As `run` uses it: decodes are counted in bulk, and everything else must come out as recorded."""
    num_fast = 0
    for path in sorted((SHARED / "golden" / folder).glob("*.json")):
        case = load(path)
        driver = make_driver(case, detail=False)
        for expected, got in zip(case["expected"]["steps"], driver.records(), strict=False):
            assert [expected.get(name) for name in WITHOUT_DETAIL] == [got.get(name) for name in WITHOUT_DETAIL], path
        num_fast += driver.scheduler.num_fast_steps
    assert num_fast > 1_000


def perturbed(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return [*value, value[-1]] if value else ["x"]


def steps_with_each_field(case: dict[str, Any]) -> dict[str, int]:
    """The first step that records a field, for every field."""
    found: dict[str, int] = {}
    for index, record in enumerate(case["expected"]["steps"]):
        for name in record:
            found.setdefault(name, index)
    return found


@needs_shared
@pytest.mark.parametrize("folder", FOLDERS)
def test_one_perturbed_field_of_each_kind_is_noticed(folder: str) -> None:
    seen: set[str] = set()
    for path in sorted((SHARED / "golden" / folder).glob("*.json")):
        case = load(path)
        for name, step in steps_with_each_field(case).items():
            if name in seen:
                continue
            seen.add(name)
            changed = copy.deepcopy(case)
            record = changed["expected"]["steps"][step]
            record[name] = perturbed(record[name])
            mismatch = replay(changed).mismatch
            assert mismatch is not None
            assert (mismatch.step, mismatch.field) == (step, name)
            assert mismatch.expected != mismatch.got
            assert {"running", "waiting", "free"} <= mismatch.state.keys()
    assert seen >= {"t", "s", "a", "p", "w", "e", "f", "fr", "q", "nc", "h", "fq"}


@needs_shared
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_total_and_every_missing_record_is_noticed(folder: str) -> None:
    case = load(sorted((SHARED / "golden" / folder).glob("*.json"))[0])
    for name, value in case["expected"]["end"].items():
        changed = copy.deepcopy(case)
        changed["expected"]["end"][name] = perturbed(value)
        mismatch = replay(changed).mismatch
        assert mismatch is not None
        assert mismatch.field == f"end.{name}"
    longer = copy.deepcopy(case)
    longer["expected"]["steps"].append({"t": len(case["expected"]["steps"])})
    assert not replay(longer).agrees
    shorter = copy.deepcopy(case)
    shorter["expected"]["steps"].pop()
    assert not replay(shorter).agrees
