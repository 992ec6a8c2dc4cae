"""Run a scenario and write its results: the one path that the CLI, the Python API, sweeps and figures share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim import __version__
from kvsim.metrics.export import request_columns, step_columns, write_json, write_records, write_table
from kvsim.metrics.outdir import output_dir
from kvsim.metrics.summary import Goals, summarise
from kvsim.result import CompareResult, RunResult
from kvsim.run_warnings import run_warnings
from kvsim.scenario.fields import is_import_path
from kvsim.scenario.presets import COMPARED
from kvsim.scenario.resolve import ResolvedScenario, load_scenario, scenario_from_dict
from kvsim.scenario.words import natural
from kvsim.scheduling.plan import StepOutcome, StepPlan
from kvsim.types import (
    NS_PER_S,
    AllocatorError,
    KvsimError,
    LawViolation,
    Ns,
    Progress,
    ScenarioError,
    Terminated,
    shown,
)

if TYPE_CHECKING:
    from kvsim.registry import Engine
    from kvsim.sim.server import Observer

TABLES = ("summary", "steps", "requests")

PROGRESS_EVERY_STEPS = 512


@dataclass(frozen=True, slots=True)
class Options:
    """What a run does beside simulating; none of it changes a decision.

    `debug` journals every block (events.csv); `check` recomputes every law at every step; `replay` executes the plans
    on real arrays; `timeline` writes timeline.json; `report` records the block map and writes report.html; `record`
    overrides the scenario's tables; `force` lets results replace those of another command.
    """

    plots: bool = True
    debug: bool = False
    check: bool = False
    replay: bool = False
    timeline: bool = False
    report: bool = False
    record: tuple[str, ...] | None = None
    progress: Progress | None = None
    """Told of requests that ended, and how many the workload has."""
    force: bool = False

    def __post_init__(self) -> None:
        if self.record is None:
            return
        given = [self.record] if isinstance(self.record, str) else list(self.record)
        if isinstance(self.record, str) or set(given) - set(TABLES):
            raise ScenarioError(f"record is {shown(self.record)}; must be some of {', '.join(TABLES)}, as a tuple")


QUIET = Options(plots=False)


def run(
    scenario: str | Path | dict[str, Any] | ResolvedScenario,
    *,
    out: str | Path | None = None,
    options: Options = QUIET,
    **values: Any,
) -> RunResult:
    """Simulate a scenario: a YAML file, a dict, or one that is resolved already.

    `values` change keys by dotted name: `run("chat.yaml", **{"allocator.block_size": 32})`. Files are written only
    with `out`. Raises ScenarioError.
    """
    _check_options(options, values)
    return run_resolved(resolve(scenario, values), out=None if out is None else Path(out), options=options)


def _check_options(options: Options, values: dict[str, Any]) -> None:
    """Keywords are keys of the scenario; who gives an option among them, or options as a dict, is told."""
    if not isinstance(options, Options):
        raise ScenarioError(f"options is {shown(options)}; must be kvsim.Options(...)")
    if wrong := [name for name in values if name in Options.__slots__ and name not in ("record", "timeline")]:
        given = f"{wrong[0]}={shown(values[wrong[0]])}"
        raise ScenarioError(f"{given}: is no key of a scenario; say options=kvsim.Options({given})")


def compare(
    scenario: str | Path | dict[str, Any] | ResolvedScenario,
    engines: Sequence[str] = COMPARED,
    *,
    out: str | Path | None = None,
    options: Options = QUIET,
    **values: Any,
) -> CompareResult:
    """The same workload under several engines; files (one folder per engine) only with `out`."""
    _check_options(options, values)
    resolved = resolve(scenario, values)
    engines = [engines] if isinstance(engines, str) else list(engines)
    if not engines:
        raise ScenarioError("engines is empty; name at least one, such as paged")
    return compare_resolved(resolved, engines, out=None if out is None else Path(out), options=options)


def resolve(scenario: str | Path | dict[str, Any] | ResolvedScenario, values: dict[str, Any]) -> ResolvedScenario:
    """Whatever names a scenario, with values changed by dotted key. Raises ScenarioError."""
    if isinstance(scenario, ResolvedScenario):
        resolved = scenario
    elif isinstance(scenario, dict):
        resolved = scenario_from_dict(scenario)
    elif isinstance(scenario, str | os.PathLike):
        resolved = load_scenario(scenario if isinstance(scenario, str) else Path(scenario))
    else:
        raise ScenarioError(f"the scenario is {shown(scenario)}; must be the path of a YAML file, or a dict")
    return resolved.with_values(values) if values else resolved


@contextmanager
def _blaming_custom_code(resolved: ResolvedScenario) -> Iterator[None]:
    """What goes wrong in a run that uses code of the user's is told as such, with the names of that code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, Terminated):
            raise
        is_told = isinstance(error, KvsimError) and not isinstance(error, AllocatorError)
        names = "" if is_told else ", ".join(dict.fromkeys(_import_paths(resolved.scenario.model_dump())))
        if not names:
            raise
        if isinstance(error, LawViolation):
            raise LawViolation(f"{error} ({names}: the run uses this code)") from error
        raise ScenarioError(
            f"{names}: the run failed in or on this code: {type(error).__name__}: {error}; "
            "see docs/extend.md for what each part must offer (KVSIM_TRACEBACK=1 shows where)"
        ) from error


