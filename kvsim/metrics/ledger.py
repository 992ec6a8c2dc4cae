"""The memory ledger: where every slot of the KV capacity is, at every step.

Each part is counted on its own and none is "the rest"; that they sum to the capacity is law 12, checked at
every step. The counts move with the events of a plan (admissions, growth, releases) and with the number of
tokens it stores, so a step costs O(events), not O(running sequences).

Sequences are counted logically (each for itself); what sharing saves is taken off by the allocator's count of
table entries that name a block more than once. That is exact as long as only full blocks are shared; while a
partial tail is shared (between a fork and its first write), and wherever a sliding window lets tables go round in
rings, the ledger recounts block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvsim.memory.interface import KVAllocator, Usage
from kvsim.request import Group, Request, Sequence, Status
from kvsim.scheduling.builder import UNLIMITED
from kvsim.scheduling.interface import Scheduler
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.types import LawViolation


class Parts(NamedTuple):
    """The six parts of the KV capacity, in slots."""

    token_states: int
    reserved: int
    internal_frag: int
    external_frag: int
    cached_idle: int
    free: int


class Clock(NamedTuple):
    """Steps applied so far, the time they took, and the part of it in which a request waited."""

    num_steps: int
    elapsed_ns: int
    saturated_ns: int


class Correction(NamedTuple):
    """Hindsight: `num_slots` counted as reserved over steps `first .. last - 1` were never filled."""

    first: int
    last: int
    num_slots: int


class _Held:
    """What the ledger remembers of one sequence with a table."""

    __slots__ = ("over", "since_step", "slots", "tail")

    def __init__(self, slots: int, over: int, tail: object, since_step: int) -> None:
        self.slots = slots
        self.over = over
        """Slots beyond its final length: never to be filled."""
        self.since_step = since_step
        """The step that gave it the last of its slots."""
        self.tail = tail
        """Stands for its last block: the same object for sequences that forked and have not written since."""


class _Left(NamedTuple):
    """What a sequence held until it was preempted: since and until which step, and the slots that it was to fill."""

    tail: object
    first: int
    last: int
    num_wanted: int


class Ledger:
    """Counts the six parts of one scheduler's memory. Reads the scheduler; never changes it.

    `on_release(seq, num_slots)` is told of every table that goes, with its size.
    """

    def __init__(self, scheduler: Scheduler, on_release: Callable[[Sequence, int], None]) -> None:
        self.scheduler = scheduler
        self.on_release = on_release
        self.allocator: Any = scheduler.allocator
        self.block_size = self.allocator.block_size
        self.capacity = self.allocator.num_blocks * self.block_size
        self.corrections: list[Correction] = []
        self.num_planned = 0
        """Steps that were planned and take time: one more than those applied, or two in asynchronous scheduling."""
        self.stored = 0
        """Tokens that the tables hold, each table for itself."""
        self.over = 0
        """Slots beyond the final lengths of those who hold them: never to be filled."""
        self.dates_growth = False
        """Somebody may lose slots before their time: `on_step` wants to hear of every step."""
        self._clock = Clock(0, 0, 0)
        self._starts: list[tuple[int, int]] = []
        """Time, and time in which a request waited, before each applied step from the first that is dated."""
        self._held: dict[int, _Held] = {}
        self._left: dict[int, list[_Left]] = {}
        """What sequences that may end early held before each of their preemptions."""
        self._most_stored: dict[int, int] = {}
        """The most tokens that such a sequence had stored when it was preempted."""
        self._swapped: dict[int, tuple[int, object]] = {}
        """Stored tokens, and the tail, of swapped sequences."""
        self._can_share_tails = hasattr(self.allocator, "num_shared_partial_tails")
        self._has_leaks = getattr(self.allocator, "upstream_faults", False)
        self._is_contiguous = self.block_size == 1 and hasattr(self.allocator, "holes")
        self._window_slots = getattr(self.allocator, "window_blocks", 0) * self.block_size
        """Slots of the ring that a sliding window leaves each sequence; 0 without one."""
        self._has_promises = hasattr(scheduler, "num_promised_blocks")
        self._promised: dict[str, tuple[int, int]] = {}
        """By request that may be aborted: its first step, and the slots of its promise that it would fill."""
        self._is_always_odd = self._window_slots > 0 or self._has_promises or self._has_leaks
        self.may_be_odd = self._is_always_odd or self._is_contiguous
        """`odd_parts` may be asked for although no table shares a block."""
        if self._window_slots:
            self.expect_early_ends(self._clock)

    def count(self, plan: StepPlan) -> None:
        """The step runs: its allocations were made, and its tokens count as stored."""
        if plan.preempted or plan.admitted or plan.resumed or plan.released:
            self._on_moves(plan)
        if plan.grown:
            self._regrow(plan)
        shape = plan.shape
        self.stored += shape.num_decodes
        for _, num_tokens in shape.prefills:
            self.stored += num_tokens
        if shape.num_decodes or plan.prefills or plan.preempted or plan.rejected:
            self.num_planned += 1

    def count_quiet(self, plan: StepPlan) -> None:
        """The same for a plan that `is_quiet`."""
        grown = plan.grown
        if grown and self.dates_growth:
            self._regrow(plan)
        elif grown:
            self._cross(grown, plan.tick)
        self.stored += plan.shape.num_decodes
        self.num_planned += 1

    def _on_moves(self, plan: StepPlan) -> None:
        for seq in plan.released:
            self._release(seq, 0)
        for preemption in plan.preempted:
            held = self._release(preemption.seq, preemption.num_stored_tokens)
            # Beams end at their own times, and others fill what they shared.
            if held is not None and self.dates_growth and not _is_beam(preemption.seq):
                self._leave(preemption.seq.seq_id, held, preemption.num_stored_tokens)
            if preemption.is_swap:
                tail = object() if held is None else held.tail
                self._swapped[preemption.seq.seq_id] = (preemption.num_stored_tokens, tail)
        for admission in plan.admitted:
            self._hold(admission.seq, admission.num_hit_tokens)
        for seq in plan.resumed:
            self._hold(seq, *self._swapped.pop(seq.seq_id))

    def _leave(self, seq_id: int, held: _Held, num_stored: int) -> None:
        left = _Left(held.tail, held.since_step, self.num_planned, held.slots - held.over)
        self._left.setdefault(seq_id, []).append(left)
        self._most_stored[seq_id] = max(num_stored, self._most_stored.get(seq_id, 0))

    def on_step(self, duration_ns: int, is_saturated: bool) -> None:
        """The next step took this long; to be told while `dates_growth`."""
        num_steps, elapsed_ns, saturated_ns = self._clock
        self._starts.append((elapsed_ns, saturated_ns))
        self._clock = Clock(num_steps + 1, elapsed_ns + duration_ns, saturated_ns + duration_ns * is_saturated)

    def spans_of(self, correction: Correction) -> tuple[int, int]:
        """What the correction's steps took together, in ns, and the part of it in which a request waited."""
        first, last = self._start(correction.first), self._start(correction.last)
        return last[0] - first[0], last[1] - first[1]

    def _start(self, step: int) -> tuple[int, int]:
        """Time before a step; of those that nobody dated, before the first that somebody did."""
        place = max(0, step - (self._clock.num_steps - len(self._starts)))
        return self._starts[place] if place < len(self._starts) else self._clock[1:]

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Sequences that ended gave their memory back; beams that were pruned ended before their time."""
        retained = {seq.seq_id for seq in outcome.retained} if outcome.retained else ()
        for fork in outcome.forks:
            # A child that ended with its first token never had slots of its own.
            if fork.child.status is not Status.FINISHED or fork.child.seq_id in retained:
                parent = self._held.get(fork.parent.seq_id) if self._can_share_tails else None
                self._hold(fork.child, fork.child.num_computed_tokens, None if parent is None else parent.tail)
                if parent is not None:
                    # Its empty slots are those of the tail that it shares.
                    self._held[fork.child.seq_id].since_step = parent.since_step
        for seq in outcome.ended:
            if seq.seq_id in retained:
                self._retain(seq)
            else:
                self._release(seq, seq.num_computed_tokens)
            if self._left:
                self._left.pop(seq.seq_id, None)
                self._most_stored.pop(seq.seq_id, None)
        for seq in outcome.released:
            self._release(seq, 0)
        if self._promised:
            for request_id in outcome.finished_requests:
                self._promised.pop(request_id, None)
        if outcome.pruned:
            self._end_early(outcome.pruned)

    def on_abort(self, sequences: tuple[Sequence, ...]) -> None:
        """Aborted sequences: their final length is what they had stored (hindsight)."""
        self._end_early(sequences)

    def _hold(self, seq: Sequence, num_stored: int, tail: object = None) -> None:
        self.stored += num_stored
        if seq.seq_id in self._held:
            return
        slots = self._num_slots(seq.seq_id)
        surplus = slots - _len_in_place(seq)
        over = surplus if surplus > 0 else 0
        self._held[seq.seq_id] = _Held(slots, over, tail or object(), self.num_planned)
        self.over += over

    def _num_slots(self, seq_id: int) -> int:
        """Slots of a sequence's table; entries that go round the ring of a window name the same ones again."""
        num_slots: int = self.allocator.num_slots(seq_id)
        return min(num_slots, self._window_slots) if self._window_slots else num_slots

    def in_windows(self, plan: StepPlan) -> tuple[int, int]:
        """What `stored` and the tables' slots come to where only those within the sliding windows count."""
        states = sum(min(_num_states(seq), self._window_slots) for seq in _with_tables(self.scheduler))
        return states + plan.num_superfluous, sum(held.slots for held in self._held.values())

    def expect_early_ends(self, clock: Clock) -> None:
        """A request may be aborted, or lose beams, from here on: growth is dated, for hindsight."""
        if not self.dates_growth:
            self.dates_growth = True
            self._clock = clock

    def _regrow(self, plan: StepPlan) -> None:
        grown, num_crossed = plan.grown, plan.num_crossed
        if num_crossed and not self.dates_growth:
            self._cross(grown[:num_crossed], plan.tick)
            grown = grown[num_crossed:]
        for seq in grown:
            held = self._held[seq.seq_id]
            slots = self._num_slots(seq.seq_id)
            self._exceed(held, max(0, slots - _len_in_place(seq)))
            # New slots, or a copy of the tail that it shared: the empty ones behind are its own from here on.
            held.slots = slots
            held.since_step = self.num_planned
            held.tail = object()

    def _cross(self, crossed: tuple[Sequence, ...], tick: int) -> None:
        """Each took one block and has one token in it: for those who end before the next one, it was the last."""
        last_tick = tick + self.block_size - 1
        for seq in crossed:
            if seq.finish_tick < last_tick:
                self._exceed(self._held[seq.seq_id], last_tick - seq.finish_tick)

    def _exceed(self, held: _Held, over: int) -> None:
        self.over += over - held.over
        held.over = over

    def _release(self, seq: Sequence, num_stored: int) -> _Held | None:
        held = self._held.pop(seq.seq_id, None)
        if held is not None:
            self.stored -= num_stored
            self.over -= held.over
            # Who grew in the calendar was not counted here: it has a block for every token, and none beyond.
            num_slots = held.slots if held.slots > num_stored or self._window_slots else num_stored
            self.on_release(seq, num_slots)
        return held

    def _retain(self, seq: Sequence) -> None:
        """It ended and keeps its memory: nothing in there will be read."""
        held = self._held[seq.seq_id]
        self.stored -= seq.num_computed_tokens
        self._exceed(held, held.slots)
        self.on_release(seq, held.slots)

    def _end_early(self, sequences: tuple[Sequence, ...]) -> None:
        """Sequences that end before their time, together: an empty slot that they share is counted once."""
        unfilled: dict[object, list[tuple[int, int, int]]] = {}
        for seq in sequences:
            self._swapped.pop(seq.seq_id, None)
            held = self._release(seq, seq.num_computed_tokens)
            if held is not None:
                num_slots = held.slots - held.over - seq.num_computed_tokens
                unfilled.setdefault(held.tail, []).append((held.since_step, self.num_planned, num_slots))
            # What it held before a preemption it would have filled as far as it came at any time.
            most = max(self._most_stored.pop(seq.seq_id, 0), seq.num_computed_tokens)
            for left in self._left.pop(seq.seq_id, ()):
                lot = (left.first, left.last, left.num_wanted - most)
                unfilled.setdefault((left.tail, left.last), []).append(lot)
        beams_end = any(map(_is_beam, sequences))
        # What was empty in its blocks had been promised before it took them.
        request_id = sequences[0].request.request_id if sequences else ""
        admitted, num_promised = self._promised.pop(request_id, (None, 0))
        for sharers in unfilled.values():
            if not beams_end:
                # The last of those who share a tail was to write in place, and said what is reserved there.
                del sharers[:-1]
            num_counted = 0
            for first, last, num_slots in sorted(sharers):
                if num_slots > num_counted:
                    since = first if admitted is None else admitted
                    self.corrections.append(Correction(since, last, num_slots - num_counted))
                    num_counted = num_slots
        if admitted is not None and num_promised:
            self.corrections.append(Correction(admitted, self.num_planned, num_promised))

    def odd_parts(self, plan: StepPlan, usage: Usage) -> Parts | None:
        """The parts, if `plain_parts` does not say them: tables go round, share a tail, leak, or wait for a hole."""
        is_odd = self._is_always_odd or (self._is_contiguous and plan.waits_for_memory)
        if is_odd or (self._can_share_tails and self.allocator.num_shared_partial_tails):
            return self.parts(plan, usage)
        return None

    def parts(self, plan: StepPlan, usage: Usage) -> Parts:
        """The parts while the step runs that was counted last."""
        # Blocks that no table names and nobody will free: faults of the paper's engine, where they are asked for.
        lost = self.allocator.num_leaked_blocks if self._has_leaks else 0
        if lost:
            usage = usage._replace(num_used=usage.num_used - lost)
        parts = Parts(*plain_parts(self.stored - plan.num_superfluous, self.over, usage, self.block_size))
        if lost:
            parts = parts._replace(internal_frag=parts.internal_frag + lost * self.block_size)
        if self._window_slots or (self._can_share_tails and self.allocator.num_shared_partial_tails):
            parts = Parts(*_count_tables(self.scheduler), *parts[3:])
        if self._is_contiguous and plan.waits_for_memory and plan.head_slots <= parts.free:
            parts = parts._replace(external_frag=parts.external_frag + parts.free, free=0)
        return self._with_promises(parts) if self._has_promises else parts

    def _with_promises(self, parts: Parts) -> Parts:
        token_states, reserved, internal, external, cached_idle, free = parts
        promised = self._count_promises()
        reserved += promised.to_be_filled
        internal += promised.never_filled
        free -= promised.to_be_filled + promised.never_filled
        if free < 0:
            # What is promised beyond the free blocks will be taken from idle cached ones.
            cached_idle, free = cached_idle + free, 0
        return Parts(token_states, reserved, internal, external, cached_idle, free)

    def _count_promises(self) -> _Promises:
        promised = _promises(self.scheduler)
        for request, num_slots in promised.of_requests:
            # Of several beams it is not known what they would share.
            if request.abort_ns is not None and request.sampling.beam_width < 2:
                first, _ = self._promised.get(request.request_id, (self.num_planned - 1, 0))
                self._promised[request.request_id] = (first, num_slots)
        return promised


