"""Options that several commands share, and how they are read."""

from __future__ import annotations

from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Annotated, TypeAlias

from typer import Argument, Context, Option

from kvsim.cli import console
from kvsim.metrics.outdir import default_dir, results_in
from kvsim.types import ScenarioError

ScenarioPath: TypeAlias = Annotated[Path, Argument(help="A scenario file (see `kvsim init`).", show_default=False)]
Sets: TypeAlias = Annotated[
    list[str],
    Option("--set", metavar="KEY=VALUE", help="Override a value: --set allocator.block_size=32 (repeatable)."),
]
Engine: TypeAlias = Annotated[
    str | None, Option("--engine", help="Another engine than the file's.", show_default=False)
]
Jobs: TypeAlias = Annotated[int | None, Option("--jobs", min=1, help="Processes; default: all processors.")]
Out: TypeAlias = Annotated[
    Path | None,
    Option(
        "--out",
        help="Folder for the results; default results/NAME, or results/NAME-COMMAND where another command's are.",
        show_default=False,
    ),
]
Force: TypeAlias = Annotated[
    bool, Option("--force", help="Replace the results of another command, if the folder holds such.")
]


def _json_alone(context: Context, is_wanted: bool) -> bool:
    if is_wanted:
        context.with_resource(console.json_alone())
    return is_wanted


Json: TypeAlias = Annotated[
    bool, Option("--json", help="Print the figures as JSON and nothing else.", callback=_json_alone)
]
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


def results_folder(out: Path | None, name: str, command: str, force: bool) -> Path:
    """Where results go: `--out`, else `results/NAME`; beside that, and saying so, if another command's are there."""
    if out is not None:
        return out
    folder = default_dir(name, command, force=force)
    if folder.name != name:
        usual = Path("results", name)
        console.warn(f"{usual} holds the results of kvsim {results_in(usual)}: those of {command} go to {folder}")
    return folder


def check_input(path: Path | None, what: str) -> None:
    """Raises ScenarioError where a file to read is none: pipes and devices may never end."""
    if path is None:
        return
    try:
        info = path.stat()
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the {what}: {error.strerror}") from None
    if not S_ISREG(info.st_mode):
        kind = "a folder" if S_ISDIR(info.st_mode) else "no regular file (a pipe, socket or device)"
        raise ScenarioError(f"{path}: is {kind}; give the {what} itself, as a file")


def check_output(path: Path | None, option: str, *inputs: Path | str | None) -> None:
    """Raises ScenarioError where a file to write could not be, or is one that is read."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise ScenarioError(f"{option} {path}: is a folder; name the file to write")
        if not path.parent.is_dir():
            raise ScenarioError(f"{option} {path}: there is no folder {path.parent}; make it first")
        if path.exists() and not path.is_file():
            raise ScenarioError(f"{option} {path}: is no regular file; name another")
        for other in inputs:
            if other is not None and path.exists() and Path(other).exists() and path.samefile(other):
                raise ScenarioError(f"{option} {path}: is the file that is read; name another")
    except OSError as error:
        raise ScenarioError(f"{option} {path}: cannot be written: {error.strerror}; name another file") from None


def split_names(text: str, option: str) -> list[str]:
    """`a,b` as a list without repeats. Raises ScenarioError for an empty one."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ScenarioError(f"{option} {text[:100]!r}: names with commas between, none of them empty")
    return list(dict.fromkeys(names))


def parse_record(text: str | None) -> tuple[str, ...] | None:
    """`--record steps,requests` as the tables to keep; None where it was not given. Raises ScenarioError."""
    if text is None:
        return None
    names = split_names(text, "--record")
    known = ("summary", "steps", "requests")
    if unknown := [name for name in names if name not in known]:
        raise ScenarioError(f"--record {text:.100}: {unknown[0][:100]!r} is no table; known are {', '.join(known)}")
    return tuple(names)
