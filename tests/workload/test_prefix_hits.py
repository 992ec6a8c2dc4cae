"""The ideal prefix-hit curve: small cases by hand, laws against a naive cache, and the recorded reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from hypothesis import given
from hypothesis import strategies as st

from kvsim.runs import run
from kvsim.types import ScenarioError
from kvsim.workload.prefix_hits import BlockTrace, block_trace, prefix_curve, prefix_hits
from kvsim.workload.trace import Trace
from kvsim.workload.trace_report import render, trace_report
from kvsim.workload.traces import load_trace


def blocks(*requests: list[int], block_size: int = 4, partial: int = 0) -> BlockTrace:
    """Requests as lists of ids; each prompt ends `partial` tokens before its last block's end."""
    lens = np.array([len(ids) for ids in requests])
    ids = np.array([id_ for request in requests for id_ in request], dtype=np.int64)
    return BlockTrace(ids, np.concatenate(([0], np.cumsum(lens))), lens * block_size - partial, block_size)


def test_a_hit_is_a_whole_beginning() -> None:
    hits = prefix_hits(blocks([1, 2, 3], [1, 2, 4], [9, 2, 3]))
    assert (hits.hit_blocks, hits.total_blocks, hits.hit_tokens) == (2, 9, 8)


def test_the_last_token_is_computed_anew_in_capped_hits() -> None:
    whole = prefix_hits(blocks([1, 2], [1, 2]))
    assert (whole.hit_blocks, whole.hit_blocks_capped) == (2, 1)
    partial = prefix_hits(blocks([1, 2], [1, 2], partial=1))
    assert (partial.hit_blocks, partial.hit_blocks_capped, partial.hit_tokens) == (2, 1, 7)


def test_the_tail_is_evicted_before_the_head() -> None:
    requests = blocks([1, 2, 3], [7], [1, 2, 3])
    assert prefix_hits(requests, 3, "rev").hit_blocks == 2
    assert prefix_hits(requests, 3, "fwd").hit_blocks == 0


def naive(trace: BlockTrace, capacity: int, order: str) -> list[int]:
    """An LRU list in plain Python, one request after another."""
    cache: list[int] = []
    matched = []
    for start, end in zip(trace.offsets, trace.offsets[1:], strict=False):
        ids = trace.ids[start:end].tolist()
        found = 0
        while found < len(ids) and ids[found] in cache:
            found += 1
        matched.append(found)
        for id_ in ids[::-1] if order == "rev" else ids:
            if id_ in cache:
                cache.remove(id_)
            cache.append(id_)
        cache = cache[-capacity:]
    return matched


@given(
    requests=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=20),
    capacity=st.integers(1, 12),
    order=st.sampled_from(["rev", "fwd"]),
)
def test_equals_a_naive_cache(requests: list[list[int]], capacity: int, order: str) -> None:
    trace = blocks(*requests)
    assert prefix_hits(trace, capacity, order).hit_blocks == sum(naive(trace, capacity, order))  # type: ignore[arg-type]


@given(requests=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=20))
def test_a_larger_cache_finds_no_less(requests: list[list[int]]) -> None:
    found = [hits.hit_blocks for hits in prefix_curve(blocks(*requests), [1, 2, 4, 8, 16, None])]
    assert found == sorted(found)


def grouped(prompts: list[int], prefix: list[int], group: list[int], session: list[int] | None = None) -> Trace:
    columns = [np.array(values, dtype=np.int64) for values in (prompts, prefix, group, session or [-1] * len(prompts))]
    return Trace(
        "t",
        "csv",
        None,
        columns[0],
        np.ones_like(columns[0]),
        prefix_tokens=columns[1],
        prefix_group=columns[2],
        session=columns[3] if session else None,
    )


def test_k49_what_a_shared_system_prompt_saves() -> None:
    for shared, tokens in ((1024, 1024), (1030, 1024), (15, 0)):
        trace = block_trace(grouped([shared + 100] * 100, [shared] * 100, [0] * 100))
        assert trace is not None
        hits = prefix_hits(trace)
        assert hits.hit_tokens == 99 * tokens
        assert hits.total_tokens == 100 * (shared + 100)


