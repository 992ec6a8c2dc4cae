"""Run a grid: what is on disk is kept, the rest is computed, and the tables come out the same either way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.runs import resolve
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.sweeps.executors import dask_executor, default_jobs, local_executor
from kvsim.sweeps.grid import Point, make_grid, seeds_of, values_of, vary_of
from kvsim.sweeps.store import PointStore
from kvsim.sweeps.tables import aggregate, rows_of, write_tables
from kvsim.sweeps.work import Done, Task, work
from kvsim.types import ScenarioError

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]

MAX_POOL_FAILURES = 3
"""How often a pool of processes may die without finishing a point before its points count as failed."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep's rows (as in sweep.csv) and what was varied."""

    rows: list[dict[str, Any]] = field(repr=False)
    keys: tuple[str, ...]
    out: Path | None = None
    is_complete: bool = True

    @property
    def num_failed(self) -> int:
        """Points without figures; their `reason` says why."""
        return sum(row["status"] == "failed" for row in self.rows)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per point."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @cached_property
    def aggregated(self) -> pd.DataFrame:
        """One row per combination of values: means over seeds, and 95 % intervals (`.ci95`)."""
        import pandas as pd

        return pd.DataFrame(aggregate(self.rows, self.keys))


def sweep(
    scenario: str | Path | dict[str, Any] | ResolvedScenario,
    vary: Mapping[str, Any] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    zip: bool | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    out: str | Path | None = None,
    plots: bool = False,
    progress: Progress | None = None,
    **values: Any,
) -> SweepResult:
    """Run a scenario over a grid of values: `sweep("chat.yaml", {"allocator.block_size": [8, 16, 32]}, seeds=3)`.

    What is not given comes from the scenario's `sweep:` block. With `out` every finished point is kept there, and the
    same call continues where it was stopped. Raises ScenarioError.
    """
    base = resolve(scenario, values)
    block = base.scenario.sweep
    chosen = {name: values_of(given, f"vary {name}") for name, given in (vary or {}).items()}
    if not chosen and block is not None:
        chosen = vary_of(block)
    if not chosen:
        raise ScenarioError("sweep: nothing is varied; give --vary key=a,b,c, or the scenario a sweep: block")
    given_seeds = seeds if seeds is not None else block.seeds if block is not None else 1
    is_zipped = zip if zip is not None else block.zip if block is not None else False
    points = make_grid(base, chosen, seeds=seeds_of(given_seeds, base.scenario.seed), is_zipped=is_zipped)
    runner = _Runner(points, tuple(chosen), None if out is None else Path(out), progress)
    return runner.run(jobs or default_jobs(), dask, plots)


class _Runner:
    """One sweep under way: which points are done, and where they are kept."""

    def __init__(self, points: list[Point], keys: tuple[str, ...], out: Path | None, progress: Progress | None) -> None:
        self.points = points
        self.keys = keys
        self.out = out
        self.progress = progress
        self.store = None if out is None else PointStore(out)
        self.results: dict[int, Done] = {}

    def run(self, jobs: int, dask: str | None, plots: bool) -> SweepResult:
        """Compute what is missing; an interrupt leaves the tables of what is done, and goes on."""
        self._take_stock()
        try:
            self._compute(jobs, dask)
        except KeyboardInterrupt:
            self._write(plots=False)
            raise
        rows = self._write(plots)
        return SweepResult(rows, self.keys, self.out)

    def _take_stock(self) -> None:
        for point in self.points:
            if point.scenario is None:
                self.results[point.index] = Done({}, point.error)
            elif self.store is not None and (done := self.store.load(point)) is not None:
                self.results[point.index] = done
        self._tell()

    def _missing(self) -> list[Point]:
        return [point for point in self.points if point.index not in self.results]

    def _compute(self, jobs: int, dask: str | None) -> None:
        if dask is None and jobs == 1:
            for point in self._missing():
                self._keep(point, work(_task(point, travels=False)))
            return
        num_failures = 0
        while missing := self._missing():
            num_before = len(self.results)
            try:
                with _executor(min(jobs, len(missing)), dask) as executor:
                    self._run_on(executor, missing, travels=dask is not None)
            except BrokenProcessPool:
                num_failures = num_failures + 1 if len(self.results) == num_before else 0
                if num_failures >= MAX_POOL_FAILURES:
                    for point in self._missing():
                        self._keep(point, Done({}, "its worker process died: out of memory?"), on_disk=False)

    def _run_on(self, executor: Executor, points: list[Point], *, travels: bool) -> None:
        futures: dict[Future[Done], Point] = {}
        for point in points:
            futures[executor.submit(work, _task(point, travels=travels))] = point
        for future in _as_completed(futures):
            point = futures[future]
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise error
            is_done = error is None
            self._keep(point, future.result() if is_done else Done({}, f"worker: {error}"), on_disk=is_done)

    def _keep(self, point: Point, done: Done, *, on_disk: bool = True) -> None:
        if self.store is not None and on_disk:
            self.store.save(point, done)
        self.results[point.index] = done
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(len(self.results), len(self.points))

    def _write(self, plots: bool) -> list[dict[str, Any]]:
        rows = rows_of(self.points, self.results)
        if self.out is not None:
            write_tables(self.out, rows, self.keys)
            if plots and any(row["status"] == "ok" for row in rows):
                import pandas as pd

                from kvsim.report.plots import write_sweep_plots

                write_sweep_plots(pd.DataFrame(rows), list(self.keys), self.out)
        return rows


def _executor(jobs: int, dask: str | None) -> AbstractContextManager[Executor]:
    return local_executor(jobs) if dask is None else dask_executor(dask)


def _as_completed(futures: dict[Future[Done], Point]) -> Any:
    """Futures as they finish; Dask's are not those of the standard library, but know how to wait."""
    first = next(iter(futures))
    if isinstance(first, Future):
        return as_completed(futures)
    from distributed import as_completed as dask_as_completed

    return dask_as_completed(list(futures))


def _task(point: Point, *, travels: bool) -> Task:
    assert point.scenario is not None
    text = point.scenario.to_yaml()
    if not travels:
        return Task(text)
    return Task(text, {name: Path(name).read_bytes() for name in _files(point.scenario)})


def _files(resolved: ResolvedScenario) -> list[str]:
    """Files that the scenario names: what a worker without our disk needs."""
    scenario = resolved.scenario
    named = (
        getattr(scenario.workload, "trace", None),
        scenario.model if isinstance(scenario.model, str) else None,
        getattr(scenario.cost, "profile", None),
    )
    return [name for name in named if isinstance(name, str) and Path(name).is_file()]
