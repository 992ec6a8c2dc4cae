"""Random small scenarios for the continuous engines, and what one run of them decides, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvsim.memory.paged import PagedAllocator
from kvsim.request import Namespace, Request, Sampling, Status
from kvsim.scheduling.continuous import ContinuousScheduler
from kvsim.scheduling.no_evict import NoEvictScheduler
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.tokens import Segment, TokenStream

ENGINES: dict[str, type[ContinuousScheduler]] = {
    "paged": PagedScheduler,
    "no-evict": NoEvictScheduler,
    "vllm-v1": VllmV1Scheduler,
    "vllm-v1-async": VllmV1AsyncScheduler,
}


@dataclass
class Scenario:
    """Everything a run needs, but the loop."""

    engine: str
    memory: dict[str, Any]
    keywords: dict[str, Any]
    arrivals: list[tuple[int, Request]]
    aborts: list[tuple[int, bool, str]] = field(default_factory=list)
    """(step, in mid-step, request id)"""

    def scheduler(self, engine_loop: str, **more: Any) -> ContinuousScheduler:
        allocator = PagedAllocator(**self.memory)
        return ENGINES[self.engine](allocator, engine_loop=engine_loop, **self.keywords, **more)


def draw_scenario(seed: int, engine: str) -> Scenario:
    """A scenario under memory pressure; equal seeds give equal scenarios."""
    rng = Random(seed)
    is_v1 = engine.startswith("vllm-v1")
    block_size = rng.choice([1, 2, 3, 4, 8])
    num_blocks = rng.randint(6, 40) if block_size < 4 else rng.randint(4, 16)
    caching = rng.random() < 0.6
    memory: dict[str, Any] = {"num_blocks": num_blocks + is_v1, "block_size": block_size}
    memory["enable_prefix_caching"] = caching
    if is_v1:
        memory |= {"free_list": "lru", "null_block": True}
    else:
        memory["num_host_blocks"] = rng.choice([0, 3, num_blocks, 2 * num_blocks])
        memory["free_list"] = rng.choice(["fifo", "lifo", "lru"])
    max_num_seqs = rng.choice([3, 4, 6, 12])
    chunked = rng.random() < 0.8
    slots = num_blocks * block_size
    keywords: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "enable_chunked_prefill": chunked,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "long_prefill_token_threshold": rng.choice([0, 0, 3, 7]),
        "max_model_len": rng.choice([None, slots, 20]),
    }
    budget = rng.choice([max_num_seqs, max_num_seqs + 5, 30, 200]) if chunked else 2 * slots
    keywords["max_num_batched_tokens"] = budget
    if is_v1:
        keywords |= {"reserve_full_isl": rng.random() < 0.5, "max_loras": rng.choice([0, 0, 1])}
    else:
        keywords["max_num_batched_tokens"] = rng.choice([budget, budget, None, 2 if chunked else None])
        keywords |= {
            "admission": rng.choice(["full_prompt", "first_chunk"]),
            "preemption": rng.choice(["recompute", "swap", "swap", "swap_forked"]),
            "prefill_first": rng.random() < 0.2,
        }
    arrivals = _draw_arrivals(rng, is_v1, slots)
    aborts = [
        (step + rng.randint(0, 12), rng.random() < 0.4, request.request_id)
        for step, request in arrivals
        if rng.random() < 0.15
    ]
    return Scenario(engine, memory, keywords, arrivals, sorted(aborts))


def _draw_arrivals(rng: Random, is_v1: bool, slots: int) -> list[tuple[int, Request]]:
    arrivals = []
    step = 0
    longest = max(2, slots // rng.choice([1, 2, 3]))
    for index in range(rng.randint(2, 12)):
        step += rng.choice([0, 0, 0, 1, 3, 20])
        prompt_len = rng.randint(1, max(1, longest * 2 // 3))
        output_len = rng.choice([1, 2, rng.randint(1, longest), rng.randint(1, longest)])
        shared = rng.randint(0, prompt_len)
        prompt = TokenStream(
            (Segment(rng.randint(1, 2), 0, shared), Segment(100 + index, 0, prompt_len - shared))
            if shared and shared < prompt_len
            else (Segment(1, 0, prompt_len),)
        )
        kind = rng.random()
        n = rng.randint(2, 3) if kind < 0.25 else 1
        beam_width = rng.randint(2, 3) if kind > 0.85 and not is_v1 else 0
        sample_lens = tuple(rng.randint(1, output_len) for _ in range(n)) if n > 1 and rng.random() < 0.5 else ()
        request = Request(
            f"r{index}",
            step,
            prompt,
            output_len,
            output_len + rng.choice([0, 0, 1, 5]),
            sampling=Sampling(n=n, beam_width=beam_width),
            sample_lens=sample_lens,
            priority=rng.randint(0, 2),
            namespace=Namespace(lora=rng.choice([None, None, "a", "b"])),
            seed=rng.randint(0, 99),
        )
        arrivals.append((step, request))
    return arrivals


def ids(seqs: Any) -> list[tuple[str, int]]:
    return [(seq.request.request_id, seq.seq_id) for seq in seqs]


def plan_data(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain data, without what only one of the loops fills."""
    return {
        "step": plan.step,
        "shape": plan.shape,
        "tick": plan.is_decode_tick,
        "prefills": [(chunk.seq.seq_id, *chunk[1:]) for chunk in plan.prefills],
        "admitted": [(admission.seq.seq_id, *admission[1:]) for admission in plan.admitted],
        "resumed": ids(plan.resumed),
        "grown": ids(plan.grown),
        "preempted": [(preemption.seq.seq_id, *preemption[1:]) for preemption in plan.preempted],
        "skipped": ids(plan.skipped),
        "copies": plan.copies,
        "swaps": (plan.swap_out, plan.swap_in),
        "counts": plan[16:22],
    }


