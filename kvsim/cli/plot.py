"""`kvsim plot`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from kvsim.cli import console


def command(
    folder: Annotated[
        Path, Argument(help="A folder that `kvsim run`, `compare` or `sweep` wrote.", show_default=False)
    ],
) -> None:
    """Draw the pictures of a results folder again, from its tables."""
    from kvsim.report.folders import redraw

    for path in redraw(folder):
        console.say(str(path))
