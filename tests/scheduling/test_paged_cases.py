"""Bug and question cases of the generic engine, with values derived by hand; time is in steps."""

from __future__ import annotations

import pytest
from scheduling.stepping import Run, drive, paged, request

LOOPS = pytest.mark.parametrize("engine_loop", ["calendar", "plain"])


@LOOPS
@pytest.mark.parametrize(
    ("prompt_len", "output_len", "peak"),
    [(1, 1, 1), (1, 16, 1), (1, 17, 2), (15, 2, 1), (16, 1, 1), (16, 2, 2), (17, 16, 2), (17, 17, 3), (32, 1, 2)],
)
def test_k01_exact_multiples_of_the_block_size(prompt_len: int, output_len: int, peak: int, engine_loop: str) -> None:
    scheduler = paged(10, 16, engine_loop=engine_loop)
    run = drive(scheduler, [request("a", prompt_len, output_len)])
    assert run.peak == peak == -(-(prompt_len + output_len - 1) // 16)
    assert len(run.plans) == output_len
    assert scheduler.allocator.num_free_blocks == 10


@LOOPS
def test_k05_a_request_larger_than_the_pool_is_rejected_at_arrival(engine_loop: str) -> None:
    scheduler = paged(50, 16, engine_loop=engine_loop)
    requests = [request("a", 640, 161), request("b", 640, 162), request("c", 801, 1), request("d", 100, 10)]
    run = drive(scheduler, requests)
    assert run.finished_at == {"a": 161, "d": 10}
    assert run.preempted == []
    assert sorted(run.rejected) == ["b", "c"]
    assert all("51 blocks" in reason and "50" in reason for reason in run.rejected.values())


@LOOPS
def test_k07_two_rivals_preempt_once(engine_loop: str) -> None:
    scheduler = paged(4, 4, engine_loop=engine_loop)
    run = drive(scheduler, [request("A", 8, 9), request("B", 8, 9)])
    assert run.used[:2] == [4, 3]
    assert run.finished_at == {"A": 9, "B": 17}
    assert run.preempted == ["B"]
    assert run.num_recomputed == 8
    assert run.plans[9].prefills[0].num_tokens == 9
    assert scheduler.allocator.num_free_blocks == 4


@LOOPS
def test_k13_hit_blocks_in_the_free_list_are_not_free_capacity(engine_loop: str) -> None:
    scheduler = paged(5, 4, enable_prefix_caching=True, engine_loop=engine_loop)
    run = drive(scheduler, [request("X", 12, 1, source=1)])
    scheduler.submit(request("Y", 20, 1, 10, source=1))
    plan = scheduler.schedule(10)
    assert plan.admitted[0].num_hit_tokens == 12
    usage = scheduler.allocator.usage()
    assert (usage.num_used, usage.num_evicted) == (5, 0)
    assert list(scheduler.allocator.block_table(plan.admitted[0].seq.seq_id))[:3] == [0, 1, 2]
    scheduler.complete(plan)

    scheduler = paged(5, 4, enable_prefix_caching=True, engine_loop=engine_loop)
    requests = [request("X", 12, 1, source=1), request("W", 3, 2, 9), request("Y", 20, 1, 10, source=1)]
    run = drive(scheduler, requests)
    assert run.finished_at == {"X": 1, "W": 11, "Y": 12}
    assert run.hits["Y"] == [12]
    assert scheduler.allocator.usage().num_evicted == 1


@LOOPS
def test_k15_the_end_of_a_chain_is_evicted_first(engine_loop: str) -> None:
    scheduler = paged(3, 4, enable_prefix_caching=True, engine_loop=engine_loop)
    requests = [request("X", 12, 1, source=1), request("Y", 4, 1, 10), request("X2", 12, 1, 20, source=1)]
    run = drive(scheduler, requests)
    assert run.hits == {"X": [0], "Y": [0], "X2": [8]}
    assert scheduler.allocator.usage().num_evicted == 2


@LOOPS
@pytest.mark.parametrize(("prompt_len", "hit"), [(15, 0), (16, 0), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_k17_a_whole_prompt_in_the_cache_leaves_tokens_to_compute(prompt_len: int, hit: int, engine_loop: str) -> None:
    scheduler = paged(20, 16, enable_prefix_caching=True, engine_loop=engine_loop)
    requests = [request("a", prompt_len, 1, source=1), request("b", prompt_len, 1, 5, source=1)]
    run = drive(scheduler, requests)
    assert run.hits == {"a": [0], "b": [hit]}
    assert run.plans[1].prefills[0].num_tokens == prompt_len - hit >= 1
    assert run.outcomes[1].num_emitted_tokens == 1
    assert run.finished_at["b"] == 6


@LOOPS
@pytest.mark.parametrize(("abort_at", "hit", "done"), [(1, 8, 6), (0, 0, 7)])
def test_k23_promised_blocks_are_not_found(abort_at: int, hit: int, done: int, engine_loop: str) -> None:
    scheduler = paged(
        10, 4, enable_prefix_caching=True, max_num_batched_tokens=8, admission="first_chunk", engine_loop=engine_loop
    )
    requests = [request("X", 16, 4, source=1), request("Y", 16, 1, 5, source=1)]
    run = drive(scheduler, requests, aborts=[(abort_at, "X")])
    assert run.hits["Y"] == [hit]
    assert run.finished_at == {"Y": done}


@LOOPS
def test_k29_of_three_sharers_of_a_partial_tail_two_copy(engine_loop: str) -> None:
    scheduler = paged(10, 4, engine_loop=engine_loop, detail=True)
    scheduler.submit(request("a", 6, 5, n=3))
    run = Run()
    drive(scheduler, run=run, until=1)
    assert run.used == [2]
    seqs = [seq.seq_id for seq in scheduler.live_sequences()]
    first, tail = scheduler.allocator.block_table(seqs[0])
    assert [scheduler.allocator.ref_count(block) for block in (first, tail)] == [3, 3]
    drive(scheduler, run=run, until=2)
    assert [(copy.src, copy.num_tokens) for copy in run.plans[1].copies] == [(tail, 2), (tail, 2)]
    assert run.used[1] == 4
    assert scheduler.allocator.ref_count(first) == 3
    tails = [scheduler.allocator.block_table(seq)[1] for seq in seqs]
    assert len(set(tails)) == 3
    assert tails[2] == tail
    assert [scheduler.allocator.num_tokens(seq) for seq in seqs] == [7, 7, 7]
    drive(scheduler, run=run)
    assert run.peak == 7
    assert run.finished_at == {"a": 5}
    assert sum(outcome.num_emitted_tokens for outcome in run.outcomes) == 15
    assert scheduler.allocator.num_free_blocks == 10


@LOOPS
def test_k29_a_full_tail_is_never_copied(engine_loop: str) -> None:
    scheduler = paged(10, 4, engine_loop=engine_loop)
    run = drive(scheduler, [request("a", 8, 5, n=3)])
    assert run.used[:2] == [2, 5]
    assert run.peak == 5
    assert not any(plan.copies for plan in run.plans)
    assert scheduler.allocator.num_free_blocks == 10


@LOOPS
def test_k31_swap_out_and_back_in(engine_loop: str) -> None:
    scheduler = paged(4, 4, num_host_blocks=4, preemption="swap", engine_loop=engine_loop)
    run = Run()
    drive(scheduler, [request("A", 8, 9), request("B", 8, 9)], run=run)
    assert [len(plan.swap_out) for plan in run.plans[:2]] == [0, 2]
    assert run.used[1] == 3
    assert run.finished_at == {"A": 9, "B": 17}
    assert [index for index, plan in enumerate(run.plans) if plan.swap_in] == [9]
    assert len(run.plans[9].swap_in) == 2
    assert run.plans[9].prefills == ()
    assert run.plans[9].shape.num_decodes == 1
    assert run.num_recomputed == 0
    usage = scheduler.allocator.usage()
    assert (usage.num_free, usage.num_host_used) == (4, 0)


ABORT_STATES = ["waiting", "mid-prefill", "decoding", "forked", "preempted", "swapped"]


@LOOPS
@pytest.mark.parametrize("state", ABORT_STATES)
def test_k33_abort_in_every_state(state: str, engine_loop: str) -> None:
    scheduler = paged(
        8,
        4,
        num_host_blocks=4,
        max_num_batched_tokens=4 if state == "mid-prefill" else None,
        admission="first_chunk",
        preemption="swap" if state == "swapped" else "recompute",
        max_num_seqs=3,
        engine_loop=engine_loop,
    )
    others: list[str] = []
    if state in ("preempted", "swapped"):
        scheduler.submit(request("O", 12, 21))
        others = ["O"]
    if state != "waiting":
        scheduler.submit(request("V", 16 if others else 12, 5, n=2 if state == "forked" else 1))
        drive(scheduler, until=2 if state in ("forked", "preempted", "swapped") else 1)
    else:
        scheduler.submit(request("V", 12, 5))
    if others:
        drive(scheduler, until=6)
    held = [seq.request.request_id for seq in scheduler.live_sequences()]
    assert "V" in held
    aborted = scheduler.abort("V")
    assert len(aborted) == (2 if state == "forked" else 1)
    assert scheduler.abort("V") == ()
    for other in others:
        scheduler.abort(other)
    usage = scheduler.allocator.usage()
    assert (usage.num_free, usage.num_host_used) == (8, 0)
    assert not scheduler.has_work
    scheduler.allocator.audit()
    scheduler.max_num_batched_tokens = 1000
    run = drive(scheduler, [request("X", 32, 1)])
    assert run.finished_at == {"X": 1}
    assert run.peak == 8


def test_k33_finished_and_unknown_ids_are_harmless() -> None:
    scheduler = paged(8, 4)
    drive(scheduler, [request("V", 4, 1)])
    assert scheduler.abort("V") == ()
    assert scheduler.abort("nobody") == ()


@LOOPS
def test_k33_abort_while_a_step_runs(engine_loop: str) -> None:
    scheduler = paged(8, 4, engine_loop=engine_loop)
    drive(scheduler, [request("V", 4, 9), request("W", 4, 9)], until=3)
    plan = scheduler.schedule(3)
    (aborted,) = scheduler.abort("V")
    assert aborted.num_output_tokens == 3
    assert scheduler.complete(plan).num_emitted_tokens == 1
    assert [seq.num_output_tokens for seq in scheduler.live_sequences()] == [4]


@LOOPS
@pytest.mark.parametrize(
    ("admission", "preempted", "recomputed", "makespan", "gap"),
    [("first_chunk", 16, 3127, 1352.2, 18.94), ("full_prompt", 0, 0, 1049.5, 11.40)],
)
def test_k37_admission_by_the_first_chunk_thrashes(
    admission: str, preempted: int, recomputed: int, makespan: float, gap: float, engine_loop: str
) -> None:
    scheduler = paged(125, 16, max_num_batched_tokens=200, admission=admission, engine_loop=engine_loop)
    run = drive(
        scheduler,
        [request(name, 400, 40) for name in "ABCDE"],
        step_time=lambda plan: 10 + 0.1 * plan.shape.num_tokens,
    )
    assert run.preempted == ["E"] * preempted
    assert run.num_recomputed == recomputed
    assert run.now == pytest.approx(makespan)
    gaps = run.gaps("D")
    assert sum(gaps) / len(gaps) == pytest.approx(gap, abs=0.005)


@LOOPS
@pytest.mark.parametrize(
    ("prefill_first", "first_token", "longest_gap", "end"), [(True, 11, 9, 48), (False, 12, 1, 40)]
)
def test_k39_prefill_first_starves_decodes(
    prefill_first: bool, first_token: float, longest_gap: float, end: float, engine_loop: str
) -> None:
    scheduler = paged(1000, 16, max_num_batched_tokens=512, prefill_first=prefill_first, engine_loop=engine_loop)
    run = drive(scheduler, [request("A", 16, 40), request("B", 4096, 1, 2.5)])
    assert run.token_times["B"] == [first_token]
    assert max(run.gaps("A")) == longest_gap
    assert run.finished_at["A"] == end
