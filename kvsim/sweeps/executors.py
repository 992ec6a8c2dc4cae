"""Where points run: `concurrent.futures.Executor` is the only abstraction."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from kvsim.types import KvsimError, ScenarioError

TASK_RETRIES = 3
"""How often a cluster repeats a task whose worker died."""


def default_jobs() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def executor_for(jobs: int) -> Iterator[Executor | None]:
    """`jobs` processes; None where one job is wanted, which this process does. Raises KvsimError where one dies."""
    if jobs == 1:
        yield None
        return
    try:
        with local_executor(jobs) as executor:
            yield executor
    except BrokenExecutor:
        raise KvsimError("a worker process died: out of memory? try --jobs 1") from None


@contextmanager
def local_executor(jobs: int) -> Iterator[Executor]:
    """`jobs` processes, which end with this one, however it ends; after an error they stop at once."""
    executor = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        with _interrupts_held():
            executor.submit(os.getpid)
        yield executor
    except BaseException:
        for process in list(getattr(executor, "_processes", None) or {}):
            _stop(process)
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """The workers of a Dask cluster. Raises ScenarioError if there is none, or Dask is not installed."""
    try:
        from distributed import Client
    except ImportError:
        raise ScenarioError("--dask: Dask is not installed: pip install distributed") from None
    connect: Any = Client
    try:
        client = connect(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise ScenarioError(
            f"--dask {address}: no scheduler answers there ({error}); start one with `dask scheduler`"
        ) from None
    try:
        yield cast(Executor, client.get_executor(retries=TASK_RETRIES, pure=False))
    finally:
        client.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches the whole process group, but only the parent decides what it means.

    Processes inherit the mask: those that start in this block never see it, and for us it waits until the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """A worker whose parent was killed would wait for its next point for ever; and stdout is the parent's alone."""
    import threading

    # What code of the user's own prints must not stand in the parent's answer.
    sys.stdout = sys.stderr
    threading.Thread(target=_watch_the_parent, daemon=True).start()


def _watch_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _stop(os.getpid())


def _stop(process_id: int) -> None:
    try:
        os.kill(process_id, signal.SIGKILL)
    except ProcessLookupError:
        return
