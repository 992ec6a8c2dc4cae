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
        self._gone: list[SeqId] = []
        self._said: list[tuple[int, ...]] = []
        """What sequences stored when they were last looked at."""

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
    @rule(pick=picks, extra=st.sampled_from((0, 0, 1, 2, -1)), own=texts)
    def ask_again(self, pick: int, extra: int, own: int) -> None:
        """A prompt that repeats what another sequence stored, whole or up to a block's end, and perhaps goes on."""
        said = self._said[pick % len(self._said)]
        whole = len(said) // self.harness.block_size * self.harness.block_size
        prompt = said[: (len(said) if pick % 2 else whole) + min(extra, 0)] + self._own(own, max(extra, 0))
        if prompt and len(self.harness.sequences) < _MAX_LIVE:
            self._allocate(prompt, 0, 0)

    @rule(extra=st.sampled_from((0, 0, 1)))
    def exhaust(self, extra: int) -> None:
        """Take every block that is left, or one token more."""
        num_tokens = self.harness.model.num_free * self.harness.block_size + extra
        if num_tokens and len(self.harness.sequences) < _MAX_LIVE:
            self._allocate(self._own(2 + self._next_id, num_tokens), 0, 0)

    @precondition(lambda self: self._has_running)
    @rule(pick=picks, length=edges)
    def append(self, pick: int, length: tuple[int, int]) -> None:
        """Store a token, or catch up with several."""
        self._append(self._pick(self.harness.running(), pick), max(1, self._length(length)))

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
    @rule(pick=picks)
    def register(self, pick: int) -> None:
        seq_id = self._pick(self.harness.running(), pick)
        self.harness.register(seq_id)
        self._said.append(self.harness.sequences[seq_id].tokens)

    @precondition(lambda self: self.features.fork and self.harness.sequences)
    @rule(pick=picks, text=texts, num_children=st.integers(1, 3), writes=st.booleans())
    def fork(self, pick: int, text: int, num_children: int, writes: bool) -> None:
        """Parallel samples of one sequence; they may go on at once, each with a token of its own."""
        parent_id = self._pick(list(self.harness.sequences), pick)
        parent = self.harness.sequences[parent_id]
        family = [parent_id]
        for child in range(min(num_children, _MAX_LIVE - len(self.harness.sequences))):
            family.append(self._new_id())
            child_text = parent.tokens + self._output(text + child, len(parent.text) - parent.num_tokens)
            self.harness.fork(parent_id, family[-1], child_text)
        if writes and not parent.is_swapped:
            for seq_id in family:
                self._append(seq_id, 1)

    @precondition(lambda self: self.harness.sequences)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        """The end of a sequence, or its abort: running or swapped."""
        self._free(self._pick(list(self.harness.sequences), pick))

    @precondition(lambda self: self._gone)
    @rule(pick=picks)
    def free_again(self, pick: int) -> None:
        self.harness.free_unknown(self._pick(self._gone, pick))

    @precondition(lambda self: self.harness.sequences)
    @rule()
    def free_all(self) -> None:
        for seq_id in list(self.harness.sequences):
            self._free(seq_id)

    @precondition(lambda self: self.harness.has_swap and self._has_running)
    @rule(pick=picks, with_sharers=st.booleans())
    def swap_out(self, pick: int, with_sharers: bool) -> None:
        seq_id = self._pick(self.harness.running(), pick)
        self.harness.swap_out(self.harness.sharers(seq_id) if with_sharers else [seq_id])

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
            self.fork(pick=0, text=0, num_children=1, writes=False)
        for _ in range(2):
            # Regions may have no room for it in one piece.
            if self._has_running and self.harness.swap_out(self.harness.running()):
                self.harness.swap_in(self.harness.swapped())

    def _allocate(self, prompt: tuple[int, ...], namespace: int, watermark: int) -> None:
        text = prompt + self._output(0, _MAX_OUTPUT_BLOCKS * self.harness.block_size)
        self.harness.allocate(self._new_id(), text, len(prompt), namespace=namespace, watermark=watermark)

    def _append(self, seq_id: SeqId, num_tokens: int) -> None:
        seq = self.harness.sequences[seq_id]
        num_tokens = min(num_tokens, len(seq.text) - seq.num_tokens)
        if num_tokens > 0:
            self.harness.append(seq_id, num_tokens)

    def _free(self, seq_id: SeqId) -> None:
        self.harness.free(seq_id)
        self._gone.append(seq_id)

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
