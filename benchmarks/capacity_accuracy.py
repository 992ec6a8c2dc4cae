"""Predicted against reported KV blocks, for every start-up somebody logged: writes docs/accuracy-capacity.md.

    python benchmarks/capacity_accuracy.py [DATA_DIR] [OUT_FILE]

DATA_DIR holds CAPACITY_FACTS.csv and calibration/VLLM_MEMORY_BREAKDOWN_H100.csv (default: $KVSIM_SHARED/data, else
../shared/data beside the checkout). Nothing of a row but its flags, its model and its GPU's memory is used.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsim.capacity import CapacityReport, capacity
from kvsim.catalog import GIB, GpuSpec, load_model
from kvsim.memory.geometry import ModelGeometry

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, str]

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
INT8 = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8}}}}
FP8 = {"quant_method": "fp8"}

MODELS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "Llama-2-7B": ("llama-2-7b", None),
    "Llama-2-70B": ("llama-2-70b", None),
    "opt-125m": ("opt-125m", None),
    "Mistral-7B": ("mistral-7b", None),
    "Mistral-7B-AWQ4": ("mistral-7b", AWQ),
    "Llama-3-8B": ("llama-3-8b", None),
    "R1-Distill-Qwen-14B": ("qwen2.5-14b", None),
    "Qwen3-1.7B": ("qwen3-1.7b", None),
    "Qwen3-4B": ("qwen3-4b", None),
    "Llama-3.1-70B-w8a8": ("llama-3.1-70b", INT8),
    "Yi-34B-AWQ4": ("yi-34b", AWQ),
    "gpt-oss-20b": ("gpt-oss-20b", None),
    "Llama-3.3-70B-FP8": ("llama-3.1-70b", FP8),
    "Llama-3.1-8B": ("llama-3.1-8b", None),
    "Qwen3-0.6B": ("qwen3-0.6b", None),
    "Qwen3-32B": ("qwen3-32b", None),
    "Qwen2.5-32B": ("qwen2.5-32b", None),
}
"""The rows' model names: a catalog entry, and how its weights are quantised."""


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def geometry_of(name: str) -> ModelGeometry:
    preset, quantization = MODELS[name]
    geometry = load_model(preset)
    if quantization is None:
        return geometry
    return ModelGeometry.from_config({**geometry.config, "quantization_config": quantization}, name=name)


def is_v1(row: Row) -> bool:
    return "V1" in row.get("engine", "V1") and "(V0)" not in row.get("source", "")


def limits_of(row: Row, geometry: ModelGeometry) -> dict[str, int]:
    """The scheduler's limits where the row is silent: the defaults of its engine.

    Before V1 the profiling step ran prompts of the whole length, unless chunked prefill was on (from 32,768 on).
    """
    max_model_len = int(row["max_model_len"] or geometry.max_model_len or 0)
    limits = {"max_model_len": max_model_len}
    if row.get("max_num_batched_tokens"):
        limits["max_num_batched_tokens"] = int(row["max_num_batched_tokens"])
    elif not is_v1(row):
        limits["max_num_batched_tokens"] = 2048 if max_model_len > 32_768 else max(2048, max_model_len)
    if not is_v1(row):
        limits["max_num_seqs"] = 256
    return limits


def predict(row: Row, total_gib: float, utilization: float, block_size: int, kv_cache_dtype: str) -> CapacityReport:
    geometry = geometry_of(row["model"])
    gpu = GpuSpec(row["gpu"].lower(), round(total_gib * GIB), 1.0, 1.0, 1, 1.0)
    return capacity(
        geometry,
        gpu,
        gpu_memory_utilization=utilization,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=int(row["tp"]),
        **limits_of(row, geometry),  # type: ignore[arg-type]
    )


def reported_rows(facts: list[Row]) -> tuple[list[list[str]], list[float], list[str]]:
    """(table rows, errors in per cent of the reported blocks, rows that cannot be predicted)."""
    table, errors, left_out = [], [], []
    for row in facts:
        label = f"{row['model']}, {row['gpu']}" + (f", tp {row['tp']}" if row["tp"] != "1" else "")
        if not row["gpu_total_GiB"] or not row["gpu_memory_utilization"]:
            left_out.append(label)
            continue
        dtype = "fp8" if row["kv_elt_bytes"] == "1" else "auto"
        utilization = float(row["gpu_memory_utilization"])
        report = predict(row, float(row["gpu_total_GiB"]), utilization, int(row["block_size"]), dtype)
        reported = int(row["blocks_reported"])
        error = 100 * (report.num_gpu_blocks / reported - 1)
        errors.append(error)
        overhead = ((report.activation_bytes or 0) + (report.non_torch_bytes or 0)) / GIB
        table.append(
            [
                label,
                row["engine"],
                f"{(report.weight_bytes or 0) / GIB:.2f}",
                row["weights_GiB_per_rank"] or "?",
                f"{overhead:.2f}",
                row["overhead_GiB(util*total-weights-kv)"] or "?",
                f"{report.num_gpu_blocks:,}",
                f"{reported:,}",
                f"{error:+.1f} %",
            ]
        )
    return table, errors, left_out