def test_groups_and_sessions_do_not_meet() -> None:
    trace = block_trace(grouped([32, 32, 48, 64], [16, 16, 16, 0], [0, 1, 0, -1], [-1, 5, 5, 6]))
    assert trace is not None
    # Row 2 shares its first block with row 0 (group 0). Row 1's text of the session stands behind another group's
    # prefix: a block is found by all that is before it, too.
    assert prefix_hits(trace).hit_blocks == 1


def test_a_turn_finds_the_answer_before_it() -> None:
    """100 tokens and an answer of 100 leave 12 whole blocks of 16, the last token not being stored; 100 find 6."""
    trace = grouped([100, 250, 100], [0, 0, 0], [-1, -1, -1], [0, 0, 0])
    blocks = block_trace(replace(trace, output=np.array([100, 5, 7])))
    assert blocks is not None
    hits = prefix_hits(blocks)
    assert (hits.hit_blocks, hits.hit_tokens, hits.total_blocks) == (12 + 6, 18 * 16, 7 + 16 + 7)


MIXED = (
    "arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens,session\n"
    "0,32,9,a,16,\n100,32,1,b,16,x\n200,48,40,a,16,x\n300,90,1,a,16,x\n400,64,5,a,32,x\n500,80,5,,0,x\n600,85,5,a,32,x\n"
)


@pytest.mark.parametrize("name", ["sessions-sample.csv", "mixed.csv"])
def test_an_endless_cache_finds_of_sessions_what_the_engine_finds(repo_root: Path, tmp_path: Path, name: str) -> None:
    """In the mixed trace the turns of one session stand behind several prefixes."""
    path = repo_root / "scenarios" / "traces" / name
    if name == "mixed.csv":
        path = tmp_path / name
        path.write_text(MIXED)
    scenario = {
        "workload": {"trace": str(path)},
        "memory": {"num_gpu_blocks_override": 100_000},
        "allocator": {"enable_prefix_caching": True},
        "scheduler": {"max_model_len": 20_000},
    }
    hits = trace_report(path).prefix_hits[-1]
    assert run(scenario).summary["prefix_cache_hits"] == hits.hit_blocks_capped * 16


def test_a_prefix_shorter_than_a_block_is_warned_about(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "short.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n0,90,1,a,15\n1,90,1,a,15\n")
    report = trace_report(path)
    assert any("shorter than a block of 16" in warning for warning in report.warnings)
    assert report.prefix_hits[-1].hit_blocks == 0
    assert not trace_report(path, block_size=8).warnings


def shares_told(workload: dict[str, object], *, block_size: int = 16, caching: bool = True) -> list[str]:
    """The warnings of a run that speak of shares shorter than a block."""
    scenario = {
        "name": "short",
        "engine": "paged",
        "model": "opt-13b",
        "memory": {"num_gpu_blocks_override": 1000},
        "allocator": {"block_size": block_size, "enable_prefix_caching": caching},
        "workload": workload,
    }
    result = run(scenario)
    told = [text for text in result.summary["warnings"] if "cannot hit the prefix cache" in text]
    return told


SIX = {"num_requests": 6, "lengths": {"type": "fixed", "prompt": 50, "output": 2}}


def test_a_run_says_that_what_prompts_share_is_shorter_than_a_block() -> None:
    system = SIX | {"content": {"system_prompt": {"num_groups": 1, "tokens": 15}}}
    (text,) = shares_told(system)
    assert text == (
        "6 of 6 requests that begin as others do cannot hit the prefix cache: what they share is 15 tokens at most, "
        "less than a block of 16: share more, or set allocator.block_size to 15 or less"
    )
    assert shares_told(system, block_size=15) == []
    assert shares_told(system, caching=False) == []
    assert shares_told(system | {"max_concurrency": 2}) == [text]
    assert shares_told(system | {"sessions": {"num_turns": 1}}) == [text]
    assert shares_told(system | {"sessions": {"num_turns": 3}}) == []
    assert shares_told(SIX) == []
    alone = {"content": {"system_prompt": {"num_groups": 1, "tokens": 15}}, "num_requests": 1}
    assert shares_told(SIX | alone) == []
    examples = {"few_shot": {"num_groups": 1, "num_examples": 1, "example_tokens": 8}}
    assert shares_told(SIX | {"content": {"system_prompt": {"num_groups": 1, "tokens": 15}, **examples}}) == []
    (text,) = shares_told(SIX | {"content": examples})
    assert "8 tokens at most" in text