def plain_parts(stored: Any, over: Any, usage: Any, block_size: int) -> tuple[Any, ...]:
    """The six parts from counts; of many steps at once, where the counts are columns.

    `stored` are the tokens of all tables that will be read (a superfluous step stores one beyond the final length),
    `over` the slots that will never be filled; `usage` has the fields of `Usage`.
    """
    return (
        stored - (usage.num_logical - usage.num_used) * block_size,
        usage.num_logical * block_size - over - stored,
        over,
        usage.num_rounding_slots,
        usage.num_cached_idle * block_size,
        usage.num_free * block_size,
    )


class _Promises(NamedTuple):
    """Slots promised and in no table yet (`no-evict`): hindsight knows which of them will be filled."""

    to_be_filled: int
    never_filled: int
    of_requests: list[tuple[Request, int]]
    """Those to be filled, by request."""


def _promises(scheduler: Any) -> _Promises:
    allocator = scheduler.allocator
    num_slots = (scheduler.num_promised_blocks - allocator.usage().num_used) * allocator.block_size
    scheduler.running_sequences()  # settles their counters
    of_requests = [(group.request, _num_to_fill(group, allocator)) for group in scheduler.running.values()]
    to_be_filled = min(sum([num_slots for _, num_slots in of_requests]), num_slots)
    return _Promises(to_be_filled, num_slots - to_be_filled, of_requests)


