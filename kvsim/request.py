"""The nouns of serving: a request as it arrives, and a sequence as an engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvsim.tokens import TokenStream
from kvsim.types import Ns


@dataclass(frozen=True, slots=True)
class Sampling:
    """How outputs are drawn: greedy (`n` = 1), `n` parallel samples, or beam search of `beam_width`."""

    n: int = 1
    beam_width: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once when the request is fully forked."""
        return max(self.n, self.beam_width)


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What separates equal texts in a prefix cache: the LoRA adapter and the cache salt."""

    lora: str | None = None
    salt: str | None = None


NO_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the workload.

    `output_len` is the oracle: it is read by the test whether a sequence is done, the calendar, the `oracle`
    reservation and the ledger's hindsight, and by nobody else. Admission and rejection know
    `prompt_len + max_output_len`. `sample_lens` are the output lengths of samples 0..n-1 where they differ;
    `output` is the generated text where it is known (else each sample is a text of its own);
    `abort_ns` is the instant at which the client gives up. Priorities: lower is more urgent.
    """

    request_id: str
    arrival_ns: Ns
    prompt: TokenStream
    output_len: int
    max_output_len: int
    sampling: Sampling = GREEDY
    sample_lens: tuple[int, ...] = ()
    priority: int = 0
    namespace: Namespace = NO_NAMESPACE
    output: TokenStream | None = None
    abort_ns: Ns | None = None
    seed: int = 0
    """Seed of this request's own random decisions (beam search), drawn with the workload."""
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_len", len(self.prompt))

    def sample_len(self, sample: int) -> int:
        """Output tokens of sample number `sample`."""
        return self.sample_lens[sample] if self.sample_lens else self.output_len

    @property
    def longest_output_len(self) -> int:
        """Output tokens of the longest sample."""
        return max(self.sample_lens) if self.sample_lens else self.output_len

    @property
    def max_stored_tokens(self) -> int:
        """Slots one sequence needs at most: the KV of the last generated token is never computed."""
        return self.prompt_len + self.max_output_len - 1


class Status(StrEnum):
    """Where a sequence is; the legal moves are in `LEGAL_MOVES`."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"


WAITING, RUNNING, FINISHED = Status.WAITING, Status.RUNNING, Status.FINISHED
"""Members that every request comes by: to find one in its enum takes a call."""

LEGAL_MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.REJECTED, Status.ABORTED, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.FINISHED, Status.ABORTED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.ABORTED}),
    Status.FINISHED: frozenset(),
    Status.REJECTED: frozenset(),
    Status.ABORTED: frozenset(),
}
"""WAITING -> FINISHED happens in asynchronous scheduling alone: the last token was in flight at the preemption."""


class Sequence:
    """One sampled continuation of a request; mutable, and owned by its scheduler.

    `num_computed_tokens` tokens have their KV stored (or will have at the end of the step being planned);
    `num_output_tokens` tokens were emitted. While a sequence runs in the calendar both lag behind;
    `Calendar.settle` brings them up to date. `rank` is its place in running order.
    """

    __slots__ = (
        "final_len",
        "finish_tick",
        "group",
        "is_decoding",
        "join_computed",
        "join_offset",
        "join_tick",
        "keys",
        "num_computed_tokens",
        "num_output_tokens",
        "num_placeholders",
        "num_preemptions",
        "output_len",
        "prompt_len",
        "rank",
        "request",
        "sample",
        "seq_id",
        "state",
        "status",
    )

    def __init__(self, seq_id: int, request: Request, sample: int = 0) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample = sample
        self.status = WAITING
        self.prompt_len = request.prompt_len
        self.output_len = request.sample_len(sample)
        self.final_len = self.prompt_len + self.output_len - 1
        """Slots stored when it ends: the ledger's hindsight, and the calendar's finish."""
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_placeholders = 0
        """Tokens that a step in flight will deliver."""
        self.num_preemptions = 0
        self.rank = 0
        self.join_tick = -1
        self.join_computed = 0
        self.join_offset = 0
        """Stored tokens less the tick, while the calendar counts it: constant."""
        self.finish_tick = -1
        """The tick at which its last slot is filled, while the calendar counts it."""
        self.is_decoding = False
        """It sampled a token since it last got its table (continuous engines)."""
        self.group: Group | None = None
        """Its siblings, in engines that schedule by group."""
        self.keys: Any = None
        """Prefix-cache keys of its text, made when they are first needed."""
        self.state: object = None
        """Room for one engine's own per-sequence state."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and every emitted token."""
        return self.prompt_len + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not stored: 1 for a decode, more for a (resumed) prefill."""
        return self.prompt_len + self.num_output_tokens - self.num_computed_tokens

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}/{self.sample} {self.status} computed={self.num_computed_tokens}>"


class Group:
    """The live sequences of one request that are admitted, preempted and swapped as one; owned by a scheduler.

    `seqs` are in running order: the parent, then children in fork order. `unforked` are samples that will share
    the parent's prompt as soon as it is computed (at first, and again after a recompute). `order` is the group's
    place in running order, set when it joins.
    """

    __slots__ = ("is_beam", "next_place", "order", "request", "seqs", "unforked", "was_preempted")

    def __init__(self, request: Request, seqs: list[Sequence], is_beam: bool = False) -> None:
        self.request = request
        self.seqs = seqs[:1]
        self.unforked = seqs[1:]
        self.is_beam = is_beam
        self.order = -1
        self.next_place = 0
        """Place in the group of the next sequence that joins it."""
        self.was_preempted = False
        for seq in seqs:
            seq.group = self

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_seats(self) -> int:
        """Sequences it runs at once when forked: what a limit on sequences counts."""
        return self.request.sampling.beam_width if self.is_beam else len(self.seqs) + len(self.unforked)

    @property
    def members(self) -> list[Sequence]:
        """Every sequence of the group that has not ended."""
        return self.seqs + self.unforked

    @property
    def num_known_tokens(self) -> int:
        """Tokens its first sequence has to compute before it decodes, or before the others fork from it."""
        leader = self.seqs[0]
        return leader.prompt_len if self.unforked else leader.prompt_len + leader.num_output_tokens

    def __repr__(self) -> str:
        return f"<Group {self.request_id} {self.seqs}>"
