"""A step plan in the making."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

from kvsim.memory.interface import BlockCopy, BlockMove
from kvsim.request import Group, Sequence
from kvsim.scheduling.plan import (
    Admission,
    Fork,
    Preemption,
    PrefillChunk,
    StepOutcome,
    StepPlan,
    StepShape,
    TableUpdate,
)

NOBODY_WAITS = (False, 0, "")
"""`waits_for_memory`, `head_slots` and `head_wait` of a plan if no head of the line is refused."""

UNLIMITED = 1 << 62
"""A token budget that no step exhausts."""


# A plan is made at every step, and a call with two dozen arguments takes several times as long as filling its tuple:
# so plans and outcomes are filled field by field, in order.
_new = tuple.__new__


class PendingStep:
    """A step that was planned and not yet applied: who computes in it.

    `num_bulk` counts the calendar's decodes, `decodes` lists the others: nobody, in most steps.
    """

    __slots__ = ("decodes", "is_decode_tick", "num_bulk", "prefills", "tick")

    def __init__(self, tick: int, num_bulk: int = 0) -> None:
        self.tick = tick
        self.num_bulk = num_bulk
        self.is_decode_tick = True
        self.decodes: Seq[Sequence] = ()
        self.prefills: Seq[PrefillChunk] = ()


class PlanBuilder(PendingStep):
    """What one step will do, as the phases decide it; `budget` are the tokens left."""

    __slots__ = (
        "admitted",
        "budget",
        "charges_members",
        "copies",
        "entries_of",
        "grown",
        "head_slots",
        "head_wait",
        "new_rows",
        "num_crossed",
        "num_new_entries",
        "num_new_rows",
        "preempted",
        "resumed",
        "skipped",
        "step",
        "swap_in",
        "swap_out",
        "threshold",
        "updates",
        "waits_for_memory",
    )

    decodes: list[Sequence]
    prefills: list[PrefillChunk]

    def __init__(self, step: int, tick: int, budget: int, threshold: int) -> None:
        super().__init__(tick)
        self.decodes = []
        self.prefills = []
        self.step = step
        self.budget = budget
        self.charges_members = False
        """The members of the calendar were taken off the budget, all at once."""
        self.threshold = threshold
        self.admitted: list[Admission] = []
        self.resumed: list[Sequence] = []
        self.grown: list[Sequence] = []
        self.entries_of: dict[Sequence, int] = {}
        """Table entries that changed, of whole new rows and of those of `grown` that did not cross."""
        self.preempted: list[Preemption] = []
        self.skipped: list[Sequence] = []
        self.copies: list[BlockCopy] = []
        self.swap_out: list[BlockMove] = []
        self.swap_in: list[BlockMove] = []
        self.updates: list[TableUpdate] = []
        self.new_rows: list[Sequence] = []
        """Those that were forked, or come back from the host: every entry of their tables is new."""
        self.num_crossed = 0
        """How many at the head of `grown` are members of the calendar; each of these took exactly one block."""
        self.num_new_entries = 0
        self.num_new_rows = 0
        self.waits_for_memory = False
        self.head_slots = 0
        self.head_wait = ""

    def build(
        self,
        context_tokens: int,
        num_table_entries: int,
        decodes: tuple[Sequence, ...] | None,
        updates: tuple[TableUpdate, ...],
        counts: tuple[int, int, int, int],
    ) -> StepPlan:
        copies = self.copies
        shape = (
            self.num_bulk + len(self.decodes),
            context_tokens,
            tuple([(start, num_tokens) for _, start, num_tokens, _ in self.prefills]),
            len(copies),
            sum(copy.num_tokens for copy in copies) if copies else 0,
            len(self.swap_out),
            len(self.swap_in),
            self.num_new_entries,
            self.num_new_rows,
            num_table_entries,
            0,  # num_moved_slots
            self.num_new_rows,
            (0, 0),  # padded_batch
        )
        plan = (
            self.step,
            _new(StepShape, shape),
            self.is_decode_tick,
            decodes,
            tuple(self.prefills),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.grown),
            tuple(self.preempted),
            (),  # rejected
            tuple(self.skipped),
            tuple(copies),
            tuple(self.swap_out),
            tuple(self.swap_in),
            updates,
            *counts,
            self.waits_for_memory,
            self.head_slots,
            self.head_wait,
            self.num_crossed,
            self.tick,
            (),  # released
            (),  # moves
            0,  # num_superfluous
            False,  # is_quiet
        )
        return _new(StepPlan, plan)

    @property
    def head(self) -> tuple[bool, int, str]:
        """What the plan says of the head of the line."""
        return self.waits_for_memory, self.head_slots, self.head_wait

    @property
    def is_quiet(self) -> bool:
        """Nothing happened but that members of the calendar took a block each."""
        return not (
            self.prefills
            or self.decodes
            or self.preempted
            or self.resumed
            or self.skipped
            or self.copies
            or self.num_new_rows > self.num_crossed
        )

    def note_row(self, seq: Sequence, num_entries: int) -> None:
        """A sequence was forked, or comes back from the host."""
        self.new_rows.append(seq)
        self.entries_of[seq] = num_entries
        self.num_new_entries += num_entries
        self.num_new_rows += 1

    def note_growth(self, seq: Sequence, num_new: int, num_copies: int) -> bool:
        """A table got longer, or its tail was copied; returns whether it was there before this step.

        Where the whole row is new a copied tail is no second change of its entry.
        """
        self.grown.append(seq)
        is_old = seq not in self.entries_of
        num_entries = num_new + num_copies if is_old else num_new
        self.entries_of[seq] = self.entries_of.get(seq, 0) + num_entries
        self.num_new_entries += num_entries
        self.num_new_rows += is_old
        return is_old

    def drop(self, seq: Sequence) -> None:
        """A sequence that is preempted may have had its turn: its tokens are given back to the budget."""
        if seq in self.grown:
            self.num_crossed -= self.grown.index(seq) < self.num_crossed
            self.grown.remove(seq)
            self.entries_of.setdefault(seq, 1)
        if seq in self.entries_of:
            self.num_new_entries -= self.entries_of.pop(seq)
            self.num_new_rows -= 1
        if seq in self.new_rows:
            self.new_rows.remove(seq)
        if seq in self.skipped:
            self.skipped.remove(seq)
        if seq in self.decodes:
            self.decodes.remove(seq)
            self.budget += 1
        self.updates = [update for update in self.updates if update.seq is not seq]
        for chunk in self.prefills:
            if chunk.seq is seq:
                self.prefills.remove(chunk)
                self.budget += chunk.num_tokens
                break


def quiet_plan(
    step: int,
    tick: int,
    num_decodes: int,
    context_tokens: int,
    grown: tuple[Sequence, ...],
    num_table_entries: int,
    counts: tuple[int, int, int, int],
    head: tuple[bool, int, str] = NOBODY_WAITS,
) -> StepPlan:
    """The plan of a step of decodes that all go on; each of `grown` takes one block.

    `counts`: running requests, their sequences, waiting and swapped requests. `head`: `waits_for_memory`, `head_slots`
    and `head_wait`.
    """
    num_new = len(grown)
    shape = (num_decodes, context_tokens, (), 0, 0, 0, 0, num_new, num_new, num_table_entries, 0, num_new, (0, 0))
    running, sequences, waiting, swapped = counts
    waits, head_slots, head_wait = head
    # All fields in their order, in one tuple: `test_quiet_plan_has_every_field` knows them by their names.
    plan = (step, _new(StepShape, shape), True, None, (), (), (), grown, (), (), (), (), (), (), (),
            running, sequences, waiting, swapped, waits, head_slots, head_wait, num_new, tick,
            (), (), 0, True)  # fmt: skip
    return _new(StepPlan, plan)


class OutcomeBuilder:
    """What a step did, in the making."""

    __slots__ = (
        "advanced",
        "beam_groups",
        "delivered",
        "ended",
        "finished_requests",
        "forks",
        "held_back",
        "num_emitted",
        "pruned",
        "started",
    )

    def __init__(self, num_emitted: int) -> None:
        self.num_emitted = num_emitted
        self.started: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.pruned: list[Sequence] = []
        self.forks: list[Fork] = []
        self.finished_requests: list[str] = []
        self.delivered: list[Sequence] = []
        self.held_back: list[Sequence] = []
        self.advanced: list[Group] = []
        """Beam groups that emitted."""
        self.beam_groups: list[Group] = []
        """Beam groups of which a member had its turn."""

    def build(self) -> StepOutcome:
        outcome = (
            self.num_emitted,
            tuple(self.started),
            tuple(self.ended),
            tuple(self.pruned),
            tuple(self.forks),
            tuple(self.finished_requests),
            tuple(self.delivered),
            (),  # retained
            (),  # released
            tuple(self.held_back),
        )
        return _new(StepOutcome, outcome)


@lru_cache(maxsize=4096)
def quiet_outcome(num_emitted: int) -> StepOutcome:
    """The outcome of a step of decodes that all go on: there are few different ones."""
    return StepOutcome(num_emitted)
