"""Iteration-level batching: what every continuous engine has in common.

A step is planned in phases: continue the running sequences, resume the swapped ones, admit the waiting ones.
`num_computed_tokens` catches up with the known tokens: one rule for prompts, chunks, prefix hits and recompute.
The running loop has one body; it is applied to the sequences that are due. In the plain loop everyone is due at
every step; with the calendar a decoding sequence is due when it needs a block (or fills one, if that is when it is
registered), and is counted in bulk otherwise.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import Literal

from kvsim.memory.interface import NO_MATCH, KVAllocator, PrefixMatch
from kvsim.memory.prefix_cache import PrefixKeys
from kvsim.request import Group, Request, Sequence, Status
from kvsim.scheduling import policies
from kvsim.scheduling.builder import UNLIMITED, OutcomeBuilder, PlanBuilder
from kvsim.scheduling.calendar import Calendar, merged
from kvsim.scheduling.plan import (
    Admission,
    Fork,
    Preemption,
    PrefillChunk,
    Rejection,
    StepOutcome,
    StepPlan,
    StepShape,
    TableUpdate,
)
from kvsim.scheduling.queues import make_queue
from kvsim.tokens import Segment, TokenStream
from kvsim.types import AllocStatus, KvsimError, Ns, OutOfBlocks, ScenarioError

EngineLoop = Literal["calendar", "plain"]
Reservation = Callable[[Request], int]

_rank = attrgetter("rank")
_RANKS_PER_GROUP = 1 << 32
_OUTPUT_SOURCES = 1 << 48
"""Endless texts from here on are outputs that the workload does not spell out: each sample says something else."""


class LivelockError(KvsimError):
    """Requests are preempted again and again and nobody emits a token."""


class ContinuousScheduler:
    """Base of the continuous engines; keywords carry vLLM's names.

    `reservation` gives the slots to set aside beyond the prompt (contiguous allocators): tables never grow then.
    `gate` is asked before an admission, beside the scheduler's own tests. `detail` fills `decodes` and
    `table_updates` of every plan. Raises ScenarioError for keywords that contradict each other.
    """

    def __init__(
        self,
        allocator: KVAllocator,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        preemption: str | policies.PreemptionMode = "recompute",
        watermark: float = 0.0,
        enable_chunked_prefill: bool = True,
        admission: str = "full_prompt",
        scheduling_policy: str = "fcfs",
        prefill_first: bool = False,
        long_prefill_token_threshold: int = 0,
        reservation: Reservation | None = None,
        victim: policies.Victim | None = None,
        queue_order: policies.QueueOrder | None = None,
        gate: policies.Gate | None = None,
        beam_policy: policies.BeamPolicy = policies.random_beams,
        engine_loop: str = "calendar",
        detail: bool = False,
        upstream_faults: bool = False,
    ) -> None:
        _check_choice("admission", admission, ("full_prompt", "first_chunk"))
        _check_choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
        _check_choice("engine_loop", engine_loop, ("calendar", "plain"))
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = UNLIMITED if max_num_batched_tokens is None else max_num_batched_tokens
        self.max_model_len = UNLIMITED if max_model_len is None else max_model_len
        self.watermark_blocks = int(watermark * allocator.num_blocks)
        self.enable_prefix_caching = bool(getattr(allocator, "enable_prefix_caching", False))
        self.enable_chunked_prefill = enable_chunked_prefill
        self.admits_full_prompt = admission == "full_prompt"
        self.prefill_first = prefill_first
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.reservation = reservation
        self.gate = gate
        self.beam_policy = beam_policy
        self.uses_calendar = engine_loop == "calendar"
        self.detail = detail
        self.upstream_faults = upstream_faults
        self._set_policies(preemption, scheduling_policy, victim, queue_order)
        self._start_empty()

    def _set_policies(
        self,
        preemption: str | policies.PreemptionMode,
        scheduling_policy: str,
        victim: policies.Victim | None,
        queue_order: policies.QueueOrder | None,
    ) -> None:
        if isinstance(preemption, str):
            _check_choice("preemption", preemption, tuple(policies.PREEMPTION_MODES))
            preemption = policies.PREEMPTION_MODES[preemption]
        is_priority = scheduling_policy == "priority"
        self.wants_swap = preemption
        self.victim = victim or (policies.least_urgent if is_priority else policies.last_admitted)
        self.queue_order = queue_order or (policies.by_priority if is_priority else None)

    def _start_empty(self) -> None:
        self.waiting = make_queue(self.queue_order)
        self.swapped = make_queue(self.queue_order)
        self.running: dict[int, Group] = {}
        """Running groups by their place in running order."""
        self.groups: dict[str, list[Group]] = {}
        """Groups of every request that has not ended."""
        self.calendar = Calendar(self.allocator.block_size)
        self.stepwise: list[Sequence] = []
        """Running sequences that are due at every step, in running order."""
        self.num_seats = 0
        self.num_table_entries = 0
        self.num_steps = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_requeried_tokens = 0
        """Tokens looked up for requests that were preempted before."""
        self.num_rehit_tokens = 0
        self._in_flight: deque[PlanBuilder] = deque()
        self._num_orders = 0
        self._num_sequences_made = 0
        self._forked_entries = 0
        self._forked_rows = 0
        self._num_fruitless = 0
        """Preemptions since the last token that anybody emitted."""

    # arrival and departure

    def submit(self, request: Request) -> Rejection | None:
        """Queue a request, or say why it can never be served: the reason holds what it needs and what there is."""
        if request.request_id in self.groups:
            raise ScenarioError(f"request {request.request_id!r} is submitted twice")
        groups = self._make_groups(request)
        if (reason := self._why_never(groups[0])) is not None:
            for group in groups:
                _set_status(group.members, Status.REJECTED)
            return Rejection(groups[0].seqs[0], reason)
        self.groups[request.request_id] = groups
        for group in groups:
            self.waiting.add(group)
        return None

    def _make_groups(self, request: Request) -> list[Group]:
        is_beam = request.sampling.beam_width > 0
        num_samples = 1 if is_beam else request.sampling.n
        return [Group(request, [self._make_sequence(request, i) for i in range(num_samples)], is_beam=is_beam)]

    def _make_sequence(self, request: Request, sample: int) -> Sequence:
        seq = Sequence(self._num_sequences_made, request, sample)
        self._num_sequences_made += 1
        longest = self._max_output_len(request)
        if longest < seq.output_len:
            seq.output_len = longest
            seq.final_len = seq.prompt_len + longest - 1
        return seq

    def _max_output_len(self, request: Request) -> int:
        """Output tokens that a scheduler can foresee as the last: the request's limit, or the model's."""
        return min(request.max_output_len, max(1, self.max_model_len - request.prompt_len))

    def _why_never(self, group: Group) -> str | None:
        request = group.request
        if request.prompt_len >= self.max_model_len:
            return f"the prompt has {request.prompt_len} tokens, max_model_len is {self.max_model_len}"
        if self.upstream_faults:
            return None
        stored = self._max_stored_tokens(request)
        if not self.enable_chunked_prefill and stored > self.max_num_batched_tokens:
            return (
                f"may have to compute {stored} tokens at once, "
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and enable_chunked_prefill is off"
            )
        if group.num_seats > self.max_num_seqs:
            return f"runs {group.num_seats} sequences, max_num_seqs is {self.max_num_seqs}"
        return self._why_no_memory(group, stored)

    def _why_no_memory(self, group: Group, stored: int) -> str | None:
        allocator, size = self.allocator, self.allocator.block_size
        if self.reservation is not None:
            prompt_len, reserved = group.request.prompt_len, self.reservation(group.request)
            if allocator.can_allocate(prompt_len, reserve_tokens=reserved) is not AllocStatus.NEVER:
                return None
            return f"needs {prompt_len + reserved} slots at once, the pool has {allocator.num_blocks * size}"
        needed = self._num_worst_blocks(group, stored)
        own = (needed - -(-stored // size)) * size
        if allocator.can_allocate(stored + own) is not AllocStatus.NEVER:
            return None
        return f"needs {needed} blocks ({stored} slots), the pool has {allocator.num_blocks}"

    def _num_worst_blocks(self, group: Group, stored: int) -> int:
        """Blocks a group holds at its end if its sequences share the full blocks of the prompt and nothing else."""
        size = self.allocator.block_size
        num_blocks, num_shared = -(-stored // size), group.request.prompt_len // size
        return num_blocks + (group.num_seats - 1) * (num_blocks - num_shared)

    def _max_stored_tokens(self, request: Request) -> int:
        return min(request.max_stored_tokens, self.max_model_len - 1)

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End a request wherever it is; its sequences are settled, its blocks free at once."""
        aborted: list[Sequence] = []
        for group in self.groups.pop(request_id, ()):
            aborted.extend(group.members)
            self._abort_group(group)
        return tuple(aborted)

    def _abort_group(self, group: Group) -> None:
        members = group.members
        match group.seqs[0].status:
            case Status.WAITING:
                self.waiting.remove(group)
            case Status.SWAPPED:
                self.swapped.remove(group)
                for seq in group.seqs:
                    self.allocator.free(seq.seq_id)
            case _:
                self._stop_running(group)
                for seq in group.seqs:
                    self._free(seq)
        _set_status(members, Status.ABORTED)

    # state

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.swapped)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def running_sequences(self) -> list[Sequence]:
        """Running sequences in running order, settled; not for the hot path."""
        seqs = [seq for group in self.running.values() for seq in group.seqs]
        for seq in seqs:
            self._settle(seq)
        return seqs

    def live_sequences(self) -> Seq[Sequence]:
        live = self.running_sequences()
        for group in (*self.swapped, *self.waiting):
            live.extend(group.seqs)
        return live

    def describe_block(self) -> str:
        queue = self.swapped or self.waiting
        if not queue:
            return "nobody waits"
        group, allocator = queue.head(), self.allocator
        tokens = group.num_known_tokens
        needed = -(-tokens // allocator.block_size)
        return (
            f"request {group.request_id!r} is {group.seqs[0].status} and needs {needed} blocks for {tokens} tokens; "
            f"the pool has {allocator.num_free_blocks} free of {allocator.num_blocks}"
        )

    def _settle(self, seq: Sequence) -> None:
        """Bring a running sequence's counters, and the allocator's idea of its length, up to date."""
        if seq.join_tick >= 0:
            self.calendar.settle(seq)
        behind = seq.num_computed_tokens - self.allocator.num_tokens(seq.seq_id)
        if behind > 0:
            self.allocator.append_slots(seq.seq_id, behind)
            seq.num_synced_tokens = seq.num_computed_tokens

    # planning

    def schedule(self, now: Ns) -> StepPlan:
        step = self._begin_step()
        self._compose(step)
        return self._end_step(step)

    def _begin_step(self) -> PlanBuilder:
        threshold = self.long_prefill_token_threshold
        if not threshold or len(self.running) + len(self.waiting) <= 1:
            threshold = UNLIMITED
        step = PlanBuilder(self.num_steps, self.calendar.tick, self.max_num_batched_tokens, threshold)
        step.num_new_entries, step.num_new_rows = self._forked_entries, self._forked_rows
        self._forked_entries = self._forked_rows = 0
        self.num_steps += 1
        return step

    def _compose(self, step: PlanBuilder) -> None:
        self._continue_running(step)
        if not step.preempted:
            self._resume_swapped(step)
            self._admit_waiting(step)

    def _continue_running(self, step: PlanBuilder) -> None:
        for seq in self._due(step):
            if seq.status is not Status.RUNNING:
                continue
            if seq.join_tick >= 0:
                self._continue_member(seq, step)
            else:
                self._continue_one(seq, step)

    def _due(self, step: PlanBuilder) -> list[Sequence]:
        """The running sequences that have something to do in this step, in running order."""
        calendar = self.calendar
        if calendar.num_seqs and not self._is_uniform(step):
            self._dissolve_calendar()
        step.budget -= calendar.num_seqs
        if self.reservation is not None:
            return self.stepwise[:]
        return merged(self.stepwise, self._due_members())

    def _due_members(self) -> Seq[Sequence]:
        """Members of the calendar that have something to do in this step."""
        return self.calendar.crossing()

    def _is_uniform(self, step: PlanBuilder) -> bool:
        """Every member of the calendar finds a token of budget left when its turn comes."""
        rest = step.budget - self.calendar.num_seqs
        if rest < 0:
            return False
        for seq in self.stepwise:
            rest -= min(self._num_wanted(seq), step.threshold)
            if rest < 0:
                last = next(reversed(self.running.values()))
                return last.seqs[-1] is seq
        return True

    def _dissolve_calendar(self) -> None:
        """Let every member be due: the plain loop runs for this step."""
        for seq in self.calendar.members():
            self._leave_calendar(seq)
            self._settle(seq)
            insort(self.stepwise, seq, key=_rank)

    def _leave_calendar(self, seq: Sequence) -> None:
        """A member is settled; where steps in flight counted it in bulk it becomes an entry of its own."""
        for step in self._in_flight:
            if step.is_decode_tick and seq.join_tick <= step.tick:
                step.num_bulk -= 1
                step.decodes.append(seq)
        self.calendar.leave(seq)

    def _num_wanted(self, seq: Sequence) -> int:
        """Tokens a running sequence has left to compute."""
        known = seq.prompt_len + seq.num_output_tokens + seq.num_placeholders
        group = seq.group
        if group is not None and group.unforked:
            known = seq.prompt_len
        return known - seq.num_computed_tokens

    def _continue_member(self, seq: Sequence, step: PlanBuilder) -> None:
        """A decoding sequence of the calendar needs a block."""
        num_tokens = seq.join_offset + step.tick + 1
        try:
            self.allocator.append_slots(seq.seq_id, num_tokens - seq.num_synced_tokens)
        except OutOfBlocks:
            self._preempt_for(seq, step)
            if seq.join_tick >= 0:
                self._continue_member(seq, step)
            return
        seq.num_synced_tokens = num_tokens
        self._note_growth(seq, 1, 0, step)

    def _continue_one(self, seq: Sequence, step: PlanBuilder) -> None:
        """A sequence computes its next token, or the next chunk of its prefill."""
        wanted = self._num_wanted(seq)
        if wanted <= 0:
            return
        num_tokens = min(wanted, step.threshold, step.budget)
        if num_tokens <= 0:
            if seq.is_decoding:
                step.skipped.append(seq)
            return
        start = seq.num_computed_tokens
        if not self._grow(seq, num_tokens, step):
            return
        self._note_planned(seq, start + num_tokens)
        step.budget -= num_tokens
        if seq.is_decoding:
            step.decodes.append(seq)
        else:
            is_last = start + num_tokens == seq.prompt_len + seq.num_output_tokens
            step.prefills.append(PrefillChunk(seq, start, num_tokens, is_last))

    def _note_planned(self, seq: Sequence, end: int) -> None:
        """A sequence has slots for its first `end` tokens."""

    def _grow(self, seq: Sequence, num_tokens: int, step: PlanBuilder) -> bool:
        """Give a running sequence its slots, preempting others or itself while blocks are short."""
        allocator = self.allocator
        num_blocks = allocator.num_slots(seq.seq_id) // allocator.block_size
        while True:
            try:
                copies = allocator.append_slots(seq.seq_id, num_tokens)
                break
            except OutOfBlocks:
                if not self._preempt_for(seq, step):
                    return False
        num_new = allocator.num_slots(seq.seq_id) // allocator.block_size - num_blocks
        if num_new or copies:
            step.copies.extend(copies)
            self._note_growth(seq, num_new, len(copies), step)
        return True

    def _preempt_for(self, seq: Sequence, step: PlanBuilder) -> bool:
        """Preempt one victim; False if that was the sequence's own group."""
        victim = self.victim(self.running.values())
        # Whoever had its turn holds slots of this step, which a move to the host would take for stored tokens.
        had_its_turn = victim.seqs[0].rank < seq.rank
        self._preempt(victim, step, can_swap=not had_its_turn)
        return victim is not seq.group

    def _note_growth(self, seq: Sequence, num_new: int, num_copies: int, step: PlanBuilder) -> None:
        self.num_table_entries += num_new
        step.grown.append(seq)
        step.num_new_entries += num_new + num_copies
        step.num_new_rows += 1
        if self.detail:
            num_changed = num_new + num_copies
            table = self.allocator.block_table(seq.seq_id)
            start = len(table) - num_changed
            step.updates.append(TableUpdate(seq, start, tuple(table[start:])))

    def _preempt(self, group: Group, step: PlanBuilder, *, can_swap: bool = True) -> None:
        """Take a running group's blocks away; it goes to the front of the line, or to the host."""
        for seq in group.seqs:
            if seq.join_tick >= 0:
                step.budget += 1
            self._settle(seq)
        self._stop_running(group)
        is_swap = can_swap and self.wants_swap(group, self.allocator) and self._swap_out(group, step)
        for seq in group.seqs:
            step.preempted.append(Preemption(seq, is_swap, seq.num_computed_tokens))
            step.drop(seq)
            seq.num_preemptions += 1
            if not is_swap:
                self._reset(seq)
        group.was_preempted = True
        self._num_fruitless += 1
        self._check_progress(group)
        if is_swap:
            _set_status(group.seqs, Status.SWAPPED)
            self.swapped.add_front(group)
        else:
            _set_status(group.seqs, Status.WAITING)
            group.seqs, group.unforked = group.members[:1], group.members[1:]
            self.waiting.add_front(group)

    def _reset(self, seq: Sequence) -> None:
        """A victim of recompute keeps its tokens and loses everything else."""
        self._free(seq)
        seq.num_computed_tokens = 0
        seq.num_placeholders = 0
        seq.is_decoding = False

    def _swap_out(self, group: Group, step: PlanBuilder) -> bool:
        """Move a victim to the host; False if there is no room."""
        allocator = self.allocator
        num_entries = self._count_entries(group.seqs)
        moves = allocator.swap_out([seq.seq_id for seq in group.seqs])
        if moves is None:
            return False
        self.num_table_entries -= num_entries
        step.swap_out.extend(moves)
        return True

    def _count_entries(self, seqs: Iterable[Sequence]) -> int:
        allocator = self.allocator
        return sum(allocator.num_slots(seq.seq_id) for seq in seqs) // allocator.block_size

    def _stop_running(self, group: Group) -> None:
        """Take a group off the running list; its blocks are still there."""
        del self.running[group.order]
        self.num_seats -= group.num_seats
        for seq in group.seqs:
            if seq.join_tick < 0:
                self.stepwise.remove(seq)
            else:
                self._leave_calendar(seq)

    def _free(self, seq: Sequence) -> None:
        self.num_table_entries -= self._count_entries((seq,))
        self.allocator.free(seq.seq_id)

    def _check_progress(self, group: Group) -> None:
        limit = 1000 + 10 * len(self.groups)
        if self.upstream_faults or self._num_fruitless <= limit:
            return
        tokens, allocator = group.num_known_tokens, self.allocator
        raise LivelockError(
            f"livelock: {self._num_fruitless} preemptions in a row and not one token emitted; the last victim is "
            f"request {group.request_id!r}, which needs {-(-tokens // allocator.block_size)} blocks for {tokens} "
            f"tokens, the pool has {allocator.num_blocks}: enlarge the pool, or lower max_num_seqs"
        )

    # swapped and waiting

    def _resume_swapped(self, step: PlanBuilder) -> None:
        """Bring swapped groups back, first come first, while they fit with room for their next tokens."""
        while self.swapped and step.budget > 0:
            group = self.swapped.head()
            if self.num_seats + group.num_seats > self.max_num_seqs:
                step.head_wait = "sequence limit"
                return
            if len(group.seqs) > step.budget:
                step.head_wait = "token budget"
                return
            if not self._fits_back(group):
                step.waits_for_memory = True
                step.head_wait = "blocks"
                return
            self.swapped.pop_head()
            step.swap_in.extend(self.allocator.swap_in([seq.seq_id for seq in group.seqs]) or ())
            self._start_running(group)
            num_entries = self._count_entries(group.seqs)
            self.num_table_entries += num_entries
            step.num_new_entries += num_entries
            step.num_new_rows += len(group.seqs)
            step.resumed.extend(group.seqs)
            for seq in group.seqs:
                self._continue_one(seq, step)

    def _fits_back(self, group: Group) -> bool:
        """Room for the blocks on the host, and for one more block (or copy) of each sequence that needs it."""
        allocator, size = self.allocator, self.allocator.block_size
        tails: set[int] = set()
        blocks: set[int] = set()
        num_growing = 0
        for seq in group.seqs:
            table = allocator.block_table(seq.seq_id)
            blocks.update(table)
            wanted = self._num_wanted(seq)
            if wanted > 0:
                end = seq.num_computed_tokens + (1 if seq.is_decoding else wanted)
                num_growing += max(0, -(-end // size) - len(table)) + (table[-1] in tails)
            tails.add(table[-1])
        watermark = self.watermark_blocks if self.running else 0
        return allocator.num_free_blocks - len(blocks) - num_growing >= watermark

    def _admit_waiting(self, step: PlanBuilder) -> None:
        """Admit from the head of the queue until the first refusal; nobody overtakes."""
        set_aside: list[Group] = []
        while self.waiting and step.budget > 0 and not self.swapped:
            group = self.waiting.head()
            if self.num_seats + group.num_seats > self.max_num_seqs:
                step.head_wait = "sequence limit"
                break
            if self._is_set_aside(group):
                set_aside.append(self.waiting.pop_head())
            elif not self._admit(group, step):
                break
        if set_aside:
            self.waiting.put_back(set_aside)

    def _is_set_aside(self, group: Group) -> bool:
        """A limit other than memory skips this group and lets others pass."""
        return False

    def _admit(self, group: Group, step: PlanBuilder) -> bool:
        """Admit the head of the queue if the budget and the memory allow."""
        leader = group.seqs[0]
        known = group.num_known_tokens
        prefix = self._match(leader, known)
        num_tokens = min(known - prefix.num_tokens, step.threshold)
        if num_tokens > step.budget:
            if not self.enable_chunked_prefill:
                step.head_wait = "token budget"
                return False
            num_tokens = step.budget
        end = prefix.num_tokens + num_tokens
        if not self._has_room(group, known if self.admits_full_prompt else end, prefix, step):
            return False
        self.waiting.pop_head()
        self._allocate(leader, end, prefix, step)
        self._start_running(group)
        self._count_lookup(group, known, prefix)
        step.budget -= num_tokens
        step.admitted.append(Admission(leader, prefix.num_tokens, group.was_preempted))
        is_last = end == leader.prompt_len + leader.num_output_tokens
        step.prefills.append(PrefillChunk(leader, prefix.num_tokens, num_tokens, is_last))
        return True

    def _match(self, seq: Sequence, num_known: int) -> PrefixMatch:
        if not self.enable_prefix_caching:
            return NO_MATCH
        return self.allocator.match_prefix(self._keys(seq), num_known)

    def _keys(self, seq: Sequence) -> PrefixKeys:
        """The prefix-cache keys of a sequence's text: its prompt, and what it will say."""
        if seq.keys is None:
            request = seq.request
            output = request.output if request.output is not None and seq.sample == 0 else None
            if output is None:
                output = TokenStream((Segment(_OUTPUT_SOURCES + seq.seq_id, 0, seq.output_len),))
            seq.keys = PrefixKeys(request.prompt + output, request.namespace, self.allocator.block_size)
        keys: PrefixKeys = seq.keys
        return keys

    def _has_room(self, group: Group, num_tokens: int, prefix: PrefixMatch, step: PlanBuilder) -> bool:
        if self.gate is not None and not self.gate(group, self.allocator):
            step.waits_for_memory = True
            step.head_wait = "gate"
            return False
        status = self.allocator.can_allocate(
            num_tokens,
            prefix=prefix,
            reserve_tokens=self._num_reserved(group.seqs[0], num_tokens),
            watermark_blocks=self.watermark_blocks if self.running else 0,
        )
        if status is AllocStatus.OK:
            return True
        step.waits_for_memory = True
        step.head_wait = "blocks"
        step.head_slots = num_tokens + self._num_reserved(group.seqs[0], num_tokens)
        return False

    def _num_reserved(self, seq: Sequence, num_tokens: int) -> int:
        """Slots to set aside beyond `num_tokens`: the rest of the prompt, and the reservation for the output."""
        if self.reservation is None:
            return 0
        return max(0, seq.prompt_len + self.reservation(seq.request) - num_tokens)

    def _allocate(self, seq: Sequence, num_tokens: int, prefix: PrefixMatch, step: PlanBuilder) -> None:
        allocator = self.allocator
        keys = self._keys(seq) if self.enable_prefix_caching else None
        reserved = self._num_reserved(seq, num_tokens)
        allocator.allocate(seq.seq_id, num_tokens, keys=keys, prefix=prefix, reserve_tokens=reserved)
        seq.num_computed_tokens = prefix.num_tokens
        num_entries = self._count_entries((seq,))
        self.num_table_entries += num_entries
        step.num_new_entries += num_entries
        step.num_new_rows += 1
        self._note_planned(seq, num_tokens)

    def _start_running(self, group: Group) -> None:
        order = group.order = self._num_orders
        self._num_orders += 1
        self.running[order] = group
        self.num_seats += group.num_seats
        group.next_place = 0
        for seq in group.seqs:
            seq.status = Status.RUNNING
            self._take_place(group, seq)
            self.stepwise.append(seq)

    def _take_place(self, group: Group, seq: Sequence) -> None:
        seq.rank = group.order * _RANKS_PER_GROUP + group.next_place
        group.next_place += 1

    def _count_lookup(self, group: Group, num_known: int, prefix: PrefixMatch) -> None:
        if not self.enable_prefix_caching:
            return
        if group.was_preempted:
            self.num_requeried_tokens += num_known
            self.num_rehit_tokens += prefix.num_tokens
        else:
            self.num_queried_tokens += num_known
            self.num_hit_tokens += prefix.num_tokens

    # the plan

    def _end_step(self, step: PlanBuilder) -> StepPlan:
        """Count the step's tokens as stored, and write the plan down."""
        calendar = self.calendar
        for chunk in step.prefills:
            chunk.seq.num_computed_tokens += chunk.num_tokens
        context = 0
        for seq in step.decodes:
            seq.num_computed_tokens += 1
            context += seq.num_computed_tokens
        if step.is_decode_tick:
            step.num_bulk = calendar.num_seqs
            calendar.advance()
            context += calendar.context_tokens
        decodes = self._list_decodes(step) if self.detail or not self.uses_calendar else None
        self._note_step(step)
        self._in_flight.append(step)
        shape = StepShape(
            step.num_bulk + len(step.decodes),
            context,
            tuple([(start, num_tokens) for _, start, num_tokens, _ in step.prefills]),
            len(step.copies),
            sum(copy.num_tokens for copy in step.copies) if step.copies else 0,
            len(step.swap_out),
            len(step.swap_in),
            step.num_new_entries,
            step.num_new_rows,
            self.num_table_entries,
            0,
            step.num_new_rows,
        )
        return StepPlan(
            step.step,
            shape,
            step.is_decode_tick,
            decodes,
            tuple(step.prefills),
            tuple(step.admitted),
            tuple(step.resumed),
            tuple(step.grown),
            tuple(step.preempted),
            (),
            tuple(step.skipped),
            tuple(step.copies),
            tuple(step.swap_out),
            tuple(step.swap_in),
            self._list_updates(step) if self.detail else (),
            len(self.running),
            self.num_seats,
            len(self.waiting),
            len(self.swapped),
            step.waits_for_memory,
            step.head_slots,
            step.head_wait,
        )

    def _note_step(self, step: PlanBuilder) -> None:
        """A step was planned and its tokens count as stored."""

    def _list_decodes(self, step: PlanBuilder) -> tuple[Sequence, ...]:
        if not step.num_bulk:
            return tuple(step.decodes)
        members = self.calendar.members()
        for seq in members:
            self.calendar.settle(seq)
        return tuple(merged(step.decodes, members))

    def _list_updates(self, step: PlanBuilder) -> tuple[TableUpdate, ...]:
        """Table entries that changed, sequence by sequence: whole tables of newcomers, new tails of the others."""
        whole = [admission.seq for admission in step.admitted] + step.resumed
        updates = [TableUpdate(seq, 0, tuple(self.allocator.block_table(seq.seq_id))) for seq in whole]
        return (*step.updates, *updates)

    # applying a step

    def complete(self, plan: StepPlan) -> StepOutcome:
        return self._apply(self._in_flight.popleft())

    def _apply(self, step: PlanBuilder) -> StepOutcome:
        """Emit the tokens of a step: forks, joins, ends."""
        if step.is_decode_tick:
            self.calendar.applied()
        self._note_computed(step)
        if not (step.prefills or step.decodes or step.tick in self.calendar.finish_at):
            self._num_fruitless = 0 if step.num_bulk else self._num_fruitless
            return StepOutcome(step.num_bulk)
        outcome = OutcomeBuilder(step.num_bulk)
        if step.prefills:
            self._apply_prefills(step, outcome)
        self._apply_decodes(step, outcome)
        for group in outcome.beam_groups:
            self._advance_beams(group, outcome)
        outcome.ended.extend(self.calendar.ending(step.tick) if step.is_decode_tick else ())
        if outcome.ended:
            self._end_all(outcome)
        if outcome.num_emitted:
            self._num_fruitless = 0
        return outcome.build()

    def _note_computed(self, step: PlanBuilder) -> None:
        """The tokens of a step are computed, and not yet emitted."""

    def _apply_prefills(self, step: PlanBuilder, outcome: OutcomeBuilder) -> None:
        for chunk in step.prefills:
            seq = chunk.seq
            group = seq.group
            if seq.status is not Status.RUNNING or group is None:
                continue
            children: list[Sequence] = []
            if group.unforked and seq.num_computed_tokens == seq.prompt_len:
                children = self._fork_samples(group, outcome)
            if not chunk.is_last:
                continue
            for one in (seq, *children):
                if not group.is_beam:
                    one.is_decoding = True
                    outcome.started.append(one)
                self._emit(one, outcome)

    def _apply_decodes(self, step: PlanBuilder, outcome: OutcomeBuilder) -> None:
        for seq in step.decodes:
            if seq.status is Status.RUNNING:
                self._emit(seq, outcome)

    def _fork_samples(self, group: Group, outcome: OutcomeBuilder) -> list[Sequence]:
        """Let the other samples share the blocks of the computed prompt."""
        leader, children = group.seqs[0], group.unforked
        group.unforked = []
        for child in children:
            self._fork(group, leader, child, outcome)
        return children

    def _fork(self, group: Group, parent: Sequence, child: Sequence, outcome: OutcomeBuilder) -> None:
        allocator = self.allocator
        keys = self._keys(child) if self.enable_prefix_caching and not group.is_beam else None
        allocator.fork(parent.seq_id, child.seq_id, keys=keys)
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = Status.RUNNING
        group.seqs.append(child)
        self._take_place(group, child)
        insort(self.stepwise, child, key=_rank)
        num_entries = self._count_entries((child,))
        self.num_table_entries += num_entries
        self._forked_entries += num_entries
        self._forked_rows += 1
        outcome.forks.append(Fork(parent, child))

    def _emit(self, seq: Sequence, outcome: OutcomeBuilder) -> None:
        """A token for a sequence that had its turn; from its next one on, the calendar counts it."""
        group = seq.group
        if group is not None and group.is_beam:
            if group not in outcome.beam_groups:
                outcome.beam_groups.append(group)
            return
        outcome.num_emitted += 1
        seq.num_output_tokens += 1
        if seq.num_output_tokens >= seq.output_len:
            outcome.ended.append(seq)
        elif self.uses_calendar and not self._has_fresh_fork(seq, outcome):
            self.stepwise.remove(seq)
            self.calendar.join(seq)

    def _has_fresh_fork(self, seq: Sequence, outcome: OutcomeBuilder) -> bool:
        """Its tail may be shared, so its next token may need a copy."""
        return bool(outcome.forks) and any(fork.parent.group is seq.group for fork in outcome.forks)

    def _advance_beams(self, group: Group, outcome: OutcomeBuilder) -> None:
        """Once every beam has computed its tokens: one token each, then the survivors' children."""
        if any(self._num_wanted(beam) > 0 for beam in group.seqs):
            return
        beams = group.seqs[:]
        for beam in beams:
            beam.num_output_tokens += 1
            if not beam.is_decoding:
                beam.is_decoding = True
                outcome.started.append(beam)
        outcome.num_emitted += len(beams)
        if beams[0].num_output_tokens >= beams[0].output_len:
            outcome.ended.extend(beams)
            return
        width, step = group.request.sampling.beam_width, beams[0].num_output_tokens - 1
        children = self.beam_policy(group.request.seed, step, len(beams), width)
        for beam, num_children in zip(beams, children, strict=True):
            if not num_children:
                self._end(beam, outcome)
                outcome.pruned.append(beam)
        for beam, num_children in zip(beams, children, strict=True):
            for _ in range(num_children - 1):
                self._fork_beam(group, beam, outcome)

    def _fork_beam(self, group: Group, parent: Sequence, outcome: OutcomeBuilder) -> None:
        child = self._make_sequence(group.request, group.next_place)
        child.output_len, child.final_len = parent.output_len, parent.final_len
        child.group = group
        child.is_decoding = True
        child.num_output_tokens = parent.num_output_tokens
        self._fork(group, parent, child, outcome)

    def _end_all(self, outcome: OutcomeBuilder) -> None:
        if len(outcome.ended) > 1:
            outcome.ended.sort(key=_rank)
        for seq in outcome.ended:
            self._end(seq, outcome)

    def _end(self, seq: Sequence, outcome: OutcomeBuilder) -> None:
        """A running sequence has all its tokens (or is pruned): its blocks are free at once."""
        group = seq.group
        assert group is not None
        if seq.join_tick >= 0:
            self._leave_calendar(seq)
        else:
            self.stepwise.remove(seq)
        self._free(seq)
        seq.status = Status.FINISHED
        num_seats = group.num_seats
        group.seqs.remove(seq)
        if group.seqs:
            self.num_seats += group.num_seats - num_seats
            return
        self.num_seats -= num_seats
        del self.running[group.order]
        self._leave_request(group, outcome)

    def _leave_request(self, group: Group, outcome: OutcomeBuilder) -> None:
        request_id = group.request.request_id
        groups = self.groups[request_id]
        groups.remove(group)
        if not groups:
            del self.groups[request_id]
            outcome.finished_requests.append(request_id)


def _set_status(seqs: Iterable[Sequence], status: Status) -> None:
    for seq in seqs:
        seq.status = status


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ScenarioError(f"{key}: {value!r} is unknown; it is one of {', '.join(choices)}")
