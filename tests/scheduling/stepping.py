"""A driver without a simulated clock: one step of a scheduler is one unit of time (or what a step cost says)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvsim.memory.paged import PagedAllocator
from kvsim.request import Namespace, Request, Sampling
from kvsim.scheduling.continuous import ContinuousScheduler
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.tokens import TokenStream


def request(
    request_id: str,
    prompt_len: int,
    output_len: int,
    at: float = 0,
    *,
    source: int | None = None,
    prompt: TokenStream | None = None,
    max_output_len: int | None = None,
    n: int = 1,
    beam_width: int = 0,
    priority: int = 0,
    lora: str | None = None,
    sample_lens: tuple[int, ...] = (),
    seed: int = 0,
) -> Request:
    """A request whose prompt is its own text, or the start of the endless text `source`."""
    if prompt is None:
        prompt = TokenStream.from_segment(source or 1_000 + int.from_bytes(request_id.encode(), "big"), prompt_len)
    return Request(
        request_id,
        int(at * 1000),
        prompt,
        output_len,
        max_output_len or output_len,
        sampling=Sampling(n=n, beam_width=beam_width),
        priority=priority,
        namespace=Namespace(lora=lora),
        sample_lens=sample_lens,
        seed=seed,
    )


def paged(num_blocks: int, block_size: int, **keywords: Any) -> PagedScheduler:
    """Engine `paged`; keywords of the allocator are picked out."""
    names = ("num_host_blocks", "enable_prefix_caching", "free_list")
    memory = {name: keywords.pop(name) for name in names if name in keywords}
    return PagedScheduler(PagedAllocator(num_blocks, block_size, **memory), **keywords)


@dataclass
class Run:
    """What happened, with times in units of a step."""

    finished_at: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    """Times at which a request's number of emitted tokens grew."""
    hits: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    num_recomputed: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """Blocks in use while the step runs."""
    now: float = 0

    @property
    def peak(self) -> int:
        return max(self.used)

    def gaps(self, request_id: str) -> list[float]:
        times = self.token_times[request_id]
        return [round(later - earlier, 6) for earlier, later in pairwise(times)]


def drive(
    scheduler: ContinuousScheduler,
    requests: Iterable[Request] = (),
    *,
    run: Run | None = None,
    until: float = 1e9,
    max_steps: int = 5_000,
    step_time: Callable[[StepPlan], float] = lambda plan: 1,
    aborts: Iterable[tuple[float, str]] = (),
) -> Run:
    """Run until nothing is left (or `until`), auditing the memory after every step."""
    run = run or Run()
    todo = sorted(requests, key=lambda request: request.arrival_ns)
    to_abort = sorted(aborts)
    for _ in range(max_steps):
        while todo and todo[0].arrival_ns <= run.now * 1000 + 1e-6:
            arrived = todo.pop(0)
            rejection = scheduler.submit(arrived)
            if rejection:
                run.rejected[arrived.request_id] = rejection.reason
        while to_abort and to_abort[0][0] <= run.now:
            scheduler.abort(to_abort.pop(0)[1])
        if run.now >= until or not (scheduler.has_work or todo):
            return run
        if not scheduler.has_work:
            run.now = todo[0].arrival_ns / 1000
            continue
        _step(scheduler, run, step_time)
    raise AssertionError(f"not done after {max_steps} steps: {scheduler.describe_block()}")


def _step(scheduler: ContinuousScheduler, run: Run, step_time: Callable[[StepPlan], float]) -> None:
    assert not isinstance(scheduler, VllmV1AsyncScheduler)
    plan = scheduler.schedule(int(run.now * 1000))
    run.used.append(scheduler.allocator.usage().num_used)
    run.now = round(run.now + step_time(plan), 6)
    before = {seq.seq_id: seq.num_output_tokens for seq in scheduler.live_sequences()}
    outcome = scheduler.complete(plan)
    scheduler.allocator.audit()
    live = [*scheduler.live_sequences(), *outcome.ended]
    for seq in live:
        if seq.sample == 0 and seq.num_output_tokens > before.get(seq.seq_id, 0):
            run.token_times.setdefault(seq.request.request_id, []).append(run.now)
    for request_id in outcome.finished_requests:
        run.finished_at[request_id] = run.now
    for admission in plan.admitted:
        run.hits.setdefault(admission.seq.request.request_id, []).append(admission.num_hit_tokens)
    for preemption in plan.preempted:
        run.preempted.append(preemption.seq.request.request_id)
        run.num_recomputed += 0 if preemption.is_swap else preemption.num_stored_tokens
    run.plans.append(plan)
    run.outcomes.append(outcome)
