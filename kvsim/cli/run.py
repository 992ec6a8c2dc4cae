"""`kvsim run`"""

from __future__ import annotations

from kvsim.cli import console
from kvsim.cli.options import (
    Check,
    Debug,
    Engine,
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
)


def command(
    scenario: ScenarioPath,
    sets: Sets = [],  # noqa: B006
    out: Out = None,
    force: Force = False,
    engine: Engine = None,
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
    """Simulate a scenario and write its results.

    Writes summary.json, steps.csv, requests.csv, pictures and the resolved scenario into a folder: all of it, or, if
    something goes wrong, nothing. A scenario that names package.module:Name runs that code.
    """
    from kvsim.footprint import check_footprint
    from kvsim.runs import Options, run_resolved
    from kvsim.scenario.resolve import load_scenario

    resolved = load_scenario(scenario, sets, engine=engine)
    if notice := check_footprint(resolved, max_memory):
        console.warn(notice)
    folder = results_folder(out, resolved.scenario.name, "run", force)
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
        result = run_resolved(resolved, out=folder, options=options)
    for text in result.summary["warnings"]:
        console.warn(text)
    if as_json:
        console.say_json(result.summary)
        return
    console.say(f"{resolved.scenario.name}: engine {resolved.scenario.engine}, seed {resolved.scenario.seed}\n")
    console.say(console.table([(label, text) for label, text in result.headline()]))
    console.say()
    console.say(_memory(result.summary))
    console.say(f"\nresults in {folder}")
    console.say(console.list_files(folder))


def _memory(summary: dict[str, object]) -> str:
    """Where the KV memory went, in all steps (an idle engine has none) and while requests waited."""
    from kvsim.metrics.ledger import Parts
    from kvsim.result import share

    kv, saturated = summary["kv"], summary["kv_saturated"]
    assert isinstance(kv, dict)
    columns = [kv] if not isinstance(saturated, dict) else [kv, saturated]
    rows = [(part, *(share(shares.get(part)) for shares in columns)) for part in Parts._fields]
    return console.table(rows, ("KV memory", "in all steps", "while requests wait")[: len(columns) + 1])
