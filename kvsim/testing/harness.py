"""Runs an allocator, the dict-based model and the shadow memory side by side, and compares them after each command.

Everything is seen from outside, through the `KVAllocator` protocol: what a command returns, the block tables, and
`usage()`. Which blocks carry a cached text is followed by watching which block ids are registered and handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from kvsim.memory.interface import NO_MATCH, BlockCopy, KVAllocator, PrefixMatch, Transfer
from kvsim.memory.paged import PagedAllocator
from kvsim.memory.prefix_cache import PrefixKeys
from kvsim.request import Namespace
from kvsim.testing.model import Cell, DictModel, ModelSequence, TailCopy
from kvsim.testing.protocol import Typed
from kvsim.testing.shadow import ShadowMemory
from kvsim.tokens import TokenStream
from kvsim.types import AllocatorError, AllocStatus, BlockId, LawViolation, OutOfBlocks, SeqId

Eviction: TypeAlias = Literal["lru", "tail_first", "any"]

NAMESPACES = (Namespace(), Namespace(lora="lora"), Namespace(salt="salt"), Namespace(lora="salt"))


@dataclass(frozen=True, slots=True)
class Features:
    """What the allocator under test claims to do; what it does not claim is not exercised.

    `prefix_cache` and `swap` are found out (`enable_prefix_caching`, `usage().num_host_blocks`) if None.
    `eviction`: blocks released with one table are evicted last block of the table first (`tail_first`), and blocks
    released by one command before those released by a later one (`lru`). Under `tail_first` a block may go sooner if
    another held the same text while it did: hits of that text may have gone to the other, which may still be there.
    `exact_blocks`: tables hold exactly ceil(tokens / block size) blocks, and nothing else is taken; off where slots are
    reserved ahead.
    """

    fork: bool = True
    swap: bool | None = None
    prefix_cache: bool | None = None
    eviction: Eviction = "tail_first"
    exact_blocks: bool = True

    def __post_init__(self) -> None:
        if self.eviction not in get_args(Eviction):
            raise ValueError(f"eviction is {self.eviction!r}; it is one of {', '.join(get_args(Eviction))}")


@dataclass(frozen=True, slots=True)
class _Release:
    """When and where in its table a cached block lost its last reference."""

    command: int
    table: int
    depth: int


class Harness:
    """One allocator under test. Every command raises LawViolation at the first difference."""

    def __init__(self, allocator: KVAllocator, features: Features = Features()) -> None:
        self.allocator = allocator
        self._typed: Any = Typed(allocator)
        usage = self._typed.usage()
        self.block_size: int = self._typed.block_size
        self.features = features
        self.has_cache = _or_else(features.prefix_cache, bool(getattr(allocator, "enable_prefix_caching", False)))
        self.has_swap = _or_else(features.swap, usage.num_host_blocks > 0)
        self.model = DictModel(self._typed.num_blocks, usage.num_host_blocks, self.block_size)
        self.shadow = ShadowMemory(self.block_size)
        self._block_of: dict[Cell, BlockId] = {}
        self._carried: dict[BlockId, tuple[int, tuple[int, ...]]] = {}
        """Block -> namespace and whole prefix, from its registration until it is handed out."""
        self._doubles: set[BlockId] = set()
        """Those of `_carried` whose text another block carried too at some time."""
        self._idle: dict[BlockId, _Release] = {}
        self._num_releases = 0
        """Tables that gave up their blocks."""
        self._num_evicted = usage.num_evicted
        self.num_checks = 0
        """Commands done, each followed by a comparison of everything."""

    @property
    def history(self) -> str:
        """What the allocator was told so far, and what it answered: a line for each command."""
        return "\n".join(self._typed.history)

    @property
    def sequences(self) -> dict[SeqId, ModelSequence]:
        return self.model.sequences

    def running(self) -> list[SeqId]:
        return [seq_id for seq_id, seq in self.sequences.items() if not seq.is_swapped]

    def swapped(self) -> list[SeqId]:
        return [seq_id for seq_id, seq in self.sequences.items() if seq.is_swapped]

    def sharers(self, seq_id: SeqId) -> list[SeqId]:
        """Sequences on the same device that share a block with this one, itself included, in order."""
        seq = self.sequences[seq_id]
        return [
            other_id
            for other_id, other in self.sequences.items()
            if other.is_swapped == seq.is_swapped and not set(seq.cells).isdisjoint(other.cells)
        ]

    def allocate(
        self, seq_id: SeqId, text: tuple[int, ...], num_tokens: int, *, namespace: int = 0, watermark: int = 0
    ) -> bool:
        """Look up, ask, allocate, and store the tokens that were not hit; False if it was (rightly) refused."""
        keys = PrefixKeys(TokenStream.from_ids(text), NAMESPACES[namespace], self.block_size)
        match = self._match(keys, text, namespace, num_tokens)
        said = {
            spare: self._check_status(num_tokens, match, len(text) - num_tokens, spare) for spare in {0, watermark}
        }[0]
        needed = self.model.num_cells(num_tokens) - len(match.block_ids) + match.num_revived

        def command() -> None:
            self._typed.allocate(seq_id, num_tokens, keys=keys, prefix=match, reserve_tokens=len(text) - num_tokens)

        is_done = self._attempt(command, needed)
        # Without exact blocks the allocator alone knows what fits; at least it does what it says.
        _require(4, is_done == (said is AllocStatus.OK), f"can_allocate says {said}, but the allocation was "
                 f"{'done' if is_done else 'refused'}")  # fmt: skip
        if not is_done:
            self._check_gone(seq_id)
            return False
        hit_cells = [self._cell_of(block_id) for block_id in match.block_ids]
        seq = self.model.allocate(seq_id, text, namespace, num_tokens, hit_cells)
        self._adopt(seq_id)
        self.shadow.write(self._table(seq_id), match.num_tokens, seq.tokens[match.num_tokens :])
        self.check()
        return True

    def append(self, seq_id: SeqId, num_tokens: int = 1) -> bool:
        """Store more tokens of the sequence's text; False if it was (rightly) refused."""
        needed = self.model.num_needed(seq_id, num_tokens)
        returned: list[tuple[BlockCopy, ...]] = []
        if not self._attempt(lambda: returned.append(self._typed.append_slots(seq_id, num_tokens)), needed):
            return False
        seq = self.sequences[seq_id]
        stored = seq.num_tokens
        copy = self.model.append(seq_id, num_tokens)
        self._check_copies(seq_id, returned[0], copy)
        self._adopt(seq_id)
        self.shadow.copy(returned[0])
        self.shadow.write(self._table(seq_id), stored, seq.tokens[stored:])
        self.check()
        return True

    def register(self, seq_id: SeqId, num_tokens: int | None = None) -> None:
        """Make the full blocks of the sequence's first `num_tokens` tokens findable; None: of all that it stores."""
        if self.features.prefix_cache is False:
            return
        seq = self.sequences[seq_id]
        num_tokens = seq.num_tokens if num_tokens is None else num_tokens
        self._typed.register(seq_id, num_tokens)
        if self.has_cache:
            for index in range(num_tokens // self.block_size):
                prefix = seq.text[: (index + 1) * self.block_size]
                self._carry(self._block_of[seq.cells[index]], (seq.namespace, prefix))
        self.check()

    def _carry(self, block_id: BlockId, prefix: tuple[int, tuple[int, ...]]) -> None:
        if block_id not in self._carried:
            others = [other_id for other_id, carried in self._carried.items() if carried == prefix]
            if others:
                self._doubles.update(others, (block_id,))
            self._carried[block_id] = prefix

    def fork(self, parent_id: SeqId, child_id: SeqId, text: tuple[int, ...]) -> None:
        """Fork; `text` is the child's, equal to the parent's as far as that is stored."""
        free = self._typed.num_free_blocks
        keys = PrefixKeys(TokenStream.from_ids(text), NAMESPACES[self.sequences[parent_id].namespace], self.block_size)
        if self.has_cache:
            self._typed.fork(parent_id, child_id, keys=keys)
        else:
            self._typed.fork(parent_id, child_id)
        self.model.fork(parent_id, child_id, text)
        _require(4, self._typed.num_free_blocks == free, "a fork took a block")
        self.check()

    def free(self, seq_id: SeqId) -> None:
        """Free a sequence, finished or aborted, wherever it is."""
        released = self._held([seq_id])
        self._typed.free(seq_id)
        self.model.free(seq_id)
        self._check_gone(seq_id)
        self._note_releases([released])
        self.check()

    def allocate_again(self, seq_id: SeqId) -> None:
        """A sequence that has a table is not given another: the first would be lost."""
        seq = self.sequences[seq_id]
        told = len(self._typed.history)
        keys = PrefixKeys(TokenStream.from_ids(seq.text), NAMESPACES[seq.namespace], self.block_size)
        self._refuse(lambda: self._typed.allocate(seq_id, 1, keys=keys, prefix=NO_MATCH), AllocatorError)
        del self._typed.history[told:]

    def free_unknown(self, seq_id: SeqId) -> None:
        """A sequence without a table cannot be freed, appended to or forked: a second abort must be refused."""
        told = len(self._typed.history)
        commands: list[Callable[[], Any]] = [
            lambda: self._typed.free(seq_id),
            lambda: self._typed.append_slots(seq_id, 1),
        ]
        if self.features.fork:
            commands.append(lambda: self._typed.fork(seq_id, (seq_id, "child")))
        for command in commands:
            self._refuse(command, AllocatorError)
        # Nothing came of them, and they would crowd out what did.
        del self._typed.history[told:]

    def swap_out(self, seq_ids: Sequence[SeqId]) -> bool:
        """Swap sequences to the host; False if it was (rightly) refused."""
        return self._swap(seq_ids, self._typed.swap_out, self.model.num_host_free, self.shadow.swap_out)

    def swap_in(self, seq_ids: Sequence[SeqId]) -> bool:
        """Swap sequences back; False if it was (rightly) refused."""
        return self._swap(seq_ids, self._typed.swap_in, self.model.num_free, self.shadow.swap_in)

    def check(self) -> None:
        """Compare every table, every count and every token."""
        self.num_checks += 1
        self._check_tables()
        self._check_usage()
        for seq_id, seq in self.sequences.items():
            self.shadow.check(seq_id, self._table(seq_id), seq.tokens, is_swapped=seq.is_swapped)
        self._typed.audit()

    def _table(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        return tuple(self._typed.block_table(seq_id))

    def _snapshot(self) -> tuple[object, ...]:
        tables = {
            seq_id: (self._table(seq_id), self._typed.num_tokens(seq_id), self._typed.num_slots(seq_id))
            for seq_id in self.sequences
        }
        # Ours tells the order of its free list too. In other allocators that name may stand for anything.
        order = self.allocator.free_block_ids() if isinstance(self.allocator, PagedAllocator) else ()
        return tables, self._typed.num_free_blocks, self._typed.usage(), order

    def _attempt(self, command: Callable[[], Any], needed: int) -> bool:
        """Do it if the model says that it fits; else it must be refused and change nothing."""
        if self.features.exact_blocks and needed > self.model.num_free:
            self._refuse(command, OutOfBlocks)
            return False
        before = None if self.features.exact_blocks else self._snapshot()
        try:
            command()
        except OutOfBlocks as error:
            if before is not None:
                _require(7, self._snapshot() == before, "a refused command changed something")
                return False
            raise LawViolation(
                f"law 4: {needed} blocks are needed and {self.model.num_free} are free, but: {error}"
            ) from error
        return True

    def _refuse(self, command: Callable[[], Any], error: type[AllocatorError]) -> None:
        before = self._snapshot()
        try:
            command()
        except error:
            _require(7, self._snapshot() == before, "a refused command changed something")
        except LawViolation:
            raise
        except Exception as other:
            raise LawViolation(
                f"law 7: a command that cannot be done was not refused with {error.__name__}, it raised "
                f"{type(other).__name__}: {other}"
            ) from other
        else:
            raise LawViolation(f"law 7: a command that cannot be done was not refused with {error.__name__}")

    def _check_gone(self, seq_id: SeqId) -> None:
        _require(7, not self._typed.has_table(seq_id), f"sequence {seq_id!r} was freed or refused, but has_table says "
                 "that it has a table")  # fmt: skip

    def _check_status(self, num_tokens: int, match: PrefixMatch, reserve: int, watermark: int) -> AllocStatus:
        before = self._snapshot()
        status: AllocStatus = self._typed.can_allocate(
            num_tokens, prefix=match, reserve_tokens=reserve, watermark_blocks=watermark
        )
        _require(7, self._snapshot() == before, "can_allocate changed something")
        if not self.features.exact_blocks:
            return status
        total = self.model.num_cells(num_tokens)
        taken = total - len(match.block_ids) + match.num_revived
        expected = AllocStatus.OK if self.model.num_free - taken >= watermark else AllocStatus.LATER
        if total + watermark > self.model.num_blocks:
            expected = AllocStatus.NEVER
        _require(4, status == expected, f"can_allocate({num_tokens} tokens, hit {match.num_tokens}, watermark "
                 f"{watermark}) says {status}; it is {expected}")  # fmt: skip
        return status

    def _match(self, keys: PrefixKeys, text: tuple[int, ...], namespace: int, num_tokens: int) -> PrefixMatch:
        if not self.has_cache:
            return NO_MATCH
        before = self._snapshot()
        match: PrefixMatch = self._typed.match_prefix(keys, num_tokens)
        _require(7, self._snapshot() == before, "match_prefix changed something")
        expected = 0
        prefixes = set(self._carried.values())
        while (expected + 1) * self.block_size < num_tokens:
            if (namespace, text[: (expected + 1) * self.block_size]) not in prefixes:
                break
            expected += 1
        for index, block_id in enumerate(match.block_ids):
            prefix = text[: (index + 1) * self.block_size]
            _require(11, self._carried.get(block_id) == (namespace, prefix),
                     f"block {block_id} is a hit for block {index} of a text that it does not hold")  # fmt: skip
        _require(11, len(match.block_ids) == expected, f"the hit is {len(match.block_ids)} blocks of {num_tokens} "
                 f"tokens; {expected} are cached and leave one token to compute")  # fmt: skip
        _require(11, match.num_tokens == expected * self.block_size, f"a hit of {expected} blocks has "
                 f"{match.num_tokens} tokens")  # fmt: skip
        live = self._live_blocks()
        num_idle = sum(1 for block_id in match.block_ids if block_id not in live)
        _require(4, match.num_revived == num_idle, f"{match.num_revived} hit blocks are said to be free; "
                 f"{num_idle} are referenced by nobody")  # fmt: skip
        return match

    def _live_blocks(self) -> dict[BlockId, Cell]:
        return {self._block_of[cell]: cell for cell in self.model.refs()}

    def _cell_of(self, block_id: BlockId) -> Cell:
        """The cell of a hit block: a live one, or a new one for a block that is revived."""
        cell = self._live_blocks().get(block_id)
        if cell is None:
            (cell,) = self.model.new_cells(1)
            self._block_of[cell] = block_id
            self._idle.pop(block_id, None)
        return cell

    def _adopt(self, *seq_ids: SeqId) -> None:
        """Learn the block ids of new cells, and see which cached texts their handing out evicted."""
        evicted: dict[BlockId, _Release | None] = {}
        for seq_id in seq_ids:
            seq = self.sequences[seq_id]
            self._check_length(seq_id, seq)
            for cell, block_id in zip(seq.cells, self._table(seq_id), strict=False):
                if cell not in self._block_of:
                    self._block_of[cell] = block_id
                    if not seq.is_swapped and block_id in self._carried:
                        del self._carried[block_id]
                        evicted[block_id] = self._idle.pop(block_id, None)
            # What is reserved ahead holds nothing yet, and what was there before is gone.
            for block_id in () if seq.is_swapped else self._table(seq_id)[len(seq.cells) :]:
                if block_id in self._carried:
                    del self._carried[block_id]
                    evicted[block_id] = self._idle.pop(block_id, None)
        self._num_evicted += len(evicted)
        may_go = self._doubles if self.features.eviction == "tail_first" else ()
        if self.features.eviction != "any":
            self._check_eviction_order(gone for block_id, gone in evicted.items() if gone and block_id not in may_go)
        self._doubles -= evicted.keys()

    def _check_eviction_order(self, evicted: Iterable[_Release]) -> None:
        for gone in evicted:
            for block_id, kept in self._idle.items():
                is_deeper = kept.table == gone.table and kept.depth > gone.depth
                is_older = self.features.eviction == "lru" and kept.command < gone.command
                if is_deeper or is_older:
                    why = "the end of the same chain" if is_deeper else "released earlier"
                    raise LawViolation(f"eviction order: a cached block went before block {block_id}, {why}")

    def _check_copies(self, seq_id: SeqId, copies: tuple[BlockCopy, ...], expected: TailCopy | None) -> None:
        number = int(expected is not None)
        _require(8, len(copies) == number, f"sequence {seq_id!r} got {len(copies)} copies; it takes {number}")
        if expected is None:
            return
        src, dst, num_tokens = copies[0]
        place = self.sequences[seq_id].cells.index(expected.dst)
        _require(8, src == self._block_of[expected.src], f"block {src} is copied; the shared tail is block "
                 f"{self._block_of[expected.src]}")  # fmt: skip
        _require(8, dst == self._table(seq_id)[place], f"the copy is block {dst}; entry {place} of the writer's "
                 f"table is block {self._table(seq_id)[place]}")  # fmt: skip
        _require(8, num_tokens == expected.num_tokens, f"{num_tokens} tokens are copied; the tail holds "
                 f"{expected.num_tokens}")  # fmt: skip

    def _held(self, seq_ids: Sequence[SeqId]) -> list[tuple[Cell, int]]:
        return [
            (cell, depth)
            for seq_id in seq_ids
            if not self.sequences[seq_id].is_swapped
            for depth, cell in enumerate(self.sequences[seq_id].cells)
        ]

    def _note_releases(self, released: Sequence[list[tuple[Cell, int]]]) -> None:
        """Cached blocks that nobody references any more are idle from here on."""
        refs = self.model.refs()
        first = self._num_releases
        # A block that several of the tables share became idle with the last of them.
        for number, cells in reversed(list(enumerate(released, first))):
            for cell, depth in cells:
                block_id = self._block_of[cell]
                if not refs[cell] and block_id in self._carried:
                    self._idle.setdefault(block_id, _Release(first, number, depth))
        self._num_releases += len(released)

    def _swap(
        self,
        seq_ids: Sequence[SeqId],
        command: Callable[[Sequence[SeqId]], Transfer | None],
        room: int,
        execute: Callable[[Transfer], None],
    ) -> bool:
        before = self._snapshot()
        cells = self.model.distinct(seq_ids)
        reserved = [
            block_id for seq_id in seq_ids for block_id in self._table(seq_id)[len(self.sequences[seq_id].cells) :]
        ]
        try:
            transfer = command(list(seq_ids))
        except OutOfBlocks as error:
            raise LawViolation(
                f"law 7: a swap of {len(cells)} blocks into {room} raised OutOfBlocks: {error}; a swap that does not "
                "fit returns None"
            ) from error
        if len(cells) > room:
            _require(7, transfer is None, f"a swap of {len(cells)} blocks into {room} was not refused")
            _require(7, self._snapshot() == before, "a refused swap changed something")
            return False
        if transfer is None:
            if self.features.exact_blocks:
                raise LawViolation(f"law 4: a swap of {len(cells)} blocks was refused, though {room} are free")
            _require(7, self._snapshot() == before, "a refused swap changed something")
            return False
        self._check_moves(cells, reserved, transfer)
        released = [self._held([seq_id]) for seq_id in seq_ids]
        target = {self._block_of[cell]: new for cell, new in self.model.move(seq_ids).items()}
        self._note_releases(released)
        self._adopt(*seq_ids)
        for src, dst in transfer:
            block_id = self._block_of[target[src]] if src in target else dst
            _require(8, block_id == dst, f"block {src} moves to block {dst}, but the tables say {block_id}")
        execute(transfer)
        self.check()
        return True

    def _check_moves(self, cells: list[Cell], reserved: Sequence[BlockId], transfer: Transfer) -> None:
        """Every block that holds something moves, once; what is reserved ahead may move with it."""
        sources, targets = [move.src for move in transfer], [move.dst for move in transfer]
        held = [self._block_of[cell] for cell in cells]
        moved = [block_id for block_id in dict.fromkeys(reserved) if block_id in sources and block_id not in held]
        _require(8, sorted(sources) == sorted(held + moved), f"blocks {sources} are moved; the sequences hold {held}")
        _require(8, len(set(targets)) == len(targets), f"two blocks are moved to one: {targets}")

    def _check_length(self, seq_id: SeqId, seq: ModelSequence) -> None:
        length, num_tokens = len(self._table(seq_id)), self._typed.num_tokens(seq_id)
        _require(13, num_tokens == seq.num_tokens, f"sequence {seq_id!r} is said to store {num_tokens} tokens; "
                 f"it stores {seq.num_tokens}")  # fmt: skip
        is_enough = length == len(seq.cells) if self.features.exact_blocks else length >= len(seq.cells)
        _require(13, is_enough, f"sequence {seq_id!r} stores {seq.num_tokens} tokens in {length} blocks of "
                 f"{self.block_size}; it needs {len(seq.cells)}")  # fmt: skip
        num_slots = self._typed.num_slots(seq_id)
        _require(13, num_slots == length * self.block_size, f"{length} blocks are said to be {num_slots} slots")

    def _check_tables(self) -> None:
        """Tables share exactly what the model shares, and no two cells are in one block."""
        holders: dict[tuple[bool, BlockId], Cell] = {}
        for seq_id, seq in self.sequences.items():
            _require(4, self._typed.has_table(seq_id), f"sequence {seq_id!r} has lost its table")
            self._check_length(seq_id, seq)
            for index, (cell, block_id) in enumerate(zip(seq.cells, self._table(seq_id), strict=False)):
                expected = self._block_of[cell]
                _require(8, block_id == expected, f"entry {index} of {seq_id!r} is block {block_id}; its content is "
                         f"in block {expected}")  # fmt: skip
                holder = holders.setdefault((seq.is_swapped, block_id), cell)
                _require(4, holder == cell, f"block {block_id} is in two tables that share nothing there")

    def _check_usage(self) -> None:
        usage, refs = self._typed.usage(), self.model.refs()
        live = {self._block_of[cell] for cell in refs}
        num_idle = sum(1 for block_id in self._carried if block_id not in live)
        expected = {
            "num_blocks": self.model.num_blocks,
            "num_cached_idle": num_idle,
            "num_evicted": self._num_evicted,
            "num_host_blocks": self.model.num_host_blocks,
        }
        if self.features.exact_blocks:
            expected |= {
                "num_used": len(refs),
                "num_free": self.model.num_blocks - len(refs) - num_idle,
                "num_shared": sum(1 for number in refs.values() if number > 1),
                "num_logical": refs.total(),
                "num_host_used": len(self.model.refs(is_swapped=True)),
            }
            _require(4, self._typed.num_free_blocks == self.model.num_free, f"{self._typed.num_free_blocks} "
                     f"blocks are said to be free; {self.model.num_free} are")  # fmt: skip
        else:
            entries = Counter(block_id for seq_id in self.running() for block_id in self._table(seq_id))
            expected |= {
                "num_shared": sum(1 for number in entries.values() if number > 1),
                "num_logical": entries.total(),
            }
        for name, value in expected.items():
            counted = getattr(usage, name)
            cure = ""
            if name == "num_cached_idle" and not self.has_cache and self.features.prefix_cache is None:
                cure = "; give prefix_cache=True if it has a prefix cache, or let enable_prefix_caching say so"
            _require(4, counted == value, f"usage().{name} is {counted}; it should be {value}{cure}")
        parts = usage.num_used + usage.num_cached_idle + usage.num_free + usage.num_rounding_slots
        _require(4, parts == usage.num_blocks, f"used + cached idle + free blocks are {parts} of {usage.num_blocks}")


def _or_else(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _require(law: int, holds: bool, text: str) -> None:
    if not holds:
        raise LawViolation(f"law {law}: {text}")
