"""A trace with hash ids through the paged engine, one request at a time, against the ideal prefix-hit curve.

Prompts are padded to whole blocks of 512 and one token is put out, so that the engine's blocks are the trace's. An
engine must compute the last token: of a prompt that is cached whole it computes the last block anew ("capped" hits).
With room for everything the hits are equal. In a smaller cache they differ a little, in both directions: the block
computed anew is a second copy of one that is cached already, which takes a place of the pool, and the copy nobody
uses ages from then on, where the ideal cache touches its only one.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from conftest import SHARED, needs_shared
from support import StepCost

from kvsim.memory import PagedAllocator
from kvsim.metrics.export import request_columns
from kvsim.request import Request
from kvsim.scheduling.paged import PagedScheduler
from kvsim.sim.run import simulate
from kvsim.tokens import Segment, TokenStream
from kvsim.workload import ConcurrencySource, ListSource, Trace, load_trace
from kvsim.workload.content import HASH_TEXT
from kvsim.workload.prefix_hits import block_trace, prefix_hits
from kvsim.workload.trace_edits import first

CONVERSATION = SHARED / "data/traces/mooncake/conversation_trace.jsonl"


def padded_requests(trace: Trace) -> list[Request]:
    assert trace.hash_ids is not None
    assert trace.hash_offsets is not None
    ids, offsets = trace.hash_ids.tolist(), trace.hash_offsets.tolist()
    prompts = [
        TokenStream(tuple(Segment(HASH_TEXT + id_, 0, 512) for id_ in ids[start:end]))
        for start, end in pairwise(offsets)
    ]
    return [Request(str(index), 0, prompt, 1, 1) for index, prompt in enumerate(prompts)]


def engine_hit_blocks(trace: Trace, num_blocks: int) -> int:
    allocator = PagedAllocator(num_blocks, 512, enable_prefix_caching=True)
    source = ConcurrencySource(ListSource(padded_requests(trace)), max_concurrency=1)
    simulation = simulate(PagedScheduler(allocator), StepCost(), source)
    return int(sum(request_columns(simulation.recorder)["prefix_hit_tokens"])) // 512


@needs_shared
@pytest.mark.parametrize(("num_blocks", "tolerance"), [(30_000, 0.0), (1000, 0.001)])
def test_the_first_thousand_requests(num_blocks: int, tolerance: float) -> None:
    trace = first(load_trace(CONVERSATION), 1000)
    blocks = block_trace(trace)
    assert blocks is not None
    assert blocks.num_distinct < 30_000
    expected = prefix_hits(blocks, num_blocks).hit_blocks_capped
    assert engine_hit_blocks(trace, num_blocks) == pytest.approx(expected, rel=tolerance, abs=0)


@needs_shared
@pytest.mark.deep
@pytest.mark.parametrize("capacity", [1000, 3000, 10_000, 30_000, 50_000, 100_000, 200_000, "inf"])
def test_the_whole_trace(capacity: int | str) -> None:
    reference = json.loads((SHARED / "data/traces/MOONCAKE_PREFIX_REFERENCE.json").read_text())["conversation"]
    row = next(row for row in reference if row["order"] == "rev" and row["capacity"] == capacity)
    num_blocks = 200_000 if capacity == "inf" else int(capacity)
    share = engine_hit_blocks(load_trace(CONVERSATION), num_blocks) / row["total_blocks"]
    if num_blocks >= row["distinct_resident"] and row["evictions"] == 0:
        assert round(share, 6) == row["block_hit_rate_capped"]
    else:
        assert share == pytest.approx(row["block_hit_rate_capped"], rel=0.001)
