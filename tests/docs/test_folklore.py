"""docs/folklore.md: each claim has a verdict, the verdict has support, and the figures quoted there are these.

Claims that other tests settle are linked from the page; what takes a small experiment is here. `says(7, "…")` looks for
a figure in the row of claim 7, so that the page cannot say what the simulator no longer does. Figures of calibrated
cost profiles are bounded, not quoted: they move with every new measurement.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import kvsim

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "folklore.md").read_text("utf-8")
ROWS = {int(row[1]): row[0] for row in re.finditer(r"^\| (\d+) \|.*$", PAGE, re.MULTILINE)}
VERDICTS = ("confirmed", "only if", "refuted")

GIB8 = {"kv_cache_memory_bytes": "8GiB"}
CHAT: dict[str, Any] = {
    "seed": 7,
    "model": "llama-2-7b",
    "memory": GIB8,
    "scheduler": {"max_model_len": 2048},
    "workload": {
        "num_requests": 250,
        "arrivals": {"type": "poisson", "request_rate": 28.0},
        "lengths": {"type": "preset", "name": "sharegpt"},
    },
    "record": ["summary"],
}
ON_A100 = {"gpu": "a100-80gb", "cost": {"type": "kernels", "profile": "a100"}}


def run(**blocks: Any) -> dict[str, Any]:
    """The summary of the chat scenario with some of its blocks replaced."""
    return kvsim.run({**CHAT, **blocks}).summary


@cache
def chat(engine: str) -> dict[str, Any]:
    """The chat scenario under one engine."""
    return run(engine=engine)


def fixed(prompt: int, output: int, num_requests: int = 60, rate: float = 28.0) -> dict[str, Any]:
    return {
        "num_requests": num_requests,
        "arrivals": {"type": "poisson", "request_rate": rate},
        "lengths": {"type": "fixed", "prompt": prompt, "output": output},
    }


def says(claim: int, *texts: str) -> None:
    for text in texts:
        assert text in ROWS[claim], f"docs/folklore.md, claim {claim}, should say {text!r}: {ROWS[claim]}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def test_every_claim_has_a_verdict_and_support() -> None:
    assert sorted(ROWS) == list(range(1, 33))
    for row in ROWS.values():
        _, _, _, verdict, _, support, _ = re.split(r"(?<!\\)\|", row)
        assert verdict.strip().strip("*") in VERDICTS, row
        assert re.findall(r"`([\w/.-]+\.(?:py|yaml))(?:::\w+)?`|img/", support), row


def test_the_tests_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 20
    for path, function in named:
        source = (ROOT / path).read_text("utf-8")
        assert not function or re.search(rf"^(def|class) {function}\b", source, re.MULTILINE), f"{path}::{function}"


def test_claim_2_most_of_a_reservation_stays_empty() -> None:
    kv = chat("orca-max")["kv_saturated"]
    says(2, percent(kv["token_states"]), percent(kv["internal_frag"]))
    assert kv["token_states"] < 0.25
    long = run(engine="orca-max", workload=fixed(1500, 500))["kv_saturated"]
    says(2, percent(long["token_states"]))
    assert long["internal_frag"] < 0.05


def oracle(placement: str, **more: Any) -> dict[str, Any]:
    compaction = more.pop("compaction", None)
    allocator = {"type": "contiguous", "placement": placement, "compaction": compaction}
    return run(engine="orca-oracle", allocator=allocator, **more)


def test_claim_3_holes_bind_before_bytes() -> None:
    lost = {name: oracle(name)["kv_saturated"]["external_frag"] for name in ("first_fit", "best_fit", "buddy")}
    says(3, *(percent(share) for share in lost.values()))
    assert min(lost.values()) > 0.1
    assert lost["buddy"] > lost["first_fit"]
    assert chat("paged")["kv_saturated"]["external_frag"] == 0


def test_claim_4_compaction_cures_it_and_its_pauses_are_short_on_the_device() -> None:
    without, with_it = oracle("first_fit"), oracle("first_fit", compaction="on_demand")
    over_the_host = oracle("first_fit", compaction="on_demand", cost={"copy_bandwidth_gb_s": 25})
    assert with_it["kv_saturated"]["external_frag"] < 0.01
    gain = with_it["output_throughput"] / without["output_throughput"] - 1
    says(4, percent(gain), *(f"{summary['p99_itl_ms']:.0f} ms" for summary in (without, with_it, over_the_host)))
    assert with_it["p99_itl_ms"] < 2 * without["p99_itl_ms"]
    assert over_the_host["p99_itl_ms"] > 10 * without["p99_itl_ms"]
    loss = 1 - over_the_host["output_throughput"] / without["output_throughput"]
    says(4, percent(loss))


def test_claim_5_paging_carries_three_times_the_concurrency() -> None:
    ratio = chat("paged")["running_mean"] / chat("orca-max")["running_mean"]
    long = [run(engine=engine, workload=fixed(1500, 500)) for engine in ("paged", "orca-max")]
    near_the_maximum = long[0]["running_mean"] / long[1]["running_mean"]
    says(5, f"{ratio:.1f} times", f"{near_the_maximum:.1f} times")
    assert ratio > 3
    assert near_the_maximum < 1.2


def batch(block_size: int, table_sync: str) -> dict[str, Any]:
    """Enough memory and everything at once, so that the costs of the table change nothing but time."""
    return run(
        gpu="a100-80gb",
        memory={"kv_cache_memory_bytes": "40GiB"},
        allocator={"block_size": block_size},
        cost={**ON_A100["cost"], "table_sync": table_sync},
        workload={
            "num_requests": 64,
            "arrivals": {"type": "batch"},
            "lengths": {"type": "uniform", "prompt": [100, 600], "output": [100, 600]},
        },
    )


def test_claims_7_and_8_where_the_block_table_lives_hardly_matters() -> None:
    paged = {mode: batch(16, mode)["duration"] for mode in ("on_change", "every_step", "device")}
    says(7, "0.1 %")
    assert paged["every_step"] / paged["on_change"] < 1.001
    says(8, "0.5 %", "5 %")
    assert 1 < paged["device"] / paged["on_change"] < 1.005
    tiny = {mode: batch(1, mode)["duration"] for mode in ("on_change", "device")}
    assert 1.005 < tiny["device"] / tiny["on_change"] < 1.05


def test_claim_9_updates_are_one_per_block() -> None:
    summary = run(engine="paged", memory={"kv_cache_memory_bytes": "40GiB"})
    stored = summary["total_input_tokens"] + summary["total_output_tokens"] - summary["completed"]
    assert summary["num_preemptions"] == 0
    per_token = summary["block_table_updates"] / stored
    says(9, f"{per_token:.4f}")
    assert 1 / 16 <= per_token < 1 / 16 * 1.04


def pool(num_blocks: int, engine: str = "paged") -> dict[str, Any]:
    return run(engine=engine, memory={"num_gpu_blocks_override": num_blocks})


def test_claim_12_a_small_pool_thrashes() -> None:
    small, middle, large = pool(200), pool(600), pool(2000)
    again = {
        summary["num_gpu_blocks"]: summary["num_recomputed_tokens"]
        / (summary["num_recomputed_tokens"] + summary["total_input_tokens"])
        for summary in (small, middle, large)
    }
    says(12, percent(again[200]), percent(again[600]))
    assert again[200] > again[600] > again[2000] == 0
    peak = max(kvsim.run({**CHAT, "record": ["steps"], "memory": {"num_gpu_blocks_override": 4000}}).steps.used_blocks)
    tight = pool(round(peak * 0.8))["num_preemptions"]
    says(12, f"{peak:,} blocks", f"{tight} preemptions")
    assert tight > 0
    assert pool(round(peak * 1.25))["num_preemptions"] == 0


def long_or_short(prompt: int, output: int, num_blocks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Preempting and queueing engine under the same saturating load."""
    blocks = {
        "scheduler": {"max_model_len": 4096},
        "memory": {"num_gpu_blocks_override": num_blocks},
        "workload": fixed(prompt, output, rate=100.0),
    }
    return run(engine="paged", **blocks), run(engine="no-evict", **blocks)


