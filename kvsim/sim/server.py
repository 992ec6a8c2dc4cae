"""The engine as a SimPy process: one event per iteration, integer nanoseconds.

Arrivals need no events of their own: they are known or follow from completions, so the server takes those that
are due before it plans. An arrival at instant T is seen by the schedule made at T.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from typing import Any, Protocol

import simpy
from simpy.events import NORMAL

from kvsim.cost.interface import CostModel
from kvsim.request import Sequence
from kvsim.scheduling.continuous import LivelockError
from kvsim.scheduling.interface import Scheduler
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.types import KvsimError, Ns
from kvsim.workload.source import Source

MOST_FRUITLESS = 5_000
"""Preemptions without a token in between after which a run is said to go round in a circle; more with more requests."""


class Observer(Protocol):
    """Sees a run go by; must not change it."""

    def on_submit(self, request: Any, reason: str | None, now: Ns) -> None: ...

    def on_abort(self, request_id: str, sequences: tuple[Sequence, ...], now: Ns) -> None: ...

    def on_plan(self, plan: StepPlan, now: Ns) -> None: ...

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None: ...


class Clock(Protocol):
    """Wants to know the time before the engine acts: a journal of blocks, which has no clock of its own."""

    now_ns: Ns


class Deadlock(KvsimError):
    """Work is left, nothing can run, and nothing is to come."""


def changes_nothing(plan: StepPlan) -> bool:
    """The plan computes nothing and moved nobody: time cannot pass by it. Its scheduler still wants it completed."""
    return plan.is_empty and not plan.preempted and not plan.rejected


class StepEnd(simpy.Event):
    """The end of the step under way: one event, which is scheduled again for each step once it was processed."""

    def __init__(self, env: simpy.Environment) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None

    def after(self, delay_ns: Ns) -> StepEnd:
        """Happen `delay_ns` from now on."""
        if delay_ns < 0:
            raise ValueError(f"Negative delay {delay_ns}")
        self.callbacks = []
        self.env.schedule(self, NORMAL, delay_ns)
        return self


class Server:
    """Runs a scheduler on a clock until the source is dry and nothing is left to do."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        cost: CostModel,
        source: Source,
        observers: tuple[Observer, ...],
        clock: Clock | None = None,
    ) -> None:
        self.env = env
        self.clock = clock
        self.scheduler = scheduler
        self.cost = cost
        self.source = source
        self.observers = observers
        self.num_submitted = 0
        self.num_fruitless = 0
        """Preemptions since anybody emitted a token."""
        self._aborts: list[tuple[Ns, int, str]] = []

    def run(self) -> Generator[simpy.Event, None, None]:
        """The loop: take what is due, plan, let the step's time pass, apply it."""
        env, scheduler, clock = self.env, self.scheduler, self.clock
        schedule, complete, step_ns = scheduler.schedule, scheduler.complete, self.cost.step_ns
        source, aborts, timeout, step_end = self.source, self._aborts, env.timeout, StepEnd(env)
        on_plan = [observer.on_plan for observer in self.observers]
        on_step = [observer.on_step for observer in self.observers]
        wake_ns = source.next_ns()
        end_ns = int(env.now)
        # Work goes only with a request that ends: at other times nobody need be asked whether some is left.
        may_be_done = True
        while True:
            # Nobody else moves the clock.
            start_ns = end_ns
            if clock is not None:
                clock.now_ns = start_ns
            if aborts or (wake_ns is not None and wake_ns <= start_ns):
                self.take_due(start_ns)
                wake_ns = source.next_ns()
                may_be_done = True
            if may_be_done and not scheduler.has_work:
                if wake_ns is None:
                    return
                yield timeout(wake_ns - start_ns)
                end_ns = wake_ns
                continue
            may_be_done = False
            plan = schedule(start_ns)
            for notify in on_plan:
                notify(plan, start_ns)
            shape = plan.shape
            if not shape.num_decodes and changes_nothing(plan):
                complete(plan)
                end_ns = self._next_event_ns()
                yield timeout(end_ns - start_ns)
                continue
            duration_ns = step_ns(shape)
            yield step_end.after(duration_ns)
            end_ns = start_ns + duration_ns
            if clock is not None:
                clock.now_ns = end_ns
            outcome = complete(plan)
            if plan.preempted or self.num_fruitless:
                self._count_fruitless(plan, outcome)
            for notify_step in on_step:
                notify_step(plan, outcome, start_ns, end_ns)
            if outcome.finished_requests or plan.rejected:
                self._tell_ends(plan, outcome, end_ns)
                wake_ns = source.next_ns()
                may_be_done = True

    def _count_fruitless(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Preemptions since the last token: the engines' own guard is off where their faults are asked for."""
        if outcome.num_emitted_tokens:
            self.num_fruitless = 0
            return
        self.num_fruitless += len(plan.preempted)
        if self.num_fruitless > MOST_FRUITLESS + 20 * self.num_submitted:
            request_id = plan.preempted[-1].seq.request.request_id
            raise LivelockError(
                f"livelock: {self.num_fruitless} preemptions in a row and not one token emitted; the last victim is "
                f"request {request_id!r}: enlarge the pool, lower max_num_seqs, or switch upstream_faults off"
            )

    def _tell_ends(self, plan: StepPlan, outcome: StepOutcome, now: Ns) -> None:
        for request_id in outcome.finished_requests:
            self.source.on_end(request_id, now)
        for rejection in plan.rejected:
            self.source.on_end(rejection.seq.request.request_id, now)

    def take_due(self, now: Ns) -> None:
        """Deliver the arrivals and aborts that are due, arrivals first; an abort may be what others waited for."""
        while True:
            next_ns = self.source.next_ns()
            if next_ns is not None and next_ns <= now:
                for request in self.source.take_due(now):
                    self._submit(request, now)
            elif self._aborts and self._aborts[0][0] <= now:
                _, _, request_id = heapq.heappop(self._aborts)
                self._abort(request_id, now)
            else:
                return

    def _submit(self, request: Any, now: Ns) -> None:
        rejection = self.scheduler.submit(request)
        reason = None if rejection is None else rejection.reason
        for observer in self.observers:
            observer.on_submit(request, reason, now)
        self.num_submitted += 1
        if rejection is not None:
            # It was refused when it arrived, which a step under way lets nobody see.
            self.source.on_end(request.request_id, request.arrival_ns)
        elif request.abort_ns is not None:
            heapq.heappush(self._aborts, (request.abort_ns, self.num_submitted, request.request_id))

    def _abort(self, request_id: str, now: Ns) -> None:
        sequences = self.scheduler.abort(request_id)
        if sequences:
            for observer in self.observers:
                observer.on_abort(request_id, sequences, now)
            self.source.on_end(request_id, now)

    def _next_event_ns(self) -> Ns:
        """When something can change although nothing runs: the next arrival or abort. Raises Deadlock."""
        times = [self._aborts[0][0]] if self._aborts else []
        arrival_ns = self.source.next_ns()
        if arrival_ns is not None:
            times.append(arrival_ns)
        if not times:
            raise Deadlock(
                f"nothing can run and nothing is to come, yet requests are left: {self.scheduler.describe_block()}"
            )
        return min(times)


class AsyncServer(Server):
    """The loop of asynchronous scheduling: the next step is planned while the GPU runs the one before.

    At the instant at which step t-1 starts on the GPU, step t is planned; when t-1 ends its tokens are applied and t
    starts. The CPU's time hides behind the step unless it is longer (`cpu_schedule_ns`).
    """

    def __init__(self, *args: Any, cpu_schedule_ns: Ns = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cpu_schedule_ns = cpu_schedule_ns

    def run(self) -> Generator[simpy.Event, None, None]:
        """One iteration: plan step t, let step t-1 end, apply it."""
        env, scheduler = self.env, self.scheduler
        in_flight: StepPlan | None = None
        while True:
            now = int(env.now)
            if self.clock is not None:
                self.clock.now_ns = now
            self.take_due(now)
            if in_flight is None and not scheduler.has_work:
                wake_ns = self.source.next_ns()
                if wake_ns is None:
                    return
                yield env.timeout(wake_ns - now)
                continue
            plan = scheduler.schedule(now)
            for observer in self.observers:
                observer.on_plan(plan, now)
            runs = None if changes_nothing(plan) else plan
            if in_flight is not None:
                duration_ns = max(self.cost.step_ns(in_flight.shape), self.cpu_schedule_ns)
                yield env.timeout(duration_ns)
                self._apply(in_flight, now, now + duration_ns)
            elif runs is None:
                yield env.timeout(self._next_event_ns() - now)
            if runs is None:
                scheduler.complete(plan)
            in_flight = runs

    def _apply(self, plan: StepPlan, start_ns: Ns, end_ns: Ns) -> None:
        if self.clock is not None:
            self.clock.now_ns = end_ns
        outcome = self.scheduler.complete(plan)
        if plan.preempted or self.num_fruitless:
            self._count_fruitless(plan, outcome)
        for observer in self.observers:
            observer.on_step(plan, outcome, start_ns, end_ns)
        if outcome.finished_requests or plan.rejected:
            self._tell_ends(plan, outcome, end_ns)
