"""The linear cost model: a step costs a constant, a price per token and a price per byte moved."""

from __future__ import annotations

from kvsim.scheduling.plan import StepShape
from kvsim.types import NS_PER_MS, NS_PER_US, Ns


class LinearCost:
    """A `CostModel` of one expression; where the coefficients come from is in `catalog/costs.yaml`.

    `bytes_per_token` and `block_size` turn copies and swaps into bytes. A copy within the device reads and writes.
    Engines that pad prompts pay for the padding. All prices are precomputed in ns.
    """

    def __init__(
        self,
        step_ms: float = 6.0,
        prefill_token_us: float = 18.0,
        decode_us: float = 0.0,
        context_token_ns: float = 45.0,
        *,
        copy_bandwidth_gb_s: float = 1500.0,
        swap_bandwidth_gb_s: float = 25.0,
        swap_block_us: float = 10.0,
        bytes_per_token: int = 0,
        block_size: int = 1,
    ) -> None:
        self.step = step_ms * NS_PER_MS
        self.prefill_token = prefill_token_us * NS_PER_US
        self.decode = decode_us * NS_PER_US
        self.context_token = context_token_ns
        self.copied_token = 2 * bytes_per_token / copy_bandwidth_gb_s
        self.swapped_block = swap_block_us * NS_PER_US + block_size * bytes_per_token / swap_bandwidth_gb_s

    def step_ns(self, shape: StepShape) -> Ns:
        """Duration of the step in integer nanoseconds, at least 1."""
        num_decodes, context_tokens, prefills, _, num_copied, num_out, num_in = shape[:7]
        cost = self.step + self.decode * num_decodes + self.context_token * context_tokens
        if prefills:
            num_prompts, longest = shape.padded_batch
            cost += self.prefill_token * (num_prompts * longest or shape.num_prefill_tokens)
        if num_copied or shape.num_moved_slots:
            cost += self.copied_token * (num_copied + shape.num_moved_slots)
        if num_out or num_in:
            cost += self.swapped_block * (num_out + num_in)
        return int(cost + 0.5) or 1
