"""Sources: open loop, bounded concurrency, sessions."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from kvsim.request import Request
from kvsim.tokens import TokenStream
from kvsim.workload.builder import build_source
from kvsim.workload.source import ConcurrencySource, ListSource, Source


def request(request_id: str, arrival_ns: int, abort_ns: int | None = None) -> Request:
    return Request(request_id, arrival_ns, TokenStream.from_segment(1, 8), 4, 4, abort_ns=abort_ns)


def serve(source: Source, service_ns: int = 10, extra_looks: int = 0) -> list[tuple[int, Request]]:
    """Take everything; each request ends `service_ns` after it was taken. Gives (taken at, request)."""
    taken: list[tuple[int, Request]] = []
    ends: list[tuple[int, str]] = []
    while True:
        times = [t for t in (source.next_ns(), ends[0][0] if ends else None) if t is not None]
        if not times:
            return taken
        now = min(times) + extra_looks
        while ends and ends[0][0] <= now:
            end_ns, request_id = heapq.heappop(ends)
            source.on_end(request_id, end_ns)
        for item in source.take_due(now):
            assert item.arrival_ns <= now
            taken.append((now, item))
            heapq.heappush(ends, (now + service_ns, item.request_id))


def test_a_list_is_taken_in_order_of_time_then_of_the_list() -> None:
    source = ListSource([request("b", 5), request("a", 0), request("c", 5), request("d", 9)])
    assert (source.next_ns(), source.num_left) == (0, 4)
    assert [r.request_id for r in source.take_due(5)] == ["a", "b", "c"]
    assert (source.next_ns(), source.num_left) == (9, 1)
    assert [r.request_id for r in source.take_due(9)] == ["d"]
    assert (source.next_ns(), source.num_left) == (None, 0)


def test_concurrency_holds_requests_back_at_the_client() -> None:
    source = ConcurrencySource(ListSource([request("a", 0), request("b", 1, abort_ns=4), request("c", 50)]), 1)
    assert [r.request_id for r in source.take_due(1)] == ["a"]
    assert (source.next_ns(), source.num_left) == (None, 2)
    source.on_end("a", 10)
    assert source.next_ns() == 10
    (b,) = source.take_due(10)
    # It is sent when the place is free, and its patience begins then.
    assert (b.request_id, b.arrival_ns, b.abort_ns) == ("b", 10, 13)
    source.on_end("b", 20)
    assert source.next_ns() == 50
    (c,) = source.take_due(50)
    assert (c.request_id, c.arrival_ns) == ("c", 50)


@given(arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=20), most=st.integers(1, 5), late=st.integers(0, 7))
def test_never_more_than_max_concurrency_and_nobody_is_lost(arrivals: list[int], most: int, late: int) -> None:
    source = ConcurrencySource(ListSource([request(str(i), t) for i, t in enumerate(arrivals)]), most)
    taken = serve(source, extra_looks=late)
    assert sorted(r.request_id for _, r in taken) == sorted(map(str, range(len(arrivals))))
    assert source.num_left == 0
    for now, _ in taken:
        assert sum(start <= now < start + 10 for start, _ in taken) <= most


def test_a_turn_contains_the_history_and_waits_for_the_answer() -> None:
    source = build_source(
        {
            "num_requests": 3,
            "arrivals": {"type": "batch"},
            "lengths": {"type": "fixed", "prompt": 100, "output": 7},
            "sessions": {"num_turns": 3, "think_time": 2.0, "think_time_distribution": "constant"},
        }
    )
    assert source.num_left == 3
    (first,) = source.take_due(0)
    assert source.next_ns() is None
    source.on_end(first.request_id, 5)
    assert source.next_ns() == 5 + 2 * 10**9
    (second,) = source.take_due(5 + 2 * 10**9)
    assert [len(r.prompt) for r in (first, second)] == [100, 207]
    assert first.output is not None
    assert second.prompt.content(0, 107) == (first.prompt + first.output).content(0, 107)
    source.on_end(second.request_id, 10**10)
    (third,) = source.take_due(2 * 10**10)
    assert len(third.prompt) == 314
    assert (source.num_left, third.request_id) == (0, "0.2")


def test_rows_of_one_session_follow_each_other(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,session\n0,10,5,a\n1e-9,30,5,a\n2e-9,9,1,\n1,60,2,a\n")
    source = build_source({"trace": str(path)})
    taken = serve(source, service_ns=10)
    assert [(now, r.request_id, r.prompt_len) for now, r in taken] == [
        (0, "0", 10),
        (2, "2", 9),
        (10, "1", 30),
        (10**9, "3", 60),
    ]
    first, second = taken[0][1], taken[2][1]
    assert first.output is not None
    assert second.prompt.content(0, 15) == (first.prompt + first.output).content(0, 15)
