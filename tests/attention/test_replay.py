"""The replay accepts plans that are right, and names step, sequence and position where one is not."""

from __future__ import annotations

import pytest

from kvsim.attention.replay import Replay, token_identity
from kvsim.memory.interface import BlockCopy, BlockMove
from kvsim.request import Request, Sampling, Sequence
from kvsim.scheduling.plan import (
    Admission,
    Fork,
    Preemption,
    PrefillChunk,
    StepOutcome,
    StepPlan,
    StepShape,
    TableUpdate,
)
from kvsim.tokens import TokenStream
from kvsim.types import LawViolation

NOTHING = StepOutcome()


def make_seq(seq_id: int, prompt, *, sample: int = 0, output_len: int = 20, n: int = 1) -> Sequence:
    stream = TokenStream.from_ids(prompt) if not isinstance(prompt, TokenStream) else prompt
    name = "abcdefgh"[seq_id if n == 1 else 0]
    request = Request(name, 0, stream, output_len, output_len, sampling=Sampling(n=n))
    return Sequence(seq_id, request, sample)


class Hand:
    """Plans written by hand, fed to a replay one step at a time."""

    def __init__(self, **options) -> None:
        self.replay = Replay(4, 8, 4, num_layers=2, num_heads=4, head_dim=8, **options)
        self.step = 0

    def run(self, *, outcome: StepOutcome = NOTHING, decodes=(), **fields) -> None:
        shape = StepShape(num_decodes=len(decodes))
        plan = StepPlan(self.step, shape, True, decodes=tuple(decodes), **fields)
        self.step += 1
        self.replay.on_step(plan, outcome)

    def admit(self, seq: Sequence, table, *, hit: int = 0, stop: int | None = None, **fields) -> None:
        self.run(**admission(seq, table, hit=hit, stop=stop), **fields)

    def decode(self, *seqs: Sequence, times: int = 1, **fields) -> None:
        for _ in range(times):
            self.run(decodes=seqs, **fields)


def admission(seq: Sequence, table, *, hit: int = 0, stop: int | None = None, is_resumed: bool = False):
    stop = seq.num_tokens if stop is None else stop
    return {
        "admitted": (Admission(seq, hit, is_resumed),),
        "prefills": (PrefillChunk(seq, hit, stop - hit, stop == seq.num_tokens),),
        "table_updates": (TableUpdate(seq, 0, tuple(table)),),
    }


def grow(seq: Sequence, start: int, *block_ids: int):
    return {"table_updates": (TableUpdate(seq, start, block_ids),)}


def test_chunked_prefill_and_decode_over_scattered_blocks():
    hand = Hand()
    seq = make_seq(0, range(6))
    hand.admit(seq, [5, 2], stop=5)
    hand.run(prefills=(PrefillChunk(seq, 5, 1, True),))
    hand.decode(seq, times=2)
    hand.run(decodes=(seq,), **grow(seq, 2, 0))
    assert hand.replay.num_checked_tokens == 9
    assert hand.replay.num_steps == 5


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads(num_kv_heads):
    hand = Hand(num_kv_heads=num_kv_heads)
    seq = make_seq(0, range(6))
    hand.admit(seq, [5, 2])
    hand.decode(seq, times=2)


def test_a_forgotten_block_is_noticed():
    hand = Hand()
    seq = make_seq(0, range(4))
    hand.admit(seq, [5])
    with pytest.raises(LawViolation, match=r"law 10: step 1, sequence a, position 4: .* no slot"):
        hand.decode(seq)


def test_blocks_that_changed_places_are_noticed():
    """Attention over the same keys in another order is the same: nobody reads a different sum."""
    hand = Hand()
    seq = make_seq(0, range(10))
    hand.admit(seq, [5, 2, 3])
    message = r"law 10: step 1, sequence a, position 0: its block table \[2, 5, 3\] leads to .* for position 4"
    with pytest.raises(LawViolation, match=message):
        hand.run(decodes=(seq,), **grow(seq, 0, 2, 5))


