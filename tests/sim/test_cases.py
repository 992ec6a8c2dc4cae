"""Public bug reports with worked-out answers on the `paged` engine: values by hand, all laws checked at every step."""

from __future__ import annotations

import pytest
from support import StepCost, play, request, text

from kvsim.request import Sampling
from kvsim.types import KvsimError


@pytest.mark.parametrize(
    ("prompt", "output", "peak"),
    [(1, 1, 1), (1, 16, 1), (1, 17, 2), (15, 2, 1), (16, 1, 1), (16, 2, 2), (17, 16, 2), (17, 17, 3), (32, 1, 2)],
)
def test_k01_exact_multiples_of_the_block_size(prompt, output, peak):
    out = play([request("a", prompt, output)], num_blocks=10, block_size=16)
    assert out["a"].peak_blocks == peak
    assert len(out.steps) == output
    assert out.allocator.usage().num_free == 10


def test_k01_a_full_block_is_full():
    out = play([request("a", 16, 1)], num_blocks=10, block_size=16)
    assert out.steps.token_states.tolist() == [16]
    assert out.steps.block_utilization.tolist() == [1.0]


def test_k05_a_request_larger_than_the_pool_is_rejected_at_arrival():
    sizes = {"a": (640, 161), "b": (640, 162), "c": (801, 1), "d": (100, 10)}
    out = play([request(name, *size) for name, size in sizes.items()], num_blocks=50, block_size=16)
    assert out.end_ms("a") == 161
    assert out.end_ms("d") == 10
    assert (out.summary["completed"], out.summary["num_rejected"], out.summary["num_preemptions"]) == (2, 2, 0)
    for name in "bc":
        assert out[name].status == "rejected"
        assert "51" in out[name].reason
        assert "50" in out[name].reason


def test_k07_two_rivals_that_fit_alone_but_not_together():
    out = play([request("A", 8, 9), request("B", 8, 9)], num_blocks=4, block_size=4)
    assert out.steps.used_blocks.tolist()[:2] == [4, 3]
    assert (out.end_ms("A"), out.end_ms("B")) == (9, 17)
    assert out.summary["num_preemptions"] == 1
    assert out.summary["num_recomputed_tokens"] == 8
    assert out["B"].recomputed_tokens == 8
    assert out.allocator.usage().num_free == 4


def test_k13_hits_in_the_free_list_are_not_free_capacity():
    x, y = request("X", text(1, 12), 1), request("Y", text(1, 12, (2, 8)), 1, at=10)
    alone = play([x, y], num_blocks=5, block_size=4, enable_prefix_caching=True)
    assert alone["Y"].prefix_hit_tokens == 12
    assert alone.end_ms("Y") == 11
    assert alone.steps.used_blocks.tolist()[-1] == 5
    assert alone.summary["num_evicted_blocks"] == 0
    w = request("W", text(3, 3), 2, at=9)
    beside = play([x, w, y], num_blocks=5, block_size=4, enable_prefix_caching=True)
    assert beside.end_ms("W") == 11
    assert beside["Y"].first_scheduled_s == pytest.approx(0.011)
    assert beside.end_ms("Y") == 12
    assert beside["Y"].prefix_hit_tokens == 12
    assert beside.summary["num_evicted_blocks"] == 1


def test_k15_the_end_of_a_chain_is_evicted_first():
    x = text(1, 12)
    out = play(
        [request("X", x, 1), request("Y", 4, 1, at=10), request("X2", x, 1, at=20)],
        num_blocks=3,
        block_size=4,
        enable_prefix_caching=True,
    )
    assert out["X2"].prefix_hit_tokens == 8
    assert out.summary["num_evicted_blocks"] == 2


