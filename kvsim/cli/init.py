"""`kvsim init`"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvsim.cli import console
from kvsim.files import whole_file
from kvsim.types import ScenarioError


def command(
    path: Annotated[Path, Argument(help="Where to write it.")] = Path("scenario.yaml"),
    force: Annotated[bool, Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented scenario to start from."""
    template = files("kvsim.scenario").joinpath("init_template.yaml").read_text(encoding="utf-8")
    try:
        if not force and os.path.lexists(path):
            raise ScenarioError(f"{path}: is there already; choose another name, or --force to replace it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as unfinished:
            unfinished.write_text(template, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScenarioError(f"{path}: cannot be written: {reason}; choose another place") from None
    console.say(f"wrote {path}; now: kvsim run {path}")
