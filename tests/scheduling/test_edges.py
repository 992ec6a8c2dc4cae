"""Limits met exactly, and what a plan says beside its decisions."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling.stepping import drive, paged, request
from scheduling.test_continuous_engines import most_advanced, v1
from scheduling.test_orca import orca
from scheduling.test_orca import request as orca_request
from scheduling.test_static import request as static_request
from scheduling.test_static import run as run_static
from scheduling.test_static import static, step
from scheduling.test_vllm_v0 import make, start
from scheduling.test_vllm_v0 import request as v0_request

import kvsim
from kvsim.memory import PagedAllocator
from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.request import Sampling, Status
from kvsim.runs import Options, RunResult
from kvsim.scenario.schema import ENGINES
from kvsim.scheduling.continuous import LivelockError
from kvsim.scheduling.paged import PagedScheduler
from kvsim.scheduling.policies import random_beams
from kvsim.scheduling.reservations import make_reservation
from kvsim.types import ScenarioError


def test_a_static_batch_holds_as_many_samples_as_it_has_places() -> None:
    scheduler = static(num_slots=100, max_num_seqs=3)
    assert scheduler.submit(static_request("A", 2, 3, sampling=Sampling(n=3))) is None
    rejection = scheduler.submit(static_request("B", 2, 3, sampling=Sampling(n=4)))
    assert rejection is not None
    assert "needs 4 places, max_num_seqs is 3" in rejection.reason
    assert [emitted for emitted, _ in run_static(scheduler)] == [3, 3, 3]


def test_a_static_batch_resumes_nobody_and_finds_nothing_cached() -> None:
    scheduler = static(max_num_seqs=2)
    scheduler.submit(static_request("A", 2, 3))
    scheduler.submit(static_request("B", 2, 1))
    plan, _ = step(scheduler)
    assert [admission[1:] for admission in plan.admitted] == [(0, False), (0, False)]


def test_a_prompt_without_budget_left_waits_for_the_next_step() -> None:
    scheduler = static(max_num_seqs=2, max_num_batched_tokens=5)
    for name in "AB":
        scheduler.submit(static_request(name, 5, 2))
    chunks = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        chunks.append([(chunk.seq.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.prefills])
    # A decodes while B is computed: 1 + 4 tokens, and then the last one.
    assert chunks[:3] == [[("A", 0, 5)], [("B", 0, 4)], [("B", 4, 1)]]


def test_an_unknown_preemption_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"preemption.*'swop'.*recompute"):
        paged(4, 4, preemption="swop")


def test_what_a_request_may_store_ends_with_the_model() -> None:
    """The last token of a text is never stored: 9 tokens at most are 8 slots, two blocks of 4."""
    scheduler = paged(2, 4, max_model_len=9, watermark=0.0)
    run = drive(scheduler, [request("a", 6, 50)])
    assert not run.rejected
    assert run.finished_at == {"a": 3}
    assert drive(paged(2, 4, max_model_len=10, watermark=0.0), [request("a", 6, 50)]).rejected


def test_a_livelock_is_claimed_after_as_many_preemptions_as_it_says() -> None:
    """1,000 in a row, and 10 more for each request."""
    scheduler = paged(4, 4, victim=most_advanced, admission="first_chunk", long_prefill_token_threshold=2)
    with pytest.raises(LivelockError, match=r"^livelock: 1021 preemptions in a row"):
        drive(scheduler, [request("A", 14, 2), request("B", 14, 2)], max_steps=10_000)


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_table_entries_are_counted_as_they_are_listed(num_host_blocks: int) -> None:
    scheduler = make(12, num_host_blocks=num_host_blocks)
    run = start(scheduler, *(v0_request(name, 9, 8, 8) for name in "abc")).to_the_end()
    assert run.preemptions
    for plan in run.plans:
        assert plan.shape.num_table_rows == len(plan.table_updates)
        assert plan.shape.num_table_updates == sum(len(update.block_ids) for update in plan.table_updates)


def test_a_victim_s_next_tokens_are_what_memory_was_wanted_for() -> None:
    run = start(make(6), v0_request("a", 8, 9), v0_request("b", 8, 9)).to_the_end()
    refused = [plan for plan in run.plans if plan.preempted]
    assert refused
    assert all(plan.waits_for_memory and plan.head_slots == 4 for plan in refused)


@pytest.mark.parametrize("engine", ["vllm-v1", "vllm-v1-async", "orca-max", "static", "no-evict", "paged"])
def test_nobody_is_swapped_without_host_memory(engine: str) -> None:
    lengths = {"type": "uniform", "prompt": [10, 60], "output": [10, 60]}
    workload = {"num_requests": 20, "arrivals": {"type": "batch"}, "lengths": lengths}
    result = kvsim.run(
        {
            "engine": engine,
            "memory": {"num_gpu_blocks_override": 30},
            "scheduler": {"max_model_len": 128},
            "workload": workload,
        }
    )
    assert set(result.steps["num_swapped"]) == {0}


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize("make_scheduler", [paged, v1], ids=["paged", "v1"])
def test_continuous_engines_count_entries_as_they_list_them(make_scheduler: Any, engine_loop: str) -> None:
    scheduler = make_scheduler(12, 4, detail=True, engine_loop=engine_loop)
    run = drive(scheduler, [request("a", 9, 12), request("b", 9, 12, n=2), *(request(name, 9, 12) for name in "cd")])
    assert run.preempted
    for plan in run.plans:
        assert plan.shape.num_table_rows == len(plan.table_updates)
        assert plan.shape.num_table_updates == sum(len(update.block_ids) for update in plan.table_updates)


def test_decodes_behind_a_prompt_wait_for_its_budget() -> None:
    """A's chunk of 4 tokens comes first; 6 of B's 8 samples find a token of budget left."""

    def steps(engine_loop: str) -> Any:
        requests = [
            {"prompt_tokens": 60, "output_tokens": 3},
            {"prompt_tokens": 4, "output_tokens": 20, "n": 8},
        ]
        scenario = {
            "engine_loop": engine_loop,
            "memory": {"num_gpu_blocks_override": 200},
            "scheduler": {"max_num_batched_tokens": 10, "long_prefill_token_threshold": 4, "max_model_len": 128},
            "workload": {"requests": requests},
        }
        return kvsim.run(scenario).steps

    calendar, plain = steps("calendar"), steps("plain")
    assert calendar.equals(plain)
    assert (calendar["num_decode_tokens"] + calendar["num_prefill_tokens"]).max() == 10


@pytest.mark.parametrize("gives_up", [False, True], ids=["patient", "impatient"])
@pytest.mark.parametrize("engine", ["paged", "vllm-v0", "vllm-v1", "orca-max", "orca-pow2", "static", "no-evict"])
def test_where_requests_wait_all_the_time_both_accounts_agree(engine: str, gives_up: bool) -> None:
    """The ledger's corrections in hindsight are dated in both, too."""
    lengths = {"type": "uniform", "prompt": [10, 60], "output": [10, 60]}
    scenario: dict[str, Any] = {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": 30},
        "scheduler": {"max_model_len": 128},
        "workload": {"num_requests": 200, "arrivals": {"type": "batch"}, "lengths": lengths},
        "horizon": "1s",
    }
    if gives_up:
        scenario["workload"]["abort"] = {"probability": 0.9, "after": 1.0}
    summary = kvsim.run(scenario).summary
    assert summary["saturated_share"] == 1
    assert summary["kv_saturated"] == summary["kv"]


