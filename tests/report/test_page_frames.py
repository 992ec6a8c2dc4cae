"""The block map's recording against the journal and the ledger, for every engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from report.maps import fills_of, frames_of, holders_at, holders_of, instants

from kvsim.memory.journal import read_csv
from kvsim.report.blockmap import BlockMapObserver
from kvsim.result import RunResult
from kvsim.runs import Options, run

WORKLOAD = {
    "num_requests": 25,
    "arrivals": {"type": "poisson", "request_rate": 300},
    "lengths": {"type": "uniform", "prompt": [3, 30], "output": [2, 20]},
}
SHARED_TEXT = {"content": {"system_prompt": {"num_groups": 3, "tokens": 16}}}


def scenario(engine: str, **more: Any) -> dict[str, Any]:
    memory = {"num_gpu_blocks_override": 60, "num_cpu_blocks_override": 0}
    base: dict[str, Any] = {
        "name": "map",
        "engine": engine,
        "seed": 3,
        "memory": memory,
        "allocator": {"block_size": 4},
        "scheduler": {"max_model_len": 64},
        "workload": WORKLOAD,
    }
    for key, value in more.items():
        base[key] = base[key] | value if isinstance(value, dict) and key in base else value
    return base


CASES = {
    "paged": scenario("paged", memory={"num_gpu_blocks_override": 30}),
    "swap": scenario(
        "paged",
        memory={"num_gpu_blocks_override": 30, "num_cpu_blocks_override": 40},
        scheduler={"preemption": "swap"},
    ),
    "samples": scenario("paged", workload={"sampling": {"n": 3}}),
    "beams": scenario("paged", workload={"sampling": {"beam_width": 3}}),
    "caching": scenario("paged", allocator={"enable_prefix_caching": True}, workload=SHARED_TEXT),
    "v0 samples": scenario("vllm-v0", workload={"sampling": {"n": 2}}),
    "v1": scenario("vllm-v1", workload=SHARED_TEXT),
    "v1 async": scenario("vllm-v1-async", memory={"num_gpu_blocks_override": 30}),
    "window": scenario("paged", allocator={"sliding_window": 16}),
    "no-evict": scenario("no-evict"),
    "orca-max": scenario("orca-max"),
    "orca-pow2": scenario("orca-pow2"),
    "orca-oracle": scenario("orca-oracle", allocator={"placement": "first_fit", "compaction": "on_demand"}),
    "orca samples": scenario("orca-pow2", workload={"sampling": {"n": 2}}),
    "static": scenario("static"),
    "static samples": scenario("static", workload={"sampling": {"n": 2}}),
    "aborts": scenario("paged", workload={"abort": {"probability": 0.5, "after": 0.03}}),
    "static aborts": scenario("static", workload={"abort": {"probability": 0.5, "after": 0.1}}),
    "horizon": scenario("paged", horizon=0.15),
    "v0 faults": scenario(
        "vllm-v0",
        memory={"num_gpu_blocks_override": 40, "num_cpu_blocks_override": 200},
        upstream_faults=True,
        workload={"sampling": {"n": 2}},
    ),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunResult]:
    """Runs a case with a report, once."""

    @cache
    def once(name: str) -> RunResult:
        out = tmp_path_factory.mktemp("run") / "out"
        return run(CASES[name], out=out, options=Options(plots=False, report=True))

    return once


Recorded = Callable[[str], RunResult]


@pytest.mark.parametrize("name", CASES)
def test_frames_say_what_the_journal_says(name: str, recorded: Recorded) -> None:
    result = recorded(name)
    recording = result.block_map
    assert recording is not None
    assert result.out is not None
    events = read_csv(result.out / "events.csv")
    frames = list(frames_of(recording))
    assert len(frames) > 20
    for index in instants(len(frames)):
        frame = frames[index]
        assert holders_of(recording, frame) == holders_at(events, frame["t_ns"]), (name, index)


# A ring's slots are overwritten.
COUNTED = [name for name in CASES if name != "window"]


@pytest.mark.parametrize("name", COUNTED)
def test_frames_fill_what_the_ledger_counts(name: str, recorded: Recorded) -> None:
    result = recorded(name)
    recording = result.block_map
    assert recording is not None
    steps = result.steps.set_index("step")
    *frames, _ = frames_of(recording)
    for frame in frames:
        if frame["step"] not in steps.index and name in ("horizon", "v1 async"):
            continue  # Planned, and cut off by the horizon; or planned ahead, with nothing left to do.
        row = steps.loc[frame["step"]]
        assert sum(fills_of(recording, frame).values()) == row["token_states"], frame["step"]
        assert len(frame["idle"]) * recording["block_size"] == row["cached_idle"], frame["step"]


@pytest.mark.parametrize("name", CASES)
def test_the_map_counts_the_steps_of_the_summary(name: str, recorded: Recorded) -> None:
    result = recorded(name)
    assert result.block_map is not None
    assert result.block_map["num_steps"] == result.summary["num_steps"]


@pytest.mark.parametrize("name", ["paged", "aborts", "horizon", "caching"])
def test_what_will_be_filled_is_what_the_ledger_reserves(name: str, recorded: Recorded) -> None:
    """Of clients that give up, only up to then."""
    result = recorded(name)
    recording = result.block_map
    assert recording is not None
    steps, size = result.steps.set_index("step"), recording["block_size"]
    *frames, _ = frames_of(recording)
    for frame in frames:
        if frame["step"] in steps.index:
            to_fill = sum(
                min(len(table) * size, recording["sequences"][seq][3]) - frame["tokens"][seq]
                for seq, table in frame["rows"].items()
            )
            assert to_fill == steps.loc[frame["step"]]["reserved"], frame["step"]


@pytest.mark.parametrize("name", ["paged", "beams", "v1", "static"])
def test_watching_changes_nothing(name: str, recorded: Recorded, tmp_path: Path) -> None:
    watched = recorded(name)
    alone = run(CASES[name], out=tmp_path / "alone")
    assert watched.summary == alone.summary
    for table in ("steps.csv", "requests.csv"):
        assert watched.out is not None
        assert (watched.out / table).read_bytes() == (tmp_path / "alone" / table).read_bytes()


def test_a_run_in_which_nothing_runs_has_no_map(tmp_path: Path) -> None:
    case = scenario("paged", memory={"num_gpu_blocks_override": 1}, workload={"num_requests": 2})
    result = run(case, out=tmp_path / "out", options=Options(plots=False, report=True))
    assert result.summary["num_rejected"] == 2
    assert "block-map-title" not in (tmp_path / "out" / "report.html").read_text()


def test_long_runs_are_sampled(tmp_path: Path) -> None:
    from kvsim.registry import build
    from kvsim.scenario.resolve import scenario_from_dict
    from kvsim.sim.run import simulate

    engine = build(scenario_from_dict(CASES["samples"]).scenario)
    observer = BlockMapObserver(engine.scheduler, max_frames=8)
    simulate(engine.scheduler, engine.cost, engine.source, observers=(observer,))
    assert observer.num_steps > 60
    assert observer.every >= 8
    assert observer.every & (observer.every - 1) == 0
    assert len(observer.frames) == -(-observer.num_steps // observer.every) < 8
    assert [frame.step - observer.frames[0].step for frame in observer.frames] == [
        place * observer.every for place in range(len(observer.frames))
    ]
