"""Allocators derived from the built-in one: what they write anew is asked, by both loops alike."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from support import StepCost, request

from kvsim.memory import PagedAllocator
from kvsim.memory.interface import KVAllocator, stands_for
from kvsim.memory.journal import Journal
from kvsim.metrics.export import step_columns
from kvsim.runs import Options, run
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.sim.run import simulate
from kvsim.types import AllocStatus, OutOfBlocks, ScenarioError
from kvsim.workload.source import ListSource


class Moody(PagedAllocator):
    """Refuses every third request for a table, however many blocks are free."""

    num_asked = 0

    def can_allocate(self, *args: Any, **kwargs: Any) -> AllocStatus:
        self.num_asked += 1
        return AllocStatus.LATER if self.num_asked % 3 == 0 else super().can_allocate(*args, **kwargs)


class Capped(PagedAllocator):
    """Gives no sixth block while others have a table."""

    def append_slots(self, seq_id: Any, num_tokens: int = 1) -> Any:
        needs_block = self.num_tokens(seq_id) + num_tokens > self.num_slots(seq_id)
        if needs_block and len(self.block_table(seq_id)) >= 5 and len(self.seq_ids()) > 1:
            raise OutOfBlocks(1, 0)
        return super().append_slots(seq_id, num_tokens)


def steps_of(allocator: PagedAllocator, engine_loop: str) -> list[tuple[Any, ...]]:
    scheduler = PagedScheduler(allocator, max_num_seqs=8, max_num_batched_tokens=512, engine_loop=engine_loop)
    source = ListSource([request(f"r{i}", 20 + i, 30 + 3 * i, 5.0 * i) for i in range(12)])
    simulation = simulate(scheduler, StepCost(), source, record=("steps", "requests"))
    return [tuple(row) for row in simulation.recorder.steps.matrix().tolist()]


@pytest.mark.parametrize("kind", [Moody, Capped])
def test_both_loops_ask_what_was_written_anew(kind: type[PagedAllocator]) -> None:
    calendar = steps_of(kind(40, 16), "calendar")
    assert calendar == steps_of(kind(40, 16), "plain")
    assert calendar != steps_of(PagedAllocator(40, 16), "calendar")


class Told(PagedAllocator):
    """Counts how often it is told of text."""

    num_told = 0

    def register(self, seq_id: Any, num_tokens: int) -> None:
        self.num_told += 1
        super().register(seq_id, num_tokens)


class ToldAndMany(Told):
    """Has its own way to let many grow, too."""

    def grow_each(self, seq_ids: Any) -> int:
        return super().grow_each(seq_ids)


class Delegating:
    """The methods of the protocol and no others, and a prefix cache."""

    block_size = 16
    enable_prefix_caching = True

    def __init__(self, num_blocks: int) -> None:
        self.inner = PagedAllocator(num_blocks, 16, enable_prefix_caching=True, free_list="lru")
        for name in vars(KVAllocator):
            if callable(getattr(self.inner, name, None)) and not name.startswith("_"):
                setattr(self, name, getattr(self.inner, name))

    @property
    def num_blocks(self) -> int:
        return self.inner.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.inner.num_free_blocks


def cached_run(kind: type[PagedScheduler] | type[VllmV1Scheduler], allocator: Any) -> tuple[int, list[Any]]:
    """Preemptions, and the steps, of requests that do not fit together."""
    scheduler = kind(allocator, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=600)
    source = ListSource([request(f"r{i}", 20 + i, 60 + 9 * i, 5.0 * (i // 2)) for i in range(12)])
    simulation = simulate(scheduler, StepCost(), source, record=("steps", "requests"))
    num_preemptions = sum(step_columns(simulation.recorder)["num_preempted"])
    return num_preemptions, [tuple(row) for row in simulation.recorder.steps.matrix().tolist()]


@pytest.mark.parametrize("kind", [PagedScheduler, VllmV1Scheduler, VllmV1AsyncScheduler])
def test_the_protocol_is_all_that_an_allocator_with_a_prefix_cache_needs(kind: Any) -> None:
    built_in = cached_run(kind, PagedAllocator(40, 16, enable_prefix_caching=True, free_list="lru"))
    assert built_in[0] > 0
    assert cached_run(kind, Delegating(40)) == built_in


@pytest.mark.parametrize("kind", [PagedScheduler, VllmV1Scheduler])
def test_who_registers_in_its_own_way_is_told_of_every_block(kind: Any) -> None:
    one_by_one, many = (cls(80, 16, enable_prefix_caching=True) for cls in (Told, ToldAndMany))
    assert cached_run(kind, one_by_one) == cached_run(kind, many)
    assert one_by_one.num_told == many.num_told > 0


class Rewritten(PagedAllocator):
    """Appends as before, but nobody can know that: nothing is taken back from it."""

    def append_slots(self, seq_id: Any, num_tokens: int = 1) -> Any:
        return super().append_slots(seq_id, num_tokens)


@pytest.mark.parametrize(
    ("kind", "keywords", "can_leave"),
    [
        (PagedAllocator, {}, True),
        (PagedAllocator, {"sliding_window": 16}, True),
        (PagedAllocator, {"sliding_window": 16, "upstream_faults": True}, False),
        (Rewritten, {}, False),
        (Rewritten, {"sliding_window": 16}, False),
    ],
)
@pytest.mark.parametrize("prompts", [(5, 8), (5, 8, 8), (6, 7, 8)])
def test_a_victim_that_had_its_turn_is_one_in_both_loops(
    kind: type[PagedAllocator], keywords: dict[str, Any], can_leave: bool, prompts: tuple[int, ...]
) -> None:
    """The oldest is pushed out by a younger one: in the calendar the allocator may not know of its token yet."""

    def run_of(engine_loop: str) -> list[tuple[Any, ...]]:
        scheduler = PagedScheduler(
            kind(4, 4, num_host_blocks=9, **keywords),
            preemption="swap",
            victim=lambda running: next(iter(running)),
            engine_loop=engine_loop,
            upstream_faults=keywords.get("upstream_faults", False),
        )
        source = ListSource([request(f"r{i}", length, 6, 0.0) for i, length in enumerate(prompts)])
        recorder = simulate(scheduler, StepCost(), source, record=("steps", "requests")).recorder
        assert recorder.totals.num_preemptions > 0
        # Who pushed the oldest out is the oldest next, and its own victim: that one may be swapped by each.
        assert can_leave == (recorder.totals.num_recomputed_tokens == 0)
        return [tuple(row) for row in recorder.steps.matrix().tolist()]

    assert run_of("calendar") == run_of("plain")


def test_a_shortcut_stands_for_the_calls_it_was_written_with() -> None:
    class Renamed(PagedAllocator):
        """Nothing of its own."""

    class Both(Capped):
        def grow_each(self, seq_ids: Any) -> int:
            return super().grow_each(seq_ids)

    calls = ("append_slots",)
    assert stands_for(PagedAllocator(4, 16), "grow_each", calls)
    assert stands_for(Renamed(4, 16), "grow_each", calls)
    assert stands_for(Both(4, 16), "grow_each", calls)
    assert not stands_for(Capped(4, 16), "grow_each", calls)
    assert not stands_for(object(), "grow_each", calls)


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
def test_a_scenario_s_own_allocator_that_changes_nothing_gives_the_built_in_results(
    engine_loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "derived_for_test.py").write_text(
        "from kvsim.memory import PagedAllocator\n\nclass Mine(PagedAllocator):\n    pass\n\n"
        "def oldest(running):\n    return next(iter(running))\n"
    )
    monkeypatch.chdir(tmp_path)
    base = {
        "engine_loop": engine_loop,
        "memory": {"num_gpu_blocks_override": 24, "num_cpu_blocks_override": 64},
        # The oldest had its turn when it is pushed out: what it took goes back before it is swapped.
        "scheduler": {"preemption": "swap", "victim": "derived_for_test:oldest"},
        "workload": {
            "num_requests": 24,
            "arrivals": {"type": "batch"},
            "lengths": {"type": "uniform", "prompt": [20, 60], "output": [20, 90]},
        },
    }
    built_in = run(base | {"allocator": {"block_size": 16}}).summary
    own = run(base | {"allocator": {"type": "derived_for_test:Mine", "block_size": 16}}).summary
    told = ("warnings", "name")
    assert built_in["num_swapped_out_blocks"] > 0
    assert {key: own[key] for key in built_in if key not in told} == {
        key: value for key, value in built_in.items() if key not in told
    }


def test_one_object_that_answers_for_itself_has_no_shortcut() -> None:
    patched, wrapped = PagedAllocator(4, 16), PagedAllocator(4, 16)
    patched.append_slots = lambda seq_id, num_tokens=1: ()  # type: ignore[method-assign]
    wrapped.append_slots = functools.wraps(wrapped.append_slots)(  # type: ignore[method-assign]
        lambda *args: type(wrapped).append_slots(wrapped, *args)
    )
    assert not stands_for(patched, "grow_each", ("append_slots",))
    assert stands_for(wrapped, "grow_each", ("append_slots",))


def test_a_journal_takes_no_shortcut_away() -> None:
    observed = PagedAllocator(4, 16, journal=Journal())
    for shortcut in ("grow_each", "fill_each", "retract"):
        assert stands_for(observed, shortcut, ("append_slots", "register"))


def test_a_journal_changes_no_decision() -> None:
    """Who had its turn when it is pushed out is swapped: what it took in this step goes back before."""
    scenario = {
        "memory": {"num_gpu_blocks_override": 3, "num_cpu_blocks_override": 3},
        "allocator": {"block_size": 4},
        "scheduler": {
            "max_num_batched_tokens": 3, "preemption": "swap", "scheduling_policy": "priority",
            "admission": "first_chunk", "prefill_first": True, "max_model_len": 6,
        },
        "workload": {
            "num_requests": 30, "arrivals": {"type": "poisson", "request_rate": 400},
            "lengths": {"type": "uniform", "prompt": [3, 3], "output": [1, 3]}, "priorities": {0: 0.5, 3: 0.5},
        },
        "cost": {"step_ms": 1},
    }  # fmt: skip
    plain, observed = run(scenario), run(scenario, options=Options(plots=False, debug=True))
    assert plain.summary["num_swapped_out_blocks"] > 0
    assert observed.summary == plain.summary


class Wrapped:
    """Blocks on demand, by no class that the engines know."""

    enable_prefix_caching = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._blocks = PagedAllocator(num_blocks, block_size)

    def __getattr__(self, name: str) -> Any:
        if name not in dir(KVAllocator):
            raise AttributeError(name)
        return getattr(self._blocks, name)


def under_orca(kind: str, **values: Any) -> Any:
    scenario = {
        "engine": "orca-max",
        "memory": {"kv_cache_memory_bytes": "1GiB"},
        "allocator": {"type": f"{__name__}:{kind}", "block_size": 16},
        "scheduler": {"max_model_len": 1024} | values,
        "workload": {"requests": [{"prompt_tokens": 200, "output_tokens": 100}] * 8},
    }
    return run(scenario, options=Options(check=True))


@pytest.mark.parametrize("kind", ["Capped", "Moody", "Rewritten"])
def test_blocks_that_come_on_demand_are_not_reserved(kind: str) -> None:
    """Of a class derived from the built-in one the engines ask what they ask of that."""
    reserving, growing = under_orca(kind), under_orca(kind, reservation=None)
    assert reserving.summary["completed"] == 8
    assert reserving.requests.equals(growing.requests)


def test_an_allocator_that_sets_nothing_aside_cannot_keep_a_reservation() -> None:
    with pytest.raises(ScenarioError, match=r"scheduler.reservation: Wrapped gave \d+ of 1024 slots: it does not set"):
        under_orca("Wrapped")
    assert under_orca("Wrapped", reservation=None).summary["completed"] == 8
