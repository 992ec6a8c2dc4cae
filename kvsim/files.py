"""Files as everybody here writes them: whole or not at all, and texts in CSV that any reader takes apart again."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvsim.types import ScenarioError

_MARKS = ',"\n\r'
"""A cell with one of these stands in quotes. (The csv module of Python 3.11 quotes only the line ends it writes.)"""


def csv_cell(text: str) -> str:
    """A text as a cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in _MARKS) else text


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A name to write to; what is there when the block ends without an error takes the place of `path` at one stroke.

    After an error `path` is as it was and nothing is left beside it; an OSError names `path`, whatever it was about.
    Who may read a file that is replaced may read the new one.
    """
    final = Path(os.path.realpath(path))
    unfinished = final.with_name(f".{os.getpid()}.kvsim-tmp")
    try:
        # A device or a pipe must not become a file.
        if final.exists() and not (final.is_file() or final.is_dir()):
            raise OSError(errno.EEXIST, "it is no regular file")
        yield unfinished
        if final.exists():
            _keep_readers(final.stat(), unfinished)
        unfinished.replace(final)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _keep_readers(old: os.stat_result, path: Path) -> None:
    """Give a file the owner, the group and the rights of the one that it replaces, as far as that is allowed."""
    # Only root gives files away; whoever belongs to the group may give them to that.
    for uid, gid in ((-1, old.st_gid), (old.st_uid, -1)):
        with suppress(OSError):
            os.chown(path, uid, gid)
    path.chmod(stat.S_IMODE(old.st_mode))


def save_picture(figure: Any, path: str | Path, **how: Any) -> None:
    """A matplotlib figure, in the format that the file's ending names; PNG without one. Raises ScenarioError."""
    ending = Path(path).suffix[1:].lower() or "png"
    if ending not in figure.canvas.get_supported_filetypes():
        raise ScenarioError(f"{path}: no picture can be written as {ending!r}; name the file .png, .pdf or .svg")
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, format=ending, **how)
