"""Whole runs of scenarios that nobody would write: an answer or a plain error, never a hang; and what that found."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from law_watch import watched_run
from random_runs import draw_scenario

from kvsim.attention import Replay
from kvsim.registry import build
from kvsim.runs import Options, run
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.scenario.schema import ENGINES
from kvsim.scheduling.continuous import LivelockError
from kvsim.sim.run import simulate
from kvsim.sim.server import Deadlock
from kvsim.types import AllocatorError, LawViolation, ScenarioError

Scenario = dict[str, Any]
CHECKED = Options(plots=False, check=True)


def senseless(seed: int) -> Scenario:
    """A drawn scenario with a few values swapped for others: some fit together, most do not."""
    rng = Random(seed)
    scenario = draw_scenario(rng.choice(ENGINES), seed)
    choices: list[tuple[str, str, list[Any]]] = [
        ("memory", "num_gpu_blocks_override", [1, 2, 3, 200]),
        ("memory", "num_cpu_blocks_override", [0, 1]),
        ("allocator", "block_size", [1, 7, 64]),
        ("allocator", "watermark", [0, 0.5, 0.99]),
        ("allocator", "sliding_window", [1, 4, 8, 64]),
        ("allocator", "enable_prefix_caching", [True, False]),
        ("scheduler", "max_num_seqs", [1, 2, 1000]),
        ("scheduler", "max_num_batched_tokens", [1, 2, 16, 10_000]),
        ("scheduler", "max_model_len", [1, 2, 3, 10_000]),
        ("scheduler", "enable_chunked_prefill", [False]),
        ("workload", "max_concurrency", [1]),
        ("workload", "num_requests", [1, 3]),
        ("cost", "step_ms", [0, 1e-6, 1000]),
    ]
    for block, key, values in rng.sample(choices, rng.randint(1, 4)):
        scenario[block][key] = rng.choice(values)
    scenario["upstream_faults"] = rng.random() < 0.15
    return scenario


def run_or_refuse(scenario: Scenario) -> None:
    """Faults of the real engines may end a run; without them only the scenario itself may be refused."""
    try:
        run(scenario, options=CHECKED)
    except ScenarioError:
        pass
    except (Deadlock, LivelockError, AllocatorError):
        if not scenario["upstream_faults"]:
            raise
    except LawViolation as error:
        # The faults miscount references; the ledger's books are ours.
        if not (scenario["upstream_faults"] and str(error).startswith("law 4")):
            raise
    except Exception as error:
        if not (scenario["upstream_faults"] and type(error).__name__ == "OutOfHostBlocks"):
            raise


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@settings(max_examples=300, phases=PHASES)
@given(seed=st.integers(0, 2**40))
def test_any_scenario_ends(seed: int) -> None:
    run_or_refuse(senseless(seed))


@pytest.mark.deep
@settings(max_examples=10_000, phases=PHASES)
@given(seed=st.integers(0, 2**40))
def test_any_scenario_ends_deep(seed: int) -> None:
    run_or_refuse(senseless(seed))


def written(engine: str, num_blocks: int, requests: list[Scenario], **blocks: Scenario) -> Scenario:
    """A small scenario of written requests; prompts of the same length arrive together."""
    scenario: Scenario = {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": num_blocks},
        "allocator": {"block_size": 4, "watermark": 0, "enable_prefix_caching": False},
        "scheduler": {},
        "workload": {"requests": requests},
        "cost": {"step_ms": 1},
    }
    for name, values in blocks.items():
        scenario[name] = scenario[name] | values
    return scenario


def request(prompt: int, output: int, **more: Any) -> Scenario:
    return {"prompt_tokens": prompt, "output_tokens": output, **more}


def test_an_abort_in_a_first_step_that_does_not_end() -> None:
    """There is hindsight, and no row to apply it to."""
    run_or_refuse(senseless(3_656_279_291))


def test_beams_that_were_swapped_out_end_at_their_own_times() -> None:
    """Slots that they shared before are not given up by each of them."""
    run_or_refuse(senseless(2015))


def test_samples_of_different_lengths_that_give_up_after_the_fork() -> None:
    """The last of them was to write behind the prompt: what it wanted was reserved, not what the longest wanted."""
    run_or_refuse(senseless(10_011_451))


def test_a_circle_ends_although_the_engines_own_guard_is_off() -> None:
    """A prompt of 4 blocks is let in by its first chunk, runs out of 3, and preempts itself, again and again."""
    scenario = written(
        "vllm-v1",
        4,
        [request(13, 2)],
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 4, "scheduler_reserve_full_isl": False},
    ) | {"upstream_faults": True}
    with pytest.raises(LivelockError, match="switch upstream_faults off"):
        run(scenario, options=Options(plots=False))


@pytest.mark.parametrize("engine", ["paged", "no-evict"])
def test_engines_without_an_original_keep_no_faults_of_one(engine: str) -> None:
    """Behind a window the paper's engine miscounts what samples share: its blocks leak, and are freed twice."""
    num_ends = 0
    for seed in range(60):
        scenario = draw_scenario(engine, seed)
        scenario["allocator"] |= {
            "sliding_window": scenario["allocator"]["block_size"] * (1 + seed % 4),
            "enable_prefix_caching": False,
        }
        try:
            run(scenario | {"upstream_faults": True}, options=CHECKED)
        except (Deadlock, LivelockError):
            # The guards are off, and what can never be served waits for ever.
            continue
        num_ends += 1
    assert num_ends > 40


