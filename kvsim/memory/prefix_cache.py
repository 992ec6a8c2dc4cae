"""The prefix cache: which full blocks hold which text, found by walking a text from its start.

The index is a tree over block contents, so that two texts meet in a place exactly if they are equal up to there, in
one namespace: there is no hash to collide. Most of a text is nobody else's, so blocks that follow each other without
a branch are kept together in runs, and a block that nobody looks for costs two entries of a list. Whose text goes on
at the end of its own run is asked for the blocks that it filled when somebody comes there, or when it gives them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from kvsim.memory.block_pool import picked
from kvsim.memory.interface import KeyChain, Link
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, BlockId

if TYPE_CHECKING:
    from kvsim.memory.block_table import BlockTable


_ANY_LENGTH = 1 << 62
"""More tokens than any text has: asked how many whole blocks of it there are, a text says all."""


class NamespaceLike(Protocol):
    """Anything with a LoRA id and a cache salt, such as `kvsim.request.Namespace`."""

    @property
    def lora(self) -> str | None: ...

    @property
    def salt(self) -> str | None: ...


class PrefixKeys:
    """The links and chain keys of one text in one namespace, made on demand and remembered.

    `stream` is all that may ever be stored: the prompt, and the output where it is known. How much of it counts
    is said at each `match_prefix` and `register`. Keys cost O(1) per block for segments.
    """

    __slots__ = ("_keys", "_links", "_namespace", "_num_blocks", "_stream", "block_size")

    def __init__(self, stream: TokenStream, namespace: NamespaceLike | None, block_size: int) -> None:
        self._stream = stream
        self._namespace = _namespace_ints(namespace)
        self.block_size = block_size
        self._num_blocks = len(stream) // block_size
        self._links: dict[int, Link] = {}
        self._keys: list[int] = []

    def num_full_blocks(self, num_tokens: int) -> int:
        """Whole blocks among the first `num_tokens` tokens of the text."""
        return min(num_tokens // self.block_size, self._num_blocks)

    def link(self, block_index: int) -> Link:
        """What block `block_index` adds; equal links up to k mean equal text and namespace up to k, and vice versa."""
        link = self._links.get(block_index)
        if link is None:
            start = block_index * self.block_size
            content = self._stream.content(start, start + self.block_size)
            link = self._links[block_index] = (content, () if block_index else self._namespace)
        return link

    def num_common_blocks(self, other: PrefixKeys, first: int) -> int:
        """Leading blocks in which both texts agree, given that they do before block `first`."""
        return self._stream.common_length(other._stream, first * self.block_size) // self.block_size

    def chain(self, block_index: int) -> int:
        """A 64-bit key of the whole prefix up to block `block_index`, the same in every process."""
        keys = self._keys
        while len(keys) <= block_index:
            keys.append(hash((keys[-1] if keys else 0, self.link(len(keys)))))
        return keys[block_index]


def _namespace_ints(namespace: NamespaceLike | None) -> tuple[int, int]:
    """Integers instead of strings: their hash does not depend on the process. An empty salt is none, as in vLLM."""
    if namespace is None:
        return (0, 0)
    return (_as_int(namespace.lora), _as_int(namespace.salt or None))


def _as_int(text: str | None) -> int:
    return 0 if text is None else int.from_bytes(b"\x01" + text.encode(), "big")


class PrefixRun:
    """Consecutive blocks of one text: place k stands for the whole prefix up to block `first + k` of `keys`.

    A run begins where its text leaves that of its parent (after place `parent_place` there), or at the start. Blocks
    that hold a place's last block of text are its carriers, in the order in which they were registered; a place
    without one stays as long as a longer prefix needs it.
    """

    __slots__ = ("branches", "carriers", "compared", "first", "keys", "more", "owner", "parent", "parent_place")

    def __init__(
        self, parent: PrefixRun | None, parent_place: int, keys: KeyChain, first: int, carriers: list[BlockId | None]
    ) -> None:
        self.parent = parent
        self.parent_place = parent_place
        self.keys = keys
        self.first = first
        self.carriers = carriers
        """The first registered carrier of each place; None where nobody carries it now."""
        self.more: dict[int, list[BlockId]] = _NOBODY
        """Further carriers, by place."""
        self.branches: dict[int, dict[Link, PrefixRun]] = _NO_BRANCHES
        """Runs that leave this one, by the place after which they do and by their first link."""
        self.owner: BlockTable | None = None
        """Who makes this run longer, and may have filled blocks that `carriers` lacks yet."""
        self.compared: tuple[KeyChain | None, int] = (None, 0)
        """The last text that came by, and its blocks in common: who waits for memory asks again at every step."""

    def goes_on(self, place: int, keys: KeyChain) -> bool:
        """The run has a place `place`, and the text agrees with it there (as it does before)."""
        if place >= len(self.carriers):
            return False
        depth = self.first + place
        return self.keys is keys or self.keys.link(depth) == keys.link(depth)

    def last_common(self, place: int, keys: KeyChain, max_depth: int) -> int:
        """The last place, from `place` on and no deeper than block `max_depth`, up to which the text agrees.

        It does at `place`.
        """
        last = min(len(self.carriers) - 1, max_depth - self.first)
        if self.keys is keys or place >= last:
            return max(place, last)
        if isinstance(keys, PrefixKeys) and isinstance(self.keys, PrefixKeys):
            compared, num_common = self.compared
            if compared is not keys:
                num_common = keys.num_common_blocks(self.keys, self.first + place)
                self.compared = (keys, num_common)
            return min(last, num_common - self.first - 1)
        while place < last and self.goes_on(place + 1, keys):
            place += 1
        return place

    def agrees(self, place: int, keys: KeyChain | None) -> bool:
        """The text agrees with the run up to a place (as it does before the run); no keys agree with everything."""
        if keys is None or place < 0:
            return True
        return self.goes_on(0, keys) and self.last_common(0, keys, self.first + place) == place

    def carries(self, block_id: BlockId, place: int) -> bool:
        return self.carriers[place] == block_id or block_id in self.more.get(place, ())

    def carry(self, block_id: BlockId, place: int) -> None:
        """One more block holds the last block of a place's text."""
        if self.carriers[place] is None:
            self.carriers[place] = block_id
            return
        if self.more is _NOBODY:
            self.more = {}
        self.more.setdefault(place, []).append(block_id)

    def uncarry(self, block_id: BlockId) -> None:
        """A carrier is handed out."""
        carriers = self.carriers
        if block_id in carriers:
            place = carriers.index(block_id)
            others = self.more.get(place)
            carriers[place] = others.pop(0) if others else None
        else:
            place, others = next((place, others) for place, others in self.more.items() if block_id in others)
            others.remove(block_id)
        if others is not None and not others:
            del self.more[place]
        if carriers[-1] is None:
            self.trim()

    def trim(self) -> None:
        """Forget what no block carries and no longer prefix needs, from the end of the run backwards."""
        run = self
        while run.parent is not None:
            carriers = run.carriers
            while carriers and carriers[-1] is None and len(carriers) - 1 not in run.branches:
                carriers.pop()
            if carriers:
                return
            parent, place = run.parent, run.parent_place
            siblings = parent.branches[place]
            del siblings[run.keys.link(run.first)]
            if not siblings:
                del parent.branches[place]
            run = parent


