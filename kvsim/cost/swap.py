"""What it costs to bring a preempted sequence back: over the host link, or by computing it again.

Swapping moves one block at a time, so small blocks pay for calls; recomputing does not see blocks at all
(PagedAttention paper, section 7.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsim.files import save_picture
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


def swap_ns(num_blocks: int, block_bytes: float, *, bandwidth_gb_s: float = 25.0, call_us: float = 10.0) -> Ns:
    """Integer nanoseconds to move blocks in one direction."""
    return round(HostLink(bandwidth_gb_s, call_us).swap_ns(num_blocks, block_bytes))


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


def plot_swap_and_recompute(
    path: str | Path,
    *,
    num_tokens: int = 1000,
    bytes_per_token: float = 131072,
    prefill_tokens_per_s: float = 8000.0,
    block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    bandwidth_gb_s: float = 25.0,
    call_us: float = 10.0,
) -> None:
    """Cost of both against the block size, as the paper's Figure 19: recompute flat, swap falling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    swap_ms = [
        round_trip_ns(num_tokens, size, bytes_per_token, bandwidth_gb_s=bandwidth_gb_s, call_us=call_us) / 1e6
        for size in block_sizes
    ]
    recompute_ms = recompute_ns(num_tokens, prefill_tokens_per_s) / 1e6
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    axes.plot(block_sizes, swap_ms, marker="o", color="#0072B2", label="swap out and in")
    axes.plot(block_sizes, [recompute_ms] * len(block_sizes), marker="s", color="#D55E00", label="recompute")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(block_sizes), [str(size) for size in block_sizes])
    axes.set(xlabel="block size (tokens)", ylabel="ms", ylim=(0, None), title=f"Bringing {num_tokens:,} tokens back")
    axes.legend()
    figure.tight_layout()
    save_picture(figure, path, dpi=120)
    plt.close(figure)
