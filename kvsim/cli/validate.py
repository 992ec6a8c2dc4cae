"""`kvsim validate`"""

from __future__ import annotations

import json
from typing import Annotated

from typer import Option

from kvsim.cli import console
from kvsim.cli.options import ScenarioPath, Sets


def command(
    scenario: ScenarioPath,
    sets: Sets = [],  # noqa: B006
    engine: Annotated[
        str | None, Option("--engine", help="Another engine than the file's.", show_default=False)
    ] = None,
    resolved: Annotated[bool, Option("--resolved", help="Print every value and where it came from.")] = False,
) -> None:
    """Check a scenario, and every point of its sweep, without running it; classes of your own are not imported."""
    from kvsim.scenario.resolve import load_scenario
    from kvsim.sweeps.grid import own_grid
    from kvsim.sweeps.tables import told

    found = load_scenario(scenario, sets, engine=engine)
    points = own_grid(found)
    of_points = [
        {
            **point.record,
            "warnings": json.dumps([text for text in point.scenario.warnings if text not in found.warnings]),
        }
        for point in points
    ]
    for text in [*found.warnings, *told(of_points, tuple(points[0].values) if points else ())]:
        console.warn(text)
    if resolved:
        console.say(found.to_yaml().rstrip())
    else:
        console.say(f"{scenario}: valid (engine {found.scenario.engine})")
