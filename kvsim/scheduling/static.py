"""Request-level batching: the members of a batch are fixed until the longest ends (serving before Orca).

A batch is formed whenever none runs and a request waits. A member that ends early keeps its place and its region:
its memory is internal fragmentation until the batch ends, and nobody takes its seat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.request import Request, Sequence, Status
from kvsim.scheduling.plan import Admission, PrefillChunk, Rejection, StepOutcome, StepPlan, StepShape, TableUpdate
from kvsim.scheduling.reservations import Reservation
from kvsim.types import AllocStatus, Ns, ScenarioError


class _Batch:
    """The members of one batch, and which of them still produce tokens.

    Decoding members take every tick, so their counters are derived: a member that joined at tick j has stored
    `tick - j` tokens since, and leaves at a tick known when it joined.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self.unfilled: list[Sequence] = []
        """Members whose prompt is not computed yet, in order."""
        self.decoding: dict[int, Sequence] = {}
        """By sequence id, in the order in which they began to decode."""
        self.retained: list[Sequence] = []
        """Members that ended and hold their regions."""
        self.leave_at: dict[int, list[Sequence]] = {}
        self.tick = 0
        """Decode steps planned."""
        self.num_emitted_ticks = 0
        """Decode steps completed."""
        self.context_tokens = 0
        """Stored tokens of all decoding members."""

    @property
    def is_live(self) -> bool:
        return bool(self.decoding or self.unfilled)

    def begin_decoding(self, seq: Sequence) -> None:
        seq.join_tick, seq.join_computed = self.tick, seq.num_computed_tokens
        self.decoding[seq.seq_id] = seq
        self.context_tokens += seq.num_computed_tokens
        self.leave_at.setdefault(self.tick + seq.output_len - seq.num_output_tokens, []).append(seq)

    def stop_decoding(self, seq: Sequence, allocator: ContiguousAllocator) -> None:
        self.settle(seq, allocator)
        del self.decoding[seq.seq_id]
        self.context_tokens -= seq.num_computed_tokens

    def settle(self, seq: Sequence, allocator: ContiguousAllocator) -> None:
        """Bring a decoding member's counters, and the fill of its region, up to date."""
        num_new = seq.join_computed + self.tick - seq.join_tick - seq.num_computed_tokens
        if num_new:
            seq.num_computed_tokens += num_new
            allocator.append_slots(seq.seq_id, num_new)
        seq.num_output_tokens = 1 + self.num_emitted_ticks - seq.join_tick


