"""What the vllm-v0 engine asks of memory: the allocator's questions and commands, for whole groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvsim.memory import PagedAllocator
from kvsim.memory.interface import BlockCopy, Transfer
from kvsim.request import Group, Request, Sequence, Status
from kvsim.types import AllocStatus


class Growth(NamedTuple):
    """What one more token did to the last entry of a sequence's table."""

    copies: tuple[BlockCopy, ...]
    is_changed: bool


class GroupMemory:
    """Group-wise view of a paged allocator.

    `num_stored(seq)` tells the tokens a sequence stores now: while it runs in the calendar the allocator hears of
    them at block boundaries only. Asked for a group that `is_alone` on the device, and without `upstream_faults`,
    the answers are exact instead of cautious, so that a group that fits at all always goes on.
    """

    def __init__(
        self,
        allocator: PagedAllocator,
        watermark_blocks: int,
        num_stored: Callable[[Sequence], int],
        *,
        upstream_faults: bool,
    ) -> None:
        self.allocator = allocator
        self.watermark_blocks = watermark_blocks
        self.num_stored = num_stored
        self.upstream_faults = upstream_faults

    def can_admit(self, group: Group, *, is_alone: bool) -> AllocStatus:
        watermark = 0 if is_alone and not self.upstream_faults else self.watermark_blocks
        if len(group.seqs) == 1:
            status = self.allocator.can_allocate(group.seqs[0].num_tokens, watermark_blocks=watermark)
            # What fits beside no watermark at all is admitted once the device is empty.
            is_late = status is AllocStatus.NEVER and not self.upstream_faults
            return AllocStatus.LATER if is_late else status
        spare = self.allocator.num_free_blocks - self.blocks_to_admit(group)
        return AllocStatus.OK if spare >= watermark else AllocStatus.LATER

    def can_append(self, group: Group, *, is_alone: bool) -> bool:
        """One free block for each sequence, whether it needs one or not."""
        if self.allocator.can_append(len(group.seqs)):
            return True
        if self.upstream_faults or not is_alone:
            return False
        return self._blocks_to_append(group) <= self.allocator.num_free_blocks

    def can_swap_in(self, group: Group, *, is_alone: bool) -> bool:
        seq_ids = _ids(group)
        if is_alone and not self.upstream_faults:
            return self.allocator.can_swap_in(seq_ids)
        return self.allocator.can_swap_in(seq_ids, extra_blocks=len(seq_ids), watermark_blocks=self.watermark_blocks)

    def allocate(self, group: Group) -> list[int]:
        """Give every sequence of a waiting group its table; returns where each one's own tokens start.

        Samples that come back together share the full blocks of their prompt, as they did before.
        """
        parent, *others = group.seqs
        num_tokens = parent.num_tokens
        if not others:
            self.allocator.allocate(parent.seq_id, num_tokens, num_refs=self._num_refs(group))
            return [0]
        shared = self._shared_len(group.request)
        if not shared:
            for seq in group.seqs:
                self.allocator.allocate(seq.seq_id, num_tokens)
            return [0] * len(group.seqs)
        self.allocator.allocate(parent.seq_id, shared, sharers=[seq.seq_id for seq in others])
        for seq in group.seqs:
            self.allocator.append_slots(seq.seq_id, num_tokens - shared)
        return [0] + [shared] * len(others)

    def append(self, seq: Sequence) -> Growth:
        """Store one more token than the sequence stores now: at a block boundary the table grows."""
        allocator, num_stored = self.allocator, self.num_stored(seq)
        copies = allocator.append_slots(seq.seq_id, num_stored + 1 - allocator.num_tokens(seq.seq_id))
        return Growth(copies, bool(copies) or num_stored % allocator.block_size == 0)

    def catch_up(self, seq: Sequence) -> None:
        """Tell the allocator of the tokens that a settled sequence stored since its last block boundary."""
        if num_untold := seq.num_computed_tokens - self.allocator.num_tokens(seq.seq_id):
            self.allocator.append_slots(seq.seq_id, num_untold)

    def swap_out(self, group: Group) -> Transfer | None:
        return self.allocator.swap_out(_ids(group))

    def swap_in(self, group: Group) -> Transfer | None:
        return self.allocator.swap_in(_ids(group))

    def blocks_to_admit(self, group: Group) -> int:
        return self._blocks_for(group.request, group.seqs[0].num_tokens, len(group.seqs))

    def blocks_to_return(self, group: Group) -> int:
        """Blocks that the engine wants to see before it swaps a group in: its own, and one more for each sequence."""
        return self.allocator.num_swapped_blocks(_ids(group)) + len(group.seqs)

    def most_blocks(self, request: Request, max_stored_tokens: int) -> int:
        """Blocks the request takes at most, all its sequences at full length."""
        return self._blocks_for(request, max_stored_tokens, request.sampling.num_sequences)

    def describe_need(self, group: Group) -> str:
        """What a waiting or swapped group needs and what there is."""
        is_swapped = group.seqs[0].status is Status.SWAPPED
        needed = self.blocks_to_return(group) if is_swapped else self.blocks_to_admit(group)
        where = "is swapped out and" if is_swapped else "waits and"
        allocator = self.allocator
        return (
            f"request {group.request_id!r} {where} needs {needed} blocks, and {self.watermark_blocks} must stay free "
            f"(watermark); {allocator.num_free_blocks} of {allocator.num_blocks} are free"
        )

    def too_big(self, num_blocks: int) -> str:
        size, pool = self.allocator.block_size, self.allocator.num_blocks
        # By default the watermark binds nobody who is alone.
        kept = f", of which {self.watermark_blocks} must stay free (watermark)" if num_blocks <= pool else ""
        return f"needs {num_blocks} blocks ({num_blocks * size} slots), the pool has {pool} ({pool * size} slots){kept}"

    def _num_refs(self, group: Group) -> int | None:
        """The original counts ended samples in, and so never gets those blocks back."""
        num_made = group.request.sampling.n if self.upstream_faults and not group.unforked else 1
        return num_made if num_made > 1 else None

    def _blocks_to_append(self, group: Group) -> int:
        """Blocks that the next token of every sequence takes; of k sharers of a partial tail, k - 1 copy it."""
        allocator = self.allocator
        if self.num_stored(group.seqs[0]) % allocator.block_size == 0:
            return sum(allocator.num_blocks_to_append(seq.seq_id) for seq in group.seqs)
        tails = {allocator.block_table(seq.seq_id)[-1] for seq in group.seqs}
        return len(group.seqs) - len(tails)

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


def _ids(group: Group) -> list[int]:
    return [seq.seq_id for seq in group.seqs]