class Place(NamedTuple):
    """One prefix in the index: place number `place` of a run; -1 of the root is the empty text."""

    run: PrefixRun
    place: int

    def before(self) -> Place:
        """The prefix that is one block shorter. Raises AllocatorError for the empty one."""
        if self.place > 0:
            return Place(self.run, self.place - 1)
        if self.run.parent is None:
            raise AllocatorError("nothing is shorter than the empty text")
        return Place(self.run.parent, self.run.parent_place)


_NOBODY: dict[int, list[BlockId]] = {}
_NO_BRANCHES: dict[int, dict[Link, PrefixRun]] = {}


class PrefixIndex:
    """Finds the blocks that hold a text, and forgets a block when it is handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.root = Place(PrefixRun(None, -1, PrefixKeys(TokenStream(), None, 1), 0, []), -1)
        self.run_of: list[PrefixRun | None] = [None] * num_blocks
        """The run in which a block carries a text."""
        self.num_hashed = 0
        """Blocks that carry a text, in use or free."""

    def has_text(self, block_id: BlockId) -> bool:
        return self.run_of[block_id] is not None

    def find(self, keys: KeyChain, max_blocks: int) -> list[BlockId]:
        """The earliest registered carrier of each leading block, up to the first that nobody carries."""
        found: list[BlockId] = []
        run, place = self.root
        end = min(max_blocks, keys.num_full_blocks(_ANY_LENGTH))
        while len(found) < end:
            branches = run.branches.get(place)
            branch = branches.get(keys.link(len(found))) if branches else None
            if branch is None:
                break
            run = branch
            if run.owner is not None:
                self.catch_up(run.owner)
            place = run.last_common(0, keys, end - 1)
            carriers = run.carriers[: place + 1]
            if None in carriers:
                found += cast(list[BlockId], carriers[: carriers.index(None)])
                break
            found += cast(list[BlockId], carriers)
        return found

    def end_of(self, block_ids: Sequence[BlockId], keys: KeyChain | None) -> Place | None:
        """Where a path of blocks ends: they carry consecutive texts from the start of `keys`; None if not.

        Without keys those of any one text will do.
        """
        if block_ids and (first := self.run_of[block_ids[0]]) is not None and first.parent is self.root.run:
            # Most matches lie in one run.
            last = len(block_ids) - 1
            if first.parent_place == -1 and first.carriers[: last + 1] == list(block_ids):
                return Place(first, last) if first.agrees(last, keys) else None
        run, place = self.root
        for block_id in block_ids:
            carried = self.run_of[block_id]
            if carried is run:
                place += 1
            elif carried is not None and carried.parent is run and carried.parent_place == place:
                if not run.agrees(place, keys):
                    return None
                run, place = carried, 0
            else:
                return None
            if place >= len(run.carriers) or not run.carries(block_id, place):
                return None
        return Place(run, place) if run.agrees(place, keys) else None

    def own(self, table: BlockTable) -> None:
        """Let a table have the run at whose end its text stands, if nobody else can come there unseen."""
        run, place = table.place or self.root
        is_end = run.keys is table.keys and place == len(run.carriers) - 1 and place not in run.branches
        if is_end and run.owner is None:
            run.owner, table.own_run = table, run
            table.num_findable = 0

    def catch_up(self, table: BlockTable) -> None:
        """Add the blocks that the owner of a run has filled meanwhile."""
        run, keys, first = table.own_run, table.keys, table.num_registered
        if run is None or keys is None:
            return
        num_full = keys.num_full_blocks(table.num_findable)
        if num_full > first:
            run.owner = None
            table.place = self.add_all(table.block_ids[first:num_full], table.place or self.root, keys, first)
            table.num_registered = num_full
            run.owner = table

    def disown(self, table: BlockTable) -> None:
        """From here on the run gets longer only by what is added."""
        self.catch_up(table)
        run = table.own_run
        if run is not None:
            run.owner = table.own_run = None

    def add_all(self, block_ids: Sequence[BlockId], after: Place, keys: KeyChain, first: int) -> Place:
        """Let full blocks carry the text of blocks `first ..` of `keys`, which goes on from `after`; returns its end.

        A block that carries that text already stays as it is. Raises AllocatorError for one that carries another.
        """
        run, place = after
        if run.owner is not None:
            self.catch_up(run.owner)
        for index, block_id in enumerate(block_ids):
            depth = first + index
            if run.goes_on(place + 1, keys):
                place += 1
            else:
                branches = run.branches.get(place)
                branch = branches.get(keys.link(depth)) if branches else None
                if branch is None:
                    return self._add_new(block_ids[index:], Place(run, place), keys, depth)
                run, place = branch, 0
                if run.owner is not None:
                    self.catch_up(run.owner)
            if self.run_of[block_id] is None:
                run.carry(block_id, place)
                self.run_of[block_id] = run
                self.num_hashed += 1
            elif self.run_of[block_id] is not run or not run.carries(block_id, place):
                raise _carries_another(block_id)
        return Place(run, place)

    def _add_new(self, block_ids: Sequence[BlockId], after: Place, keys: KeyChain, depth: int) -> Place:
        """Blocks of a text that nobody carried up to here: the text's own run gets longer, or a new one leaves it."""
        run_of = self.run_of
        if any(picked(run_of, block_ids)):
            raise _carries_another(next(block_id for block_id in block_ids if run_of[block_id] is not None))
        run, place = after
        if run.keys is keys and place == len(run.carriers) - 1 and place not in run.branches:
            run.carriers += block_ids
        else:
            if run.owner is not None:
                self.disown(run.owner)
            if run.branches is _NO_BRANCHES:
                run.branches = {}
            branch = PrefixRun(run, place, keys, depth, list(block_ids))
            run.branches.setdefault(place, {})[keys.link(depth)] = branch
            run = branch
        for block_id in block_ids:
            run_of[block_id] = run
        self.num_hashed += len(block_ids)
        return Place(run, len(run.carriers) - 1)

    def drop(self, block_id: BlockId) -> bool:
        """Forget a block's text; False if it carried none."""
        run = self.run_of[block_id]
        if run is None:
            return False
        self.run_of[block_id] = None
        self.num_hashed -= 1
        carriers = run.carriers
        if carriers[-1] == block_id and not run.more and not run.branches:
            # The end of a run that is nobody else's: what the order of the free lists makes the rule.
            carriers.pop()
            if not carriers or carriers[-1] is None:
                run.trim()
        else:
            run.uncarry(block_id)
        return True

    def drop_all(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Forget the texts of blocks, in order; returns those that carried one."""
        if not block_ids:
            return []
        first = self.run_of[block_ids[0]]
        num_dropped = 0 if first is None else self._drop_end(first, block_ids)
        if num_dropped == len(block_ids):
            # Most often all were the end of one run.
            return list(block_ids)
        dropped, block_ids = list(block_ids[:num_dropped]), block_ids[num_dropped:]
        block_ids = list(compress(block_ids, picked(self.run_of, block_ids)))
        dropped += block_ids
        while block_ids:
            run = cast(PrefixRun, self.run_of[block_ids[0]])
            num_dropped = self._drop_end(run, block_ids) or int(self.drop(block_ids[0]))
            block_ids = block_ids[num_dropped:]
        return dropped

    def _drop_end(self, run: PrefixRun, block_ids: Sequence[BlockId]) -> int:
        """`drop` for the leading blocks that are the end of a run backwards; returns how many, 0 if they are not."""
        carriers = run.carriers
        num_blocks = len(block_ids)
        if num_blocks > len(carriers):
            num_blocks = len(carriers)
            block_ids = block_ids[:num_blocks]
        if run.more or run.branches or carriers[: -num_blocks - 1 : -1] != block_ids:
            return 0
        del carriers[-num_blocks:]
        run_of = self.run_of
        for block_id in block_ids:
            run_of[block_id] = None
        self.num_hashed -= num_blocks
        if not carriers or carriers[-1] is None:
            run.trim()
        return num_blocks

    def places(self) -> list[tuple[BlockId, Place]]:
        """Where each block that carries a text stands, found by walking the whole index (for audits)."""
        found: list[tuple[BlockId, Place]] = []
        pending = [self.root.run]
        while pending:
            run = pending.pop()
            if run.owner is not None:
                self.catch_up(run.owner)
            for place, carrier in enumerate(run.carriers):
                for block_id in (carrier, *run.more.get(place, ())):
                    if block_id is not None:
                        found.append((block_id, Place(run, place)))
            pending += [branch for branches in run.branches.values() for branch in branches.values()]
        return found


def _carries_another(block_id: BlockId) -> AllocatorError:
    return AllocatorError(f"block {block_id} is registered with another text than it holds")
