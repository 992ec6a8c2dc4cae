"""Beams take over each other's blocks: what is reserved there is what somebody fills, as the blocks themselves tell."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvsim.memory.journal import Journal
from kvsim.metrics.export import step_columns
from kvsim.registry import build
from kvsim.request import Status
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.sim.run import simulate


class BlockWatch:
    """How full every block is at every plan; a block that is handed out again is another one."""

    def __init__(self, scheduler: Any, journal: Journal) -> None:
        self.scheduler = scheduler
        self.journal = journal
        self.filled: list[dict[tuple[int, int], int]] = []

    def on_submit(self, request: Any, reason: str | None, now: int) -> None: ...

    def on_abort(self, request_id: str, sequences: Any, now: int) -> None: ...

    def on_plan(self, plan: Any, now: int) -> None:
        allocator = self.scheduler.allocator
        lives = Counter(event.block_id for event in self.journal.events() if event.event == "taken")
        filled: dict[tuple[int, int], int] = {}
        for seq in self.scheduler.live_sequences():
            if seq.status is Status.RUNNING and allocator.has_table(seq.seq_id):
                for index, block_id in enumerate(allocator.block_table(seq.seq_id)):
                    num_stored = min(allocator.block_size, seq.num_computed_tokens - index * allocator.block_size)
                    key = (block_id, lives[block_id])
                    filled[key] = max(filled.get(key, 0), num_stored)
        self.filled.append(filled)

    def on_step(self, plan: Any, outcome: Any, start_ns: int, end_ns: int) -> None: ...

    def reserved(self) -> list[int]:
        """Slots of each step that are filled in a later one."""
        most: dict[tuple[int, int], int] = {}
        for filled in self.filled:
            for key, num_stored in filled.items():
                most[key] = max(most.get(key, 0), num_stored)
        return [sum(most[key] - num_stored for key, num_stored in filled.items()) for filled in self.filled]


@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("engine", ["paged", "vllm-v0"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_reserved_for_beams_is_filled(engine: str, seed: int, budget: int) -> None:
    requests = [
        {"prompt_tokens": 5, "output_tokens": 15, "beam_width": 3},
        {"arrival_s": 0.002, "prompt_tokens": 9, "output_tokens": 12, "beam_width": 2, "abort_s": 0.0105},
        {"arrival_s": 0.002, "prompt_tokens": 6, "output_tokens": 9, "beam_width": 3},
    ]
    scenario = {
        "engine": engine,
        "seed": seed,
        "memory": {"num_gpu_blocks_override": 60},
        "allocator": {"block_size": 8},
        "scheduler": {"max_model_len": 64, "max_num_batched_tokens": budget if engine == "paged" else 64},
        "workload": {"requests": requests},
        "cost": {"step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    journal = Journal()
    built = build(scenario_from_dict(scenario).scenario, journal=journal)
    watch = BlockWatch(built.scheduler, journal)
    recorder = simulate(
        built.scheduler, built.cost, built.source, check=True, observers=(watch,), clock=journal
    ).recorder
    columns = step_columns(recorder)
    assert recorder.totals.num_preemptions == 0
    assert list(columns["reserved"]) == watch.reserved()
