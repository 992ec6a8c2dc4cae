"""What a worker does: a scenario as text in, a row out. Needs no disk that is shared."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.types import KvsimError


class File(NamedTuple):
    """A file that travels with its task: the key that names it, its name at home, its content (zlib)."""

    key: tuple[str, ...]
    name: str
    content: bytes


class Task(NamedTuple):
    """One point as it travels: the resolved scenario as YAML, and files that are not on the worker's disk."""

    scenario: str
    files: tuple[File, ...] = ()


class Done(NamedTuple):
    """What comes back: the flattened summary, or the reason why there is none."""

    summary: dict[str, Any]
    error: str = ""


def work(task: Task) -> Done:
    """Run one point; the scenario's and the engine's errors come back as text.

    Errors that are the machine's (memory, disk) are raised: elsewhere, or later, the point may succeed.
    """
    from kvsim.footprint import check_footprint
    from kvsim.metrics.export import flatten
    from kvsim.runs import QUIET, run_resolved
    from kvsim.scenario.resolve import resolve
    from kvsim.yaml_loader import parse_yaml

    places: dict[str, str] = {}
    try:
        document = parse_yaml(task.scenario, "scenario.yaml")
        places = _unpack(task.files, document.data)
        # What the scenario itself gives rise to is known at home, with the lines of the file that is there.
        resolved = replace(resolve(document).with_values({"record": ["summary"]}), warnings=())
        check_footprint(resolved)
        summary = flatten(run_resolved(resolved, out=None, options=QUIET).summary)
    except KvsimError as error:
        return Done({}, _at_home(str(error), places))
    except (MemoryError, OSError):
        raise
    except Exception as error:
        return Done({}, _at_home(f"{type(error).__name__}: {error}", places))
    return Done({name: _at_home(value, places) for name, value in summary.items()})


def _unpack(files: tuple[File, ...], data: dict[str, Any]) -> dict[str, str]:
    """Write files to this worker's disk (once), and let the scenario name those; returns place -> name at home."""
    places = {}
    for file in files:
        place = str(_materialised(file))
        places[place] = file.name
        *parents, last = file.key
        block = data
        for part in parents:
            block = block[part]
        block[last] = place
    return places


def _materialised(file: File) -> Path:
    """The folder is named by the content; the file keeps its name, whose ending tells the format."""
    base = Path(tempfile.gettempdir()) / f"kvsim-files-{os.getuid()}"
    folder = base / hashlib.sha256(file.content).hexdigest()[:24]
    base.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)
    path = folder / Path(file.name).name
    if not path.exists():
        temporary = folder / f".{path.name}.{os.getpid()}"
        temporary.write_bytes(zlib.decompress(file.content))
        temporary.replace(path)
    return path


def _at_home(value: Any, places: dict[str, str]) -> Any:
    """Texts that name a file of this worker name it as its owner does."""
    if isinstance(value, str):
        for place, name in places.items():
            value = value.replace(place, name)
    return value
