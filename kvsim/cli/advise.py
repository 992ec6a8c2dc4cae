"""`kvsim advise`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from kvsim.cli import console
from kvsim.cli.options import Force, Jobs, Json, NoPlots, ScenarioPath, Sets


def command(
    scenario: ScenarioPath,
    sets: Sets = [],  # noqa: B006
    slo: Annotated[
        str | None,
        Option("--slo", metavar="GOALS", help="ttft=2s,tpot=100ms; default: the scenario's.", show_default=False),
    ] = None,
    seeds: Annotated[int, Option("--seeds", min=2, help="Simulations per variant: more are surer, and slower.")] = 6,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        Option("--out", help="Folder for the results; default results/NAME-advice.", show_default=False),
    ] = None,
    force: Force = False,
    as_json: Json = False,
    no_plots: NoPlots = False,
) -> None:
    """Answer the common questions about a workload by simulation.

    Is paging worth it, which block size, which request rate meets the SLO, how small may the KV cache be, and what
    does sharing save: each with its figures, how sure they are, and the runs behind them. Writes advice.md,
    advice.json, pictures and runs.csv.
    """
    from kvsim.advise import advise
    from kvsim.advise.report import terminal
    from kvsim.advise.slo import parse_slo
    from kvsim.scenario.resolve import load_scenario

    resolved = load_scenario(scenario, sets)
    goals = None if slo is None else parse_slo(slo)
    folder = Path("results", f"{resolved.scenario.name}-advice") if out is None else out
    with console.progress_bar(f"advise {resolved.scenario.name}") as progress:
        advice = advise(
            resolved, slo=goals, seeds=seeds, jobs=jobs, out=folder, plots=not no_plots, force=force, progress=progress
        )
    if as_json:
        console.say_json(advice.as_dict())
        return
    console.say(terminal(advice))
    console.say(f"\nresults in {folder}")
    console.say(console.list_files(folder))
