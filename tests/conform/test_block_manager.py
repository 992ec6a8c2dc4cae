"""Recorded block-manager cases of the paper's engine, replayed field by field."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvsim.conform.block_manager import FIELDS, BlockManagerReplay, replay

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "v0"
CASES = sorted(GOLDEN.glob("bm_*.json"))


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_agrees_in_every_field(path: Path) -> None:
    case = load(path)
    result = replay(case)
    assert result.mismatch is None
    assert result.num_fields == sum(len(record) for record in case["out"])


def test_there_are_24_cases() -> None:
    assert len(CASES) == 24


def perturbed(value: Any) -> Any:
    """A value of the same kind that is not the same."""
    match value:
        case bool():
            return not value
        case None:
            return [0, 1]
        case int():
            return value + 1
        case str():
            return value[:-1] + ("0" if value[-1] != "0" else "1")
        case []:
            return [[0, 1]]
        case list():
            return value[:-1]
        case dict():
            return value | {"0": [0]} if "0" not in value else {key: value[key] for key in value if key != "0"}
    raise AssertionError(value)


@pytest.mark.parametrize("path", CASES[:3] + CASES[5:7], ids=lambda path: path.stem)
def test_a_perturbed_field_is_found_where_it_is(path: Path) -> None:
    case = load(path)
    rng = random.Random(7)
    for name in FIELDS:
        place = FIELDS.index(name)
        steps = [step for step, record in enumerate(case["out"]) if len(record) > place]
        for step in rng.sample(steps, min(10, len(steps))):
            changed = copy.deepcopy(case)
            changed["out"][step][place] = perturbed(case["out"][step][place])
            mismatch = replay(changed).mismatch
            assert mismatch is not None
            assert (mismatch.step, mismatch.field) == (step, name)


def test_every_field_of_a_short_case_counts() -> None:
    case = min((load(path) for path in CASES), key=lambda case: len(case["ops"]))
    for step, record in enumerate(case["out"]):
        for place, value in enumerate(record):
            changed = copy.deepcopy(case)
            changed["out"][step][place] = perturbed(value)
            mismatch = replay(changed).mismatch
            assert mismatch is not None
            assert (mismatch.step, mismatch.field) == (step, FIELDS[place])


def test_results_of_every_kind_occur() -> None:
    """The perturbations above reach copies, swap maps, answers and errors."""
    kinds = {(op[0], type(record[0]).__name__) for path in CASES for op, record in _records(load(path))}
    assert {
        ("append", "list"),
        ("append", "dict"),
        ("alloc", "dict"),
        ("swap_out", "list"),
        ("swap_in", "list"),
        ("can_alloc", "str"),
        ("can_append", "bool"),
    } <= kinds


def test_swap_questions_count_all_blocks_of_a_group_wherever_they_are() -> None:
    """The engine asks of the group whose turn it is; a recorder may ask of any."""
    manager = BlockManagerReplay({"bs": 4, "gpu": 4, "cpu": 5, "wm": 0.0})
    for op in (["group", 0, 1, 12], ["alloc", 0]):
        manager.step(op)
    # 1 block is free, and the table has 3.
    assert manager.step(["can_swap_in", 0]) == [False]
    manager.step(["swap_out", 0])
    # 2 blocks are free on the host.
    assert manager.step(["can_swap_out", 0]) == [False]
    manager.step(["free", 0])
    assert manager.step(["can_swap_out", 0]) == [True]


def test_a_window_goes_round_before_its_copy_runs_out() -> None:
    manager = BlockManagerReplay({"bs": 1, "gpu": 2, "cpu": 0, "wm": 0.0, "sw": 2})
    for op in (["group", 0, 2, 2], ["alloc", 0]):
        manager.step(op)
    result, free, tables, gpu_refs, cpu_refs, _ = manager.step(["append", 0])
    assert (result, free, tables, gpu_refs, cpu_refs) == ({"err": "OOM"}, [0, 0], {"0": [1, 0, 1]}, [], [])
    manager.allocator.audit()


def _records(case: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
    return list(zip(case["ops"], case["out"], strict=True))
