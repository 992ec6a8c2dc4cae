"""`kvsim conform`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from kvsim.cli.options import Json


def command(
    paths: Annotated[list[Path], Argument(help="Case files, or folders of them.", show_default=False)],
    as_json: Json = False,
    engine_loop: Annotated[str, Option("--engine-loop", help="calendar or plain.")] = "calendar",
) -> None:
    """Replay recorded engine decisions and compare every field.

    Exit code 0 if all cases agree, 1 if one does not, 2 if a file is no case. Formats: docs/conformance.md.
    """
    from rich.console import Console

    from kvsim.conform import command as conform
    from kvsim.types import ScenarioError

    if engine_loop not in ("calendar", "plain"):
        raise ScenarioError(f"--engine-loop {engine_loop}: must be calendar or plain")
    code = conform(paths, as_json, engine_loop, Console())
    if code:
        raise Exit(code)
