"""What a worker does: a scenario as text in, a row out. Needs no disk that is shared."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.types import KvsimError


class Task(NamedTuple):
    """One point as it travels: the resolved scenario as YAML, and the files it names (None: they are there)."""

    scenario: str
    files: dict[str, bytes] | None = None


class Done(NamedTuple):
    """What comes back: the flattened summary, or the reason why there is none."""

    summary: dict[str, Any]
    error: str = ""


def work(task: Task) -> Done:
    """Run one point. Errors of the scenario and of the engine come back as text."""
    from kvsim.metrics.export import flatten
    from kvsim.runs import QUIET, run_resolved
    from kvsim.scenario.resolve import scenario_from_text

    try:
        text = task.scenario if task.files is None else _with_local_files(task.scenario, task.files)
        resolved = scenario_from_text(text).with_values({"record": ["summary"]})
        result = run_resolved(resolved, out=None, options=QUIET)
    except KvsimError as error:
        return Done({}, str(error))
    except Exception as error:
        return Done({}, f"{type(error).__name__}: {error}")
    return Done(flatten(result.summary))


def _with_local_files(text: str, files: dict[str, bytes]) -> str:
    """Write the files that travelled with the task once per worker, and let the scenario name those."""
    for name, content in files.items():
        text = text.replace(name, str(_materialised(name, content)))
    return text


def _materialised(name: str, content: bytes) -> Path:
    folder = Path(tempfile.gettempdir()) / f"kvsim-files-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:24]}-{Path(name).name}"
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(path)
    return path
