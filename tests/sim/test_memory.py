"""What a run keeps of each request when only its summary is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import resource, sys
from kvsim.runs import run
run({"name": "many", "engine": "paged", "model": "llama-3.1-8b", "gpu": "h100-80gb", "record": ["summary"],
     "memory": {"num_gpu_blocks_override": 4000}, "workload": {"trace": sys.argv[1]},
     "cost": {"type": "linear", "step_ms": 1.0, "prefill_token_us": 1, "context_token_ns": 1}})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_kib(folder: Path, num_requests: int) -> int:
    """Peak memory of a process that runs so many requests of a plain CSV."""
    path = folder / f"{num_requests}.csv"
    with path.open("w") as lines:
        lines.write("arrival_s,prompt_tokens,output_tokens\n")
        lines.writelines(f"{i / 1000:.3f},{16 + i % 32},{1 + i % 4}\n" for i in range(num_requests))
    done = subprocess.run([sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.deep
def test_a_request_costs_at_most_200_bytes_with_only_a_summary(tmp_path: Path) -> None:
    # Both files are longer than a chunk of the reader, whose rows are the constant part.
    few, many = peak_kib(tmp_path, 70_000), peak_kib(tmp_path, 140_000)
    assert (many - few) * 1024 / 70_000 <= 200
