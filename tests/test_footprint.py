"""The memory a run will need, said and bounded before it starts."""

from __future__ import annotations

import pytest

from kvsim.footprint import BASE_BYTES, check_footprint, least_bytes
from kvsim.scenario.resolve import scenario_from_text
from kvsim.types import ScenarioError


def test_blocks_and_requests_are_foretold() -> None:
    text = "memory: {num_gpu_blocks_override: 1000000}\nworkload: {num_requests: 100000}\nrecord: [requests]\n"
    assert least_bytes(scenario_from_text(text).scenario) == BASE_BYTES + 1_000_000 * 55 + 100_000 * 250


def test_contiguous_memory_costs_nothing_per_slot() -> None:
    text = "engine: orca-max\nmemory: {num_gpu_blocks_override: 1000000}\n"
    assert least_bytes(scenario_from_text(text).scenario) == BASE_BYTES


def test_more_than_there_is_is_refused_before_it_starts() -> None:
    huge = scenario_from_text("memory: {num_gpu_blocks_override: 100000000}\n")
    with pytest.raises(ScenarioError, match=r"needs at least 5\.\d\d GiB of memory, --max-memory allows 1\.00 GiB"):
        check_footprint(huge, "1GiB")


def test_what_takes_long_to_set_up_is_said_before() -> None:
    assert check_footprint(scenario_from_text("memory: {num_gpu_blocks_override: 1000000}\n", "s.yaml")) is None
    notice = check_footprint(scenario_from_text("memory: {num_gpu_blocks_override: 30000000}\n", "s.yaml"))
    assert notice is not None
    assert notice.startswith("s.yaml: needs at least 1.")
    assert "30,000,000 blocks are set up first" in notice
