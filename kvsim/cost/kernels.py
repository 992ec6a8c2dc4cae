"""The kernel-level cost model: a step is the sum of its kernels, transfers and the engine's overhead.

The kernels' formulas are tabulated when they are first needed, and interpolated in plain floats, so that a decode step
costs a few microseconds to price. What is not a kernel is stated here with its source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvsim.cost.kernel_times import MIXED_NOT_MEASURED, KernelTimes
from kvsim.cost.page_size import block_size_factor, l2_share
from kvsim.cost.profile import Profile, gpu_of, load_profile, measured_elsewhere
from kvsim.cost.shapes import ModelShapes, model_shapes
from kvsim.cost.swap import LARGE_COPY_SHARE, PER_CALL_COPY_US, HostLink
from kvsim.memory.geometry import ModelGeometry
from kvsim.scheduling.plan import StepShape
from kvsim.types import NS_PER_US, Ns, ScenarioError

if TYPE_CHECKING:
    from kvsim.catalog import GpuSpec

TableSync = Literal["on_change", "every_step", "device"]

TABLE_UPLOAD_US = PER_CALL_COPY_US
"""One asynchronous copy carries all rows that go up in a step."""
DEVICE_ROUND_TRIP_US = 10.0
"""A kernel launch and a read-back the host waits for: about 5 us each way on current drivers."""
COPY_LAUNCH_US = 5.0
"""Block copies within the device: one launch per step, K and V of all layers together."""

GemmTiles = Sequence[tuple[int, int]]

_FINELY_MEASURED = 256
"""Measurements are dense enough up to here to show the tiles themselves; beyond, they lie on whole tiles."""

_MAX_TOKENS = 1 << 17
_MAX_CTX = 1 << 20
_MAX_BATCH = 1 << 13


def vllm_graph_sizes(max_num_seqs: int = 256) -> tuple[int, ...]:
    """Batch sizes for which vLLM captures CUDA graphs by default: 1, 2, 4, steps of 8 to 256, of 16 to 512.

    None beyond twice `max_num_seqs`.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return tuple(size for size in sizes if size <= max(1, min(2 * max_num_seqs, 512)))


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the datasheet says and no profile measures: the host link, the memory and the L2 cache."""

    pcie_gb_s: float = 25.0
    """What large copies reach."""
    memory_gb_s: float = 2000.0
    l2_bytes: float = 40 * (1 << 20)
    assumed_for: str = ""
    """The GPU whose datasheet nobody knows here."""


class _Line:
    """A function of one variable, tabulated at rising nodes, linear between them and beyond the last two."""

    __slots__ = ("nodes", "values")

    def __init__(self, nodes: Sequence[float], values: Sequence[float]) -> None:
        self.nodes = list(nodes)
        self.values = list(values)

    def at(self, x: float) -> float:
        nodes, values = self.nodes, self.values
        i = bisect_right(nodes, x) - 1
        if i < 0:
            return values[0]
        if i > len(nodes) - 2:
            i = len(nodes) - 2
        left = values[i]
        return left + (values[i + 1] - left) * (x - nodes[i]) / (nodes[i + 1] - nodes[i])


def _spaced(first: int, last: int, per_octave: int) -> list[float]:
    """Whole numbers from `first` to `last`, `per_octave` for each doubling."""
    count = int(np.ceil(per_octave * np.log2(last / first)))
    return sorted({float(round(first * 2 ** (i / per_octave))) for i in range(count + 1)})


_TOKENS = sorted({*map(float, range(1, 65)), *_spaced(64, _MAX_TOKENS, 16)})
_BATCHES = sorted({*map(float, range(1, 9)), *_spaced(8, _MAX_BATCH, 6)})
_CTX = _spaced(1, _MAX_CTX, 6)
_LAST_CTX = len(_CTX) - 2
# Corrections are smooth in the logarithm of each feature, over one doubling at least.
_NODES = _spaced(1, _MAX_CTX, 3)
_NODES_FROM_0 = [0.0, 4.0, 8.0, *_spaced(16, _MAX_CTX, 3)]
# That of a prompt alone swings with the length of its chunk: by a quarter within half a doubling in one profile.
_CHUNK_NODES = _spaced(1, _MAX_CTX, 6)


class KernelCost:
    """A `CostModel` made of kernel times. Make it with `from_profile`.

    `warnings()` says what lay outside the measured range. `cpu_schedule_us` is CPU work of every step that an engine
    which plans ahead can hide; it is added here only if `adds_cpu_time`.
    """

    def __init__(
        self,
        times: KernelTimes,
        *,
        block_size: int,
        table_sync: TableSync = "on_change",
        decode_overhead_us: float = 0.0,
        mixed_overhead_us: float = 0.0,
        cuda_graph_sizes: Sequence[int] = (),
        cpu_schedule_us: float = 0.0,
        adds_cpu_time: bool = True,
        table_entry_bytes: int = 4,
        device: DeviceFacts | None = None,
        copies_per_block: int | None = None,
        gemm_tiles: GemmTiles = (),
    ) -> None:
        if table_sync not in ("on_change", "every_step", "device"):
            raise ScenarioError(f"table_sync {table_sync!r}: choose on_change, every_step or device")
        shapes, device = times.shapes, device or DeviceFacts()
        self.times = times
        self.notes: list[str] = []
        """What `warnings()` says besides."""
        self.table_sync = table_sync
        self.cpu_schedule_ns = round(cpu_schedule_us * NS_PER_US)
        cpu_us = cpu_schedule_us if adds_cpu_time else 0.0
        self._decode_overhead = (decode_overhead_us + cpu_us) * NS_PER_US
        self._mixed_overhead = (mixed_overhead_us + cpu_us) * NS_PER_US
        self._graph_sizes = sorted(cuda_graph_sizes)
        self._gemm_tiles = tuple((int(limit), int(tile)) for limit, tile in gemm_tiles)
        self._page_factor = block_size_factor(block_size, _measured_block_size(times.profile)).factor
        bytes_per_token = shapes.bytes_per_token
        self._copied_token_ns = 2.0 * bytes_per_token / device.memory_gb_s
        per_block = shapes.num_kv_tensors if copies_per_block is None else copies_per_block
        link = HostLink(device.pcie_gb_s, PER_CALL_COPY_US, per_block)
        self._swapped_block_ns = link.swap_ns(1, block_size * bytes_per_token)
        self.table_entry_bytes = table_entry_bytes
        self._entry_ns = table_entry_bytes / device.pcie_gb_s
        self._table_bytes_per_token = table_entry_bytes / block_size
        self._device = device
        self._dense: _Line | None = None
        self._head: _Line | None = None
        self._decode_rows: dict[int, np.ndarray] = {}
        self._rows: dict[int, tuple[float, list[float]]] = {}
        self._cells: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._bounds = {
            op: fit.bounds if (fit := times.profile.find(op)) else {}
            for op in ("gemm", "decode_attention", "prefill_attention", "mixed_attention", "all_reduce")
        }
        self._ctx_limit = 1.5 * self._bounds["decode_attention"].get("ctx_len", (0.0, float("inf")))[1]

    @classmethod
    def from_profile(
        cls,
        profile: Profile | str,
        geometry: ModelGeometry | ModelShapes,
        *,
        block_size: int = 16,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
        table_sync: TableSync = "on_change",
        overhead_us: float | None = None,
        mixed_overhead_us: float | None = None,
        cuda_graph_sizes: Sequence[int] | None = None,
        cpu_schedule_us: float | None = None,
        adds_cpu_time: bool = True,
        table_entry_bytes: int = 4,
        gemm_tiles: GemmTiles | None = None,
        gpu: GpuSpec | None = None,
    ) -> KernelCost:
        """Price steps of a model with a profile (or the name or file of one).

        `overhead_us` is the engine's time per step beside its kernels (None: what the profile holds, else 0);
        `mixed_overhead_us` that of steps with prompts (None: `overhead_us`, or the profile's own). `gemm_tiles` are
        pairs (most tokens, tile): steps with prompts compute whole tiles (None: what the profile holds).
        The model's warnings say if `gpu` is not the one that was measured (None: any).
        Raises ScenarioError for an unknown profile or a model without the needed dimensions.
        """
        profile = load_profile(profile) if isinstance(profile, str) else profile
        shapes = (
            geometry
            if isinstance(geometry, ModelShapes)
            else model_shapes(geometry, tensor_parallel_size, kv_cache_dtype)
        )
        measured = profile.overhead
        decode = float(measured.get("decode_step_us", 0.0)) if overhead_us is None else overhead_us
        if mixed_overhead_us is None:
            mixed_overhead_us = float(measured.get("mixed_step_us", 0.0)) if overhead_us is None else overhead_us
        cpu = float(measured.get("cpu_schedule_us", 0.0)) if cpu_schedule_us is None else cpu_schedule_us
        cost = cls(
            KernelTimes(profile, shapes),
            block_size=block_size,
            table_sync=table_sync,
            decode_overhead_us=decode,
            mixed_overhead_us=mixed_overhead_us,
            cuda_graph_sizes=cuda_graph_sizes or (),
            cpu_schedule_us=cpu,
            adds_cpu_time=adds_cpu_time,
            table_entry_bytes=table_entry_bytes,
            device=_device_facts(profile),
            gemm_tiles=measured.get("gemm_tiles", ()) if gemm_tiles is None else gemm_tiles,
        )
        elsewhere = None if gpu is None else measured_elsewhere(profile, gpu)
        if elsewhere is not None:
            cost.notes.append(elsewhere)
        return cost

    def step_ns(self, shape: StepShape) -> Ns:
        """Duration of the step in integer nanoseconds, at least 1."""
        if shape.prefills:
            cost = self._prompt_step(shape)
        elif shape.num_decodes:
            cost = self._decode_step(shape.num_decodes, shape.context_tokens)
        else:
            cost = 0.0
        return int(cost + self._movements(shape) + 0.5) or 1

    def warnings(self) -> list[str]:
        """What was priced outside the measured range, one line each; empty if nothing was."""
        name = self.times.profile.name
        found = [*self.times.shapes.notes, *sorted(self.times.extrapolated)]
        notes = [f"cost profile {name}: {note}" for note in self.notes]
        return notes + [f"cost profile {name}: outside the calibrated range: {what}" for what in found]

    @property
    def is_extrapolated(self) -> bool:
        """Some step lay outside the measured range."""
        return bool(self.times.extrapolated)

    def _decode_step(self, batch: int, context_tokens: int) -> float:
        return self._row(batch)[0] + self._decode_attention(batch, context_tokens / batch)

    def _decode_attention(self, batch: int, mean: float) -> float:
        values = self._row(batch)[1]
        i = bisect_right(_CTX, mean) - 1
        # Nothing is said of contexts below the measured ones: their attention is hardly more than its launch.
        if mean > self._ctx_limit:
            self._note("decode_attention", "ctx_len", mean)
        if i > _LAST_CTX:
            i = _LAST_CTX
        elif i < 0:
            return values[0]
        left = values[i]
        return left + (values[i + 1] - left) * (mean - _CTX[i]) / (_CTX[i + 1] - _CTX[i])

    def _row(self, batch: int) -> tuple[float, list[float]]:
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._make_row(batch)
        return row

    def _make_row(self, batch: int) -> tuple[float, list[float]]:
        """Fixed part and attention over the context nodes (ns) for one batch size."""
        self._note("decode_attention", "batch", batch)
        i = min(max(bisect_right(_BATCHES, batch) - 1, 0), len(_BATCHES) - 2)
        share = (batch - _BATCHES[i]) / (_BATCHES[i + 1] - _BATCHES[i])
        # Tables that outgrow the L2 cache are read from memory in every layer.
        nodes = np.asarray(_CTX)
        table_bytes = nodes * batch * self._table_bytes_per_token
        misses = 1.0 - np.array([l2_share(size, self._device.l2_bytes) for size in table_bytes])
        table_ns = misses * table_bytes * self.times.shapes.num_layers / self._device.memory_gb_s
        low, high = self._decode_values(i), self._decode_values(i + 1)
        attention = (low + share * (high - low)) * self._page_factor * NS_PER_US + table_ns
        fixed = self._dense_ns(self._padded(batch)) + self._head_ns(batch) + self._decode_overhead
        return fixed, attention.tolist()

    def _decode_values(self, node: int) -> np.ndarray:
        """Decode attention over the context nodes (us) at one batch node."""
        if node not in self._decode_rows:
            batches = np.full(len(_CTX), _BATCHES[node])
            self._decode_rows[node] = np.asarray(self.times.decode_us(batches, np.asarray(_CTX)))
        return self._decode_rows[node]

    def _padded(self, num_tokens: int) -> int:
        """The captured graph size that replays `num_tokens`, or `num_tokens` where none does."""
        i = bisect_right(self._graph_sizes, num_tokens - 1)
        return self._graph_sizes[i] if i < len(self._graph_sizes) else num_tokens

    def _tiled(self, num_tokens: int) -> int:
        """Tokens rounded up to whole GEMM tiles, where a run told how large they are."""
        if num_tokens > _FINELY_MEASURED:
            for limit, tile in self._gemm_tiles:
                if num_tokens <= limit:
                    return -(-num_tokens // tile) * tile
        return num_tokens

    def _dense_ns(self, num_tokens: float) -> float:
        if self._dense is None:
            self._dense = _Line(_TOKENS, (self.times.dense_us(np.asarray(_TOKENS)) * NS_PER_US).tolist())
        self._note("gemm", "tokens", num_tokens)
        shapes = self.times.shapes
        if shapes.all_reduces_per_layer:
            self._note("all_reduce", "bytes", 2.0 * num_tokens * shapes.hidden_size)
        return self._dense.at(num_tokens)

    def _head_ns(self, num_sequences: float) -> float:
        if self._head is None:
            self._head = _Line(_BATCHES, (self.times.head_us(np.asarray(_BATCHES)) * NS_PER_US).tolist())
        return self._head.at(num_sequences)

    def _prompt_step(self, shape: StepShape) -> float:
        num_chunks, num_tokens, prefix = _equal_chunks(shape)
        num_decodes = shape.num_decodes
        cost = self._dense_ns(self._tiled(self._padded(num_decodes + num_tokens)))
        cost += self._head_ns(num_decodes + num_chunks)
        cost += self._mixed_overhead
        chunk = num_tokens / num_chunks
        if num_decodes:
            ctx = shape.context_tokens / num_decodes
            return cost + self._mixed_attention(num_decodes, ctx, num_chunks, num_tokens, prefix)
        return cost + self._prefill_attention(num_chunks, chunk, prefix)

    def _prefill_attention(self, num_chunks: int, chunk: float, prefix: float) -> float:
        """The closed form at this very step, times its correction, which is smooth and therefore interpolated."""
        i, u = _cell(_CHUNK_NODES, chunk)
        j, v = _cell(_NODES_FROM_0, prefix)
        key = (num_chunks, i, j)
        corners = self._cells.get(key)
        if corners is None:
            self._note("prefill_attention", "batch", num_chunks)
            self._note("prefill_attention", "seq_len", chunk)
            self._note("prefill_attention", "prefix", prefix)
            points = [(float(num_chunks), x, y) for x in _CHUNK_NODES[i : i + 2] for y in _NODES_FROM_0[j : j + 2]]
            corners = self._cells[key] = _ratios(self.times.prefill_us, self.times.bare_prefill_us, points)
        a, b, c, d = corners
        left, right = a + (b - a) * v, c + (d - c) * v
        return self.times.bare_prefill_us(num_chunks, chunk, prefix) * (left + (right - left) * u) * NS_PER_US

    def _mixed_attention(
        self, num_decodes: int, ctx: float, num_chunks: int, num_tokens: float, prefix: float
    ) -> float:
        if not self.times.has_mixed:
            self.times.note_extrapolated(MIXED_NOT_MEASURED)
            alone = self._prefill_attention(num_chunks, num_tokens / num_chunks, prefix)
            return alone + self._decode_attention(num_decodes, ctx)
        h, s = _cell(_NODES, num_decodes)
        i, t = _cell(_NODES, ctx)
        j, u = _cell(_NODES, num_tokens)
        k, v = _cell(_NODES_FROM_0, prefix)
        key = (num_chunks, h, i, j, k)
        corners = self._cells.get(key)
        if corners is None:
            self._note("mixed_attention", "batch", num_decodes)
            self._note("mixed_attention", "ctx_len", ctx)
            self._note("mixed_attention", "chunk", num_tokens)
            self._note("mixed_attention", "prefix", prefix)
            points = [
                (w, x, float(num_chunks), y, z)
                for w in _NODES[h : h + 2]
                for x in _NODES[i : i + 2]
                for y in _NODES[j : j + 2]
                for z in _NODES_FROM_0[k : k + 2]
            ]
            corners = self._cells[key] = _ratios(self.times.mixed_us, self.times.bare_mixed_us, points)
        # Written out: this runs at every step that mixes prompts and decodes.
        c0, c1, c2, c3, c4, c5, c6, c7, d0, d1, d2, d3, d4, d5, d6, d7 = corners
        c0, c1, c2, c3 = c0 + (d0 - c0) * s, c1 + (d1 - c1) * s, c2 + (d2 - c2) * s, c3 + (d3 - c3) * s
        c4, c5, c6, c7 = c4 + (d4 - c4) * s, c5 + (d5 - c5) * s, c6 + (d6 - c6) * s, c7 + (d7 - c7) * s
        c0, c1, c2, c3 = c0 + (c4 - c0) * t, c1 + (c5 - c1) * t, c2 + (c6 - c2) * t, c3 + (c7 - c3) * t
        c0, c1 = c0 + (c2 - c0) * u, c1 + (c3 - c1) * u
        bare = self.times.bare_mixed_us(num_decodes, ctx, num_chunks, num_tokens, prefix)
        return bare * (c0 + (c1 - c0) * v) * NS_PER_US

    def _movements(self, shape: StepShape) -> float:
        """Block copies, compaction, swaps, and the block table's way to the GPU, in ns."""
        cost = 0.0
        num_copied = shape.num_copied_tokens + shape.num_moved_slots
        if num_copied:
            cost += COPY_LAUNCH_US * NS_PER_US + num_copied * self._copied_token_ns
        num_swapped = shape.num_swapped_out_blocks + shape.num_swapped_in_blocks
        if num_swapped:
            cost += num_swapped * self._swapped_block_ns
        if self._device.assumed_for and (num_copied or num_swapped):
            self._note_assumed()
        if self.table_sync == "on_change":
            if shape.num_table_updates:
                cost += TABLE_UPLOAD_US * NS_PER_US + shape.num_table_updates * self._entry_ns
        elif self.table_sync == "every_step":
            cost += TABLE_UPLOAD_US * NS_PER_US + shape.num_table_entries * self._entry_ns
        else:
            cost += shape.num_alloc_decisions * DEVICE_ROUND_TRIP_US * NS_PER_US
        return cost

    def _note_assumed(self) -> None:
        device = self._device
        self.times.note_extrapolated(
            f"copies and swaps: the catalog lacks {device.assumed_for}, {device.memory_gb_s:g} GB/s of memory and "
            f"{device.pcie_gb_s:g} GB/s to the host are assumed"
        )

    def _note(self, op: str, name: str, value: float) -> None:
        bounds = self._bounds[op].get(name)
        if bounds is None:
            return
        low, high = bounds
        if value > 1.5 * high:
            self.times.note_extrapolated(f"{op}: {name} above {high:g}")
        elif value < low / 1.5 and name != "prefix":
            self.times.note_extrapolated(f"{op}: {name} below {low:g}")


def _cell(nodes: list[float], value: float) -> tuple[int, float]:
    """Index of the interval that holds `value`, and where in it (clamped below, extrapolating above)."""
    i = bisect_right(nodes, value) - 1
    if i < 0:
        return 0, 0.0
    if i > len(nodes) - 2:
        i = len(nodes) - 2
    return i, (value - nodes[i]) / (nodes[i + 1] - nodes[i])


def _ratios(direct: Any, bare: Any, points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Corrected over bare formula at some points."""
    columns = [np.array(values) for values in zip(*points, strict=True)]
    corrected = direct(*columns)
    return tuple(float(value) / bare(*point) for value, point in zip(corrected, points, strict=True))


def _equal_chunks(shape: StepShape) -> tuple[int, int, float]:
    """(number of chunks, tokens of all, prefix) of equal chunks that score as many query-key pairs as those planned.

    Engines that pad prompts compute the padding too.
    """
    num_padded, longest = shape.padded_batch
    if num_padded:
        return num_padded, num_padded * longest, 0.0
    num_chunks = len(shape.prefills)
    if num_chunks == 1:
        start, num_tokens = shape.prefills[0]
        return 1, num_tokens, start
    num_tokens, pairs = 0, 0.0
    for start, length in shape.prefills:
        num_tokens += length
        pairs += length * (start + 0.5 * length)
    if not num_tokens:
        return num_chunks, 0, 0.0
    return num_chunks, num_tokens, max(0.0, pairs / num_tokens - 0.5 * num_tokens / num_chunks)


def _measured_block_size(profile: Profile) -> int:
    return int(profile.provenance.get("block_size", 64))


def _device_facts(profile: Profile) -> DeviceFacts:
    """From the GPU catalog; generic figures, said to be so, for a GPU it lacks."""
    gpu = gpu_of(profile)
    if gpu is None:
        return DeviceFacts(assumed_for=profile.gpu)
    return DeviceFacts(gpu.pcie_bandwidth / 1e9 * LARGE_COPY_SHARE, gpu.memory_bandwidth / 1e9, gpu.l2_bytes)
