"""Files as everybody here writes them, whole or not at all; cells of CSV, and YAML in which a key stands once."""

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
_MERGE = "tag:yaml.org,2002:merge"


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
    if hasattr(os, "chown"):
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


def yaml_data(text: str, source: str) -> Any:
    """The data of a YAML text that is no scenario; `source` names it. Raises yaml.YAMLError where it is no YAML.

    A key that is given twice is a ScenarioError that names both lines: YAML's reader would take the last one.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_doubles(node, source)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_doubles(root: Any, source: str) -> None:
    """Raise ScenarioError for the first key that its mapping has already; `<<` may stand in it several times."""
    left: list[tuple[Any, str]] = [(root, "")]
    seen: set[int] = set()
    while left:
        node, place = left.pop()
        # An alias is the same node again, perhaps inside itself.
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        if node.id == "sequence":
            left += reversed([(item, f"{place.removesuffix('.')}[{index}].") for index, item in enumerate(node.value)])
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key.value, list) or key.tag == _MERGE:
                continue
            line, column = key.start_mark.line + 1, key.start_mark.column + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                raise ScenarioError(
                    f"{source}:{line}:{column}: {place}{key.value}: given twice (first on line {first}); keep one"
                )
            lines[key.tag, key.value] = line
        left += reversed([(value, f"{place}{key.value}.") for key, value in node.value])