def _num_to_fill(group: Group, allocator: Any) -> int:
    """Slots that the members of a group will fill in blocks that they do not hold yet.

    Those are the blocks they grow by (at most to the ring of a sliding window), and copies of the blocks that they
    share and write into: each sample that writes there copies it but the last one. What beams will share is not
    foreseen.
    """
    size, prompt_len = allocator.block_size, group.request.prompt_len
    ring = getattr(allocator, "window_blocks", 0) or UNLIMITED
    most = ring * size
    num_slots = 0
    copied: dict[int, list[int]] = {}
    """By shared block: what each of those who will write there would fill in a copy."""
    for seq in group.seqs:
        num_slots += max(0, min(seq.final_len, most) - allocator.num_slots(seq.seq_id))
        if not group.unforked:
            table = allocator.block_table(seq.seq_id)
            for index in _rewritten(seq.num_computed_tokens, seq.final_len, size, ring):
                copied.setdefault(table[index], []).append(min(size, seq.final_len - index * size))
    for seq in group.unforked:
        num_slots += max(0, min(seq.final_len, most) - -(-prompt_len // size) * size)
    for seq in group.members if group.unforked else ():
        for index in _rewritten(prompt_len, seq.final_len, size, ring):
            copied.setdefault(index, []).append(min(size, seq.final_len - index * size))
    for sharers in copied.values() if not group.is_beam else ():
        num_slots += sum(sharers[:-1])
    return num_slots


def _rewritten(num_stored: int, final_len: int, size: int, ring: int) -> Iterator[int]:
    """Places in the table of a sequence that holds `num_stored` tokens of the blocks that it will write into again.

    That is its partly filled tail, and, where a window lets it go round, every block that its later tokens come to.
    """
    first_new = -(-num_stored // size)
    has_tail = num_stored < first_new * size
    if has_tail and num_stored < final_len:
        yield (first_new - 1) % ring
    for place in range(max(first_new, ring), min(first_new + ring - has_tail, -(-final_len // size))):
        yield place % ring


def recount(scheduler: Scheduler) -> tuple[int, int, int]:
    """Token states, reserved and internal slots counted block by block: the oracle of the incremental ledger."""
    token_states, reserved, internal = _count_tables(scheduler)
    if hasattr(scheduler, "num_promised_blocks"):
        promised = _promises(scheduler)
        reserved, internal = reserved + promised.to_be_filled, internal + promised.never_filled
    return token_states, reserved, internal


def _count_tables(scheduler: Scheduler) -> tuple[int, int, int]:
    allocator = scheduler.allocator
    filled, wanted = _slot_counts(allocator, _with_tables(scheduler))
    token_states = sum(filled)
    reserved = sum(max(0, want - fill) for want, fill in zip(wanted, filled, strict=True))
    internal = allocator.usage().num_used * allocator.block_size - token_states - reserved
    return token_states, reserved, internal


def _with_tables(scheduler: Scheduler) -> list[Sequence]:
    """Sequences that hold blocks of the device."""
    has_table = scheduler.allocator.has_table
    return [seq for seq in scheduler.live_sequences() if seq.status is not Status.SWAPPED and has_table(seq.seq_id)]


def _slot_counts(allocator: KVAllocator, tables: list[Sequence]) -> tuple[list[int], list[int]]:
    """Slots filled, and slots that will be in the end: per block, or per region where nothing is shared."""
    size = allocator.block_size
    if hasattr(allocator, "region"):
        return [_num_states(seq) for seq in tables], [seq.final_len for seq in tables]
    # The entries behind a window's ring name its blocks again; each keeps the states of its latest tokens.
    ring = getattr(allocator, "window_blocks", 0) or None
    filled: dict[int, int] = {}
    wanted: dict[int, int] = {}
    for seq in tables:
        for index, block_id in enumerate(allocator.block_table(seq.seq_id)[:ring]):
            start = index * size
            filled[block_id] = max(filled.get(block_id, 0), min(size, _num_states(seq) - start))
            if ring is None:
                # Of those who share a tail the last one in running order writes in place.
                wanted[block_id] = min(size, _len_in_place(seq) - start)
            else:
                wanted[block_id] = max(wanted.get(block_id, 0), min(size, seq.final_len - start))
    return list(filled.values()), list(wanted.values())


def _is_beam(seq: Sequence) -> bool:
    return seq.request.sampling.beam_width > 0


def _len_in_place(seq: Sequence) -> int:
    """Slots that will be filled in its blocks.

    While it holds the prompt for siblings that will fork, the last who writes into its last block does so in place.
    """
    group = seq.group
    if group is None or group.is_beam or not group.unforked:
        return seq.final_len
    writers = [member for member in group.members if member.final_len > member.prompt_len]
    return writers[-1].final_len if writers else seq.final_len


def _num_states(seq: Sequence) -> int:
    """Stored tokens that will be read: a superfluous step stores one more."""
    return min(seq.num_computed_tokens, seq.final_len)


def check_parts(parts: Parts, capacity: int, step: int) -> None:
    """Law 12. Raises LawViolation."""
    if min(parts) < 0 or sum(parts) != capacity:
        raise LawViolation(f"law 12: step {step}: ledger parts {parts} sum to {sum(parts)}, capacity is {capacity}")
