"""A prefix cache that finds nothing says why: values and causes worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvsim


def run(requests: list[dict[str, Any]] | None, num_blocks: int = 100, **values: Any) -> Any:
    workload = {} if requests is None else {"requests": requests}
    scenario = {
        "memory": {"num_gpu_blocks_override": num_blocks},
        "allocator": {"block_size": 16, "watermark": 0, "enable_prefix_caching": True},
        "scheduler": {"max_model_len": 1024},
        "workload": workload,
    }
    return kvsim.run(scenario, **values)


def told(result: Any) -> list[str]:
    """The warnings that speak of the cache and of what is shared."""
    words = ("prefix cache", "can hit", "begin alike")
    texts = [text for text in result.summary["warnings"] if "every turn draws" not in text]
    return [text for text in texts if any(word in text for word in words)]


def row(
    arrival_s: float = 0, prompt: int = 80, group: str | None = "g", tokens: int = 64, **more: Any
) -> dict[str, Any]:
    shared = {} if group is None else {"prefix_group": group, "prefix_tokens": tokens}
    return {"arrival_s": arrival_s, "prompt_tokens": prompt, "output_tokens": 1, **shared, **more}


def test_who_comes_together_finds_nothing_yet() -> None:
    (text,) = told(run([row() for _ in range(4)]))
    assert text.startswith("4 requests begin with a block or more that others begin with, and none found it")
    assert "not computed yet (a block is findable when the step that fills it is over)" in text
    assert "evicted" not in text
    later = run([row(), row(1)])
    assert (later.summary["prefix_cache_hits"], told(later)) == (64, [])
    planned = run([row() for _ in range(4)], engine="vllm-v1")
    assert (planned.summary["prefix_cache_hits"], told(planned)) == (3 * 64, [])


def test_what_was_evicted_before_it_came_again() -> None:
    """Five blocks hold one prompt of five: the next one takes them all."""
    result = run([row(i, group="ab"[i % 2], tokens=80) for i in range(4)], num_blocks=5)
    assert result.summary["num_evicted_blocks"] == 15
    (text,) = told(result)
    assert "or it was evicted again (num_evicted_blocks is 15)" in text


@pytest.mark.parametrize("apart", ["lora", "salt"])
def test_other_adapters_and_salts_are_apart(apart: str) -> None:
    (text,) = told(run([row(i, **{apart: str(i)}) for i in range(3)]))
    assert text == (
        "3 requests begin as others do, and under another LoRA adapter or salt: their caches are apart, so nothing "
        "can hit"
    )
    same = run([row(i, **{apart: "one"}) for i in range(3)])
    assert (same.summary["prefix_cache_hits"], told(same)) == (128, [])
    # What is shared within an adapter counts, and is less than a block here.
    (text,) = told(run([row(i, tokens=10, **{apart: str(i // 2)}) for i in range(3)]))
    assert text.startswith("2 of 2 requests that begin as others do cannot hit")


@pytest.mark.parametrize("kind", ["drawn", "hash ids", "one turn"])
def test_drawn_adapters_are_apart(kind: str, tmp_path: Path) -> None:
    """Three requests with a text in common, each under one of a thousand adapters."""
    content = {"num_loras": 1000, "system_prompt": {"tokens": 64}}
    lengths = {"type": "fixed", "prompt": 10, "output": 1}
    workload = {"num_requests": 3, "lengths": lengths, "content": content}
    if kind == "hash ids":
        path = tmp_path / "hash.jsonl"
        lines = [{"timestamp": i, "input_length": 600, "output_length": 1, "hash_ids": [7, i]} for i in range(3)]
        path.write_text("\n".join(map(json.dumps, lines)))
        workload = {"trace": str(path), "content": {"num_loras": 1000}}
    elif kind == "one turn":
        workload["sessions"] = {"num_turns": 1}
    result = run(None, workload=workload)
    assert result.summary["prefix_cache_hits"] == 0
    (text,) = told(result)
    assert text.startswith("3 requests begin as others do, and under another LoRA adapter")


def test_a_prompt_that_ends_with_its_first_block_cannot_hit() -> None:
    """A hit is whole blocks and leaves a token: 16 of 16 find nothing, 17 find 16."""
    (text,) = told(run([row(i, prompt=16, tokens=16) for i in range(2)]))
    assert text.startswith("2 requests of 16 tokens are all of what they share with others")
    longer = run([row(i, prompt=17, tokens=17) for i in range(2)])
    assert (longer.summary["prefix_cache_hits"], told(longer)) == (16, [])


def test_who_switched_the_cache_on_for_nothing_is_told(tmp_path: Path) -> None:
    (text,) = told(run([row(i, group=None) for i in range(3)]))
    assert "allocator.enable_prefix_caching: is on, and no two prompts of this workload begin alike" in text
    assert "prefix_group and prefix_tokens, or session" in text
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,4\n2023-11-16 18:15:50.99,396,9\n"
    )
    (text,) = told(run(None, workload={"trace": str(path)}))
    assert "hash ids, groups or sessions" in text
    (text,) = told(run(None, workload={"num_requests": 3, "lengths": {"type": "fixed", "prompt": 40, "output": 2}}))
    assert "workload.content and workload.sessions" in text
    # The engine's own default is no wish of the user's, and one request shares with nobody.
    assert told(run([row(group=None), row(group=None)], engine="vllm-v1", allocator={"block_size": 16})) == []
    assert told(run([row(group=None)])) == []


def test_an_engine_without_a_prefix_cache_looks_nothing_up() -> None:
    result = run([row(), row(1)], engine="vllm-v0")
    assert result.summary["prefix_cache_queries"] == 0
    assert ["nothing will hit" in text for text in told(result)] == [True]


def test_turns_of_a_session_share_their_history() -> None:
    """Nobody counts what turns share: nothing is said of them."""
    sessions = {"num_requests": 4, "lengths": {"type": "fixed", "prompt": 3, "output": 1}, "sessions": {"num_turns": 2}}
    assert told(run(None, workload=sessions)) == []


def test_turns_that_were_left_out_have_no_prompt() -> None:
    """Three turns of 300 tokens, of which the context holds the first: one prompt a session is compared."""
    sessions = {"num_turns": 3, "max_context": 400}
    lengths = {"type": "fixed", "prompt": 300, "output": 1}
    content = {"num_loras": 1000, "system_prompt": {"tokens": 15}}
    workload = {"num_requests": 6, "lengths": lengths, "sessions": sessions}
    assert "no two prompts" in told(run(None, workload=workload))[0]
    assert told(run(None, workload=workload | {"content": content})) == [
        "allocator.enable_prefix_caching: is on, and no two prompts of this workload begin alike: only "
        "preempted requests can find what they left; workload.content and workload.sessions say what they share"
    ]


SESSIONS = {"num_requests": 12, "lengths": {"type": "fixed", "prompt": 40, "output": 24}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sessions": {"num_turns": 3}}, None),
        (
            {"sessions": {"num_turns": 3, "truncate_to": 60}},
            "sessions.truncate_to: is 60: a history that is cut",
        ),
        ({"sessions": {"num_turns": 1, "truncate_to": 60}}, None),
        ({"sessions": {"num_turns": 3}, "content": {"num_loras": 9}}, "content.num_loras: is 9: every turn draws an"),
        ({"sessions": {"num_turns": 3}, "content": {"num_loras": 1}}, None),
        ({"content": {"num_loras": 9}}, None),
    ],
)
def test_what_keeps_turns_from_their_history_is_told(settings: dict[str, Any], words: str | None) -> None:
    def told_by(caching: bool, engine: str = "paged") -> list[str]:
        allocator = {"block_size": 16, "enable_prefix_caching": caching}
        result = run(None, workload=SESSIONS | settings, allocator=allocator, engine=engine)
        return [text for text in result.summary["warnings"] if "truncate_to: is" in text or "every turn draws" in text]

    told = told_by(True)
    assert len(told) == (words is not None)
    assert all(f"workload.{words}" in text for text in told)
    assert told_by(False) == told_by(True, "vllm-v0") == []


def test_turns_that_are_cut_find_nothing() -> None:
    """Prompts of 40, 104 and 168 tokens; the last two are cut to 60, and begin with token 44 and 108."""
    sessions = {"num_turns": 3, "truncate_to": 60}
    cut = run(None, workload=SESSIONS | {"sessions": sessions})
    assert cut.summary["prefix_cache_hits"] == 0
    # Stored are 63 and 127 tokens when the next turn comes: three blocks and seven, in each of four sessions.
    whole = run(None, workload=SESSIONS | {"sessions": {"num_turns": 3}})
    assert whole.summary["prefix_cache_hits"] == 4 * (48 + 112)