def test_three_beams_over_a_window_of_one_block_find_their_blocks() -> None:
    scenario = written(
        "no-evict",
        3,
        [request(7, 11, beam_width=3)],
        allocator={"sliding_window": 4},
        scheduler={"max_num_batched_tokens": 4},
    )
    with_faults = run(scenario | {"upstream_faults": True}, options=CHECKED).summary
    assert with_faults["completed"] == 1
    assert with_faults == run(scenario, options=CHECKED).summary


@pytest.mark.parametrize(("prompt", "output"), [(4, 1), (3, 2), (4, 4), (7, 6), (8, 5)])
def test_a_superfluous_step_stores_a_slot_that_counts_as_internal(prompt: int, output: int) -> None:
    """The stop token is not foreseen (max_output_tokens is larger), so one more step is planned."""
    scenario = written("vllm-v1-async", 9, [request(prompt, output, max_output_tokens=output + 5)])
    result = run(scenario, options=CHECKED)
    steps = result.steps
    # Stored in the end: prompt + output - 1, and the superfluous token's slot is none of them.
    assert steps.token_states.max() == prompt + output - 1
    assert result.summary["completed"] == 1


WINDOW: Scenario = {"sliding_window": 8}


@pytest.mark.parametrize("engine", ["paged", "no-evict", "vllm-v0"])
def test_a_window_s_ring_holds_its_latest_tokens(engine: str) -> None:
    """Block size 4, window 8: two blocks are all that a request ever holds, and both are full of states from 8 on."""
    result = run(written(engine, 5, [request(6, 30)], allocator=WINDOW), options=CHECKED)
    steps = result.steps
    assert steps.used_blocks.max() == 2
    assert list(steps.token_states[:4]) == [6, 7, 8, 8]
    assert list(steps.reserved[:4]) == [2, 1, 0, 0]
    assert set(steps.internal_frag) == {0}
    assert int(result.requests.peak_blocks[0]) == 2


def test_promises_of_no_evict_know_the_window() -> None:
    """36 tokens are 9 blocks, but a window of 8 holds two: three such requests share a pool of 5, two at a time."""
    result = run(written("no-evict", 5, [request(6, 30)] * 3, allocator=WINDOW), options=CHECKED)
    assert result.summary["completed"] == 3
    assert result.summary["running_peak"] == 2


@pytest.mark.parametrize("sampling", [{"n": 3}, {"beam_width": 3}])
def test_samples_behind_a_window_that_can_never_fit_are_rejected_at_arrival(sampling: Scenario) -> None:
    """Three rings of two blocks, nothing of the short prompt shared: 6 blocks."""
    result = run(written("paged", 5, [request(3, 20, **sampling)], allocator=WINDOW), options=CHECKED)
    assert result.summary["num_rejected"] == 1
    assert result.requests.reason[0] == "needs 6 blocks (3 sequences of 22 slots), the pool has 5"
    fits = run(written("paged", 6, [request(3, 20, **sampling)], allocator=WINDOW), options=CHECKED)
    assert fits.summary["completed"] == 1


