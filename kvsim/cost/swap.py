"""What it costs to bring a preempted sequence back: over the host link, or by computing it again.

Swapping moves one block at a time, so small blocks pay for calls; recomputing does not see blocks at all
(PagedAttention paper, section 7.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsim.types import NS_PER_S, NS_PER_US, Ns


@dataclass(frozen=True, slots=True)
class HostLink:
    """One direction of the link between host and device.

    `call_us` is paid per block copied, `copies_per_block` is the number of separate copies a block needs (vLLM 0.x
    keeps K and V of every layer apart: twice the number of layers).
    """

    bandwidth_gb_s: float = 25.0
    call_us: float = 10.0
    copies_per_block: int = 1

    def swap_ns(self, num_blocks: int, block_bytes: float) -> float:
        """Nanoseconds to move `num_blocks` blocks of `block_bytes` in one direction."""
        calls = num_blocks * self.copies_per_block * self.call_us * NS_PER_US
        return calls + num_blocks * block_bytes / self.bandwidth_gb_s


PER_CALL_COPY_US = 2.3
"""One cudaMemcpyAsync; measured with 256-byte copies on PCIe 5 (github.com/taco-project/FlexKV/pull/193).

Other sources lie between 0.65 us (batched copies of 28 KiB, H100, github.com/vllm-project/vllm/pull/42212) and 5.5 us
(per-entry copies of 4 KiB, MI300X, github.com/vllm-project/vllm/pull/40549): the cost of small blocks is known within
a factor of about three either way."""

LARGE_COPY_SHARE = 0.8
"""Share of a PCIe link's theoretical rate that large copies reach: 25 of 32 GB/s on an A100
(github.com/ZaidQureshi/bam/issues/54), 50 of 64 GB/s on an H100 (vLLM blog on KV offloading, 2026-01-08)."""


def round_trip_ns(
    num_tokens: int,
    block_size: int,
    bytes_per_token: float,
    *,
    bandwidth_gb_s: float = 25.0,
    call_us: float = 10.0,
) -> Ns:
    """Out and in again for a sequence that stores `num_tokens`: whole blocks travel, the last one's empty slots too."""
    num_blocks = math.ceil(num_tokens / block_size)
    return round(2 * HostLink(bandwidth_gb_s, call_us).swap_ns(num_blocks, block_size * bytes_per_token))


def recompute_ns(num_tokens: int, prefill_tokens_per_s: float) -> Ns:
    """Computing the KV of `num_tokens` again."""
    return round(num_tokens / prefill_tokens_per_s * NS_PER_S)


def break_even_tokens_per_s(num_tokens: int, round_trip: Ns) -> float:
    """The prefill speed above which recomputing is cheaper than the round trip."""
    return num_tokens / round_trip * NS_PER_S
