"""Iteration-level batching over contiguous regions: the Orca variants of the PagedAttention paper (SOSP 2023)."""

from __future__ import annotations

from typing import Any, cast

from kvsim.memory.contiguous import ContiguousAllocator, num_moved_slots
from kvsim.memory.interface import PrefixMatch, RegionMove
from kvsim.request import Group, Request, Sequence
from kvsim.scheduling.builder import PlanBuilder
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.plan import StepPlan, TableUpdate
from kvsim.scheduling.reservations import Reservation
from kvsim.types import AllocStatus, ScenarioError


class OrcaScheduler(PagedScheduler):
    """The generic engine where every sequence owns a region, taken whole at admission; nobody is ever preempted.

    Regions cannot be shared, so a request of n samples is n sequences that are admitted, and compute the prompt, each
    for itself (a prompt repeated n times). With `compaction` the regions are slid together, at most once per step,
    when the head of the queue is refused for a hole though the free total would do; the step pays for it.
    """

    splits_samples = True

    def __init__(self, allocator: ContiguousAllocator, *, reservation: Reservation, **kwargs: Any) -> None:
        super().__init__(allocator, reservation=reservation, **kwargs)
        self.regions = allocator
        self.region_reservation = reservation
        self._moves: tuple[RegionMove, ...] = ()

    def _make_groups(self, request: Request) -> list[Group]:
        if request.sampling.beam_width > 0:
            raise ScenarioError(
                f"request {request.request_id!r}: beam search shares blocks, and regions cannot; "
                f"use the engine 'paged' or 'vllm-v0'"
            )
        return [Group(request, [self._make_sequence(request, sample)]) for sample in range(request.sampling.n)]

    def _why_no_memory(self, group: Group, stored: int) -> str | None:
        request = group.request
        reserved = max(self.region_reservation(request, sample) for sample in range(request.sampling.n))
        if self.regions.can_allocate(request.prompt_len, reserve_tokens=reserved) is not AllocStatus.NEVER:
            return None
        return f"needs {request.prompt_len + reserved} slots at once, the pool has {self._describe_whole()}"

    def _describe_whole(self) -> str:
        whole, largest = self.regions.num_blocks, self.regions.max_region
        return f"{whole}" if largest == whole else f"{whole}, at most {largest} in one piece"

    def _describe_need(self, group: Group) -> str:
        known = group.num_known_tokens
        return f"a region of {known + self._num_reserved(group.seqs[0], known)} slots"

    def _describe_pool(self) -> str:
        regions = self.regions
        return f"{regions.num_free_blocks} free of {regions.num_blocks}, {regions.largest_hole} in one piece"

    def _num_reserved(self, seq: Sequence, num_tokens: int) -> int:
        return max(0, seq.prompt_len + self.region_reservation(seq.request, seq.sample) - num_tokens)

    def _has_room(self, group: Group, num_tokens: int, prefix: PrefixMatch, step: PlanBuilder) -> bool:
        if super()._has_room(group, num_tokens, prefix, step):
            return True
        if step.head_wait != "blocks" or not self._make_room(step):
            return False
        step.waits_for_memory, step.head_slots, step.head_wait = False, 0, ""
        return super()._has_room(group, num_tokens, prefix, step)

    def _make_room(self, step: PlanBuilder) -> bool:
        """Compact for the head of the queue, once per step; what this step will store has nothing to copy yet."""
        kept = self.watermark_blocks if self.running else 0
        if self.regions.compaction is None or self._moves or self.regions.num_free_blocks - kept < step.head_slots:
            return False
        stored = {seq.seq_id: seq.num_computed_tokens for seq in self.running_sequences()}
        moves = self.regions.make_room(step.head_slots)
        clipped = (move._replace(num_tokens=stored[cast(int, move.seq_id)]) for move in moves)
        self._moves = tuple(move for move in clipped if move.num_tokens)
        return bool(moves)

    def _end_step(self, step: PlanBuilder) -> StepPlan:
        moves, self._moves = self._moves, ()
        if not moves:
            return super()._end_step(step)
        if self.detail:
            self._note_addresses(moves, step)
        plan = super()._end_step(step)
        return plan._replace(moves=moves, shape=plan.shape._replace(num_moved_slots=num_moved_slots(moves)))

    def _note_addresses(self, moves: tuple[RegionMove, ...], step: PlanBuilder) -> None:
        moved = {move.seq_id for move in moves}
        for group in self.running.values():
            for seq in group.seqs:
                if seq.seq_id in moved:
                    step.updates.append(TableUpdate(seq, 0, tuple(self.regions.block_table(seq.seq_id))))
