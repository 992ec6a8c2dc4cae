"""The numbered laws that a run can break, watched from outside: an observer, and guards around what it observes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from kvsim.memory.paged import PagedAllocator
from kvsim.registry import build
from kvsim.request import LEGAL_MOVES, Sequence, Status
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.sim.run import Simulation, simulate
from kvsim.types import AllocatorError, LawViolation

LIVE = (Status.WAITING, Status.RUNNING, Status.SWAPPED)


def require(law: int, holds: bool, text: str) -> None:
    if not holds:
        raise LawViolation(f"law {law}: {text}")


class LawWatch:
    """Laws 1, 3, 4, 5, 8, 11 and 13, from what an observer sees; by counting anew, with no help from an audit."""

    def __init__(self, scheduler: Any, *, audits: bool = True) -> None:
        self.scheduler = scheduler
        self.audits = audits
        self.allocator = scheduler.allocator
        self.now = 0
        self.submitted: set[str] = set()
        self.ends: dict[str, str] = {}
        self.emitted: dict[int, int] = {}
        """Tokens of each live sequence, as of the last step."""
        self.num_emitted = 0
        self.num_reported = 0
        self.stored: dict[int, int] = {}
        """Stored tokens of each running sequence when it was last looked at."""

    def on_submit(self, request: Any, reason: str | None, now: int) -> None:
        self._tick(now)
        require(5, request.arrival_ns <= now, f"{request.request_id} is submitted before it arrives")
        require(1, request.request_id not in self.submitted, f"{request.request_id} is submitted twice")
        self.submitted.add(request.request_id)
        if reason is not None:
            self._end(request.request_id, "rejected")
            require(7, any(char.isdigit() for char in reason), f"a reason without its numbers: {reason}")

    def on_abort(self, request_id: str, sequences: Any, now: int) -> None:
        self._tick(now)
        for seq in sequences:
            require(1, seq.status is Status.ABORTED, f"{seq} was aborted")
            self.num_emitted += seq.num_output_tokens - self.emitted.pop(seq.seq_id, 0)
        self._end(request_id, "aborted")

    def on_plan(self, plan: Any, now: int) -> None:
        self._tick(now)
        for rejection in plan.rejected:
            self._end(rejection.seq.request.request_id, "rejected")
        self._check_places()
        self._check_tables()
        self._check_texts()

    def on_step(self, plan: Any, outcome: Any, start_ns: int, end_ns: int) -> None:
        require(3, start_ns < end_ns, f"step {plan.step} goes from {start_ns} to {end_ns}")
        self._tick(end_ns)
        for request_id in outcome.finished_requests:
            self._end(request_id, "finished")
        self._check_emissions(outcome)
        self._check_places()
        self._check_tables()
        if self.audits:
            self.allocator.audit()

    def _tick(self, now: int) -> None:
        require(3, now >= self.now, f"the clock goes from {self.now} to {now}")
        self.now = now

    def _end(self, request_id: str, how: str) -> None:
        require(1, request_id in self.submitted, f"{request_id} is {how}, and nobody submitted it")
        require(1, request_id not in self.ends, f"{request_id} is {how}, and was {self.ends.get(request_id)} before")
        self.ends[request_id] = how

    def _check_places(self) -> None:
        live = self.scheduler.live_sequences()
        twice = [seq_id for seq_id, number in Counter(seq.seq_id for seq in live).items() if number > 1]
        require(1, not twice, f"sequences {twice} are in two places")
        for seq in live:
            require(1, seq.status in LIVE, f"{seq} is among the living")
        owners = {seq.request.request_id for seq in live}
        expected = self.submitted - self.ends.keys()
        require(1, owners == expected, f"requests {sorted(owners ^ expected)} are lost, or live on after their end")

    def _check_tables(self) -> None:
        if not isinstance(self.allocator, PagedAllocator):
            return
        allocator, size = self.allocator, self.allocator.block_size
        ring = allocator.window_blocks or None
        running = [seq for seq in self.scheduler.live_sequences() if seq.status is Status.RUNNING]
        tables = {seq.seq_id: allocator.block_table(seq.seq_id) for seq in running if allocator.has_table(seq.seq_id)}
        named = Counter(block_id for table in tables.values() for block_id in set(table))
        for block_id, number in named.items():
            count = allocator.ref_count(block_id)
            require(4, count == number, f"block {block_id} has ref count {count}, and {number} tables name it")
        usage = allocator.usage()
        require(4, usage.num_used == len(named), f"{usage.num_used} blocks are used, tables name {len(named)}")
        for seq in running:
            table, stored = tables[seq.seq_id], allocator.num_tokens(seq.seq_id)
            require(13, len(table) == -(-stored // size), f"{seq} stores {stored} tokens in {len(table)} blocks")
            has_written = stored > self.stored.get(seq.seq_id, stored)
            is_open = stored % size > 0 or len(table) > (ring or len(table))
            if has_written and is_open:
                require(8, named[table[-1]] == 1, f"{seq} writes into block {table[-1]}, which others read")
        self.stored = {seq.seq_id: allocator.num_tokens(seq.seq_id) for seq in running}

    def _check_texts(self) -> None:
        """One block, one prefix: sequences that name a block at the same place agree on the prompt up to its end."""
        if not getattr(self.allocator, "enable_prefix_caching", False):
            return
        size = self.allocator.block_size
        texts: dict[int, Any] = {}
        for seq in self.scheduler.live_sequences():
            request = seq.request
            if seq.status is not Status.RUNNING:
                continue
            table = self.allocator.block_table(seq.seq_id)
            for index, block_id in enumerate(table[: request.prompt_len // size]):
                text = (request.namespace, request.prompt.content(0, (index + 1) * size))
                require(11, texts.setdefault(block_id, text) == text, f"block {block_id} stands for two texts")

    def _check_emissions(self, outcome: Any) -> None:
        forked = {fork.child.seq_id: fork for fork in outcome.forks}
        live = {seq.seq_id: seq for seq in self.scheduler.live_sequences()}
        live |= {seq.seq_id: seq for seq in (*outcome.ended, *outcome.pruned)}
        for seq_id, seq in live.items():
            # A beam's child inherits its parent's tokens.
            is_beam = seq.request.sampling.beam_width > 0 and seq_id in forked and seq_id not in self.emitted
            before = seq.num_output_tokens if is_beam else self.emitted.get(seq_id, 0)
            more = seq.num_output_tokens - before
            require(5, 0 <= more <= 1, f"{seq} emitted {more} tokens in one step")
            self.num_emitted += more
            self.emitted[seq_id] = seq.num_output_tokens
        for seq in (*outcome.ended, *outcome.pruned):
            self.emitted.pop(seq.seq_id, None)
        self.num_reported += outcome.num_emitted_tokens
        require(5, self.num_reported == self.num_emitted,
                f"{self.num_reported} tokens are reported, sequences have {self.num_emitted}")  # fmt: skip


@contextmanager
def legal_moves_only() -> Iterator[None]:
    """Law 2: whoever sets a status may only make a legal move."""
    slot = Sequence.__dict__["status"]

    def set_status(seq: Sequence, status: Status) -> None:
        before = getattr(seq, "status", None)
        legal = before is None or status is before or status in LEGAL_MOVES[before]
        require(2, legal, f"{seq.request.request_id} goes from {before} to {status}")
        slot.__set__(seq, status)

    with mock.patch.object(Sequence, "status", property(lambda seq: slot.__get__(seq, Sequence), set_status)):
        yield


COMMANDS = ("allocate", "append_slots", "register", "fork", "free", "swap_out", "swap_in")


def guard_commands(allocator: Any) -> None:
    """Law 7: a command that raises, or answers None where it would move something, changed nothing."""
    for name in COMMANDS:
        if hasattr(allocator, name):
            setattr(allocator, name, _guarded(allocator, name, getattr(allocator, name)))


def _guarded(allocator: Any, name: str, command: Any) -> Any:
    def guarded(*args: Any, **keywords: Any) -> Any:
        before = _snapshot(allocator)
        try:
            result = command(*args, **keywords)
        except AllocatorError:
            require(7, _snapshot(allocator) == before, f"{name} was refused and changed something")
            raise
        if result is None and name.startswith("swap"):
            require(7, _snapshot(allocator) == before, f"{name} was refused and changed something")
        return result

    return guarded


def _snapshot(allocator: Any) -> Any:
    if not isinstance(allocator, PagedAllocator):
        return allocator.usage()
    tables = {**allocator.tables(), **allocator.swapped_tables()}
    held = {
        seq_id: (tuple(table.block_ids), table.num_tokens, table.num_registered) for seq_id, table in tables.items()
    }
    free = (allocator.free_block_ids(), allocator.free_host_block_ids())
    return held, free, allocator.ref_counts(), allocator.host_ref_counts(), allocator.usage()


def watched_run(scenario: dict[str, Any], *, audits: bool = True) -> tuple[Simulation, LawWatch]:
    """Run with every law watched: those above, and (`audits`) the allocator's own audit and the ledger of `--check`."""
    resolved = scenario_from_dict(scenario).scenario
    engine = build(resolved)
    watch = LawWatch(engine.scheduler, audits=audits)
    guard_commands(engine.scheduler.allocator)
    with ExitStack() as stack:
        stack.enter_context(legal_moves_only())
        simulation = simulate(
            engine.scheduler, engine.cost, engine.source, horizon_ns=resolved.horizon, check=audits, observers=(watch,)
        )
    if resolved.horizon is None:
        require(1, watch.ends.keys() == watch.submitted, f"{watch.submitted - watch.ends.keys()} came to no end")
        usage = engine.scheduler.allocator.usage()
        require(4, usage.num_used == usage.num_host_used == 0, f"the last one left {usage}")
    _check_order(simulation)
    return simulation, watch


def _check_order(simulation: Simulation) -> None:
    """Law 5: arrival <= admission <= first token <= end."""
    from kvsim.metrics.export import request_columns

    columns = request_columns(simulation.recorder)
    names = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
    for request_id, *times in zip(columns["request_id"], *(columns[name] for name in names), strict=True):
        known = [float(time) for time in times if time is not None and time == time]
        require(5, known == sorted(known), f"{request_id} goes through {known}")