def test_a_decode_within_the_prompt_is_noticed():
    hand = Hand()
    seq = make_seq(0, range(6))
    hand.admit(seq, [5, 2], stop=5)
    with pytest.raises(LawViolation, match=r"law 10: step 1, sequence a, position 5: .* within its prompt of 6 tokens"):
        hand.decode(seq)


def test_two_sequences_in_one_block_are_noticed():
    hand = Hand()
    a, b = make_seq(0, range(6)), make_seq(1, range(10, 13))
    hand.admit(a, [5, 2])
    hand.admit(b, [2])
    with pytest.raises(LawViolation, match=r"law 10: step 2, sequence a, position 6: .*dense"):
        hand.decode(a, b)


def test_a_prefix_hit_shares_what_was_computed_even_in_the_same_step():
    hand = Hand()
    a, b = make_seq(0, [1, 2, 3, 4, 5]), make_seq(1, [1, 2, 3, 4, 6])
    both = [admission(a, [7, 6]), admission(b, [7, 5], hit=4)]
    hand.run(**{key: both[0][key] + both[1][key] for key in both[0]})
    hand.decode(a, b)


def test_a_hit_on_a_block_that_was_never_computed_is_noticed():
    hand = Hand()
    with pytest.raises(LawViolation, match=r"step 0, sequence b, position 4: .*nan"):
        hand.admit(make_seq(1, [1, 2, 3, 4, 6]), [7, 5], hit=4)


