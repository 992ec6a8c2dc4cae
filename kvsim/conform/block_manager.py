"""Replays recorded block-manager cases of the paper's engine on the ordinary allocator, field by field.

The case format is the recorder's: a list of operations on groups of sequences, and for each command its result, the
free counts, changed tables and reference counts, and a hash of the whole state. Group bookkeeping (who waits, who
runs, how long each sequence is) is kept here; every block decision is the allocator's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvsim.conform.cases import MAX_SEQUENCES, CaseError
from kvsim.conform.recorder import allocator_keywords, held, signed_table, state_hash
from kvsim.conform.result import CaseResult, Mismatch, is_same
from kvsim.memory import PagedAllocator
from kvsim.types import BlockId, OutOfBlocks

FIELDS = ("result", "free", "tables", "gpu_refs", "cpu_refs", "hash")
"""The six elements of a command's record; a question's record has the first alone."""

_LABELS_PER_GROUP = MAX_SEQUENCES["bm"]
_STATUS_OF = {
    "can_alloc": "waiting", "alloc": "waiting", "can_append": "running", "can_swap_out": "running",
    "recompute": "running", "swap_out": "running", "can_swap_in": "swapped", "swap_in": "swapped",
}  # fmt: skip
"""What sequences of its group an operation is about."""


class _Seq:
    """A sequence as the recorder's caller sees it: its logical length and status."""

    __slots__ = ("label", "length", "status")

    def __init__(self, label: int, length: int, status: str) -> None:
        self.label = label
        self.length = length
        self.status = status


