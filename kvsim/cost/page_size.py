"""What the block size does to the decode kernel, and the block table to the L2 cache: stated factors, with sources.

Few measurements exist, and they disagree, so every factor comes with the range they span. All are relative to blocks
of 64 tokens.

* Block 1 against 64: kernel time ratio 0.98 to 1.00 at the median, 0.92 to 1.06 at the 5th and 95th percentile
  (FlashAttention 3 on H100 and H200, computed from NVIDIA's aiconfigurator data); whole decode step 1.16 (SGLang with
  FA3 on Hopper, github.com/sgl-project/sglang/pull/4832, CPU work included).
* Block 16 against 64: time per token 1.003 at one stream, throughput 1.3 % higher to 0.3 % lower at 16 and 32
  (FlashInfer, github.com/pegainfer-project/pegainfer/pull/554); MLA kernel 1.015
  (github.com/Dao-AILab/flash-attention/pull/2468).
* Block 1 against 16: 1.14 and 1.15 (paged prefill on MI355, github.com/ROCm/FlyDSL/pull/1066).
* Block 128 against 64: step 1.008 (the same SGLang source); MLA kernel 0.82, where the page equals the tile of the
  hardware's bulk copy. vLLM's own kernel of 0.2.7 was best at 16 and slower at 128 (arXiv 2405.04437, section 7.2).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple


class BlockSizeFactor(NamedTuple):
    """Multiplier on decode attention time, and the range that the sources span."""

    factor: float
    low: float
    high: float


_AGAINST_64: tuple[tuple[int, BlockSizeFactor], ...] = (
    (1, BlockSizeFactor(1.05, 0.98, 1.16)),
    (8, BlockSizeFactor(1.02, 0.99, 1.06)),
    (16, BlockSizeFactor(1.005, 0.99, 1.02)),
    (32, BlockSizeFactor(1.0, 0.99, 1.01)),
    (64, BlockSizeFactor(1.0, 1.0, 1.0)),
    (128, BlockSizeFactor(1.0, 0.82, 1.01)),
    (256, BlockSizeFactor(1.0, 0.82, 1.10)),
)


def block_size_factor(block_size: int, measured_at: int = 64) -> BlockSizeFactor:
    """Decode attention at `block_size` over what was measured at blocks of `measured_at`; log-linear between points."""
    own, reference = _against_64(block_size), _against_64(measured_at)
    if block_size == measured_at:
        return BlockSizeFactor(1.0, 1.0, 1.0)
    return BlockSizeFactor(own.factor / reference.factor, own.low / reference.factor, own.high / reference.factor)


def _against_64(block_size: int) -> BlockSizeFactor:
    if block_size <= _AGAINST_64[0][0]:
        return _AGAINST_64[0][1]
    for (left, low), (right, high) in pairwise(_AGAINST_64):
        if block_size <= right:
            share = math.log(block_size / left) / math.log(right / left)
            return BlockSizeFactor(*(a + share * (b - a) for a, b in zip(low, high, strict=True)))
    return _AGAINST_64[-1][1]


def l2_share(table_bytes: float, l2_bytes: float) -> float:
    """Share of the block tables that the L2 cache can hold, were nothing else in it."""
    return 1.0 if table_bytes <= l2_bytes else l2_bytes / table_bytes
