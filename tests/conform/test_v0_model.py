"""The scheduler of the paper's engine against a plain rewrite of its description, on random cases."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conform.naive_v0 import NaiveRun

from kvsim.conform import replay
from kvsim.conform.cases import load_case
from tests.conftest import needs_shared

Record = dict[str, Any]


def draw_script(rng: random.Random, group: int, width: int, num_tokens: int) -> list[list[list[Any]]]:
    """Moves of beams that all end with the last token: childless ones are freed, others forked, then some end."""
    live = [group * 1000]
    next_label = live[0] + 1
    script: list[list[list[Any]]] = []
    for step in range(num_tokens - 1):
        num_chosen = max(1, len(live) - (rng.random() < 0.2))
        chosen = rng.sample(live * 2, num_chosen) if step else live * width
        moves: list[list[Any]] = [["f", label] for label in live if label not in chosen]
        beams = [label for label in live if label in chosen]
        parents = [label for label in beams for _ in range(chosen.count(label) - 1)]
        rng.shuffle(parents)
        for parent in parents:
            moves.append(["k", parent, next_label])
            beams.append(next_label)
            next_label += 1
        if len(beams) > 1 and rng.random() < 0.1 and beams[0] in live:
            moves.append(["f", beams.pop(0)])
        script.append(moves)
        live = beams
    return [*script, [["f", label] for label in live]]


def draw_case(seed: int) -> Record:
    rng = random.Random(seed)
    is_roomy = rng.random() < 0.5
    size = rng.choice([1, 2, 3, 4] if is_roomy else [1, 1, 2, 3, 4, 8, 16, 32])
    gpu = rng.choice([6, 8, 12, 20] if is_roomy else [1, 2, 3, 4, 5, 6, 8, 12, 20, 40])
    lengths = [1, 2, 3, size, size + 1, 2 * size, gpu * size, gpu * size + 1, (gpu + 2) * size, 80]
    longest = 120 if is_roomy else min(rng.choice(lengths), 120)
    cfg: Record = {
        "bs": size,
        "gpu": gpu,
        "cpu": rng.choice([20, 60] if is_roomy else [0, 1, 2, 4, 8, 20, 60]),
        "wm": rng.choice([0, 0, 0.01, 0.1] if is_roomy else [0, 0, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0]),
        "mns": rng.choice([8, 16, 32] if is_roomy else [1, 2, 3, 4, 8, 32]),
        "mnbt": 10_000 if is_roomy else rng.choice([longest, longest + 1, 2 * longest, 10_000, 10_000]),
        "mpad": rng.choice([0, 3, 10_000] if is_roomy else [0, 1, 4, 16, 256]),
        "mml": longest,
    }
    is_sliding = not is_roomy and rng.random() < 0.2
    if is_sliding:
        cfg["sw"] = size * rng.choice([1, 2, 3, 4])
    groups = []
    for number in range(rng.choice([1, 2, 3, 5, 8])):
        mode = "greedy" if is_sliding else rng.choice(["greedy", "par", "par", "beam"])
        width = {"greedy": 1, "par": rng.choice([1, 2, 2, 3, 4, 5]), "beam": rng.choice([1, 2, 2, 3, 4])}[mode]
        prompt_len = rng.choice([1, size, max(1, size - 1), size + 1, 2 * size, rng.randint(1, min(longest, 40))])
        row: Record = {
            "g": number,
            "at": rng.choice([0, 0, rng.randint(0, 15), rng.randint(0, 40)]),
            "arr": rng.choice([0, 0.5, -1, rng.randint(0, 20)]),
            "plen": prompt_len,
            "mode": mode,
            "n": width,
        }
        if mode == "beam":
            num_tokens = min(rng.choice([1, 2, 3, 6, 12, 20]), max(1, longest - prompt_len))
            row["ev"] = draw_script(rng, number, width, num_tokens)
        else:
            row["out"] = [rng.choice([1, 1, 2, 3, size, size + 1, rng.randint(1, 30)]) for _ in range(width)]
        groups.append(row)
    aborts = sorted(
        [rng.choice([0, 1, 2, 3, 5, 8, 13]), rng.randrange(len(groups))] for _ in range(rng.choice([0, 0, 2]))
    )
    return {"id": f"drawn {seed}", "kind": "sched", "cfg": cfg, "groups": groups, "aborts": aborts}


def check(path: Path, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        case = draw_case(seed)
        case["steps"], why = NaiveRun(case).records(300)
        seen[why] += 1
        seen.update({name for record in case["steps"] for name in record})
        if why != "endless":
            path.write_text(json.dumps(case))
            for engine_loop in ("calendar", "plain"):
                assert replay(load_case(path), engine_loop=engine_loop).mismatch is None, (seed, engine_loop)
    return seen


def test_random_cases_agree(tmp_path: Path) -> None:
    seen = check(tmp_path / "case.json", range(250))
    for what in ("done", "stuck", "err", "pre", "in", "out", "cp", "ign", "ab", "ca"):
        assert seen[what] >= 5, (what, seen)
    assert seen["endless"] < 10


@pytest.mark.deep
def test_many_random_cases_agree(tmp_path: Path) -> None:
    seen = check(tmp_path / "case.json", range(1_000, 6_000))
    assert min(seen["in"], seen["err"], seen["stuck"]) > 100


@needs_shared
def test_the_rewrite_tells_what_the_real_engine_decided(shared_dir: Path) -> None:
    for path in sorted((shared_dir / "golden" / "v0").glob("sched_*.json")):
        case = json.loads(path.read_text())
        assert NaiveRun(case).records(20_000)[0] == case["steps"], path