def test_windows_are_recomputed_without_sharing() -> None:
    """Rings are overwritten: samples that come back after a recompute have every block for themselves."""
    scheduler = make(10, sliding_window=8, preemption="recompute")
    run = start(scheduler, *(v0_request(name, 8, 9) for name in "abc"), v0_request("d", 4, 14, 14))
    num_back = 0
    while scheduler.has_work:
        plan = run.step()
        back = [entry.seq for entry in plan.admitted if entry.is_resumed]
        num_back += len(back) > 1
        tables = [set(scheduler.allocator.block_table(seq.seq_id)) for seq in back if seq.status is Status.RUNNING]
        assert sum(map(len, tables)) == len(set().union(*tables))
    assert num_back


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize("make_scheduler", [paged, v1], ids=["paged", "v1"])
def test_who_looks_closely_counts_the_same(make_scheduler: Any, engine_loop: str) -> None:
    def shapes(detail: bool) -> list[Any]:
        scheduler = make_scheduler(12, 4, detail=detail, engine_loop=engine_loop)
        return [plan.shape for plan in drive(scheduler, [request(name, 9, 12) for name in "abcd"]).plans]

    assert shapes(True) == shapes(False)


def test_a_beam_search_keeps_its_width() -> None:
    run = start(make(60), v0_request("a", 6, 12, beams=4)).to_the_end()
    assert [plan.shape.num_decodes for plan in run.plans if plan.is_decode_tick] == [4] * 11


def test_an_unknown_order_of_the_queue_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"scheduling_policy.*'lifo'.*fcfs"):
        paged(4, 4, scheduling_policy="lifo")


