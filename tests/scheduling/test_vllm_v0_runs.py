"""The paper's engine in whole runs: every law at every step, and every plan executed on real keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsim.runs import Options, run


def scenario(num_host_blocks: int, sampling: dict[str, int], **keys: Any) -> dict[str, Any]:
    """Ten short requests on a pool that holds two or three of them."""
    return {
        "name": "tight",
        "seed": 3,
        "engine": "vllm-v0",
        "model": "llama-2-7b",
        "memory": {"num_gpu_blocks_override": 14, "num_cpu_blocks_override": num_host_blocks},
        "allocator": {"block_size": 4, "watermark": 0.01},
        "scheduler": {"max_num_seqs": 16, "max_model_len": 64},
        "workload": {
            "num_requests": 10,
            "arrivals": {"type": "poisson", "request_rate": 100.0},
            "lengths": {"type": "fixed", "prompt": 7, "output": 9},
            "sampling": sampling,
        },
        "cost": {"type": "linear"},
        **keys,
    }


def test_what_samples_share_when_they_come_back_is_no_hit_of_a_prefix_cache() -> None:
    result = run(scenario(0, {"n": 3}))
    assert result.summary["num_recomputed_tokens"] > 0
    assert result.summary["prefix_cache_queries"] == 0
    assert result.steps.prefix_hit_tokens.sum() == 0


@pytest.mark.parametrize("num_host_blocks", [0, 4, 20])
@pytest.mark.parametrize("sampling", [{"n": 1}, {"n": 3}, {"beam_width": 3}], ids=str)
def test_attention_over_its_tables_is_dense_attention(sampling: dict[str, int], num_host_blocks: int) -> None:
    options = Options(plots=False, check=True, replay=True)
    summary = run(scenario(num_host_blocks, sampling), options=options).summary
    assert summary["completed"] == 10
    assert summary["num_preemptions"] > 0
    # Single sequences are recomputed; groups are swapped as long as the host has room.
    is_swapping = num_host_blocks > 0 and sampling != {"n": 1}
    assert (summary["num_swapped_out_blocks"] > 0) == is_swapping
    assert (summary["num_recomputed_tokens"] > 0) == (num_host_blocks < 20 or not is_swapping)


@pytest.mark.parametrize("sampling", [{"n": 1}, {"n": 3}, {"beam_width": 3}], ids=str)
def test_both_loops_write_the_same_files(tmp_path: Path, sampling: dict[str, int]) -> None:
    for loop in ("calendar", "plain"):
        run(scenario(4, sampling, engine_loop=loop), out=tmp_path / loop)
    for name in ("steps.csv", "requests.csv", "summary.json"):
        assert (tmp_path / "calendar" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
