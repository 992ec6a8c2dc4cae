"""`kvsim validate`"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from typer import Option

from kvsim.cli import console
from kvsim.cli.options import Engine, ScenarioPath, Sets

if TYPE_CHECKING:
    from kvsim.scenario.resolve import ResolvedScenario


def command(
    scenario: ScenarioPath,
    sets: Sets = [],  # noqa: B006
    engine: Engine = None,
    resolved: Annotated[bool, Option("--resolved", help="Print every value and where it came from.")] = False,
) -> None:
    """Check a scenario, and every point of its sweep, without running it; classes of your own are not imported."""
    from kvsim.scenario.resolve import load_scenario

    found = load_scenario(scenario, sets, engine=engine)
    for text in (*found.warnings, *_of_the_sweep(found)):
        console.warn(text)
    if resolved:
        console.say(found.to_yaml().rstrip())
    else:
        console.say(f"{scenario}: valid (engine {found.scenario.engine})")


def _of_the_sweep(found: ResolvedScenario) -> list[str]:
    """Warnings of the combinations of its `sweep:` block that are not those of the scenario itself."""
    if found.scenario.sweep is None:
        return []
    from kvsim.sweeps.grid import own_combinations
    from kvsim.sweeps.tables import told

    points = own_combinations(found)
    own = [[text for text in point.scenario.warnings if text not in found.warnings] for point in points]
    rows = [{**point.record, "warnings": json.dumps(texts)} for point, texts in zip(points, own, strict=True)]
    return told(rows, tuple(points[0].values))
