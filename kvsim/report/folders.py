"""Results folders after the fact: read them, redraw their pictures, write their page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvsim.result import RunResult
from kvsim.types import KvsimError

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["run", "compare", "sweep"]

_MARKS: dict[str, Kind] = {"sweep.csv": "sweep", "compare.csv": "compare", "summary.json": "run"}


def kind_of(folder: Path) -> Kind:
    """What wrote the folder. Raises KvsimError if it is no results folder."""
    for name, kind in _MARKS.items():
        if (folder / name).is_file():
            return kind
    what = "is no folder" if not folder.is_dir() else f"has none of {', '.join(reversed(_MARKS))}"
    raise KvsimError(f"{folder}: {what}; give the folder that `kvsim run`, `compare` or `sweep` wrote")


def read_run(folder: Path) -> RunResult:
    """A run from its files; a table that was not written is empty. Raises KvsimError for files that do not read."""
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KvsimError(f"{path}: cannot be read: {error}") from None
    if not isinstance(summary, dict) or not {"name", "engine", "kv", "warnings"} <= summary.keys():
        raise KvsimError(f"{path}: is not the summary of a run; run the scenario again")
    steps, requests = _columns(folder / "steps.csv"), _columns(folder / "requests.csv")
    return RunResult(summary, folder, steps, requests)


def read_compare(folder: Path) -> dict[str, RunResult]:
    """The runs of a comparison, in the order of compare.csv. Raises KvsimError."""
    engines = [str(engine) for engine in _table(folder / "compare.csv")["engine"]]
    return {engine: read_run(folder / engine) for engine in engines}


def _columns(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    table = _table(path)
    return {str(name): table[name].to_numpy() for name in table.columns}


def _table(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_csv(path, dtype={"request_id": str}, keep_default_na=True)
    except (OSError, ValueError) as error:
        raise KvsimError(f"{path}: cannot be read: {error}") from None


def redraw(folder: Path) -> list[Path]:
    """Draw the pictures of a results folder again from its tables; returns their paths. Raises KvsimError."""
    draw = {"run": _redraw_run, "compare": _redraw_compare, "sweep": _redraw_sweep}[kind_of(folder)]
    with _blaming_the_files(folder):
        return draw(folder)


@contextmanager
def _blaming_the_files(folder: Path) -> Iterator[None]:
    """What a file should say and does not is found where it is used; then the folder is to blame."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise KvsimError(
            f"{folder}: its files are damaged, or not of one run ({type(error).__name__}: {error}); "
            "run the scenario again"
        ) from error


def _redraw_run(folder: Path) -> list[Path]:
    from kvsim.report.plots import write_run_plots

    result = read_run(folder)
    if not result.step_columns and not result.request_columns:
        raise KvsimError(
            f"{folder}: there is no steps.csv or requests.csv to draw from; run with --record steps,requests"
        )
    return write_run_plots(result.steps, result.requests, result.summary, folder)


def _redraw_compare(folder: Path) -> list[Path]:
    from kvsim.report.plots import write_compare_plots

    table = _table(folder / "compare.csv")
    paths = write_compare_plots(table, folder)
    for engine in table["engine"]:
        if any((folder / str(engine) / name).is_file() for name in ("steps.csv", "requests.csv")):
            paths += _redraw_run(folder / str(engine))
    return paths


def _redraw_sweep(folder: Path) -> list[Path]:
    from kvsim.report.plots import write_sweep_plots

    table = _table(folder / "sweep.csv")
    names = [str(name) for name in table.columns]
    if "seed" not in names or "status" not in names:
        raise KvsimError(f"{folder / 'sweep.csv'}: has no columns seed and status; run the sweep again")
    drawn = table[table["status"] == "ok"]
    if not len(drawn):
        raise KvsimError(f"{folder / 'sweep.csv'}: no point of the sweep succeeded, so there is nothing to draw")
    return write_sweep_plots(drawn, names[: names.index("seed")], folder)


def write_report(folder: Path) -> tuple[Path, list[str]]:
    """Write `report.html` of a run or a comparison; returns its path, and what is missing in it.

    The block map is not among a run's files: the scenario in the folder is simulated again, which gives the same run,
    and the map is shown only if it did. Raises KvsimError.
    """
    from kvsim.report.page import write_compare_report, write_run_report

    kind = kind_of(folder)
    with _blaming_the_files(folder):
        if kind == "run":
            result, notes = _with_block_map(read_run(folder), folder)
            return write_run_report(folder, result, notes), notes
        if kind == "compare":
            runs, all_notes = {}, []
            for engine, result in read_compare(folder).items():
                runs[engine], notes = _with_block_map(result, folder / engine)
                all_notes += [f"{engine}: {note}" for note in notes]
            return write_compare_report(folder, runs, all_notes), all_notes
        raise KvsimError(f"{folder}: is a sweep; it has pictures (`kvsim plot`), but no page: give one run")


def _with_block_map(result: RunResult, folder: Path) -> tuple[RunResult, list[str]]:
    from kvsim.runs import Options, run

    scenario = folder / "scenario.yaml"
    if not scenario.is_file():
        return result, [f"no block map: {scenario.name} is not in the folder, so the run cannot be repeated"]
    try:
        again = run(scenario, options=Options(plots=False, report=True, record=()))
    except KvsimError as error:
        return result, [f"no block map: the run cannot be repeated: {error}"]
    if _figures(again.summary) != _figures(result.summary):
        return result, ["no block map: the scenario in the folder gives other figures now than those in summary.json"]
    return replace(result, block_map=again.block_map), []


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What must come out again, in the form that a file has: not versions, nor warnings, which name other places."""
    plain = json.loads(json.dumps(summary))
    return {key: value for key, value in plain.items() if key != "warnings" and not key.endswith("_version")}