class BlockManagerReplay:
    """Drives one `PagedAllocator` through the operations of a case."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.allocator = PagedAllocator(**allocator_keywords(cfg))
        self.watermark_blocks = int(cfg["wm"] * cfg["gpu"])
        self.groups: dict[int, list[_Seq]] = {}
        self._last: tuple[dict[int, list[int]], list[int], list[int]] = ({}, [0] * cfg["gpu"], [0] * cfg["cpu"])

    def step(self, op: list[Any]) -> list[Any]:
        """Execute one operation; returns its record. Raises CaseError if it makes no sense in this state."""
        name, *args = op
        self._check(name, args)
        try:
            result = getattr(self, f"_{name}")(*args)
        except OutOfBlocks:
            result = {"err": "OOM"}
        if name == "group" or name.startswith("can_"):
            return [result]
        return [result, *self._state()]

    def _check(self, name: str, args: list[int]) -> None:
        """Raises CaseError for an operation on a group or a sequence that is not there, or there already."""
        if name == "group":
            if args[0] in self.groups:
                raise CaseError(f"group {args[0]} is there already; give the new one another number")
            return
        group = args[0] if name in _STATUS_OF else args[0] // _LABELS_PER_GROUP
        if group not in self.groups:
            known = ", ".join(map(str, self.groups)) or "none"
            raise CaseError(f"there is no group {group}; made so far: {known}. Make it with group first")
        if name in ("can_alloc", "alloc") and not self._in(group, _STATUS_OF[name]):
            raise CaseError(f"no sequence of group {group} is {_STATUS_OF[name]}")
        if name in ("can_swap_out", "can_swap_in") and (waiting := self._labels(group, "waiting")):
            raise CaseError(f"sequence {waiting[0]} has no table yet; allocate the group first")
        if name in _STATUS_OF:
            return
        labels = [seq.label for seq in self.groups[group]]
        if args[0] not in labels:
            raise CaseError(f"there is no sequence {args[0]}; group {group} has {', '.join(map(str, labels))}")
        if name == "fork" and (args[1] in labels or args[1] // _LABELS_PER_GROUP != group):
            raise CaseError(
                f"sequence {args[1]} cannot be the child: it must be new, and of group {group} "
                f"({_LABELS_PER_GROUP} x group + place)"
            )
        if name != "free" and not self.allocator.has_table(args[0]):
            raise CaseError(f"sequence {args[0]} has no table; only one that was allocated and not freed can {name}")

    def _group(self, group: int, num_seqs: int, length: int) -> None:
        first = group * _LABELS_PER_GROUP
        self.groups[group] = [_Seq(first + k, length, "waiting") for k in range(num_seqs)]

    def _can_alloc(self, group: int) -> str:
        length = self._in(group, "waiting")[0].length
        return str(self.allocator.can_allocate(length, watermark_blocks=self.watermark_blocks))

    def _can_append(self, group: int) -> bool:
        return self.allocator.can_append(len(self._in(group, "running")))

    def _can_swap_out(self, group: int) -> bool:
        return self.allocator.can_swap_out(self._unfinished(group))

    def _can_swap_in(self, group: int) -> bool:
        return self.allocator.can_swap_in(
            self._unfinished(group),
            extra_blocks=len(self._labels(group, "swapped")),
            watermark_blocks=self.watermark_blocks,
        )

    def _alloc(self, group: int) -> None:
        waiting = self._in(group, "waiting")
        first, *others = (seq.label for seq in waiting)
        self.allocator.allocate(first, waiting[0].length, sharers=others, num_refs=len(self.groups[group]))
        for seq in waiting:
            seq.status = "running"

    def _append(self, label: int) -> list[BlockId] | None:
        self._seq(label).length += 1
        copies = self.allocator.append_slots(label)
        return [copies[0].src, copies[0].dst] if copies else None

    def _fork(self, parent: int, child: int) -> None:
        seq = self._seq(parent)
        self.allocator.fork(parent, child)
        self.groups[parent // _LABELS_PER_GROUP].append(_Seq(child, seq.length, seq.status))

    def _free(self, label: int) -> None:
        self.allocator.free(label)
        self._seq(label).status = "finished"

    def _recompute(self, group: int) -> None:
        for seq in self._in(group, "running"):
            self.allocator.free(seq.label)
            seq.status = "waiting"

    def _swap_out(self, group: int) -> list[list[BlockId]] | None:
        return self._swap(group, self.allocator.swap_out, "running", "swapped")

    def _swap_in(self, group: int) -> list[list[BlockId]] | None:
        return self._swap(group, self.allocator.swap_in, "swapped", "running")

    def _swap(self, group: int, swap: Callable[..., Any], before: str, after: str) -> list[list[BlockId]] | None:
        labels = self._labels(group, before)
        transfer = swap(labels)
        if transfer is None:
            raise OutOfBlocks(sum(len(self.allocator.block_table(label)) for label in labels), 0)
        for seq in self._in(group, before):
            seq.status = after
        return [list(move) for move in transfer]

    def _in(self, group: int, status: str) -> list[_Seq]:
        return [seq for seq in self.groups[group] if seq.status == status]

    def _labels(self, group: int, status: str) -> list[int]:
        return [seq.label for seq in self._in(group, status)]

    def _unfinished(self, group: int) -> list[int]:
        return [seq.label for seq in self.groups[group] if seq.status != "finished"]

    def _seq(self, label: int) -> _Seq:
        return next(seq for seq in self.groups[label // _LABELS_PER_GROUP] if seq.label == label)

    def tables(self) -> dict[int, list[int]]:
        """Every table by label, a host block b written as -(b + 1)."""
        labels = sorted(seq.label for seqs in self.groups.values() for seq in seqs)
        return {label: signed_table(self.allocator, label) for label in labels if self.allocator.has_table(label)}

    def _state(self) -> list[Any]:
        """The recorded state after a command: free counts, what changed, and the hash."""
        allocator = self.allocator
        tables, gpu, cpu = self.tables(), allocator.ref_counts(), allocator.host_ref_counts()
        old_tables, old_gpu, old_cpu = self._last
        self._last = (tables, gpu, cpu)
        changed = {str(label): table for label, table in tables.items() if old_tables.get(label) != table}
        gone = {str(label): None for label in old_tables if label not in tables}
        free = [allocator.num_free_blocks, allocator.num_free_host_blocks]
        return [free, changed | gone, _changed(old_gpu, gpu), _changed(old_cpu, cpu), state_hash(allocator, tables)]

    def snapshot(self) -> dict[str, object]:
        """What helps to see why a record differs."""
        return {
            "tables": self.tables(),
            "free_gpu": list(self.allocator.free_block_ids()),
            "free_cpu": list(self.allocator.free_host_block_ids()),
            "gpu_refs": held(self.allocator.ref_counts()),
            "cpu_refs": held(self.allocator.host_ref_counts()),
            "groups": {
                group: [[seq.label, seq.length, seq.status] for seq in seqs] for group, seqs in self.groups.items()
            },
        }


def replay(case: dict[str, Any]) -> CaseResult:
    """Replay one case of kind `bm`; stops at the first recorded field that differs."""
    driver = BlockManagerReplay(case["cfg"])
    num_fields = 0
    for step, (op, expected) in enumerate(zip(case["ops"], case["out"], strict=True)):
        try:
            got = driver.step(op)
        except CaseError as error:
            raise CaseError(f"ops[{step}]: {json.dumps(op)}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StopIteration) as error:
            what = f"cannot be replayed: {type(error).__name__}: {error}"
            raise CaseError(f"ops[{step}]: {json.dumps(op)}: {what}") from error
        if len(got) != len(expected):
            mismatch = Mismatch(step, "record", expected, got, _state_before(case, step))
            return CaseResult(case["id"], num_fields, mismatch)
        for name, want, have in zip(FIELDS, expected, got, strict=False):
            if not is_same(want, have):
                mismatch = Mismatch(step, name, want, have, {"op": op, **_state_before(case, step)})
                return CaseResult(case["id"], num_fields, mismatch)
            num_fields += 1
    return CaseResult(case["id"], num_fields)


def _state_before(case: dict[str, Any], step: int) -> dict[str, object]:
    """The state in which operation `step` was executed."""
    driver = BlockManagerReplay(case["cfg"])
    for op in case["ops"][:step]:
        driver.step(op)
    return driver.snapshot()


def _changed(before: list[int], after: list[int]) -> list[list[int]]:
    return [[block_id, new] for block_id, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
