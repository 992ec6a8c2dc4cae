"""Letting requests in: what the head of the line asks for, whether it is there, and what it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from kvsim.memory.interface import NO_MATCH, PrefixMatch
from kvsim.request import Group, Sequence, Status
from kvsim.scheduling.builder import UNLIMITED, PlanBuilder
from kvsim.scheduling.emission import TokenEmission
from kvsim.scheduling.engine_state import Refusal
from kvsim.scheduling.plan import Admission, PrefillChunk
from kvsim.types import AllocStatus, ScenarioError

_OK = AllocStatus.OK


class RequestAdmission(TokenEmission):
    """The admissions of an iteration, and the questions that go before them."""

    def _admit_waiting(self, step: PlanBuilder) -> None:
        """Admit from the head of the queue until the first refusal; nobody overtakes."""
        set_aside: list[Group] = []
        while self.waiting and step.budget > 0 and not self.swapped:
            group = self.waiting.head()
            if self.num_seats + group.num_seats > self.max_num_seqs:
                step.head_wait = "sequence limit"
                break
            if self.is_set_aside(group):
                set_aside.append(self.waiting.pop_head())
            elif not self._admit(group, step):
                if self._remembers_refusals and step.head_wait == "blocks" and not set_aside:
                    self._refusal = Refusal(group, self.allocator.num_free_blocks, step.head)
                break
        if self.waiting and step.budget <= 0 and not step.head_wait:
            step.head_wait = "token budget"
        if set_aside:
            step.head_wait = step.head_wait or "LoRA limit"
            self.waiting.put_back(set_aside)

    def is_set_aside(self, group: Group) -> bool:
        """A limit other than memory skips this group and lets others pass."""
        return False

    def _admit(self, group: Group, step: PlanBuilder) -> bool:
        """Admit the head of the queue if the budget and the memory allow."""
        leader = group.seqs[0]
        known = group.num_known_tokens
        prefix = self._match(leader, known)
        num_tokens = known - prefix.num_tokens
        if num_tokens > step.threshold:
            num_tokens = step.threshold
        if num_tokens > step.budget:
            if not self.enable_chunked_prefill:
                step.head_wait = "token budget"
                return False
            num_tokens = step.budget
        end = prefix.num_tokens + num_tokens
        asked = self._num_gate_tokens(group, known) if self.admits_full_prompt else end
        if not self._has_room(group, asked, prefix, step):
            step.waits_for_memory = True
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

    def _num_gate_tokens(self, group: Group, known: int) -> int:
        """What whole-prompt admission asks room for: all known tokens, of siblings that will fork again as well."""
        if not group.unforked or not self._forks_again(group):
            return known
        longest = max(seq.num_tokens for seq in group.members)
        return self._num_worst_blocks(group, longest) * self.allocator.block_size

    def _forks_again(self, group: Group) -> bool:
        """Its samples have tokens of their own, and lost their blocks."""
        return bool(group.unforked) and any(seq.num_output_tokens for seq in group.members)

    def _match(self, seq: Sequence, num_known: int) -> PrefixMatch:
        if not self.enable_prefix_caching:
            return NO_MATCH
        return self.allocator.match_prefix(self._keys(seq), num_known)

    def _has_room(self, group: Group, num_tokens: int, prefix: PrefixMatch, step: PlanBuilder) -> bool:
        if self.gate is not None:
            self._tell_all(step)
            if not self.gate(group, self.allocator):
                step.head_wait = "gate"
                return False
        reserved = self._num_reserved(group.seqs[0], num_tokens) if self.reservation else 0
        kept = self.watermark_blocks if self.running else 0
        if group.unforked:
            kept += self._num_sibling_blocks(group, num_tokens)
        status = self.allocator.can_allocate(num_tokens, prefix=prefix, reserve_tokens=reserved, watermark_blocks=kept)
        if status is _OK:
            return True
        step.head_wait = "blocks"
        step.head_slots = num_tokens + reserved
        return False

    def _num_sibling_blocks(self, group: Group, num_tokens: int) -> int:
        """With a window, the blocks of siblings that will fork again: the allocator is asked for one ring alone."""
        ring = getattr(self.allocator, "window_blocks", 0)
        if not (ring and self.admits_full_prompt and self._forks_again(group)):
            return 0
        return max(0, -(-num_tokens // self.allocator.block_size) - ring)

    def _num_reserved(self, seq: Sequence, num_tokens: int) -> int:
        """Slots to set aside beyond `num_tokens`: the rest of the prompt, and the reservation for the output."""
        if self.reservation is None:
            return 0
        return max(0, seq.prompt_len + self.reservation(seq.request) - num_tokens)

    def _allocate(self, seq: Sequence, num_tokens: int, prefix: PrefixMatch, step: PlanBuilder) -> None:
        allocator = self.allocator
        keys = self._keys(seq) if self.enable_prefix_caching else None
        reserved = self._num_reserved(seq, num_tokens) if self.reservation else 0
        allocator.allocate(seq.seq_id, num_tokens, keys=keys, prefix=prefix, reserve_tokens=reserved)
        seq.num_computed_tokens = prefix.num_tokens
        num_slots = allocator.num_slots(seq.seq_id)
        if reserved and num_slots < num_tokens + reserved:
            raise ScenarioError(
                f"scheduler.reservation: {type(allocator).__name__} gave {num_slots} of {num_tokens + reserved} slots: "
                f"it does not set reserve_tokens aside, and without that a reservation cannot be kept; write "
                f"reservation: null, or let allocate() take num_tokens + reserve_tokens"
            )
        num_entries = num_slots // allocator.block_size
        self.num_table_entries += num_entries
        step.num_new_entries += num_entries
        step.num_new_rows += 1
        self._note_planned(seq, num_tokens)

    def _note_planned(self, seq: Sequence, end: int) -> None:
        """A sequence has slots for its first `end` tokens."""

    def _count_lookup(self, group: Group, num_known: int, prefix: PrefixMatch) -> None:
        if not self.enable_prefix_caching:
            return
        if group.was_preempted:
            self.num_requeried_tokens += num_known
            self.num_rehit_tokens += prefix.num_tokens
        else:
            self.num_queried_tokens += num_known
            self.num_hit_tokens += prefix.num_tokens

    def _fits_back(self, group: Group) -> bool:
        watermark = self.watermark_blocks if self.running else 0
        return self.allocator.num_free_blocks - self._num_to_return(group) >= watermark

    def _num_to_return(self, group: Group) -> int:
        """The blocks that it has on the host, and those that its next tokens take."""
        tables = {seq: self.allocator.block_table(seq.seq_id) for seq in group.seqs}
        return len({block_id for table in tables.values() for block_id in table}) + self._num_to_take(tables)

    def _num_to_take(self, tables: dict[Sequence, Seq[int]]) -> int:
        """Blocks that a group's next tokens take: new ones, and copies of those that several tables name."""
        size = self.allocator.block_size
        ring = getattr(self.allocator, "window_blocks", 0) or UNLIMITED
        refs = Counter(block_id for table in tables.values() for block_id in set(table))
        num_blocks = 0
        for seq, table in tables.items():
            wanted = self._num_wanted(seq)
            if wanted <= 0:
                continue
            first = seq.num_computed_tokens // size
            end = seq.num_computed_tokens + (1 if seq.is_decoding else wanted)
            for index in range(first, min(-(-end // size), first + ring)):
                place = index % ring
                if place >= len(table):
                    num_blocks += 1
                elif refs[table[place]] > 1:
                    refs[table[place]] -= 1
                    num_blocks += 1
        return num_blocks

    def _tell_all(self, step: PlanBuilder) -> None:
        """The allocator hears of the calendar's members at block boundaries only; a gate may look at what they fill."""
        for seq in self.calendar.members():
            stored = self.calendar.position(seq) + step.charges_members
            behind = stored - self.allocator.num_tokens(seq.seq_id)
            if behind > 0:
                self.allocator.append_slots(seq.seq_id, behind)

    def describe_block(self) -> str:
        queue = self.swapped or self.waiting
        if not queue:
            return "nobody waits"
        group, watermark = queue.head(), self.watermark_blocks if self.running else 0
        if self.gate is not None and not self.swapped and not self.gate(group, self.allocator):
            name = getattr(self.gate, "__name__", self.gate)
            return f"request {group.request_id!r} is waiting, and the gate ({name}) does not let it in"
        kept = f", of which {watermark} must stay free (watermark)" if watermark else ""
        return (
            f"request {group.request_id!r} is {group.seqs[0].status} and needs {self._describe_need(group)}; "
            f"the pool has {self._describe_pool()}{kept}"
        )

    def _describe_pool(self) -> str:
        return f"{self.allocator.num_free_blocks} free of {self.allocator.num_blocks}"

    def _describe_need(self, group: Group) -> str:
        """What a group waits for, in blocks or slots: as `_fits_back` and `_admit` ask."""
        if group.seqs[0].status is Status.SWAPPED:
            return f"{_blocks(self._num_to_return(group))} for what it has on the host and its next tokens"
        leader, known = group.seqs[0], group.num_known_tokens
        prefix = self._match(leader, known)
        end = min(known, prefix.num_tokens + self.max_num_batched_tokens)
        num_tokens = self._num_gate_tokens(group, known) if self.admits_full_prompt else end
        needed = -(-num_tokens // self.allocator.block_size) - len(prefix.block_ids) + prefix.num_revived
        if self.admits_full_prompt and self._forks_again(group):
            return f"{_blocks(needed)} for what its {group.num_seats} sequences held before"
        hits = f", {prefix.num_tokens} of them in the cache" if prefix.num_tokens else ""
        return f"{_blocks(needed)} for {num_tokens} tokens{hits}"


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"
