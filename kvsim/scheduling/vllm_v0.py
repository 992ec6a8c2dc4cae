"""The engine of the PagedAttention paper as vLLM 0.2.7 shipped it: prompt steps apart from decode steps.

Samples and beams of one request form a group that is admitted, preempted and swapped as a whole. Waiting groups
are never overtaken. When a decode step runs short of blocks, the group that arrived last gives way: alone, it is
computed again later; with siblings, it is swapped to the host.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from kvsim.memory import PagedAllocator
from kvsim.request import Request, Sequence, Status
from kvsim.scheduling.plan import Admission, Fork, Preemption, PrefillChunk, Rejection, StepOutcome, StepPlan, TableUpdate
from kvsim.scheduling.vllm_v0_calendar import Calendar, by_rank
from kvsim.scheduling.vllm_v0_group import BeamPolicy, SequenceGroup, keep_all_beams
from kvsim.scheduling.vllm_v0_step import OutcomeDraft, StepDraft
from kvsim.types import AllocatorError, AllocStatus, Ns, ScenarioError

PreemptionMode = Literal["auto", "recompute", "swap"]


class OutOfHostBlocks(AllocatorError):
    """A group had to be swapped out and the host has no room (`upstream_faults`): the engine dies.

    `preempted` are the preemptions of this step so far, the failing one included.
    """

    def __init__(self, preempted: tuple[Preemption, ...]) -> None:
        request_id = preempted[-1].seq.request.request_id
        super().__init__(f"no host blocks left to swap out request {request_id!r}; give the engine more swap space")
        self.preempted = preempted


class PromptBatch(NamedTuple):
    """Prompts of one step, padded to the longest of them."""

    num_prompts: int = 0
    longest: int = 0
    num_tokens: int = 0

    def add(self, prompt_len: int) -> PromptBatch:
        return PromptBatch(self.num_prompts + 1, max(self.longest, prompt_len), self.num_tokens + prompt_len)

    @property
    def num_padded_tokens(self) -> int:
        return self.num_prompts * self.longest

    @property
    def num_paddings(self) -> int:
        return self.num_padded_tokens - self.num_tokens


class VllmV0Scheduler:
    """A `Scheduler` over a paged allocator whose free list is a stack (`free_list="lifo"`).

    `max_paddings` bounds the padding of a prompt batch. `preemption` "auto" swaps groups that may run several
    sequences and recomputes the rest. `beam_policy` decides the moves of beam searches. With `detail` plans list
    their decodes and table updates. `upstream_faults` keeps the original's faults (surplus references on
    readmission, groups that can never be swapped in, death for want of swap space, prompts dropped in mid-generation)
    and turns the guards off; without it they are mended: a group alone on the device may use all of it, and a
    group that cannot be swapped is computed again. Raises ScenarioError for limits that contradict each other.
    """

    def __init__(
        self,
        allocator: PagedAllocator,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2560,
        max_model_len: int = 2048,
        max_paddings: int = 256,
        watermark: float = 0.01,
        preemption: PreemptionMode = "auto",
        engine_loop: Literal["calendar", "plain"] = "calendar",
        beam_policy: BeamPolicy = keep_all_beams,
        detail: bool = False,
        upstream_faults: bool = False,
    ) -> None:
        if max_num_batched_tokens < max_model_len and not upstream_faults:
            raise ScenarioError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_model_len ({max_model_len}): this "
                "engine runs prompts whole, so raise the one or lower the other"
            )
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_paddings = max_paddings
        self.watermark_blocks = int(watermark * allocator.num_blocks)
        self.preemption = preemption
        self.beam_policy = beam_policy
        self.detail = detail
        self.upstream_faults = upstream_faults
        self.waiting: deque[SequenceGroup] = deque()
        self.running: dict[SequenceGroup, None] = {}
        """In running order: by arrival once a decode step has sorted it."""
        self.swapped: list[SequenceGroup] = []
        self.calendar = Calendar(allocator.block_size) if engine_loop == "calendar" else None
        self.num_fast_steps = 0
        self._groups: dict[str, SequenceGroup] = {}
        self._scheduled: list[SequenceGroup] = []
        """Groups of the planned step that may emit something other than one more plain token."""
        self._running_width = 0
        self._is_sorted = True
        self._last_order = 0
        self._num_joined = 0
        self._widest = 1
        """No group was ever wider than this."""
        self._num_seqs = 0
        self._num_steps = 0
        self._unsettled: dict[SequenceGroup, None] = {}
        """Running groups that the calendar cannot foresee: beams, and those before their first decode step."""

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    def submit(self, request: Request) -> Rejection | None:
        parent = self._new_sequence(request, 0)
        if not self.upstream_faults and (reason := self._why_never(request)):
            parent.status = Status.REJECTED
            return Rejection(parent, reason)
        group = parent.state = SequenceGroup(request, parent)
        self._groups[request.request_id] = group
        self.waiting.append(group)
        return None

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        group = self._groups.pop(request_id, None)
        if group is None:
            return ()
        sequences = tuple(group.live)
        if group in self.running:
            self._leave(group)
        elif sequences[0].status is Status.WAITING:
            self.waiting.remove(group)
        else:
            self.swapped.remove(group)
        for seq in sequences:
            if seq.status is not Status.WAITING:
                self.allocator.free(seq.seq_id)
            seq.status = Status.ABORTED
        group.live.clear()
        return sequences

    def live_sequences(self) -> tuple[Sequence, ...]:
        sequences = tuple(seq for group in self._groups.values() for seq in group.live)
        if self.calendar:
            for seq in sequences:
                if seq.join_tick >= 0:
                    self.calendar.settle(seq)
        return sequences

    def describe_block(self) -> str:
        group = self.swapped[0] if self.swapped else self.waiting[0] if self.waiting else None
        if group is None:
            return "nothing is waiting"
        needed = self._blocks_to_return(group) if self.swapped else self._blocks_to_admit(group)
        where = "swapped out" if self.swapped else "waiting"
        return (
            f"request {group.request_id!r} ({where}) needs {needed} blocks above a watermark of "
            f"{self.watermark_blocks}; {self.allocator.num_free_blocks} of {self.allocator.num_blocks} are free"
        )

    def schedule(self, now: Ns) -> StepPlan:
        draft = StepDraft()
        self._scheduled = []
        if not self.swapped:
            self._admit_waiting(draft)
        if not draft.is_prompt_step:
            self._continue_running(draft)
            self._resume_swapped(draft)
        return self._finish_plan(draft)

    def complete(self, plan: StepPlan) -> StepOutcome:
        draft = OutcomeDraft()
        if plan.is_decode_tick:
            self._complete_decode(draft)
        else:
            for group in self._scheduled:
                if group in self.running:
                    draft.started += group.live
                    self._emit(group, draft)
                    self._enter_calendar(group)
        return draft.outcome()

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Admit from the head of the line until the first refusal; nobody is overtaken."""
        batch = PromptBatch()
        while self.waiting:
            group = self.waiting[0]
            num_tokens = group.num_tokens
            if num_tokens > self._prompt_limit:
                self._reject(group, draft, f"its {num_tokens} tokens exceed the prompt limit of {self._prompt_limit}")
                continue
            status = self._can_admit(group)
            if status is AllocStatus.NEVER:
                self._reject(group, draft, self._too_big(self._blocks_to_admit(group)))
                continue
            if status is AllocStatus.LATER:
                draft.refuse("blocks", num_slots=self._blocks_to_admit(group) * self.allocator.block_size)
                break
            if reason := self._over_limits(group, batch.add(num_tokens)):
                draft.refuse(reason)
                break
            batch = batch.add(num_tokens)
            self._admit(group, draft)
        draft.padded_batch = (len(draft.prefills), batch.longest)

    def _over_limits(self, group: SequenceGroup, batch: PromptBatch) -> str:
        """The first limit that the batch, with this group as its last, would break; empty if none."""
        if batch.num_padded_tokens > self.max_num_batched_tokens:
            return "token budget"
        if self._running_width + group.width > self.max_num_seqs:
            return "sequence limit"
        if batch.num_paddings > self.max_paddings:
            return "padding limit"
        return ""

    def _admit(self, group: SequenceGroup, draft: StepDraft) -> None:
        self.waiting.popleft()
        starts = self._allocate(group)
        for seq, start in zip(group.live, starts, strict=True):
            seq.status = Status.RUNNING
            seq.num_computed_tokens = seq.num_tokens
            draft.admitted.append(Admission(seq, start, seq.num_preemptions > 0))
            draft.prefills.append(PrefillChunk(seq, start, seq.num_tokens - start, True))
            self._note_table(draft, seq, 0)
        self._join(group)
        self._scheduled.append(group)

    def _reject(self, group: SequenceGroup, draft: StepDraft, reason: str) -> None:
        self.waiting.popleft()
        del self._groups[group.request_id]
        group.set_status(Status.REJECTED)
        draft.rejected.append(Rejection(group.live[0], reason))

    def _continue_running(self, draft: StepDraft) -> None:
        """Give every running sequence the slot of its next token, the oldest first, at the cost of the youngest."""
        self._sort_running()
        if self.calendar and self._nobody_can_be_refused(self.calendar):
            self.num_fast_steps += 1
            self._append_due(self.calendar, draft)
        else:
            self._append_in_turn(draft)

    def _append_in_turn(self, draft: StepDraft) -> None:
        turn = deque(self.running)
        while turn:
            group = turn.popleft()
            while not self._can_append(group):
                victim = turn.pop() if turn else group
                self._preempt(victim, draft)
                if victim is group:
                    return
            for seq in group.live:
                if self._needs_append(group, seq):
                    self._append(seq, draft)

    def _nobody_can_be_refused(self, calendar: Calendar) -> bool:
        """Whatever this step takes, the widest group would still find a block for each of its sequences."""
        demand = len(calendar.crossing()) + sum(len(group.live) for group in self._unsettled)
        spare = self.allocator.num_free_blocks - demand
        return spare >= self._widest or spare >= max((len(group.live) for group in self.running), default=0)

    def _append_due(self, calendar: Calendar, draft: StepDraft) -> None:
        due = [*calendar.crossing(), *(seq for group in self._unsettled for seq in group.live)]
        due.sort(key=by_rank)
        for seq in due:
            self._append(seq, draft)

    def _append(self, seq: Sequence, draft: StepDraft) -> None:
        allocator, seq_id = self.allocator, seq.seq_id
        num_slots = allocator.num_slots(seq_id)
        # Between block boundaries the calendar tells the allocator nothing; this catches up.
        num_tokens = self._num_stored(seq) + 1 - allocator.num_tokens(seq_id)
        copies = allocator.append_slots(seq_id, num_tokens)
        if copies or allocator.num_slots(seq_id) != num_slots:
            draft.copies += copies
            draft.grown.append(seq)
            self._note_table(draft, seq, len(allocator.block_table(seq_id)) - 1)

    def _resume_swapped(self, draft: StepDraft) -> None:
        """Bring swapped groups back, the oldest first, unless this step had to preempt."""
        self.swapped.sort(key=_arrival)
        if draft.preempted:
            return
        while self.swapped:
            group = self.swapped[0]
            if not self._can_swap_in(group):
                draft.refuse("blocks", num_slots=self._blocks_to_return(group) * self.allocator.block_size)
                return
            if self._running_width + group.width > self.max_num_seqs:
                draft.refuse("sequence limit")
                return
            self._swap_in(group, draft)

    def _swap_in(self, group: SequenceGroup, draft: StepDraft) -> None:
        moves = self.allocator.swap_in([seq.seq_id for seq in group.live])
        if moves is None:
            raise AllocatorError(f"request {group.request_id!r} does not fit, although the allocator said so")
        draft.swap_in += moves
        self.swapped.pop(0)
        group.set_status(Status.RUNNING)
        self._join(group)
        self._enter_calendar(group)
        for seq in group.live:
            draft.resumed.append(seq)
            draft.copies += self.allocator.append_slots(seq.seq_id)
            self._note_table(draft, seq, 0)

    def _preempt(self, group: SequenceGroup, draft: StepDraft) -> None:
        """Take a group off the device: to the host, or to the head of the line to be computed again."""
        is_swap = self._prefers_swap(group)
        self._leave(group)
        victims = [(seq, seq.num_computed_tokens) for seq in group.live]
        if is_swap and not self._swap_out(group, draft):
            if self.upstream_faults:
                failing = [Preemption(seq, True, num_stored) for seq, num_stored in victims]
                raise OutOfHostBlocks((*draft.preempted, *failing))
            is_swap = False
        if not is_swap:
            self._drop(group)
        draft.preempted += [Preemption(seq, is_swap, num_stored) for seq, num_stored in victims]
        draft.head_wait = "blocks"
        draft.waits_for_memory = True
        for seq in group.live:
            seq.num_preemptions += 1

    def _prefers_swap(self, group: SequenceGroup) -> bool:
        return self.preemption == "swap" or (self.preemption == "auto" and group.width > 1)

    def _swap_out(self, group: SequenceGroup, draft: StepDraft) -> bool:
        for seq in group.live:
            if missing := seq.num_computed_tokens - self.allocator.num_tokens(seq.seq_id):
                self.allocator.append_slots(seq.seq_id, missing)
        moves = self.allocator.swap_out([seq.seq_id for seq in group.live])
        if moves is None:
            return False
        draft.swap_out += moves
        group.set_status(Status.SWAPPED)
        self.swapped.append(group)
        return True

    def _drop(self, group: SequenceGroup) -> None:
        for seq in group.live:
            self.allocator.free(seq.seq_id)
            seq.num_computed_tokens = 0
        group.set_status(Status.WAITING)
        self.waiting.appendleft(group)

    def _finish_plan(self, draft: StepDraft) -> StepPlan:
        decodes: tuple[Sequence, ...] | None = ()
        num_decodes = context_tokens = 0
        if not draft.is_prompt_step:
            decodes, num_decodes, context_tokens = self._store_decodes()
        shape = draft.shape(num_decodes, context_tokens, self.allocator.num_logical_blocks)
        plan = draft.plan(
            self._num_steps, shape, decodes, len(self.running), len(self.waiting), len(self.swapped)
        )
        self._num_steps += 1
        return plan

    def _store_decodes(self) -> tuple[tuple[Sequence, ...] | None, int, int]:
        """Count one more stored token for every running sequence; returns the decodes, their number and contexts."""
        decodes = None
        if self.calendar is None or self.detail:
            decodes = tuple(seq for group in self.running for seq in group.live)
        if self.calendar:
            if self.calendar.num_members:
                self.calendar.advance()
            return decodes, self.calendar.num_members, self.calendar.sum_stored
        assert decodes is not None
        for seq in decodes:
            seq.num_computed_tokens += 1
        return decodes, len(decodes), sum(seq.num_computed_tokens for seq in decodes)

    def _complete_decode(self, draft: OutcomeDraft) -> None:
        if self.calendar is None:
            for group in tuple(self.running):
                draft.num_emitted_tokens += len(group.live)
                self._emit(group, draft)
            return
        draft.num_emitted_tokens += self.calendar.num_members
        due = {_group_of(seq): None for seq in self.calendar.emit()} | self._unsettled
        for group in self._in_running_order(due):
            self._emit(group, draft)
            self._settle_group(self.calendar, group)

    def _emit(self, group: SequenceGroup, draft: OutcomeDraft) -> None:
        """Every live sequence of the group gets its token; samples fork, beams move, who is done leaves."""
        width = group.width
        for seq in group.live:
            if seq.join_tick < 0:
                seq.num_output_tokens += 1
            elif self.calendar:
                self.calendar.settle(seq)
        if group.is_beam:
            self._move_beams(group, draft)
        elif group.num_sequences < group.width_limit:
            self._fork_samples(group, draft)
        for seq in [seq for seq in group.live if seq.num_output_tokens >= seq.output_len]:
            draft.ended.append(seq)
            self._end(group, seq)
        if group.is_finished:
            self._running_width -= width
            self._forget(group)
            draft.finished_requests.append(group.request_id)
        else:
            self._running_width -= width - group.width

    def _fork_samples(self, group: SequenceGroup, draft: OutcomeDraft) -> None:
        """The first token: samples 1 .. n-1 become children of sample 0; one that ends at once needs no table."""
        parent = group.live[0]
        for sample in range(1, group.width_limit):
            child = self._new_child(group, parent)
            if child.num_output_tokens < child.output_len:
                self._fork(group, parent, child, draft)
            else:
                child.status = Status.FINISHED
                draft.ended.append(child)
        draft.num_emitted_tokens += group.width_limit - 1

    def _move_beams(self, group: SequenceGroup, draft: OutcomeDraft) -> None:
        beams = {seq.sample: seq for seq in group.live}
        for action in self.beam_policy(group, group.live[0].num_output_tokens - 1):
            beam = beams[action.beam]
            if action.kind == "fork":
                child = self._new_child(group, beam)
                beams[child.sample] = child
                self._fork(group, beam, child, draft)
                if beam.join_tick >= 0 and self.calendar:
                    self.calendar.join(child, ends=False)
                continue
            (draft.ended if beam.num_output_tokens >= beam.output_len else draft.pruned).append(beam)
            self._end(group, beam)

    def _fork(self, group: SequenceGroup, parent: Sequence, child: Sequence, draft: OutcomeDraft) -> None:
        self.allocator.fork(parent.seq_id, child.seq_id)
        child.status = Status.RUNNING
        child.rank = _rank(group, child)
        group.live.append(child)
        draft.forks.append(Fork(parent, child))

    def _end(self, group: SequenceGroup, seq: Sequence) -> None:
        if self.calendar and seq.join_tick >= 0:
            self.calendar.leave(seq)
        group.live.remove(seq)
        seq.status = Status.FINISHED
        self.allocator.free(seq.seq_id)

    def _forget(self, group: SequenceGroup) -> None:
        del self.running[group]
        del self._groups[group.request_id]
        self._unsettled.pop(group, None)

    def _join(self, group: SequenceGroup) -> None:
        """Put a group at the end of running; a decode step will sort it in by arrival."""
        self._num_joined += 1
        group.order = (_arrival(group) << 48) + self._num_joined
        self._is_sorted = self._is_sorted and (not self.running or group.order > self._last_order)
        self._last_order = group.order
        self.running[group] = None
        self._running_width += group.width
        self._widest = max(self._widest, group.width)
        for seq in group.live:
            seq.rank = _rank(group, seq)

    def _leave(self, group: SequenceGroup) -> None:
        del self.running[group]
        self._running_width -= group.width
        self._unsettled.pop(group, None)
        group.is_settled = False
        if self.calendar:
            for seq in group.live:
                if seq.join_tick >= 0:
                    self.calendar.leave(seq)

    def _enter_calendar(self, group: SequenceGroup) -> None:
        if self.calendar and group.live:
            self._unsettled[group] = None
            for seq in group.live:
                self.calendar.join(seq, ends=not group.is_beam)

    def _settle_group(self, calendar: Calendar, group: SequenceGroup) -> None:
        """After its first decode step every tail is private, so block boundaries are all that is left to watch."""
        if group.is_beam or group.is_settled or group.is_finished:
            return
        del self._unsettled[group]
        group.is_settled = True
        for seq in group.live:
            calendar.watch_boundaries(seq)

    def _sort_running(self) -> None:
        if not self._is_sorted:
            ordered = sorted(self.running, key=_order)
            self.running = dict.fromkeys(ordered)
            self._last_order = ordered[-1].order if ordered else 0
            self._is_sorted = True

    def _in_running_order(self, groups: dict[SequenceGroup, None]) -> list[SequenceGroup]:
        if self._is_sorted:
            return sorted(groups, key=_order)
        return [group for group in self.running if group in groups]

    def _needs_append(self, group: SequenceGroup, seq: Sequence) -> bool:
        return self.calendar is None or not group.is_settled or self.calendar.is_crossing(seq)

    def _num_stored(self, seq: Sequence) -> int:
        if self.calendar and seq.join_tick >= 0:
            return seq.join_computed + self.calendar.tick - seq.join_tick
        return seq.num_computed_tokens

    @property
    def _prompt_limit(self) -> int:
        return min(self.max_model_len, self.max_num_batched_tokens)

    def _new_sequence(self, request: Request, sample: int) -> Sequence:
        seq = Sequence(self._num_seqs, request, sample)
        self._num_seqs += 1
        # The model's length ends a sequence one token late: the test comes after the token.
        seq.output_len = max(1, min(seq.output_len, self.max_model_len + 1 - seq.prompt_len))
        seq.final_len = seq.prompt_len + seq.output_len - 1
        return seq

    def _new_child(self, group: SequenceGroup, parent: Sequence) -> Sequence:
        child = self._new_sequence(group.request, group.num_sequences)
        group.num_sequences += 1
        child.state = group
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_output_tokens = parent.num_output_tokens
        return child

    def _can_admit(self, group: SequenceGroup) -> AllocStatus:
        watermark = self._watermark()
        if len(group.live) == 1:
            return self.allocator.can_allocate(group.num_tokens, watermark_blocks=watermark)
        spare = self.allocator.num_free_blocks - self._blocks_to_admit(group)
        return AllocStatus.OK if spare >= watermark else AllocStatus.LATER

    def _can_append(self, group: SequenceGroup) -> bool:
        """One free block for each sequence, whether it needs one or not."""
        allocator = self.allocator
        if allocator.can_append(len(group.live)):
            return True
        if self.upstream_faults or len(self.running) > 1:
            return False
        # Alone on the device, so nobody is left to give way: ask for what it really needs.
        return self._blocks_to_append(group) <= allocator.num_free_blocks

    def _can_swap_in(self, group: SequenceGroup) -> bool:
        seq_ids = [seq.seq_id for seq in group.live]
        if not self.running and not self.upstream_faults:
            return self.allocator.can_swap_in(seq_ids)
        return self.allocator.can_swap_in(
            seq_ids, extra_blocks=len(seq_ids), watermark_blocks=self.watermark_blocks
        )

    def _watermark(self) -> int:
        """Blocks that an admission leaves free; none if the device is empty, or it could wait for ever."""
        return self.watermark_blocks if self.running or self.upstream_faults else 0

    def _blocks_to_append(self, group: SequenceGroup) -> int:
        """Blocks that the next token of every sequence takes; of k sharers of a tail, k - 1 copy it."""
        allocator = self.allocator
        needed = [allocator.num_blocks_to_append(seq.seq_id) for seq in group.live]
        if self._num_stored(group.live[0]) % allocator.block_size == 0:
            return sum(needed)
        tails = {allocator.block_table(seq.seq_id)[-1] for seq in group.live}
        return len(group.live) - len(tails)

    def _blocks_to_return(self, group: SequenceGroup) -> int:
        return self.allocator.num_swapped_blocks([seq.seq_id for seq in group.live]) + len(group.live)

    def _blocks_to_admit(self, group: SequenceGroup) -> int:
        return self._blocks_for(group.request, group.num_tokens, len(group.live))

    def _blocks_for(self, request: Request, num_tokens: int, num_sequences: int) -> int:
        """Blocks of `num_sequences` sequences of `num_tokens` that share the full blocks of their prompt alone."""
        blocks = -(-num_tokens // self.allocator.block_size)
        if self.allocator.window_blocks:
            return num_sequences * min(blocks, self.allocator.window_blocks)
        shared = self._shared_len(request) // self.allocator.block_size if num_sequences > 1 else 0
        return shared + num_sequences * (blocks - shared)

    def _shared_len(self, request: Request) -> int:
        """Tokens of the prompt's full blocks; with a sliding window nothing stays shared."""
        if self.allocator.window_blocks:
            return 0
        return request.prompt_len - request.prompt_len % self.allocator.block_size

    def _allocate(self, group: SequenceGroup) -> list[int]:
        """Give every live sequence its table; returns where each one's own tokens start."""
        parent, *others = group.live
        num_tokens = group.num_tokens
        if not others:
            # The original counts ended samples in, and so never gets those blocks back.
            surplus = self.upstream_faults and group.num_sequences > 1
            num_refs = group.num_sequences if surplus else None
            self.allocator.allocate(parent.seq_id, num_tokens, num_refs=num_refs)
            return [0]
        shared = self._shared_len(group.request)
        if not shared:
            for seq in group.live:
                self.allocator.allocate(seq.seq_id, num_tokens)
            return [0] * len(group.live)
        self.allocator.allocate(parent.seq_id, shared, sharers=[seq.seq_id for seq in others])
        for seq in group.live:
            self.allocator.append_slots(seq.seq_id, num_tokens - shared)
        return [0] + [shared] * len(others)

    def _note_table(self, draft: StepDraft, seq: Sequence, start: int) -> None:
        table = self.allocator.block_table(seq.seq_id)
        draft.touch_table(len(table) - start)
        if self.detail:
            draft.table_updates.append(TableUpdate(seq, start, tuple(table[start:])))

    def _why_never(self, request: Request) -> str:
        """Why the request can never be served, with both numbers; empty if it can."""
        num_sequences = request.sampling.num_sequences
        if request.prompt_len > self._prompt_limit:
            return f"its prompt has {request.prompt_len} tokens, the limit is {self._prompt_limit}"
        if num_sequences > self.max_num_seqs:
            return f"it runs {num_sequences} sequences, max_num_seqs is {self.max_num_seqs}"
        num_tokens = min(request.max_stored_tokens, self.max_model_len)
        needed = self._blocks_for(request, num_tokens, num_sequences)
        return self._too_big(needed) if needed > self.allocator.num_blocks else ""

    def _too_big(self, needed: int) -> str:
        size = self.allocator.block_size
        pool = self.allocator.num_blocks
        return f"it needs {needed} blocks ({needed * size} slots), the pool has {pool} ({pool * size} slots)"


def _arrival(group: SequenceGroup) -> Ns:
    return group.request.arrival_ns


def _order(group: SequenceGroup) -> int:
    return group.order


def _rank(group: SequenceGroup, seq: Sequence) -> int:
    return (group.order << 32) + seq.sample


def _group_of(seq: Sequence) -> SequenceGroup:
    assert isinstance(seq.state, SequenceGroup)
    return seq.state