class StaticScheduler:
    """A `Scheduler` that batches whole requests over contiguous regions.

    A place of the batch (`max_num_seqs`) holds one sequence. Regions cannot be shared, so a request of n samples is
    n sequences with n places and n regions, and each computes the prompt for itself (a prompt repeated n times).
    With `max_num_batched_tokens` the prompts are computed in chunks beside the decodes of the members that began.
    `detail` lists decodes and addresses in every plan and keeps all counters current: the plain form of the rule.
    """

    splits_samples = True

    def __init__(
        self,
        allocator: ContiguousAllocator,
        *,
        reservation: Reservation,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        detail: bool = False,
    ) -> None:
        if not isinstance(allocator, ContiguousAllocator):
            raise ScenarioError(
                f"the static scheduler works on a ContiguousAllocator or a subclass of it, not on "
                f"{type(allocator).__name__}"
            )
        if max_num_seqs < 1:
            raise ScenarioError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
        if max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
            raise ScenarioError(
                f"max_num_batched_tokens is {max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({max_num_seqs}), or the decodes of a full batch do not fit into a step"
            )
        self.allocator = allocator
        self.reservation = reservation
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.detail = detail
        self.waiting: deque[tuple[Sequence, ...]] = deque()
        """Requests in order of arrival, each as its samples."""
        self._batch = _Batch()
        self._live: dict[str, list[Sequence]] = {}
        """Unfinished sequences by request id."""
        self._released: list[Sequence] = []
        self._head_slots = 0
        """What the head of the queue asked for when the running batch had no room for it; 0 if it had."""
        self._num_seq_ids = 0
        self._num_steps = 0

    def submit(self, request: Request) -> Rejection | None:
        """Queue a request, or say why no batch can ever hold it. Raises ScenarioError for beam search."""
        if request.sampling.beam_width:
            raise ScenarioError(f"request {request.request_id}: static batching over regions has no beam search; use n")
        samples = self._new_sequences(request)
        reason = self._never_fits(request, samples)
        if reason is not None:
            for seq in samples:
                seq.status = Status.REJECTED
            return Rejection(samples[0], reason)
        self._live[request.request_id] = list(samples)
        self.waiting.append(samples)
        return None

    def _new_sequences(self, request: Request) -> tuple[Sequence, ...]:
        first = self._num_seq_ids
        self._num_seq_ids += max(1, request.sampling.n)
        return tuple(self._new_sequence(seq_id, request, seq_id - first) for seq_id in range(first, self._num_seq_ids))

    def _new_sequence(self, seq_id: int, request: Request, sample: int) -> Sequence:
        """Generation stops at `max_model_len`, as in every engine."""
        seq = Sequence(seq_id, request, sample)
        if self.max_model_len is not None:
            seq.output_len = max(1, min(seq.output_len, self.max_model_len - seq.prompt_len))
            seq.final_len = seq.prompt_len + seq.output_len - 1
        return seq

    def _never_fits(self, request: Request, samples: Seq[Sequence]) -> str | None:
        num_samples = len(samples)
        if self.max_model_len is not None and request.prompt_len >= self.max_model_len:
            return f"the prompt has {request.prompt_len} tokens, max_model_len is {self.max_model_len}"
        if num_samples > self.max_num_seqs:
            return f"needs {num_samples} places, max_num_seqs is {self.max_num_seqs}"
        slots = max(self._region_len(seq) for seq in samples)
        if num_samples > self.allocator.max_regions(slots):
            regions = f"{num_samples} regions of {slots} slots" if num_samples > 1 else f"{slots} slots"
            return f"needs {regions}, the pool of {self.allocator.num_blocks} slots holds {self._holds(slots)}"
        return None

    def _holds(self, slots: int) -> str:
        num_regions = self.allocator.max_regions(slots)
        return f"{num_regions} such regions" if num_regions else f"at most {self.allocator.max_region} in one piece"

    def _region_len(self, seq: Sequence) -> int:
        return seq.prompt_len + self.reservation(seq.request, seq.sample)

    def abort(self, request_id: str) -> tuple[Sequence, ...]:
        """End a request; its regions are free at once, its places stay empty until the batch ends."""
        samples = tuple(self._live.pop(request_id, ()))
        if not samples:
            return ()
        if samples[0].status is Status.WAITING:
            self._drop_waiting(request_id)
        else:
            self._drop_members(samples)
        for seq in samples:
            seq.status = Status.ABORTED
        return samples

    def _drop_waiting(self, request_id: str) -> None:
        index = next(k for k, samples in enumerate(self.waiting) if samples[0].request.request_id == request_id)
        del self.waiting[index]
        if index == 0:
            self._head_slots = 0

    def _drop_members(self, samples: Seq[Sequence]) -> None:
        batch = self._batch
        for seq in samples:
            if seq.seq_id in batch.decoding:
                batch.stop_decoding(seq, self.allocator)
            else:
                batch.unfilled.remove(seq)
            batch.members.remove(seq)
            self.allocator.free(seq.seq_id)
        if not batch.is_live:
            self._released.extend(self._end_batch())

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def schedule(self, now: Ns) -> StepPlan:
        """One iteration of the running batch, or the first one of a new batch."""
        admitted = self._form_batch() if not self._batch.is_live else ()
        batch = self._batch
        prefills = self._next_chunks()
        num_decodes = len(batch.decoding)
        self._num_steps += 1
        released, self._released = tuple(self._released), []
        plan = StepPlan(
            step=self._num_steps - 1,
            shape=StepShape(
                num_decodes=num_decodes,
                context_tokens=batch.context_tokens + num_decodes,
                prefills=tuple((chunk.start, chunk.num_tokens) for chunk in prefills),
            ),
            is_decode_tick=num_decodes > 0,
            decodes=tuple(batch.decoding.values()) if self.detail else None,
            table_updates=self._addresses(admitted) if self.detail else (),
            prefills=prefills,
            admitted=admitted,
            num_running=len(self._live) - len(self.waiting),
            num_sequences=num_decodes + len(batch.unfilled),
            num_waiting=len(self.waiting),
            waits_for_memory=self._head_slots > 0,
            head_slots=self._head_slots,
            head_wait=self._head_wait(),
            released=released,
        )
        self._store(plan)
        return plan

    def _head_wait(self) -> str:
        if not self.waiting:
            return ""
        return "blocks" if self._head_slots else "running batch"

    def _form_batch(self) -> tuple[Admission, ...]:
        """Admit waiting requests in order until one has no place or no region."""
        batch = self._batch = _Batch()
        self._head_slots = 0
        while self.waiting and len(batch.members) + len(self.waiting[0]) <= self.max_num_seqs:
            if not self._take_regions(self.waiting[0]):
                self._head_slots = sum(self._region_len(seq) for seq in self.waiting[0])
                break
            samples = self.waiting.popleft()
            for seq in samples:
                seq.status = Status.RUNNING
            batch.members.extend(samples)
            batch.unfilled.extend(samples)
        return tuple(Admission(seq, 0, False) for seq in batch.members)

    def _take_regions(self, samples: Seq[Sequence]) -> bool:
        """A region for every sample, or none at all."""
        for index, seq in enumerate(samples):
            slots = self._region_len(seq)
            if self.allocator.can_allocate(slots) is not AllocStatus.OK:
                for taken in samples[:index]:
                    self.allocator.free(taken.seq_id)
                return False
            self.allocator.allocate(seq.seq_id, 0, reserve_tokens=slots)
        return True

    def _next_chunks(self) -> tuple[PrefillChunk, ...]:
        batch = self._batch
        budget = self.max_num_batched_tokens
        room = None if budget is None else budget - len(batch.decoding)
        chunks = []
        for seq in batch.unfilled:
            num_left = seq.prompt_len - seq.num_computed_tokens
            num_tokens = num_left if room is None else min(num_left, room)
            if num_tokens <= 0:
                break
            chunks.append(PrefillChunk(seq, seq.num_computed_tokens, num_tokens, num_tokens == num_left))
            room = None if room is None else room - num_tokens
        return tuple(chunks)

    def _store(self, plan: StepPlan) -> None:
        """Tokens planned here count as stored from here on."""
        for chunk in plan.prefills:
            self.allocator.append_slots(chunk.seq.seq_id, chunk.num_tokens)
            chunk.seq.num_computed_tokens += chunk.num_tokens
        if not plan.is_decode_tick:
            return
        self._batch.tick += 1
        self._batch.context_tokens += plan.shape.num_decodes
        if self.detail:
            self._settle()

    def _addresses(self, admitted: Seq[Admission]) -> tuple[TableUpdate, ...]:
        seqs = (admission.seq for admission in admitted)
        return tuple(TableUpdate(seq, 0, tuple(self.allocator.block_table(seq.seq_id))) for seq in seqs)

    def complete(self, plan: StepPlan) -> StepOutcome:
        """Emit the step's tokens; the last member to end frees every region of the batch."""
        batch = self._batch
        batch.num_emitted_ticks = batch.tick
        started = [chunk.seq for chunk in plan.prefills if chunk.is_last]
        for seq in started:
            batch.unfilled.remove(seq)
            seq.num_output_tokens += 1
            batch.begin_decoding(seq)
        ended = self._end_members(batch.leave_at.pop(batch.tick, ()))
        finished = self._finish_requests(ended)
        retained, released = self._retain(ended)
        return StepOutcome(
            num_emitted_tokens=plan.shape.num_decodes + len(started),
            started=tuple(started),
            ended=tuple(ended),
            finished_requests=finished,
            retained=retained,
            released=released,
        )

    def _end_members(self, seqs: Seq[Sequence]) -> list[Sequence]:
        ended = [seq for seq in seqs if seq.status is Status.RUNNING]
        for seq in ended:
            self._batch.stop_decoding(seq, self.allocator)
            seq.status = Status.FINISHED
        return ended

    def _finish_requests(self, ended: Seq[Sequence]) -> tuple[str, ...]:
        finished = []
        for seq in ended:
            request_id = seq.request.request_id
            self._live[request_id].remove(seq)
            if not self._live[request_id]:
                del self._live[request_id]
                finished.append(request_id)
        return tuple(finished)

    def _retain(self, ended: list[Sequence]) -> tuple[tuple[Sequence, ...], tuple[Sequence, ...]]:
        """(now retained, now released): all is released with the last member."""
        batch = self._batch
        if batch.is_live:
            batch.retained.extend(ended)
            return tuple(ended), ()
        released = tuple(batch.retained)
        batch.retained.extend(ended)
        self._end_batch()
        return (), released

    def _end_batch(self) -> list[Sequence]:
        """Free what the members that ended still hold."""
        retained, self._batch.retained = self._batch.retained, []
        for seq in retained:
            self.allocator.free(seq.seq_id)
        return retained

    @property
    def retained(self) -> Seq[Sequence]:
        """Members that ended but hold their regions until the batch ends."""
        return tuple(self._batch.retained)

    def live_sequences(self) -> Seq[Sequence]:
        """Unfinished sequences, settled: the batch's in order, then the queue's. For the ended see `retained`."""
        self._settle()
        running = [seq for seq in self._batch.members if seq.status is Status.RUNNING]
        return [*running, *(seq for samples in self.waiting for seq in samples)]

    def _settle(self) -> None:
        for seq in self._batch.decoding.values():
            self._batch.settle(seq, self.allocator)

    def describe_block(self) -> str:
        """One sentence on the head of the queue."""
        if not self.waiting:
            return "no request waits"
        samples = self.waiting[0]
        return (
            f"request {samples[0].request.request_id} waits for {len(samples)} region(s) of "
            f"{self._region_len(samples[0])} slots; {self.allocator.num_free_blocks} are free, the largest hole has "
            f"{self.allocator.largest_hole}, and the running batch has {len(self._batch.members)} members"
        )
