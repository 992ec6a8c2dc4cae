"""Every scenario of the repository runs as it is, says which question it answers, and shows what it claims to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from kvsim.cli import main
from kvsim.workload import load_trace

SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
NEEDS_DATA = {"azure-conv"}


def run(name: str, out: Path, *sets: str) -> dict[str, Any]:
    options = [part for item in sets for part in ("--set", item)]
    path = ROOT / "scenarios" / f"{name}.yaml"
    assert main(["run", str(path), "--out", str(out), "--record", "summary", "--no-plots", *options]) == 0
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_it_begins_with_a_comment(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#")
    assert path.stem in text


@pytest.mark.parametrize("path", [p for p in SCENARIOS if p.stem not in NEEDS_DATA], ids=lambda path: path.stem)
def test_it_runs_and_completes(path: Path, tmp_path: Path) -> None:
    summary = run(path.stem, tmp_path / "out")
    assert summary["completed"] > 0
    assert summary["num_unfinished"] == 0
    assert summary["completed"] + summary["num_rejected"] + summary["num_aborted"] == summary["num_requests"]


def test_the_sample_traces_are_read_as_what_they_are() -> None:
    folder = ROOT / "scenarios/traces"
    for path in folder.glob("*-sample.*"):
        expected = {"plain": "csv", "sessions": "csv"}.get(path.stem.removesuffix("-sample"))
        assert load_trace(path).format == (expected or path.stem.removesuffix("-sample"))


def hit_rate(summary: dict[str, Any]) -> float:
    return float(summary["prefix_cache_hits"]) / float(summary["prefix_cache_queries"])


def test_a_shared_part_below_a_block_saves_nothing(tmp_path: Path) -> None:
    assert hit_rate(run("system-prompt", tmp_path / "a")) > 0.9
    assert hit_rate(run("system-prompt", tmp_path / "b", "workload.content.system_prompt.tokens=15")) < 0.02


def test_the_cache_decides_an_agents_first_token(tmp_path: Path) -> None:
    cached = run("agent-loop", tmp_path / "a", "memory.kv_cache_memory_bytes=24GiB")
    without = run(
        "agent-loop", tmp_path / "b", "memory.kv_cache_memory_bytes=24GiB", "allocator.enable_prefix_caching=false"
    )
    assert hit_rate(cached) > 0.8
    assert cached["mean_ttft_ms"] < without["mean_ttft_ms"] / 2


def test_max_concurrency_bounds_what_runs(tmp_path: Path) -> None:
    summary = run("max-concurrency", tmp_path / "a")
    assert summary["running_peak"] == 32
    assert summary["waiting_mean"] == 0


def test_equal_samples_share_more_than_independent_ones(tmp_path: Path) -> None:
    same = run("parallel-sampling", tmp_path / "a")
    independent = run("parallel-sampling-independent", tmp_path / "b")
    assert same["num_cow_copies"] > 0
    assert independent["num_cow_copies"] > 0


def test_theta_makes_beams_share(tmp_path: Path) -> None:
    peaks = [
        run("beam-search", tmp_path / theta, f"workload.sampling.theta={theta}")["kv"]["free"]
        for theta in ("0", "0.5", "2")
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
