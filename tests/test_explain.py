"""The life of one request, told from what a run's observers see."""

from __future__ import annotations

import re
from typing import Any

import pytest
from random_runs import draw_scenario

from kvsim.explain import LifeStory
from kvsim.memory import PagedAllocator
from kvsim.registry import build
from kvsim.request import Request, Sampling
from kvsim.runs import resolve, run, tell_life
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.scheduling.vllm_v0 import VllmV0Scheduler
from kvsim.sim.run import simulate
from kvsim.tokens import TokenStream
from kvsim.types import KvsimError, ScenarioError

STEP_NS = 10_000_000


def request(request_id: str, prompt_len: int, output_len: int, arrival_ns: int = 0, n: int = 1) -> Request:
    prompt = TokenStream.from_segment(1, prompt_len)
    return Request(request_id, arrival_ns, prompt, output_len, output_len, sampling=Sampling(n=n))


def tell(
    request_id: str, scheduler: VllmV0Scheduler, requests: list[Request], aborts: dict[int, str] | None = None
) -> LifeStory:
    """Run to the end with steps of 10 ms, `aborts` by step."""
    story = LifeStory(request_id, scheduler)
    now = step = 0
    todo = list(requests)
    while todo or scheduler.has_work:
        while todo and todo[0].arrival_ns <= now:
            arrived = todo.pop(0)
            rejection = scheduler.submit(arrived)
            story.on_submit(arrived, rejection and rejection.reason, now)
        if victim := (aborts or {}).get(step):
            story.on_abort(victim, scheduler.abort(victim), now)
        if scheduler.has_work:
            plan = scheduler.schedule(now)
            story.on_plan(plan, now)
            story.on_step(plan, scheduler.complete(plan), now, now + STEP_NS)
        now += STEP_NS
        step += 1
    return story


def engine(num_blocks: int, block_size: int = 4, num_host_blocks: int = 0, max_num_seqs: int = 8) -> VllmV0Scheduler:
    allocator = PagedAllocator(num_blocks, block_size, num_host_blocks=num_host_blocks, free_list="lifo")
    return VllmV0Scheduler(
        allocator, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=64, watermark=0.0
    )


def test_two_rivals_that_do_not_fit_together() -> None:
    # Both prefill 2 blocks; in step 1 A takes the place of B, which needs a third block for 9 tokens.
    story = tell("B", engine(4), [request("A", 8, 9), request("B", 8, 9)])
    assert story.text().splitlines() == [
        "request B",
        "    0.000000 s  arrives with 8 prompt tokens",
        "    0.000000 s  is admitted, 2 running",
        "    0.010000 s  has computed 8 tokens and emits its first token",
        "    0.010000 s  is preempted: blocks ran out and it is the engine's victim. "
        "8 stored tokens are thrown out, to be computed again",
        "    0.090000 s  waited 80.000 ms for free blocks (request 'B' waits and needs 3 blocks, and 0 must stay free "
        "(watermark); 1 of 4 are free)",
        "    0.090000 s  is admitted again, 1 running",
        "    0.100000 s  has computed 9 tokens again and goes on",
        "    0.170000 s  ends with 9 output tokens, 170.000 ms after its arrival",
        "in sum: waited 80.000 ms in all, 1 preemption, 8 tokens recomputed, 0 tokens hit",
    ]


def test_who_stands_in_front_and_for_what() -> None:
    story = tell(
        "C", engine(8, max_num_seqs=1), [request("A", 4, 3), request("B", 4, 2), request("C", 4, 1, 5_000_000)]
    )
    text = story.text()
    # A has steps 0 to 2, B 3 and 4.
    assert (
        "waited 45.000 ms: 40.000 ms for the sequence limit (max_num_seqs = 1), 5.000 ms for the step under way" in text
    )
    assert "behind B; 20.000 ms of it at the head of the line" in text


def test_samples_swapped_out_and_in() -> None:
    story = tell("P", engine(5, num_host_blocks=8), [request("G", 4, 9), request("P", 4, 7, n=2)])
    text = story.text()
    assert "arrives with 4 prompt tokens, for 2 samples" in text
    assert "forks 1 child, all sharing its blocks" in text
    # 5 tokens each in 3 blocks: the prompt is in one that both share. This engine wants a free block a sequence.
    assert "10 stored tokens (2 sequences, each with what it shares) are swapped out to the host" in text
    assert "is swapped in again with 2 sequences and goes on where it was" in text
    assert "ends with 14 output tokens" in text
    assert "1 preemption, 0 tokens recomputed" in text


def test_samples_for_whom_the_host_has_no_room() -> None:
    """The second group shares two blocks when it is pushed out, and the host has one."""
    text = tell("P", engine(6, num_host_blocks=1), [request("G", 8, 6), request("P", 8, 6, n=2)]).text()
    assert "thrown out, to be computed again (it could not be swapped out: 1 of 1 host blocks are free)" in text


