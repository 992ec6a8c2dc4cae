"""Mutable halves of a `StepPlan` and a `StepOutcome`, while the vllm-v0 engine is making them."""

from __future__ import annotations

from kvsim.memory.interface import BlockCopy, BlockMove
from kvsim.request import Sequence
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


class StepDraft:
    """What `schedule` has decided so far."""

    __slots__ = (
        "admitted",
        "copies",
        "grown",
        "head_slots",
        "head_wait",
        "num_table_updates",
        "padded_batch",
        "preempted",
        "prefills",
        "rejected",
        "resumed",
        "rows",
        "swap_in",
        "swap_out",
        "table_updates",
        "waits_for_memory",
    )

    def __init__(self) -> None:
        self.admitted: list[Admission] = []
        self.prefills: list[PrefillChunk] = []
        self.rejected: list[Rejection] = []
        self.preempted: list[Preemption] = []
        self.resumed: list[Sequence] = []
        self.grown: list[Sequence] = []
        self.copies: list[BlockCopy] = []
        self.swap_out: list[BlockMove] = []
        self.swap_in: list[BlockMove] = []
        self.table_updates: list[TableUpdate] = []
        self.num_table_updates = 0
        self.rows = 0
        self.padded_batch = (0, 0)
        self.head_wait = ""
        self.waits_for_memory = False
        self.head_slots = 0

    @property
    def is_prompt_step(self) -> bool:
        """Prompts ran, or were refused for good: nothing else happens in this step."""
        return bool(self.prefills or self.rejected)

    def refuse(self, why: str, *, num_slots: int = 0) -> None:
        """The head of the line stays where it is; `num_slots` are the slots it asks for, if it waits for memory."""
        self.head_wait = why
        self.waits_for_memory = num_slots > 0
        self.head_slots = num_slots

    def touch_table(self, num_entries: int) -> None:
        """One table row changed in `num_entries` entries."""
        self.rows += 1
        self.num_table_updates += num_entries

    def shape(self, num_decodes: int, context_tokens: int, num_table_entries: int) -> StepShape:
        return StepShape(
            num_decodes=num_decodes,
            context_tokens=context_tokens,
            prefills=tuple([(chunk.start, chunk.num_tokens) for chunk in self.prefills]),
            num_copies=len(self.copies),
            num_copied_tokens=sum([copy.num_tokens for copy in self.copies]),
            num_swapped_out_blocks=len(self.swap_out),
            num_swapped_in_blocks=len(self.swap_in),
            num_table_updates=self.num_table_updates,
            num_table_rows=self.rows,
            num_table_entries=num_table_entries,
            num_alloc_decisions=self.rows,
            padded_batch=self.padded_batch,
        )

    def plan(
        self,
        step: int,
        shape: StepShape,
        decodes: tuple[Sequence, ...] | None,
        num_running: int,
        num_waiting: int,
        num_swapped: int,
    ) -> StepPlan:
        return StepPlan(
            step=step,
            shape=shape,
            is_decode_tick=shape.num_decodes > 0,
            decodes=decodes,
            prefills=tuple(self.prefills),
            admitted=tuple(self.admitted),
            resumed=tuple(self.resumed),
            grown=tuple(self.grown),
            preempted=tuple(self.preempted),
            rejected=tuple(self.rejected),
            copies=tuple(self.copies),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            table_updates=tuple(self.table_updates),
            num_running=num_running,
            num_sequences=shape.num_decodes + len(self.prefills),
            num_waiting=num_waiting,
            num_swapped=num_swapped,
            waits_for_memory=self.waits_for_memory,
            head_slots=self.head_slots,
            head_wait=self.head_wait,
        )


class OutcomeDraft:
    """What `complete` has applied so far."""

    __slots__ = ("ended", "finished_requests", "forks", "num_emitted_tokens", "pruned", "started")

    def __init__(self) -> None:
        self.num_emitted_tokens = 0
        self.started: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.pruned: list[Sequence] = []
        self.forks: list[Fork] = []
        self.finished_requests: list[str] = []

    def outcome(self) -> StepOutcome:
        return StepOutcome(
            num_emitted_tokens=self.num_emitted_tokens,
            started=tuple(self.started),
            ended=tuple(self.ended),
            pruned=tuple(self.pruned),
            forks=tuple(self.forks),
            finished_requests=tuple(self.finished_requests),
        )
