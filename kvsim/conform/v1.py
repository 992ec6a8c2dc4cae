"""Replay of recorded vLLM V1 cases, synchronous and asynchronous, through the schedulers that `run` uses.

The driver below knows the clock of a case (arrivals, aborts, when an iteration's outputs are applied, when a run
stops) and how a record is written. No rule of the engine lives here: those are in `kvsim.scheduling`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, TypeAlias
from zlib import crc32

from kvsim.conform.result import CaseResult, Mismatch, agrees_in
from kvsim.memory.paged import PagedAllocator
from kvsim.request import Namespace, Request, Sequence
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler
from kvsim.tokens import TokenStream
from kvsim.types import ScenarioError

Record: TypeAlias = dict[str, Any]

MAX_STEPS = 20_000
_NUM_QUEUE_IDS = 8


def is_async_case(case: Record) -> bool:
    """Asynchronous cases record the running state (`rs`) at every step, and count stale tokens."""
    steps = case["expected"]["steps"]
    return "stale" in case["expected"]["end"] or (bool(steps) and "rs" in steps[0])


def replay(case: Record, *, engine_loop: str = "calendar") -> CaseResult:
    """Run a case and compare every recorded field, up to the first that differs.

    Raises ScenarioError if the case lacks a field of the format.
    """
    try:
        return _replay(case, engine_loop)
    except KeyError as missing:
        raise ScenarioError(f"case {case.get('name')!r}: the field {missing} is missing") from missing


def _replay(case: Record, engine_loop: str) -> CaseResult:
    driver = make_driver(case, engine_loop)
    records: list[Record] = case["expected"]["steps"]
    num_fields = 0
    for index, got in enumerate(driver.records()):
        expected = records[index] if index < len(records) else {}
        for name in _names(expected, got):
            num_fields += 1
            if not agrees_in(name, expected, got):
                state = _state_before(case, index, engine_loop)
                mismatch = Mismatch(index, name, expected.get(name), got.get(name), state)
                return CaseResult(case["name"], num_fields, mismatch)
    if driver.num_records < len(records):
        mismatch = Mismatch(driver.num_records, "t", records[driver.num_records].get("t"), None, driver.state())
        return CaseResult(case["name"], num_fields + 1, mismatch)
    expected, got = case["expected"]["end"], driver.end_record()
    for name in _names(expected, got):
        num_fields += 1
        if not agrees_in(name, expected, got):
            mismatch = Mismatch(driver.num_records, f"end.{name}", expected.get(name), got.get(name), driver.state())
            return CaseResult(case["name"], num_fields, mismatch)
    return CaseResult(case["name"], num_fields)


def _names(expected: Record, got: Record) -> list[str]:
    """Fields of either record: a field that one of them lacks cannot agree."""
    return [*expected, *(name for name in got if name not in expected)]


def _state_before(case: Record, step: int, engine_loop: str) -> Record:
    """The queues and the free list at the end of the step before."""
    driver = make_driver(case, engine_loop)
    records = driver.records()
    for _ in range(step):
        next(records)
    return driver.state()


def make_driver(case: Record, engine_loop: str = "calendar", *, detail: bool = True) -> Driver:
    """The driver that the case's format asks for; without `detail` its records lack the decodes, as `run` does."""
    make = AsyncDriver if is_async_case(case) else Driver
    return make(case, engine_loop, detail=detail)


