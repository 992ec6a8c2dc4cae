"""Trace loaders: every public format, in all the shapes it is met in; errors that name their place; the knobs."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from support import num_lines

from kvsim.types import NS_PER_S, ScenarioError
from kvsim.workload import trace_edits as edits
from kvsim.workload.trace import Trace, in_file_order
from kvsim.workload.trace_files import open_text
from kvsim.workload.trace_json import json_list
from kvsim.workload.traces import load_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
"""
BURST_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,12,0.5,ChatGPT,472,18,490,Conversation log
30,12,0.5,ChatGPT,300,0,300,Conversation log
45,13,2.5,ChatGPT,1087,230,1317,Conversation log
"""


def load(tmp_path: Path, content: str | bytes, **options: object) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_trace(path, **options)  # type: ignore[arg-type]


def rows(trace: Trace) -> list[tuple[int | None, int, int]]:
    arrivals = [None] * len(trace) if trace.arrival_ns is None else trace.arrival_ns.tolist()
    return list(zip(arrivals, trace.prompt.tolist(), trace.output.tolist(), strict=True))


def error(tmp_path: Path, content: str | bytes, **options: object) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, content, **options)
    return str(caught.value)


VARIANTS = {
    "plain": lambda text: text.encode(),
    "byte-order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "spaces": lambda text: text.replace(",", ", ").encode(),
    "lower case": lambda text: text.lower().encode(),
    "upper case": lambda text: text.upper().encode(),
    "quoted": lambda text: "\n".join(",".join(f'"{c}"' for c in r.split(",")) for r in text.splitlines()).encode(),
    "gz": lambda text: gzip.compress(text.encode(), mtime=0),
    "no last newline": lambda text: text.rstrip("\n").encode(),
    "blank lines": lambda text: ("\n" + text.replace("\n", "\n\n")).encode(),
    "semicolons": lambda text: text.replace(",", ";").encode(),
    "unsorted": lambda text: "".join(np.array(text.splitlines(keepends=True))[[0, 2, 1]]).encode(),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_k66_azure_reads_seven_decimals(tmp_path: Path, variant: str) -> None:
    trace = load(tmp_path, VARIANTS[variant](AZURE))
    assert trace.format == "azure"
    assert rows(trace) == [(0, 374, 44), (4_314_579_000, 396, 109)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_k66_burstgpt_begins_at_its_first_request(tmp_path: Path, variant: str) -> None:
    trace = load(tmp_path, VARIANTS[variant](BURST))
    assert trace.format == "burstgpt"
    assert rows(trace) == [(0, 472, 18), (40 * NS_PER_S, 1087, 230)]


@pytest.mark.parametrize(
    ("text", "column"),
    [(AZURE, c) for c in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    + [(BURST, c) for c in ("Timestamp", "Request tokens", "Response tokens")],
)
def test_k66_a_missing_column_is_named_beside_those_found(tmp_path: Path, text: str, column: str) -> None:
    header, *body = text.splitlines()
    index = header.split(",").index(column)
    kept = [",".join(c for i, c in enumerate(line.split(",")) if i != index) for line in (header, *body)]
    message = error(tmp_path, "\n".join(kept))
    assert "trace.csv" in message
    assert repr(column) in message
    assert all(repr(name) in message for name in kept[0].split(","))


def test_burstgpt_failures_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = load(tmp_path, BURST_SESSIONS)
    assert rows(trace) == [(0, 472, 18), (40 * NS_PER_S, 1087, 230)]
    assert trace.num_failed == 1
    assert any("1 failed" in note for note in trace.notes)


def test_azure_2024_with_a_time_zone(tmp_path: Path) -> None:
    assert rows(load(tmp_path, AZURE_2024)) == [(0, 2162, 5), (7_405_000, 2399, 6)]


@pytest.mark.parametrize(
    ("first", "second", "gap_ns"),
    [
        ("2023-11-16 23:59:59.9999999", "2023-11-17 00:00:00", 100),
        ("2024-02-28 23:59:59", "2024-02-29 00:00:00", NS_PER_S),
        ("2024-05-10T00:00:00Z", "2024-05-10T02:00:00.5+02:00", NS_PER_S // 2),
        ("2024-05-10 00:00:00-0130", "2024-05-10 01:30:00.123456789", 123_456_789),
        ("0", "1.25", 1_250_000_000),
    ],
)
def test_timestamps(tmp_path: Path, first: str, second: str, gap_ns: int) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},1,1\n{second},2,1\n"
    assert rows(load(tmp_path, text)) == [(0, 1, 1), (gap_ns, 2, 1)]


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n2,1,1\n1,2,1\n2,3,1\n1,4,1\n"
    trace = load(tmp_path, text)
    assert trace.prompt.tolist() == [2, 4, 1, 3]
    assert in_file_order(trace).prompt.tolist() == [1, 2, 3, 4]


def test_plain_csv_keeps_its_times_and_optional_columns(tmp_path: Path) -> None:
    text = (
        "arrival_s,prompt_tokens,output_tokens,max_output_tokens,prefix_group,prefix_tokens,n,priority,session\n"
        "2.5,100,20,,a,64,2,1,\n3,90,2,50,,,,-1,s\n4,95,2,50,a,32,,,s\n"
    )
    trace = load(tmp_path, text)
    assert rows(trace) == [(2_500_000_000, 100, 20), (3_000_000_000, 90, 2), (4_000_000_000, 95, 2)]
    columns = {name: getattr(trace, name).tolist() for name in ("max_output", "prefix_group", "prefix_tokens", "n")}
    assert columns == {
        "max_output": [20, 50, 50],
        "prefix_group": [0, -1, 0],
        "prefix_tokens": [64, 0, 32],
        "n": [2, 1, 1],
    }
    assert trace.priority is not None
    assert trace.session is not None
    assert (trace.priority.tolist(), trace.session.tolist()) == ([1, -1, 0], [-1, 0, 0])


def test_vidur_with_and_without_times(tmp_path: Path) -> None:
    with_times = load(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n1.25,2000,3\n")
    without = load(tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n")
    assert rows(with_times) == [(500_000_000, 100, 7), (1_250_000_000, 2000, 3)]
    assert rows(without) == [(None, 3772, 54)]


def test_mooncake_lines(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [46, 47, 9]},
        {"timestamp": 27.5, "input_length": 513, "output_length": 1, "hash_ids": [46, 3]},
    ]
    trace = load(tmp_path, "\n".join(json.dumps(line) for line in lines))
    assert rows(trace) == [(0, 1030, 5), (27_500_000, 513, 1)]
    assert trace.hash_block_size == 512
    assert trace.hash_ids is not None
    assert trace.hash_offsets is not None
    assert (trace.hash_ids.tolist(), trace.hash_offsets.tolist()) == ([0, 1, 2, 0, 3], [0, 3, 5])


def test_mooncake_rows_move_with_their_ids_when_sorted(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 9, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1, "input_length": 30, "output_length": 1, "hash_ids": [5]},
    ]
    trace = load(tmp_path, "\n".join(json.dumps(line) for line in lines))
    assert trace.hash_ids is not None
    assert trace.hash_ids.tolist() == [2, 0, 1]


def test_hash_block_size_is_stated_or_found(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [0, 1, 2]})
    assert load(tmp_path, line).hash_block_size == 16
    assert load(tmp_path, line, hash_block_size=20).hash_block_size == 20
    odd = json.dumps({"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": list(range(21))})
    assert "hash_block_size" in error(tmp_path, odd)


def test_sharegpt_lengths_are_estimated_from_characters(tmp_path: Path) -> None:
    text = json.dumps(
        [
            {"id": "a", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 10}]},
            {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
        ]
    )
    trace = load(tmp_path, text)
    assert rows(trace) == [(None, 10, 2)]
    assert trace.num_failed == 1
    assert rows(load(tmp_path, text, chars_per_token=5.0)) == [(None, 8, 2)]
    assert rows(load(tmp_path, "\n".join(map(json.dumps, json.loads(text))))) == [(None, 10, 2)]


Q, A = "x" * 40, "y" * 80


@pytest.mark.parametrize("key", ["conversations", "conversation", "messages"])
@pytest.mark.parametrize("names", [("from", "value", "human", "gpt"), ("role", "content", "user", "assistant")])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("asks", Q), ("answers", A), ("asks", "x"), ("answers", "y")], (10, 20)),
        ([("system", Q), ("asks", Q), ("answers", A)], (20, 20)),
        ([("answers", "y" * 400), ("asks", Q), ("answers", A)], (10, 20)),
        ([("asks", "x"), ("asks", Q), ("answers", A)], (10, 20)),
        ([("system", Q), ("asks", Q)], None),
        ([("asks", ""), ("answers", A)], None),
        ([("answers", A), ("asks", Q)], None),
    ],
)
def test_a_prompt_is_what_was_asked_whoever_speaks_first(
    tmp_path: Path,
    key: str,
    names: tuple[str, str, str, str],
    messages: list[tuple[str, str]],
    expected: tuple[int, int] | None,
) -> None:
    by, text, asks, answers = names
    told = [{by: {"asks": asks, "answers": answers}.get(who, who), text: what} for who, what in messages]
    good = {key: [{by: asks, text: "x" * 4}, {by: answers, text: "y" * 4}]}
    wanted = [(None, 1, 1)] + ([] if expected is None else [(None, *expected)])
    for file in (json.dumps([good, {key: told}]), json.dumps(good) + "\n" + json.dumps({key: told})):
        trace = load(tmp_path, file)
        assert rows(trace) == wanted
        assert trace.num_failed == (expected is None)


def test_a_line_with_a_chat_id_counts_in_seconds(tmp_path: Path) -> None:
    ids = {"input_length": 33, "output_length": 4, "hash_ids": [1, 2, 3]}
    lines = [ids | {"timestamp": 61.114, "chat_id": 7, "parent_chat_id": -1, "type": "text", "turn": 1}]
    lines += [ids | {"timestamp": 71.5, "chat_id": 8, "parent_chat_id": 7, "type": "text", "turn": 2}]
    trace = load(tmp_path, "\n".join(map(json.dumps, lines)))
    assert rows(trace) == [(61_114_000_000, 33, 4), (71_500_000_000, 33, 4)]
    assert trace.hash_block_size == 16
    assert "2 rows have a chat_id" in trace.notes[0]
    assert "seconds" in trace.notes[0]


@pytest.mark.parametrize(
    ("cell", "time_ns"), [("1715299200.123456789", 1_715_299_200_123_456_789), ("5e6", 5 * 10**15)]
)
def test_large_times_keep_their_nanoseconds(tmp_path: Path, cell: str, time_ns: int) -> None:
    header = "arrival_s,prompt_tokens,output_tokens"
    assert rows(load(tmp_path, f"{header}\n0.5,5,1\n{cell},5,1\n")) == [(NS_PER_S // 2, 5, 1), (time_ns, 5, 1)]
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens"
    later = f"{azure}\n1715299200,5,1\n1715299200.009930,5,1\n"
    assert rows(load(tmp_path, later)) == [(0, 5, 1), (9_930_000, 5, 1)]


@pytest.mark.parametrize(
    "cells",
    [
        ("2026-11-02T09:00:00.5Z", "2026-11-02T09:00:01Z", "2026-11-02T09:00:03.25Z"),
        ("1793610000.5", "1793610001", "1793610003.25"),
        ("1793610000.5", "2026-11-02T10:00:01+01:00", "1793610003.25"),
        ("1960-01-01 00:00:00.5", "1960-01-01 00:00:01", "1960-01-01 00:00:03.25"),
    ],
)
def test_dates_and_unix_times_of_a_plain_csv_count_from_the_first(tmp_path: Path, cells: tuple[str, ...]) -> None:
    """Stretched to a fifth of its rate, the gaps are five times as long, and the first request still comes at once."""
    text = "timestamp,prompt_tokens,completion_tokens\n" + "".join(f"{cell},8,2\n" for cell in cells)
    trace = load(tmp_path, text)
    assert rows(trace) == [(0, 8, 2), (NS_PER_S // 2, 8, 2), (2_750_000_000, 8, 2)]
    assert edits.at_speed(trace, 0.2).arrival_ns.tolist() == [0, 2_500_000_000, 13_750_000_000]


def test_unix_times_of_mooncakes_lines_count_from_the_first(tmp_path: Path) -> None:
    lines = [{"timestamp": time, "input_length": 600, "output_length": 5} for time in (1793610000500, 1793610001000)]
    assert [row[0] for row in rows(load(tmp_path, "\n".join(map(json.dumps, lines))))] == [0, NS_PER_S // 2]


def test_seconds_since_a_start_are_kept(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens"
    assert rows(load(tmp_path, f"{header}\n3.5,8,2\n86400,8,2\n")) == [
        (3_500_000_000, 8, 2),
        (86_400 * NS_PER_S, 8, 2),
    ]


def test_all_columns_that_a_plain_csv_lacks_are_named(tmp_path: Path) -> None:
    assert "columns 'arrival_s', 'output_tokens' are missing (read as csv); columns found: 'created', " in error(
        tmp_path, "created,input_tokens\n1,2\n"
    )


def test_splitwise_sims_columns(tmp_path: Path) -> None:
    header = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
    trace = load(tmp_path, f"{header}\n0,2,0,0.5,1,100,10\n")
    assert rows(trace) == [(NS_PER_S // 2, 100, 10)]
    assert not trace.notes


def test_usage_as_the_openai_api_counts_it(tmp_path: Path) -> None:
    assert rows(load(tmp_path, "arrival_s,prompt_tokens,completion_tokens\n0.5,100,10\n")) == [(NS_PER_S // 2, 100, 10)]


def test_sessions_that_are_not_read_are_named(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    (note,) = load(tmp_path, f"{header}\n5,1,2.5,ChatGPT,472,18,490,Conversation log\n").notes
    assert "column 'Session ID' is not read in the burstgpt format" in note


@pytest.mark.parametrize("key", ["session_id", "session"])
@pytest.mark.parametrize("ids", [{}, {"hash_ids": [1, 2]}])
def test_sessions_of_lines_of_json_are_not_read_and_named(tmp_path: Path, key: str, ids: dict[str, object]) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 5} | ids
    text = "\n".join(json.dumps(row) for row in (line, line | {key: "a", "turn": 1}, line | {key: "a", "turn": 2}))
    (note,) = load(tmp_path, text).notes
    assert f"key {key!r} is not read in the mooncake format: every request comes at its own time" in note
    # Tables written as lines have null where a column is empty.
    assert load(tmp_path, json.dumps(line | {key: None})).notes == ()


@pytest.mark.parametrize("whole", [{"timestamp": 0}, {"requests": [{"timestamp": 0}]}])
def test_an_object_over_several_lines_is_no_row(tmp_path: Path, whole: object) -> None:
    assert "one JSON object over several lines" in error(tmp_path, json.dumps(whole, indent=2))


def test_a_column_that_many_files_have_names_no_format(tmp_path: Path) -> None:
    assert "is no known trace" in error(tmp_path, "timestamp,input_length,output_length\n0,100,10\n")


BAD_CELLS = (
    [
        ("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,{},5\n", cell, "prompt_tokens")
        for cell in ("0", "-3", "nan", "inf", "", "many", "1.5", "99999999999")
    ]
    + [
        ("arrival_s,prompt_tokens,output_tokens\n0,5,5\n{},5,5\n", cell, "arrival_s")
        for cell in ("-1", "nan", "soon", "1e18")
    ]
    + [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n{},5,5\n", cell, "TIMESTAMP")
        for cell in ("2023-13-01 00:00:00", "2023-01-01 25:00:00", "yesterday", "")
    ]
)


@pytest.mark.parametrize(("text", "cell", "column"), BAD_CELLS)
def test_a_bad_cell_is_named_or_skipped(tmp_path: Path, text: str, cell: str, column: str) -> None:
    message = error(tmp_path, text.format(cell))
    for part in ("trace.csv", "row 2", "line 3", repr(column), repr(cell), "on_bad_row: skip"):
        assert part in message
    trace = load(tmp_path, text.format(cell), on_bad_row="skip")
    assert (len(trace), trace.num_skipped) == (1, 1)
    assert any("1 bad rows skipped" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 1, "input_length": 5', "no JSON"),
        ("[1, 2]", "no JSON object"),
        ('{"timestamp": 1, "output_length": 5, "hash_ids": [1]}', "'input_length'"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}', "'hash_ids'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5, "hash_ids": [1]}', "'input_length'"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5, "hash_ids": [1]}', "'timestamp'"),
        ('{"timestamp": 1, "input_length": true, "output_length": 5, "hash_ids": [1]}', "'input_length'"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1.5]}', "'hash_ids'"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": 3}', "'hash_ids'"),
    ],
)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: str, problem: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
    message = error(tmp_path, good + line)
    for part in ("trace.csv", "row 2", problem):
        assert part in message
    assert load(tmp_path, good + line, on_bad_row="skip").num_skipped == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no request in it: it has a header and no row below it"),
        ("0.0,12,34\n", "column names"),
        ("[]", "no request in it: its list is empty"),
        ("[{", "no JSON"),
        ("arrival_s,prompt_tokens,output_tokens,output_tokens\n0,1,1,1\n", "2 times"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_tokens\n0,1,1,1\n", "prefix_group"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1\n", "2 cells"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,2,3\n", "4 cells"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n0,8,2,a,9\n", "prefix_tokens"),
        ("arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n0,8,2,,5\n", "5 needs a prefix_group"),
        ("arrival_s,prompt_tokens,output_tokens\n1700158546680,1,1\n", "milliseconds? divide by 1000;"),
        ("arrival_s,prompt_tokens,output_tokens\n1700158546680000000,1,1\n", "nanoseconds? divide by 1000000000;"),
        ("arrival_s,prompt_tokens,output_tokens,max_output_tokens\n0,8,20,9\n", "max_output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n" + '0,"' + "x" * 200_000, "no CSV"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in error(tmp_path, text)


@pytest.mark.parametrize("is_null", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_hash_ids_of_any_row_ask_for_those_of_all(tmp_path: Path, place: int, is_null: bool) -> None:
    lines: list[dict[str, Any]] = [
        {"timestamp": i, "input_length": 600, "output_length": 5, "hash_ids": [0, i + 1]} for i in range(3)
    ]
    if is_null:
        lines[place]["hash_ids"] = None
    else:
        del lines[place]["hash_ids"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    keys = "'timestamp', 'input_length', 'output_length'"
    assert f"row {place + 1}, column 'hash_ids': is missing; keys found: {keys};" in error(tmp_path, text)
    trace = load(tmp_path, text, on_bad_row="skip")
    assert (len(trace), trace.num_skipped) == (2, 1)
    assert trace.hash_ids is not None
    assert trace.hash_offsets is not None
    assert (trace.hash_ids.tolist(), trace.hash_offsets.tolist()) == ([0, 1, 0, 2], [0, 2, 4])


def test_rows_whose_hash_ids_are_null_throughout_share_nothing(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": None}
    trace = load(tmp_path, 2 * (json.dumps(row) + "\n"))
    assert (len(trace), trace.hash_ids) == (2, None)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("year", [1700, 2249])
def test_dates_too_far_apart_are_a_bad_row(tmp_path: Path, place: int, year: int) -> None:
    others = 2249 if year == 1700 else 1700
    dates = [f"{others}-01-01 00:00:00", f"{others}-01-01 00:00:01"]
    dates.insert(place, f"{year}-01-01 00:00:00")
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{date},5,5\n" for date in dates)
    message = error(tmp_path, text)
    assert f"row {place + 1} (line {place + 2}), column 'TIMESTAMP': '{year}-01-01 00:00:00' is too far" in message
    trace = load(tmp_path, text, on_bad_row="skip")
    assert (rows(trace), trace.num_skipped) == ([(0, 5, 5), (NS_PER_S, 5, 5)], 1)


def test_without_a_usable_row_the_first_reason_is_named(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens\n0,zero,1\n1,0,1\n"
    message = error(tmp_path, text, on_bad_row="skip")
    assert "2 bad rows skipped, 0 failed); the first: row 1 (line 2), column 'prompt_tokens': 'zero'" in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(ScenarioError, match="cannot be read"):
            load_trace(path)
    with pytest.raises(ScenarioError, match="damaged"):
        load(tmp_path, gzip.compress(AZURE.encode(), mtime=0)[:-12])
    with pytest.raises(ScenarioError, match="did you mean 'mooncake'"):
        load(tmp_path, AZURE, trace_format="moncake")


def simple(arrivals_s: list[float]) -> Trace:
    times = np.array([round(t * NS_PER_S) for t in arrivals_s], dtype=np.int64)
    return Trace("t", "csv", times, np.arange(1, len(times) + 1), np.ones_like(times))


def test_knobs() -> None:
    trace = simple([0, 1, 2, 4])
    assert edits.first(trace, 2).prompt.tolist() == [1, 2]
    part = edits.window(trace, 1, 4)
    assert rows(part) == [(0, 2, 1), (NS_PER_S, 3, 1)]
    assert rows(edits.at_speed(trace, 2.0))[-1] == (2 * NS_PER_S, 4, 1)
    assert edits.at_rate(trace, 3.0).mean_rate == pytest.approx(3.0)
    assert set(rows(edits.at_rate(trace, float("inf")))) == {(0, i, 1) for i in range(1, 5)}
    twice = edits.repeated(simple([0, 1, 2]), 2)
    assert [t // NS_PER_S for t, _, _ in rows(twice)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: edits.window(t, 50, 60),
        lambda t: edits.window(t, 2, 2),
        lambda t: edits.first(t, 0),
        lambda t: edits.at_speed(t, 0),
        lambda t: edits.at_speed(t, float("nan")),
        lambda t: edits.at_rate(t, -1),
        lambda t: edits.repeated(t, 0),
        lambda t: edits.at_speed(t, 1e-12),
        lambda t: edits.repeated(t, 10**10),
        lambda t: edits.at_rate(edits.first(t, 1), 2.0),
        lambda t: edits.window(t, float("nan"), 3),
    ],
)
def test_knobs_that_make_no_sense(call: object) -> None:
    with pytest.raises(ScenarioError):
        call(simple([0, 1, 2, 4]))  # type: ignore[operator]


@needs_shared
def test_azure_conversation_is_read_whole_and_in_few_lines_a_row() -> None:
    path = SHARED / "data/traces/azure2023/AzureLLMInferenceTrace_conv.csv"
    trace = load_trace(path)
    assert len(trace) == 19_366
    assert num_lines(lambda: load_trace(path)) < 50 * len(trace)
    assert trace.prompt.mean() == pytest.approx(1154.7, abs=0.05)
    assert trace.output.mean() == pytest.approx(211.1, abs=0.05)
    assert trace.mean_rate == pytest.approx(5.530, abs=0.0005)


@needs_shared
def test_the_recorded_workload_names_16_token_blocks() -> None:
    trace = load_trace(SHARED / "data/traces/vllm-0.19-runs/sharegpt_llama31_8b_300_sps10.jsonl")
    assert (len(trace), trace.hash_block_size) == (300, 16)


@pytest.mark.parametrize(
    ("column", "meant"),
    [
        ("max_output_token", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("prio", "priority"),
        ("request_priority", "priority"),
        ("sesion", "session"),
        ("model", None),
        ("id", None),
        ("total_tokens", None),
        ("note", None),
    ],
)
def test_a_column_that_looks_like_one_that_is_read_is_named(tmp_path: Path, column: str, meant: str | None) -> None:
    notes = load(tmp_path, f"arrival_s,prompt_tokens,output_tokens,{column}\n0,5,1,7\n").notes
    told = [note.split(": ", 1)[1] for note in notes]
    assert told == ([] if meant is None else [f"column {column!r} is not read (did you mean {meant!r}?)"])


@pytest.mark.parametrize("column", ["lora", "salt", "abort_s"])
def test_what_only_written_requests_have_is_named(tmp_path: Path, column: str) -> None:
    (note,) = load(tmp_path, f"arrival_s,prompt_tokens,output_tokens,{column}\n0,5,1,4\n").notes
    assert f"column {column!r} is not read; only requests written out (workload.requests) have it" in note


PARQUET = b"PAR1\x15\x04\x15\x10\x15\x14L\x15\x02\x15\x00\x12\x00\x00\x08\x1c"
ZSTD = b"\x28\xb5\x2f\xfd\x04\x58\x51\x00\x00"
"""Beginnings: nothing in the standard library writes the rest."""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (bz2.compress(AZURE.encode()), "is packed with bzip2"),
        (bz2.compress(AZURE.encode(), 1), "is packed with bzip2"),
        (lzma.compress(AZURE.encode()), "is packed with xz"),
        (ZSTD + AZURE.encode(), "is packed with zstd"),
        (b"PK\x03\x04\x14\x00" + AZURE.encode(), "is a zip archive"),
        (PARQUET, "is a Parquet table"),
    ],
)
def test_a_file_that_is_packed_otherwise_says_so(tmp_path: Path, content: bytes, problem: str) -> None:
    assert (
        error(tmp_path, content)
        == f"{tmp_path / 'trace.csv'}: {problem}; give it as text, as it is or packed with gzip"
    )


def test_beams_of_a_trace_are_not_read_and_named(tmp_path: Path) -> None:
    (note,) = load(tmp_path, "arrival_s,prompt_tokens,output_tokens,beam_width\n0,5,1,4\n").notes
    assert "column 'beam_width' is not read; workload.sampling.beam_width" in note


@pytest.mark.parametrize(
    "header",
    [
        '"arrival_s","prompt_tokens","output_tokens","a, b"',
        'arrival_s, "prompt_tokens" ,output_tokens,"a;b,c"',
        '"a; b; c; d; e",arrival_s,prompt_tokens,output_tokens',
    ],
)
def test_names_in_quotes_are_one_column(tmp_path: Path, header: str) -> None:
    cells = "9,0,5,1" if header.startswith('"a;') else "0,5,1,9"
    trace = load(tmp_path, f"{header}\n{cells}\n")
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([5], [1])


PIECES: list[list[object]] = [[], [1.5e-10, -3, 0.25, 12], ["]", "[,{", "é"], [{"a": [1, {"b": "}"}]}, None, []]]
MOONCAKE_ROWS = [
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 512, "output_length": 4, "hash_ids": [1]},
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n "])
def test_a_list_of_mooncakes_objects_is_read_as_its_lines(tmp_path: Path, indent: int | None, start: str) -> None:
    lines = load(tmp_path, "\n".join(map(json.dumps, MOONCAKE_ROWS)))
    whole = load(tmp_path, start + json.dumps(MOONCAKE_ROWS, indent=indent))
    assert whole.format == "mooncake"
    for name in ("arrival_ns", "prompt", "output", "hash_ids", "hash_offsets"):
        assert getattr(whole, name).tolist() == getattr(lines, name).tolist()


@pytest.mark.parametrize("num_chars", [1, 2, 3, 7])
def test_a_list_read_in_pieces_is_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_chars: int) -> None:
    path = tmp_path / "trace.json"
    texts = [json.dumps(value, indent=indent) for indent in (None, 1) for value in PIECES]
    wanted = [json.loads(text) for text in texts]
    monkeypatch.setattr("kvsim.workload.trace_json._READ_CHARS", num_chars)
    for text, value in zip(texts, wanted, strict=True):
        path.write_text(text)
        with open_text(path) as opened:
            assert list(json_list(opened, "t")) == value
    for text in ("[", "[1", "[1,", "[1,]", "[1 2]", "[1]]", '[{"a": 1', "[-]"):
        path.write_text(text)
        with open_text(path) as opened, pytest.raises(ScenarioError, match="is no JSON: "):
            list(json_list(opened, "t"))


def test_a_bad_entry_of_a_list_is_named(tmp_path: Path) -> None:
    bad = [*MOONCAKE_ROWS, MOONCAKE_ROWS[0] | {"input_length": 0}]
    with pytest.raises(ScenarioError, match=r"row 3, column 'input_length': 0 is not in 1"):
        load(tmp_path, json.dumps(bad))
    with pytest.raises(ScenarioError, match=r"row 2, column '\(entry\)': 7 is no JSON object"):
        load(tmp_path, json.dumps([MOONCAKE_ROWS[0], 7]))
    assert load(tmp_path, json.dumps([MOONCAKE_ROWS[0], 7]), on_bad_row="skip").num_skipped == 1
