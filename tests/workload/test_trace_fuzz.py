"""Whatever the bytes, a loader gives a trace or one clear message, never a traceback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.types import ScenarioError
from kvsim.workload.trace_report import render, trace_report
from kvsim.workload.traces import FORMATS, load_trace

SAMPLES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    "2024-05-10 00:00:00.009930+00:00,396,109\r\n",
    "burstgpt": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,1,0.2,ChatGPT,472,18,490,Conversation log\n45,2,0.1,GPT-4,1087,0,1087,API log\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n1.25,2000,3\n",
    "csv": "arrival_s,prompt_tokens,output_tokens,max_output_tokens,prefix_group,prefix_tokens,n,priority,session\n"
    "0.5,100,20,,a,64,2,1,\n1,90,2,50,,,,-1,s1\n",
    "mooncake": '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 27.5, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n',
    "sharegpt": '[{"id": "a", "conversations": [{"from": "human", "value": "Hello there"}, '
    '{"from": "gpt", "value": "Hi"}]}]',
}
NASTY = [
    "",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "9" * 5000,
    "2023-13-45 99:00:00",
    "{",
    "[" * 3000,
    '"',
    "\x00",
    "\ufeff",
    "1,2",
    "1.5",
    "null",
    "true",
    "-0",
    "1_0",
    "٣",
    "9999-12-31 23:59:59",
    "0001-01-01 00:00:00+99:99",
    "\r",
    "é",
    "1e18",
]


def check_loads_or_says_why(path: Path, trace_format: str | None, on_bad_row: str) -> None:
    message = None
    try:
        trace = load_trace(path, trace_format, on_bad_row=on_bad_row)
    except ScenarioError as error:
        message = str(error)
    if message is not None:
        assert str(path) in message
        assert len(message) < 2500
        return
    assert len(trace) >= 1
    assert trace.prompt.min() >= 1
    assert trace.output.min() >= 1
    if trace.arrival_ns is not None:
        assert (trace.arrival_ns[1:] >= trace.arrival_ns[:-1]).all()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.any"


ANY_FORMAT = st.sampled_from([None, *FORMATS])


@given(data=st.binary(max_size=400), trace_format=ANY_FORMAT, skip=st.booleans(), packed=st.booleans())
@settings(max_examples=200)
def test_random_bytes(scratch: Path, data: bytes, trace_format: str | None, skip: bool, packed: bool) -> None:
    scratch.write_bytes(b"\x1f\x8b" + data if packed else data)
    check_loads_or_says_why(scratch, trace_format, "skip" if skip else "error")


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real file with cells, bytes or lines replaced, repeated, cut or dropped."""
    text = SAMPLES[draw(st.sampled_from(sorted(SAMPLES)))]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.sampled_from(NASTY) | st.text(max_size=6)) + text[end:]
    data = text.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(data)))
        data = data[:cut] + draw(st.binary(max_size=4)) + data[cut:]
    if draw(st.integers(0, 9)) == 0:
        packed = gzip.compress(data, mtime=0)
        data = packed[: draw(st.integers(2, len(packed)))]
    return data


@given(data=mutated(), trace_format=st.sampled_from([None, None, *FORMATS]), skip=st.booleans())
@settings(max_examples=200)
def test_mutated_rows(scratch: Path, data: bytes, trace_format: str | None, skip: bool) -> None:
    scratch.write_bytes(data)
    check_loads_or_says_why(scratch, trace_format, "skip" if skip else "error")


@given(name=st.sampled_from(sorted(SAMPLES)), cell=st.sampled_from(NASTY), where=st.integers(0, 40))
@settings(max_examples=200)
def test_one_bad_cell(scratch: Path, name: str, cell: str, where: int) -> None:
    lines = SAMPLES[name].splitlines()
    if name in ("mooncake", "sharegpt"):
        lines[0] = replaced_value(lines[0], cell, where)
    else:
        cells = lines[1].split(",")
        cells[where % len(cells)] = cell
        lines[1] = ",".join(cells)
    scratch.write_bytes("\n".join(lines).encode())
    check_loads_or_says_why(scratch, None, "error")


def replaced_value(line: str, cell: str, where: int) -> str:
    value = json.loads(line)
    row = value if isinstance(value, dict) else value[0]
    key = sorted(row)[where % len(row)]
    row[key] = [cell, [cell], {cell: cell}, 3.5, None, True, -4, float("nan"), 10**30][where % 9]
    return json.dumps(value)


@given(data=mutated())
@settings(max_examples=200)
def test_the_report_never_breaks(scratch: Path, data: bytes) -> None:
    scratch.write_bytes(data)
    try:
        report = trace_report(scratch, on_bad_row="skip")
    except ScenarioError:
        return
    json.dumps(report.to_dict())
    render(report)
