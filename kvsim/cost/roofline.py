"""Datasheet figures as a cost model: explicit, uncalibrated, for a GPU nobody measured.

The kernels' closed forms with the datasheet's rates and no correction. Expect errors of 20 to 50 per cent: real kernels
reach different shares of the peaks at every size.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvsim.cost.fit import OpFit
from kvsim.cost.kernel_times import KernelTimes
from kvsim.cost.kernels import DeviceFacts, KernelCost, TableSync
from kvsim.cost.layer_ops import ROW_OPS
from kvsim.cost.profile import Profile
from kvsim.cost.shapes import ModelShapes, model_shapes
from kvsim.memory.geometry import ModelGeometry

_LAUNCH_US = 3.0


def roofline_profile(
    peak_tflops: float, memory_bandwidth_gb_s: float, *, efficiency: float = 0.7, interconnect_gb_s: float = 300.0
) -> Profile:
    """A profile without measurements: dense 16-bit TFLOP/s, GB/s of memory and between GPUs, and the share reached."""
    tflops, gbps = peak_tflops * efficiency, memory_bandwidth_gb_s * efficiency
    tiny = 1e-9
    hard = 20.0  # a sharpness of the maximum that leaves no smooth corner
    ops: dict[tuple[str, str], Mapping[str, float]] = {
        ("gemm", "gemm"): {"launch_us": _LAUNCH_US, "tflops": tflops, "gbps": gbps, "sharpness": hard},
        ("decode_attention", "decode_attention"): {
            "launch_us": _LAUNCH_US,
            "gbps": gbps,
            "tile_us": tiny,
            "row_us": tiny,
            "serial_us": tiny,
            "walk_us": tiny,
            "l2_mb": 1e-3,
            "l2_gbps": gbps,
            "sharpness": hard,
            "tile_n": 64.0,
        },
        ("prefill_attention", "prefill_attention"): {
            "launch_us": _LAUNCH_US,
            "tflops": tflops,
            "gbps": gbps,
            "serial_us": tiny,
            "sharpness": hard,
            "tile_m": 1.0,
            "tile_n": 1.0,
        },
        ("all_reduce", "all_reduce"): {
            "launch_us": _LAUNCH_US,
            "gbps": interconnect_gb_s,
            "hop_us": 1.0,
            "two_shot_us": tiny,
            "floor_us": tiny,
            "sharpness": hard,
            "ring_launch_us": _LAUNCH_US,
            "ring_gbps": interconnect_gb_s,
            "ring_hop_us": 1.0,
            "switch_bytes": 0.0,
        },
    }
    for kind in ROW_OPS:
        ops["elementwise", kind] = {"launch_us": _LAUNCH_US, "gbps": gbps, "row_us": tiny, "sharpness": hard}
    fits = tuple(
        OpFit.bare(op, kind, params, kernel="datasheet", framework="roofline") for (op, kind), params in ops.items()
    )
    return Profile("roofline", "datasheet", "roofline", "", fits, {"method": "datasheet roofline, uncalibrated"})


def roofline_cost(
    geometry: ModelGeometry | ModelShapes,
    *,
    peak_tflops: float,
    memory_bandwidth_gb_s: float,
    efficiency: float = 0.7,
    step_overhead_us: float = 500.0,
    pcie_bandwidth_gb_s: float = 25.0,
    interconnect_gb_s: float = 300.0,
    block_size: int = 16,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    table_sync: TableSync = "on_change",
    cuda_graph_sizes: tuple[int, ...] = (),
    cpu_schedule_us: float | None = None,
    adds_cpu_time: bool = True,
    table_entry_bytes: int = 4,
) -> KernelCost:
    """The `CostModel` of `cost: {type: roofline, ...}`."""
    profile = roofline_profile(
        peak_tflops, memory_bandwidth_gb_s, efficiency=efficiency, interconnect_gb_s=interconnect_gb_s
    )
    shapes = (
        geometry if isinstance(geometry, ModelShapes) else model_shapes(geometry, tensor_parallel_size, kv_cache_dtype)
    )
    return _RooflineCost(
        KernelTimes(profile, shapes),
        block_size=block_size,
        table_sync=table_sync,
        decode_overhead_us=step_overhead_us,
        mixed_overhead_us=step_overhead_us,
        cuda_graph_sizes=cuda_graph_sizes,
        cpu_schedule_us=cpu_schedule_us or 0.0,
        adds_cpu_time=adds_cpu_time,
        table_entry_bytes=table_entry_bytes,
        device=DeviceFacts(pcie_bandwidth_gb_s, memory_bandwidth_gb_s),
    )


class _RooflineCost(KernelCost):
    """A `KernelCost` that says of every step that nobody measured it."""

    def warnings(self) -> list[str]:
        notes = [f"cost model roofline: {note}" for note in self.times.shapes.notes]
        # What else a `KernelCost` says is that rates were extrapolated, and here all of them are.
        return ["cost model roofline: datasheet figures, not calibrated against any measurement", *notes]

    @property
    def is_extrapolated(self) -> bool:
        return True
