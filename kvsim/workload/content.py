"""What prompts have in common: texts as segments of endless imaginary texts, each with a number of its own.

The numbers (`Segment.source`) of the workload's texts are below 2**48, one range for each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvsim.tokens import Segment, TokenStream
from kvsim.types import ScenarioError
from kvsim.workload.spec import ContentSpec
from kvsim.workload.streams import Streams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

OWN_TEXT = 1 << 40
SYSTEM_PROMPT = 2 << 40
FEW_SHOT = 3 << 40
SESSION_TEXT = 4 << 40
HASH_TEXT = 5 << 40
PREFIX_GROUP = 6 << 40


class Shares(NamedTuple):
    """How many requests begin as others do, as a prefix cache sees it: it knows whole blocks only."""

    num_short: int
    """Share less than a block."""
    num_ending: int
    """Share a block, and end with it: a hit leaves a token to compute, so they find nothing."""
    num_findable: int
    """Share at least a block that can be found."""
    num_apart: int
    """Would share such a block, if their LoRA adapters and salts were the same."""
    longest: int
    """Tokens that the short ones share at most."""

    @property
    def num_sharing(self) -> int:
        """Requests that share anything."""
        return self.num_short + self.num_ending + self.num_findable


class Texts(Protocol):
    """The prompts of a workload, by request number."""

    @property
    def prompt_lens(self) -> Ints:
        """Tokens of each prompt."""
        ...

    def prompt(self, index: int) -> TokenStream:
        """The prompt of request number `index`."""
        ...

    def shared_tokens(self, block_size: int, namespaces: Ints | None = None) -> Ints:
        """How far each prompt is the beginning of another one's of its namespace; of more than a block, any number."""
        ...


def shares_of(texts: Texts, block_size: int, namespaces: Ints | None = None) -> Shares:
    """What the prompts have in common; `namespaces` are those of the requests, by number (null: one for all)."""
    shares = _count_shares(texts.shared_tokens(block_size, namespaces), texts.prompt_lens, block_size)
    if namespaces is None:
        return shares
    together = _count_shares(texts.shared_tokens(block_size), texts.prompt_lens, block_size)
    return shares._replace(num_apart=together.num_findable - shares.num_findable)


def _count_shares(tokens: Ints, prompts: Ints, block_size: int) -> Shares:
    short = tokens[(tokens > 0) & (tokens < block_size)]
    is_whole = tokens >= block_size
    num_findable = int((is_whole & (prompts > block_size)).sum())
    return Shares(len(short), int(is_whole.sum()) - num_findable, num_findable, 0, int(short.max(initial=0)))


@dataclass(frozen=True)
class OwnTexts:
    """Prompts that have nothing in common."""

    lengths: Ints

    def prompt(self, index: int) -> TokenStream:
        return TokenStream((Segment(OWN_TEXT + index, 0, int(self.lengths[index])),))

    @property
    def prompt_lens(self) -> Ints:
        return self.lengths

    def shared_tokens(self, block_size: int, namespaces: Ints | None = None) -> Ints:
        import numpy as np

        return np.zeros_like(self.lengths)


@dataclass(frozen=True)
class Prefixes:
    """Shared beginnings: for request (or session) i the group of each kind, and how long the group's text is."""

    kinds: tuple[tuple[int, Ints, int], ...]
    """(first source, group of each request, tokens)."""

    @property
    def num_tokens(self) -> int:
        """Tokens put before each own text."""
        return sum(tokens for _, _, tokens in self.kinds)

    def pieces(self, index: int) -> tuple[Segment, ...]:
        """The beginning of request number `index`."""
        return tuple(Segment(first + int(groups[index]), 0, tokens) for first, groups, tokens in self.kinds)


@dataclass(frozen=True)
class PrefixedTexts:
    """Own texts behind a system prompt and worked examples."""

    prefixes: Prefixes
    lengths: Ints

    def prompt(self, index: int) -> TokenStream:
        own = Segment(OWN_TEXT + index, 0, int(self.lengths[index]))
        return TokenStream((*self.prefixes.pieces(index), own))

    @property
    def prompt_lens(self) -> Ints:
        return self.lengths + self.prefixes.num_tokens

    def shared_tokens(self, block_size: int, namespaces: Ints | None = None) -> Ints:
        import numpy as np

        tokens = np.zeros(len(self.lengths), dtype=np.int64)
        codes = tokens if namespaces is None else namespaces
        upto = 0
        for _, groups, num_tokens in self.prefixes.kinds:
            # Who is of one group in this kind and in all before it.
            _, codes, counts = np.unique(
                codes * (int(groups.max(initial=0)) + 1) + groups, return_inverse=True, return_counts=True
            )
            upto += num_tokens
            tokens = np.where(counts[codes] > 1, upto, tokens)
        return tokens


