"""A paged allocator as its rules are written: lists that are searched, and a text for every block.

It says what each command does to which block, in which order blocks are handed out, and what is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

Text = tuple[int, ...]
Match = tuple[int, tuple[int, ...], int, int]
"""Tokens, blocks, blocks that nobody references, tokens asked for."""


class Refused(Exception):
    """The command changes nothing."""


class TooFew(Refused):
    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)


class PlainDevice:
    """Reference counts, and one list of free blocks."""

    def __init__(self, num_blocks: int, policy: str, first: int = 0) -> None:
        self.policy = policy
        self.free = list(range(first, num_blocks))
        self.ref = [0] * num_blocks
        self.was_shared = [False] * num_blocks

    def in_order(self) -> list[int]:
        """Free blocks as the allocator lists them."""
        return sorted(self.free, key=self.was_shared.__getitem__) if self.policy == "exclusive_first" else self.free

    def take(self) -> int:
        block_id = self.in_order()[-1 if self.policy == "lifo" else 0]
        self.free.remove(block_id)
        self.ref[block_id], self.was_shared[block_id] = 1, False
        return block_id

    def refer(self, block_id: int) -> None:
        if not self.ref[block_id]:
            self.free.remove(block_id)
        self.ref[block_id] += 1
        self.was_shared[block_id] = True

    def release(self, blocks: list[int], texts: dict[int, Text]) -> None:
        freed = []
        for block_id in blocks if self.policy == "lifo" else blocks[::-1]:
            self.ref[block_id] -= 1
            if not self.ref[block_id]:
                freed.append(block_id)
        front = [block_id for block_id in freed if self.policy == "lru" and block_id not in texts]
        self.free = front + self.free + [block_id for block_id in freed if block_id not in front]


class PlainSequence:
    def __init__(self, text: Text, blocks: list[int], num_tokens: int, num_registered: int = 0) -> None:
        self.text, self.blocks, self.num_tokens, self.num_registered = text, blocks, num_tokens, num_registered
        self.is_swapped = False


class PlainPaged:
    """Texts of sequences without keys are empty: nothing of theirs is ever registered."""

    def __init__(self, num_blocks: int, size: int, num_host: int, caching: bool, policy: str, first: int) -> None:
        self.size, self.caching, self.num_blocks = size, caching, num_blocks - first
        self.gpu = PlainDevice(num_blocks, policy, first)
        self.host = PlainDevice(num_host, "lifo" if policy == "lifo" else "fifo")
        self.sequences: dict[int, PlainSequence] = {}
        self.texts: dict[int, Text] = {}
        self.carriers: dict[Text, list[int]] = {}
        self.evicted: list[int] = []

    def _pop(self) -> int:
        block_id = self.gpu.take()
        if block_id in self.texts:
            self._forget(block_id)
            self.evicted.append(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        self.carriers[self.texts.pop(block_id)].remove(block_id)

    def _get(self, seq: int) -> PlainSequence:
        if seq not in self.sequences or self.sequences[seq].is_swapped:
            raise Refused
        return self.sequences[seq]

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def match(self, text: Text, num_tokens: int) -> Match:
        found: list[int] = []
        for end in range(self.size, min(num_tokens - 1, len(text)) + 1, self.size):
            carriers = self.carriers.get(text[:end])
            if not carriers:
                break
            found.append(carriers[0])
        num_idle = sum(not self.gpu.ref[block_id] for block_id in found)
        return (len(found) * self.size, tuple(found), num_idle, num_tokens) if self.caching else (0, (), 0, 0)

    def allocate(self, owners: Sequence[int], num_tokens: int, text: Text, match: Match) -> None:
        hits = match[1]
        if self.sequences.keys() & set(owners) or num_tokens < max(1, match[0]):
            raise Refused
        if any(self.texts.get(hit) != text[: (k + 1) * self.size] for k, hit in enumerate(hits)):
            raise Refused
        num_new = self.num_blocks_of(num_tokens) - len(hits)
        num_free = len(self.gpu.free) - sum(not self.gpu.ref[hit] for hit in hits)
        if num_new > num_free:
            raise TooFew(num_new, num_free)
        for hit in hits:
            self.gpu.refer(hit)
        blocks = [*hits, *(self._pop() for _ in range(num_new))]
        for owner in owners:
            self.sequences[owner] = PlainSequence(text, blocks.copy(), num_tokens, len(hits))
        for block_id in blocks * (len(owners) - 1):
            self.gpu.refer(block_id)

    def copies_tail(self, sequence: PlainSequence) -> bool:
        return sequence.num_tokens % self.size > 0 and self.gpu.ref[sequence.blocks[-1]] > 1

    def num_needed(self, sequence: PlainSequence, num_tokens: int) -> int:
        num_blocks = self.num_blocks_of(sequence.num_tokens + num_tokens)
        return num_blocks - len(sequence.blocks) + self.copies_tail(sequence)

    def append(self, seq: int, num_tokens: int) -> tuple[tuple[int, int, int], ...]:
        sequence = self._get(seq)
        if num_tokens < 1:
            raise Refused
        needed = self.num_needed(sequence, num_tokens)
        if needed > len(self.gpu.free):
            raise TooFew(needed, len(self.gpu.free))
        copies: tuple[tuple[int, int, int], ...] = ()
        if self.copies_tail(sequence):
            old, sequence.blocks[-1] = sequence.blocks[-1], self._pop()
            self.gpu.ref[old] -= 1
            copies = ((old, sequence.blocks[-1], sequence.num_tokens % self.size),)
        sequence.num_tokens += num_tokens
        while len(sequence.blocks) < self.num_blocks_of(sequence.num_tokens):
            sequence.blocks.append(self._pop())
        return copies

    def retract(self, seq: int, num_tokens: int, copies: tuple[tuple[int, int, int], ...]) -> None:
        """Right after the append: nobody came or went since."""
        sequence = self._get(seq)
        self.unregister(seq, sequence.num_tokens - num_tokens)
        sequence.num_tokens -= num_tokens
        num_blocks = self.num_blocks_of(sequence.num_tokens)
        unused, sequence.blocks = sequence.blocks[num_blocks:], sequence.blocks[:num_blocks]
        for old, new, _ in copies:
            self.gpu.refer(old)
            sequence.blocks[-1] = old
            unused.append(new)
        self.gpu.release(unused, self.texts)

    def register(self, seq: int, num_tokens: int) -> None:
        sequence = self._get(seq)
        if self.caching and sequence.text and num_tokens > sequence.num_tokens:
            raise Refused
        for index in range(sequence.num_registered, min(num_tokens, len(sequence.text)) // self.size):
            if not self.caching:
                return
            block_id, text = sequence.blocks[index], sequence.text[: (index + 1) * self.size]
            if block_id not in self.texts:
                self.texts[block_id] = text
                self.carriers.setdefault(text, []).append(block_id)
            assert self.texts[block_id] == text
            sequence.num_registered = index + 1

    def unregister(self, seq: int, num_tokens: int) -> None:
        sequence = self._get(seq)
        untold = sequence.blocks[num_tokens // self.size : sequence.num_registered]
        if any(self.gpu.ref[block_id] > 1 for block_id in untold):
            raise Refused
        sequence.num_registered -= len(untold)
        for block_id in untold:
            self._forget(block_id)

    def grow_each(self, seqs: Sequence[int]) -> int:
        for number, sequence in enumerate([self._get(seq) for seq in seqs]):
            if self.copies_tail(sequence) or not self.gpu.free:
                return number
            sequence.num_tokens = len(sequence.blocks) * self.size + 1
            sequence.blocks.append(self._pop())
        return len(seqs)

    def fill_each(self, seqs: Sequence[int]) -> None:
        if any(self.copies_tail(self._get(seq)) for seq in seqs):
            raise Refused
        for seq in seqs:
            sequence = self.sequences[seq]
            sequence.num_tokens = len(sequence.blocks) * self.size
            self.register(seq, sequence.num_tokens)

    def fork(self, parent: int, child: int, text: Text) -> None:
        if parent not in self.sequences or child in self.sequences:
            raise Refused
        old = self.sequences[parent]
        for block_id in old.blocks:
            (self.host if old.is_swapped else self.gpu).refer(block_id)
        new = self.sequences[child] = PlainSequence(text, old.blocks.copy(), old.num_tokens, old.num_registered)
        new.is_swapped = old.is_swapped

    def free(self, seq: int) -> None:
        if seq not in self.sequences:
            raise Refused
        sequence = self.sequences.pop(seq)
        (self.host if sequence.is_swapped else self.gpu).release(sequence.blocks, self.texts)

    def swap(self, seqs: Sequence[int], *, is_out: bool) -> tuple[tuple[int, int], ...] | None:
        if len(set(seqs)) < len(seqs) or any(
            seq not in self.sequences or self.sequences[seq].is_swapped == is_out for seq in seqs
        ):
            raise Refused
        source, target = (self.gpu, self.host) if is_out else (self.host, self.gpu)
        named = [block_id for seq in seqs for block_id in self.sequences[seq].blocks]
        if len(set(named)) > len(target.free):
            return None
        moves: dict[int, int] = {}
        for block_id in named:
            if block_id in moves:
                target.refer(moves[block_id])
            else:
                moves[block_id] = target.take() if is_out else self._pop()
        for seq in seqs:
            sequence = self.sequences[seq]
            source.release(sequence.blocks, self.texts if is_out else {})
            sequence.blocks = [moves[block_id] for block_id in sequence.blocks]
            sequence.is_swapped, sequence.num_registered = is_out, 0
        return tuple(moves.items())
