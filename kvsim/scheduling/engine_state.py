"""What a continuous engine holds: its requests, queues and running sequences; how requests come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from kvsim.memory.interface import KVAllocator, stands_for
from kvsim.memory.prefix_cache import PrefixKeys
from kvsim.request import RUNNING, Group, Request, Sequence, Status
from kvsim.scheduling import policies
from kvsim.scheduling.builder import UNLIMITED, PendingStep
from kvsim.scheduling.calendar import RANKS_PER_GROUP, Calendar
from kvsim.scheduling.plan import Rejection
from kvsim.scheduling.queues import make_queue
from kvsim.tokens import Segment, TokenStream
from kvsim.types import AllocStatus, ScenarioError

Reservation = Callable[[Request], int]

_OUTPUT_SOURCES = 1 << 48
"""Endless texts from here on are outputs that the workload does not spell out: each sample says something else."""


class Refusal(NamedTuple):
    """The head of the line found too few blocks, and nobody was let in or pushed out since."""

    group: Group
    num_free_blocks: int
    """Blocks that were free then: with no more than these it is refused again."""
    head: tuple[bool, int, str]
    """`waits_for_memory`, `head_slots` and `head_wait` of the plan."""


class EngineState:
    """Base of the continuous engines; keywords carry vLLM's names.

    `reservation` gives the slots to set aside beyond the prompt (contiguous allocators): tables never grow then.
    `gate` is asked before an admission, beside the scheduler's own tests. `detail` fills `decodes` and
    `table_updates` of every plan. Raises ScenarioError for keywords that contradict each other.
    """

    plans_ahead = False
    """The server plans a step while the one before runs."""
    splits_samples = False
    """The samples of a request are admitted and preempted each for itself, a group each."""

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
        check_choice("admission", admission, ("full_prompt", "first_chunk"))
        check_choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
        check_choice("engine_loop", engine_loop, ("calendar", "plain"))
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
            check_choice("preemption", preemption, tuple(policies.PREEMPTION_MODES))
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
        self.num_beam_groups = 0
        """Running groups that search by beams."""
        self.num_seats = 0
        self.num_table_entries = 0
        self.num_steps = 0
        self.num_fast_steps = 0
        """Steps in which the calendar alone said who is due."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_requeried_tokens = 0
        """Tokens looked up for requests that were preempted before."""
        self.num_rehit_tokens = 0
        self._grows_plainly = self._can_grow_plainly()
        self._is_plain = self._grows_plainly and self.reservation is None
        self._refusal: Refusal | None = None
        self._remembers_refusals = self._can_remember_refusals()
        self._in_flight: deque[PendingStep] = deque()
        self._moved: set[str] = set()
        """Requests of several groups of which one came, went, or changed its place since they were counted."""
        self._extras: dict[str, tuple[int, int]] = {}
        self._num_extra_running = 0
        """Running groups whose request has another one that runs."""
        self._num_extra_waiting = 0
        self._num_orders = 0
        self._num_sequences_made = 0
        self._forked: list[Sequence] = []
        """Sequences that came by a fork since the last plan: their rows of the block table are new."""
        self._num_fruitless = 0
        """Preemptions since the last token that anybody emitted."""

    @property
    def may_preempt(self) -> bool:
        """A running sequence may lose its blocks, and compute all its tokens again at once."""
        return self.reservation is None

    def _can_grow_plainly(self) -> bool:
        """A member of the calendar that crosses takes exactly one block, and nobody asks for detail or the order."""
        is_watched = self.detail or getattr(self.allocator, "journal", None) is not None
        can_grow = stands_for(self.allocator, "grow_each", ("append_slots", "can_append"))
        can_fill = stands_for(self.allocator, "fill_each", ("append_slots", "register"))
        return can_grow and can_fill and not is_watched and not getattr(self.allocator, "window_blocks", 0)

    def _can_remember_refusals(self) -> bool:
        """Whether the head of the line gets its blocks depends on how many are free, and on nothing else that moves."""
        asks_the_same = self.admits_full_prompt and self.enable_chunked_prefill and not self.plans_ahead
        is_asked_once = not self.prefill_first and self.gate is None and not self.enable_prefix_caching
        counts_blocks = stands_for(self.allocator, "grow_each", ("can_allocate",))
        return self._is_plain and asks_the_same and is_asked_once and counts_blocks

    def submit(self, request: Request) -> Rejection | None:
        """Queue a request, or say why it can never be served: the reason holds what it needs and what there is."""
        if request.request_id in self.groups:
            raise ValueError(f"request {request.request_id!r} is submitted twice")
        groups = self._make_groups(request)
        if (reason := self._why_never(groups[0])) is not None:
            for group in groups:
                set_status(group.members, Status.REJECTED)
            return Rejection(groups[0].seqs[0], reason)
        self.groups[request.request_id] = groups
        for group in groups:
            self.waiting.add(group)
        self._note_move(groups[0])
        return None

    def _make_groups(self, request: Request) -> list[Group]:
        is_beam = request.sampling.beam_width > 0
        num_samples = 1 if is_beam else request.sampling.n
        return [Group(request, [self._make_sequence(request, i) for i in range(num_samples)], is_beam)]

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
        longest = self.max_model_len - request.prompt_len
        return request.max_output_len if request.max_output_len <= longest else max(1, longest)

    def _why_never(self, group: Group) -> str | None:
        request = group.request
        if request.prompt_len >= self.max_model_len:
            return f"the prompt has {request.prompt_len} tokens, max_model_len is {self.max_model_len}"
        if self.upstream_faults:
            return None
        stored = self._max_stored_tokens(request)
        if not self.enable_chunked_prefill:
            at_once = stored if self.may_preempt else request.prompt_len
            if at_once > self.max_num_batched_tokens:
                return (
                    f"may have to compute {at_once} tokens at once, "
                    f"max_num_batched_tokens is {self.max_num_batched_tokens} and enable_chunked_prefill is off"
                )
        if (num_seats := group.num_seats) > self.max_num_seqs:
            return f"runs {num_seats} sequences, max_num_seqs is {self.max_num_seqs}"
        if num_seats == 1 and not self.reservation and stored <= self.allocator.num_blocks * self.allocator.block_size:
            return None
        return self._why_no_memory(group, stored)

    def _why_no_memory(self, group: Group, stored: int) -> str | None:
        allocator, size = self.allocator, self.allocator.block_size
        if self.reservation is not None:
            prompt_len, reserved = group.request.prompt_len, self.reservation(group.request)
            if allocator.can_allocate(prompt_len, reserve_tokens=reserved) is not AllocStatus.NEVER:
                return None
            return f"needs {prompt_len + reserved} slots at once, the pool has {allocator.num_blocks * size}"
        needed = self._num_worst_blocks(group, stored)
        if needed <= allocator.num_blocks and allocator.can_allocate(stored) is not AllocStatus.NEVER:
            return None
        slots = f"{stored} slots" if group.num_seats == 1 else f"{group.num_seats} sequences of {stored} slots"
        return f"needs {needed} blocks ({slots}), the pool has {allocator.num_blocks}"

    def _num_worst_blocks(self, group: Group, stored: int) -> int:
        """Blocks a group holds at its end if its sequences share the full blocks of the prompt and nothing else.

        With a sliding window a table goes round in a ring: what is written behind the prompt is not shared either.
        """
        size, prompt_len = self.allocator.block_size, group.request.prompt_len
        num_blocks, num_shared = -(-stored // size), prompt_len // size
        # Samples of one token write nothing behind the prompt, and share all of it.
        num_own = num_blocks - num_shared if stored > prompt_len else 0
        if window := getattr(self.allocator, "window_blocks", 0):
            num_blocks, num_own = min(num_blocks, window), min(num_own, window)
        return num_blocks + (group.num_seats - 1) * num_own

    def _max_stored_tokens(self, request: Request) -> int:
        stored = request.max_stored_tokens
        return stored if stored < self.max_model_len else self.max_model_len - 1

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End a request wherever it is; its sequences are settled, its blocks free at once."""
        aborted: list[Sequence] = []
        for group in self.groups.pop(request_id, ()):
            aborted.extend(group.members)
            self._abort_group(group)
        return tuple(aborted)

    def _abort_group(self, group: Group) -> None:
        self._note_move(group)
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
        set_status(members, Status.ABORTED)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.swapped)

    @property
    def num_running(self) -> int:
        """Requests of which a sample runs."""
        return self._count_requests()[0]

    def _count_requests(self) -> tuple[int, int, int, int]:
        """Requests of which a sample runs, the sequences that these run, requests that wait, and swapped ones.

        Samples and beams that are not forked yet have a seat, but nothing runs for them.
        """
        if self._moved:
            self._count_extras()
        return (
            len(self.running) - self._num_extra_running,
            self.calendar.num_seqs + len(self.stepwise),
            len(self.waiting) - self._num_extra_waiting,
            len(self.swapped),
        )

    def _count_extras(self) -> None:
        """Running and waiting groups whose request has another one that does."""
        for request_id in self._moved:
            states = [group.seqs[0].status for group in self.groups.get(request_id, ())]
            extras = max(0, states.count(Status.RUNNING) - 1), max(0, states.count(Status.WAITING) - 1)
            before = self._extras.pop(request_id, (0, 0))
            self._num_extra_running += extras[0] - before[0]
            self._num_extra_waiting += extras[1] - before[1]
            if any(extras):
                self._extras[request_id] = extras
        self._moved.clear()

    def _note_move(self, group: Group) -> None:
        if self.splits_samples and group.request.sampling.n > 1:
            self._moved.add(group.request.request_id)

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

    def _settle(self, seq: Sequence) -> None:
        """Bring a running sequence's counters, and the allocator's idea of its length, up to date."""
        if seq.join_tick >= 0:
            self.calendar.settle(seq)
        self._catch_up(seq, seq.num_computed_tokens)

    def _catch_up(self, seq: Sequence, num_tokens: int) -> None:
        """Tell the allocator of all tokens that a sequence stores: of a member it hears at block boundaries only."""
        behind = num_tokens - self.allocator.num_tokens(seq.seq_id)
        if behind > 0:
            self.allocator.append_slots(seq.seq_id, behind)

    def _register_member(self, seq: Sequence, num_tokens: int) -> None:
        """A member of the calendar stores so many tokens, and what fills blocks of them is findable."""
        self._catch_up(seq, num_tokens)
        self.allocator.register(seq.seq_id, num_tokens)

    def _num_wanted(self, seq: Sequence) -> int:
        """Tokens a running sequence has left to compute."""
        known = seq.prompt_len + seq.num_output_tokens + seq.num_placeholders
        group = seq.group
        if group is not None and group.unforked:
            known = seq.prompt_len
        return known - seq.num_computed_tokens

    def _leave_calendar(self, seq: Sequence) -> None:
        """A member is settled; where steps in flight counted it in bulk it becomes an entry of its own."""
        for step in self._in_flight:
            if step.is_decode_tick and seq.join_tick <= step.tick:
                step.num_bulk -= 1
                step.decodes = [*step.decodes, seq]
        self.calendar.leave(seq)

    def _start_running(self, group: Group) -> None:
        order = group.order = self._num_orders
        self._num_orders += 1
        self.running[order] = group
        self.num_beam_groups += group.is_beam
        self._note_move(group)
        self.num_seats += group.num_seats
        group.next_place = len(group.seqs)
        for place, seq in enumerate(group.seqs):
            seq.status = RUNNING
            seq.rank = order * RANKS_PER_GROUP + place
            self.stepwise.append(seq)

    def _stop_running(self, group: Group) -> None:
        """Take a group off the running list; its blocks are still there."""
        del self.running[group.order]
        self.num_beam_groups -= group.is_beam
        self._note_move(group)
        self.num_seats -= group.num_seats
        for seq in group.seqs:
            if seq.join_tick < 0:
                self.stepwise.remove(seq)
            else:
                self._leave_calendar(seq)

    def _free(self, seq: Sequence) -> None:
        allocator = self.allocator
        self.num_table_entries -= allocator.num_slots(seq.seq_id) // allocator.block_size
        allocator.free(seq.seq_id)

    def _count_entries(self, seqs: Iterable[Sequence]) -> int:
        allocator = self.allocator
        return sum(allocator.num_slots(seq.seq_id) for seq in seqs) // allocator.block_size

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


def set_status(seqs: Iterable[Sequence], status: Status) -> None:
    for seq in seqs:
        seq.status = status


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ScenarioError(f"{key}: {value!r} is unknown; it is one of {', '.join(choices)}")