@dataclass(frozen=True)
class GroupTexts:
    """Prompts whose first `prefix_tokens[i]` tokens are the text of group `groups[i]` (-1: none)."""

    lengths: Ints
    groups: Ints
    prefix_tokens: Ints

    def prompt(self, index: int) -> TokenStream:
        length = int(self.lengths[index])
        shared = self.pieces(index)
        own = length - sum(piece.length for piece in shared)
        return TokenStream((*shared, Segment(OWN_TEXT + index, 0, own)) if own else shared)

    def pieces(self, index: int) -> tuple[Segment, ...]:
        """The shared beginning, empty if there is none."""
        group, tokens = int(self.groups[index]), int(self.prefix_tokens[index])
        return (Segment(PREFIX_GROUP + group, 0, tokens),) if group >= 0 and tokens else ()

    @property
    def prompt_lens(self) -> Ints:
        return self.lengths

    def shared_tokens(self, block_size: int, namespaces: Ints | None = None) -> Ints:
        import numpy as np

        tokens = np.where(self.groups >= 0, self.prefix_tokens, 0)
        codes = self.groups
        if namespaces is not None and len(codes):
            codes = np.where(codes >= 0, codes * (int(namespaces.max()) + 1) + namespaces, -1)
        order = np.lexsort((tokens, codes))
        groups, ordered = codes[order], tokens[order]
        # In order of length each shares with the next of its group, and the longest with the one before it.
        is_joined = (groups[1:] == groups[:-1]) & (groups[1:] >= 0)
        shared = np.zeros_like(tokens)
        shared[:-1][is_joined] = ordered[:-1][is_joined]
        shared[1:][is_joined] = np.maximum(shared[1:], ordered[:-1])[is_joined]
        by_request = np.zeros_like(shared)
        by_request[order] = shared
        return by_request


@dataclass(frozen=True)
class HashTexts:
    """Prompts named by hash ids, one for each `block_size` tokens, the last one partial.

    An id stands for the same tokens wherever it occurs, so that two prompts share a prefix exactly as far as their
    lists of ids agree.
    """

    lengths: Ints
    ids: Ints
    offsets: Ints
    block_size: int

    def prompt(self, index: int) -> TokenStream:
        left = int(self.lengths[index])
        pieces = []
        for hash_id in self.ids[self.offsets[index] : self.offsets[index + 1]].tolist():
            if not left:
                break
            tokens = min(left, self.block_size)
            pieces.append(Segment(HASH_TEXT + hash_id, 0, tokens))
            left -= tokens
        if left:
            pieces.append(Segment(OWN_TEXT + index, 0, left))
        return TokenStream(tuple(pieces))

    @property
    def prompt_lens(self) -> Ints:
        return self.lengths

    def shared_tokens(self, block_size: int, namespaces: Ints | None = None) -> Ints:
        import numpy as np

        num_ids = -(-block_size // self.block_size)
        begins = self.offsets[:-1]
        ends = np.minimum(begins + num_ids, self.offsets[1:])
        spaces = [0] * len(begins) if namespaces is None else namespaces.tolist()
        starts = [
            (space, *self.ids[begin:end].tolist())
            for space, begin, end in zip(spaces, begins.tolist(), ends.tolist(), strict=True)
        ]
        tokens, lengths = [0] * len(starts), self.lengths.tolist()
        for upto in range(1, num_ids + 1):
            alike: dict[tuple[int, ...], list[int]] = {}
            for index, ids in enumerate(starts):
                if len(ids) > upto:
                    alike.setdefault(ids[: upto + 1], []).append(index)
            if len(alike) == sum(map(len, alike.values())):
                break
            for indices in alike.values():
                # An id may stand for less than it has room for: how far two agree the shorter one says.
                second, longest = sorted([0, *(lengths[index] for index in indices)])[-2:]
                for index in indices:
                    other = second if lengths[index] == longest else longest
                    tokens[index] = max(tokens[index], min(upto * self.block_size, lengths[index], other))
        return np.array(tokens, dtype=np.int64)


def draw_prefixes(content: ContentSpec | None, rng: Streams, num: int) -> Prefixes:
    """Groups for `num` requests (or sessions); the first n of a longer run are those of a shorter."""
    kinds: list[tuple[int, Ints, int]] = []
    if content is not None and content.system_prompt is not None:
        system = content.system_prompt
        _at_least_one("content.system_prompt.tokens", system.tokens)
        groups = zipf(rng["content"], num, system.num_groups, system.zipf, "content.system_prompt")
        kinds.append((SYSTEM_PROMPT, groups, system.tokens))
    if content is not None and content.few_shot is not None:
        few = content.few_shot
        _at_least_one("content.few_shot.num_examples", few.num_examples)
        _at_least_one("content.few_shot.example_tokens", few.example_tokens)
        groups = zipf(rng["content.few_shot"], num, few.num_groups, few.zipf, "content.few_shot")
        kinds.append((FEW_SHOT, groups, few.num_examples * few.example_tokens))
    return Prefixes(tuple(kinds))


def zipf(rng: np.random.Generator, num: int, num_groups: int, exponent: float, where: str) -> Ints:
    """`num` group numbers 0 .. num_groups - 1: group k has a share proportional to 1 / (k + 1) ** exponent."""
    import numpy as np

    _at_least_one(f"{where}.num_groups", num_groups)
    if not 0 <= exponent < float("inf"):
        raise ScenarioError(f"workload.{where}.zipf is {exponent}; it must be 0 (all equal) or more")
    shares = np.cumsum(np.arange(1, num_groups + 1, dtype=np.float64) ** -exponent)
    return np.asarray(np.searchsorted(shares, rng.random(num) * shares[-1], side="right"), dtype=np.int64)


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ScenarioError(f"workload.{key} is {value}; it must be at least 1")
