"""A small bench for worked-out cases: requests as (id, prompt, output, arrival), a step cost, and what came out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pandas as pd

from kvsim.memory import PagedAllocator
from kvsim.metrics.export import request_columns, step_columns
from kvsim.metrics.summary import Goals, summarise
from kvsim.request import Request
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.plan import StepShape
from kvsim.sim.run import Simulation, simulate
from kvsim.tokens import TokenStream
from kvsim.types import NS_PER_MS
from kvsim.workload.source import ListSource

MS = NS_PER_MS


@dataclass(frozen=True)
class StepCost:
    """`base_ms` a step, and `token_ms` for each of its tokens."""

    base_ms: float = 1.0
    token_ms: float = 0.0

    def step_ns(self, shape: StepShape) -> int:
        return round((self.base_ms + self.token_ms * shape.num_tokens) * MS)


@dataclass(frozen=True)
class Outcome:
    """Summary and tables of one case; times in ms, as the cases give them."""

    simulation: Simulation
    summary: dict[str, Any]
    steps: pd.DataFrame
    requests: pd.DataFrame
    allocator: Any

    def __getitem__(self, request_id: str) -> pd.Series:
        return self.requests.set_index("request_id").loc[request_id]

    def end_ms(self, request_id: str) -> float:
        return round(self[request_id].finish_s * 1000, 6)


def text(source: int, length: int, *more: tuple[int, int]) -> TokenStream:
    """A prompt of `length` tokens of text number `source`, then of others."""
    stream = TokenStream.from_segment(source, length)
    for other, count in more:
        stream = stream + TokenStream.from_segment(other, count)
    return stream


def request(request_id: str, prompt: int | TokenStream, output_len: int, at: float = 0.0, **more: Any) -> Request:
    """A request that arrives at `at` ms; a bare prompt length is a text of its own."""
    stream = prompt if isinstance(prompt, TokenStream) else text(1000 + sum(map(ord, request_id)), prompt)
    abort_ms = more.pop("abort_at", None)
    return Request(
        request_id,
        round(at * MS),
        stream,
        output_len,
        more.pop("max_output_len", output_len),
        abort_ns=None if abort_ms is None else round(abort_ms * MS),
        **more,
    )


def play(
    requests: Iterable[Request],
    *,
    num_blocks: int,
    block_size: int,
    cost: Any = StepCost(),
    horizon_ms: float | None = None,
    scheduler: Callable[..., Any] = PagedScheduler,
    num_host_blocks: int = 0,
    enable_prefix_caching: bool = False,
    free_list: str = "fifo",
    observers: tuple[Any, ...] = (),
    **keywords: Any,
) -> Outcome:
    """Run requests through the `paged` engine (unless another scheduler is given), every law checked at every step."""
    allocator = PagedAllocator(
        num_blocks,
        block_size,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=enable_prefix_caching,
        free_list=free_list,
    )
    engine = scheduler(allocator, **keywords)
    horizon_ns = None if horizon_ms is None else round(horizon_ms * MS)
    simulation = simulate(engine, cost, ListSource(requests), horizon_ns=horizon_ns, check=True, observers=observers)
    summary = summarise(
        simulation.recorder,
        end_ns=simulation.end_ns,
        num_requests=simulation.num_requests,
        goals=Goals(),
        facts={},
    )
    return Outcome(
        simulation,
        summary,
        pd.DataFrame(step_columns(simulation.recorder)),
        pd.DataFrame(request_columns(simulation.recorder)),
        allocator,
    )


def listen_to_interrupts() -> None:
    """For `preexec_fn`: a shell that runs the suite in the background has its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def num_lines(work: Callable[[], object]) -> int:
    """How many lines of Python `work` runs, those of loops each time: what it costs, the same on any machine."""
    count = 0

    def on_event(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