def outcome_data(outcome: StepOutcome) -> dict[str, Any]:
    return {
        "emitted": outcome.num_emitted_tokens,
        "started": sorted(ids(outcome.started)),
        "ended": [(seq.seq_id, seq.num_output_tokens, seq.num_computed_tokens) for seq in outcome.ended],
        "pruned": ids(outcome.pruned),
        "forks": [(fork.parent.seq_id, fork.child.seq_id) for fork in outcome.forks],
        "requests": outcome.finished_requests,
        "delivered": ids(outcome.delivered),
    }


class Runner:
    """Runs a scenario step by step and keeps what was decided; checks the laws on the way if asked."""

    def __init__(self, scenario: Scenario, scheduler: ContinuousScheduler, *, looks: bool = True) -> None:
        self.scenario = scenario
        self.scheduler = scheduler
        self.looks = looks
        """Settle every sequence, check the laws and note the block tables after every step."""
        self.log: list[Any] = []
        self.emitted: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.pending: list[StepPlan] = []
        self.texts: dict[int, int] = {}
        """Key of the prefix that ends in a block whose tokens were all computed."""

    def run(self, max_steps: int = 20_000) -> list[Any]:
        # Admission by the first chunk may thrash for thousands of steps before everybody is done (K37).
        arrivals, aborts = list(self.scenario.arrivals), list(self.scenario.aborts)
        for step in range(max_steps):
            while arrivals and arrivals[0][0] <= step:
                self._submit(arrivals.pop(0)[1])
            self._abort([name for at, is_mid, name in aborts if at == step and not is_mid])
            if not (arrivals or self.scheduler.has_work):
                while self.pending:
                    self._complete()
                return self.log
            mid = [name for at, is_mid, name in aborts if at == step and is_mid]
            self._step(step, mid)
        if self.scheduler.upstream_faults:
            return self.log
        raise AssertionError(f"not done: {self.scheduler.describe_block()}")

    def _submit(self, request: Request) -> None:
        rejection = self.scheduler.submit(request)
        if rejection:
            self.ends[request.request_id] = "rejected"
            self.log.append(rejection.reason)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            aborted = self.scheduler.abort(name)
            self.log.append([(seq.seq_id, seq.num_output_tokens, seq.num_computed_tokens) for seq in aborted])
            if aborted:
                assert name not in self.ends
                assert all(seq.status is Status.ABORTED for seq in aborted)
                self.ends[name] = "aborted"

    def _step(self, step: int, mid_aborts: list[str]) -> None:
        is_async = isinstance(self.scheduler, VllmV1AsyncScheduler)
        plan = self.scheduler.schedule(step)
        self.pending.append(plan)
        self.log.append(plan_data(plan))
        self._look()
        if self.looks and self.scheduler.enable_prefix_caching and not self.scheduler.upstream_faults:
            self._check_hits(plan)
        self._abort(mid_aborts)
        if len(self.pending) > is_async:
            self._complete()

    def _complete(self) -> None:
        outcome = self.scheduler.complete(self.pending.pop(0))
        self.log.append(outcome_data(outcome))
        for request_id in outcome.finished_requests:
            assert request_id not in self.ends
            self.ends[request_id] = "finished"
        self._look()

    def _look(self) -> None:
        allocator = self.scheduler.allocator
        self.log.append((allocator.num_free_blocks, allocator.usage().num_evicted))
        if not self.looks:
            return
        allocator.audit()
        live = self.scheduler.live_sequences()
        self.log.append((list(allocator.free_block_ids()), allocator.num_hashed_blocks))
        self.log.append([self._state(seq) for seq in live])
        running = self.scheduler.running_sequences()
        slots = sum(allocator.num_slots(seq.seq_id) for seq in running)
        assert self.scheduler.num_table_entries * allocator.block_size == slots

    def _check_hits(self, plan: StepPlan) -> None:
        """Law 10 in short: every block of a hit holds the text asked for, or gets it in this very step."""
        hits = {admission.seq.seq_id: admission.num_hit_tokens for admission in plan.admitted}
        allocator = self.scheduler.allocator
        size = allocator.block_size
        for seq in self.scheduler.running_sequences():
            if seq.keys is None:
                continue
            table = allocator.block_table(seq.seq_id)
            for index in range(hits.get(seq.seq_id, 0) // size):
                assert self.texts.get(table[index]) == seq.keys.chain(index), "phantom hit"
            for index in range(min(seq.num_computed_tokens, seq.final_len) // size):
                self.texts[table[index]] = seq.keys.chain(index)

    def _state(self, seq: Any) -> tuple[Any, ...]:
        allocator = self.scheduler.allocator
        table = tuple(allocator.block_table(seq.seq_id)) if allocator.has_table(seq.seq_id) else ()
        if seq.status is Status.RUNNING:
            # Law 13, up to what copies share: ceil(T / B) blocks for T stored tokens.
            assert len(table) == -(-seq.num_computed_tokens // allocator.block_size)
            assert allocator.num_tokens(seq.seq_id) == seq.num_computed_tokens
        return (seq.seq_id, seq.status, seq.num_computed_tokens, seq.num_output_tokens, seq.rank, table)
