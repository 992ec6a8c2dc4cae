"""`kvsim report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from kvsim.cli import console


def command(
    folder: Annotated[Path, Argument(help="A folder that `kvsim run` or `compare` wrote.", show_default=False)],
) -> None:
    """Write report.html into a results folder: the figures, the pictures, and the block map to play.

    The scenario in the folder is simulated again to record the map, so this takes as long as the run did.
    """
    from kvsim.report.folders import write_report

    path, notes = write_report(folder)
    for note in notes:
        console.warn(note)
    console.say(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