@pytest.mark.parametrize(("prompt", "hit"), [(15, 0), (16, 0), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_k17_a_whole_prompt_in_the_cache_leaves_a_token_to_compute(prompt, hit):
    requests = [request("first", text(1, prompt), 1), request("second", text(1, prompt), 1, at=10)]
    out = play(requests, num_blocks=20, block_size=16, enable_prefix_caching=True)
    assert out["second"].prefix_hit_tokens == hit
    assert out.steps.num_prefill_tokens.tolist()[-1] == prompt - hit >= 1
    assert out["second"].output_tokens == 1
    assert out["second"].ttft_ms > 0


def test_k23_blocks_that_were_never_computed_are_not_found():
    x = text(1, 16)

    def hit(abort_at: float) -> int:
        requests = [request("X", x, 4, abort_at=abort_at), request("Y", x, 1, at=5)]
        out = play(requests, num_blocks=10, block_size=4, enable_prefix_caching=True, max_num_batched_tokens=8)
        if abort_at:
            assert out.end_ms("Y") == 6
        return int(out["Y"].prefix_hit_tokens)

    assert hit(abort_at=1) == 8
    assert hit(abort_at=0) == 0


def test_k29_fork_with_a_partial_shared_tail():
    out = play([request("a", 6, 5, sampling=Sampling(n=3))], num_blocks=20, block_size=4)
    assert out.steps.num_copies.tolist() == [0, 2, 0, 0, 0]
    assert out.steps.used_blocks.tolist()[:2] == [2, 4]
    assert out["a"].peak_blocks == 7
    assert out["a"].num_cow_copies == 2
    assert out.allocator.usage().num_free == 20


def test_k29_fork_with_a_full_shared_tail():
    out = play([request("a", 8, 5, sampling=Sampling(n=3))], num_blocks=20, block_size=4)
    assert out.summary["num_cow_copies"] == 0
    assert out.steps.used_blocks.tolist()[:2] == [2, 5]
    assert out["a"].peak_blocks == 5
    assert out.allocator.usage().num_free == 20


def test_k31_swap_out_and_back_in():
    out = play(
        [request("A", 8, 9), request("B", 8, 9)], num_blocks=4, block_size=4, num_host_blocks=4, preemption="swap"
    )
    assert out.steps.used_blocks.tolist()[1] == 3
    assert out.steps.num_swapped.tolist()[1] == 1
    assert (out.end_ms("A"), out.end_ms("B")) == (9, 17)
    assert out.steps.swapped_in_blocks.tolist()[9] == 2
    assert out.steps.num_prefill_tokens.tolist()[9] == 0
    assert out.summary["num_swapped_out_blocks"] == out.summary["num_swapped_in_blocks"] == 2
    assert out.summary["num_recomputed_tokens"] == 0
    assert out.allocator.usage().num_free == 4
    assert out.allocator.num_free_host_blocks == 4


def test_k35_idle_in_use_cached_and_free():
    out = play(
        [request("X", 10, 3), request("probe", 1, 1, at=10), request("Y", 40, 1, at=50)],
        num_blocks=10,
        block_size=4,
        enable_prefix_caching=True,
    )
    at_ten = out.steps[out.steps.start_s == 0.01].iloc[0]
    assert at_ten.cached_idle == 12
    assert at_ten.used_blocks == 1
    assert out.end_ms("Y") == 51
    assert out.summary["num_evicted_blocks"] == 3


def test_k37_admission_that_looks_at_the_first_chunk_only():
    requests = [request(name, 400, 40) for name in "ABCDE"]

    def run(admission: str):
        return play(
            requests,
            num_blocks=125,
            block_size=16,
            max_num_batched_tokens=200,
            admission=admission,
            cost=StepCost(10.0, 0.1),
        )

    first_chunk, full_prompt = run("first_chunk"), run("full_prompt")
    assert first_chunk["E"].num_preemptions == 16
    assert first_chunk.summary["num_recomputed_tokens"] == 3127
    assert first_chunk.summary["duration"] == pytest.approx(1.3522)
    assert first_chunk["D"].tpot_ms == pytest.approx(18.94, abs=0.005)
    assert full_prompt.summary["num_preemptions"] == 0
    assert full_prompt.summary["duration"] == pytest.approx(1.0495)
    assert full_prompt["D"].tpot_ms == pytest.approx(11.40, abs=0.005)
    assert (len(first_chunk.steps), len(full_prompt.steps)) == (82, 83)


def test_k39_prefill_first_starves_decodes():
    requests = [request("A", 16, 40), request("B", 4096, 1, at=2.5)]

    def run(prefill_first: bool):
        return play(requests, num_blocks=1000, block_size=16, max_num_batched_tokens=512, prefill_first=prefill_first)

    first, mixed = run(True), run(False)
    assert (first.end_ms("B"), first.end_ms("A")) == (11, 48)
    assert (mixed.end_ms("B"), mixed.end_ms("A")) == (12, 40)
    longest = [max(out.simulation.recorder.gaps.table.matrix()[:, 0]) / 1e6 for out in (first, mixed)]
    assert longest == [9, 1]


@pytest.mark.parametrize(("num_requests", "is_preempted"), [(76, False), (77, True)])
def test_k47_the_blocks_of_a_request_are_rounded_up(num_requests, is_preempted):
    requests = [request(f"r{index}", 500, 501) for index in range(num_requests)]
    out = play(requests, num_blocks=77088 // 16, block_size=16)
    assert (out.summary["num_preemptions"] > 0) == is_preempted


def shared_prefix(shared: int, num_requests: int, num_blocks: int):
    requests = [
        request(f"r{index}", text(1, shared, (2 + index, 100)), 1, at=10 * index) for index in range(num_requests)
    ]
    return play(requests, num_blocks=num_blocks, block_size=16, enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("shared", "hits", "prompt_tokens"), [(1024, 101376, 112400), (1030, 101376, 113000), (15, 0, 11500)]
)
def test_k49_what_a_shared_system_prompt_saves(shared, hits, prompt_tokens):
    out = shared_prefix(shared, 100, 400)
    assert out.summary["prefix_cache_hits"] == hits
    assert out.summary["prefix_cache_queries"] == prompt_tokens


def test_k49_in_a_pool_of_one_request_only_tails_are_lost():
    out = shared_prefix(1024, 5, 71)
    assert out.requests.prefix_hit_tokens.tolist() == [0, 1024, 1024, 1024, 1024]
    assert out.summary["num_evicted_blocks"] == 24


def test_k58_ttft_starts_at_arrival():
    requests = [request("A", 4, 5), request("B", 4, 1, at=15)]
    out = play(requests, num_blocks=100, block_size=16, max_num_seqs=1, cost=StepCost(10.0))
    assert out["A"].ttft_ms == 10
    assert out.end_ms("A") == 50
    assert out["B"].first_scheduled_s == 0.05
    assert out["B"].first_token_s == 0.06
    assert (out["B"].ttft_ms, out["B"].queue_ms) == (45, 35)
    assert out.summary["mean_ttft_ms"] == 27.5


@pytest.mark.parametrize(("output", "gaps", "e2el", "tpot"), [(1, 0, 10, None), (2, 1, 20, 10), (5, 4, 50, 10)])
def test_k60_number_of_gaps(output, gaps, e2el, tpot):
    out = play([request("a", 4, output)], num_blocks=10, block_size=16, cost=StepCost(10.0))
    assert out.summary["num_itl"] == gaps
    assert out.summary["mean_e2el_ms"] == e2el
    assert out.summary["mean_tpot_ms"] == tpot
    assert out.summary["num_tpot"] == (tpot is not None)
    assert out.summary["mean_ttft_ms"] + gaps * (out.summary["mean_itl_ms"] or 0) == e2el


K62 = [request("A", 4, 5), request("B", 4, 1, at=15), request("C", 4, 1, at=1000)]


def test_k62_a_horizon_loses_nobody():
    out = play(K62, num_blocks=100, block_size=16, max_num_seqs=1, cost=StepCost(10.0), horizon_ms=25)
    keys = (
        "completed",
        "num_running_at_end",
        "num_waiting_at_end",
        "num_not_arrived",
        "num_unfinished",
        "num_requests",
    )
    assert [out.summary[key] for key in keys] == [0, 1, 1, 1, 3, 3]
    assert out["A"].output_tokens == 2
    assert out.requests.status.tolist() == ["running", "waiting", "not_arrived"]
    assert (out.steps.start_s + out.steps.duration_ms / 1000).max() <= 0.025


def test_k62_a_horizon_before_the_first_token():
    out = play(K62, num_blocks=100, block_size=16, max_num_seqs=1, cost=StepCost(10.0), horizon_ms=5)
    whole = play(K62, num_blocks=100, block_size=16, max_num_seqs=1, cost=StepCost(10.0))
    assert (out.summary["completed"], out.summary["total_output_tokens"]) == (0, 0)
    assert out.summary["mean_ttft_ms"] is None
    assert out.summary["num_ttft"] == 0
    assert out.summary.keys() == whole.summary.keys()
    assert list(out.steps.columns) == list(whole.steps.columns)


def test_steps_that_outlast_the_clock_are_an_error_that_says_so():
    """10^24 ns do not fit into the 64 bits of a column."""
    with pytest.raises(KvsimError, match=r"requests are left after 146 years .* make steps cheaper \(cost\)"):
        play([request("a", 4, 3)], num_blocks=10, block_size=4, cost=StepCost(1e18))
    out = play([request("a", 4, 3)], num_blocks=10, block_size=4, cost=StepCost(1e18), horizon_ms=1e9)
    assert out.summary["num_unfinished"] == 1
