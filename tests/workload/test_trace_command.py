"""`kvsim trace`: the report as text and as JSON, the picture, conversion, and one message for what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cli import main
from kvsim.types import ScenarioError
from kvsim.workload import load_trace
from kvsim.workload.trace_convert import write_trace

SAMPLES = ROOT / "scenarios/traces"


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*-sample.*")), ids=lambda path: path.name)
def test_every_format_is_described(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(path)]) == 0
    assert f"{len(load_trace(path, needs_times=False))} requests" in capsys.readouterr().out


def test_json_has_the_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "hits.png"
    args = ["trace", str(SAMPLES / "mooncake-sample.jsonl"), "--json", "--capacity", "40", "--capacity", "inf"]
    assert main([*args, "--picture", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    small, infinite = report["prefix_hits"]
    assert (small["capacity"], infinite["capacity"]) == (40, "inf")
    assert 0 < small["block_hit_rate"] < infinite["block_hit_rate"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")


AZURE, MOONCAKE, VIDUR = (
    str(SAMPLES / f"{name}-sample.{end}") for name, end in (("azure", "csv"), ("mooncake", "jsonl"), ("vidur", "csv"))
)


@pytest.mark.parametrize("value", ["0", "-1", "10000000000000000"])
def test_a_capacity_has_one_range(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", MOONCAKE, "--capacity", value]) == 2
    shown = capsys.readouterr().err
    assert f"--capacity {value}: must be 1 to 1,000,000,000,000,000 blocks, or inf" in shown


@pytest.mark.parametrize(
    "args",
    [
        ["/nowhere.csv"],
        [str(SAMPLES)],
        [str(SAMPLES / "README.md")],
        ["/dev/zero"],
        [AZURE, "--format", "x"],
        [AZURE, "--picture", "hits.png"],
        [MOONCAKE, "--capacity", "0"],
        [MOONCAKE, "--capacity", "many"],
        [VIDUR, "--to", "x.jsonl"],
        [AZURE, "--to", "/proc/x.csv"],
        [MOONCAKE, "--block-size", "0"],
        [AZURE, "--on-bad-row", "ignore"],
    ],
)
def test_what_cannot_be_done_is_one_message(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *args]) == 2
    assert capsys.readouterr().err.count("error:") == 1


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("plain-sample.csv", "copy.csv"),
        ("sessions-sample.csv", "copy.csv"),
        ("mooncake-sample.jsonl", "copy.jsonl"),
        ("vidur-sample.csv", "copy.csv"),
        ("azure-sample.csv", "copy.csv"),
        ("azure-sample.csv", "copy.jsonl"),
    ],
)
def test_a_converted_trace_is_the_same(name: str, target: str, tmp_path: Path) -> None:
    trace = load_trace(SAMPLES / name, needs_times=False)
    write_trace(trace, tmp_path / target)
    copy = load_trace(tmp_path / target, needs_times=False)
    for column in (
        "arrival_ns",
        "prompt",
        "output",
        "max_output",
        "prefix_tokens",
        "n",
        "priority",
        "session",
        "prefix_group",
        "hash_ids",
        "hash_offsets",
    ):
        before, after = getattr(trace, column), getattr(copy, column)
        assert (before is None) == (after is None), column
        assert before is None or before.tolist() == after.tolist(), column


PLAIN = "arrival_s,prompt_tokens,output_tokens,max_output_tokens,prefix_group,prefix_tokens,n,priority,session\n"
LINE = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("text", "target", "lost"),
    [
        (
            PLAIN + "0,8,2,4,a,3,2,1,b\n",
            "x.jsonl",
            "max_output_tokens, prefix_group, prefix_tokens, n, priority, session",
        ),
        (PLAIN + "0,8,2,4,,0,1,0,\n", "x.jsonl", "max_output_tokens,"),
        (PLAIN + "0,8,2,2,,0,1,0,\n", "x.jsonl", ""),
        (PLAIN + "0,8,2,4,a,3,2,1,b\n", "x.csv", ""),
        (LINE, "x.csv", "hash_ids"),
        (LINE, "x.jsonl", ""),
    ],
)
def test_what_a_format_cannot_hold_is_said(
    text: str, target: str, lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace").write_text(text)
    assert main(["trace", str(tmp_path / "trace"), "--to", str(tmp_path / target)]) == 0
    warning = capsys.readouterr().err
    assert ("cannot hold" in warning) == bool(lost)
    assert lost in warning


@given(times=st.lists(st.integers(0, 10**15), min_size=1, max_size=20))
def test_times_survive_to_the_nanosecond(times: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    import numpy as np

    from kvsim.workload import Trace

    ones = np.ones(len(times), dtype=np.int64)
    path = tmp_path_factory.mktemp("t") / "t.csv"
    write_trace(Trace("t", "csv", np.array(sorted(times), dtype=np.int64), ones, ones), path)
    copy = load_trace(path).arrival_ns
    assert copy is not None
    assert copy.tolist() == sorted(times)


@pytest.mark.parametrize("name", ["q.jsonl.gz", "q.csv.GZ", "q.zip"])
def test_a_name_of_a_packed_file_is_refused(tmp_path: Path, name: str) -> None:
    trace = load_trace(SAMPLES / "plain-sample.csv")
    with pytest.raises(ScenarioError, match=f"{name}: traces are written unpacked; name the file {Path(name).stem},"):
        write_trace(trace, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_bad_row_names_the_option_that_skips_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n-1,5,5\n")
    assert main(["trace", str(path)]) == 2
    assert capsys.readouterr().err.endswith("; correct the row, or give --on-bad-row skip\n")
    assert main(["trace", str(path), "--on-bad-row", "skip"]) == 0
