"""Request-level batching: hand-worked batches, and the plain form as the oracle of the derived counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.request import Request, Sampling, Status
from kvsim.scheduling.reservations import make_reservation
from kvsim.scheduling.static import StaticScheduler
from kvsim.tokens import TokenStream
from kvsim.types import ScenarioError


def request(name, prompt_len, output_len, **keywords):
    keywords.setdefault("max_output_len", output_len)
    return Request(name, 0, TokenStream.from_segment(1, prompt_len), output_len, **keywords)


def static(num_slots=100, *, reservation="max", max_model_len=10, placement="first_fit", **keywords):
    return StaticScheduler(
        ContiguousAllocator(num_slots, placement=placement),
        reservation=make_reservation(reservation, max_model_len),
        max_model_len=max_model_len,
        **keywords,
    )


def names(sequences):
    return [seq.request.request_id for seq in sequences]


def step(scheduler):
    plan = scheduler.schedule(0)
    return plan, scheduler.complete(plan)


def run(scheduler):
    """(members that emit, members that end) of every step."""
    rows = []
    while scheduler.has_work:
        _, outcome = step(scheduler)
        scheduler.allocator.audit()
        rows.append((outcome.num_emitted_tokens, names(outcome.ended)))
    return rows


def test_textbook_two_places_static_idles_twice():
    scheduler = static(max_num_seqs=2)
    for name, rounds in (("A", 3), ("B", 1), ("C", 2)):
        assert scheduler.submit(request(name, 2, rounds)) is None
    assert run(scheduler) == [(2, ["B"]), (1, []), (1, ["A"]), (1, []), (1, ["C"])]


def test_a_finished_member_keeps_its_memory_until_the_batch_ends():
    scheduler = static(max_num_seqs=2)
    scheduler.submit(request("A", 2, 3))
    scheduler.submit(request("B", 2, 1))
    _, outcome = step(scheduler)
    assert (names(outcome.ended), names(outcome.retained), outcome.finished_requests) == (["B"], ["B"], ("B",))
    assert names(scheduler.retained) == ["B"]
    assert names(scheduler.live_sequences()) == ["A"]
    assert scheduler.allocator.usage().num_used == 20
    step(scheduler)
    _, outcome = step(scheduler)
    assert (names(outcome.ended), names(outcome.retained), names(outcome.released)) == (["A"], [], ["B"])
    assert scheduler.allocator.num_free_blocks == 100
    assert not scheduler.has_work


def test_a_batch_is_cut_where_the_memory_ends_and_says_so():
    scheduler = static(num_slots=25, max_num_seqs=8)
    for name in "ABC":
        scheduler.submit(request(name, 2, 2))
    plan, _ = step(scheduler)
    assert names(seq for seq, *_ in plan.admitted) == ["A", "B"]
    assert (plan.waits_for_memory, plan.head_slots, plan.num_waiting, plan.num_running) == (True, 10, 1, 2)
    step(scheduler)
    plan, _ = step(scheduler)
    assert names(seq for seq, *_ in plan.admitted) == ["C"]
    assert (plan.waits_for_memory, plan.head_slots) == (False, 0)


def test_shapes_count_what_is_attended_to():
    scheduler = static(max_num_seqs=2)
    scheduler.submit(request("A", 3, 3))
    scheduler.submit(request("B", 5, 3))
    plan, _ = step(scheduler)
    assert plan.shape.prefills == ((0, 3), (0, 5))
    assert (plan.shape.num_decodes, plan.is_decode_tick) == (0, False)
    plan, _ = step(scheduler)
    assert (plan.shape.num_decodes, plan.shape.context_tokens, plan.shape.num_tokens) == (2, 4 + 6, 2)
    plan, _ = step(scheduler)
    assert plan.shape.context_tokens == 5 + 7


def test_prompts_beyond_the_budget_are_computed_in_chunks_beside_the_decodes():
    scheduler = static(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=20)
    scheduler.submit(request("A", 3, 4))
    scheduler.submit(request("B", 6, 1))
    shapes = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        shapes.append((plan.shape.num_decodes, plan.shape.prefills))
    assert shapes == [(0, ((0, 3), (0, 1))), (1, ((1, 3),)), (1, ((4, 2),)), (1, ())]


def test_samples_are_sequences_with_places_and_regions_of_their_own():
    scheduler = static(max_num_seqs=3, reservation="oracle")
    scheduler.submit(request("A", 4, 3, sampling=Sampling(n=2), sample_lens=(3, 1)))
    scheduler.submit(request("B", 4, 1, sampling=Sampling(n=2)))
    plan, outcome = step(scheduler)
    assert (plan.num_running, plan.num_sequences, plan.num_waiting) == (1, 2, 1)
    assert scheduler.allocator.usage().num_used == (4 + 2) + 4
    assert outcome.finished_requests == ()
    step(scheduler)
    _, outcome = step(scheduler)
    assert outcome.finished_requests == ("A",)


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "keywords", "reason"),
    [
        (10, 3, {}, "the prompt has 10 tokens, max_model_len is 10"),
        (2, 1, {"sampling": Sampling(n=5)}, "needs 5 places, max_num_seqs is 4"),
        (2, 1, {"sampling": Sampling(n=3)}, "needs 3 regions of 10 slots, the pool of 25 slots holds 2 such regions"),
    ],
)
def test_what_no_batch_can_hold_is_rejected_with_both_numbers(prompt_len, output_len, keywords, reason):
    scheduler = static(num_slots=25, max_num_seqs=4)
    rejection = scheduler.submit(request("A", prompt_len, output_len, **keywords))
    assert rejection.reason == reason
    assert rejection.seq.status is Status.REJECTED
    assert not scheduler.has_work


def test_a_request_larger_than_the_pool_is_rejected_with_both_numbers():
    scheduler = static(num_slots=800, reservation="oracle", max_model_len=5000)
    assert scheduler.submit(request("a", 640, 161)) is None
    assert "801 slots, the pool of 800 slots" in scheduler.submit(request("b", 640, 162)).reason


def test_generation_stops_at_the_maximum_length():
    scheduler = static(reservation="oracle")
    assert scheduler.submit(request("A", 7, 100)) is None
    assert run(scheduler) == [(1, []), (1, []), (1, ["A"])]


def test_abort_in_every_state_frees_at_once():
    scheduler = static(num_slots=30, max_num_seqs=3, max_num_batched_tokens=4)
    for name, prompt_len in (("A", 2), ("B", 1), ("C", 8), ("D", 2)):
        scheduler.submit(request(name, prompt_len, 1 if name == "B" else 2))
    _, outcome = step(scheduler)
    assert names(outcome.retained) == ["B"]
    assert names(scheduler.abort("D")) == ["D"]
    assert scheduler.abort("B") == scheduler.abort("unknown") == scheduler.abort("D") == ()
    assert names(scheduler.abort("C")) == ["C"]
    assert scheduler.allocator.num_free_blocks == 10
    aborted = scheduler.abort("A")
    assert [(seq.status, seq.num_computed_tokens, seq.num_output_tokens) for seq in aborted] == [(Status.ABORTED, 2, 1)]
    assert scheduler.allocator.num_free_blocks == 30
    scheduler.submit(request("E", 2, 1))
    plan, _ = step(scheduler)
    assert names(plan.released) == ["B"]
    assert not scheduler.has_work


def test_bad_limits_and_beam_search_are_errors():
    with pytest.raises(ScenarioError, match="max_num_batched_tokens is 3; it must be at least max_num_seqs"):
        static(max_num_seqs=4, max_num_batched_tokens=3)
    with pytest.raises(ScenarioError, match="no beam search"):
        static().submit(request("A", 2, 2, sampling=Sampling(beam_width=2)))


REQUESTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(1, 2), st.integers(0, 9)), max_size=12)


def history(requests, aborts, **keywords):
    """Everything visible of a run that submits one request per step and aborts some."""
    scheduler = static(num_slots=60, max_model_len=20, max_num_seqs=4, **keywords)
    rows, index = [], 0
    while scheduler.has_work or index < len(requests):
        if index < len(requests):
            prompt_len, output_len, n, _ = requests[index]
            scheduler.submit(request(str(index), prompt_len, output_len, sampling=Sampling(n=n)))
        for victim in aborts.get(index, ()):
            aborted = scheduler.abort(victim)
            rows.append([(seq.seq_id, seq.num_computed_tokens, seq.num_output_tokens) for seq in aborted])
        index += 1
        plan = scheduler.schedule(0)
        outcome = scheduler.complete(plan)
        for seq in outcome.ended:
            assert seq.num_output_tokens == seq.output_len
            assert seq.num_computed_tokens == seq.final_len
        plan = plan._replace(decodes=None, table_updates=())
        rows.append(repr((plan.shape, plan.admitted, outcome._replace(started=(), ended=()))))
        rows.append((names(outcome.started), names(outcome.ended), scheduler.allocator.usage()))
    scheduler.allocator.audit()
    assert scheduler.allocator.num_free_blocks == 60
    return rows


@given(
    requests=REQUESTS,
    reservation=st.sampled_from(["max", "pow2", "oracle"]),
    placement=st.sampled_from(["buddy", "first_fit", "best_fit"]),
    budget=st.sampled_from([None, 4, 9]),
)
def test_derived_counters_equal_the_plain_form(requests, reservation, placement, budget):
    aborts = {}
    for index, (*_, abort_after) in enumerate(requests):
        if abort_after < 6:
            aborts.setdefault(index + abort_after, []).append(str(index))
    keywords = {"reservation": reservation, "placement": placement, "max_num_batched_tokens": budget}
    assert history(requests, aborts, **keywords) == history(requests, aborts, detail=True, **keywords)
