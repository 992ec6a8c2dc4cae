"""How much KV memory a scenario has: from model, GPU and bytes to blocks and slots."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

from kvsim.scenario.fields import Custom
from kvsim.scenario.schema import PagedMemory, Scenario

if TYPE_CHECKING:
    from kvsim.catalog import GpuSpec
    from kvsim.memory.geometry import ModelGeometry

MAX_BLOCKS = 100_000_000

WORTHWHILE_GAIN = 1.05
"""Windows that save less than this are named without a figure."""


class Pool:
    """How much KV memory a scenario has: bytes turned into blocks and slots."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.block_size = cast(int, getattr(scenario.allocator, "block_size", None) or _custom_block_size(scenario))

    @cached_property
    def geometry(self) -> ModelGeometry:
        """The model's KV geometry."""
        from kvsim.catalog import load_model

        model = self.scenario.model
        if isinstance(model, str):
            return load_model(model)
        return load_model({key: value for key, value in model.model_dump().items() if value is not None})

    @cached_property
    def gpu(self) -> GpuSpec:
        """The GPU, from the catalog or as the scenario describes it."""
        from kvsim.catalog import GpuSpec, load_gpu

        gpu = self.scenario.gpu
        if isinstance(gpu, str):
            return load_gpu(gpu)
        return GpuSpec(gpu.name or "gpu", gpu.memory, 0.0, 0.0, 0, 0.0)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token on one rank."""
        scenario = self.scenario
        return self.geometry.bytes_per_token(scenario.kv_cache_dtype, scenario.tensor_parallel_size)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks as configured, a null block included."""
        memory = self.scenario.memory
        if memory.num_gpu_blocks_override is not None:
            return memory.num_gpu_blocks_override
        return self._num_blocks_in(self.num_kv_bytes)

    @cached_property
    def num_kv_bytes(self) -> int:
        """Bytes of the KV cache, as given or as the GPU has left."""
        kv_bytes = self.scenario.memory.kv_cache_memory_bytes
        return self._kv_bytes_of_gpu() if kv_bytes is None else kv_bytes

    @property
    def num_slots(self) -> int:
        """Tokens the pool holds; contiguous engines get exactly these."""
        return self.num_blocks * self.block_size

    @property
    def num_usable_slots(self) -> int:
        """Those of them that requests can have: all but the null block's."""
        return self.num_slots - self._num_null_blocks * self.block_size

    @property
    def _num_null_blocks(self) -> int:
        return int(getattr(self.scenario.allocator, "null_block", False))

    @cached_property
    def num_host_blocks(self) -> int:
        """Blocks of host memory for swapping."""
        memory = self.scenario.memory
        if memory.num_cpu_blocks_override is not None:
            return memory.num_cpu_blocks_override
        return self._num_blocks_in(memory.swap_space) if memory.swap_space else 0

    @cached_property
    def max_model_len(self) -> int | None:
        """The scenario's limit, else the model's, else none."""
        limit = getattr(self.scenario.scheduler, "max_model_len", None)
        return self.geometry.max_model_len if limit is None else int(limit)

    def problem(self) -> str | None:
        """Why nothing could ever run in it, and what to change; None where it is large enough."""
        needed = 1 + self._num_null_blocks
        if self.num_blocks > MAX_BLOCKS:
            return (
                f"holds {self.num_blocks:,} blocks; at most {MAX_BLOCKS:,} are modelled: give it less, or larger blocks"
            )
        if self.num_blocks >= needed:
            return None
        null_block = ", one of which is the null block" if needed > 1 else ""
        if self.scenario.memory.num_gpu_blocks_override is not None:
            return f"is {self.num_blocks}; must be at least {needed} blocks{null_block}"
        return (
            f"holds {self.num_blocks} blocks of {self.block_size:,} tokens ({self.bytes_per_token:,} bytes a token), "
            f"and {needed} must fit{null_block}: give it at least "
            f"{needed * self.block_size * self.bytes_per_token:,} bytes, or allocator.block_size a smaller value"
        )

    def notes(self) -> tuple[str, ...]:
        """What the user should know about the pool: what the model keeps, and the run does not simulate."""
        return (*self._note_of_the_encoder(), *self._note_of_windows())

    def _note_of_the_encoder(self) -> tuple[str, ...]:
        if not (num_tokens := self.geometry.num_encoder_tokens):
            return ()
        return (
            f"model: every request keeps the KV of {num_tokens:,} tokens of the encoder's output beside its own; the "
            f"run does not simulate it: kvsim capacity counts it",
        )

    def _note_of_windows(self) -> tuple[str, ...]:
        """Windows of the model that the run does not use."""
        allocator, limit = self.scenario.allocator, self.max_model_len
        # What a custom allocator does about windows is its own affair.
        if isinstance(allocator, Custom) or getattr(allocator, "sliding_window", None) is not None:
            return ()
        windowed = [group for group in self.geometry.groups if group.window is not None]
        # A window as long as the longest text never drops anything.
        if not windowed or (limit is not None and all((group.window or 0) >= limit for group in windowed)):
            return ()
        num_layers = sum(group.num_layers for group in windowed)
        windows = " or ".join(f"{window:,}" for window in sorted({group.window or 0 for group in windowed}))
        return (
            f"model: {num_layers} of its {self.geometry.num_hidden_layers} layers keep a window of {windows} tokens "
            f"only; the run simulates them as full attention, which keeps every token: {self._gain_of_windows(limit)}",
        )

    def _gain_of_windows(self, max_model_len: int | None) -> str:
        from kvsim.capacity import window_gain

        scenario, text = self.scenario, "kvsim capacity says how much more fits"
        budget = getattr(scenario.scheduler, "max_num_batched_tokens", None)
        if max_model_len is not None and budget is not None:
            gain = window_gain(
                self.geometry,
                block_size=self.block_size,
                max_model_len=max_model_len,
                max_num_batched_tokens=budget,
                kv_cache_dtype=scenario.kv_cache_dtype,
                tensor_parallel_size=scenario.tensor_parallel_size,
            )
            if gain > WORTHWHILE_GAIN:
                text = (
                    f"kvsim capacity, which counts the windows, says that {gain:.1f} times as many requests of "
                    f"{max_model_len:,} tokens fit"
                )
        if self.geometry.sliding_window is None or not isinstance(scenario.allocator, PagedMemory):
            return text
        return f"{text}; allocator.sliding_window (without enable_prefix_caching) frees what lies behind the window"

    def _num_blocks_in(self, num_bytes: int) -> int:
        from kvsim.memory.geometry import num_gpu_blocks

        return num_gpu_blocks(num_bytes, self.block_size, self.bytes_per_token)

    def _kv_bytes_of_gpu(self) -> int:
        from kvsim.capacity import kv_cache_bytes

        return kv_cache_bytes(self.geometry, self.gpu, self.scenario)


def _custom_block_size(scenario: Scenario) -> int:
    keywords = scenario.allocator.keywords if isinstance(scenario.allocator, Custom) else {}
    block_size = keywords.get("block_size", 16)
    return block_size if isinstance(block_size, int) and block_size > 0 else 16
