"""What single parts cost: a row of a trace read, a decode step priced by the kernel model, a contiguous request placed.

Run it with `python benchmarks/parts.py`; it prints the best of five runs of each, in CPU time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from kvsim.catalog import load_model
from kvsim.cost.kernels import KernelCost
from kvsim.memory.contiguous import ContiguousAllocator, Placement
from kvsim.scheduling.plan import StepShape
from kvsim.types import AllocStatus
from kvsim.workload.traces import load_trace

NUM_RUNS = 5
NUM_ROWS = 20_000
NUM_SHAPES = 10_000


def trace_rows() -> Callable[[], int]:
    """Rows of the Azure format, read with their timestamps."""
    moments = (
        f"{18 + row // 12_000}:{row // 200 % 60:02}:{row // 4 % 50:02}.{row % 4}805900" for row in range(NUM_ROWS)
    )
    lines = [f"2023-11-16 {moment},{1 + row % 4096},{1 + row % 700}" for row, moment in enumerate(moments)]
    path = Path(tempfile.mkdtemp()) / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, ""]))

    def run() -> int:
        return len(load_trace(path))

    return run


def decode_steps() -> Callable[[], int]:
    """Decode steps of 1 to 256 sequences on an H100, by a model that has priced none before."""
    model = load_model("llama-3.1-8b")
    shapes = [StepShape(num, num * (200 + 13 * (i % 100))) for i in range(NUM_SHAPES) for num in [1 + i % 256]]

    def run() -> int:
        cost = KernelCost.from_profile("h100", model, block_size=16, overhead_us=0.0)
        for shape in shapes:
            cost.step_ns(shape)
        return len(shapes)

    return run


def placed(placement: str) -> Callable[[], int]:
    """Requests of 1 to 900 slots placed in 131,072, others freed where there is no hole."""

    def run() -> int:
        allocator = ContiguousAllocator(131_072, placement=placement)
        live: list[int] = []
        state = 1
        for index in range(NUM_ROWS):
            state = state * 1_103_515_245 + 12_345 & 0x7FFFFFFF
            while allocator.can_allocate(1 + state % 900) is not AllocStatus.OK:
                allocator.free(live.pop(state % len(live)))
            allocator.allocate(index, 1 + state % 900)
            live.append(index)
        return NUM_ROWS

    return run


def main() -> None:
    parts = {"row of a trace": trace_rows(), "decode step priced": decode_steps()}
    parts |= {f"request placed, {name}": placed(name) for name in get_args(Placement)}
    for name, run in parts.items():
        seconds = []
        for _ in range(NUM_RUNS):
            begin = time.process_time()
            num = run()
            seconds.append((time.process_time() - begin) / num)
        print(f"{name:30} {min(seconds) * 1e6:6.2f} us")


if __name__ == "__main__":
    main()
