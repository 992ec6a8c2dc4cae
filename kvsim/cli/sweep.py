"""`kvsim sweep`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option

from kvsim.cli import console
from kvsim.cli.options import Force, Jobs, Json, NoPlots, Out, ScenarioPath, Sets, results_folder
from kvsim.types import ScenarioError

EXIT_SOME_FAILED = 1
SHOWN = ("running_mean", "output_throughput", "mean_ttft_ms", "mean_tpot_ms", "block_utilization", "num_preemptions")
MAX_SHOWN_ROWS = 40


def command(
    scenario: ScenarioPath,
    vary: Annotated[
        list[str],
        Option(
            "--vary",
            metavar="KEY=VALUES",
            help="Values to try (repeatable): allocator.block_size=8,16,32, or low:high:step, such as 1:10:1; "
            "lists and blocks in brackets.",
        ),
    ] = [],  # noqa: B006
    sets: Sets = [],  # noqa: B006
    zipped: Annotated[
        bool | None, Option("--zip/--grid", help="Lists side by side, not every combination.", show_default=False)
    ] = None,
    seeds: Annotated[
        str | None, Option("--seeds", help="How many seeds (5), or which (1,2,7).", show_default=False)
    ] = None,
    jobs: Jobs = None,
    dask: Annotated[
        str | None, Option("--dask", metavar="ADDRESS", help="Run on a Dask cluster: tcp://HOST:8786.")
    ] = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
    no_plots: NoPlots = False,
) -> None:
    """Run a grid of scenarios: the same workload and seeds at every point.

    Writes sweep.csv (every point), sweep_agg.csv (means and 95 % intervals over seeds) and pictures. Every finished
    point is kept at once: the same command goes on where it was stopped. Exit code 1 if a point failed.
    """
    from kvsim.scenario.resolve import load_scenario
    from kvsim.sweeps import sweep
    from kvsim.sweeps.grid import parse_varies
    from kvsim.sweeps.tables import aggregate, told

    resolved = load_scenario(scenario, sets)
    folder = results_folder(out, resolved.scenario.name, "sweep", force)
    with console.progress_bar(f"sweep {resolved.scenario.name}") as progress:
        result = sweep(
            resolved,
            parse_varies(vary),
            seeds=_seeds(seeds),
            zip=zipped,
            jobs=jobs,
            dask=dask,
            out=folder,
            plots=not no_plots,
            progress=progress,
            force=force,
        )
    for row in result.rows:
        if row["status"] == "failed":
            point = ", ".join(f"{key}={row[key]}" for key in (*result.keys, "seed"))
            console.warn(f"{point}: {row['reason']}")
    for text in told(result.rows, result.keys):
        console.warn(text)
    if as_json:
        console.say_json(result.rows)
    else:
        _print(aggregate(result.rows, result.keys), result.keys)
        num_points = f"{len(result.rows)} point{'s' if len(result.rows) > 1 else ''}"
        console.say(f"\n{num_points}, {result.num_failed} failed; results in {folder}")
        console.say(_files(folder))
    if result.num_failed:
        raise Exit(EXIT_SOME_FAILED)


def _files(folder: Path) -> str:
    pictures = sorted(path.name for path in folder.glob("*.png"))
    lines = ["  tables    sweep.csv, sweep_agg.csv"]
    if pictures:
        lines.append(f"  pictures  {', '.join(pictures)}")
    return "\n".join([*lines, "  points    every finished point: the same command goes on where it was stopped"])


def _seeds(text: str | None) -> int | tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 19 for part in parts):
        raise ScenarioError(f"--seeds {text}: must be how many (5), or which (1,2,7)")
    return int(parts[0]) if len(parts) == 1 else tuple(map(int, parts))


def _print(records: list[dict[str, Any]], keys: tuple[str, ...]) -> None:
    names = [name for name in SHOWN if any(name in record for record in records)]
    rows = [
        [
            *("null" if record[key] is None else str(record[key]) for key in keys),
            *(_with_interval(record, name) for name in names),
        ]
        for record in records[:MAX_SHOWN_ROWS]
    ]
    if rows:
        console.say(console.table(rows, [*(key.rsplit(".", 1)[-1] for key in keys), *names]))
    if len(records) > MAX_SHOWN_ROWS:
        console.say(f"... {len(records) - MAX_SHOWN_ROWS} more in sweep_agg.csv")
    if any(" ± " in cell for row in rows for cell in row):
        console.say("\n±: half the width of the mean's 95 % interval over the seeds")


def _with_interval(record: dict[str, Any], name: str) -> str:
    from kvsim.result import text_of

    value, width = record.get(name), record.get(f"{name}.ci95")
    if value is None or value != value:
        return "–"
    is_known = width is not None and width == width
    return text_of(float(value)) + (f" ± {float(f'{width:.2g}'):,.10g}" if is_known else "")