def test_rejected_aborted_and_unknown() -> None:
    assert (
        "is rejected at once: needs 5 blocks (20 slots), the pool has 4 (16 slots)"
        in tell("A", engine(4), [request("A", 8, 13)]).text()
    )
    aborted = tell("B", engine(4), [request("A", 8, 9), request("B", 8, 9)], aborts={5: "B"}).text()
    assert "is aborted by its client, with 1 token in hand" in aborted
    with pytest.raises(KvsimError, match=r"request 'Z' never arrived"):
        tell("Z", engine(4), [request("A", 8, 9)]).text()


def test_many_preemptions_are_summarised() -> None:
    scheduler = engine(6)
    story = LifeStory("V", scheduler)
    story.on_submit(request("V", 8, 40), None, 0)
    for cycle in range(10):
        story.num_preemptions = cycle
        story._tell(cycle * STEP_NS, f"cycle {cycle}")
    told = [event.text for event in story._told()]
    assert told[-2:] == ["is preempted 5 times more and comes back each time, within 40.000 ms", "cycle 9"]
    assert "cycle 4" not in told


def lengths(request_id: str, prompt: int, output: int, **more: int) -> dict[str, Any]:
    return {"id": request_id, "prompt_tokens": prompt, "output_tokens": output, **more}


RIVALS = [lengths("A", 8, 9), lengths("B", 6, 6, n=2)]


@pytest.mark.parametrize(
    ("engine", "num_blocks", "settings", "requests", "need"),
    [
        (
            "paged",
            10,
            {"allocator.watermark": 0.2},
            [lengths("A", 16, 5), lengths("X", 16, 5), lengths("B", 4, 1)],
            "1 block for 4 tokens; the pool has 2 free of 10, of which 2 must stay free (watermark)",
        ),
        (
            "orca-max",
            6,
            {"scheduler.max_model_len": 16},
            [lengths("A", 8, 8), lengths("B", 8, 8)],
            "a region of 16 slots; the pool has 8 free of 24, 8 in one piece",
        ),
        (
            "orca-oracle",
            6,
            {"scheduler.max_model_len": 16},
            [lengths("A", 8, 8), lengths("B", 8, 8)],
            "a region of 15 slots; the pool has 8 free of 24, 8 in one piece",
        ),
        # B's samples of 10 tokens shared one full block of the prompt: 1 + 2 x 2 blocks.
        ("paged", 8, {}, RIVALS, "5 blocks for what its 2 sequences held before; the pool has 4 free of 8"),
        (
            "paged",
            8,
            {"scheduler.preemption": "swap_forked", "memory.num_cpu_blocks_override": 20},
            RIVALS,
            "5 blocks for what it has on the host and its next tokens; the pool has 4 free of 8",
        ),
    ],
)
def test_what_the_head_of_the_line_needs_is_more_than_there_is(
    engine: str, num_blocks: int, settings: dict[str, Any], requests: list[dict[str, Any]], need: str
) -> None:
    scenario = {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": num_blocks},
        "allocator": {"block_size": 4},
        "scheduler": {"max_model_len": 32},
        "workload": {"requests": requests},
    }
    built = build(resolve(scenario, settings).scenario)
    story = LifeStory("B", built.scheduler)
    recorder = simulate(built.scheduler, built.cost, built.source, observers=(story,)).recorder
    assert f"needs {need})" in story.text()
    assert story.num_recomputed_tokens == recorder.totals.num_recomputed_tokens


