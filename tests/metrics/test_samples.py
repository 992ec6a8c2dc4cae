"""Requests of several samples, preempted, swapped or given up: tokens, gaps and slots counted by hand."""

from __future__ import annotations

import pytest
from support import Outcome, play, request

from kvsim.request import Sampling

TWO = Sampling(n=2)


def parts(out: Outcome) -> list[list[int]]:
    columns = ["token_states", "reserved", "internal_frag"]
    return out.steps[columns].to_numpy().tolist()


@pytest.mark.parametrize("engine_loop", ["calendar", "plain"])
def test_a_victim_gives_back_no_budget_that_it_never_took(engine_loop: str) -> None:
    """Prompts go first; the decodes that are pushed out meanwhile were not counted in that step."""
    out = play(
        [request("a", 5, 1, sampling=TWO), request("b", 2, 3), request("c", 3, 3, at=1, sampling=TWO),
         request("d", 2, 4, at=2)],
        num_blocks=5, block_size=2, max_num_batched_tokens=3, long_prefill_token_threshold=2, prefill_first=True,
        engine_loop=engine_loop,
    )  # fmt: skip
    num_tokens = out.steps.num_prefill_tokens + out.steps.num_decode_tokens
    assert num_tokens.tolist() == [3, 3, 1, 3, 2, 3, 1, 3, 3, 3, 3, 2, 1]


def test_beams_that_fork_anew_keep_what_they_emitted() -> None:
    """A token from the prompt, then two a step for eight steps, whether or not the beams were computed again."""
    out = play(
        [request("a", 4, 9), request("b", 4, 9, at=1, sampling=Sampling(beam_width=2))], num_blocks=6, block_size=4
    )
    assert out.summary["num_preemptions"] > 0
    assert (out["a"].output_tokens, out["b"].output_tokens, out.summary["total_output_tokens"]) == (9, 17, 26)


def test_a_sequence_swapped_out_while_it_is_computed_again_emits_nothing_when_it_is_back() -> None:
    """14 tokens, of which 4 are first ones: 10 gaps, which sum up to 18 steps."""
    out = play(
        [request("r1", 5, 5, priority=1), request("r2", 3, 3, priority=1), request("r3", 3, 2),
         request("r0", 3, 4, at=2)],
        num_blocks=6, block_size=2, num_host_blocks=1, preemption="swap", scheduling_policy="priority",
        long_prefill_token_threshold=2, admission="first_chunk",
    )  # fmt: skip
    assert out.summary["mean_itl_ms"] == pytest.approx(1.8)


def test_the_peak_of_a_request_that_is_admitted_again() -> None:
    """Its last sample comes back with the 3 tokens it has: 3 blocks of one token."""
    out = play(
        [request("a", 1, 3), request("b", 1, 3, sampling=TWO, sample_lens=(1, 3)), request("c", 1, 1, at=1),
         request("d", 1, 2, at=1, sampling=TWO)],
        num_blocks=5, block_size=1,
    )  # fmt: skip
    assert out["b"].peak_blocks == 3


def test_a_swapped_request_is_there_too() -> None:
    """Chunks of at most 2 tokens as long as somebody else is there, be it on the host."""
    out = play(
        [request("a", 2, 6), request("b", 2, 6), request("c", 3, 1, at=5)],
        num_blocks=6, block_size=2, num_host_blocks=4, preemption="swap", long_prefill_token_threshold=2,
        admission="first_chunk",
    )  # fmt: skip
    assert out.steps.num_prefill_tokens.tolist() == [4, 0, 0, 0, 0, 0, 2, 1]


@pytest.mark.parametrize(
    ("sample_lens", "expected"),
    [
        # The second sample writes behind the prompt; the first one ends with its first token.
        ((1, 4), [[5, 3, 0], [6, 2, 0], [7, 1, 0], [8, 0, 0]]),
        # The first one copies the prompt's tail, the second writes there: one token more, and two slots stay empty.
        ((4, 2), [[5, 1, 2], [8, 2, 2], [7, 1, 0], [8, 0, 0]]),
    ],
)
def test_the_last_who_writes_behind_the_prompt_says_what_is_reserved(
    sample_lens: tuple[int, int], expected: list[list[int]]
) -> None:
    out = play([request("a", 5, 4, sampling=TWO, sample_lens=sample_lens)], num_blocks=8, block_size=4)
    assert parts(out) == expected


def test_slots_lost_to_a_preemption_before_the_abort_were_never_filled() -> None:
    """B is pushed out after one step and gives up: its three empty slots of that step were for nobody."""
    out = play([request("a", 4, 6), request("b", 5, 6, abort_at=3)], num_blocks=3, block_size=4)
    assert parts(out)[0] == [9, 0, 3]


def test_samples_that_give_up_shared_the_slots_behind_the_prompt() -> None:
    """Five tokens, then one more each: of the three slots behind the prompt one was filled, as with one sample."""
    alone, both = (
        play([request("a", 5, 6, sampling=Sampling(n=n), abort_at=2)], num_blocks=8, block_size=4) for n in (1, 2)
    )
    assert parts(alone) == [[5, 1, 2], [6, 0, 2]]
    assert parts(both) == [[5, 1, 2], [8, 0, 4]]


def test_beams_that_wait_for_their_turn_emit_nothing() -> None:
    """Two tokens a step for three beams: 7 tokens, one first; each of the other six comes two steps after the last."""
    out = play([request("a", 2, 3, sampling=Sampling(beam_width=3))], num_blocks=20, block_size=4,
               max_num_batched_tokens=2)  # fmt: skip
    gaps = out.simulation.recorder.gaps.table.matrix()
    assert out.summary["total_output_tokens"] == 7
    assert gaps[:, 1].sum() == 6
    assert set(gaps[:, 0]) == {2_000_000}
