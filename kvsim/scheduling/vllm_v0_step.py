"""A `StepPlan` of the vllm-v0 engine in the making."""

from __future__ import annotations

from kvsim.memory.interface import BlockCopy, BlockMove
from kvsim.request import Sequence
from kvsim.scheduling.plan import (
    Admission,
    Preemption,
    PrefillChunk,
    Rejection,
    StepPlan,
    StepShape,
    TableUpdate,
)


class StepDraft:
    """What `schedule` has decided so far."""

    __slots__ = (
        "admitted",
        "context_tokens",
        "copies",
        "decodes",
        "grown",
        "head_slots",
        "head_wait",
        "longest_prompt",
        "num_decodes",
        "num_table_rows",
        "num_table_updates",
        "preempted",
        "prefills",
        "rejected",
        "resumed",
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
        self.num_table_rows = 0
        self.longest_prompt = 0
        self.decodes: list[Sequence] | None = []
        self.num_decodes = 0
        self.context_tokens = 0
        self.head_wait = ""
        self.waits_for_memory = False
        self.head_slots = 0

    @property
    def is_prompt_step(self) -> bool:
        """Prompts run, or were refused for good: nothing else happens in this step."""
        return bool(self.prefills or self.rejected)

    def wait_for_blocks(self, num_slots: int) -> None:
        """Somebody is refused the `num_slots` slots it asks for."""
        self.head_wait = "blocks"
        self.waits_for_memory = True
        self.head_slots = num_slots

    def note_table(self, num_entries: int) -> None:
        """One table changed in `num_entries` entries."""
        self.num_table_rows += 1
        self.num_table_updates += num_entries

    def plan(
        self,
        step: int,
        num_table_entries: int,
        *,
        num_running: int,
        num_sequences: int,
        num_waiting: int,
        num_swapped: int,
    ) -> StepPlan:
        return StepPlan(
            step=step,
            shape=self._shape(num_table_entries),
            is_decode_tick=self.num_decodes > 0,
            decodes=None if self.decodes is None else tuple(self.decodes),
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
            num_sequences=num_sequences,
            num_waiting=num_waiting,
            num_swapped=num_swapped,
            waits_for_memory=self.waits_for_memory,
            head_slots=self.head_slots,
            head_wait=self.head_wait,
        )

    def _shape(self, num_table_entries: int) -> StepShape:
        return StepShape(
            num_decodes=self.num_decodes,
            context_tokens=self.context_tokens,
            prefills=tuple([(chunk.start, chunk.num_tokens) for chunk in self.prefills]),
            num_copies=len(self.copies),
            num_copied_tokens=sum([copy.num_tokens for copy in self.copies]),
            num_swapped_out_blocks=len(self.swap_out),
            num_swapped_in_blocks=len(self.swap_in),
            num_table_updates=self.num_table_updates,
            num_table_rows=self.num_table_rows,
            num_table_entries=num_table_entries,
            num_alloc_decisions=self.num_table_rows,
            padded_batch=(len(self.prefills), self.longest_prompt),
        )