def test_who_is_let_in_by_a_compaction_does_not_wait() -> None:
    scheduler = orca(num_slots=20, reservation="oracle", max_model_len=20, compaction="on_demand")
    for name, prompt_len, output_len in (("A", 5, 1), ("B", 5, 6), ("C", 5, 1), ("D", 9, 2)):
        assert scheduler.submit(orca_request(name, prompt_len, output_len)) is None
    plans = []
    while scheduler.has_work:
        plan = scheduler.schedule(0)
        plans.append(plan)
        scheduler.complete(plan)
    moved = [plan for plan in plans if plan.moves]
    assert moved
    assert not any(plan.waits_for_memory or plan.head_slots or plan.head_wait for plan in moved)


@pytest.mark.parametrize("output_len", [1, 2])
def test_a_request_reserves_nothing_that_it_will_not_write(output_len: int) -> None:
    """The last token is not stored: an output of one token needs no slot of its own."""
    allocator = ContiguousAllocator(64, placement="first_fit")
    scheduler = PagedScheduler(allocator, reservation=make_reservation("oracle", 64))
    scheduler.submit(request("A", 5, output_len))
    scheduler.schedule(0)
    assert allocator.usage().num_used == 5 + output_len - 1


def test_who_is_its_own_victim_before_its_turn_is_swapped() -> None:
    """A's eighth token fits its second block; B, the youngest, finds no third one."""
    scheduler = paged(4, 4, preemption="swap", num_host_blocks=8, watermark=0.0)
    run = drive(scheduler, [request("A", 7, 6), request("B", 8, 6)])
    first = next(entry for plan in run.plans for entry in plan.preempted)
    assert (first.seq.request.request_id, first.is_swap) == ("B", True)


def test_what_goes_to_the_host_is_counted_in_full() -> None:
    scheduler = make(8, num_host_blocks=16, preemption="swap")
    run = start(scheduler, *(v0_request(name, 9, 12) for name in "abc"))
    num_swapped = 0
    while scheduler.has_work:
        for entry in run.step().preempted:
            if entry.is_swap:
                num_swapped += 1
                assert scheduler.allocator.num_tokens(entry.seq.seq_id) == entry.num_stored_tokens
    assert num_swapped


def test_an_abort_that_ends_a_static_batch_gives_back_what_it_held() -> None:
    """A ended long ago, and its region stays until B, the last of the batch, gives up; the ledger is recounted."""
    requests = [
        {"prompt_tokens": 20, "output_tokens": 2},
        {"prompt_tokens": 20, "output_tokens": 60, "abort_s": 0.2},
        {"prompt_tokens": 20, "output_tokens": 30, "arrival_s": 0.1},
    ]
    scenario = {
        "engine": "static",
        "memory": {"num_gpu_blocks_override": 16},
        "scheduler": {"max_model_len": 128},
        "workload": {"requests": requests},
    }
    result = kvsim.run(scenario, options=Options(plots=False, check=True))
    assert list(result.requests["status"]) == ["finished", "aborted", "finished"]
    alone = kvsim.run({**scenario, "workload": {"requests": requests[2:]}})
    columns = ["token_states", "reserved", "internal_frag", "external_frag", "free"]
    last = len(alone.steps)
    assert result.steps[columns].tail(last).to_numpy().tolist() == alone.steps[columns].to_numpy().tolist()


