"""Executes the plans of a run on real key and value arrays, and holds them against dense attention.

A small transformer (its weights and its "text" made up, but fixed) runs every StepPlan exactly as a model runner
would: it has a GPU pool, a host pool, and the block tables that the plans upload. It never sees the allocator.
A layer's input is the layer before, so the keys and values of all but the first layer depend on the whole prefix:
a block found by its own tokens alone, but computed behind other text, is noticed.

The reference keeps nothing but each sequence's own tokens, and attends densely over them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvsim.attention.dense import Array, dense_attention, heads_per_kv_head
from kvsim.attention.paged import paged_attention
from kvsim.memory.interface import BlockCopy, BlockMove, RegionMove
from kvsim.request import NO_NAMESPACE, Request
from kvsim.request import Sequence as EngineSequence
from kvsim.scheduling.plan import StepOutcome, StepPlan, TableUpdate
from kvsim.types import BlockId, LawViolation, Ns

TOLERANCE = 1e-5
"""Largest difference allowed between two float32 attentions that sum in a different order."""

STEPS_IN_FLIGHT = 2
"""Steps that may be planned before the outcome of the first of them is known, and the one that applies it."""

LOOK_AHEAD = 16
"""Tokens the reference computes at once beyond those asked for: it saves calls, and causality makes it harmless."""


class Replay:
    """An observer of a run: `on_step` executes one plan and checks the output of every scheduled sequence (law 10).

    `num_blocks` and `num_host_blocks` count raw ids (a null block included). The run must be made with
    `detail=True`, so that plans list their decodes and table updates. The order within a step is: moves of regions
    (compaction), swap-outs, table updates as they are listed, swap-ins, block copies, then layer by layer all writes
    before all reads. Slots that nobody wrote since their block was handed out hold NaN: what an earlier owner left
    there is of no help, even if it happens to be right. Every slot remembers for which position it was written, since
    attention is the same over keys in another order.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
        *,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int = 8,
        sliding_window: int | None = None,
    ) -> None:
        num_kv_heads = num_kv_heads or num_heads
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.model = ToyModel(num_layers, num_heads, num_kv_heads, head_dim)
        # (layer, key or value, block, slot, head, element); behind the model's layers one with the place of each token.
        block_shape = (block_size, num_kv_heads, head_dim)
        self.gpu = np.full((num_layers + 1, 2, num_blocks, *block_shape), np.nan, np.float32)
        self.host = np.full((num_layers + 1, 2, num_host_blocks, *block_shape), np.nan, np.float32)
        self.lanes: dict[Hashable, Lane] = {}
        self._left: deque[tuple[int, Hashable]] = deque()
        self.num_checked_tokens = 0
        self.num_steps = 0

    def on_submit(self, request: Request, reason: str | None, now: Ns) -> None:
        """A request says nothing until it is scheduled."""

    def on_abort(self, request_id: str, sequences: tuple[EngineSequence, ...], now: Ns) -> None:
        """An aborted sequence may still be in a step that runs already."""
        self._leave(sequences)

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        """A plan is executed once its step is over: what it says does not change meanwhile."""

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns = 0, end_ns: Ns = 0) -> None:
        """Execute one step. Raises LawViolation naming step, sequence and position; ValueError for a bare plan."""
        if plan.decodes is None and plan.shape.num_decodes:
            raise ValueError(f"step {plan.step} does not list its decodes: make the run with detail=True")
        moved = self._move_regions(plan.moves)
        self._release_preempted(plan)
        self._admit(plan)
        _move(self.gpu, self.host, plan.swap_out)
        sources = {copy.dst: copy.src for copy in plan.copies}
        for update in plan.table_updates:
            self._upload(update, sources, moved.get(update.seq.seq_id), is_hit=update.seq not in plan.resumed)
        _move(self.host, self.gpu, plan.swap_in)
        for copy in plan.copies:
            self._copy(copy)
        self._execute(plan.step, list(self._scheduled(plan)))
        self._apply(outcome)
        self.num_steps += 1
        self._forget()

    def _move_regions(self, moves: Sequence[RegionMove]) -> dict[Hashable, range]:
        """Compaction: all is read before anything is written; returns the addresses written for each sequence."""
        held = [self.gpu[:, :, move.src : move.src + move.num_tokens].copy() for move in moves]
        written: dict[Hashable, range] = {}
        for move, tokens in zip(moves, held, strict=True):
            written[move.seq_id] = range(move.dst, move.dst + move.num_tokens)
            self.gpu[:, :, move.dst : move.dst + move.num_tokens] = tokens
        return written

    def _release_preempted(self, plan: StepPlan) -> None:
        for preemption in plan.preempted:
            lane = self._lane(preemption.seq)
            lane.table.clear()
            if not preemption.is_swap:
                lane.num_stored = 0

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            lane = self._lane(admission.seq)
            lane.table.clear()
            lane.num_stored = admission.num_hit_tokens

    def _upload(
        self, update: TableUpdate, sources: Mapping[BlockId, BlockId], moved: range | None, *, is_hit: bool
    ) -> None:
        """Patch a table. Raises LawViolation if the update leaps over entries that no earlier one named.

        A block that is new in a table holds nothing of use until this step writes, copies or moves something into
        it, unless (`is_hit`) it is part of an admission's prefix hit: so it is wiped. Of a region that moved, the
        slots `moved` hold its tokens. A copy stands in for its source wherever the table names it (a table that wraps
        around its window does so more than once).
        """
        lane = self._lane(update.seq)
        table = lane.table
        if update.start > len(table):
            raise LawViolation(
                f"law 10: {_name(update.seq)}: a table update begins at entry {update.start}, but the table has "
                f"{len(table)} entries"
            )
        is_admitted = is_hit and not table
        for index, block_id in enumerate(update.block_ids, update.start):
            is_cached = is_admitted and index * self.block_size < lane.num_stored
            is_kept = is_cached or block_id in table if moved is None else block_id in moved
            if not is_kept and 0 <= block_id < self.gpu.shape[2]:
                self.gpu[:, :, block_id] = np.nan
            if block_id in sources:
                table[:] = [block_id if entry == sources[block_id] else entry for entry in table]
        table[update.start : update.start + len(update.block_ids)] = update.block_ids

    def _copy(self, copy: BlockCopy) -> None:
        """Copy-on-write."""
        self.gpu[:, :, copy.dst, : copy.num_tokens] = self.gpu[:, :, copy.src, : copy.num_tokens]

    def _scheduled(self, plan: StepPlan) -> Iterator[Work]:
        """The tokens each sequence computes in this step; they count as stored from here on."""
        for chunk in plan.prefills:
            lane = self._lane(chunk.seq)
            if chunk.start != lane.num_stored:
                raise LawViolation(
                    f"law 10: step {plan.step}, {_name(chunk.seq)}, position {chunk.start}: "
                    f"a chunk starts here, but {lane.num_stored} tokens are stored"
                )
            yield self._work(plan.step, lane, chunk.num_tokens)
        for seq in plan.decodes or ():
            lane = self._lane(seq)
            if lane.num_stored < seq.request.prompt_len:
                raise LawViolation(
                    f"law 10: step {plan.step}, {_name(seq)}, position {lane.num_stored}: "
                    f"it decodes here, within its prompt of {seq.request.prompt_len} tokens"
                )
            yield self._work(plan.step, lane, 1)

    def _work(self, step: int, lane: Lane, num_tokens: int) -> Work:
        work = Work(lane, lane.num_stored, num_tokens)
        lane.num_stored += num_tokens
        where = f"law 10: step {step}, {_name(lane.seq)}, position"
        if lane.num_stored > len(lane.table) * self.block_size:
            raise LawViolation(
                f"{where} {lane.num_stored - 1}: its table of {len(lane.table)} blocks has no slot for it"
            )
        first = 0 if self.sliding_window is None else max(0, work.start + 1 - self.sliding_window)
        for index in range(first // self.block_size, (lane.num_stored - 1) // self.block_size + 1):
            if not 0 <= lane.table[index] < self.gpu.shape[2]:
                raise LawViolation(
                    f"{where} {index * self.block_size}: entry {index} of its table is block {lane.table[index]}, "
                    f"the pool has {self.gpu.shape[2]}"
                )
        return work

    def _execute(self, step: int, works: list[Work]) -> None:
        if not works:
            return
        positions = np.concatenate([np.arange(work.start, work.start + work.num_tokens) for work in works])
        lanes = [work.lane for work in works for _ in range(work.num_tokens)]
        block_ids = np.array([lane.table[p // self.block_size] for lane, p in zip(lanes, positions, strict=True)])
        x = np.stack([lane.reference.embedding(p) for lane, p in zip(lanes, positions.tolist(), strict=True)])
        for layer in range(self.model.num_layers):
            outputs = self._attend(layer, x, works, block_ids, positions % self.block_size)
            self._compare(step, layer, outputs, works)
            x = self.model.next_layer(layer, x, outputs)
        self.gpu[-1, :, block_ids, positions % self.block_size] = positions[:, None, None, None]
        self._check_places(step, works)
        self.num_checked_tokens += len(x)

    def _check_places(self, step: int, works: list[Work]) -> None:
        """Every token lies where its sequence's table says: attention alone does not see two blocks change places."""
        for work in works:
            stop = work.start + work.num_tokens
            first = 0 if self.sliding_window is None else max(0, stop - self.sliding_window)
            expected = np.arange(first, stop)
            table = np.array(work.lane.table)
            places = self.gpu[-1, 0, table[expected // self.block_size], expected % self.block_size, 0, 0]
            wrong = np.flatnonzero(places != expected)
            if len(wrong):
                position = int(expected[wrong[0]])
                raise LawViolation(
                    f"law 10: step {step}, {_name(work.lane.seq)}, position {position}: its block table "
                    f"{work.lane.table} leads to what was stored for position {places[wrong[0]]:g}"
                )

    def _attend(self, layer: int, x: Array, works: list[Work], block_ids: Array, slots: Array) -> Array:
        """Write the keys and values of all tokens, then read: the order that lets a step share what it computes."""
        q, k, v = self.model.qkv(layer, x)
        k_pool, v_pool = self.gpu[layer]
        outputs = np.empty_like(q)
        for rows, reads in self._rounds(works):
            k_pool[block_ids[rows], slots[rows]] = k[rows]
            v_pool[block_ids[rows], slots[rows]] = v[rows]
            outputs[rows] = paged_attention(
                q[rows],
                k_pool,
                v_pool,
                [work.lane.table for work in reads],
                [work.start + work.num_tokens for work in reads],
                [work.num_tokens for work in reads],
                sliding_window=self.sliding_window,
            )
        return outputs

    def _rounds(self, works: list[Work]) -> Iterator[tuple[Array, list[Work]]]:
        """All tokens at once; but a table that wraps around its window overwrites what an earlier token of the same
        chunk reads, so such a chunk goes through the window token by token.
        """
        starts = np.cumsum([0, *(work.num_tokens for work in works)])
        together = [index for index, work in enumerate(works) if not self._overwrites_itself(work)]
        if together:
            rows = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in together])
            yield rows, [works[index] for index in together]
        for index, work in enumerate(works):
            if index in together:
                continue
            for offset in range(work.num_tokens):
                yield starts[index : index + 1] + offset, [Work(work.lane, work.start + offset, 1)]

    def _overwrites_itself(self, work: Work) -> bool:
        table = work.lane.table[: -(-(work.start + work.num_tokens) // self.block_size)]
        return self.sliding_window is not None and work.num_tokens > 1 and len(set(table)) < len(table)

    def _compare(self, step: int, layer: int, outputs: Array, works: list[Work]) -> None:
        row = 0
        for work in works:
            stop = work.start + work.num_tokens
            expected = work.lane.reference.outputs(layer, work.start, stop)
            error = np.abs(outputs[row : row + work.num_tokens] - expected).max(axis=(1, 2))
            row += work.num_tokens
            wrong = ~(error <= TOLERANCE)  # NaN (a slot that nobody wrote) is wrong too.
            if wrong.any():
                first = int(np.argmax(wrong))
                raise LawViolation(
                    f"law 10: step {step}, {_name(work.lane.seq)}, position {work.start + first}: attention through "
                    f"its block table {work.lane.table} differs from dense attention by {error[first]:.3g} "
                    f"in layer {layer}"
                )

    def _apply(self, outcome: StepOutcome) -> None:
        for fork in outcome.forks:
            parent, child = self._lane(fork.parent), self._lane(fork.child)
            child.reference = parent.reference.fork(child.reference, parent.num_stored)
            child.table = list(parent.table)
            child.num_stored = parent.num_stored
        self._leave((*outcome.ended, *outcome.pruned))

    def _leave(self, sequences: tuple[EngineSequence, ...]) -> None:
        self._left += [(self.num_steps, seq.seq_id) for seq in sequences]

    def _forget(self) -> None:
        """Drop who left some steps ago: asynchronous engines plan ahead, so a step may follow its last token."""
        while self._left and self._left[0][0] < self.num_steps - STEPS_IN_FLIGHT:
            self.lanes.pop(self._left.popleft()[1], None)

    def _lane(self, seq: EngineSequence) -> Lane:
        lane = self.lanes.get(seq.seq_id)
        if lane is None or lane.seq is not seq:
            lane = self.lanes[seq.seq_id] = Lane(seq, Reference(self.model, seq, self.sliding_window))
        return lane


@dataclass(slots=True)
class Lane:
    """What the runner knows of one sequence: its uploaded block table, and how many tokens it has stored."""

    seq: EngineSequence
    reference: Reference
    table: list[BlockId] = field(default_factory=list)
    num_stored: int = 0


class Work(NamedTuple):
    """Tokens `start .. start + num_tokens - 1` of a sequence, computed in one step."""

    lane: Lane
    start: int
    num_tokens: int


class Reference:
    """Dense attention of one sequence over its own tokens, computed as far as somebody asked.

    `inherited` are the identities of the tokens stored before it was forked off; from there on it goes its own way.
    """

    def __init__(
        self, model: ToyModel, seq: EngineSequence, sliding_window: int | None, inherited: Sequence[Hashable] = ()
    ) -> None:
        self.model = model
        self.seq = seq
        self.sliding_window = sliding_window
        self.tokens: list[Hashable] = list(inherited)
        self._inputs = np.empty((0, model.width), np.float32)
        self._outputs: list[Array] = []

    def fork(self, child: Reference, num_stored: int) -> Reference:
        """The child's reference: it has the parent's first `num_stored` tokens.

        A child that is forked off anew (its group was recomputed) has said more already, and stays as it is.
        """
        self._reach(num_stored)
        inherited = self.tokens[:num_stored]
        if child.tokens[:num_stored] == inherited:
            return child
        return Reference(self.model, child.seq, self.sliding_window, inherited)

    def embedding(self, position: int) -> Array:
        """Input of the first layer for the token at `position`."""
        self._reach(position + 1)
        row: Array = self._inputs[position]
        return row

    def outputs(self, layer: int, start: int, stop: int) -> Array:
        """Attention outputs (stop - start, num_heads, head_dim) of a layer."""
        self._reach(stop)
        rows: Array = self._outputs[layer][start:stop]
        return rows

    def _reach(self, num_tokens: int) -> None:
        """Recompute everything for a longer text; simple on purpose, nothing is carried over."""
        if num_tokens <= len(self._inputs):
            return
        num_tokens += LOOK_AHEAD
        self.tokens += [token_identity(self.seq, position) for position in range(len(self.tokens), num_tokens)]
        x = np.stack([self.model.embed(token, position) for position, token in enumerate(self.tokens)])
        self._inputs = x
        self._outputs = []
        for layer in range(self.model.num_layers):
            q, k, v = self.model.qkv(layer, x)
            self._outputs.append(dense_attention(q, k, v, sliding_window=self.sliding_window))
            x = self.model.next_layer(layer, x, self._outputs[-1])


def token_identity(seq: EngineSequence, position: int) -> Hashable:
    """What stands at a position: a token of the prompt, of the known output, or a text of this sample's own.

    Under a LoRA adapter or a cache salt the same word is another token: its keys and values may not be shared.
    """
    request = seq.request
    index = position - request.prompt_len
    if index < 0:
        token: Hashable = request.prompt.content(position, position + 1)
    elif request.output is not None and index < len(request.output):
        token = request.output.content(index, index + 1)
    else:
        token = ("sampled", request.request_id, seq.sample, index)
    return token if request.namespace == NO_NAMESPACE else (request.namespace, token)


class ToyModel:
    """The attention half of a transformer with fixed made-up weights: the same token at the same position behind
    the same text has the same query, key and value, in every run.
    """

    def __init__(self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        heads_per_kv_head(num_heads, num_kv_heads)
        self.num_layers = num_layers
        self.head_dim = head_dim
        self.width = num_heads * head_dim
        self._embeddings: dict[Hashable, Array] = {}
        self._positions: list[Array] = []
        self._q = [self._weights("q", layer, self.width) for layer in range(num_layers)]
        self._k = [self._weights("k", layer, num_kv_heads * head_dim) for layer in range(num_layers)]
        self._v = [self._weights("v", layer, num_kv_heads * head_dim) for layer in range(num_layers)]
        self._o = [self._weights("o", layer, self.width) for layer in range(num_layers)]

    def embed(self, token: Hashable, position: int) -> Array:
        """Input of the first layer (width,): a vector of the token plus one of the position."""
        while len(self._positions) <= position:
            self._positions.append(_noise(("position", len(self._positions)), self.width))
        if token not in self._embeddings:
            self._embeddings[token] = _noise(token, self.width)
        summed: Array = self._embeddings[token] + self._positions[position]
        return summed

    def qkv(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values (num_tokens, heads, head_dim) of a layer's normalised inputs (num_tokens, width)."""
        h = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(1e-6))
        q, k, v = ((h @ weights[layer]).reshape(len(x), -1, self.head_dim) for weights in (self._q, self._k, self._v))
        return q, k, v

    def next_layer(self, layer: int, x: Array, outputs: Array) -> Array:
        """Inputs of the next layer: the residual stream."""
        summed: Array = x + outputs.reshape(len(x), -1) @ self._o[layer]
        return summed

    def _weights(self, name: str, layer: int, num_columns: int) -> Array:
        flat = _noise((name, layer), self.width * num_columns)
        scaled: Array = flat.reshape(self.width, num_columns) / np.float32(np.sqrt(self.width))
        return scaled


def _noise(key: Hashable, size: int) -> Array:
    """Standard normal numbers that depend on nothing but the text of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(size).astype(np.float32)


def _move(source: Array, target: Array, moves: tuple[BlockMove, ...]) -> None:
    """Copy whole blocks from one pool to the other, in order; the source stays, since others may still share it."""
    for move in moves:
        target[:, :, move.dst] = source[:, :, move.src]


def _name(seq: EngineSequence) -> str:
    sample = f"/{seq.sample}" if seq.request.sampling.num_sequences > 1 else ""
    return f"sequence {seq.request.request_id}{sample}"
