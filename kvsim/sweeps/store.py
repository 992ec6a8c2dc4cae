"""Finished points on disk: one small file each, whole or absent, so that a killed sweep loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsim.files import whole_file
from kvsim.metrics.outdir import check_kind, results_in, usable_place
from kvsim.sweeps.grid import Point
from kvsim.sweeps.work import Done
from kvsim.types import ScenarioError

POINTS = "points"
PICTURES = ("sweep_*.png", "heatmap_*.png")
"""Those of another grid in the same folder go: they would contradict the tables."""


class PointStore:
    """The folder `points/` of a sweep."""

    def __init__(self, out: Path) -> None:
        self.folder = out / POINTS

    def load(self, point: Point) -> Done | None:
        """The point's result if it was finished; a file that does not read back counts as absent."""
        try:
            value: dict[str, Any] = json.loads(self._path(point).read_text(encoding="utf-8"))
            return Done(dict(value["summary"]), str(value["error"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, point: Point, done: Done) -> None:
        """Keep the result from now on. Raises ScenarioError where the disk refuses."""
        text = json.dumps({"values": point.record, "summary": done.summary, "error": done.error}) + "\n"
        write_whole(self._path(point), lambda path: path.write_text(text, encoding="utf-8"))

    def _path(self, point: Point) -> Path:
        return self.folder / f"{point.key}.json"


@contextmanager
def owned(out: Path, *, force: bool = False) -> Iterator[PointStore]:
    """The store of a results folder, which no other sweep may use meanwhile.

    What killed sweeps left half-written is removed. Raises ScenarioError where the folder cannot be written, another
    sweep is writing it, or it holds what is no sweep's; with `force` the results of another command are removed.
    """
    store = PointStore(out)
    if force and results_in(out) not in (None, "sweep"):
        shutil.rmtree(usable_place(out), ignore_errors=True)
    check_kind(out, "sweep")
    if results_in(out) is None:
        for path in (path for name in ("scenario.yaml", "sweep_agg.csv", *PICTURES) for path in out.glob(name)):
            raise ScenarioError(f"{path}: is no sweep's, and would be replaced or removed; choose another --out")
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(store.folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _cannot_be_written(out, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ScenarioError(
                f"{out}: another sweep is writing there; wait for it, or choose another --out"
            ) from None
        _remove_leftovers(out)
        yield store
    finally:
        os.close(lock)


def _remove_leftovers(out: Path) -> None:
    try:
        for leftover in (*out.glob(".*.kvsim-tmp"), *(out / POINTS).glob(".*.kvsim-tmp")):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
        probe = out / POINTS / ".probe.kvsim-tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _cannot_be_written(out, error) from None


def _cannot_be_written(out: Path, error: OSError) -> ScenarioError:
    return ScenarioError(f"{out}: cannot be written ({error.strerror}); choose another folder with --out")


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, and put it in place. Raises ScenarioError."""
    try:
        with whole_file(path) as unfinished:
            write(unfinished)
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
    except OSError as error:
        raise ScenarioError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another folder with --out"
        ) from None
