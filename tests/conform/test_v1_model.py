"""The V1 schedulers against a plain rewrite of their description, on random cases with extreme settings."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conform.naive_v1 import NaiveRun

from kvsim.conform import replay
from kvsim.conform.cases import load_case
from tests.conftest import needs_shared

Record = dict[str, Any]
ENDLESS = 150
"""A case that goes on longer is left out: it is caught in a circle."""


def draw_config(rng: random.Random) -> Record:
    block_size = rng.choice([1, 1, 2, 2, 3, 4, 4, 5, 8, 16, 32])
    num_blocks = rng.choice([2, 3, 4, 5, 6, 7, 8, 10, 14, 20, 30])
    slots = (num_blocks - 1) * block_size
    max_num_seqs = rng.choice([1, 2, 3, 4, 8, 16])
    lengths = [2, 3, block_size + 1, 2 * block_size, 2 * block_size + 1, slots, slots + 1, 2 * slots + 3, slots // 2]
    max_model_len = min(max(2, rng.choice(lengths)), 160)
    is_chunked = rng.random() < 0.7
    budget = rng.choice([1, 2, 3, block_size, block_size + 1, 2 * block_size, 16, 64, 256])
    if rng.random() < 0.8:
        budget = max(budget, max_num_seqs, 0 if is_chunked else max_model_len)
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": max_model_len,
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": is_chunked,
        "policy": rng.choice(["fcfs", "priority"]),
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 1, 2, 3, block_size, block_size + 1]),
        "watermark": rng.choice([0, 0, 0, 0.01, 0.1, 0.25, 0.5, 1.0]),
        "reserve_full_isl": rng.random() < 0.5,
        "max_loras": rng.choice([0, 0, 0, 1, 2]),
    }


def draw_request(rng: random.Random, number: int, config: Record, text: list[int], *, is_async: bool) -> Record:
    size, longest = config["block_size"], config["max_model_len"] - 1
    prompt_len = rng.choice([1, 1, size - 1, size, size + 1, 2 * size, 3 * size, longest, rng.randint(1, longest)])
    prompt_len = min(max(1, prompt_len), longest)
    num_shared = rng.choice([0, prompt_len, prompt_len // 2, prompt_len // size * size])
    output_len = min(60, rng.choice([1, 1, 2, 3, 5, size, size + 1, 2 * size, rng.randint(1, 40), longest]))
    is_known = rng.random() < 0.5
    row: Record = {
        "id": f"r{number}",
        "arrival_step": rng.choice([0, 0, rng.randint(0, 10), rng.randint(0, 10), 50]),
        "prompt_token_ids": text[:num_shared] + [rng.randrange(2) for _ in range(prompt_len - num_shared)],
        "output_token_ids": [text[prompt_len + i] if is_known else rng.randrange(2) for i in range(output_len)],
        "priority": rng.choice([-1, 0, 0, 1, 2]),
        "cache_salt": rng.choice([None] * 9 + ["a"]),
        "lora": rng.choice([None, "x", "y", "z"] if config["max_loras"] else [None] * 9 + ["x"]),
    }
    if rng.random() < 0.3:
        row["arrival_time"] = rng.choice([0, 1.5, -2])
    if rng.random() < 0.25:
        row["abort_at_step"] = max(0, row["arrival_step"] + rng.choice([-1, 0, 0, 1, 2, 3, 5, 8, 15, 30]))
    if is_async and rng.random() < 0.4:
        row["output_token_ids"][-1] = 99
        row["max_tokens"] = output_len + rng.choice([1, 1, 3, 100])
    return row


def draw_case(seed: int, *, is_async: bool) -> Record:
    rng = random.Random(seed)
    config = draw_config(rng)
    text = [rng.randrange(2) for _ in range(240)]
    num_requests = rng.choice([1, 2, 3, 4, 6, 8, 12])
    numbers = rng.sample(range(num_requests), num_requests)
    requests = [draw_request(rng, number, config, text, is_async=is_async) for number in numbers]
    taken = set()
    for row in requests if is_async else ():
        if row.get("abort_at_step") not in (None, *taken) and rng.random() < 0.5:
            row["abort_mid"] = True
            taken.add(row["abort_at_step"])
    trace = rng.choice(["full", "compact"])
    return {"name": f"drawn {seed}", "trace": trace, "config": config, "requests": requests}


def check(path: Path, seeds: range, *, is_async: bool) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        case = draw_case(seed, is_async=is_async)
        case["expected"] = expected = NaiveRun(case, is_async=is_async).expected(ENDLESS)
        end = expected["end"]
        seen[end["end"]] += 1
        seen.update(name for name, total in end.items() if isinstance(total, int) and total)
        if end["end"] != "max_steps":
            path.write_text(json.dumps(case))
            for engine_loop in ("calendar", "plain"):
                assert replay(load_case(path), engine_loop=engine_loop).mismatch is None, (seed, engine_loop)
    return seen


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_random_cases_agree(tmp_path: Path, is_async: bool) -> None:
    seen = check(tmp_path / "case.json", range(200), is_async=is_async)
    assert min(seen[name] for name in ("done", "stalled", "preemptions", "evictions", "hits", "aborted")) >= 5
    assert seen["max_steps"] < 20


@pytest.mark.deep
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_many_random_cases_agree(tmp_path: Path, is_async: bool) -> None:
    seen = check(tmp_path / "case.json", range(1_000, 5_000), is_async=is_async)
    assert min(seen[name] for name in ("preempted_hits", *(("stale", "discarded") if is_async else ()))) > 100


@needs_shared
@pytest.mark.parametrize("folder", ["v1", "v1-async"])
def test_the_rewrite_tells_what_the_real_engine_decided(shared_dir: Path, folder: str) -> None:
    for path in sorted((shared_dir / "golden" / folder).glob("*.json")):
        case = json.loads(path.read_text())
        got = NaiveRun(case, is_async=folder == "v1-async").expected(20_000)
        assert got == case["expected"], path
