"""Run the commands of docs/recipes.md and paste what they print under them: `python docs/_gen/recipes.py [WORD ...]`.

With words, only commands that contain one of them are run; the others keep their text. The test of the recipes uses
the same functions to compare.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "recipes.md"
BLOCK = re.compile(r"```console\n\$ (kvsim [^\n]*)\n(.*?)```", re.DOTALL)


def recipes(text: str) -> list[tuple[str, str]]:
    """(command, output) of every console block."""
    return BLOCK.findall(text)


def output_of(command: str) -> str:
    """What a command prints, run in an empty folder that has the scenarios. Raises if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "scenarios").symlink_to(ROOT / "scenarios")
        arguments = [sys.executable, "-m", "kvsim", *shlex.split(command)[1:]]
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines()) + "\n"


def refreshed(text: str, wanted: Callable[[str], bool]) -> str:
    """The page with new output under each wanted command."""

    def paste(match: re.Match[str]) -> str:
        return f"```console\n$ {match[1]}\n{output_of(match[1])}```" if wanted(match[1]) else match[0]

    return BLOCK.sub(paste, text)


if __name__ == "__main__":
    words = sys.argv[1:]
    page = PAGE.read_text("utf-8")
    PAGE.write_text(refreshed(page, lambda command: not words or any(word in command for word in words)), "utf-8")