def test_a_hit_behind_other_text_is_noticed():
    """Equal tokens at equal positions: only the text before them differs, so only deeper layers can tell."""
    hand = Hand()
    a = make_seq(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    b = make_seq(1, [0, 0, 0, 0, 5, 6, 7, 8, 9])
    hand.admit(a, [0, 1, 2])
    hand.admit(b, [3, 4, 5])
    with pytest.raises(LawViolation, match=r"step 2, sequence c, position 8: .* in layer 1"):
        hand.admit(make_seq(2, [0, 0, 0, 0, 5, 6, 7, 8, 9]), [3, 1, 6], hit=8)


def forked(hand: Hand):
    parent = make_seq(0, range(6), n=2)
    child = make_seq(1, range(6), n=2, sample=1)
    hand.admit(parent, [0, 1], outcome=StepOutcome(forks=(Fork(parent, child),)))
    return parent, child


def test_fork_copies_the_shared_tail_once():
    hand = Hand()
    parent, child = forked(hand)
    hand.run(decodes=(parent, child), copies=(BlockCopy(1, 2, 2),), **grow(parent, 1, 2))
    hand.decode(parent, child)
    assert hand.replay.num_checked_tokens == 10


def test_a_skipped_copy_is_noticed():
    hand = Hand()
    parent, child = forked(hand)
    with pytest.raises(LawViolation, match=r"step 1, sequence a/0, position 6: .*nan"):
        hand.run(decodes=(parent, child), **grow(parent, 1, 2))


def test_writing_into_a_shared_tail_is_noticed():
    hand = Hand()
    parent, child = forked(hand)
    with pytest.raises(LawViolation, match=r"step 1, sequence a/0, position 6"):
        hand.decode(parent, child)


def test_samples_say_different_things_and_a_fork_keeps_what_was_said():
    hand = Hand()
    parent, child = forked(hand)
    lanes = hand.replay.lanes
    hand.run(decodes=(parent, child), copies=(BlockCopy(1, 2, 2),), **grow(parent, 1, 2))
    grandchild = make_seq(2, range(6), n=2, sample=2)
    hand.run(
        outcome=StepOutcome(forks=(Fork(child, grandchild),), pruned=(parent,)),
        decodes=(parent, child),
    )
    assert token_identity(parent, 6) != token_identity(child, 6)
    assert lanes[2].reference.tokens == lanes[1].reference.tokens[:8]
    hand.run(
        decodes=(child, grandchild),
        table_updates=(TableUpdate(child, 2, (3,)), TableUpdate(grandchild, 2, (4,))),
    )
    hand.decode(child, grandchild, times=2)
    assert list(lanes) == [1, 2]


def swapped_out(hand: Hand):
    a, b = make_seq(0, range(6)), make_seq(1, range(10, 13))
    hand.admit(a, [0, 1])
    hand.admit(b, [2])
    hand.run(decodes=(b,), preempted=(Preemption(a, True, 6),), swap_out=(BlockMove(0, 3), BlockMove(1, 1)))
    hand.admit(make_seq(2, range(30, 38)), [0, 1])
    return a


def test_swap_out_and_in_to_other_blocks():
    hand = Hand()
    a = swapped_out(hand)
    hand.run(decodes=(a,), resumed=(a,), swap_in=(BlockMove(3, 6), BlockMove(1, 4)), **grow(a, 0, 6, 4))


@pytest.mark.parametrize(
    "moves",
    [
        pytest.param([(3, 6), (1, 5)], id="into-the-wrong-block"),
        pytest.param([(3, 4), (1, 6)], id="exchanged"),
        pytest.param([(3, 6), (2, 4)], id="from-the-wrong-host-block"),
        pytest.param([(3, 6)], id="one-forgotten"),
    ],
)
def test_a_wrong_swap_is_noticed(moves):
    hand = Hand()
    a = swapped_out(hand)
    with pytest.raises(LawViolation, match=r"law 10: step 4, sequence a, position 6"):
        hand.run(
            decodes=(a,),
            resumed=(a,),
            swap_in=tuple(BlockMove(*move) for move in moves),
            **grow(a, 0, 6, 4),
        )


def test_recompute_after_preemption_restores_prompt_and_output():
    hand = Hand()
    a = make_seq(0, range(6))
    hand.admit(a, [0, 1])
    hand.decode(a, times=2)
    a.num_output_tokens = 3
    hand.run(preempted=(Preemption(a, False, 8),))
    hand.run(**admission(a, [7, 6, 5], is_resumed=True))
    hand.decode(a)
    assert hand.replay.num_checked_tokens == 6 + 2 + 9 + 1


def test_a_resume_that_forgets_the_output_is_noticed():
    hand = Hand()
    a = make_seq(0, range(6))
    hand.admit(a, [0, 1])
    hand.run(preempted=(Preemption(a, False, 6),))
    with pytest.raises(LawViolation, match=r"step 2, sequence a, position 5: a chunk starts here, but 0 tokens"):
        hand.run(prefills=(PrefillChunk(a, 5, 2, True),), **grow(a, 0, 7, 6))


@pytest.mark.parametrize("chunk", [1, 3, 11])
def test_a_table_that_wraps_around_its_window(chunk):
    hand = Hand(sliding_window=8)
    a = make_seq(0, range(11))
    hand.admit(a, [5, 3, 5], stop=chunk)
    for start in range(chunk, 11, chunk):
        hand.run(prefills=(PrefillChunk(a, start, min(chunk, 11 - start), start + chunk >= 11),))
    hand.decode(a)
    hand.run(decodes=(a,), **grow(a, 3, 3))
    hand.decode(a, times=3)
    with pytest.raises(LawViolation, match="step"):
        hand.run(decodes=(a,), **grow(a, 4, 3))


def test_a_block_outside_the_pool_and_a_gap_in_a_table_are_noticed():
    a = make_seq(0, range(4))
    with pytest.raises(LawViolation, match="entry 0 of its table is block 8, the pool has 8"):
        Hand().admit(a, [8])
    with pytest.raises(LawViolation, match="a table update begins at entry 1, but the table has 0 entries"):
        Hand().run(**admission(a, []) | grow(a, 1, 3))


def test_a_plan_without_detail_is_refused():
    replay = Replay(4, 8)
    with pytest.raises(ValueError, match="detail=True"):
        replay.on_step(StepPlan(0, StepShape(num_decodes=1), True), NOTHING)
