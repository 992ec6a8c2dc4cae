"""Which points a sweep has, and how its command line is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvsim.scenario.resolve import ResolvedScenario, scenario_from_dict
from kvsim.sweeps.grid import make_grid, parse_varies, parse_vary, seeds_of, values_of
from kvsim.types import ScenarioError

SMALL = {"name": "small", "memory": {"num_gpu_blocks_override": 64}, "workload": {"num_requests": 3}}


@pytest.fixture
def base() -> ResolvedScenario:
    return scenario_from_dict(SMALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=8,16,32", ("a.b", [8, 16, 32])),
        ("a=1:10:3", ("a", [1, 4, 7, 10])),
        ("a=1:10:4", ("a", [1, 5, 9])),
        ("a=0:1:0.25", ("a", [0.0, 0.25, 0.5, 0.75, 1.0])),
        ("a=0:0.3:0.1", ("a", [0.0, 0.1, 0.2, 0.3])),
        ("engine=paged,orca-max", ("engine", ["paged", "orca-max"])),
        ("a=true,false", ("a", [True, False])),
        ("a = 8GiB , 16GiB", ("a", ["8GiB", "16GiB"])),
        ("a=5", ("a", [5])),
        ("a=null,8,~", ("a", [None, 8, None])),
        ("a=5:5:1", ("a", [5])),
        ("a={type: batch}", ("a", [{"type": "batch"}])),
        ("a={b: {c: 1}}", ("a", [{"b": {"c": 1}}])),
        ("a=[0, 10],[10, 20], null", ("a", [[0, 10], [10, 20], None])),
        (
            "a={type: fixed, prompt: [3, 4]} , {type: preset}",
            ("a", [{"type": "fixed", "prompt": [3, 4]}, {"type": "preset"}]),
        ),
        ("a=x]{,y", ("a", ["x]{", "y"])),
        ("a=x[,y", ("a", ["x[", "y"])),
    ],
)
def test_values_are_read(text: str, expected: tuple[str, list[object]]) -> None:
    assert parse_vary(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "=1,2",
        "a=",
        "a=1,,2",
        "a=[1,2",
        "a={b: 1},",
        "a=,",
        "a=2:1:1",
        "a=1:2:0",
        "a=1:2:-1",
        "a=1:b:1",
        "a=1:inf:1",
        "a=.nan:1:1",
        "a=true:3:1",
        "a=0:1e9:1e-9",
        "a=1:1e400:1",
        f"a=1:{'9' * 400}:1",
    ],
)
def test_values_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match="--vary"):
        parse_vary(text)


@pytest.mark.parametrize(
    "given", [range(8, 25, 8), np.arange(8, 25, 8), (np.int64(8), 16.0, 24), "8,16,24", iter([8, 16, 24])]
)
def test_values_of_python(given: object) -> None:
    values = values_of(given, "here")
    assert values == [8, 16, 24]
    assert {type(value) for value in values} <= {int, float}


def test_null_is_a_value(base: ResolvedScenario) -> None:
    """It says "no limit" of many keys, and so belongs beside the limits."""
    first, second = make_grid(base, {"scheduler.max_num_batched_tokens": [None, 16]}, seeds=[0])
    assert first.scenario.scenario.scheduler.max_num_batched_tokens is None
    assert second.scenario.scenario.scheduler.max_num_batched_tokens == 16
    for given in ([8, ""], [], ""):
        with pytest.raises(ScenarioError, match="empty value"):
            values_of(given, "here")


def test_a_key_is_varied_once() -> None:
    with pytest.raises(ScenarioError, match="a is varied twice"):
        parse_varies(["a=1", "a=2"])


def test_the_grid_has_every_combination_with_every_seed(base: ResolvedScenario) -> None:
    points = make_grid(base, {"allocator.block_size": [8, 16], "workload.num_requests": [1, 2, 3]}, seeds=[4, 5])
    assert len(points) == 12
    assert points[0].record == {"allocator.block_size": 8, "workload.num_requests": 1, "seed": 4}
    assert points[-1].record == {"allocator.block_size": 16, "workload.num_requests": 3, "seed": 5}
    assert len({point.key for point in points}) == 12


def test_zipped_lists_stand_side_by_side(base: ResolvedScenario) -> None:
    vary = {"allocator.block_size": [8, 16], "workload.num_requests": [1, 2]}
    points = make_grid(base, vary, seeds=[0], is_zipped=True)
    assert [tuple(point.values.values()) for point in points] == [(8, 1), (16, 2)]
    with pytest.raises(ScenarioError, match="equally long"):
        make_grid(base, vary | {"workload.num_requests": [1]}, seeds=[0], is_zipped=True)


def test_a_value_given_twice_is_one_point(base: ResolvedScenario) -> None:
    assert len(make_grid(base, {"allocator.block_size": [8, 8, 16]}, seeds=[0])) == 2


def test_a_point_is_known_by_what_decides_its_figures(base: ResolvedScenario) -> None:
    few = make_grid(base, {"allocator.block_size": [16]}, seeds=[1])
    more = make_grid(base, {"allocator.block_size": [8, 16]}, seeds=[0, 1])
    assert few[0].key == more[3].key
    assert few[0].key != make_grid(base, {"allocator.block_size": [16]}, seeds=[2])[0].key


def test_a_point_is_another_one_when_its_trace_changes(tmp_path) -> None:
    trace = tmp_path / "trace.csv"
    keys = set()
    for last in ("30", "31"):
        trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n0,10,20\n1,10,{last}\n")
        base = scenario_from_dict({"workload": {"trace": str(trace)}})
        keys.add(make_grid(base, {"allocator.block_size": [16]}, seeds=[1])[0].key)
    assert len(keys) == 2


@pytest.mark.parametrize("place", ["mine.py", "mine/costs.py"])
def test_a_point_is_another_one_when_own_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(place).parent.mkdir(exist_ok=True)
    base = scenario_from_dict(SMALL | {"cost": {"type": f"{place.removesuffix('.py').replace('/', '.')}:Price"}})
    keys = set()
    for price in (1, 2, 1):
        Path(place).write_text(f"class Price:\n    def step_ns(self, shape):\n        return {price}\n")
        keys.add(make_grid(base, {"allocator.block_size": [16]}, seeds=[1])[0].key)
    assert len(keys) == 2


def test_one_senseless_value_is_refused_with_its_origin(base: ResolvedScenario) -> None:
    with pytest.raises(ScenarioError) as refusal:
        make_grid(base, {"allocator.block_size": [8, 0, 16, -1]}, seeds=[0, 1], option="--vary")
    lines = str(refusal.value).splitlines()
    assert lines[0] == "sweep: 2 of 4 combinations make no sense, nothing was run:"
    assert lines[1].startswith("--vary allocator.block_size=0: allocator.block_size: is 0; must be at least 1")
    assert lines[2].startswith("--vary allocator.block_size=-1: allocator.block_size: is -1; must be at least 1")
    assert "--zip" in lines[3]
    assert len(lines) == 4


def test_values_that_contradict_each_other_are_refused(base: ResolvedScenario) -> None:
    vary = {"allocator.block_size": [16, 32], "allocator.sliding_window": [32, 48]}
    with pytest.raises(ScenarioError, match=r"1 of 4 comb[^$]*sliding_window=48: .*is 48; must be a multiple of .*32"):
        make_grid(base, vary, seeds=[0])
    rows = {"allocator.block_size": [16, 32], "allocator.sliding_window": [48, 64]}
    assert len(make_grid(base, rows, seeds=[0], is_zipped=True)) == 2


@pytest.mark.parametrize("vary", [{"allocator.blok_size": [8, 16]}, {"seed": [1, 2]}, {"allocator.block_size": [0]}])
def test_a_grid_without_any_sense_is_refused(base: ResolvedScenario, vary: dict[str, list[int]]) -> None:
    with pytest.raises(ScenarioError):
        make_grid(base, vary, seeds=[0])


def test_too_many_points_are_refused_before_they_are_made(base: ResolvedScenario) -> None:
    with pytest.raises(ScenarioError, match="at most"):
        make_grid(base, {"allocator.block_size": range(10**6), "workload.num_requests": range(10**6)}, seeds=[0])


def test_seeds_are_counted_from_the_scenarios_own_or_named() -> None:
    assert seeds_of(3, 7) == (7, 8, 9)
    assert seeds_of([5, 1, 5], 7) == (5, 1)
    assert seeds_of(np.arange(2), 7) == (0, 1)
    for none in (0, []):
        with pytest.raises(ScenarioError, match="at least 1 is needed"):
            seeds_of(none, 7)
    with pytest.raises(ScenarioError, match="and at most 100,000 are run"):
        seeds_of(99_999_999_999, 7)


def test_python_values_pass_as_they_are() -> None:
    assert values_of([1, "a", 2.5], "here") == [1, "a", 2.5]
    assert values_of((1,), "here") == [1]
    assert values_of(3, "here") == [3]