def test_who_is_passed_by_others_waits_for_its_adapter() -> None:
    """One adapter at a time: B is passed by C, D and E, who are behind each other and not behind B."""

    def row(name: str, prompt: int, lora: str) -> dict[str, Any]:
        return {"id": name, "prompt_tokens": prompt, "output_tokens": 3, "lora": lora}

    scenario = {
        "engine": "vllm-v1",
        "memory": {"num_gpu_blocks_override": 50},
        "allocator": {"block_size": 4},
        "scheduler": {"max_model_len": 64, "max_loras": 1, "max_num_seqs": 8, "max_num_batched_tokens": 8},
        "workload": {
            "requests": [row("A", 4, "a"), row("B", 4, "b"), row("C", 4, "a"), row("D", 20, "a"), row("E", 20, "a")]
        },
        "cost": {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    resolved = resolve(scenario, {})
    assert "0.009000 s  waited 9.000 ms for the LoRA limit (max_loras = 1)\n" in tell_life(resolved, "B")
    budget = "the token budget (max_num_batched_tokens = 8)"
    assert f"waited 1.000 ms for {budget}\n" in tell_life(resolved, "D")
    assert f"waited 4.000 ms for {budget}; behind D; 3.000 ms of it at the head" in tell_life(resolved, "E")


def life(request_id: str, requests: list[dict[str, Any]], **values: Any) -> str:
    scenario = {
        "memory": {"num_gpu_blocks_override": 4},
        "allocator": {"block_size": 4, "watermark": 0},
        "scheduler": {"max_model_len": 32},
        "workload": {"requests": requests},
        "cost": {"type": "linear", "step_ms": 1, "prefill_token_us": 0, "context_token_ns": 0},
    }
    return tell_life(resolve(scenario, values), request_id)


def row(name: str, arrival_s: float = 0, prompt: int = 8, output: int = 9) -> dict[str, Any]:
    return {"id": name, "arrival_s": arrival_s, "prompt_tokens": prompt, "output_tokens": output}


def test_who_waits_at_the_horizon_waited_until_then() -> None:
    lines = life("B", [row("A"), row("B", 0.003)], horizon="5ms").splitlines()
    assert "still waits when the run ends, by then 2.000 ms for free blocks" in lines[-2]
    assert lines[-1] == "in sum: waited 2.000 ms in all, 0 preemptions, 0 tokens recomputed, 0 tokens hit"


def test_who_has_not_arrived_by_the_horizon_is_known() -> None:
    with pytest.raises(ScenarioError, match=r"--request C: has not arrived when the run ends \(0\.005 s\)"):
        life("C", [row("A"), row("C", 0.05)], horizon="5ms")


def test_what_a_promise_lacks_is_told() -> None:
    """A may come to hold 4 blocks, and so may B."""
    story = life("B", [row("A"), row("B")], engine="no-evict")
    assert (
        "waited 9.000 ms for promises (request 'B' is waiting and needs a promise of 4 blocks; the pool has promised "
        "4 of 4)" in story
    )


def test_who_waits_for_a_batch_is_told_in_words() -> None:
    rows, pool = [row("A", output=5), row("B", 0.001, 4, 2)], {"memory.num_gpu_blocks_override": 8}
    story = life("B", rows, engine="static", **pool, **{"scheduler.max_num_seqs": 1})
    assert "waited 4.000 ms for the running batch" in story


STORIES = [
    ("vllm-v0", 8),
    ("no-evict", 9),
    ("vllm-v1", 9),
    ("vllm-v1", 39),
    *[("vllm-v1-async", n) for n in (33, 49, 59)],
]


@pytest.mark.parametrize(("engine", "seed"), STORIES)
def test_a_story_has_the_figures_of_the_table(engine: str, seed: int) -> None:
    """Beams that end or are pruned; samples that end before the others give up, or go at once; tokens in flight."""
    resolved = scenario_from_dict(draw_scenario(engine, seed))
    for row in run(resolved).requests.to_dict("records"):
        text = tell_life(resolved, row["request_id"])
        preempted = "1 preemption," if row["num_preemptions"] == 1 else f"{row['num_preemptions']} preemptions,"
        assert preempted in text
        assert re.search(rf" {row['recomputed_tokens']:,} tokens? recomputed", text)
        if row["status"] == "finished":
            assert re.search(rf"ends with {row['output_tokens']:,} output tokens?, ", text)
        if row["status"] == "aborted":
            assert re.search(rf"with {row['output_tokens']:,} tokens? in hand", text)
        if row["first_token_s"] == row["first_token_s"]:
            assert re.search(rf"{row['first_token_s']:.6f} s  has computed .* and emits its first token", text)


def test_beams_emit_each_token_once() -> None:
    """One token behind the prompt, then two in each of three steps; one of the beams is forked from the other."""
    assert "ends with 7 output tokens" in life("B", [{**row("B", prompt=4, output=4), "beam_width": 2}])


def test_a_sample_that_starts_later_computes_nothing_again() -> None:
    """Of three samples that are requests of their own the third finds a place when the first ends."""
    rows = [{**row("A", prompt=4, output=2), "n": 3}]
    story = life("A", rows, engine="vllm-v1", **{"scheduler.max_num_seqs": 2, "memory.num_gpu_blocks_override": 20})
    assert "and emits the first token of another sample" in story
    assert "again" not in story


def test_what_a_cut_step_would_compute_again_is_not_counted() -> None:
    """In the fourth step B is pushed out, and comes back when A has ended: the step then under way is cut off."""
    rows = [row("A", output=6), row("B", output=6)]
    whole, cut = (
        life("B", rows, **{"memory.num_gpu_blocks_override": 5, **more}) for more in ({}, {"horizon": "6.5ms"})
    )
    assert "1 preemption, 8 tokens recomputed" in whole
    assert "is still running when the run ends" in cut
    assert "1 preemption, 0 tokens recomputed" in cut


def test_who_would_be_pushed_out_in_a_cut_step_was_not() -> None:
    rows = [row("A"), row("B")]
    assert "0 preemptions" in life("B", rows, horizon="1.5ms")
    assert "1 preemption," in life("B", rows, horizon="2.5ms")
