"""A small sweep to try things on, in this process or as a command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import listen_to_interrupts

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "memory": {"num_gpu_blocks_override": 200},
    "scheduler": {"max_model_len": 512},
    "workload": {
        "num_requests": 20,
        "arrivals": {"type": "poisson", "request_rate": 20.0},
        "lengths": {"type": "uniform", "prompt": [10, 100], "output": [10, 100]},
    },
    "slo": {"ttft": "2s"},
}
BLOCKS = {"allocator.block_size": [8, 16]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def scenario_file(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(json.dumps(SMALL | changes))
    return path


def kvsim_command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `kvsim ARGUMENTS` to its end."""
    command = [sys.executable, "-m", "kvsim", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


def slow_scenario(folder: Path) -> Path:
    sweep = {"vary": {"allocator.block_size": [8, 16, 32]}, "seeds": 4}
    return scenario_file(folder, workload=SMALL["workload"] | {"num_requests": 2500}, sweep=sweep)


def start_sweep(scenario: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvsim", "sweep", str(scenario), "--out", str(out), *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_interrupts,
    )


def points_in(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "points").glob("[!.]*.json")}


def wait_for_points(process: subprocess.Popen[str], out: Path, count: int) -> None:
    while process.poll() is None and len(points_in(out)) < count:
        time.sleep(0.01)


def assert_no_worker_outlives(session_id: int) -> None:
    """Workers notice within moments that their parent is gone."""
    deadline = time.monotonic() + 20
    while alive := processes_of_session(session_id):
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def processes_of_session(session_id: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session_id and fields[0] != "Z":
            found.append(int(entry.name))
    return found
