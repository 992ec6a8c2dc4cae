"""Where points run: `concurrent.futures.Executor` is the only abstraction."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import cast

from kvsim.types import ScenarioError

TASK_RETRIES = 3
"""How often a cluster repeats a task whose worker died."""


def default_jobs() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_executor(jobs: int) -> Iterator[Executor]:
    """`jobs` processes; on an error or an interrupt what has not begun is dropped."""
    executor = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_ignore_interrupts
    )
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster. Raises ScenarioError if there is none, or Dask is not installed."""
    try:
        from distributed import Client
    except ImportError:
        raise ScenarioError("--dask: needs the cluster extra: pip install 'kvsim[cluster]'") from None
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise ScenarioError(
            f"--dask {address}: no scheduler answers there ({error}); start one with `dask scheduler`"
        ) from None
    try:
        yield cast(Executor, client.get_executor(retries=TASK_RETRIES, pure=False))
    finally:
        client.close()


def _ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; only the parent decides what it means."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
