"""What the commands print: tables of text, warnings, and a progress bar where somebody watches."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from kvsim.types import Progress


def say(text: str = "") -> None:
    """A line for the reader, on stdout."""
    print(text)


_reader: list[TextIO] = []
"""Who reads stdout, while that is closed to everything but `say_alone`."""


@contextmanager
def json_alone() -> Iterator[None]:
    """Meanwhile stdout gets what `say_alone` and `say_json` say and nothing else; other prints go to stderr.

    A part of the user's own may print, and who reads JSON would stumble over it.
    """
    _reader.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _reader.pop()


def say_alone(text: str) -> None:
    """The whole of what a command was asked for."""
    print(text, file=_reader[-1] if _reader else sys.stdout)


def say_json(value: Any) -> None:
    """A value as JSON, which has no infinity: that is the text "inf", as a scenario takes it too."""
    say_alone(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def warn(text: str) -> None:
    """A line beside the results, on stderr."""
    print(f"warning: {text}", file=sys.stderr)


def table(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None) -> str:
    """Columns side by side: the first one left-aligned, the others right-aligned."""
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = []
    for index, line in enumerate(lines):
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(cells).rstrip())
        if header and index == 0:
            text.append("  ".join("-" * width for width in widths))
    return "\n".join(text)


def list_files(folder: Path) -> str:
    """What lies in a results folder, on a few lines: its files by kind, then the folders in it."""
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    kinds = {"tables": (".csv",), "pictures": (".png", ".svg"), "figures": (".json",), "pages": (".html", ".md")}
    lines = []
    for kind, suffixes in kinds.items():
        if chosen := [name for name in files if name.endswith(suffixes)]:
            lines.append(f"  {kind:9} {', '.join(chosen)}")
    if folders:
        lines.append(f"  {'folders':9} {', '.join(folders)} (each with its own results)")
    return "\n".join(lines)


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A bar on stderr that `(done, total)` moves; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell
