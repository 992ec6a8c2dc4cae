"""Random small scenarios, run through a real engine and replayed on real arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import simpy

from kvsim.attention import Replay
from kvsim.memory import PagedAllocator
from kvsim.request import NO_NAMESPACE, Namespace, Request, Sampling
from kvsim.scheduling.plan import StepOutcome, StepPlan, StepShape
from kvsim.sim.server import Server
from kvsim.tokens import TokenStream
from kvsim.types import NS_PER_MS
from kvsim.workload.source import ListSource


class UnitCost:
    """Every step takes a millisecond."""

    def step_ns(self, shape: StepShape) -> int:
        return NS_PER_MS


@dataclass
class EventCounts:
    """An observer that counts what a replay is there to check."""

    preemptions: int = 0
    copies: int = 0
    swapped_in_blocks: int = 0
    hit_tokens: int = 0
    resumed: int = 0
    forks: int = 0
    pruned: int = 0
    chunks: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0

    def on_submit(self, request: Any, reason: str | None, now: int) -> None:
        self.rejected += reason is not None

    def on_abort(self, request_id: str, sequences: Any, now: int) -> None:
        self.aborted += 1

    def on_plan(self, plan: StepPlan, now: int) -> None:
        self.preemptions += len(plan.preempted)
        self.copies += len(plan.copies)
        self.swapped_in_blocks += len(plan.swap_in)
        self.hit_tokens += sum(admission.num_hit_tokens for admission in plan.admitted)
        self.resumed += sum(admission.is_resumed for admission in plan.admitted) + len(plan.resumed)
        self.chunks += sum(not chunk.is_last for chunk in plan.prefills)
        self.rejected += len(plan.rejected)

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: int, end_ns: int) -> None:
        self.forks += len(outcome.forks)
        self.pruned += len(outcome.pruned)
        self.finished += len(outcome.finished_requests)

    def __add__(self, other: EventCounts) -> EventCounts:
        return EventCounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Scenario:
    """One small run: its requests, its memory, and the scheduler's keywords."""

    requests: list[Request]
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traits:
    """What an engine can do, and so what its scenarios contain."""

    forks: bool = False
    beams: bool = False
    swaps: bool = False
    prefix_caching: bool = False
    early_stops: bool = False
    windows: bool = False
    null_block: bool = False
    min_budget: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, list[Any]] = field(default_factory=dict)
    """Scheduler keywords and the values to choose from."""


def random_scenario(seed: int, traits: Traits) -> Scenario:
    """A pool that is just too small for everybody, and texts that begin alike."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.integers(2, 5))
    caching = traits.prefix_caching and rng.random() < 0.7
    requests = [_request(rng, index, block_size, traits) for index in range(int(rng.integers(3, 9)))]
    needs = [_num_blocks(request, block_size) for request in requests]
    num_blocks = int(max(needs) + rng.integers(0, 6))
    num_host_blocks = int(rng.integers(0, sum(needs) + 1)) if traits.swaps else 0
    scheduler = {key: values[int(rng.integers(len(values)))] for key, values in sorted(traits.choices.items())}
    widest = max(request.sampling.num_sequences for request in requests)
    scheduler["max_num_seqs"] = int(rng.integers(max(widest, 2), 9))
    scheduler["max_num_batched_tokens"] = int(rng.integers(max(4, widest, traits.min_budget), 40 + traits.min_budget))
    memory = dict(traits.memory)
    if traits.prefix_caching:
        memory["enable_prefix_caching"] = bool(caching)
    if traits.windows:
        memory["sliding_window"] = block_size * int(rng.integers(1, 5))
    return Scenario(requests, num_blocks + traits.null_block, block_size, num_host_blocks, memory, scheduler)


def _request(rng: np.random.Generator, index: int, block_size: int, traits: Traits) -> Request:
    shared = TokenStream.from_segment(1 + int(rng.integers(2)), int(rng.integers(0, 4 * block_size + 1)))
    own = TokenStream.from_segment(100 + index, int(rng.integers(1, 2 * block_size + 1)))
    prompt = shared + own if rng.random() < 0.7 else shared + TokenStream.from_ids(range(int(rng.integers(1, 9))))
    output_len = int(rng.integers(1, 17))
    sampling = Sampling()
    if traits.forks and rng.random() < 0.4:
        sampling = Sampling(n=int(rng.integers(2, 4)))
    elif traits.beams and rng.random() < 0.3:
        sampling = Sampling(beam_width=int(rng.integers(2, 4)))
    sample_lens = ()
    if sampling.n > 1:
        sample_lens = tuple(int(x) for x in rng.integers(1, 13, sampling.n))
        output_len = max(sample_lens)
    arrival_ns = int(rng.integers(0, 10)) * NS_PER_MS
    knows_output = sampling.num_sequences == 1 and rng.random() < 0.5
    return Request(
        f"r{index}",
        arrival_ns,
        prompt,
        output_len,
        output_len + (int(rng.integers(0, 4)) if traits.early_stops else 0),
        sampling=sampling,
        sample_lens=sample_lens,
        priority=int(rng.integers(3)),
        namespace=Namespace(lora="adapter") if rng.random() < 0.15 else NO_NAMESPACE,
        output=TokenStream.from_segment(7, output_len) if knows_output else None,
        abort_ns=arrival_ns + int(rng.integers(0, 15)) * NS_PER_MS if rng.random() < 0.1 else None,
        seed=int(rng.integers(1 << 30)),
    )


def _num_blocks(request: Request, block_size: int) -> int:
    """Blocks it may need: the full blocks of its prompt are shared by all its sequences."""
    one = -(-request.max_stored_tokens // block_size)
    return one + (request.sampling.num_sequences - 1) * (one - request.prompt_len // block_size)


def replay_scenario(
    scenario: Scenario,
    make_scheduler: Callable[..., Any],
    *,
    make_allocator: Callable[..., Any] = PagedAllocator,
    make_server: Callable[..., Server] = Server,
    wrap: Callable[[Replay], Any] = lambda replay: replay,
) -> tuple[Replay, EventCounts]:
    """Run it with detail and replay every step."""
    allocator = make_allocator(
        scenario.num_blocks, scenario.block_size, num_host_blocks=scenario.num_host_blocks, **scenario.memory
    )
    scheduler = make_scheduler(allocator, detail=True, **scenario.scheduler)
    window = scenario.memory.get("sliding_window")
    replay = Replay(scenario.block_size, scenario.num_blocks, scenario.num_host_blocks, sliding_window=window)
    events = EventCounts()
    env = simpy.Environment()
    server = make_server(env, scheduler, UnitCost(), ListSource(scenario.requests), (wrap(replay), events))
    env.process(server.run())
    env.run()
    return replay, events
