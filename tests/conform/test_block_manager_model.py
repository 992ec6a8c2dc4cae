"""The ordinary allocator against a plain rewrite of the paper's block manager, on random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conform.naive_block_manager import NaiveBlockManager, RanOut

from kvsim.conform.block_manager import BlockManagerReplay


class Pair:
    """Both, side by side; every operation must give the same result and leave the same state."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_sliding = rng.random() < 0.3
        block_size = rng.choice([1, 2, 4, 8, 16])
        cfg = {
            "bs": block_size,
            "gpu": rng.choice([10, 12, 20, 32]),
            "cpu": rng.choice([8, 16]),
            "wm": rng.choice([0, 0.01, 0.1, 0.25]),
            "sw": block_size * rng.choice([2, 4]) if self.is_sliding else None,
        }
        self.block_size = block_size
        self.naive = NaiveBlockManager(cfg)
        self.ours = BlockManagerReplay(cfg)
        self.num_ops = 0
        self.has_run_out = False

    def do(self, *op: Any) -> Any:
        try:
            expected = getattr(self.naive, op[0])(*op[1:])
        except RanOut:
            expected = {"err": "OOM"}
            self.has_run_out = True
        record = self.ours.step(list(op))
        assert record[0] == expected, op
        if len(record) > 1:
            assert record[5] == self.naive.hash(), op
            self.ours.allocator.audit()
        self.num_ops += 1
        return expected

    def step(self) -> None:
        """One random thing that an engine, or a careless caller, would do."""
        naive, rng = self.naive, self.rng
        live = [g for g, labels in naive.groups.items() if any(naive.status[s] != "finished" for s in labels)]
        if not live or (len(live) < 14 and rng.random() < 0.12):
            num_seqs = 1 if self.is_sliding or rng.random() < 0.6 else rng.randint(2, 5)
            self.do("group", len(naive.groups), num_seqs, rng.randint(1, 4 * self.block_size))
            return
        group = rng.choice(live)
        if not naive.those(group, "waiting") and rng.random() < 0.1:
            # Asked of a group in either place.
            self.do(rng.choice(["can_swap_out", "can_swap_in"]), group)
        if naive.those(group, "waiting"):
            answer = self.do("can_alloc", group)
            if answer == "OK" or (answer == "LATER" and rng.random() < 0.15):
                self.do("alloc", group)
        elif naive.those(group, "running"):
            self._run(group)
        elif self.do("can_swap_in", group):
            self.do("swap_in", group)
        elif rng.random() < 0.2:
            self.do("free", naive.those(group, "swapped")[0])

    def _run(self, group: int) -> None:
        rng, running = self.rng, self.naive.those(group, "running")
        choice = rng.random()
        if choice < 0.55:
            if self.do("can_append", group) or rng.random() < 0.2:
                for label in running:
                    if not self.has_run_out:
                        self.do("append", label)
        elif choice < 0.65 and not self.is_sliding:
            self.do("fork", rng.choice(running), group * 100 + len(self.naive.groups[group]))
        elif choice < 0.8:
            self.do("free", rng.choice(running))
        elif choice < 0.87:
            self.do("recompute", group)
        elif not self.is_sliding and self.do("can_swap_out", group):
            self.do("swap_out", group)


def play(seed: int) -> int:
    pair = Pair(random.Random(seed))
    for _ in range(150):
        if pair.has_run_out:
            break
        pair.step()
    return pair.num_ops


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_agree(seed: int) -> None:
    assert play(seed) > 0


@pytest.mark.deep
def test_many_random_histories_agree() -> None:
    assert sum(play(seed) for seed in range(100, 1100)) > 100_000
