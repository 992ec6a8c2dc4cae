"""The linear cost model, term by term."""

from __future__ import annotations

from importlib.resources import files

import yaml

from kvsim.cost.linear import LinearCost
from kvsim.scenario.schema import LinearCostConfig
from kvsim.scheduling.plan import StepShape


def test_a_step_is_the_sum_of_its_terms() -> None:
    cost = LinearCost(step_ms=6.0, prefill_token_us=18, decode_us=2, context_token_ns=45)
    shape = StepShape(num_decodes=3, context_tokens=1000, prefills=((0, 100), (16, 28)))
    assert cost.step_ns(shape) == 6_000_000 + 128 * 18_000 + 3 * 2_000 + 1000 * 45


def test_a_step_takes_time() -> None:
    assert LinearCost(0, 0, 0, 0).step_ns(StepShape(num_decodes=1)) == 1


def test_bytes_moved() -> None:
    """K51: 1,000 tokens of 128 KiB, block size 16, 25 GB/s, 10 us per block: 63 blocks there and back in 11.83 ms."""
    cost = LinearCost(0, 0, 0, 0, swap_bandwidth_gb_s=25, swap_block_us=10, bytes_per_token=131072, block_size=16)
    round_trip = cost.step_ns(StepShape(num_swapped_out_blocks=63)) + cost.step_ns(StepShape(num_swapped_in_blocks=63))
    assert abs(round_trip / 1e6 - 11.83) < 0.005


def test_copies_read_and_write() -> None:
    cost = LinearCost(0, 0, 0, 0, copy_bandwidth_gb_s=1000, bytes_per_token=1_000_000)
    assert cost.step_ns(StepShape(num_copies=1, num_copied_tokens=4)) == 8_000
    assert cost.step_ns(StepShape(num_moved_slots=4)) == 8_000


def test_padding_is_paid_for() -> None:
    cost = LinearCost(0, 1, 0, 0)
    assert cost.step_ns(StepShape(prefills=((0, 10), (0, 30)), padded_batch=(2, 30))) == 60_000


def test_the_catalog_states_the_defaults() -> None:
    stated = yaml.safe_load(files("kvsim.catalog").joinpath("costs.yaml").read_text("utf-8"))["default"]
    assert stated == LinearCostConfig().model_dump(exclude={"type"})