def test_claim_13_preempting_wins_where_outputs_are_long() -> None:
    preempting, queueing = long_or_short(200, 1500, 800)
    gain = preempting["output_throughput"] / queueing["output_throughput"] - 1
    assert gain > 0.3
    prompts, queued_prompts = long_or_short(2000, 400, 1200)
    loss = 1 - prompts["output_throughput"] / queued_prompts["output_throughput"]
    assert 0 < loss < 0.05
    says(13, percent(gain), percent(loss, 1), f"{preempting['mean_tpot_ms'] / queueing['mean_tpot_ms']:.1f} times")
    assert preempting["mean_tpot_ms"] > 2 * queueing["mean_tpot_ms"]


def sampled(**sampling: int) -> float:
    workload = {
        "num_requests": 40,
        "arrivals": {"type": "poisson", "request_rate": 2.0},
        "lengths": {"type": "preset", "name": "alpaca"},
        "sampling": sampling,
    }
    saving = run(model="opt-13b", memory={"kv_cache_memory_bytes": "24GiB"}, workload=workload)["sharing_saving"]
    assert isinstance(saving, float)
    return saving


def test_claim_17_beam_search_gains_most_from_sharing() -> None:
    parallel = [sampled(n=n) for n in (2, 4, 6)]
    beams = [sampled(beam_width=width) for width in (2, 4, 6)]
    assert parallel == sorted(parallel)
    assert beams == sorted(beams)
    assert min(beams) > 3 * max(parallel)
    says(17, percent(parallel[-1]), percent(beams[0]), percent(beams[-1]))


def waste_and_gap(block_size: int, **blocks: Any) -> tuple[float, float]:
    """Empty share of the allocated blocks, and how far utilisation is from its theory."""
    summary = run(allocator={"block_size": block_size}, **blocks)
    return 1 - summary["block_utilization"], abs(summary["block_utilization"] - summary["block_utilization_theory"])


