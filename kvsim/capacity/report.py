"""What `kvsim capacity` tells: where the memory of one GPU goes, and what the KV part of it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsim.capacity.terms import num_blocks_at_most
from kvsim.catalog import GIB

HEAD_ROOM = 0.20
"""Share of the blocks to leave free at the expected peak."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Where the memory of one GPU goes, in bytes, and what the KV part of it can hold.

    Per-token and per-block sizes are those of one GPU: a tensor-parallel rank of the pipeline stage that keeps most.
    `problem` says why the engine would refuse to start and which number to change; None where it fits. `None` bytes
    were not needed (the KV size was given).
    """

    model: str
    gpu: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    bytes_per_token: int
    block_bytes: int
    total_memory_bytes: int | None
    budget_bytes: int | None
    weight_bytes: int | None
    activation_bytes: int | None
    non_torch_bytes: int | None
    kv_bytes: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    """Blocks that `swap_space` holds."""
    num_blocks_per_request: int
    """Blocks one request of `max_model_len` tokens holds at most."""
    max_concurrency: float
    """Requests of `max_model_len` tokens that fit at once."""
    problem: str | None
    notes: tuple[str, ...]
    is_activation_estimated: bool = False
    """From `max_num_batched_tokens` and `max_num_seqs`, not given."""

    @property
    def num_tokens(self) -> int:
        """Tokens the KV cache holds."""
        return self.num_gpu_blocks * self.block_size

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def start_up_lines(self) -> tuple[str, str]:
        """The two lines vLLM logs when it starts."""
        return (
            f"GPU KV cache size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x",
        )

    @property
    def outside_bytes(self) -> int | None:
        """Memory that `gpu_memory_utilization` leaves alone (CUDA graphs, fragmentation, other processes)."""
        if self.total_memory_bytes is None or self.budget_bytes is None:
            return None
        return self.total_memory_bytes - self.budget_bytes

    @property
    def num_blocks_that_fit(self) -> int:
        """Blocks the memory leaves room for, whatever `num_gpu_blocks_override` says."""
        return max(0, self.kv_bytes) // self.block_bytes

    @property
    def num_blocks_at_most(self) -> int | None:
        """Blocks that would use up what lies outside the budget too, to the last byte."""
        if self.outside_bytes is None:
            return None
        return num_blocks_at_most(self.kv_bytes, self.outside_bytes, self.block_bytes)

    @property
    def num_squeezing_blocks(self) -> int | None:
        """Blocks beyond this cap that would use up what lies outside the budget, to the last byte."""
        return None if self.num_blocks_at_most is None else max(0, self.num_blocks_at_most - self.num_gpu_blocks)

    @property
    def num_blocks_with_head_room(self) -> int:
        """Blocks to plan the peak for: the rest is the head-room that keeps preemption away."""
        return int(self.num_gpu_blocks * (1 - HEAD_ROOM))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data (JSON): every field above, sizes in bytes, and the derived figures."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "num_tokens": self.num_tokens,
            "max_concurrency": round(self.max_concurrency, 4),
            "start_up_lines": list(self.start_up_lines),
            "outside_bytes": self.outside_bytes,
            "num_blocks_that_fit": self.num_blocks_that_fit,
            "num_blocks_at_most": self.num_blocks_at_most,
            "num_squeezing_blocks": self.num_squeezing_blocks,
            "num_blocks_with_head_room": self.num_blocks_with_head_room,
            "fits": self.fits,
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """The report as text."""
        lines = [self._title(), "", *self._memory_lines(), "", *self.start_up_lines, "", *self._advice()]
        lines += [f"Note: {note}" for note in self.notes]
        if self.problem is not None:
            lines.append(f"DOES NOT FIT: {self.problem}")
        return "\n".join(lines) + "\n"

    def _title(self) -> str:
        ranks = f", one of {self.tensor_parallel_size} ranks" if self.tensor_parallel_size > 1 else ""
        stages = f", one of {self.pipeline_parallel_size} stages" if self.pipeline_parallel_size > 1 else ""
        return f"{self.model} on {self.gpu or 'a given KV cache'}{ranks}{stages}"

    def _memory_lines(self) -> list[str]:
        steps = f"  (steps of {self.max_num_batched_tokens:,} tokens, {self.max_num_seqs:,} sequences)"
        rows: list[tuple[str, int | None, str]] = [
            ("total as the runtime sees it", self.total_memory_bytes, ""),
            (f"budget ({self.gpu_memory_utilization:g} of it)", self.budget_bytes, ""),
            ("- weights", self.weight_bytes, ""),
            ("- peak activations", self.activation_bytes, steps if self.is_activation_estimated else ""),
            ("- outside PyTorch", self.non_torch_bytes, ""),
            ("= KV cache", self.kv_bytes, ""),
        ]
        lines = [f"{label:<30}{size / GIB:>10.2f} GiB{remark}" for label, size, remark in rows if size is not None]
        lines.append(f"{'one token':<30}{self.bytes_per_token:>10,} bytes ({self.kv_cache_dtype})")
        block = f"one block of {self.block_size} token{'s' * (self.block_size > 1)}"
        lines.append(f"{block:<30}{self.block_bytes:>10,} bytes")
        lines.append(f"{'blocks':<30}{self.num_gpu_blocks:>10,}")
        if self.num_cpu_blocks:
            lines.append(f"{'blocks of swap space':<30}{self.num_cpu_blocks:>10,}")
        return lines

    def _advice(self) -> list[str]:
        if not self.num_gpu_blocks:
            return []  # There is nothing to plan with.
        planned = self.num_blocks_with_head_room
        lines = [
            f"Plan the peak for {planned:,} blocks ({planned * self.block_size:,} tokens) and leave {HEAD_ROOM:.0%} "
            f"free: a cache that runs full preempts and recomputes."
        ]
        if self.outside_bytes is not None:
            is_own = self.num_gpu_blocks == self.num_blocks_that_fit
            larger = "A larger block cap" if is_own else f"A block cap above {self.num_blocks_that_fit:,}"
            lines.append(
                f"{larger} squeezes the {self.outside_bytes / GIB:.2f} GiB outside the budget (CUDA graphs, "
                f"fragmentation, other processes): 100 blocks more take {100 * self.block_bytes / GIB:.2f} GiB, and at "
                f"{self.num_blocks_at_most:,} blocks nothing is left."
            )
        return lines
