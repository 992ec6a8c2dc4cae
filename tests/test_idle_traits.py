"""Traits of requests that change nothing under the scheduler at hand are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvsim

DRAWN = {
    "num_requests": 8,
    "arrivals": {"type": "constant", "request_rate": 100},
    "lengths": {"type": "fixed", "prompt": 10, "output": 3},
}


def warnings_of(workload: dict[str, Any], engine: str = "paged", **settings: Any) -> list[str]:
    scenario = {
        "seed": 3,
        "engine": engine,
        "memory": {"num_gpu_blocks_override": 50},
        "allocator": {"block_size": 4},
        "scheduler": {"max_model_len": 64},
        "workload": workload,
    }
    return list(kvsim.run(scenario, **settings).summary["warnings"])


def rows(*priorities: int) -> dict[str, Any]:
    return {"requests": [{"prompt_tokens": 4, "output_tokens": 3, "priority": number} for number in priorities]}


@pytest.mark.parametrize(
    ("engine", "settings", "why"),
    [
        ("paged", {}, "scheduler.scheduling_policy is fcfs, not priority"),
        ("vllm-v1", {}, "scheduler.scheduling_policy is fcfs, not priority"),
        ("orca-max", {}, "scheduler.scheduling_policy is fcfs, not priority"),
        ("vllm-v0", {}, "scheduler vllm-v0 has no scheduling_policy"),
        ("static", {}, "scheduler static has no scheduling_policy"),
        ("paged", {"scheduler.scheduling_policy": "priority"}, None),
        ("vllm-v1-async", {"scheduler.scheduling_policy": "priority"}, None),
        ("paged", {"scheduler.queue_order": "by_priority"}, None),
        ("paged", {"scheduler.victim": "least_urgent"}, None),
    ],
)
def test_priorities_that_nobody_looks_at(
    engine: str, settings: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "priorities.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,priority\n0,4,3,1\n1,4,3,0\n")
    for workload in (rows(1, 0), DRAWN | {"priorities": {0: 0.5, 1: 0.5}}, {"trace": str(path)}):
        told = [text for text in warnings_of(workload, engine, **settings) if "differ in priority" in text]
        assert told == [] if why is None else [why in text for text in told] == [True]


def test_equal_priorities_are_no_news() -> None:
    assert not any("priority" in text for text in warnings_of(rows(2, 2)))


@pytest.mark.parametrize(
    ("workload", "engine", "settings", "told"),
    [
        (DRAWN, "vllm-v1", {"scheduler.max_loras": 2}, "scheduler.max_loras: is not used: no request has a LoRA"),
        ({"requests": [{"prompt_tokens": 4, "output_tokens": 3}]}, "vllm-v1", {"scheduler.max_loras": 2}, "max_loras"),
        (
            {"requests": [{"prompt_tokens": 4, "output_tokens": 3, "lora": "a"}]},
            "vllm-v1",
            {"scheduler.max_loras": 2},
            "",
        ),
        (DRAWN | {"content": {"num_loras": 4}}, "vllm-v1", {"scheduler.max_loras": 2}, ""),
        (DRAWN | {"content": {"num_loras": 4}}, "vllm-v1", {}, ""),
        (
            DRAWN | {"content": {"num_loras": 4}},
            "paged",
            {},
            "workload.content.num_loras: is not used: nothing is cached",
        ),
        (
            DRAWN | {"content": {"num_loras": 4}},
            "vllm-v0",
            {"allocator.enable_prefix_caching": True},
            "num_loras: is not",
        ),
    ],
)
def test_adapters_that_change_nothing(
    workload: dict[str, Any], engine: str, settings: dict[str, Any], told: str
) -> None:
    found = [text for text in warnings_of(workload, engine, **settings) if "max_loras" in text or "num_loras" in text]
    assert found == [] if not told else [told in text for text in found] == [True]
