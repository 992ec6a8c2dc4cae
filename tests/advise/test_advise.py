"""The whole page, its files and its command; and, in deep tests, whether the advice holds in fresh simulations."""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from sweeps.sweeping import kvsim_command

import kvsim
from kvsim.advise import Advice, advise
from kvsim.advise.report import markdown, runs_of, terminal
from kvsim.types import ScenarioError

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 1,
    "memory": {"num_gpu_blocks_override": 64},
    "scheduler": {"max_model_len": 256},
    "workload": {
        "num_requests": 15,
        "arrivals": {"type": "poisson", "request_rate": 30.0},
        "lengths": {"type": "uniform", "prompt": [10, 60], "output": [10, 40]},
    },
}
TOPICS = {"paging", "block_size", "rate", "cache", "sharing"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Advice:
    return advise(TINY, seeds=2, jobs=1, out=tmp_path_factory.mktemp("advice") / "out", slo={"ttft": "200ms"})


def test_five_questions_are_answered(tiny: Advice) -> None:
    assert {answer.topic for answer in tiny.answers} == TOPICS
    assert all(answer.verdict and answer.runs for answer in tiny.answers)
    assert tiny.slo == "TTFT 200 ms"


def test_the_page_has_every_answer(tiny: Advice) -> None:
    for text in (terminal(tiny), markdown(tiny, {})):
        for answer in tiny.answers:
            assert answer.question in text
            assert answer.verdict in text


@pytest.mark.parametrize("horizon", [0.3, 60.0])
def test_a_horizon_that_cuts_requests_off_is_pointed_out(horizon: float) -> None:
    """Those who had not come by then ask for nothing; those who had miss the SLO."""
    advice = advise(TINY, seeds=2, jobs=1, slo={"ttft": "2s"}, horizon=horizon)
    own = [run for run in advice.runs if not run.values]
    cut = sum(run.summary["num_running_at_end"] + run.summary["num_waiting_at_end"] for run in own)
    assert (cut > 0) == (horizon < 1)
    assert any(f"horizon cuts {cut} requests off in 2 runs" in note for note in advice.notes) == (horizon < 1)
    for run in own:
        arrived = run.summary["num_requests"] - run.summary["num_not_arrived"]
        assert run.attainment == run.summary["completed"] / arrived


def test_what_comes_up_while_runs_run_is_told() -> None:
    values = {"scheduler.max_model_len": 64, "cost": {"type": "kernels", "profile": "a100"}}
    advice = advise(TINY, seeds=2, jobs=1, slo={"ttft": "2s"}, **values)
    notes = "\n".join(advice.notes)
    assert re.search(r"^[0-9]+ of [0-9]+ runs, the first is run=1, seed=1: outputs cut where .*: [0-9]+$", notes, re.M)
    assert re.search(r"^[0-9]+ of [0-9]+ runs, the first is run=1, seed=1: cost profile a100: outside the", notes, re.M)
    assert all(note in terminal(advice) and note in markdown(advice, {}) for note in advice.notes)


def test_every_run_behind_an_answer_is_in_the_table(tiny: Advice) -> None:
    assert tiny.out is not None
    with (tiny.out / "runs.csv").open() as file:
        rows = {int(row["run"]): row for row in csv.DictReader(file)}
    assert len(rows) == len(tiny.runs)
    for answer in tiny.answers:
        assert set(answer.runs) <= set(rows)


def test_a_run_of_the_table_can_be_repeated(tiny: Advice) -> None:
    run = next(run for run in tiny.runs if run.topic == "block size")
    again = kvsim.run(TINY, **{"slo.ttft": "200ms", **run.values, "seed": run.seed}).summary
    assert again["mean_ttft_ms"] == run.summary["mean_ttft_ms"]


def test_files(tiny: Advice) -> None:
    assert tiny.out is not None
    names = {path.name for path in tiny.out.iterdir()}
    assert {"advice.md", "advice.json", "runs.csv", "scenario.yaml", "paging.png", "block_size.png"} <= names
    page = (tiny.out / "advice.md").read_text()
    for picture in (name for name in names if name.endswith(".png")):
        assert f"({picture})" in page
    assert set(json.loads((tiny.out / "advice.json").read_text())["answers"]) == TOPICS


def test_the_same_question_has_the_same_answer(tiny: Advice) -> None:
    again = advise(TINY, seeds=2, jobs=2, slo={"ttft": "200ms"})
    assert again.as_dict() == tiny.as_dict()


def test_run_numbers_are_shortened() -> None:
    assert runs_of([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert runs_of([]) == "none"


def test_contiguous_scenarios_are_asked_as_if_they_were_paged() -> None:
    from kvsim.advise.advise import _on_blocks
    from kvsim.scenario.resolve import scenario_from_dict

    base, notes = _on_blocks(scenario_from_dict(TINY | {"engine": "orca-max"}))
    assert base.scenario.engine == "paged"
    assert "orca-max" in notes[0]


def test_keys_that_do_not_count_are_among_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["kvsim.advise.advise"]
    monkeypatch.setattr(module, "_ask", lambda lab: ())
    monkeypatch.setattr(module, "_chance", lambda lab: ())
    notes = advise(TINY, jobs=1, **{"workload.speed": 2}).notes
    assert any("workload.speed: is not used: there is no trace" in note for note in notes)
    assert not any("GPUs" in note for note in notes)


def test_sizes_of_one_gpu_of_several_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["kvsim.advise.advise"], "_ask", lambda lab: ())
    notes = advise(TINY, jobs=1, tensor_parallel_size=4, model="llama-3.1-70b").notes
    assert "GiB are those of each of the 4 GPUs" in notes


def test_one_seed_is_not_enough() -> None:
    with pytest.raises(ScenarioError, match="at least 2"):
        advise(TINY, seeds=1, jobs=1)


def test_a_scenario_that_cannot_run_is_said_at_once() -> None:
    with pytest.raises(ScenarioError, match="no_such_module"):
        advise(TINY | {"scheduler": {"victim": "no_such_module:victim"}}, seeds=2, jobs=1)


def test_the_command_prints_json(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    options = ("--slo", "ttft=200ms", "--seeds", "2", "--jobs", "1", "--no-plots", "--json")
    done = kvsim_command("advise", "tiny.yaml", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["answers"]) == TOPICS


@pytest.mark.parametrize(
    "options",
    [("--slo", "speed=3"), ("--slo", "ttft=fast"), ("--seeds", "1"), ("--set", "nonsense.key=1"), ("--jobs", "0")],
)
def test_bad_input_ends_with_a_message(tmp_path: Path, options: tuple[str, str]) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    done = kvsim_command("advise", "tiny.yaml", "--no-plots", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def shipped(repo_root: Path) -> dict[str, Advice]:
    names = ("quickstart", "offline-single-stream", "chat-high-concurrency")
    return {name: advise(repo_root / "scenarios" / f"{name}.yaml") for name in names}


@pytest.mark.deep
def test_three_workloads_have_three_answers_to_paging(shipped: dict[str, Advice]) -> None:
    worth = {name: advice["paging"].figures["is_worth_it"] for name, advice in shipped.items()}
    assert worth == {"quickstart": True, "offline-single-stream": False, "chat-high-concurrency": True}
    gains = {name: advice["paging"].figures["gain"]["output_throughput"]["mean"] for name, advice in shipped.items()}
    assert len({round(gain, 3) for gain in gains.values()}) == 3


@pytest.mark.deep
@pytest.mark.parametrize("name", ["quickstart", "chat-high-concurrency"])
def test_the_recommended_rate_holds_and_a_quarter_more_does_not(
    shipped: dict[str, Advice], repo_root: Path, name: str
) -> None:
    rate = shipped[name]["rate"].figures["recommended"]
    scenario = repo_root / "scenarios" / f"{name}.yaml"
    key = "workload.arrivals.request_rate"
    assert share_in_fresh_runs(scenario, {key: rate}) >= 0.95
    assert share_in_fresh_runs(scenario, {key: 1.25 * rate}) < 0.95


@pytest.mark.deep
@pytest.mark.parametrize("name", ["quickstart", "offline-single-stream", "chat-high-concurrency"])
def test_the_recommended_cache_holds_and_a_fifth_less_does_not(
    shipped: dict[str, Advice], repo_root: Path, name: str
) -> None:
    figures = shipped[name]["cache"].figures
    scenario = repo_root / "scenarios" / f"{name}.yaml"
    key, blocks = "memory.num_gpu_blocks_override", figures["recommended_blocks"]
    assert share_in_fresh_runs(scenario, {**figures["load"], key: blocks}) >= 0.95
    assert share_in_fresh_runs(scenario, {**figures["load"], key: int(0.8 * blocks)}) < 0.95


def share_in_fresh_runs(scenario: Path, values: dict[str, Any]) -> float:
    """Share of the requests that meet the SLO, over seeds that the advice has not seen."""
    shares = []
    for seed in range(1001, 1009):
        summary = kvsim.run(scenario, **{**values, "seed": seed, "record": ["summary"]}).summary
        good = (summary["request_goodput"] or 0.0) * summary["duration"]  # nothing is served where all are rejected
        shares.append(good / summary["num_requests"])
    return statistics.mean(shares)


def test_what_an_answer_switches_on_is_no_wish_of_the_users() -> None:
    """Whether a prefix cache helps is tried; that it finds nothing is the answer, and no news about the scenario."""
    text = "allocator.enable_prefix_caching: is on, and no two prompts of this workload begin alike"
    assert not any(text in note for note in advise(TINY, jobs=1).notes)
    asked = advise(TINY, jobs=1, **{"allocator.enable_prefix_caching": True}).notes
    assert sum(text in note for note in asked) == 1
