"""Finished points on disk: one small file each, whole or absent, so that a killed sweep loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim.sweeps.grid import Point
from kvsim.sweeps.work import Done
from kvsim.types import ScenarioError

POINTS = "points"


class PointStore:
    """The folder `points/` of a sweep. Raises ScenarioError where it cannot be written."""

    def __init__(self, out: Path) -> None:
        self.folder = out / POINTS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("*.tmp"):
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise ScenarioError(
                f"{out}: cannot be written ({error.strerror}); choose another folder with --out"
            ) from None

    def load(self, point: Point) -> Done | None:
        """The point's result if it was finished; a file that does not read back counts as absent."""
        try:
            value: dict[str, Any] = json.loads(self._path(point).read_text(encoding="utf-8"))
            return Done(value["summary"], value["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, point: Point, done: Done) -> None:
        """Keep the result from now on."""
        text = json.dumps({"values": point.record, "summary": done.summary, "error": done.error}) + "\n"
        write_whole(self._path(point), lambda path: path.write_text(text, encoding="utf-8"))

    def _path(self, point: Point) -> Path:
        return self.folder / f"{point.key}.json"


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, and put it in place. Raises ScenarioError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ScenarioError(f"{path}: cannot be written ({error.strerror})") from None