def _import_paths(value: Any) -> Iterator[str]:
    """Every `package.module:name` of a scenario."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _import_paths(item)
    elif isinstance(value, str) and is_import_path(value):
        yield value


def run_resolved(resolved: ResolvedScenario, *, out: Path | None, options: Options = QUIET) -> RunResult:
    """Simulate, and write the results folder if one is named."""
    if out is None:
        return _simulate(resolved, options, None)
    with output_dir(out, "run", force=options.force) as folder:
        result = _simulate(resolved, options, folder)
    return replace(result, out=out)


def compare_resolved(
    resolved: ResolvedScenario, engines: Sequence[str], *, out: Path | None, options: Options = QUIET
) -> CompareResult:
    """One run per engine; `compare.csv` and its pictures beside their folders."""
    variants = {engine: resolved.with_engine(engine, "--engines") for engine in dict.fromkeys(engines)}
    if out is None:
        return CompareResult({engine: _simulate(variant, options, None) for engine, variant in variants.items()})
    with output_dir(out, "compare", force=options.force) as folder:
        runs = {}
        for engine, variant in variants.items():
            (folder / engine).mkdir()
            result = _simulate(variant, options, folder / engine)
            runs[engine] = replace(result, out=out / engine)
        compared = CompareResult(runs, out)
        write_records(folder / "compare.csv", compared.records())
        (folder / "scenario.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
        if options.plots:
            from kvsim.report.plots import write_compare_plots

            write_compare_plots(compared.table, folder)
        if options.report:
            from kvsim.report.page import write_compare_report

            write_compare_report(folder, runs, draw_missing=options.plots)
    return compared


def tell_life(resolved: ResolvedScenario, request_id: str) -> str:
    """Run the scenario for the sake of one request and tell its life. Raises ScenarioError if there is none."""
    with _blaming_custom_code(resolved):
        return _tell_life(resolved, request_id)


def _tell_life(resolved: ResolvedScenario, request_id: str) -> str:
    from kvsim.explain import LifeStory
    from kvsim.registry import build
    from kvsim.sim.run import simulate

    engine = build(resolved.scenario)
    story = LifeStory(request_id, engine.scheduler)
    simulation = simulate(
        engine.scheduler,
        engine.cost,
        engine.source,
        horizon_ns=resolved.scenario.horizon,
        record=("requests",),
        observers=(story,),
    )
    if story.request is None:
        ids = sorted(simulation.recorder.ended.request_ids, key=natural)
        if request_id in ids:
            end_s = simulation.end_ns / NS_PER_S
            raise ScenarioError(f"--request {request_id:.100}: has not arrived when the run ends ({end_s:g} s)")
        some = ", ".join(ids[:3]) + (f", ... {ids[-1]}" if len(ids) > 3 else "")
        raise ScenarioError(f"--request {request_id:.100}: no request has that id; this workload has {some}")
    return story.text()


def _simulate(resolved: ResolvedScenario, options: Options, folder: Path | None) -> RunResult:
    with _blaming_custom_code(resolved):
        return _simulate_and_write(resolved, options, folder)


def _simulate_and_write(resolved: ResolvedScenario, options: Options, folder: Path | None) -> RunResult:
    from kvsim.registry import build
    from kvsim.sim.run import simulate

    scenario = resolved.scenario
    record = scenario.record if options.record is None else options.record
    extras = _Extras(options)
    engine = build(scenario, detail=extras.needs_detail, journal=extras.journal)
    simulation = simulate(
        engine.scheduler,
        engine.cost,
        engine.source,
        horizon_ns=scenario.horizon,
        record=record,
        check=options.check,
        observers=extras.observers(engine),
        clock=extras.journal,
    )
    summary = summarise(
        simulation.recorder,
        end_ns=simulation.end_ns,
        num_requests=simulation.num_requests,
        goals=Goals(scenario.slo.ttft, scenario.slo.tpot, scenario.slo.e2el),
        facts=_facts(resolved, engine),
        table_entry_bytes=getattr(engine.cost, "table_entry_bytes", 4),
    )
    own = run_warnings(resolved, engine, simulation.recorder, summary)
    summary["warnings"] = [*resolved.warnings, *engine.warnings(), *own, *extras.warnings(engine)]
    result = RunResult(
        summary,
        None,
        step_columns(simulation.recorder) if "steps" in record else {},
        request_columns(simulation.recorder) if "requests" in record else {},
        extras.block_map(scenario.engine),
    )
    if folder is not None:
        _write(resolved, result, options, extras, folder)
    return result


def _facts(resolved: ResolvedScenario, engine: Engine) -> dict[str, Any]:
    import numpy

    scenario = resolved.scenario
    return {
        "name": scenario.name,
        "engine": scenario.engine,
        "seed": scenario.seed,
        "kvsim_version": __version__,
        "numpy_version": numpy.__version__,
        "block_size": engine.scheduler.allocator.block_size,
        "bytes_per_token": engine.bytes_per_token,
    }


def _write(resolved: ResolvedScenario, result: RunResult, options: Options, extras: _Extras, folder: Path) -> None:
    write_json(folder / "summary.json", result.summary)
    (folder / "scenario.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
    if result.step_columns:
        write_table(folder / "steps.csv", result.step_columns)
    if result.request_columns:
        write_table(folder / "requests.csv", result.request_columns)
    extras.write(folder, result)
    if options.plots and (result.step_columns or result.request_columns):
        from kvsim.report.plots import write_run_plots

        write_run_plots(result.steps, result.requests, result.summary, folder)
    if options.report:
        from kvsim.report.page import write_run_report

        write_run_report(folder, result, draw_missing=options.plots)


class _Extras:
    """The observers that options ask for, and the files they leave."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.journal: Any = None
        self._names = _Names()
        self._timeline: Any = None
        self._frames: Any = None
        if options.debug or options.report:
            from kvsim.memory.journal import Journal

            self.journal = Journal()

    @property
    def needs_detail(self) -> bool:
        return self.options.replay

    def observers(self, engine: Engine) -> tuple[Observer, ...]:
        """The observers, in the order in which they are told."""
        found: list[Observer] = [self._names] if self.journal is not None else []
        if self.options.replay:
            found.append(_replay_of(engine))
        if self.options.timeline:
            from kvsim.report.timeline import TimelineObserver

            self._timeline = TimelineObserver()
            found.append(self._timeline)
        if self.options.report:
            from kvsim.report.blockmap import BlockMapObserver

            self._frames = BlockMapObserver(engine.scheduler)
            found.append(self._frames)
        if self.options.progress is not None:
            found.append(_ProgressObserver(self.options.progress, engine.source.num_left))
        return tuple(found)

    def warnings(self, engine: Engine) -> Iterable[str]:
        """What the options asked for and did not get."""
        allocator = engine.scheduler.allocator
        if self.journal is not None and not len(self.journal) and not type(allocator).__module__.startswith("kvsim."):
            yield (
                f"no events of blocks: {type(allocator).__name__} told the journal nothing; it goes to an allocator "
                "that takes `journal` (docs/extend.md)"
            )

    def block_map(self, engine: str) -> dict[str, Any] | None:
        """What the page's block map shows, if a page was asked for."""
        if self._frames is None:
            return None
        from kvsim.report.blockmap import recording

        return recording(self._frames, self.journal, self._names.names, engine)

    def write(self, folder: Path, result: RunResult) -> None:
        if self.journal is not None:
            self.journal.write_csv(folder / "events.csv", self._names.names)
        if self._timeline is not None:
            from kvsim.report.timeline import write_timeline

            write_timeline(folder / "timeline.json", result.requests, self._timeline, result.steps)