def breakdown_rows(breakdown: list[Row]) -> tuple[list[list[str]], list[float]]:
    """(table rows, errors of the KV bytes in GiB)."""
    table, errors = [], []
    for row in breakdown:
        report = predict(row, float(row["total_GiB"]), float(row["util"]), 16, "auto")
        kv_gib = report.kv_bytes / GIB
        errors.append(kv_gib - float(row["kv_available_GiB"]))
        table.append(
            [
                f"{row['model']}, {row['gpu']}" + (f", tp {row['tp']}" if row["tp"] != "1" else ""),
                f"{(report.weight_bytes or 0) / GIB:.2f} / {row['weights_GiB']}",
                f"{(report.activation_bytes or 0) / GIB:.2f} / {row['peak_activation_GiB']}",
                f"{(report.non_torch_bytes or 0) / GIB:.2f} / {row['non_torch_GiB']}",
                f"{kv_gib:.2f} / {row['kv_available_GiB']}",
                f"{errors[-1]:+.2f}",
            ]
        )
    return table, errors


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def page(facts: list[Row], breakdown: list[Row]) -> str:
    fact_table, errors, left_out = reported_rows(facts)
    breakdown_table, gib_errors = breakdown_rows(breakdown)
    sizes = sorted(abs(error) for error in errors)
    within = {limit: sum(size <= limit for size in sizes) for limit in (2, 5, 10, 20)}
    shares = ", ".join(f"{count} within {limit} %" for limit, count in within.items())
    return f"""# How good the capacity estimate is

Written by `python benchmarks/capacity_accuracy.py`; do not edit.

`blocks = floor((utilization x total - weights - peak activations - non-torch) / (block size x bytes per token))`.
The arithmetic is exact: where a log gives the terms, or the KV bytes, the blocks come out as logged (tests).
What is estimated is the terms: weights are counted from the configuration, activations and non-torch memory by the
formula in `kvsim/capacity/terms.py`. Give the measured ones (`weight_bytes`, `activation_bytes`, `non_torch_bytes`, or
`kv_cache_memory_bytes`) and the estimate does not matter.

## Term by term (GiB, predicted / logged)

The formula's coefficients come from the H100 rows of this table, so these are **fitted**, not predictions; the V0
rows (the last two) are not.

{markdown(["start-up", "weights", "peak activations", "non-torch", "KV", "KV error"], breakdown_table)}

KV error: median {statistics.median(map(abs, gib_errors)):.2f} GiB, worst {max(map(abs, gib_errors)):.2f} GiB.

## Blocks, predicted against reported

Nothing here is fitted, except that the RTX 3090 row gave the forward pass its row count. Most rows come from engines
before V1, whose profiling counted other things (the CUDA context, other processes, a known over-allocation), and from
forks; the formula is V1's. Where a row is silent its engine's defaults are used.

{
        markdown(
            [
                "model, GPU",
                "engine",
                "weights",
                "logged",
                "overhead",
                "implied",
                "blocks",
                "reported",
                "error",
            ],
            fact_table,
        )
    }

Of {len(errors)}: {shares}. Absolute error: median {statistics.median(sizes):.1f} %,
mean {statistics.mean(sizes):.1f} %, worst {sizes[-1]:.1f} %; bias {
        statistics.mean(errors):+.1f} %. Quartiles of the signed error:
{", ".join(f"{quartile:+.1f} %" for quartile in statistics.quantiles(errors, n=4))}.

Not predicted, because the GPU's memory or the utilization is not known: {"; ".join(left_out)}.
"""


def main() -> None:
    shared = Path(os.environ.get("KVSIM_SHARED", ROOT.parent / "shared")) / "data"
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else shared
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "accuracy-capacity.md"
    text = page(read(data / "CAPACITY_FACTS.csv"), read(data / "calibration" / "VLLM_MEMORY_BREAKDOWN_H100.csv"))
    out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