def test_claims_20_and_21_half_a_block_a_sequence() -> None:
    for block_size in (16, 32, 64):
        waste, gap = waste_and_gap(block_size, memory={"kv_cache_memory_bytes": "40GiB"})
        says(20, percent(waste, 1))
        assert gap < 0.015


def test_claim_21_early_ends_and_preemptions_leave_it_where_it_is() -> None:
    """Blocks are taken when they are needed, so a request that ends early has none too many."""
    impatient = {**CHAT["workload"], "abort": {"probability": 1.0, "after": "500ms"}}
    assert waste_and_gap(16, workload=impatient)[1] < 0.015
    assert waste_and_gap(16, memory={"num_gpu_blocks_override": 200})[1] < 0.015
    reserved = chat("orca-max")
    says(21, percent(reserved["block_utilization"]))


def on_a100(block_size: int, **blocks: Any) -> float:
    throughput = run(**ON_A100, allocator={"block_size": block_size}, **blocks)["output_throughput"]
    assert isinstance(throughput, float)
    return throughput


def test_claim_22_the_best_block_size_is_flat() -> None:
    chats = {size: on_a100(size) for size in (8, 16, 32, 128)}
    best = max(chats.values())
    says(22, "1.5 %")
    assert chats[8] > 0.985 * best
    assert chats[16] > 0.985 * best
    assert chats[128] < 0.985 * best
    documents = {
        "model": "llama-3.1-8b",
        "scheduler": {"max_model_len": 16384},
        "workload": {
            "num_requests": 60,
            "arrivals": {"type": "poisson", "request_rate": 3.0},
            "lengths": {"type": "preset", "name": "arxiv_summarization"},
        },
    }
    long = [on_a100(size, **documents) for size in (16, 64, 128)]
    assert max(long) / min(long) < 1.01


def test_claim_22_the_block_size_factor_states_its_range() -> None:
    from kvsim.cost.page_size import block_size_factor

    factor = block_size_factor(8, 64)
    says(22, f"{factor.factor:.2f} ({factor.low:.2f} to {factor.high:.2f})")


def test_claim_23_no_table_of_one_gpu_outgrows_l2() -> None:
    """Even one-token blocks of the smallest model of the catalog: 80 GiB of KV need a table of 10 MiB."""
    from kvsim.scenario.pool import Pool
    from kvsim.scenario.resolve import scenario_from_dict

    smallest = Pool(scenario_from_dict({"model": "llama-3.2-1b", "memory": GIB8}).scenario).bytes_per_token
    table_bytes = 80 * 2**30 / smallest * 4
    says(23, f"{table_bytes / 2**20:.0f} MiB")
    assert table_bytes < 40 * 2**20


def order(free_list: str, *, caching: bool) -> dict[str, Any]:
    workload = {
        "num_requests": 150,
        "arrivals": {"type": "poisson", "request_rate": 3.0},
        "lengths": {"type": "preset", "name": "sharegpt"},
        "sampling": {"n": 4},
        "content": {"system_prompt": {"num_groups": 4, "tokens": 256}},
    }
    return run(allocator={"free_list": free_list, "enable_prefix_caching": caching}, workload=workload)


def test_claim_24_the_free_list_changes_ids_and_with_a_cache_hits() -> None:
    assert order("exclusive_first", caching=False) == order("fifo", caching=False) == order("lifo", caching=False)
    hits = {name: order(name, caching=True)["prefix_cache_hits"] for name in ("fifo", "exclusive_first", "lifo")}
    gain, loss = hits["exclusive_first"] / hits["fifo"] - 1, 1 - hits["lifo"] / hits["fifo"]
    says(24, percent(gain), percent(loss))
    assert 0 < gain < 0.1
    assert loss > 0


def test_claim_25_one_long_text_at_a_time_gains_nothing() -> None:
    workload = {**fixed(1500, 548, 10), "arrivals": {"type": "batch"}, "max_concurrency": 1}
    alone = [run(engine=engine, workload=workload)["output_throughput"] for engine in ("paged", "orca-max")]
    assert alone[0] == alone[1]


def test_claim_29_a_hit_saves_prefill() -> None:
    content = {"system_prompt": {"num_groups": 1, "tokens": 1024}}
    workload = {**fixed(64, 64, 60, rate=4.0), "content": content}
    cached, not_cached = (
        run(**ON_A100, memory=GIB8, allocator={"enable_prefix_caching": caching}, workload=workload)
        for caching in (True, False)
    )
    assert cached["mean_ttft_ms"] < 0.7 * not_cached["mean_ttft_ms"]
    assert cached["median_itl_ms"] > 0.9 * not_cached["median_itl_ms"]


def test_claim_30_throughput_rises_and_a_step_is_slower() -> None:
    static, continuous, paged = chat("static"), chat("orca-max"), chat("paged")
    faster = continuous["output_throughput"] / static["output_throughput"]
    with_paging = paged["output_throughput"] / static["output_throughput"]
    says(30, f"{faster:.1f} times", f"{with_paging:.1f} times")
    assert static["mean_tpot_ms"] <= continuous["mean_tpot_ms"] < paged["mean_tpot_ms"]