class Driver:
    """The clock of a synchronous case: arrivals, aborts, schedule, outputs."""

    scheduler_class: type[VllmV1Scheduler] = VllmV1Scheduler

    def __init__(self, case: Record, engine_loop: str, *, detail: bool = True) -> None:
        config = case["config"]
        self.is_compact = case.get("trace") == "compact"
        self.allocator = PagedAllocator(
            config["num_blocks"],
            config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
            free_list="lru",
            null_block=True,
        )
        self.allocator.take_evicted()
        self.scheduler = self.scheduler_class(
            self.allocator,
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            enable_chunked_prefill=config["enable_chunked_prefill"],
            scheduling_policy=config["policy"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            watermark=config["watermark"],
            reserve_full_isl=config["reserve_full_isl"],
            max_loras=config["max_loras"],
            engine_loop=engine_loop,
            detail=detail,
            upstream_faults=True,
        )
        self._read_requests(case["requests"])
        self.totals: Counter[str] = Counter()
        self.num_records = 0
        self.why = ""

    def _read_requests(self, rows: list[Record]) -> None:
        """Requests by arrival step and aborts by step, in list order."""
        times = sorted({_arrival_time(row) for row in rows})
        order = {time: index for index, time in enumerate(times)}
        self.arrivals: dict[int, list[Request]] = {}
        self.aborts: dict[int, list[str]] = {}
        self.mid_aborts: dict[int, list[str]] = {}
        self.last_event = -1
        for row in rows:
            arrival = row["arrival_step"]
            request = _request(row, order[_arrival_time(row)])
            self.arrivals.setdefault(arrival, []).append(request)
            self.last_event = max(self.last_event, arrival)
            if (step := row.get("abort_at_step")) is not None:
                is_mid = row.get("abort_mid", False)
                (self.mid_aborts if is_mid else self.aborts).setdefault(step, []).append(row["id"])
                self.last_event = max(self.last_event, step + is_mid)

    def records(self) -> Iterator[Record]:
        """One record per step."""
        for step in range(MAX_STEPS):
            self._add_arrivals(step)
            aborted = self._abort(self.aborts.get(step, ()))
            if not self.scheduler.has_work and step >= self.last_event and not aborted:
                self.why = "done"
                return
            plan = self.scheduler.schedule(step)
            record = self._plan_record(step, plan)
            outcome = self.scheduler.complete(plan)
            self._add_outcome(record, outcome)
            self._close(record, aborted)
            yield record
            if self._is_stalled(plan, step):
                return
        self.why = "max_steps"

    def _is_stalled(self, plan: StepPlan, step: int) -> bool:
        """Nothing ran, nothing was preempted, nothing is to come, and somebody is left."""
        is_idle = plan.is_empty and not plan.preempted
        if is_idle and step >= self.last_event and self.scheduler.has_work:
            self.why = "stalled"
        return bool(self.why)

    def _add_arrivals(self, step: int) -> None:
        for request in self.arrivals.get(step, ()):
            self.scheduler.submit(request)

    def _abort(self, request_ids: list[str] | tuple[str, ...]) -> list[str]:
        aborted = [request_id for request_id in request_ids if self.scheduler.abort(request_id)]
        self.totals["aborted"] += len(aborted)
        return aborted

    def _plan_record(self, step: int, plan: StepPlan) -> Record:
        entries = scheduled_entries(plan)
        record: Record = {"t": step, "s": entries}
        if self.is_compact:
            record["s"] = [entry for entry in entries if not _is_plain_decode(entry)]
            record["d"] = len(entries) - len(record["s"])
        record["p"] = [preemption.seq.request.request_id for preemption in plan.preempted]
        if record["p"]:
            record["w"] = [group.request_id for group in self.scheduler.waiting][:_NUM_QUEUE_IDS]
        record["e"] = self.allocator.take_evicted()
        record["fr"] = [self.allocator.num_free_blocks]
        record["q"] = [self.scheduler.num_running, len(self.scheduler.waiting)]
        record["h"] = _checksum(";".join(_entry_text(entry) for entry in entries))
        self.totals["scheduled_tokens"] += sum(entry[2] for entry in entries)
        self.totals["preemptions"] += len(record["p"])
        self.totals["evictions"] += len(record["e"])
        return record

    def _add_outcome(self, record: Record, outcome: StepOutcome) -> None:
        record["f"] = [seq.request.request_id for seq in outcome.ended]
        self.totals["finished"] += len(record["f"])

    def _close(self, record: Record, aborted: list[str]) -> None:
        """Fields of the end of the step; empty lists that a record leaves out are dropped."""
        record["a"] = aborted
        record["fr"].append(self.allocator.num_free_blocks)
        record["nc"] = self.allocator.num_hashed_blocks
        record["fq"] = _checksum(",".join(map(str, self.allocator.free_block_ids())))
        for name in ("a", "am", "p", "k", "f", "e"):
            if not record.get(name, True):
                del record[name]
        self.num_records += 1

    def end_record(self) -> Record:
        """Why the run ended, and its totals."""
        scheduler = self.scheduler
        end: Record = {"end": self.why, "steps": self.num_records}
        for name in ("scheduled_tokens", "preemptions", "evictions", "finished", "aborted"):
            end[name] = self.totals[name]
        end["queries"], end["hits"] = scheduler.num_queried_tokens, scheduler.num_hit_tokens
        end["preempted_queries"], end["preempted_hits"] = scheduler.num_requeried_tokens, scheduler.num_rehit_tokens
        end["free"] = self.allocator.num_free_blocks
        if self.why != "done":
            groups = (*scheduler.running.values(), *scheduler.waiting)
            end["unfinished"] = [group.request_id for group in groups]
        return end

    def state(self) -> Record:
        """Running, waiting and free list, for the reader of a mismatch."""
        return {
            "running": [repr(seq) for seq in self.scheduler.running_sequences()],
            "waiting": [group.request_id for group in self.scheduler.waiting],
            "free": list(self.allocator.free_block_ids()),
        }


class AsyncDriver(Driver):
    """The clock of an asynchronous case: a queue of two batches, the older one applied after the newer is planned."""

    scheduler_class = VllmV1AsyncScheduler

    def __init__(self, case: Record, engine_loop: str, *, detail: bool = True) -> None:
        super().__init__(case, engine_loop, detail=detail)
        self.queue: deque[tuple[int, StepPlan]] = deque()
        self.is_dirty = False
        """A request ended since the last call of schedule."""

    def records(self) -> Iterator[Record]:
        late: list[str] = []
        for step in range(MAX_STEPS):
            aborted = self._abort(late)
            self._add_arrivals(step)
            aborted += self._abort(self.aborts.get(step, ()))
            was_in_flight = any(not plan.is_empty for _, plan in self.queue)
            if not (self.scheduler.has_work or step < self.last_event or aborted or was_in_flight):
                self.why = "done"
                return
            self.is_dirty = self.is_dirty or bool(aborted)
            plan, record = self._schedule(step)
            is_popped = self._pops(plan)
            late = [] if is_popped else self.mid_aborts.get(step, [])
            if is_popped:
                self._apply_oldest(record, self.mid_aborts.get(step, []))
            self._close(record, aborted)
            record["rs"] = _checksum(";".join(self._state_texts()))
            yield record
            if plan is not None and not was_in_flight and self._is_stalled(plan, step):
                return
        self.why = "max_steps"

    def _schedule(self, step: int) -> tuple[StepPlan | None, Record]:
        if not (self.scheduler.has_work or self.is_dirty):
            queue_lens = [self.scheduler.num_running, len(self.scheduler.waiting)]
            record: Record = {"t": step, "s": [], "fr": [self.allocator.num_free_blocks], "q": queue_lens, "h": 0}
            return None, record | {"d": 0} if self.is_compact else record
        plan = self.scheduler.schedule(step)
        self.is_dirty = False
        self.queue.append((step, plan))
        record = self._plan_record(step, plan)
        preempted = {preemption.seq.seq_id for preemption in plan.preempted}
        record["k"] = [seq.request.request_id for seq in plan.skipped if seq.seq_id not in preempted]
        return plan, record

    def _pops(self, plan: StepPlan | None) -> bool:
        """The oldest batch is applied, unless the queue is still to be filled."""
        if not self.queue:
            return False
        is_first = plan is not None and len(self.queue) == 1
        return not (is_first and plan is not None and (not plan.is_empty or self.scheduler.has_work))

    def _apply_oldest(self, record: Record, mid_aborts: list[str]) -> None:
        planned_at, plan = self.queue.popleft()
        record["am"] = self._abort(mid_aborts)
        outcome = self.scheduler.complete(plan)
        if not plan.is_empty:
            record["o"] = planned_at
        self._add_outcome(record, outcome)
        self.is_dirty = self.is_dirty or bool(record["am"] or outcome.ended)

    def _state_texts(self) -> Iterator[str]:
        waiting = [seq for group in self.scheduler.waiting for seq in group.seqs]
        for seq in (*self.scheduler.running_sequences(), *waiting):
            yield f"{seq.request.request_id}:{seq.num_tokens}:{seq.num_computed_tokens}:{seq.num_placeholders}"

    def end_record(self) -> Record:
        end = super().end_record()
        scheduler = self.scheduler
        assert isinstance(scheduler, VllmV1AsyncScheduler)
        end["stale"], end["discarded"] = scheduler.num_stale_tokens, scheduler.num_discarded_entries
        return end


def _arrival_time(row: Record) -> float:
    return float(row["arrival_time"] if "arrival_time" in row else row["arrival_step"])


def _request(row: Record, arrival: int) -> Request:
    output = row["output_token_ids"]
    return Request(
        request_id=row["id"],
        arrival_ns=arrival,
        prompt=TokenStream.from_ids(row["prompt_token_ids"]),
        output_len=len(output),
        max_output_len=row.get("max_tokens", len(output)),
        priority=row.get("priority", 0),
        namespace=Namespace(lora=row.get("lora"), salt=row.get("cache_salt")),
        output=TokenStream.from_ids(output),
    )


def scheduled_entries(plan: StepPlan) -> list[list[Any]]:
    """`[id, kind, tokens, tokens before, blocks]` of every sequence a detailed plan runs, in running order."""
    kinds = {admission.seq.seq_id: "R" if admission.is_resumed else "N" for admission in plan.admitted}
    blocks = {update.seq.seq_id: list(update.block_ids) for update in plan.table_updates}
    parts: list[tuple[Sequence, int]] = [(seq, 1) for seq in plan.decodes or ()]
    parts += [(chunk.seq, chunk.num_tokens) for chunk in plan.prefills]
    parts.sort(key=lambda part: part[0].rank)
    return [
        [
            seq.request.request_id,
            kinds.get(seq.seq_id, "C"),
            num_tokens,
            seq.num_computed_tokens - num_tokens,
            blocks.get(seq.seq_id, []),
        ]
        for seq, num_tokens in parts
    ]


def _is_plain_decode(entry: list[Any]) -> bool:
    return entry[1] == "C" and entry[2] == 1 and not entry[4]


def _entry_text(entry: list[Any]) -> str:
    request_id, kind, num_tokens, start, blocks = entry
    return f"{request_id}:{kind}:{num_tokens}:{start}:{','.join(map(str, blocks))}"


def _checksum(text: str) -> int:
    return crc32(text.encode())
