"""A Hypothesis state machine over everything an allocator can be told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvsim.memory.interface import KVAllocator
from kvsim.testing.harness import NAMESPACES, Features, Harness
from kvsim.testing.model import ModelSequence
from kvsim.types import SeqId

Factory = Callable[[], KVAllocator]

_MAX_LIVE = 10
_MAX_OUTPUT_BLOCKS = 8

picks = st.integers(0, 63)
"""Which of the sequences at hand, modulo their number."""
edges = st.tuples(st.integers(0, 3), st.sampled_from((0, 0, 1, -1, 2)))
"""A length as blocks and slots beyond: exact multiples of the block size, and their neighbours."""
texts = st.integers(0, 1)
"""Which of few texts, so that equal ones meet."""


class AllocatorMachine(RuleBasedStateMachine):
    """Allocate, append, fork, free, abort, swap and register in any order, with shared prefixes and exhaustion.

    Subclass it with `factory` (and `features`), or let `machine_for` do so; then `TestMine = machine.TestCase`.
    """

    factory: ClassVar[Factory]
    features: ClassVar[Features] = Features()
    num_examples: ClassVar[int] = 0
    num_steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_examples += 1
        self.harness = Harness(type(self).factory(), self.features)
        self._next_id = 0
        self._gone: dict[SeqId, ModelSequence] = {}
        self._said: list[tuple[tuple[int, ...], int]] = []
        """What sequences stored when they were last looked at, and in which namespace."""

    @property
    def _has_running(self) -> bool:
        return bool(self.harness.running())

    @rule(system=texts, shared=edges, own=edges, text=texts, namespace=st.integers(0, 5), watermark=st.integers(0, 2))
    def allocate(
        self, system: int, shared: tuple[int, int], own: tuple[int, int], text: int, namespace: int, watermark: int
    ) -> None:
        """A prompt that begins with part of a system prompt; one of two in three is in the plain namespace."""
        if len(self.harness.sequences) >= _MAX_LIVE:
            return
        prompt = self._system(system)[: self._length(shared)] + self._own(text, max(1, self._length(own)))
        self._allocate(prompt, namespace if namespace < len(NAMESPACES) else 0, watermark)

    @precondition(lambda self: self._said)
    @rule(
        pick=picks,
        extra=st.sampled_from((0, 0, 1, 2, -1)),
        own=texts,
        is_changed=st.booleans(),
        namespace=st.integers(-6, 3),
    )
    def ask_again(self, pick: int, extra: int, own: int, is_changed: bool, namespace: int) -> None:
        """A prompt that repeats what another sequence stored, whole or up to a block's end, and perhaps goes on.

        A token short of that it may go on otherwise: then that token alone tells the block from the other's. Or the
        namespace does.
        """
        said, its_own = self._said[pick % len(self._said)]
        whole = len(said) // self.harness.block_size * self.harness.block_size
        more = 2 if extra < 0 and is_changed else max(extra, 0)
        prompt = said[: (len(said) if pick % 2 else whole) + min(extra, 0)] + self._own(own, more)
        if prompt and len(self.harness.sequences) < _MAX_LIVE:
            self._allocate(prompt, namespace if namespace >= 0 else its_own, 0)

    # It draws what `allocate` draws, in the same order: a short history begins with that one where one prompt does.
    @rule(frees=st.integers(0, 2), own=edges, shared=edges, system=texts, text=texts, without=st.integers(0, 2))
    def twins(
        self, frees: int, own: tuple[int, int], shared: tuple[int, int], system: int, text: int, without: int
    ) -> None:
        """Equal prompts of one step: neither finds the other, and then both are registered, or one of them."""
        if len(self.harness.sequences) + 1 >= _MAX_LIVE:
            return
        prompt = self._system(system)[: self._length(shared)] + self._own(text, max(1, self._length(own)))
        twins = [seq_id for _ in range(2) if (seq_id := self._allocate(prompt, 0, 0))]
        for number, seq_id in enumerate(twins, start=1):
            if number != without:
                self._register(seq_id)
        for seq_id in twins[frees:][:1]:
            self._free(seq_id)

    @rule(extra=st.sampled_from((0, 0, 1)), watermark=st.integers(0, 2), pick=picks)
    def exhaust(self, extra: int, watermark: int, pick: int) -> None:
        """Take every block that is left, or one token more; perhaps by a prompt that begins as another did."""
        num_tokens = self.harness.model.num_free * self.harness.block_size + extra
        if num_tokens and len(self.harness.sequences) < _MAX_LIVE:
            said, namespace = self._said[pick // 2 % len(self._said)] if self._said and pick % 2 else ((), 0)
            prompt = said[:num_tokens] + self._own(2 + self._next_id, max(0, num_tokens - len(said)))
            self._allocate(prompt, namespace, watermark)

    @precondition(lambda self: self._has_running)
    @rule(pick=picks, length=edges)
    def append(self, pick: int, length: tuple[int, int]) -> None:
        """Store a token, or catch up with several."""
        self._append(self._pick(self.harness.running(), pick), max(1, self._length(length)))

    @precondition(lambda self: self._has_running)
    @rule(pick=picks, extra=st.sampled_from((0, 0, 1)))
    def append_all(self, pick: int, extra: int) -> None:
        """A catch-up that takes every block that is left, or one token more."""
        self._append_all(self._pick(self.harness.running(), pick), extra)

    @precondition(lambda self: self._has_running)
    @rule(rounds=st.integers(1, 3), registers=st.booleans())
    def decode(self, rounds: int, registers: bool) -> None:
        """A token for every running sequence, as an engine's step does."""
        for _ in range(rounds):
            for seq_id in self.harness.running():
                self._append(seq_id, 1)
                if registers:
                    self.harness.register(seq_id)

    @precondition(lambda self: self._has_running)
    @rule(pick=picks, behind=st.sampled_from((0, 0, 0, 1, 2)))
    def register(self, pick: int, behind: int) -> None:
        """All that is stored, or less: an engine tells what it has computed."""
        seq_id = self._pick(self.harness.running(), pick)
        stored = self.harness.sequences[seq_id].num_tokens
        self._register(seq_id, max(0, stored - behind * self.harness.block_size))

    @precondition(lambda self: self.features.fork and self.harness.sequences)
    @rule(pick=picks, text=texts, num_children=st.integers(1, 3), writes=st.integers(0, 3))
    def fork(self, pick: int, text: int, num_children: int, writes: int) -> None:
        """Parallel samples of one sequence; they may go on at once, each with a token of its own.

        Or one of them asks for a token more than there is room for, its copy of the tail included.
        """
        parent_id = self._pick(list(self.harness.sequences), pick)
        parent = self.harness.sequences[parent_id]
        family = [parent_id]
        for child in range(min(num_children, _MAX_LIVE - len(self.harness.sequences))):
            family.append(self._new_id())
            child_text = parent.tokens + self._output(text + child, len(parent.text) - parent.num_tokens)
            self.harness.fork(parent_id, family[-1], child_text)
        if writes == 1 and not parent.is_swapped:
            self._append_all(parent_id, extra=1)
        elif writes and not parent.is_swapped:
            for seq_id in family:
                self._append(seq_id, 1)

    @precondition(lambda self: self.harness.sequences)
    @rule(pick=picks, comes_back=st.integers(0, 3))
    def free(self, pick: int, comes_back: int) -> None:
        """The end of a sequence, or its abort: running or swapped. Its id may be used again at once."""
        seq_id = self._pick(list(self.harness.sequences), pick)
        self._free(seq_id)
        if comes_back == 1:
            self.come_back(list(self._gone).index(seq_id), is_new=True, registers=True)

    @precondition(lambda self: self._gone)
    @rule(pick=picks)
    def free_again(self, pick: int) -> None:
        self.harness.free_unknown(self._pick(list(self._gone), pick))

    @precondition(lambda self: self._gone)
    @rule(pick=picks, is_new=st.booleans(), registers=st.booleans())
    def come_back(self, pick: int, is_new: bool, registers: bool) -> None:
        """An id is used again: for the same text, as after a preemption by recomputation, or for a new one."""
        if len(self.harness.sequences) >= _MAX_LIVE:
            return
        seq_id = self._pick(list(self._gone), pick)
        gone = self._gone[seq_id]
        text = self._own(pick % 2, gone.num_tokens) + gone.text[gone.num_tokens :] if is_new else gone.text
        if self.harness.allocate(seq_id, text, gone.num_tokens, namespace=gone.namespace):
            del self._gone[seq_id]
            if registers:
                self._register(seq_id)

    @precondition(lambda self: self.harness.sequences)
    @rule(pick=picks)
    def allocate_again(self, pick: int) -> None:
        self.harness.allocate_again(self._pick(list(self.harness.sequences), pick))

    @precondition(lambda self: self.harness.sequences)
    @rule()
    def free_all(self) -> None:
        for seq_id in list(self.harness.sequences):
            self._free(seq_id)

    @precondition(lambda self: self.harness.has_swap and self._has_running)
    @rule(pick=picks, with_sharers=st.booleans(), stays=st.booleans(), registers=st.booleans())
    def swap_out(self, pick: int, with_sharers: bool, stays: bool, registers: bool) -> None:
        """They may stay out, be forked or freed there, or come back at once."""
        seq_id = self._pick(self.harness.running(), pick)
        is_done = self.harness.swap_out(self.harness.sharers(seq_id) if with_sharers else [seq_id])
        if is_done and not stays:
            self.swap_in(self.harness.swapped().index(seq_id), with_sharers, registers)

    @precondition(lambda self: self.harness.has_swap and self.harness.swapped())
    @rule(pick=picks, with_sharers=st.booleans(), registers=st.booleans())
    def swap_in(self, pick: int, with_sharers: bool, registers: bool) -> None:
        """They come back into new blocks, which the prefix cache does not know before it is told."""
        seq_id = self._pick(self.harness.swapped(), pick)
        returned = self.harness.sharers(seq_id) if with_sharers else [seq_id]
        if self.harness.swap_in(returned) and registers:
            for returned_id in returned:
                self.harness.register(returned_id)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self._empty()
        finally:
            if sys.exc_info()[0] is not None:
                note(f"As the allocator was told it:\n{self.harness.history}")
        type(self).num_steps += self.harness.num_checks

    def _empty(self) -> None:
        """When all sequences are gone both pools are whole: two that share what fills the host go there twice."""
        for seq_id in list(self.harness.sequences):
            self._free(seq_id)
        num_blocks = min(self.harness.model.num_free, self.harness.model.num_host_free)
        if not num_blocks or not self.harness.has_swap:
            return
        self._allocate(self._own(2 + self._next_id, num_blocks * self.harness.block_size), 0, 0)
        if self.features.fork and self._has_running:
            self.fork(pick=0, text=0, num_children=1, writes=0)
        for _ in range(2):
            # Regions may have no room for it in one piece.
            if self._has_running and self.harness.swap_out(self.harness.running()):
                self.harness.swap_in(self.harness.swapped())

    def _allocate(self, prompt: tuple[int, ...], namespace: int, watermark: int) -> SeqId | None:
        """The new sequence, or None if it was refused."""
        text = prompt + self._output(0, _MAX_OUTPUT_BLOCKS * self.harness.block_size)
        seq_id = self._new_id()
        is_done = self.harness.allocate(seq_id, text, len(prompt), namespace=namespace, watermark=watermark)
        return seq_id if is_done else None

    def _register(self, seq_id: SeqId, num_tokens: int | None = None) -> None:
        self.harness.register(seq_id, num_tokens)
        seq = self.harness.sequences[seq_id]
        self._said.append((seq.tokens, seq.namespace))

    def _append(self, seq_id: SeqId, num_tokens: int) -> None:
        seq = self.harness.sequences[seq_id]
        num_tokens = min(num_tokens, len(seq.text) - seq.num_tokens)
        if num_tokens > 0:
            self.harness.append(seq_id, num_tokens)

    def _append_all(self, seq_id: SeqId, extra: int) -> None:
        seq, model = self.harness.sequences[seq_id], self.harness.model
        num_blocks = len(seq.cells) + model.num_free - model.is_tail_copied(seq_id)
        self._append(seq_id, num_blocks * self.harness.block_size - seq.num_tokens + extra)

    def _free(self, seq_id: SeqId) -> None:
        self._gone[seq_id] = self.harness.sequences[seq_id]
        self.harness.free(seq_id)

    def _pick(self, choices: list[SeqId], pick: int) -> SeqId:
        return choices[pick % len(choices)]

    def _length(self, edge: tuple[int, int]) -> int:
        return max(0, edge[0] * self.harness.block_size + edge[1])

    def _new_id(self) -> SeqId:
        self._next_id += 1
        return f"s{self._next_id}"

    def _system(self, which: int) -> tuple[int, ...]:
        return tuple(1000 * which + position for position in range(4 * self.harness.block_size))

    def _own(self, which: int, length: int) -> tuple[int, ...]:
        return tuple(100_000 + 1000 * which + position for position in range(length))

    def _output(self, which: int, length: int) -> tuple[int, ...]:
        return tuple(10_000_000 + 1000 * which + position for position in range(length))


def machine_for(factory: Factory, features: Features = Features()) -> type[AllocatorMachine]:  # noqa: B008
    """An `AllocatorMachine` class over allocators made by `factory`, with counters of its own."""
    if not callable(factory):
        raise TypeError(
            f"the factory is {factory!r}; every history begins with a fresh allocator, so give a class or a function "
            "that takes nothing and returns one"
        )
    namespace: dict[str, Any] = {"factory": staticmethod(factory), "features": features}
    return type("AllocatorMachineUnderTest", (AllocatorMachine,), namespace | {"num_examples": 0, "num_steps": 0})