class NoWindows:
    """An allocator of the user's that knows nothing of sliding windows."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self._inner = PagedAllocator(num_blocks, block_size)

    def __getattr__(self, name: str) -> Any:
        if name == "window_blocks":
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_an_allocator_without_windows_is_measured_alike() -> None:
    lengths = {"type": "uniform", "prompt": [10, 60], "output": [10, 60]}
    scenario = {
        "memory": {"num_gpu_blocks_override": 30},
        "scheduler": {"max_model_len": 128},
        "workload": {"num_requests": 30, "arrivals": {"type": "batch"}, "lengths": lengths},
    }
    own = kvsim.run({**scenario, "allocator": {"type": f"{__name__}:NoWindows"}})
    usual = kvsim.run({**scenario, "allocator": {"watermark": 0.0}})
    assert own.summary["kv"] == usual.summary["kv"]


def test_three_sharers_of_a_tail_need_two_blocks() -> None:
    """Of those who write into a shared block the last one keeps it: alone in a full pool they go on."""
    run = start(make(4), v0_request("a", 6, 2, 2, 2)).to_the_end()
    assert run.preemptions == []
    assert len(run.plans) == 2


def test_beams_of_two_requests_branch_each_in_its_own_way() -> None:
    children = {tuple(random_beams(seed, 3, 6, 6)) for seed in range(20)}
    assert len(children) > 10
    assert all(sum(counts) == 6 for counts in children)


ONE_SECOND_STEPS = {"step_ms": 1000, "prefill_token_us": 0, "context_token_ns": 0}


def play_by_engine(engine: str, requests: list[dict[str, Any]], **keys: Any) -> RunResult:
    scenario = {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": 40},
        "allocator": {"block_size": 4},
        "scheduler": {"max_model_len": 16, "max_num_seqs": 3},
        "cost": ONE_SECOND_STEPS,
        "workload": {"requests": requests, **keys},
    }
    return kvsim.run(scenario, options=Options(plots=False, check=True))


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "static"])
def test_a_place_that_an_abort_frees_is_taken_in_the_same_step(engine: str) -> None:
    """Two at a time; A gives up at 2 s, so that B arrives then, and the step that begins then computes its prompt."""
    requests = [
        {"id": "C", "prompt_tokens": 5, "output_tokens": 8},
        {"id": "A", "prompt_tokens": 4, "output_tokens": 9, "abort_s": 2},
        {"id": "B", "prompt_tokens": 12, "output_tokens": 2},
    ]
    last = play_by_engine(engine, requests, max_concurrency=2).requests.set_index("request_id").loc["B"]
    assert (last["arrival_s"], last["first_scheduled_s"]) == (2.0, 2.0)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "static"])
def test_a_request_that_is_rejected_on_arrival_leaves_its_place_at_once(engine: str) -> None:
    """Two at a time; the second arrives at 0.5 s, in the middle of a step, and can never be served."""
    requests = [
        {"id": "A", "prompt_tokens": 4, "output_tokens": 6},
        {"id": "X", "prompt_tokens": 40, "output_tokens": 1, "arrival_s": 0.5},
        {"id": "B", "prompt_tokens": 4, "output_tokens": 2, "arrival_s": 0.5},
    ]
    table = play_by_engine(engine, requests, max_concurrency=2).requests.set_index("request_id")
    assert table.loc["X", "status"] == "rejected"
    assert (table.loc["B", "arrival_s"], table.loc["B", "first_scheduled_s"]) == (0.5, 1.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_are_sequences_of_one_request(engine: str) -> None:
    """Two requests of three samples, three sequences at a time: one runs, one waits."""
    requests = [{"prompt_tokens": 6, "output_tokens": 5, "n": 3}] * 2
    result = play_by_engine(engine, requests)
    assert result.steps["num_running"].tolist() == [1] * 10
    assert result.steps["num_waiting"].tolist() == [1] * 5 + [0] * 5
    assert (result.summary["running_peak"], result.summary["running_mean"]) == (1, 1.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_peak_blocks_are_those_of_all_samples(engine: str) -> None:
    """Three samples of 10 stored tokens: blocks 1 + 3 x 2 if they share the prompt's full one, else a region each."""
    result = play_by_engine(engine, [{"prompt_tokens": 6, "output_tokens": 5, "n": 3}])
    slots = {"orca-max": 16, "orca-pow2": 6 + 8, "orca-oracle": 10, "static": 16}.get(engine)
    assert result.requests["peak_blocks"].tolist() == [7 if slots is None else 3 * slots]
    assert result.steps["used_blocks"].max() == result.requests["peak_blocks"].max()


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
@pytest.mark.parametrize(
    ("prompt", "output", "n", "num_blocks", "step", "num_moved", "num_copies"),
    [
        # Both samples store 8 tokens; the first takes the last block for its ninth, the second finds none.
        (6, 5, 2, 7, 4, 3, 1),
        # The first of three samples copies the shared tail into the last block, the second finds none.
        (6, 2, 3, 6, 1, 2, 2),
    ],
)
def test_a_group_of_which_some_had_their_turn_is_swapped_as_it_was(
    engine_loop: str, prompt: int, output: int, n: int, num_blocks: int, step: int, num_moved: int, num_copies: int
) -> None:
    """B's blocks of before this step move to the host; what its first sample took goes back to the pool."""
    late = {"arrival_s": 0.001} if step == 4 else {}
    result = kvsim.run(
        {
            "engine_loop": engine_loop,
            "memory": {"num_gpu_blocks_override": num_blocks, "num_cpu_blocks_override": 8},
            "allocator": {"block_size": 4, "watermark": 0.0},
            "scheduler": {"preemption": "swap"},
            "cost": {"type": "linear", "step_ms": 1.0, "prefill_token_us": 0, "context_token_ns": 0},
            "workload": {
                "requests": [
                    {"id": "a", "prompt_tokens": 8, "output_tokens": 9},
                    {"id": "b", "prompt_tokens": prompt, "output_tokens": output, "n": n, **late},
                ]
            },
        },
        options=Options(check=True, replay=True, plots=False),
    )
    summary = result.summary
    assert result.steps.swapped_out_blocks.tolist()[step] == num_moved
    assert (summary["num_swapped_out_blocks"], summary["num_swapped_in_blocks"]) == (num_moved, num_moved)
    assert (summary["num_preemptions"], summary["num_recomputed_tokens"]) == (1, 0)
    assert summary["num_cow_copies"] == num_copies


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
def test_a_less_urgent_request_that_had_its_turn_is_swapped(engine_loop: str) -> None:
    """A stores 9 tokens in 3 blocks and has had its turn when B, more urgent, wants a third block of 5."""
    requests = [
        {"id": "a", "prompt_tokens": 8, "output_tokens": 5, "priority": 1},
        {"id": "b", "prompt_tokens": 8, "output_tokens": 5, "arrival_s": 0.0005},
    ]
    result = kvsim.run(
        {
            "engine_loop": engine_loop,
            "memory": {"num_gpu_blocks_override": 5, "num_cpu_blocks_override": 8},
            "allocator": {"block_size": 4, "watermark": 0.0},
            "scheduler": {"preemption": "swap", "scheduling_policy": "priority"},
            "cost": {"type": "linear", "step_ms": 1.0, "prefill_token_us": 0, "context_token_ns": 0,
                     "swap_block_us": 0, "swap_bandwidth_gb_s": 1e15},
            "workload": {"requests": requests},
        },
        options=Options(check=True, replay=True, plots=False),
    )  # fmt: skip
    assert result.summary["num_swapped_out_blocks"] == result.summary["num_swapped_in_blocks"] == 3
    assert result.summary["num_recomputed_tokens"] == 0
    assert [round(1000 * end) for end in result.requests.finish_s] == [9, 6]


