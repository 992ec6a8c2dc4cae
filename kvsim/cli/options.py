"""Options that several commands share, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from typer import Argument, Option

from kvsim.types import ScenarioError

ScenarioPath: TypeAlias = Annotated[Path, Argument(help="A scenario file (see `kvsim init`).", show_default=False)]
Sets: TypeAlias = Annotated[
    list[str],
    Option("--set", metavar="KEY=VALUE", help="Override a value: --set allocator.block_size=32 (repeatable)."),
]
Out: TypeAlias = Annotated[
    Path | None, Option("--out", help="Folder for the results; default results/NAME.", show_default=False)
]
Json: TypeAlias = Annotated[bool, Option("--json", help="Print the figures as JSON and nothing else.")]
NoPlots: TypeAlias = Annotated[bool, Option("--no-plots", help="Draw no pictures.")]
Record: TypeAlias = Annotated[
    str | None, Option("--record", help="Tables to write: steps,requests or summary.", show_default=False)
]
Debug: TypeAlias = Annotated[bool, Option("--debug", help="Journal every block: events.csv.")]
Check: TypeAlias = Annotated[bool, Option("--check", help="Recompute every law after every step (slow).")]
Replay: TypeAlias = Annotated[
    bool, Option("--replay", help="Execute the plans on real K/V arrays and compare with dense attention (slow).")
]
Timeline: TypeAlias = Annotated[bool, Option("--timeline", help="Write timeline.json for Perfetto.")]
Report: TypeAlias = Annotated[bool, Option("--report", help="Write a self-contained report.html.")]
MaxMemory: TypeAlias = Annotated[
    str | None,
    Option("--max-memory", help="Refuse to use more than this, such as 4GiB; default: what the machine has."),
]


def split_names(text: str, option: str) -> list[str]:
    """`a,b` as a list without repeats. Raises ScenarioError for an empty one."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ScenarioError(f"{option} {text!r}: names with commas between, none of them empty")
    return list(dict.fromkeys(names))


def parse_record(text: str | None) -> tuple[str, ...] | None:
    """`--record steps,requests` as the tables to keep; None where it was not given. Raises ScenarioError."""
    if text is None:
        return None
    names = split_names(text, "--record")
    known = ("summary", "steps", "requests")
    if unknown := [name for name in names if name not in known]:
        raise ScenarioError(f"--record {text}: {unknown[0]!r} is no table; known are {', '.join(known)}")
    return tuple(names)
