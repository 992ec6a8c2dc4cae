"""One simulation: parts in, a closed recorder out."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import simpy

from kvsim.cost.interface import CostModel
from kvsim.metrics.recorder import Recorder
from kvsim.request import Request
from kvsim.scheduling.interface import Scheduler
from kvsim.sim.server import AsyncServer, Clock, Observer, Server
from kvsim.types import NS_PER_S, KvsimError, Ns
from kvsim.workload.source import Source

MAX_NS = 2**62
"""Later than any step and any arrival: what fits into columns of 64 bits, differences included."""
SECONDS_PER_YEAR = 365.25 * 86400
COLLECT_EVERY = 50_000
"""Container objects between two looks for reference cycles while a simulation runs."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A finished simulation: what was recorded, and when it ended."""

    recorder: Recorder
    end_ns: Ns
    num_requests: int
    """Requests of the workload, those that the horizon cut off included."""


def simulate(
    scheduler: Scheduler,
    cost: CostModel,
    source: Source,
    *,
    horizon_ns: Ns | None = None,
    record: Iterable[str] = ("steps", "requests"),
    check: bool = False,
    observers: tuple[Observer, ...] = (),
    clock: Clock | None = None,
) -> Simulation:
    """Run the scheduler over the source until nothing is left, or the clock passes `horizon_ns`.

    A step that would end after the horizon does not happen. With `check`, every memory law is recomputed at every
    step. `clock` is told the time before the engine acts. Raises Deadlock, KvsimError if simulated time runs out, and
    LawViolation with `check`.
    """
    recorder = Recorder(scheduler, record=record, check=check)
    env = simpy.Environment(initial_time=0)
    server = _make_server(env, scheduler, cost, source, (recorder, *observers), clock)
    running = env.process(server.run())
    with _rare_collections():
        env.run(until=running | env.timeout(MAX_NS) if horizon_ns is None else horizon_ns + 1)
    if horizon_ns is None and running.is_alive:
        raise KvsimError(
            f"requests are left after {MAX_NS / NS_PER_S / SECONDS_PER_YEAR:.0f} years of simulated time, and the "
            f"clock holds no more: make steps cheaper (cost), or stop at a horizon"
        )
    end_ns = int(env.now) if horizon_ns is None else horizon_ns
    if horizon_ns is not None:
        recorder.on_horizon()
        server.take_due(horizon_ns)
    num_requests = server.num_submitted + source.num_left
    recorder.close(_not_arrived(source))
    return Simulation(recorder, end_ns, num_requests)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run makes hardly any reference cycles and many short-lived tuples: look for cycles less often meanwhile."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _make_server(
    env: simpy.Environment,
    scheduler: Scheduler,
    cost: CostModel,
    source: Source,
    observers: tuple[Observer, ...],
    clock: Clock | None,
) -> Server:
    if not getattr(scheduler, "plans_ahead", False):
        return Server(env, scheduler, cost, source, observers, clock)
    cpu_schedule_ns = int(getattr(cost, "cpu_schedule_ns", 0))
    return AsyncServer(env, scheduler, cost, source, observers, clock, cpu_schedule_ns=cpu_schedule_ns)


def _not_arrived(source: Source) -> list[Request]:
    """What an open workload would still have sent; the later turns of a closed one do not exist yet."""
    return source.take_due(MAX_NS) if source.num_left else []
