"""The recorder beside odd requests."""

from __future__ import annotations

import pytest

from kvsim.runs import run


@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
def test_samples_of_one_token_end_as_the_others_are_forked(engine: str) -> None:
    """A sample that ends with the first token was never forked, and its request goes on without it."""
    summary = run(
        {
            "engine": engine,
            "model": "opt-13b",
            "seed": 3,
            "memory": {"num_gpu_blocks_override": 400},
            "workload": {
                "num_requests": 60,
                "lengths": {"type": "uniform", "prompt": [1, 30], "output": [1, 4]},
                "sampling": {"n": 4, "lengths": "independent"},
            },
        }
    ).summary
    assert summary["completed"] == 60
    assert sum(summary["kv"].values()) == pytest.approx(1.0)
