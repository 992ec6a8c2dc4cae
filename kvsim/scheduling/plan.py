"""What one engine iteration will do, and what it did, as data.

A `StepPlan` holds everything a model runner would need. `StepShape` is the part of it that costs time.
All are NamedTuples: immutable, and cheap enough to be made at every step.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsim.memory.interface import BlockCopy, BlockMove, RegionMove
from kvsim.request import Group, Sequence
from kvsim.types import BlockId


class PrefillChunk(NamedTuple):
    """Tokens `start .. start + num_tokens - 1` of a sequence are computed on top of those before them."""

    seq: Sequence
    start: int
    num_tokens: int
    is_last: bool
    """The chunk reaches the last known token, so the step samples one."""


class Admission(NamedTuple):
    """A sequence that got its table in this step."""

    seq: Sequence
    num_hit_tokens: int
    is_resumed: bool
    """It ran before, and was preempted by recompute."""


class Preemption(NamedTuple):
    """A running sequence that had to give up its memory: swapped out, or to be computed again."""

    seq: Sequence
    is_swap: bool
    num_stored_tokens: int
    """Stored tokens it had: what recompute throws away."""
    was_refused: bool = False
    """It was to be swapped and could not be, for want of room on the host: it is recomputed."""


LIMITS = {
    "sequence limit": "max_num_seqs",
    "token budget": "max_num_batched_tokens",
    "padding limit": "max_paddings",
    "LoRA limit": "max_loras",
}
"""Reasons to wait (`StepPlan.head_wait`) that are numbers of the scheduler's."""


def pushed_out(preempted: tuple[Preemption, ...]) -> list[Group]:
    """The groups that were preempted, each once however many samples it runs."""
    return list(dict.fromkeys(preemption.seq.group for preemption in preempted if preemption.seq.group))


class Rejection(NamedTuple):
    """A sequence that can never be served, and why, with the numbers."""

    seq: Sequence
    reason: str


class TableUpdate(NamedTuple):
    """Entries `start ..` of a sequence's block table changed and must reach the GPU.

    A table that goes round its window names a block again for every round: the copy of a shared block takes the place
    of its source in all of them, and is listed once.
    """

    seq: Sequence
    start: int
    block_ids: tuple[BlockId, ...]


class StepShape(NamedTuple):
    """The token and block counts that the cost model prices.

    `prefills` are pairs (start, num_tokens): the chunk attends to `start` earlier tokens and to itself.
    `context_tokens` is the sum over decodes of the tokens each attends to, its own included.
    """

    num_decodes: int = 0
    context_tokens: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    num_copies: int = 0
    num_copied_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_table_updates: int = 0
    """Table entries that changed."""
    num_table_rows: int = 0
    """Sequences whose table row changed."""
    num_table_entries: int = 0
    """Entries of all running tables: what `table_sync: every_step` uploads."""
    num_moved_slots: int = 0
    """Contiguous compaction: slots copied within the device."""
    num_alloc_decisions: int = 0
    """Round trips that `table_sync: device` would pay."""
    padded_batch: tuple[int, int] = (0, 0)
    """Engines that pad prompts (vllm-v0): (number of prompts, longest prompt); (0, 0) where nothing is padded."""

    @property
    def num_prefill_tokens(self) -> int:
        prefills = self.prefills
        return sum([num_tokens for _, num_tokens in prefills]) if prefills else 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens


class StepPlan(NamedTuple):
    """One engine iteration, decided.

    `decodes` lists the decoding sequences in running order, or is None where the calendar ran and only
    `shape.num_decodes` is known. `grown` lists the sequences whose table grew or whose tail was copied in this step
    (admitted ones are not repeated). `waits_for_memory` is true if the head of the queue was refused for space.
    """

    step: int
    shape: StepShape
    is_decode_tick: bool
    """Every running decode that is not in `skipped` emits one token in this step."""
    decodes: tuple[Sequence, ...] | None = None
    prefills: tuple[PrefillChunk, ...] = ()
    admitted: tuple[Admission, ...] = ()
    resumed: tuple[Sequence, ...] = ()
    """Swapped in."""
    grown: tuple[Sequence, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    skipped: tuple[Sequence, ...] = ()
    """Running decodes left out of this step for want of token budget."""
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockMove, ...] = ()
    swap_in: tuple[BlockMove, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    """Filled only when a scheduler was asked for detail (`detail=True`); the counts are always in `shape`."""
    num_running: int = 0
    """Requests running in this step."""
    num_sequences: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    waits_for_memory: bool = False
    head_slots: int = 0
    """Slots the refused head of the queue asks for (contiguous: to tell a hole from a shortage)."""
    head_wait: str = ""
    """Why the head of the line was not let in ("blocks", "sequence limit", "token budget", ...), if the engine says."""
    num_crossed: int = 0
    """How many at the head of `grown` are members of the calendar; each of these took exactly one block."""
    tick: int = 0
    """Decode tick of the calendar at which they took it."""
    released: tuple[Sequence, ...] = ()
    """Static batching: ended sequences whose retained memory an abort freed since the last step."""
    moves: tuple[RegionMove, ...] = ()
    """Contiguous compaction, before anything else of the step; `shape.num_moved_slots` is their total."""
    num_superfluous: int = 0
    """Asynchronous scheduling: decodes of sequences that end with the step in flight, unforeseen. What they store is
    never read: hindsight for the ledger."""
    is_quiet: bool = False
    """Nothing but decodes that go on, of which those in `grown` crossed (all of them): the other lists are empty."""

    @property
    def is_empty(self) -> bool:
        """Nothing runs in this step."""
        return self.shape.num_decodes == 0 and not self.prefills


class Fork(NamedTuple):
    """A sequence that begins with the table of another: a sample after the prompt, or a beam."""

    parent: Sequence
    child: Sequence


class StepOutcome(NamedTuple):
    """What the step produced: events only; a decode that goes on is not listed.

    `started` emitted a token that ended a prefill (the first one, or the first after a recompute) and, if they
    are not in `ended`, decode from the next decode tick on. `ended` finished with a token of this step.
    `finished_requests` are those whose last sequence ended.
    """

    num_emitted_tokens: int = 0
    started: tuple[Sequence, ...] = ()
    ended: tuple[Sequence, ...] = ()
    pruned: tuple[Sequence, ...] = ()
    """Beams that were dropped: freed before their time."""
    forks: tuple[Fork, ...] = ()
    finished_requests: tuple[str, ...] = ()
    delivered: tuple[Sequence, ...] = ()
    """Asynchronous scheduling: tokens (counted above) for sequences that were preempted while the step ran."""
    retained: tuple[Sequence, ...] = ()
    """Static batching: those of `ended` that keep their memory until the batch ends (all of it unread from now on)."""
    released: tuple[Sequence, ...] = ()
    """Static batching: sequences retained in earlier steps whose memory is free now, for the batch has ended."""
    held_back: tuple[Sequence, ...] = ()
    """Beams that emit nothing, although they are computed: others of their group had no turn in this step."""
