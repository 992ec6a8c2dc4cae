"""`kvsim conform`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from kvsim.cli import console
from kvsim.cli.options import Json
from kvsim.types import ScenarioError

EXIT_DISAGREES = 1


def command(
    paths: Annotated[list[Path], Argument(help="Case files, or folders of them.", show_default=False)],
    as_json: Json = False,
    engine_loop: Annotated[str, Option("--engine-loop", help="calendar or plain.")] = "calendar",
) -> None:
    """Replay recorded engine decisions and compare every field.

    Exit code 0 if all cases agree, 1 if one does not, 2 if a file is no case. Formats: docs/conformance.md.
    """
    from kvsim.conform import as_json as json_of
    from kvsim.conform import as_text, conform

    if engine_loop not in ("calendar", "plain"):
        raise ScenarioError(f"--engine-loop {engine_loop}: must be calendar or plain")
    report = conform(paths, engine_loop=engine_loop)
    console.say_alone(json_of(report) if as_json else as_text(report))
    if not report.agrees:
        raise Exit(EXIT_DISAGREES)
