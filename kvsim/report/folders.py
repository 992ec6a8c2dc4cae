"""Results folders after the fact: read them, redraw their pictures, write their page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvsim.metrics.outdir import MARKS
from kvsim.metrics.requests import NOT_ARRIVED
from kvsim.result import RunResult
from kvsim.types import KvsimError

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["run", "compare", "sweep"]

# A run's mark comes last: the folders of the other commands may hold runs.
_MARKS: dict[str, Kind] = {MARKS[kind][0]: kind for kind in reversed(get_args(Kind))}


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
    with _blaming_the_files(folder):
        if steps:
            _check_length(folder / "steps.csv", len(steps["start_s"]), summary["num_steps"], "steps")
        if requests:
            num_arrived = int((requests["status"] != NOT_ARRIVED).sum())
            expected = summary["num_requests"] - summary["num_not_arrived"]
            _check_length(folder / "requests.csv", num_arrived, expected, "requests that arrived")
    return RunResult(summary, folder, steps, requests)


def _check_length(path: Path, num_rows: int, expected: int, what: str) -> None:
    if num_rows != expected:
        raise KvsimError(
            f"{path}: has {num_rows:,} {what}, and summary.json counts {expected:,}: it is cut off, or of another run; "
            "run the scenario again"
        )


def read_compare(folder: Path) -> dict[str, RunResult]:
    """The runs of a comparison, in the order of compare.csv. Raises KvsimError."""
    return {engine: read_run(folder / engine) for engine in _engines(folder, _table(folder / "compare.csv"))}


def _engines(folder: Path, table: pd.DataFrame) -> list[str]:
    """The engines of compare.csv; each run beside it must be there."""
    engines = [str(engine) for engine in table["engine"]]
    for path in sorted(folder.glob("*/summary.json")):
        if path.parent.name not in engines:
            raise KvsimError(
                f"{folder / 'compare.csv'}: has no row of {path.parent.name}, whose run is there: it is cut off; "
                "compare the engines again"
            )
    return engines


def _columns(path: Path) -> dict[str, Any]:
    """A table of a run, whose last column is never empty."""
    if not path.is_file():
        return {}
    table = _table(path)
    if len(table) and table[table.columns[-1]].isna().any():
        raise _cut_off(path)
    return {str(name): table[name].to_numpy() for name in table.columns}


def _table(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        is_whole = _ends_a_line(path)
        table = pd.read_csv(path, dtype={"request_id": str}, keep_default_na=True)
    except (OSError, ValueError) as error:
        raise KvsimError(f"{path}: cannot be read: {error}") from None
    # Where rows have more cells than the header, pandas makes an index of the first ones.
    if not is_whole or not isinstance(table.index, pd.RangeIndex):
        raise _cut_off(path)
    return table


def _ends_a_line(path: Path) -> bool:
    """Whether the file ends as every table of ours does."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")


def _cut_off(path: Path) -> KvsimError:
    return KvsimError(f"{path}: is cut off in the middle of a line; run the scenario again")


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
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError
    ) as error:  # fmt: skip
        raise KvsimError(
            f"{folder}: its files are damaged, or not of one run ({type(error).__name__}: {error}); "
            "run the scenario again"
        ) from error


def _redraw_run(folder: Path) -> list[Path]:
    result = read_run(folder)
    if not result.step_columns and not result.request_columns:
        raise KvsimError(
            f"{folder}: there is no steps.csv or requests.csv to draw from; run with --record steps,requests"
        )
    return _draw_run(result)


def _draw_run(result: RunResult) -> list[Path]:
    from kvsim.report.plots import write_run_plots

    assert result.out is not None
    return write_run_plots(result.steps, result.requests, result.summary, result.out)


def _redraw_compare(folder: Path) -> list[Path]:
    from kvsim.report.plots import write_compare_plots

    table = _table(folder / "compare.csv")
    # All are read before the first picture is drawn: where one is damaged, none is new.
    runs = [
        read_run(folder / engine)
        for engine in _engines(folder, table)
        if any((folder / engine / name).is_file() for name in ("steps.csv", "requests.csv"))
    ]
    return [*write_compare_plots(table, folder), *(path for run in runs for path in _draw_run(run))]


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