def test_a_run_says_so_of_a_trace_too(tmp_path: Path) -> None:
    rows = ["a,10", "a,40", "a,40", "b,12", "c,3", "b,12", ",0"]
    lines = [f"{i},90,1,{row}" for i, row in enumerate(rows)]
    path = tmp_path / "groups.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens", *lines]))
    (text,) = shares_told({"trace": str(path)}, block_size=20)
    # Nobody shares with c; two of a share 40 tokens, the third and both of b less than a block.
    assert text.startswith("3 of 5 requests that begin as others do cannot hit")
    assert "12 tokens at most" in text
    assert shares_told({"trace": str(path)}, block_size=10) == []


@pytest.mark.parametrize(("block_size", "short"), [(8, []), (16, ["3 of 5"]), (24, ["5 of 5"])])
def test_hash_ids_smaller_than_a_block(tmp_path: Path, block_size: int, short: list[str]) -> None:
    lists = [[1, 2, 3, 4], [1, 9, 10, 11], [1, 2, 7, 8], [5, 50, 51, 52], [5, 6, 61, 62], [30, 31, 32, 33]]
    path = tmp_path / "hash.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": i, "input_length": 32, "output_length": 1, "hash_ids": ids})
            for i, ids in enumerate(lists)
        )
    )
    told = shares_told({"trace": str(path), "hash_block_size": 8}, block_size=block_size)
    assert [text.split(" requests")[0] for text in told] == short


def test_requests_that_are_written_out_share_by_group() -> None:
    def row(group: str | None, tokens: int) -> dict[str, object]:
        shared = {} if group is None else {"prefix_group": group, "prefix_tokens": tokens}
        return {"prompt_tokens": 40, "output_tokens": 1, **shared}

    (text,) = shares_told({"requests": [row("a", 10), row("a", 14), row(None, 0)]})
    assert text.startswith("2 of 2 requests")
    assert "10 tokens at most" in text
    assert shares_told({"requests": [row("a", 10), row("b", 14), row(None, 0)]}) == []


def test_capacities_must_be_positive() -> None:
    with pytest.raises(ScenarioError, match="capacity"):
        prefix_curve(blocks([1]), [0])


@needs_shared
def test_mooncake_conversation_gives_the_reference() -> None:
    folder = SHARED / "data/traces"
    reference = json.loads((folder / "MOONCAKE_PREFIX_REFERENCE.json").read_text())["conversation"]
    report = trace_report(folder / "mooncake/conversation_trace.jsonl").to_dict()
    curve = {hits["capacity"]: hits for hits in report["prefix_hits"]}
    for row in (row for row in reference if row["order"] == "rev"):
        for key in ("hit_blocks", "total_blocks", "hit_tokens", "total_tokens", "evictions"):
            assert curve[row["capacity"]][key] == row[key]
        for key in ("block_hit_rate", "token_hit_rate", "block_hit_rate_capped"):
            assert round(curve[row["capacity"]][key], 6) == row[key]


@needs_shared
def test_mooncake_conversation_touched_first_to_last() -> None:
    folder = SHARED / "data/traces"
    reference = json.loads((folder / "MOONCAKE_PREFIX_REFERENCE.json").read_text())["conversation"]
    trace = block_trace(load_trace(folder / "mooncake/conversation_trace.jsonl"))
    assert trace is not None
    row = next(row for row in reference if row["order"] == "fwd" and row["capacity"] == 10_000)
    hits = prefix_hits(trace, 10_000, "fwd")
    assert (hits.hit_blocks, hits.hit_tokens, hits.num_evictions) == (
        row["hit_blocks"],
        row["hit_tokens"],
        row["evictions"],
    )


@needs_shared
def test_azure_report() -> None:
    report = trace_report(SHARED / "data/traces/azure2023/AzureLLMInferenceTrace_conv.csv")
    assert report.rows == 19_366
    assert (round(report.prompt_tokens.mean, 1), round(report.output_tokens.mean, 1)) == (1154.7, 211.1)
    assert round(report.rate or 0, 3) == 5.530
    assert round(report.burstiness_cv or 0, 3) == 1.094
    assert report.prefix_hits == ()
    assert "19366 requests" in render(report)
