"""Every column and key that a run writes is on docs/columns.md."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.memory.journal import EVENTS
from kvsim.metrics.export import flatten

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "columns.md").read_text("utf-8")

SMALL: dict[str, Any] = {
    "name": "small",
    "memory": {"num_gpu_blocks_override": 24, "num_cpu_blocks_override": 40},
    "allocator": {"block_size": 4},
    "scheduler": {"max_model_len": 64, "preemption": "swap"},
    "workload": {
        "num_requests": 20,
        "arrivals": {"type": "poisson", "request_rate": 300},
        "lengths": {"type": "uniform", "prompt": [3, 30], "output": [2, 20]},
        "priorities": {0: 0.5, 1: 0.5},
        "abort": {"probability": 0.2, "after": "50ms"},
    },
    "slo": {"ttft": "2s"},
}


def section(title: str) -> set[str]:
    """Names in backticks in the first column of the tables under a heading of level two."""
    body = re.search(rf"^## {re.escape(title)}.*?$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert body, f"docs/columns.md has no heading {title!r}"
    cells = re.findall(r"^\| (.*?) \|", body[1], re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("columns") / "out"
    options = kvsim.Options(plots=False, debug=True)
    kvsim.compare(SMALL, ("paged", "vllm-v1", "vllm-v1-async", "orca-pow2", "static"), out=out, options=options)
    return out


def test_steps(compared: Path) -> None:
    assert set(header(compared / "paged" / "steps.csv")) == section("steps.csv")


def test_requests(compared: Path) -> None:
    assert set(header(compared / "paged" / "requests.csv")) == section("requests.csv")


@pytest.mark.parametrize("engine", ["paged", "orca-pow2"])
def test_events(compared: Path, engine: str) -> None:
    assert set(header(compared / engine / "events.csv")) == section("events.csv")
    assert all(f"`{event}`" in PAGE for event in EVENTS)


def test_summary_and_compare(compared: Path) -> None:
    names = set(header(compared / "compare.csv")) - {"engine"}
    documented = section("summary.json")
    assert {re.sub(r"^by_priority\.-?\d+\.", "by_priority.N.", name) for name in names} == documented - {"engine"}
    assert "by_priority.0.completed" in names


def test_sweep(tmp_path: Path) -> None:
    values = SMALL | {"name": "swept"}
    kvsim.sweep(values, {"allocator.block_size": [4, 8]}, seeds=2, jobs=1, out=tmp_path / "out", plots=False)
    documented = section("summary.json") | section("sweep.csv and sweep_agg.csv") | {"allocator.block_size"}
    for table in ("sweep.csv", "sweep_agg.csv"):
        for name in header(tmp_path / "out" / table):
            plain = re.sub(r"^by_priority\.-?\d+\.", "by_priority.N.", name).removesuffix(".ci95")
            assert plain in documented, f"{table}: {name} is not on docs/columns.md"


def test_quickstart_keys_nest_as_said() -> None:
    flat = flatten(kvsim.run(SMALL).summary)
    assert {"kv.free", "kv_saturated.free"} <= set(flat)
