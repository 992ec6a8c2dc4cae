"""From the workload block to requests: what each key does, and that streams do not disturb each other."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.request import NO_NAMESPACE, Namespace, Request
from kvsim.types import NS_PER_S, ScenarioError
from kvsim.workload import TableSource, build_source, content
from kvsim.workload.spec import WorkloadSpec


def requests(seed: int = 7, **block: Any) -> list[Request]:
    source = build_source(block, seed)
    taken: list[Request] = []
    while (now := source.next_ns()) is not None:
        due = source.take_due(now)
        taken += due
        for request in due:
            source.on_end(request.request_id, now)
    assert source.num_left == 0
    return taken


FIXED = {"type": "fixed", "prompt": 100, "output": 10}


def test_defaults_are_a_thousand_sharegpt_requests() -> None:
    taken = requests()
    assert len(taken) == 1000
    assert [r.request_id for r in taken[:2]] == ["0", "1"]
    assert all(r.max_output_len == r.output_len for r in taken)
    assert [r.arrival_ns for r in taken] == sorted(r.arrival_ns for r in taken)
    assert len({r.prompt.content(0, 1) for r in taken}) == 1000


def test_the_same_seed_gives_the_same_requests() -> None:
    assert requests(num_requests=50) == requests(num_requests=50)
    assert requests(num_requests=50) != requests(8, num_requests=50)


EXTRAS: list[dict[str, Any]] = [
    {},
    {"sampling": {"n": 3, "lengths": "independent"}},
    {"priorities": {0: 1, 5: 2}},
    {"abort": {"probability": 0.5}},
    {"content": {"system_prompt": {"num_groups": 3}, "few_shot": {"num_groups": 2}, "num_loras": 2}},
    {"lengths": {"type": "preset", "name": "alpaca", "max_total": 70}},
    {"arrivals": {"type": "gamma", "burstiness": 0.3}},
    {"max_output_tokens": 100},
]


@given(extra=st.sampled_from(EXTRAS), short=st.integers(1, 30), more=st.integers(1, 30))
def test_a_request_at_the_end_changes_no_earlier_one(extra: dict[str, Any], short: int, more: int) -> None:
    assert requests(num_requests=short, **extra) == requests(num_requests=short + more, **extra)[:short]


@given(short=st.integers(1, 30), more=st.integers(1, 30))
def test_neither_does_a_turn(short: int, more: int) -> None:
    block = {"sessions": {"mean_turns": 3.0, "think_time": 4.0}, "content": {"system_prompt": {"num_groups": 3}}}
    few = {r.request_id: r for r in requests(num_requests=short, **block)}
    many = {r.request_id: r for r in requests(num_requests=short + more, **block)}
    assert len(many) == short + more
    assert all(many[request_id] == request for request_id, request in few.items())


def test_changing_one_stream_leaves_the_others_alone() -> None:
    plain = requests(num_requests=20)
    for extra in EXTRAS:
        other = requests(num_requests=20, **extra)
        if "lengths" not in extra and "max_output_tokens" not in extra:
            assert [r.output_len for r in other] == [r.output_len for r in plain]
        if "arrivals" not in extra:
            assert [r.arrival_ns for r in other] == [r.arrival_ns for r in plain]


def test_max_output_tokens_is_what_the_scheduler_knows() -> None:
    taken = requests(num_requests=200, max_output_tokens=100)
    assert {r.max_output_len for r in taken} == {100}
    assert max(r.output_len for r in taken) == 100
    assert build_source({"max_output_tokens": 100}).notes


def test_samples_of_equal_and_of_independent_length() -> None:
    same = requests(num_requests=30, sampling={"n": 3})
    assert {(r.sampling.n, r.sample_lens) for r in same} == {(3, ())}
    independent = requests(num_requests=300, sampling={"n": 3, "lengths": "independent"})
    assert all(len(r.sample_lens) == 3 and r.sample_lens[0] == r.output_len for r in independent)
    assert all(r.max_output_len == max(r.sample_lens) for r in independent)
    means = np.array([r.sample_lens for r in independent]).mean(axis=0)
    assert means == pytest.approx([317] * 3, rel=0.2)


def test_beam_requests_have_seeds_of_their_own() -> None:
    taken = requests(num_requests=30, sampling={"beam_width": 4})
    assert {r.sampling.beam_width for r in taken} == {4}
    assert len({r.seed for r in taken}) == 30


def test_system_prompts_and_examples_are_shared_by_group() -> None:
    taken = requests(
        num_requests=2000,
        lengths=FIXED,
        content={
            "system_prompt": {"num_groups": 3, "zipf": 1.0, "tokens": 64},
            "few_shot": {"num_groups": 2, "num_examples": 2, "example_tokens": 10},
        },
    )
    assert {r.prompt_len for r in taken} == {64 + 20 + 100}
    groups = Counter(r.prompt.content(0, 64) for r in taken)
    shares = [count for _, count in groups.most_common()]
    assert shares == pytest.approx([2000 * 6 / 11, 2000 * 3 / 11, 2000 * 2 / 11], rel=0.1)
    assert len({r.prompt.content(64, 84) for r in taken}) == 2
    assert len({r.prompt.content(84, 85) for r in taken}) == 2000


def test_the_sources_of_texts_do_not_overlap() -> None:
    kinds = [
        content.OWN_TEXT,
        content.SYSTEM_PROMPT,
        content.FEW_SHOT,
        content.SESSION_TEXT,
        content.HASH_TEXT,
        content.PREFIX_GROUP,
    ]
    assert len({kind >> 40 for kind in kinds}) == len(kinds)
    assert all(kind < 2**48 for kind in kinds)


def test_priorities_aborts_and_loras() -> None:
    taken = requests(
        num_requests=4000,
        priorities={0: 0.25, 3: 0.75},
        content={"num_loras": 4},
        abort={"probability": 0.5, "after": 2.0, "distribution": "constant"},
    )
    assert Counter(r.priority for r in taken)[0] == pytest.approx(1000, rel=0.1)
    assert {r.namespace.lora for r in taken} == {f"lora-{i}" for i in range(4)}
    aborted = [r for r in taken if r.abort_ns is not None]
    assert len(aborted) == pytest.approx(2000, rel=0.1)
    assert {(r.abort_ns or 0) - r.arrival_ns for r in aborted} == {2 * NS_PER_S}


def test_sessions_end_at_the_context_and_can_be_truncated() -> None:
    block = {"num_requests": 8, "lengths": FIXED, "arrivals": {"type": "batch"}}
    whole = requests(**block, sessions={"num_turns": 4})
    assert sorted(r.prompt_len for r in whole) == [100, 100, 210, 210, 320, 320, 430, 430]
    ended = requests(**block, sessions={"num_turns": 4, "max_context": 330})
    assert sorted(r.prompt_len for r in ended) == [100, 100, 210, 210, 320, 320]
    shorter = requests(**block, sessions={"num_turns": 4, "max_context": 329})
    assert max(r.prompt_len + r.output_len for r in shorter) == 220, "an answer needs its room, too"
    cut = requests(**block, sessions={"num_turns": 4, "truncate_to": 150})
    assert sorted(r.prompt_len for r in cut) == [100, 100] + [150] * 6
    turns = {r.request_id: r for r in cut}
    assert turns["0.3"].prompt.content(50, 150) != turns["0.2"].prompt.content(50, 150)


def mooncake(tmp_path: Path) -> str:
    rows = [(0, 1000, [0, 1]), (5, 1536, [0, 1, 2]), (9, 600, [3, 1])]
    path = tmp_path / "m.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": p, "output_length": 3, "hash_ids": ids}) for t, p, ids in rows
        )
    )
    return str(path)


def test_hash_ids_share_exactly_as_far_as_they_agree(tmp_path: Path) -> None:
    a, b, c = requests(trace=mooncake(tmp_path))
    assert [r.prompt_len for r in (a, b, c)] == [1000, 1536, 600]
    assert a.prompt.content(0, 1000) == b.prompt.content(0, 1000)
    assert c.prompt.content(512, 600) == a.prompt.content(512, 600)
    assert c.prompt.content(0, 600) != a.prompt.content(0, 600)


def test_hash_ids_share_no_more_than_the_shorter_prompt_has(tmp_path: Path) -> None:
    """Ids of 16 tokens: the second stands for 13 of a prompt of 29, with which one of 40 shares no block of 32."""
    path = tmp_path / "p.jsonl"
    rows = [(29, [1, 2]), (40, [1, 2, 3]), (5, [7]), (5, [7])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids})
            for length, ids in rows
        )
    )
    source = build_source({"trace": str(path), "hash_block_size": 16})
    assert isinstance(source, TableSource)
    assert source.shares is not None
    assert source.shares(32) == content.Shares(4, 0, 0, 0, 29)
    assert source.shares(16) == content.Shares(2, 0, 2, 0, 5)


def test_a_trace_replaces_arrivals_and_lengths_and_says_so(tmp_path: Path) -> None:
    source = build_source({"trace": mooncake(tmp_path), "arrivals": {"type": "poisson"}, "lengths": FIXED})
    assert sum("replace" in note for note in source.notes) == 2
    times_only = requests(trace=mooncake(tmp_path), arrivals={"type": "trace"}, lengths=FIXED)
    assert [(r.arrival_ns, r.prompt_len) for r in times_only] == [(0, 100), (5_000_000, 100), (9_000_000, 100)]


def test_a_trace_without_times_needs_arrivals(tmp_path: Path) -> None:
    for header in ("num_prefill_tokens,num_decode_tokens", "prompt_tokens,output_tokens"):
        path = tmp_path / "v.csv"
        path.write_text(f"{header}\n10,2\n20,3\n")
        with pytest.raises(ScenarioError, match="arriv"):
            build_source({"trace": str(path)})
        taken = requests(trace=str(path), arrivals={"type": "constant", "request_rate": 2.0})
        assert [(r.arrival_ns, r.prompt_len) for r in taken] == [(0, 10), (500_000_000, 20)]


def test_columns_of_a_plain_csv_reach_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,max_output_tokens,prefix_group,prefix_tokens,n,priority\n"
        "0,100,5,50,a,64,2,1\n1,80,5,,a,64,,\n2,64,5,5,a,64,1,0\n"
    )
    a, b, c = requests_in(tmp_path, trace="p.csv")
    assert a.prompt.content(0, 64) == b.prompt.content(0, 64) == c.prompt.content(0, 64)
    assert a.prompt.content(64, 80) != b.prompt.content(64, 80)
    assert [(r.prompt_len, r.max_output_len, r.sampling.n, r.priority) for r in (a, b, c)] == [
        (100, 50, 2, 1),
        (80, 5, 1, 0),
        (64, 5, 1, 0),
    ]


def requests_in(folder: Path, **block: Any) -> list[Request]:
    source = build_source(block, 7, base_dir=folder)
    return source.take_due(10**15)


def test_knobs_are_applied_in_order(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},{i + 1},1\n" for i in range(10)))
    taken = requests(trace=str(path), window=[2, 8], first=3, speed=2.0, repeat=2, num_requests=5)
    assert [r.prompt_len for r in taken] == [3, 4, 5, 3, 4]
    assert [r.arrival_ns / NS_PER_S for r in taken] == [0, 0.5, 1.0, 1.5, 2.0]
    assert len({r.request_id for r in taken}) == 5


@pytest.mark.parametrize(("header", "times"), [("arrival_s,", ("0,", "1,")), ("", ("", ""))])
def test_a_pass_of_a_trace_has_conversations_of_its_own(tmp_path: Path, header: str, times: tuple[str, str]) -> None:
    """With times of its own or without, the second pass begins each conversation anew."""
    path = tmp_path / "s.csv"
    path.write_text(f"{header}prompt_tokens,output_tokens,session\n{times[0]}10,5,a\n{times[1]}20,5,a\n")
    arrivals = {} if header else {"arrivals": {"type": "constant", "request_rate": 1.0}}
    first, second, again, later = requests(trace=str(path), repeat=2, **arrivals)
    assert first.prompt.content(0, 10) == second.prompt.content(0, 10)
    assert again.prompt.content(0, 10) == later.prompt.content(0, 10) != first.prompt.content(0, 10)


def test_sessions_of_one_instant_come_by_which_began_first(tmp_path: Path) -> None:
    """As docs/scenario.md has it: by the earliest row of a trace, by the first name in `requests:`."""
    rows = [("old", 9, 1), ("new", 5, 2), ("new", 9, 3), ("", 9, 4), ("old", 9, 5), ("", 9, 6)]
    path = tmp_path / "t.csv"
    lines = [f"{time},{prompt},1,{session}" for session, time, prompt in rows]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,session", *lines]))
    assert [request.prompt_len for request in requests(trace=str(path))] == [2, 3, 1, 4, 6, 5]
    written = [
        {"arrival_s": time, "prompt_tokens": prompt, "output_tokens": 1} | ({"session": session} if session else {})
        for session, time, prompt in rows
    ]
    assert [request.prompt_len for request in requests(requests=written)] == [2, 1, 3, 4, 6, 5]


def test_drawn_prompts_of_a_session_do_not_begin_with_the_traces_prefix(tmp_path: Path) -> None:
    """A prompt of 10 tokens cannot begin with a prefix of 50; apart from sessions drawn prompts share none either."""
    path = tmp_path / "g.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens,session\n0,60,5,g,50,a\n")
    (taken,) = requests(trace=str(path), arrivals={"type": "trace"}, lengths=FIXED | {"prompt": 10})
    assert [(piece.start, piece.length) for piece in taken.prompt.pieces] == [(0, 10)]


def test_requests_written_out() -> None:
    a, b = requests(
        requests=[
            {"id": "A", "prompt_tokens": 8, "output_tokens": 9, "prefix_group": "x", "prefix_tokens": 4, "abort_s": 3},
            {
                "prompt_tokens": 6,
                "output_tokens": 2,
                "arrival_s": 1.5,
                "beam_width": 2,
                "max_output_tokens": 7,
                "prefix_group": "x",
                "prefix_tokens": 4,
            },
        ]
    )
    assert (a.request_id, a.abort_ns, b.request_id, b.arrival_ns) == ("A", 3 * NS_PER_S, "1", 1_500_000_000)
    assert (b.sampling.beam_width, b.max_output_len) == (2, 7)
    assert a.prompt.content(0, 4) == b.prompt.content(0, 4)
    assert a.prompt.content(0, 5) != b.prompt.content(0, 5)


def test_written_requests_have_an_adapter_and_a_salt() -> None:
    row = {"prompt_tokens": 8, "output_tokens": 1}
    plain, adapted, salted = requests(requests=[row, row | {"lora": "sql"}, row | {"lora": "sql", "salt": 7}])
    assert plain.namespace == NO_NAMESPACE
    assert adapted.namespace == Namespace(lora="sql")
    assert salted.namespace == Namespace(lora="sql", salt="7")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"blok": 1}, "blok"),
        ({"lengths": {"nam": "x"}}, "did you mean 'name'"),
        ({"num_requests": 0}, "num_requests"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"sampling": {"n": 0}}, "sampling"),
        ({"sampling": {"n": 2, "beam_width": 2}}, "sampling"),
        ({"sessions": {"num_turns": 2, "mean_turns": 2}}, "sessions"),
        ({"sessions": {"num_turns": 0}}, "sessions"),
        ({"sessions": {}, "sampling": {"n": 2}}, "session"),
        ({"priorities": {0: 0.0}}, "priorities"),
        ({"sessions": {"num_turns": 2, "think_time": 1e9}}, r"think_time is 1e\+09 s; it must be from 0 to 1e8 s"),
        ({"abort": {"probability": 2.0}}, "abort"),
        ({"abort": {"probability": 1, "after": 1e9}}, r"after 1e\+09 s; .* a time between 0 and 1e8 s"),
        ({"content": {"system_prompt": {"num_groups": 0}}}, "num_groups"),
        ({"content": {"system_prompt": {"zipf": -1.0}}}, "zipf"),
        ({"trace": "/nowhere.csv"}, "nowhere"),
        ({"requests": [{"prompt_tokens": 0, "output_tokens": 1}]}, "prompt_tokens"),
        ({"requests": [{"prompt_tokens": 1}]}, "output_tokens"),
        ({"requests": [{"promt_tokens": 1}]}, "did you mean"),
        ({"requests": [{"prompt_tokens": 1, "output_tokens": 1, "salt": ["x"]}]}, "salt"),
        ({"requests": [{"id": 1, "prompt_tokens": 1, "output_tokens": 1}] * 2}, "twice"),
        ({"arrivals": {"type": "trace"}}, "trace"),
        ({"arrivals": 3}, "arrivals"),
    ],
)
def test_nonsense_is_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        build_source(block)


def test_the_spec_is_built_from_plain_mappings() -> None:
    spec = WorkloadSpec.from_dict({"lengths": {"type": "uniform", "prompt": [1, 2], "output": 3}, "window": [0, 5]})
    assert spec.lengths is not None
    assert (spec.lengths.prompt, spec.window) == ((1, 2), (0, 5))


@pytest.mark.parametrize("key", ["num_requests", "first"])
def test_fewer_rows_than_asked_for_are_told(tmp_path: Path, key: str) -> None:
    path = tmp_path / "four.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},9,2\n" for i in range(4)))
    (note,) = build_source({"trace": str(path), key: 9}).notes
    assert f"workload.{key} is 9, and the trace has 4 requests: all 4 are run" in note
    assert build_source({"trace": str(path), key: 4}).notes == ()
    assert build_source({"trace": str(path), "num_requests": 8, "repeat": 2}).notes == ()
