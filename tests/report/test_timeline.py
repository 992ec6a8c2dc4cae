"""The timeline is valid trace-event JSON and its times are those of requests.csv."""

from __future__ import annotations

import json
from collections import defaultdict

import pandas as pd
import pytest
from support import play, request, text

from kvsim.report.timeline import Span, TimelineObserver, write_timeline
from kvsim.request import Sampling


def run(tmp_path, requests, **keywords):
    observer = TimelineObserver()
    outcome = play(requests, observers=(observer,), **keywords)
    path = write_timeline(tmp_path / "timeline.json", outcome.requests, observer.finish(), outcome.steps)
    trace = json.loads(path.read_text())
    return observer, outcome, trace["traceEvents"]


def spans_of(observer, request_id, sample=0):
    """(name, start ms, end ms), prefill chunks included, in order."""
    found = [span for span in observer.finish() if (span.request_id, span.sample) == (request_id, sample)]
    return [(span.name, span.start_ns / 1e6, span.end_ns / 1e6) for span in found]


RIVALS = [request("a", 8, 9), request("b", 8, 9)]


def test_a_preempted_request_by_hand(tmp_path):
    """Two rivals, each fits alone, not together: B loses its memory in step 2 and comes back when A is done."""
    observer, _, _ = run(tmp_path, RIVALS, num_blocks=4, block_size=4)
    assert spans_of(observer, "a") == [("waiting", 0, 0), ("prefill", 0, 1), ("decode", 1, 9)]
    assert spans_of(observer, "b") == [
        ("waiting", 0, 0),
        ("prefill", 0, 1),
        ("preempted", 1, 9),
        ("prefill", 9, 10),
        ("decode", 10, 17),
    ]


def test_a_swapped_request_by_hand(tmp_path):
    observer, _, _ = run(tmp_path, RIVALS, num_blocks=4, block_size=4, num_host_blocks=4, preemption="swap")
    assert spans_of(observer, "b")[2:] == [("swapped", 1, 9), ("decode", 9, 17)]


def test_a_queue_and_prefill_chunks(tmp_path):
    requests = [request("a", 4, 5), request("b", 10, 1, at=1.5)]
    observer, _, _ = run(tmp_path, requests, num_blocks=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=4)
    assert spans_of(observer, "b") == [
        ("waiting", 1.5, 5),
        ("prefill", 5, 6),
        ("prefill", 6, 7),
        ("prefill", 7, 8),
    ]
    assert [span.num_tokens for span in observer.finish() if span.request_id == "b"] == [0, 4, 4, 2]


def mixed_requests():
    return [
        request("a", 8, 9),
        request("b", text(1, 6), 5, at=1, sampling=Sampling(n=2)),
        request("c", 7, 6, at=2.5),
        request("d", 200, 9, at=3),
        request("e", 8, 9, at=3, abort_at=6),
        request("f", 5, 1, at=40),
    ]


def test_times_equal_the_request_table(tmp_path):
    _, outcome, events = run(tmp_path, mixed_requests(), num_blocks=8, block_size=4)
    lives = {event["name"]: event for event in events if event["ph"] == "X" and "status" in event["args"]}
    table = outcome.requests.set_index("request_id")
    assert sorted(lives) == ["a", "b", "c", "e", "f"]
    for request_id, event in lives.items():
        assert event["ts"] / 1e6 == pytest.approx(table.arrival_s[request_id], abs=1e-12)
        assert (event["ts"] + event["dur"]) / 1e6 == pytest.approx(table.finish_s[request_id], abs=1e-12)
        assert event["args"]["prompt_tokens"] == table.prompt_tokens[request_id]
    by_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and "status" not in event["args"]:
            by_track[event["tid"]].append(event)
    for request_id, life in lives.items():
        own = by_track[life["tid"]]
        if table.status[request_id] == "finished":
            first_prefill = min(event["ts"] for event in own if event["name"] == "prefill")
            assert first_prefill / 1e6 == pytest.approx(table.first_scheduled_s[request_id], abs=1e-12)
            prefill_ends = [(event["ts"] + event["dur"]) / 1e6 for event in own if event["name"] == "prefill"]
            assert table.first_token_s[request_id] in [pytest.approx(end, abs=1e-12) for end in prefill_ends]
            last_end = max(event["ts"] + event["dur"] for event in own)
            assert last_end / 1e6 <= table.finish_s[request_id] + 1e-12
    assert [event["name"] for event in events if event["ph"] == "i"] == ["rejected"]


def test_events_are_well_formed_and_slices_nest(tmp_path):
    _, _, events = run(tmp_path, mixed_requests(), num_blocks=8, block_size=4)
    slices = defaultdict(list)
    for event in events:
        assert event["ph"] in "XCMi"
        assert {"name", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():
        for start, end in track:
            for other_start, other_end in track:
                assert not start < other_start < end < other_end
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"a", "b", "b sample 1"} <= names


def test_counters_follow_the_step_table(tmp_path):
    _, outcome, events = run(tmp_path, RIVALS, num_blocks=4, block_size=4)
    used = [(event["ts"], event["args"]["used_blocks"]) for event in events if event["name"] == "blocks used"]
    assert used[:2] == [(0.0, 4), (1000.0, 3)]
    assert used[-1] == (17_000.0, 0)
    counted = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "requests"]
    assert counted[1] == {"num_running": 1, "num_waiting": int(outcome.steps.num_waiting[1])}


def test_who_never_ended_is_there_too(tmp_path):
    requests = [request("a", 4, 5), request("b", 4, 1, at=1.5), request("c", 4, 1, at=100)]
    observer, _, events = run(tmp_path, requests, num_blocks=8, block_size=4, max_num_seqs=1, horizon_ms=2.5)
    assert spans_of(observer, "a")[-1] == ("decode", 1, 2)
    assert spans_of(observer, "b") == [("waiting", 1.5, 2)]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["running", "waiting", "not_arrived"]


def test_who_comes_with_the_horizon_has_waited_no_negative_time(tmp_path):
    """The last step ended long before; c waits for the one that b would begin."""
    requests = [request("a", 4, 3), request("b", 4, 1, at=20), request("c", 4, 1, at=20)]
    observer, _, _ = run(tmp_path, requests, num_blocks=8, block_size=4, max_num_seqs=1, horizon_ms=20)
    assert spans_of(observer, "c") == [("waiting", 20, 20)]


def test_tables_may_be_missing(tmp_path):
    path = write_timeline(tmp_path / "t.json", pd.DataFrame(), TimelineObserver(), pd.DataFrame())
    assert len(json.loads(path.read_text())["traceEvents"]) == 2
    path = write_timeline(tmp_path / "t.json", pd.DataFrame(), [Span("a", 0, "prefill", 0, 5, 3)], pd.DataFrame())
    assert json.loads(path.read_text())["traceEvents"][-1]["dur"] == 0.005


def test_spans_are_plain_tuples():
    assert Span("a", 0, "prefill", 1, 2, 3) == ("a", 0, "prefill", 1, 2, 3)
