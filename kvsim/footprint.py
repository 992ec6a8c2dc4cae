"""How much memory a run needs at least, said before it starts, and the bound that holds while it runs."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.scenario.units import SIZE_EXAMPLES, parse_bytes
from kvsim.types import ScenarioError

if TYPE_CHECKING:
    from kvsim.scenario.resolve import ResolvedScenario
    from kvsim.scenario.schema import Scenario

BASE_BYTES = 55_000_000
"""The interpreter and what a run without pictures imports, as measured."""
BLOCK_BYTES = 55
"""Per block of paged memory: a reference count and a place in the free list (57 bytes measured)."""
CACHED_BLOCK_BYTES = 140
"""The same with a prefix index beside it (141 bytes measured)."""
REQUEST_BYTES = 250
"""Per request: its lengths and times, and its row of requests.csv (257 bytes measured)."""

MUCH_BYTES = 2**30
"""A run that needs more says so before it starts: until its blocks are set up nothing else moves."""


def check_footprint(resolved: ResolvedScenario, max_memory: str | None = None) -> str | None:
    """Bound the process to `max_memory` (a size), and refuse a scenario that needs more, or more than there is.

    Returns what somebody who waits should know, if it is a lot. Raises ScenarioError with what it needs and what to
    change.
    """
    limit = available_bytes()
    source = "the machine has"
    if max_memory is not None:
        limit, source = _parse_limit(max_memory), "--max-memory allows"
    needed = least_bytes(resolved.scenario)
    if needed > limit:
        raise ScenarioError(
            f"{resolved.document.source}: needs at least {_gib(needed)} of memory, {source} {_gib(limit)}: "
            "take fewer blocks or requests, or --record summary"
        )
    if max_memory is not None:
        _bound(limit)
    if needed <= MUCH_BYTES:
        return None
    num_blocks = _num_blocks(resolved.scenario)
    what = f"its {num_blocks:,} blocks are set up first, which takes a while" if num_blocks else "most for its requests"
    return f"{resolved.document.source}: needs at least {_gib(needed)} of memory: {what}"


def least_bytes(scenario: Scenario) -> int:
    """Bytes a run needs at least: what is known before it starts."""
    from kvsim.metrics.steps import STEP_FIELDS

    num_blocks = _num_blocks(scenario)
    per_block = CACHED_BLOCK_BYTES if getattr(scenario.allocator, "enable_prefix_caching", False) else BLOCK_BYTES
    num_requests = getattr(scenario.workload, "num_requests", None) or 0
    num_steps = num_requests // max(1, getattr(scenario.scheduler, "max_num_seqs", 1))
    steps = num_steps * 8 * len(STEP_FIELDS) if "steps" in scenario.record else 0
    return BASE_BYTES + num_blocks * per_block + num_requests * REQUEST_BYTES + steps


def _num_blocks(scenario: Scenario) -> int:
    """Blocks that are modelled one by one, those of the host included."""
    from kvsim.scenario.pool import Pool
    from kvsim.scenario.schema import PagedMemory

    pool = Pool(scenario)
    return pool.num_blocks + pool.num_host_blocks if isinstance(scenario.allocator, PagedMemory) else 0


def available_bytes() -> int:
    """Memory of this machine, or of the control group it is confined to."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _parse_limit(text: str) -> int:
    try:
        limit = parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise ScenarioError(f"--max-memory {text}: {error}") from None
    if limit <= 0:
        raise ScenarioError(f"--max-memory {text}: must be above 0: give {SIZE_EXAMPLES}")
    return limit


def _bound(limit: int) -> None:
    """The operating system refuses more; Python then raises MemoryError, which the command line explains."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
