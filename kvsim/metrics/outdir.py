"""Results appear whole or not at all: written beside their place, made durable, then exchanged with what was there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvsim.types import ScenarioError

MARKS = {
    "sweep": ("sweep.csv", "points"),
    "compare": ("compare.csv",),
    "advise": ("advice.json",),
    "run": ("summary.json",),
}
"""Command -> what its results folder holds, and those of the commands after it do not."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def results_in(path: Path | str) -> str | None:
    """The command whose results lie in a folder: run, compare, sweep or advise; None where there are none."""
    for command, names in MARKS.items():
        if any(os.path.exists(os.path.join(path, name)) for name in names):
            return command
    return None


def default_dir(name: str, command: str, *, force: bool = False) -> Path:
    """`results/NAME`; `results/NAME-COMMAND` where that place has the results of another command."""
    folder = Path("results", name)
    there = results_in(folder)
    return folder if force or there in (None, command) else Path("results", f"{name}-{command}")


def check_kind(path: Path, command: str) -> None:
    """Raises ScenarioError where a folder holds the results of another command: they may have taken hours."""
    there = results_in(path)
    if there not in (None, command):
        raise ScenarioError(
            f"{path}: holds the results of kvsim {there}, which those of kvsim {command} would replace; "
            "choose another folder (--out DIR), or say --force"
        )


@contextmanager
def output_dir(path: Path | str, command: str = "run", *, force: bool = False) -> Iterator[Path]:
    """A folder to write into, which takes the place of `path` when the block ends without an error.

    Until then `path` keeps what it has; after an error, or a kill, it still does. Leftovers of killed runs into the
    same place are removed, runs at the same time do not mix (the last one to end is what stays). Raises ScenarioError
    if the place cannot be written, holds something that is no result of ours, or (without `force`) the results of
    another command.
    """
    final = usable_place(Path(path))
    if not force:
        check_kind(Path(path), command)
    made: list[Path] = []
    lock = -1
    try:
        with _failures_explained(final):
            # As given: where `a` of `a/../b` is missing, `a/../b` would be no place to find the results at.
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            final.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(final)
            lock = _lock_new_folder(final, made)
        folder = made[-1]
        with _failures_explained(final, folder):
            yield folder
            _sync_tree(folder)
            _put_in_place(folder, final)
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def remove_leftovers(final: Path) -> None:
    """Remove what killed runs left beside `final`; if one was killed while it exchanged folders, finish that."""
    for leftover in sorted(final.parent.glob(f"{_prefix(final)}*")):
        lock = _try_lock(leftover)
        if lock is None:
            continue
        try:
            if leftover.name.endswith(".old") and not final.exists():
                leftover.rename(final)
            else:
                shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(lock)


def usable_place(path: Path) -> Path:
    """The path in full, if results may replace what is there. Raises ScenarioError."""
    try:
        final = path.resolve()
        exists, is_dir = final.exists(), final.is_dir()
        entries = set(os.listdir(final)) if is_dir else set()
    except (OSError, ValueError, RuntimeError) as error:
        raise ScenarioError(f"{path}: cannot be used for results: {_reason(error)}; choose another folder") from None
    if exists and not is_dir:
        raise ScenarioError(f"{path}: is a file; results need a folder: choose another name")
    here = Path.cwd()
    if final == here or final in here.parents:
        raise ScenarioError(f"{path}: is the working directory or above it; name a folder of its own for the results")
    if entries and results_in(final) is None:
        raise ScenarioError(
            f"{path}: is not empty and holds no results of kvsim (for example {sorted(entries)[0]!r}); "
            "choose another folder, so that nothing of yours is replaced"
        )
    return final


def _prefix(final: Path) -> str:
    return f".{final.name}.kvsim-"


def _lock_new_folder(final: Path, made: list[Path]) -> int:
    """Make a folder beside `final` and lock it: that tells the next run that its owner lives.

    Its name goes to `made` before it is there, so that a signal at any moment leaves nothing behind.
    """
    while True:
        folder = final.parent / f"{_prefix(final)}{secrets.token_hex(4)}"
        made.append(folder)
        folder.mkdir()
        lock = _try_lock(folder)
        if lock is not None and folder.exists():
            return lock


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None if a living run has it (or the folder is gone)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sync_tree(folder: Path) -> None:
    for directory, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(folder: Path, final: Path) -> None:
    """Give `final` the new content at one stroke; afterwards `folder` holds what is to be removed, or is gone."""
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(folder, final):
            _replace_in_two_steps(folder, final)
    with suppress(OSError):
        _sync(final.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return int(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)) == 0


def _replace_in_two_steps(folder: Path, final: Path) -> None:
    """Killed in between, the old result waits beside its place; the next run puts it back."""
    old = folder.with_name(f"{folder.name}.old")
    final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _failures_explained(final: Path, folder: Path | None = None) -> Iterator[None]:
    """Turns failures to write the results into messages; others pass."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) or not _concerns_results(error, folder):
            raise
        raise ScenarioError(
            f"{final}: cannot write the results: {_reason(error)}; "
            "free some space or choose another folder (nothing that was there before is lost)"
        ) from error


def _concerns_results(error: OSError, folder: Path | None) -> bool:
    if folder is None or error.filename is None:
        return True
    return os.fsdecode(error.filename).startswith(str(folder))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
