"""Sweeps on a cluster of two real worker processes."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweeps.sweeping import BLOCKS, SMALL, files_of, kvsim_command, points_in, scenario_file

import kvsim
from kvsim.types import ScenarioError

distributed = pytest.importorskip("distributed", reason="the cluster extra is not installed")

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i * 0.05:.2f},{20 + i},{30 + i}\n" for i in range(20))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Workers with a working directory and a temporary folder of their own, so that nothing is found by chance."""
    import dask

    folder = tmp_path_factory.mktemp("cluster")
    settings = {"temporary-directory": str(folder), "distributed.nanny.environ": {"TMPDIR": str(folder)}}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=logging.CRITICAL
        ) as found,
    ):
        yield found


def test_a_cluster_gives_the_same_bytes(cluster: Any, tmp_path: Path) -> None:
    kvsim.sweep(SMALL, BLOCKS, seeds=3, jobs=1, out=tmp_path / "here", plots=True)
    kvsim.sweep(SMALL, BLOCKS, seeds=3, dask=cluster.scheduler_address, out=tmp_path / "there", plots=True)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


def test_files_travel_with_the_task(cluster: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    bad = tmp_path / "bad.csv"
    bad.write_text(TRACE + "x,y,z\n")
    scenario = {key: value for key, value in SMALL.items() if key != "workload"} | {"workload": {"trace": str(trace)}}
    vary = BLOCKS | {"workload.trace": [str(trace), str(bad)]}
    kvsim.sweep(scenario, vary, jobs=1, out=tmp_path / "here")

    result = kvsim.sweep(scenario, vary, dask=cluster.scheduler_address, out=tmp_path / "there")
    assert [row["status"] for row in result.rows] == ["ok", "failed", "ok", "failed"]
    assert str(bad) in result.rows[1]["reason"]
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


def test_the_command_takes_an_address(cluster: Any, tmp_path: Path) -> None:
    scenario = scenario_file(tmp_path, sweep={"vary": BLOCKS})
    options = ("--dask", cluster.scheduler_address, "--no-plots", "--json", "--out", "out")
    done = kvsim_command("sweep", scenario, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 2


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense"])
def test_no_scheduler_there_is_said(tmp_path: Path, address: str) -> None:
    with pytest.raises(ScenarioError, match="no scheduler answers"):
        kvsim.sweep(SMALL, BLOCKS, dask=address, out=tmp_path / "out")


@pytest.mark.deep
def test_a_worker_killed_half_way_changes_nothing(cluster: Any, tmp_path: Path) -> None:
    scenario = SMALL | {"workload": SMALL["workload"] | {"num_requests": 2500}}
    vary = {"allocator.block_size": [8, 16, 32]}
    kvsim.sweep(scenario, vary, seeds=4, jobs=1, out=tmp_path / "here", plots=True)
    killer = threading.Thread(target=_kill_a_worker, args=(cluster, tmp_path / "there", 4))
    killer.start()
    kvsim.sweep(scenario, vary, seeds=4, dask=cluster.scheduler_address, out=tmp_path / "there", plots=True)
    killer.join()
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")


def _kill_a_worker(cluster: Any, out: Path, after_points: int) -> None:
    while len(points_in(out)) < after_points:
        time.sleep(0.01)
    os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)


@pytest.mark.deep
def test_the_documented_commands_start_a_cluster(repo_root: Path, tmp_path: Path) -> None:
    """Those of docs/cluster.md, with an address of this machine."""
    text = (repo_root / "docs" / "cluster.md").read_text()
    commands = [line[2:].split("#")[0].strip() for line in text.splitlines() if line.startswith("$ ")]
    address = f"tcp://127.0.0.1:{_free_port()}"
    _, scheduler, worker, sweep = (command.replace("tcp://HOST:8786", address) for command in commands)
    scenario = scenario_file(tmp_path, sweep={"vary": BLOCKS})
    sweep = sweep.replace("scenarios/block-size.yaml", str(scenario))
    started = [_start(f"{scheduler} --host {address} --no-dashboard", tmp_path), _start(worker, tmp_path)]
    try:
        done = kvsim_command(*shlex.split(sweep)[1:], "--out", "out", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / "out" / "sweep.csv").read_text().splitlines()) == 3
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


def _start(command: str, cwd: Path) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).parent / shlex.split(command)[0]
    return subprocess.Popen(
        [str(program), *shlex.split(command)[1:]],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