def _replay_of(engine: Engine) -> Observer:
    from kvsim.attention.replay import Replay

    allocator: Any = engine.scheduler.allocator
    window = getattr(allocator, "window_blocks", 0) * allocator.block_size
    return Replay(
        allocator.block_size,
        allocator.num_blocks + 1,
        allocator.usage().num_host_blocks,
        sliding_window=window or None,
    )


class _Names:
    """Which request a sequence belongs to: the journal knows sequences only."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def on_submit(self, request: Any, reason: str | None, now: Ns) -> None:
        """A request has no sequence yet."""

    def on_abort(self, request_id: str, sequences: Any, now: Ns) -> None:
        """Names stay."""

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        for admission in plan.admitted:
            self.names[str(admission.seq.seq_id)] = admission.seq.request.request_id

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        for fork in outcome.forks:
            self.names[str(fork.child.seq_id)] = fork.child.request.request_id


class _ProgressObserver:
    """Counts requests that ended, and says so every few hundred steps."""

    def __init__(self, tell: Progress, num_requests: int) -> None:
        self.tell = tell
        self.num_requests = num_requests
        self.num_ended = 0
        self._num_steps = 0

    def on_submit(self, request: Any, reason: str | None, now: Ns) -> None:
        self.num_ended += reason is not None

    def on_abort(self, request_id: str, sequences: Any, now: Ns) -> None:
        self.num_ended += 1

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        """Nothing to count yet."""

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        self.num_ended += len(outcome.finished_requests)
        self._num_steps += 1
        if self._num_steps % PROGRESS_EVERY_STEPS == 0:
            self.tell(self.num_ended, self.num_requests)
