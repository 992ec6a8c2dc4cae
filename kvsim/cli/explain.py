"""`kvsim explain`"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from kvsim.cli import console
from kvsim.cli.options import Engine, ScenarioPath, Sets


def command(
    scenario: ScenarioPath,
    request: Annotated[str, Option("--request", help="The request's id, as in requests.csv.")],
    sets: Sets = [],  # noqa: B006
    engine: Engine = None,
) -> None:
    """The life of one request in words: when it waited and for what, when and why it was preempted, what it hit."""
    from kvsim.runs import tell_life
    from kvsim.scenario.resolve import load_scenario

    resolved = load_scenario(scenario, sets, engine=engine)
    for text in resolved.warnings:
        console.warn(text)
    console.say(tell_life(resolved, request))
