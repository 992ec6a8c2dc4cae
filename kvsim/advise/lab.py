"""Where advice gets its figures: variants of one scenario, simulated with the same seeds, each run once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvsim.advise.estimate import Estimate, estimate, ratio
from kvsim.scenario.pool import Pool
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.sweeps.work import Done, Task, work
from kvsim.types import KvsimError, ScenarioError

SLO_SHARE = 0.95
"""Share of the requests that must meet the SLO."""

Values = Mapping[str, Any]
Worker = Callable[[Task], Done]


@dataclass(frozen=True)
class Run:
    """One simulation: its number, what was changed, and its flattened summary (empty if it failed)."""

    number: int
    topic: str
    values: dict[str, Any]
    seed: int
    summary: dict[str, Any] = field(repr=False)
    error: str = ""

    @cached_property
    def attainment(self) -> float:
        """Share of the requests that meet every goal.

        Those whose client gave up, or that the horizon came before, do not count; rejected and unfinished ones miss.
        """
        summary = self.summary
        wanted = summary.get("num_requests", 0) - summary.get("num_aborted", 0) - summary.get("num_not_arrived", 0)
        if self.error or wanted <= 0:
            return 0.0
        goodput, duration = summary.get("request_goodput"), summary["duration"]
        # A number of requests again: as a float it would differ in its last digits between runs that meet alike.
        return round(goodput * duration) / wanted if goodput is not None else 0.0

    @property
    def meets_slo(self) -> bool:
        return self.attainment >= SLO_SHARE

    def __getitem__(self, name: str) -> float:
        value = self.summary.get(name)
        return 0.0 if value is None else float(value)


@dataclass(frozen=True)
class Runs:
    """One variant with every seed."""

    runs: tuple[Run, ...]

    @property
    def error(self) -> str:
        """Why a seed has no figures; empty if all have."""
        return next((run.error for run in self.runs if run.error), "")

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(run.number for run in self.runs)

    def values(self, name: str) -> list[float]:
        """A figure of every seed; None counts as 0."""
        return [run[name] for run in self.runs]

    def mean(self, name: str) -> Estimate:
        return estimate(self.values(name))

    @property
    def hit_share(self) -> float:
        """Share of the prompt tokens that the prefix cache held, over all seeds; 0 where none were looked up."""
        queries = sum(self.values("prefix_cache_queries"))
        return sum(self.values("prefix_cache_hits")) / queries if queries else 0.0

    @property
    def attainment(self) -> Estimate:
        return estimate([run.attainment for run in self.runs])

    def gain_over(self, other: Runs, name: str) -> Estimate | None:
        """Relative difference of a figure, seed by seed."""
        return ratio(self.values(name), other.values(name))


class Lab:
    """Simulates variants of `base`, in parallel where there is an executor; asks for nothing twice."""

    def __init__(
        self,
        base: ResolvedScenario,
        seeds: Sequence[int],
        executor: Executor | None = None,
        tell: Callable[[int], None] | None = None,
    ) -> None:
        self.base = base
        self.seeds = tuple(seeds)
        self.topic = ""
        self.log: list[Run] = []
        self._executor = executor
        self._tell = tell
        self._known: dict[tuple[str, str, int], Run] = {}

    @cached_property
    def pool(self) -> Pool:
        """The KV memory of the base scenario."""
        return Pool(self.base.scenario)

    @property
    def other_seeds(self) -> tuple[int, ...]:
        """As many seeds again, none of which any answer was drawn from."""
        return tuple(max(self.seeds) + 1 + index for index in range(len(self.seeds)))

    def try_out(
        self, variants: Sequence[Values], seeds: Sequence[int] | None = None, worker: Worker = work
    ) -> list[Runs]:
        """Every variant with every seed."""
        chosen = self.seeds if seeds is None else tuple(seeds)
        runs = self.run([(values, seed) for values in variants for seed in chosen], worker)
        size = len(chosen)
        return [Runs(tuple(runs[index * size : (index + 1) * size])) for index in range(len(variants))]

    def run(self, pairs: Sequence[tuple[Values, int]], worker: Worker = work) -> list[Run]:
        """Single (variant, seed) pairs."""
        keys = [(worker.__name__, repr(sorted(values.items())), seed) for values, seed in pairs]
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._known}
        for (key, (values, seed)), done in zip(new.items(), self._simulate(list(new.values()), worker), strict=True):
            run = Run(len(self.log) + 1, self.topic, dict(values), seed, done.summary, done.error)
            self._known[key] = run
            self.log.append(run)
            if self._tell is not None:
                self._tell(len(self.log))
        return [self._known[key] for key in keys]

    def _simulate(self, pairs: Sequence[tuple[Values, int]], worker: Worker) -> Any:
        """Results in the order of the pairs, as they come."""
        tasks = [self._task(values, seed) for values, seed in pairs]
        if self._executor is None:
            return (task if isinstance(task, Done) else worker(task) for task in tasks)
        futures = [task if isinstance(task, Done) else self._executor.submit(worker, task) for task in tasks]
        return (future if isinstance(future, Done) else future.result() for future in futures)

    def _task(self, values: Values, seed: int) -> Task | Done:
        try:
            return Task(self.base.with_values({**values, "seed": seed}).to_yaml())
        except ScenarioError as error:
            return Done({}, str(error))


def peak_work(task: Task) -> Done:
    """A run of which only the most memory it had in use at once is wanted: `peak_blocks`."""
    from kvsim.runs import QUIET, run_resolved
    from kvsim.scenario.resolve import scenario_from_text

    try:
        resolved = scenario_from_text(task.scenario).with_values({"record": ["steps"]})
        result = run_resolved(resolved, out=None, options=QUIET)
    except KvsimError as error:
        return Done({}, str(error))
    return Done({"peak_blocks": int(max(result.step_columns["used_blocks"], default=0))})
