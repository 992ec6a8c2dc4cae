"""Today's vLLM with its synchronous scheduler, decision for decision.

It differs from the generic engine in when blocks become findable (as soon as they are planned, so that a request
admitted in the same call can hit them), in treating the samples of a request as requests of their own, in the LoRA
limit, and in having no swap and no beam search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from typing import Any

from kvsim.memory.interface import KVAllocator
from kvsim.request import Group, Request, Sequence
from kvsim.scheduling import policies
from kvsim.scheduling.builder import PlanBuilder
from kvsim.scheduling.calendar import by_rank, merged
from kvsim.scheduling.continuous import ContinuousScheduler
from kvsim.types import ScenarioError


class VllmV1Scheduler(ContinuousScheduler):
    """Engine `vllm-v1`. `max_loras` = 0 is no limit; `reserve_full_isl` admits whole prompts only.

    Its watermark is a share of all blocks, the null block included. With `upstream_faults` off, blocks that a
    victim had registered for tokens it then does not compute are forgotten, and of victims that tie in priority and
    arrival the last one to join is taken (the real engine's choice of the first can go round in a circle).
    """

    splits_samples = True

    def __init__(
        self,
        allocator: KVAllocator,
        *,
        max_loras: int = 0,
        reserve_full_isl: bool = True,
        watermark: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if kwargs.setdefault("preemption", "recompute") != "recompute":
            raise ScenarioError(f"preemption: {kwargs['preemption']!r} is unknown to this engine; it is 'recompute'")
        kwargs["admission"] = "full_prompt" if reserve_full_isl else "first_chunk"
        if kwargs.get("upstream_faults") and kwargs.get("scheduling_policy") == "priority":
            kwargs["victim"] = kwargs.get("victim") or policies.least_urgent_oldest
        super().__init__(allocator, **kwargs)
        self.max_loras = max_loras
        num_blocks = allocator.num_blocks + int(getattr(allocator, "num_reserved_blocks", 0))
        self.watermark_blocks = int(watermark * num_blocks)

    def _make_groups(self, request: Request) -> list[Group]:
        if request.sampling.beam_width > 0:
            raise ScenarioError(
                f"request {request.request_id!r}: this engine has no beam search; use the engine 'paged' or 'vllm-v0'"
            )
        return [Group(request, [self._make_sequence(request, sample)]) for sample in range(request.sampling.n)]

    def is_set_aside(self, group: Group) -> bool:
        lora = group.request.namespace.lora
        if not self.max_loras or lora is None:
            return False
        in_use = {running.request.namespace.lora for running in self.running.values()} - {None}
        return len(in_use) >= self.max_loras and lora not in in_use

    def _due_members(self) -> Seq[Sequence]:
        crossing = self.calendar.crossing()
        return merged(crossing, self.calendar.filling()) if self.enable_prefix_caching else crossing

    def _continue_members(self, step: PlanBuilder) -> Seq[Sequence]:
        """Blocks first, then registrations: the order shows only where blocks run out, and there the loop goes on."""
        left = super()._continue_members(step)
        if not self.enable_prefix_caching:
            return left
        filling = self.calendar.filling()
        had_turn = bisect_left(filling, left[0].rank, key=by_rank) if left else len(filling)
        self._fill_members(filling[:had_turn])
        return merged(left, filling[had_turn:])

    def _note_quiet(self, tick: int) -> None:
        if self.enable_prefix_caching:
            self._fill_members(self.calendar.filling())

    def _continue_member(self, seq: Sequence, step: PlanBuilder) -> None:
        """A decoding sequence of the calendar needs a block, or fills one."""
        num_tokens, size = seq.join_offset + step.tick + 1, self.allocator.block_size
        if (num_tokens - 1) % size == 0:
            super()._continue_member(seq, step)
        if self.enable_prefix_caching and num_tokens % size == 0 and seq.join_tick >= 0:
            self._register_member(seq, num_tokens)

    def _reset(self, seq: Sequence) -> None:
        """A victim that had its turn computes nothing in this step, so nobody may hit the blocks it registered.

        An allocator that has no `unregister` keeps them.
        """
        unregister = getattr(self.allocator, "unregister", None)
        if self.enable_prefix_caching and not self.upstream_faults and unregister is not None:
            unregister(seq.seq_id, seq.num_computed_tokens)
        super()._reset(seq)

    def _note_planned(self, seq: Sequence, end: int) -> None:
        if self.enable_prefix_caching:
            self.allocator.register(seq.seq_id, min(end, seq.num_tokens))
