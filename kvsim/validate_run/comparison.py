"""Predicted against measured: figures, and running, waiting and KV usage over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.validate_run.metrics import METRICS, measured_metrics
from kvsim.validate_run.prediction import Prediction
from kvsim.validate_run.recorded import RecordedRun


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured. `series_error` is the mean absolute difference over the seconds."""

    metrics: Mapping[str, Mapping[str, float]]
    series: Mapping[str, np.ndarray]
    series_error: Mapping[str, float]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: `{metric: {predicted, measured, error_pct}}`, null where a run has no such figure."""
        return {
            name: {key: value if math.isfinite(value) else None for key, value in values.items()}
            for name, values in self.metrics.items()
        }


def compare(run: RecordedRun, prediction: Prediction) -> Comparison:
    """Set a prediction beside the run's own times."""
    predicted, measured = prediction.metrics(), measured_metrics(run)
    metrics = {
        name: {
            "predicted": _rounded(predicted[name]),
            "measured": _rounded(measured[name]),
            "error_pct": round(100.0 * (predicted[name] / measured[name] - 1.0), 2) if measured[name] else math.nan,
        }
        for name in METRICS
    }
    series, errors = _compare_series(run, prediction)
    notes = (*prediction.setting.notes, *prediction.notes, *prediction.cost.warnings())
    return Comparison(metrics, series, errors, notes)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _compare_series(run: RecordedRun, prediction: Prediction) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    if "t" not in run.series:
        return {}, {}
    times = run.series["t"] - run.series_offset_s
    predicted = prediction.series(times)
    series, errors = {"t_s": times}, {}
    for name, values in predicted.items():
        measured = run.series.get(name)
        if measured is None or not np.isfinite(measured).all() or not measured.any():
            continue  # this engine did not log it
        if name == "kv_cache_pct" and measured.max() <= 1.0:
            measured = 100.0 * measured  # logged as a share
        series[name], series[f"{name}_measured"] = values, measured
        errors[name] = round(float(np.abs(values - measured).mean()), 2)
    return series, errors


def plot(comparison: Comparison, path: str | Path) -> None:
    """Running, waiting and KV usage over time, predicted and measured, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in ("running", "waiting", "kv_cache_pct") if name in comparison.series]
    if not names:
        return
    labels = {"running": "running requests", "waiting": "waiting requests", "kv_cache_pct": "KV usage (%)"}
    figure, axes = plt.subplots(len(names), 1, figsize=(8, 2.6 * len(names)), sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        times = comparison.series["t_s"]
        axis.step(times, comparison.series[f"{name}_measured"], where="post", color="black", label="measured")
        axis.step(times, comparison.series[name], where="post", color="#D55E00", label="predicted")
        axis.set(ylabel=labels[name], ylim=(0, None))
        axis.set_title(f"mean difference {comparison.series_error[name]:g}", fontsize=9)
        axis.legend(fontsize=8)
    axes[-1, 0].set_xlabel("seconds after the first request")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
