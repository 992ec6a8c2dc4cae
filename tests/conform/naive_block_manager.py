"""The paper's engine's block manager once more, written from its description alone and as plainly as possible."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Place = tuple[str, int]
"""A device ("gpu" or "cpu") and a raw block id."""


class RanOut(Exception):
    """A free list is empty."""


class NaiveBlockManager:
    """Free lists as stacks, counts as lists, groups as lists of labels; executes the operations of a `bm` case."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.block_size = cfg["bs"]
        self.window = cfg["sw"] // cfg["bs"] if cfg["sw"] else 0
        self.watermark = int(cfg["wm"] * cfg["gpu"])
        self.free_list = {"gpu": list(range(cfg["gpu"])), "cpu": list(range(cfg["cpu"]))}
        self.refs = {device: [0] * len(blocks) for device, blocks in self.free_list.items()}
        self.tables: dict[int, list[Place]] = {}
        self.groups: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.status: dict[int, str] = {}

    def those(self, group: int, status: str) -> list[int]:
        return [label for label in self.groups[group] if self.status[label] == status]

    def unfinished(self, group: int) -> list[int]:
        return [label for label in self.groups[group] if self.status[label] != "finished"]

    def distinct(self, labels: list[int]) -> int:
        return len({place for label in labels for place in self.tables[label]})

    def _take(self, device: str) -> Place:
        if not self.free_list[device]:
            raise RanOut
        block_id = self.free_list[device].pop()
        self.refs[device][block_id] = 1
        return device, block_id

    def _drop(self, place: Place) -> None:
        device, block_id = place
        assert self.refs[device][block_id] > 0
        self.refs[device][block_id] -= 1
        if not self.refs[device][block_id]:
            self.free_list[device].append(block_id)

    def group(self, group: int, num_seqs: int, length: int) -> None:
        self.groups[group] = [group * 100 + k for k in range(num_seqs)]
        for label in self.groups[group]:
            self.length[label], self.status[label] = length, "waiting"

    def can_alloc(self, group: int) -> str:
        needed = -(-self.length[self.those(group, "waiting")[0]] // self.block_size)
        needed = min(needed, self.window) if self.window else needed
        if len(self.refs["gpu"]) - needed < self.watermark:
            return "NEVER"
        return "OK" if len(self.free_list["gpu"]) - needed >= self.watermark else "LATER"

    def can_append(self, group: int) -> bool:
        return len(self.those(group, "running")) <= len(self.free_list["gpu"])

    def can_swap_out(self, group: int) -> bool:
        return self.distinct(self.unfinished(group)) <= len(self.free_list["cpu"])

    def can_swap_in(self, group: int) -> bool:
        needed = self.distinct(self.unfinished(group)) + len(self.those(group, "swapped"))
        return len(self.free_list["gpu"]) - needed >= self.watermark

    def alloc(self, group: int) -> None:
        waiting = self.those(group, "waiting")
        table: list[Place] = []
        for index in range(-(-self.length[waiting[0]] // self.block_size)):
            is_alias = self.window and index >= self.window
            table.append(table[index % self.window] if is_alias else self._take("gpu"))
            self.refs["gpu"][table[-1][1]] = len(self.groups[group])
        for label in waiting:
            self.tables[label], self.status[label] = table.copy(), "running"

    def append(self, label: int) -> list[int] | None:
        self.length[label] += 1
        table = self.tables[label]
        if len(table) < -(-self.length[label] // self.block_size):
            if not self.window or len(table) < self.window:
                table.append(self._take("gpu"))
                return None
            table.append(table[len(table) % self.window])
        old = table[-1]
        if self.refs["gpu"][old[1]] == 1:
            return None
        table[-1] = self._take("gpu")
        self._drop(old)
        return [old[1], table[-1][1]]

    def fork(self, parent: int, child: int) -> None:
        self.groups[parent // 100].append(child)
        self.tables[child] = self.tables[parent].copy()
        self.length[child], self.status[child] = self.length[parent], self.status[parent]
        for device, block_id in self.tables[child]:
            self.refs[device][block_id] += 1

    def free(self, label: int) -> None:
        for place in dict.fromkeys(self.tables.pop(label, ())):
            self._drop(place)
        self.status[label] = "finished"

    def recompute(self, group: int) -> None:
        for label in self.those(group, "running"):
            self.free(label)
            self.status[label] = "waiting"

    def swap_out(self, group: int) -> list[list[int]]:
        return self._swap(self.those(group, "running"), "swapped", "cpu")

    def swap_in(self, group: int) -> list[list[int]]:
        return self._swap(self.those(group, "swapped"), "running", "gpu")

    def _swap(self, labels: list[int], status: str, device: str) -> list[list[int]]:
        target: dict[Place, Place] = {}
        for label in labels:
            old, self.tables[label] = self.tables[label], []
            for place in old:
                if place in target:
                    self.refs[device][target[place][1]] += 1
                else:
                    target[place] = self._take(device)
                self.tables[label].append(target[place])
                self._drop(place)
            self.status[label] = status
        return [[src[1], dst[1]] for src, dst in target.items()]

    def hash(self) -> str:
        tables = [
            [label, [block_id if device == "gpu" else -block_id - 1 for device, block_id in table]]
            for label, table in sorted(self.tables.items())
        ]
        held = [[[block_id, ref] for block_id, ref in enumerate(refs) if ref] for refs in self.refs.values()]
        state = [self.free_list["gpu"], self.free_list["cpu"], tables, *held]
        return hashlib.sha1(json.dumps(state, separators=(",", ":")).encode()).hexdigest()[:8]
