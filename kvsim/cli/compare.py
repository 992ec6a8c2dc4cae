"""`kvsim compare`"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from typer import Option

from kvsim.cli import console
from kvsim.cli.options import (
    Check,
    Debug,
    Force,
    Json,
    MaxMemory,
    NoPlots,
    Out,
    Record,
    Replay,
    Report,
    ScenarioPath,
    Sets,
    Timeline,
    parse_record,
    results_folder,
    split_names,
)

COLUMNS = (
    ("engine", "engine"),
    ("running peak", "running_peak"),
    ("running mean", "running_mean"),
    ("KV with tokens", "kv_saturated.token_states"),
    ("output tok/s", "output_throughput"),
    ("mean TTFT ms", "mean_ttft_ms"),
    ("mean TPOT ms", "mean_tpot_ms"),
    ("preempted", "num_preemptions"),
    ("completed", "completed"),
    ("rejected", "num_rejected"),
)
ENDS = (("aborted", "num_aborted"), ("cut off", "num_unfinished"))
"""Shown where it happened."""


def command(
    scenario: ScenarioPath,
    sets: Sets = [],  # noqa: B006
    engines: Annotated[
        str | None, Option("--engines", help="Engines, with commas between.", show_default=False)
    ] = None,
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
    no_plots: NoPlots = False,
    record: Record = None,
    debug: Debug = False,
    check: Check = False,
    replay: Replay = False,
    timeline: Timeline = False,
    report: Report = False,
    max_memory: MaxMemory = None,
) -> None:
    """Run the same workload under several engines, side by side.

    By default: paged, and contiguous reservation of the maximum, of powers of two, of the exact length, and static
    batching. Each engine gets the same requests and the same memory, and a folder of its own beside compare.csv.
    """
    from kvsim.footprint import check_footprint
    from kvsim.runs import Options, compare_resolved
    from kvsim.scenario.presets import COMPARED
    from kvsim.scenario.resolve import load_scenario

    resolved = load_scenario(scenario, sets)
    names = list(COMPARED) if engines is None else split_names(engines, "--engines")
    for name in names:
        if notice := check_footprint(resolved.with_engine(name, "--engines"), max_memory):
            console.warn(f"{name}: {notice}")
    folder = results_folder(out, resolved.scenario.name, "compare", force)
    with console.progress_bar(resolved.scenario.name) as progress:
        options = Options(
            plots=not no_plots,
            debug=debug,
            check=check,
            replay=replay,
            timeline=timeline or resolved.scenario.timeline,
            report=report,
            record=parse_record(record),
            progress=progress,
            force=force,
        )
        compared = compare_resolved(resolved, names, out=folder, options=options)
    engines_of: dict[str, list[str]] = {}
    for engine, run in compared.runs.items():
        for text in run.summary["warnings"]:
            engines_of.setdefault(text, []).append(str(engine))
    for text, warned in engines_of.items():
        console.warn(f"{', '.join(warned)}: {text}")
    records = compared.records()
    if as_json:
        console.say_json({engine: run.summary for engine, run in compared.runs.items()})
        return
    columns = [*COLUMNS, *(end for end in ENDS if any(record[end[1]] for record in records))]
    console.say(console.table([_row(record, columns) for record in records], [title for title, _ in columns]))
    console.say("\nKV with tokens: share of the KV memory that holds tokens to be read, while requests wait")
    console.say(f"\nresults in {folder}")
    console.say(console.list_files(folder))


def _row(record: dict[str, Any], columns: Iterable[tuple[str, str]]) -> list[str]:
    from kvsim.result import share, text_of

    return [share(record.get(key)) if key.startswith("kv") else text_of(record.get(key)) for _, key in columns]
