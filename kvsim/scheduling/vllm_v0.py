"""The engine of the PagedAttention paper as vLLM 0.2.7 shipped it: prompt steps apart from decode steps.

Samples and beams of one request form a group that is admitted, preempted and swapped as a whole. Waiting groups
are never overtaken. When a decode step runs short of blocks, the group that arrived last gives way: alone, it is
computed again later; with siblings, it is swapped to the host.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvsim.memory import PagedAllocator
from kvsim.memory.interface import KVAllocator
from kvsim.request import Group, Request, Sequence, Status
from kvsim.scheduling import policies
from kvsim.scheduling.builder import OutcomeBuilder
from kvsim.scheduling.calendar import RANKS_PER_GROUP, Calendar, by_rank, merged
from kvsim.scheduling.engine_state import check_choice, set_status
from kvsim.scheduling.plan import (
    Admission,
    Fork,
    Preemption,
    PrefillChunk,
    Rejection,
    StepOutcome,
    StepPlan,
    TableUpdate,
)
from kvsim.scheduling.queues import make_queue
from kvsim.scheduling.vllm_v0_beam import BeamMoves, moves_of
from kvsim.scheduling.vllm_v0_memory import GroupMemory
from kvsim.scheduling.vllm_v0_step import StepDraft
from kvsim.types import AllocatorError, AllocStatus, KvsimError, Ns, ScenarioError

_JOINS_PER_INSTANT = 1 << 48


class OutOfHostBlocks(KvsimError):
    """A group had to be swapped out and the host has no room (`upstream_faults`): the engine dies.

    `preempted` are the preemptions of this step so far, the failing one included.
    """

    def __init__(self, preempted: tuple[Preemption, ...]) -> None:
        # simpy copies the exception that ends a run: it calls its class with its args.
        super().__init__(preempted)
        self.preempted = preempted

    def __str__(self) -> str:
        request_id = self.preempted[-1].seq.request.request_id
        return f"no host blocks are left to swap out request {request_id!r}; raise swap_space"


class PromptBatch(NamedTuple):
    """Prompts of one step, padded to the longest of them."""

    num_prompts: int = 0
    longest: int = 0
    num_tokens: int = 0

    def plus(self, prompt_len: int) -> PromptBatch:
        return PromptBatch(self.num_prompts + 1, max(self.longest, prompt_len), self.num_tokens + prompt_len)

    @property
    def num_padded_tokens(self) -> int:
        return self.num_prompts * self.longest

    @property
    def num_paddings(self) -> int:
        return self.num_padded_tokens - self.num_tokens


def by_width(group: Group, allocator: KVAllocator) -> bool:
    """Swap a group that may run several sequences; compute a single one again."""
    return group.num_seats > 1


PREEMPTION_MODES: dict[str, policies.PreemptionMode] = {
    "auto": by_width,
    "recompute": policies.recompute,
    "swap": policies.swap,
}


class VllmV0Scheduler:
    """A `Scheduler` over a paged allocator whose free list is a stack (`free_list="lifo"`).

    `max_paddings` bounds the padding of a prompt batch. `preemption` is a name or a function; "auto" is the
    original's rule. With `detail`, plans list their decodes and table updates. `upstream_faults` keeps the original's
    faults (surplus references on readmission, groups that can never be swapped in, death for want of swap space,
    requests dropped in mid-generation) and turns the guards off. Without it they are mended: a request that can never
    be served is rejected at arrival, a group alone on the device may use all of it, and a group that finds no room
    on the host is computed again. Raises ScenarioError for limits that contradict each other.
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
        preemption: str | policies.PreemptionMode = "auto",
        victim: policies.Victim = policies.last_admitted,
        queue_order: policies.QueueOrder | None = None,
        gate: policies.Gate | None = None,
        beam_policy: policies.BeamPolicy = policies.random_beams,
        beam_moves: BeamMoves | None = None,
        engine_loop: str = "calendar",
        detail: bool = False,
        upstream_faults: bool = False,
    ) -> None:
        if not isinstance(allocator, PagedAllocator):
            raise ScenarioError(f"the vllm-v0 scheduler works on paged memory, not on {type(allocator).__name__}")
        check_choice("engine_loop", engine_loop, ("calendar", "plain"))
        if isinstance(preemption, str):
            check_choice("preemption", preemption, tuple(PREEMPTION_MODES))
            preemption = PREEMPTION_MODES[preemption]
        if max_num_batched_tokens < max_model_len and not upstream_faults:
            raise ScenarioError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_model_len ({max_model_len}): this "
                "engine computes a prompt in one step, so raise the one or lower the other"
            )
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_paddings = max_paddings
        self.prompt_limit = min(max_model_len, max_num_batched_tokens)
        self.wants_swap = preemption
        self.victim = victim
        self.gate = gate
        self.beam_moves = beam_moves or moves_of(beam_policy)
        self.uses_calendar = engine_loop == "calendar"
        self.detail = detail
        self.upstream_faults = upstream_faults
        watermark_blocks = int(watermark * allocator.num_blocks)
        self.memory = GroupMemory(allocator, watermark_blocks, self._num_stored, upstream_faults=upstream_faults)
        self.waiting = make_queue(queue_order)
        self.swapped: list[Group] = []
        self.running: dict[int, Group] = {}
        """By `order`; sorted by it in decode steps, with newcomers at the end before."""
        self.groups: dict[str, Group] = {}
        """Every request that has not ended."""
        self.calendar = Calendar(allocator.block_size)
        self.stepwise: dict[int, Group] = {}
        """Running groups that are looked at in every step: all of them in the plain loop; beams, and groups before
        their first decode step, if the calendar foresees the rest."""
        self.num_seats = 0
        """Sequences that the running groups may run."""
        self.num_steps = 0
        self.num_fast_steps = 0
        """Decode steps that asked the calendar alone."""
        self._scheduled: list[Group] = []
        """Groups of the prompt step being planned."""
        self._forked: dict[Sequence, None] = {}
        """Sequences that came by a fork since the last decode step: their rows of the block table are new."""
        self._is_sorted = True
        self._last_order = 0
        self._num_joined = 0
        self._num_sequences_made = 0
        self._widest = 1
        """No group was ever wider than this."""

    @property
    def has_work(self) -> bool:
        return bool(self.groups)

    def submit(self, request: Request) -> Rejection | None:
        if request.request_id in self.groups:
            raise ValueError(f"request {request.request_id!r} is submitted twice")
        is_beam = request.sampling.beam_width > 0
        num_samples = 1 if is_beam else request.sampling.n
        seqs = [self._make_sequence(request, sample) for sample in range(num_samples)]
        group = Group(request, seqs, is_beam=is_beam)
        group.next_place = 1
        if not self.upstream_faults and (reason := self._why_never(request)):
            set_status(group.members, Status.REJECTED)
            return Rejection(seqs[0], reason)
        self.groups[request.request_id] = group
        self.waiting.add(group)
        return None

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        group = self.groups.pop(request_id, None)
        if group is None:
            return ()
        status = group.seqs[0].status
        if status is Status.WAITING:
            self.waiting.remove(group)
        elif status is Status.SWAPPED:
            self.swapped.remove(group)
        else:
            self._leave(group)
        if status is not Status.WAITING:
            for seq in group.seqs:
                self.allocator.free(seq.seq_id)
        set_status(group.members, Status.ABORTED)
        return tuple(group.members)

    def live_sequences(self) -> tuple[Sequence, ...]:
        sequences = tuple(seq for group in self.groups.values() for seq in group.members)
        for seq in sequences:
            if seq.join_tick >= 0:
                self.calendar.settle(seq)
                self.memory.catch_up(seq)
        return sequences

    def describe_block(self) -> str:
        head = self.swapped[0] if self.swapped else self.waiting.head() if self.waiting else None
        return "nothing waits" if head is None else self.memory.describe_need(head)

    def schedule(self, now: Ns) -> StepPlan:
        draft = StepDraft()
        self._scheduled = []
        if not self.swapped:
            self._admit_waiting(draft)
        if not draft.is_prompt_step:
            self._continue_running(draft)
            self._note_forks(draft)
            self._resume_swapped(draft)
            self._store_decodes(draft)
        plan = draft.plan(
            self.num_steps,
            self.allocator.num_logical_blocks,
            num_running=len(self.running),
            num_sequences=self.calendar.num_seqs + len(self._stepwise_sequences()),
            num_waiting=len(self.waiting),
            num_swapped=len(self.swapped),
        )
        self.num_steps += 1
        return plan

    def complete(self, plan: StepPlan) -> StepOutcome:
        outcome = OutcomeBuilder(0)
        if plan.is_decode_tick:
            self._complete_decode(outcome)
        else:
            self._complete_prompts(outcome)
        return outcome.build()

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Admit from the head of the line until the first refusal; nobody is overtaken."""
        batch = PromptBatch()
        while self.waiting:
            group = self.waiting.head()
            num_tokens = group.seqs[0].num_tokens
            if num_tokens > self.prompt_limit:
                self._reject(group, draft, f"has {num_tokens} tokens, the limit of a prompt is {self.prompt_limit}")
                continue
            status = self.memory.can_admit(group, is_alone=not self.running)
            if status is AllocStatus.NEVER:
                self._reject(group, draft, self.memory.too_big(self.memory.blocks_to_admit(group)))
                continue
            if status is AllocStatus.LATER:
                draft.wait_for_blocks(self.memory.blocks_to_admit(group) * self.allocator.block_size)
                break
            if limit := self._limit_met(group, batch.plus(num_tokens)):
                draft.head_wait = limit
                break
            batch = batch.plus(num_tokens)
            self._admit(group, draft)
        draft.longest_prompt = batch.longest

    def _limit_met(self, group: Group, batch: PromptBatch) -> str:
        """The first limit that the batch would break with this group as its last; empty if none."""
        if batch.num_padded_tokens > self.max_num_batched_tokens:
            return "token budget"
        if self.num_seats + group.num_seats > self.max_num_seqs:
            return "sequence limit"
        if batch.num_paddings > self.max_paddings:
            return "padding limit"
        if self.gate and not self.gate(group, self.allocator):
            return "gate"
        return ""

    def _admit(self, group: Group, draft: StepDraft) -> None:
        self.waiting.pop_head()
        starts = self.memory.allocate(group)
        for seq, start in zip(group.seqs, starts, strict=True):
            seq.status = Status.RUNNING
            seq.num_computed_tokens = seq.num_tokens
            draft.admitted.append(Admission(seq, start, group.was_preempted))
            draft.prefills.append(PrefillChunk(seq, start, seq.num_tokens - start, True))
            self._note_table(draft, seq)
        self._join(group)
        self._scheduled.append(group)

    def _reject(self, group: Group, draft: StepDraft, reason: str) -> None:
        """Drop a waiting group for good, be it in mid-generation."""
        self.waiting.pop_head()
        del self.groups[group.request_id]
        set_status(group.members, Status.REJECTED)
        draft.rejected.append(Rejection(group.seqs[0], reason))

    def _continue_running(self, draft: StepDraft) -> None:
        """Give every running sequence the slot of its next token, the oldest first, at the cost of the youngest."""
        self._sort_running()
        if self.uses_calendar and self._nobody_can_be_refused():
            self.num_fast_steps += 1
            stepwise = sorted(self._stepwise_sequences(), key=by_rank)
            for seq in merged(self.calendar.crossing(), stepwise):
                self._append(seq, draft)
        else:
            self._append_in_turn(draft)

    def _nobody_can_be_refused(self) -> bool:
        """Whatever this step takes, the widest group would still find a block for each of its sequences."""
        demand = len(self.calendar.crossing()) + len(self._stepwise_sequences())
        spare = self.allocator.num_free_blocks - demand
        return spare >= self._widest or spare >= max((len(group.seqs) for group in self.running.values()), default=0)

    def _append_in_turn(self, draft: StepDraft) -> None:
        turn = deque(self.running.values())
        while turn:
            group = turn.popleft()
            while not self.memory.can_append(group, is_alone=len(self.running) == 1):
                if self.victim not in policies.BLIND_VICTIMS:
                    self.calendar.settle_all()
                victim = self.victim(turn) if turn else group
                self._preempt(victim, draft)
                if victim is group:
                    return
                turn.remove(victim)
            for seq in self._due(group):
                self._append(seq, draft)

    def _due(self, group: Group) -> list[Sequence]:
        """Sequences of a running group whose next token may need a block."""
        if group.order in self.stepwise:
            return group.seqs
        return [seq for seq in group.seqs if self.calendar.position(seq) % self.allocator.block_size == 0]

    def _append(self, seq: Sequence, draft: StepDraft) -> None:
        growth = self.memory.append(seq)
        if growth.is_changed:
            draft.copies += growth.copies
            draft.grown.append(seq)
            self._note_tail(draft, seq)

    def _store_decodes(self, draft: StepDraft) -> None:
        """Count one more stored token for every running sequence."""
        if self.calendar.num_seqs:
            self.calendar.advance()
        stepwise = self._stepwise_sequences()
        for seq in stepwise:
            seq.num_computed_tokens += 1
        draft.num_decodes = self.calendar.num_seqs + len(stepwise)
        draft.context_tokens = self.calendar.context_tokens + sum([seq.num_computed_tokens for seq in stepwise])
        draft.decodes = None
        if self.detail or not self.uses_calendar:
            draft.decodes = [seq for group in self.running.values() for seq in group.seqs]

    def _preempt(self, group: Group, draft: StepDraft) -> None:
        """Take a group off the device: to the host, or to the head of the line to be computed again."""
        self._leave(group)
        for seq in group.seqs:
            self.memory.catch_up(seq)
        is_swap = self.wants_swap(group, self.allocator)
        victims = [(seq, seq.num_computed_tokens) for seq in group.seqs]
        was_refused = is_swap and not self._swap_out(group, draft)
        if was_refused:
            if self.upstream_faults:
                failing = [Preemption(seq, True, num_stored) for seq, num_stored in victims]
                raise OutOfHostBlocks((*draft.preempted, *failing))
            is_swap = False
        if not is_swap:
            self._drop(group)
        draft.preempted += [Preemption(seq, is_swap, num_stored, was_refused) for seq, num_stored in victims]
        draft.wait_for_blocks(len(group.seqs) * self.allocator.block_size)
        group.was_preempted = True
        for seq in group.seqs:
            seq.num_preemptions += 1

    def _swap_out(self, group: Group, draft: StepDraft) -> bool:
        moves = self.memory.swap_out(group)
        if moves is None:
            return False
        draft.swap_out += moves
        set_status(group.members, Status.SWAPPED)
        self.swapped.append(group)
        return True

    def _drop(self, group: Group) -> None:
        for seq in group.seqs:
            self.allocator.free(seq.seq_id)
            seq.num_computed_tokens = 0
        set_status(group.members, Status.WAITING)
        self.waiting.add_front(group)

    def _resume_swapped(self, draft: StepDraft) -> None:
        """Bring swapped groups back, the oldest first, unless this step had to preempt."""
        self.swapped.sort(key=_arrival)
        while self.swapped and not draft.preempted:
            group = self.swapped[0]
            if not self.memory.can_swap_in(group, is_alone=not self.running):
                draft.wait_for_blocks(self.memory.blocks_to_return(group) * self.allocator.block_size)
                return
            if self.num_seats + group.num_seats > self.max_num_seqs:
                draft.head_wait = "sequence limit"
                return
            self._swap_in(group, draft)

    def _swap_in(self, group: Group, draft: StepDraft) -> None:
        moves = self.memory.swap_in(group)
        if moves is None:
            raise AllocatorError(f"request {group.request_id!r} does not fit, although the allocator said so")
        self.swapped.pop(0)
        draft.swap_in += moves
        set_status(group.members, Status.RUNNING)
        self._join(group)
        for seq in group.seqs:
            draft.resumed.append(seq)
            draft.copies += self.memory.append(seq).copies
            self._note_table(draft, seq)

    def _complete_prompts(self, outcome: OutcomeBuilder) -> None:
        for group in self._scheduled:
            if group.order in self.running:
                outcome.started += group.seqs
                self._emit_stepwise(group, outcome)

    def _complete_decode(self, outcome: OutcomeBuilder) -> None:
        """Touch the groups that may do something other than go on, in running order."""
        outcome.num_emitted += self.calendar.num_seqs
        ending = self.calendar.ending(self.calendar.tick - 1) if self.calendar.num_in_flight else []
        if self.calendar.num_in_flight:
            self.calendar.applied()
        ended_by_group: dict[int, list[Sequence]] = {}
        for seq in ending:
            ended_by_group.setdefault(_group_of(seq).order, []).append(seq)
        for order in self._in_running_order(ended_by_group.keys() | self.stepwise.keys()):
            group = self.running[order]
            if order in self.stepwise:
                self._emit_stepwise(group, outcome)
                self._enter_calendar(group)
                continue
            self._end_all(group, sorted(ended_by_group[order], key=by_rank), outcome)

    def _emit_stepwise(self, group: Group, outcome: OutcomeBuilder) -> None:
        """Every sequence of the group gets its token; samples fork, beams move, who is done leaves."""
        outcome.num_emitted += len(group.seqs)
        for seq in group.seqs:
            seq.num_output_tokens += 1
        if group.is_beam:
            self._move_beams(group, outcome)
        elif group.unforked:
            self._fork_samples(group, outcome)
        self._end_all(group, [seq for seq in group.seqs if seq.num_output_tokens >= seq.output_len], outcome)

    def _enter_calendar(self, group: Group) -> None:
        """After its first decode step every tail is its own: block boundaries are all that is left to watch."""
        if self.uses_calendar and not group.is_beam and group.seqs:
            del self.stepwise[group.order]
            for seq in group.seqs:
                self.calendar.join(seq)

    def _fork_samples(self, group: Group, outcome: OutcomeBuilder) -> None:
        """The first token: the other samples become children of sample 0; one that ends at once needs no table."""
        parent, children = group.seqs[0], group.unforked
        outcome.num_emitted += len(children)
        group.unforked = []
        for child in children:
            child.num_computed_tokens = parent.num_computed_tokens
            child.num_output_tokens = parent.num_output_tokens
            if child.num_output_tokens < child.output_len:
                self._fork(group, parent, child, outcome)
            else:
                child.status = Status.FINISHED
                outcome.ended.append(child)
                self.num_seats -= 1

    def _move_beams(self, group: Group, outcome: OutcomeBuilder) -> None:
        beams = {seq.sample: seq for seq in group.seqs}
        for action in self.beam_moves(group, group.seqs[0].num_output_tokens - 1):
            beam = beams[action.beam]
            if action.kind == "fork":
                child = self._make_sequence(group.request, group.next_place)
                child.num_computed_tokens = beam.num_computed_tokens
                child.num_output_tokens = beam.num_output_tokens
                child.group = group
                beams[child.sample] = child
                self._fork(group, beam, child, outcome)
            else:
                (outcome.ended if beam.num_output_tokens >= beam.output_len else outcome.pruned).append(beam)
                self._end(group, beam)

    def _fork(self, group: Group, parent: Sequence, child: Sequence, outcome: OutcomeBuilder) -> None:
        self.allocator.fork(parent.seq_id, child.seq_id)
        child.status = Status.RUNNING
        group.seqs.append(child)
        self._rank(group, child)
        outcome.forks.append(Fork(parent, child))
        self._forked[child] = None

    def _end_all(self, group: Group, ended: list[Sequence], outcome: OutcomeBuilder) -> None:
        for seq in ended:
            self._end(group, seq)
        outcome.ended += ended
        if not group.seqs:
            self.num_seats -= group.num_seats
            del self.running[group.order]
            self.stepwise.pop(group.order, None)
            del self.groups[group.request_id]
            outcome.finished_requests.append(group.request_id)

    def _end(self, group: Group, seq: Sequence) -> None:
        if seq.join_tick >= 0:
            self.calendar.leave(seq)
        num_seats = group.num_seats
        group.seqs.remove(seq)
        self.num_seats -= num_seats - group.num_seats
        seq.status = Status.FINISHED
        self.allocator.free(seq.seq_id)

    def _join(self, group: Group) -> None:
        """Put a group at the end of running; a decode step will sort it in by arrival."""
        self._num_joined += 1
        group.order = _arrival(group) * _JOINS_PER_INSTANT + self._num_joined
        self._is_sorted = self._is_sorted and (not self.running or group.order > self._last_order)
        self._last_order = group.order
        self.running[group.order] = self.stepwise[group.order] = group
        self.num_seats += group.num_seats
        self._widest = max(self._widest, group.num_seats)
        for seq in group.seqs:
            self._rank(group, seq)

    def _leave(self, group: Group) -> None:
        del self.running[group.order]
        self.stepwise.pop(group.order, None)
        self.num_seats -= group.num_seats
        for seq in group.seqs:
            if seq.join_tick >= 0:
                self.calendar.leave(seq)

    def _rank(self, group: Group, seq: Sequence) -> None:
        seq.rank = group.order * RANKS_PER_GROUP + seq.sample
        group.next_place = max(group.next_place, seq.sample + 1)

    def _sort_running(self) -> None:
        if not self._is_sorted:
            self.running = dict(sorted(self.running.items()))
            self._last_order = next(reversed(self.running), 0)
            self._is_sorted = True

    def _in_running_order(self, orders: set[int]) -> list[int]:
        if self._is_sorted:
            return sorted(orders)
        return [order for order in self.running if order in orders]

    def _stepwise_sequences(self) -> list[Sequence]:
        return [seq for group in self.stepwise.values() for seq in group.seqs]

    def _make_sequence(self, request: Request, sample: int) -> Sequence:
        seq = Sequence(self._num_sequences_made, request, 0 if request.sampling.beam_width else sample)
        seq.sample = sample
        self._num_sequences_made += 1
        # The model's length ends a sequence one token late: the test comes after the token.
        seq.output_len = max(1, min(seq.output_len, self.max_model_len + 1 - seq.prompt_len))
        seq.final_len = seq.prompt_len + seq.output_len - 1
        return seq

    def _num_stored(self, seq: Sequence) -> int:
        return seq.num_computed_tokens if seq.join_tick < 0 else self.calendar.position(seq)

    def _note_table(self, draft: StepDraft, seq: Sequence) -> None:
        table = self.allocator.block_table(seq.seq_id)
        draft.note_table(len(table))
        if self.detail:
            draft.table_updates.append(TableUpdate(seq, 0, tuple(table)))

    def _note_forks(self, draft: StepDraft) -> None:
        """Whole rows, with what was appended or copied in this step, of those who still run."""
        for seq in self._forked:
            if seq.status is Status.RUNNING:
                self._note_table(draft, seq)
        self._forked.clear()

    def _note_tail(self, draft: StepDraft, seq: Sequence) -> None:
        if seq in self._forked:
            return
        draft.note_table(1)
        if self.detail:
            table = self.allocator.block_table(seq.seq_id)
            draft.table_updates.append(TableUpdate(seq, len(table) - 1, tuple(table[-1:])))

    def _why_never(self, request: Request) -> str:
        """Why the request can never be served, with both numbers; empty if it can."""
        num_sequences = request.sampling.num_sequences
        if request.prompt_len > self.prompt_limit:
            return f"the prompt has {request.prompt_len} tokens, the limit is {self.prompt_limit}"
        if num_sequences > self.max_num_seqs:
            return f"runs {num_sequences} sequences, max_num_seqs is {self.max_num_seqs}"
        num_blocks = self.memory.most_blocks(request, min(request.max_stored_tokens, self.max_model_len))
        return self.memory.too_big(num_blocks) if num_blocks > self.allocator.num_blocks else ""


def _arrival(group: Group) -> Ns:
    return group.request.arrival_ns


def _group_of(seq: Sequence) -> Group:
    assert seq.group is not None
    return seq.group
