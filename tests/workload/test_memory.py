"""A large trace costs columns, not objects."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from kvsim.workload import build_source


def peak_bytes(folder: Path, num_rows: int) -> int:
    """Peak of reading a plain CSV of so many rows and taking its first thousand requests."""
    path = folder / f"{num_rows}.csv"
    with path.open("w") as lines:
        lines.write("arrival_s,prompt_tokens,output_tokens\n")
        lines.writelines(f"{i / 7:.6f},{i % 2000 + 1},{i % 300 + 1}\n" for i in range(num_rows))
    tracemalloc.start()
    source = build_source({"trace": str(path)})
    for _ in range(1000):
        source.take_due(source.next_ns() or 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.deep
def test_a_request_of_a_trace_costs_less_than_100_bytes(tmp_path: Path) -> None:
    """The bar for a whole run is 200 bytes a request; the workload may take half of it."""
    peak_bytes(tmp_path, 10)  # what is imported now is not counted later
    # Both files are longer than a chunk of the reader, whose rows are the constant part.
    few, many = peak_bytes(tmp_path, 66_000), peak_bytes(tmp_path, 166_000)
    per_request = (many - few) / 100_000
    assert per_request < 100
