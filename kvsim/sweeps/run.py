"""Run a grid: what is on disk is kept, the rest is computed, and the tables come out the same either way."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.runs import resolve
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.sweeps.executors import dask_executor, default_jobs, local_executor
from kvsim.sweeps.grid import Point, files_of, make_grid, seeds_of, values_of, vary_of
from kvsim.sweeps.store import PICTURES, PointStore, owned, write_whole
from kvsim.sweeps.tables import aggregate, rows_of, write_tables
from kvsim.sweeps.work import Done, File, Task, work
from kvsim.types import Progress, ScenarioError, shown

if TYPE_CHECKING:
    import pandas as pd

WORKER_DIED = "its worker process died: out of memory?"


@dataclass(frozen=True)
class SweepResult:
    """A sweep's rows (as in sweep.csv) and what was varied."""

    rows: list[dict[str, Any]] = field(repr=False)
    keys: tuple[str, ...]
    out: Path | None = None

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
    force: bool = False,
    progress: Progress | None = None,
    **values: Any,
) -> SweepResult:
    """Run a scenario over a grid of values: `sweep("chat.yaml", {"allocator.block_size": [8, 16, 32]}, seeds=3)`.

    What is not given comes from the scenario's `sweep:` block. With `out` every finished point is kept there, and the
    same call continues where it was stopped; `force` lets it replace the results of another command. Raises
    ScenarioError.
    """
    if vary is not None and not isinstance(vary, Mapping):
        raise ScenarioError(
            f"vary is {shown(vary)}; must be a mapping of keys to values, such as {{'allocator.block_size': [8, 16]}}"
        )
    base = resolve(scenario, values)
    grid = _grid(base, vary, seeds, zip)
    points, keys = grid.points, tuple(grid.vary)
    with _Workers(jobs or default_jobs(), dask) as workers:
        if out is None:
            return SweepResult(rows_of(points, _Runner(points, workers, None, progress).run()), keys)
        with owned(Path(out), force=force) as store:
            files = _Files(Path(out), points, keys, base.with_values({"sweep": grid.block()}).to_yaml())
            runner = _Runner(points, workers, store, progress)
            try:
                runner.run()
            except KeyboardInterrupt:
                files.write(runner.results, plots=False)
                raise
            rows = files.write(runner.results, plots=plots, workers=workers)
            return SweepResult(rows, keys, Path(out))


@dataclass(frozen=True)
class _Grid:
    """What is varied, and the points that makes."""

    vary: Mapping[str, list[Any]]
    is_zipped: bool
    seeds: tuple[int, ...]
    points: Sequence[Point]

    def block(self) -> dict[str, Any]:
        """The `sweep:` block that asks for the same."""
        return {"vary": self.vary, "zip": self.is_zipped, "seeds": list(self.seeds)}


def _grid(
    base: ResolvedScenario, vary: Mapping[str, Any] | None, seeds: int | Sequence[int] | None, zipped: bool | None
) -> _Grid:
    """The grid that the arguments ask for; what they leave out is the scenario's. Raises ScenarioError."""
    block = base.scenario.sweep
    chosen = {name: values_of(given, f"vary {name}") for name, given in (vary or {}).items()}
    option = "--vary"
    if not chosen and block is not None:
        chosen, option = vary_of(block), "sweep.vary"
    if not chosen:
        raise ScenarioError("sweep: nothing is varied; give --vary key=a,b,c, or the scenario a sweep: block")
    given_seeds = seeds if seeds is not None else block.seeds if block is not None else 1
    is_zipped = zipped if zipped is not None else block.zip if block is not None else False
    chosen_seeds = seeds_of(given_seeds, base.scenario.seed)
    points = make_grid(base, chosen, seeds=chosen_seeds, is_zipped=is_zipped, option=option)
    return _Grid(chosen, is_zipped, chosen_seeds, points)


