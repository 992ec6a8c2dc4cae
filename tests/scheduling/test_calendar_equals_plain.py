"""Law 9: the calendar decides what the plain loop decides, step by step, block by block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling.scenarios import ENGINES, Runner, Scenario, draw_scenario

SEEDS = st.integers(0, 1_000_000)


def run(scenario: Scenario, engine_loop: str, *, looks: bool = True, **more: Any) -> Runner:
    """Run to the end; the laws of memory hold after every step, and nothing is left behind."""
    runner = Runner(scenario, scenario.scheduler(engine_loop, **more), looks=looks)
    runner.run()
    return runner


def assert_nothing_is_left(runner: Runner) -> None:
    scheduler = runner.scheduler
    # Law 1: every request came to exactly one end.
    assert runner.ends.keys() == {request.request_id for _, request in runner.scenario.arrivals}
    assert not scheduler.groups
    assert not scheduler.running
    assert not scheduler.stepwise
    assert not scheduler.calendar.finish_at
    assert scheduler.num_seats == scheduler.calendar.num_seqs == scheduler.calendar.context_tokens == 0
    assert scheduler.num_table_entries == 0
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks


def assert_equal_logs(first: list[Any], second: list[Any]) -> None:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if isinstance(one, dict):
            one, other = [{k: v for k, v in a.items() if one[k] != other[k]} for a in (one, other)]
        assert one == other, f"entry {number}"
    assert len(first) == len(second)


def events(log: list[Any]) -> list[Any]:
    """What was decided, without what was looked at."""
    return [entry for entry in log if isinstance(entry, (dict, str))]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=30)
@given(seed=SEEDS)
def test_both_loops_take_the_same_decisions(engine: str, seed: int) -> None:
    scenario = draw_scenario(seed, engine)
    plain, calendar = run(scenario, "plain"), run(scenario, "calendar")
    assert_equal_logs(plain.log, calendar.log)
    assert_nothing_is_left(plain)
    assert_nothing_is_left(calendar)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_looking_changes_nothing(engine: str, seed: int) -> None:
    scenario = draw_scenario(seed, engine)
    watched, alone = run(scenario, "calendar"), run(scenario, "calendar", looks=False)
    detailed = run(scenario, "calendar", detail=True, looks=False)
    assert_equal_logs(events(watched.log), events(alone.log))
    assert_equal_logs(events(alone.log), events(detailed.log))
    assert_nothing_is_left(alone)


@pytest.mark.parametrize("engine", ["vllm-v1", "vllm-v1-async"])
@settings(max_examples=15)
@given(seed=SEEDS)
def test_both_loops_share_the_faults_of_the_real_engines(engine: str, seed: int) -> None:
    scenario = draw_scenario(seed, engine)
    plain, calendar = (run(scenario, loop, upstream_faults=True) for loop in ("plain", "calendar"))
    assert_equal_logs(plain.log, calendar.log)


@pytest.mark.deep
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=1_000)
@given(seed=SEEDS)
def test_both_loops_take_the_same_decisions_deep(engine: str, seed: int) -> None:
    scenario = draw_scenario(seed, engine)
    plain, calendar = run(scenario, "plain"), run(scenario, "calendar")
    assert_equal_logs(plain.log, calendar.log)
    assert_nothing_is_left(calendar)