@pytest.mark.parametrize(
    ("engine", "preemption", "num_host_blocks", "samples", "num_told"),
    [
        ("paged", "swap", 1, 1, 1),
        ("paged", "swap", 2, 1, 0),
        ("paged", "swap_forked", 0, 2, 1),
        ("paged", "swap_forked", 0, 1, 0),
        ("vllm-v0", "auto", 0, 2, 1),
        ("vllm-v0", "auto", 0, 1, 0),
        ("paged", "recompute", 0, 2, 0),
    ],
)
def test_a_victim_that_finds_no_room_on_the_host_is_told(
    engine: str, preemption: str, num_host_blocks: int, samples: int, num_told: int
) -> None:
    """Two rivals of two blocks each; the second is pushed out once, and the host has room for so many blocks."""
    result = kvsim.run(
        {
            "engine": engine,
            "memory": {"num_gpu_blocks_override": 4 if samples == 1 else 6, "num_cpu_blocks_override": num_host_blocks},
            "allocator": {"block_size": 4, "watermark": 0},
            "scheduler": {"max_model_len": 16, "preemption": preemption},
            "workload": {"requests": [{"prompt_tokens": 8, "output_tokens": 5, "n": samples}] * 2},
        }
    )
    assert result.summary["num_preemptions"] == 1
    told = [text for text in result.summary["warnings"] if "were to be swapped" in text]
    expected = (
        "victims recomputed that were to be swapped, for the host had no room for their blocks: 1; "
        f"it holds {num_host_blocks} blocks (memory.num_cpu_blocks_override)"
    )
    assert told == [expected] * num_told
    assert (result.summary["num_recomputed_tokens"] > 0) is (result.summary["num_swapped_out_blocks"] == 0)


def test_a_swap_refused_in_a_step_that_the_horizon_cuts_off_is_none() -> None:
    scenario = {
        "memory": {"num_gpu_blocks_override": 4, "num_cpu_blocks_override": 1},
        "allocator": {"block_size": 4, "watermark": 0},
        "scheduler": {"max_model_len": 17, "preemption": "swap"},
        "workload": {"requests": [{"prompt_tokens": 8, "output_tokens": 9}] * 2},
        "cost": {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    cut, whole = (kvsim.run(scenario, horizon=horizon) for horizon in ("1.5ms", "2ms"))
    assert [run.summary["num_preemptions"] for run in (cut, whole)] == [0, 1]
    assert [sum("were to be swapped" in text for text in run.summary["warnings"]) for run in (cut, whole)] == [0, 1]