class _Workers:
    """Who computes the points: this process, processes of its own, or a cluster. Started when they are first needed."""

    def __init__(self, jobs: int, dask: str | None = None) -> None:
        self.jobs = jobs
        self.dask = dask
        self._open = ExitStack()
        self._executor: Executor | None = None

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._executor = None
        return self._open.__exit__(*error)

    @property
    def is_this_process(self) -> bool:
        return self.dask is None and self.jobs == 1

    @property
    def share_no_disk(self) -> bool:
        return self.dask is not None

    @contextmanager
    def executor(self, num_points: int) -> Iterator[Executor]:
        """The same one each time; after an error a new one."""
        if self._executor is None:
            jobs = min(self.jobs, num_points)
            self._executor = self._open.enter_context(
                local_executor(jobs) if self.dask is None else dask_executor(self.dask)
            )
        try:
            yield self._executor
        except BrokenExecutor:
            self._executor = None
            self._open.close()
            raise

    def run_each(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run tasks on this machine: side by side where processes are at hand, else one after the other."""
        if self._executor is not None and not self.share_no_disk:
            try:
                for future in [self._executor.submit(task) for task in tasks]:
                    future.result()
                return
            except BrokenExecutor:
                self._executor = None
        for task in tasks:
            task()


class _Runner:
    """A grid under way: which points are done, and where they are kept."""

    def __init__(
        self, points: Sequence[Point], workers: _Workers, store: PointStore | None, progress: Progress | None
    ) -> None:
        self.points = points
        self.workers = workers
        self.store = store
        self.progress = progress
        self.results: dict[int, Done] = {}

    def run(self) -> dict[int, Done]:
        """Compute what is missing; `results` has what is done so far, also when this is interrupted."""
        self._take_stock()
        while missing := [point for point in self.points if point.index not in self.results]:
            num_before = len(self.results)
            try:
                self._compute(missing)
            except BrokenExecutor:
                if len(self.results) == num_before:
                    self._one_by_one(missing)
        return self.results

    def _take_stock(self) -> None:
        for point in self.points:
            if self.store is not None and (done := self.store.load(point)) is not None:
                self.results[point.index] = done
        self._tell()

    def _compute(self, points: Sequence[Point]) -> None:
        if self.workers.is_this_process:
            for point in points:
                self._keep(point, *_outcome(partial(work, _task(point))))
            return
        pack = cache(_pack) if self.workers.share_no_disk else None
        with self.workers.executor(len(points)) as executor:
            futures = {}
            for point in points:
                futures[executor.submit(work, _task(point, pack))] = point
            for future in as_completed(futures):
                self._keep(futures[future], *_outcome(future.result))

    def _one_by_one(self, points: Sequence[Point]) -> None:
        """Processes die before any of these points is done: find out which of them kill theirs."""
        for point in points:
            try:
                self._compute([point])
            except BrokenExecutor:
                self._keep(point, Done({}, WORKER_DIED), False)

    def _keep(self, point: Point, done: Done, is_final: bool) -> None:
        if self.store is not None and is_final:
            self.store.save(point, done)
        self.results[point.index] = done
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(len(self.results), len(self.points))


def _outcome(result: Callable[[], Done]) -> tuple[Done, bool]:
    """What a point gave, and whether it would give that again: a machine's trouble is not kept."""
    try:
        return result(), True
    except BrokenExecutor:
        raise
    except Exception as error:
        return Done({}, f"worker: {type(error).__name__}: {error}"), False


@dataclass(frozen=True)
class _Files:
    """What a sweep writes beside its points."""

    out: Path
    points: Sequence[Point]
    keys: tuple[str, ...]
    scenario: str

    def write(
        self, results: Mapping[int, Done], *, plots: bool, workers: _Workers | None = None
    ) -> list[dict[str, Any]]:
        """Tables of what is done, and pictures, which `workers` may draw; each file is whole or as it was."""
        rows = rows_of(self.points, results)
        write_whole(self.out / "scenario.yaml", lambda path: path.write_text(self.scenario, encoding="utf-8"))
        write_tables(self.out, rows, self.keys)
        has_pictures = plots and any(row["status"] == "ok" for row in rows)
        drawn = self._draw(rows, workers or _Workers(1)) if has_pictures else set()
        for pattern in PICTURES:
            for picture in self.out.glob(pattern):
                if picture.name not in drawn:
                    picture.unlink(missing_ok=True)
        return rows

    def _draw(self, rows: Sequence[Mapping[str, Any]], workers: _Workers) -> set[str]:
        """The names of the pictures that were put in place."""
        from kvsim.report.plots import SWEEP_METRICS

        drawn = [row for row in rows if row["status"] == "ok"]
        with _aside(self.out) as folder:
            workers.run_each([partial(_draw_metric, drawn, list(self.keys), folder, name) for name in SWEEP_METRICS])
            names = sorted(picture.name for picture in folder.iterdir())
            for name in names:
                (folder / name).replace(self.out / name)
        return set(names)


def _draw_metric(rows: Sequence[Mapping[str, Any]], keys: list[str], folder: Path, metric: str) -> None:
    import pandas as pd

    from kvsim.report.plots import write_sweep_plots

    write_sweep_plots(pd.DataFrame(rows), keys, folder, metrics=[metric])


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    folder = out / ".pictures.kvsim-tmp"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        raise ScenarioError(
            f"{out}: cannot be written ({error.strerror}); make room, or choose another folder with --out"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _task(point: Point, pack: Callable[[str], bytes] | None = None) -> Task:
    """The point as a worker gets it; files come along where `pack` says how."""
    files = files_of(point.scenario) if pack is not None else []
    return Task(point.scenario.to_yaml(), tuple(File(key, name, pack(name)) for key, name in files if pack))


def _pack(name: str) -> bytes:
    return zlib.compress(Path(name).read_bytes())