def test_a_swapped_group_counts_a_full_shared_tail_once() -> None:
    """Of three samples behind a full block each takes a new one; nobody copies: 1 + 3 blocks of 5 do."""
    scenario = written(
        "paged",
        5,
        [request(8, 6, n=3), request(8, 6, n=3), request(8, 6, n=3)],
        memory={"num_cpu_blocks_override": 5},
        allocator={"block_size": 8, "free_list": "lifo"},
        scheduler={"preemption": "swap", "prefill_first": True},
    )
    simulation, _ = watched_run(scenario)
    assert simulation.recorder.totals.num_swapped_in_blocks > 0


def test_a_swapped_group_wider_than_the_budget_comes_back() -> None:
    scenario = written(
        "paged",
        9,
        [request(9, 7, beam_width=3)] * 6,
        memory={"num_cpu_blocks_override": 9},
        scheduler={"preemption": "swap", "prefill_first": True, "max_num_batched_tokens": 1},
    )
    simulation, watch = watched_run(scenario)
    assert set(watch.ends.values()) == {"finished"}
    assert simulation.recorder.totals.num_swapped_in_blocks > 0


class PlanLog:
    """Keeps the plans of a run."""

    def __init__(self) -> None:
        self.plans: list[Any] = []

    def on_submit(self, request: Any, reason: str | None, now: int) -> None: ...

    def on_abort(self, request_id: str, sequences: Any, now: int) -> None: ...

    def on_plan(self, plan: Any, now: int) -> None:
        self.plans.append(plan)

    def on_step(self, plan: Any, outcome: Any, start_ns: int, end_ns: int) -> None: ...


def plans_of(scenario: Scenario, observe: Callable[[Any], tuple[Any, ...]] = lambda engine: ()) -> list[Any]:
    engine = build(scenario_from_dict(scenario).scenario, detail=True)
    log = PlanLog()
    simulate(engine.scheduler, engine.cost, engine.source, check=True, observers=(log, *observe(engine)))
    return log.plans


def test_nothing_is_copied_for_a_victim() -> None:
    """Every copy of a plan goes into a block that a table of the plan's names; victims' blocks are nobody's."""
    num_copies = num_victims = 0
    for seed in range(60):
        scenario = draw_scenario("paged", seed)
        scenario.pop("horizon", None)
        for plan in plans_of(scenario):
            named = {block_id for update in plan.table_updates for block_id in update.block_ids}
            assert {copy.dst for copy in plan.copies} <= named
            assert len({copy.dst for copy in plan.copies}) == len(plan.copies)
            victims = {preemption.seq.seq_id for preemption in plan.preempted}
            assert not victims & {update.seq.seq_id for update in plan.table_updates}
            num_copies += len(plan.copies)
            num_victims += bool(victims and plan.copies)
    assert num_copies > 20


COMPACTING: Scenario = {
    "engine": "orca-oracle",
    "memory": {"num_gpu_blocks_override": 60},
    "allocator": {"block_size": 1, "placement": "first_fit", "compaction": "on_demand"},
    "scheduler": {"max_num_seqs": 8, "max_model_len": 60},
    "workload": {
        "num_requests": 60,
        "lengths": {"type": "uniform", "prompt": [1, 12], "output": [1, 14]},
        "arrivals": {"type": "poisson", "request_rate": 300},
    },
    "cost": {"step_ms": 1},
}


def replay(engine: Any) -> tuple[Any, ...]:
    return (Replay(1, engine.scheduler.allocator.num_blocks),)


def test_moves_of_a_compaction_are_executed_first() -> None:
    plans = plans_of(COMPACTING, replay)
    assert sum(len(plan.moves) for plan in plans) > 5


def test_a_compaction_that_is_not_executed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replay, "_move_regions", lambda self, moves: {})
    with pytest.raises(LawViolation, match="law 10"):
        plans_of(COMPACTING, replay)
