"""Predicted against measured: figures, and running, waiting and KV usage over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.files import save_picture
from kvsim.validate_run.metrics import METRICS, measured_metrics
from kvsim.validate_run.prediction import Prediction
from kvsim.validate_run.recorded import RecordedRun

_SERIES = ("running", "waiting", "kv_cache_pct")
_NO_ENGINE = 100.0
"""A measured time that is so many times the predicted one, or so small a part of it, is in another unit."""
_UNITS: Mapping[float, str] = {1e3: "milliseconds", 1e6: "microseconds", 1e9: "nanoseconds"}
_SHARE_NOT_PCT = 10.0
"""Usage of at most 1 is a share where the prediction in per cent is so many times larger, else it is small."""

_OTHER_POOL = 1.25
"""A pool is another one where it is so many times as large, or so small a part: usage is logged to a tenth per cent."""
_LEAST_PCT = 0.5
_MIN_SECONDS = 5


@dataclass(frozen=True)
class Comparison:
    """Predicted against measured. `series_error` is the mean absolute difference over the seconds."""

    metrics: Mapping[str, Mapping[str, float]]
    series: Mapping[str, np.ndarray]
    series_error: Mapping[str, float]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What cannot be right in the record."""

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
    warnings = (*_other_units(run, predicted, measured), *_series_elsewhere(run, prediction))
    return Comparison(metrics, series, errors, notes, warnings)


def _other_units(run: RecordedRun, predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """A line where the engine took so long for a token that its times must count something else than seconds."""
    name = "mean_tpot_ms" if math.isfinite(measured["mean_tpot_ms"]) else "mean_ttft_ms"
    factor = measured[name] / predicted[name]
    if 1 / _NO_ENGINE < factor < _NO_ENGINE:
        return []
    unit = min(_UNITS, key=lambda unit: abs(math.log(max(factor, 1e-12) / unit)))
    return [
        f"{run.folder / 'requests.jsonl'}: {name} is {measured[name]:.6g} measured and {predicted[name]:.6g} "
        f"predicted: no engine is that far off, and queued_ts, first_token_ts and last_token_ts must be in seconds"
        f"{f' (these look like {_UNITS[unit]})' if factor > 1 else ''}; divide them, and ask again"
    ]


def _series_elsewhere(run: RecordedRun, prediction: Prediction) -> list[str]:
    """A line where nothing of the series can be compared."""
    if not run.series:
        return []
    path = run.folder / "timeseries.csv"
    if "t" not in run.series or not any(name in run.series for name in _SERIES):
        return [
            f"{path}: it has {', '.join(run.series)}; columns t (seconds from the start of the run) and one of "
            f"{', '.join(_SERIES)} are compared: the series is left out"
        ]
    if _inside(run, prediction).any():
        return []
    times = run.series["t"]
    return [
        f"{path}: no time in column 't' ({times.min():g} to {times.max():g}) lies within the run of "
        f"{prediction.last_token_s.max():.0f} s; it must count seconds from the run's start: the series is left out"
    ]


def _inside(run: RecordedRun, prediction: Prediction) -> np.ndarray:
    times = run.series["t"] - run.series_offset_s
    return np.asarray((times >= 0) & (times <= 1.0 + max(prediction.last_token_s.max(), _last_s(run))))


def _last_s(run: RecordedRun) -> float:
    return max(request.last_token_s for request in run.requests) - run.first_queued_s


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _is_logged(run: RecordedRun, name: str) -> bool:
    """Some second has a value; zeros alone are what an engine writes that does not log it, but nobody may wait."""
    measured = run.series[name]
    known = measured[np.isfinite(measured)]
    return bool(len(known)) and (bool(known.any()) or (name == "waiting" and "running" in run.series))


def _compare_series(run: RecordedRun, prediction: Prediction) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    if "t" not in run.series or not _inside(run, prediction).any():
        return {}, {}
    times = run.series["t"] - run.series_offset_s
    predicted = prediction.series(times)
    series, errors = {"t_s": times}, {}
    for name, values in predicted.items():
        measured = run.series.get(name)
        if measured is None or not _is_logged(run, name):
            continue
        known = np.isfinite(measured)
        most = measured[known].max()
        if name == "kv_cache_pct" and most <= 1.0 and values.max() > _SHARE_NOT_PCT * most:
            measured = 100.0 * measured  # logged as a share
        series[name], series[f"{name}_measured"] = values, measured
        errors[name] = round(float(np.abs(values - measured)[known].mean()), 2)
    return series, errors


def other_pool(run: RecordedRun, prediction: Prediction) -> list[str]:
    """A line where the usage that was measured is that of another number of KV blocks than the simulated one.

    Looked at are the seconds in which as many requests ran as predicted: they held much the same tokens. Nothing is
    said of a model with windows, of which the engine drops what the simulation keeps.
    """
    if any(group.window is not None for group in prediction.setting.geometry.groups):
        return []
    series, _ = _compare_series(run, prediction)
    if "running" not in series or "kv_cache_pct" not in series:
        return []
    running, running_measured = series["running"], series["running_measured"]
    usage, measured = series["kv_cache_pct"], series["kv_cache_pct_measured"]
    # NaN, where nothing was logged, is not near anything.
    alike = np.abs(running - running_measured) <= np.maximum(1.0, 0.1 * running_measured)
    alike &= (running > 0) & (usage > 0) & (measured >= _LEAST_PCT)
    if alike.sum() < _MIN_SECONDS:
        return []
    ratio = float(np.median(usage[alike] / measured[alike]))
    if 1 / _OTHER_POOL < ratio < _OTHER_POOL:
        return []
    num_blocks = prediction.setting.num_gpu_blocks
    told = int(float(f"{ratio * num_blocks:.2g}"))
    return [
        f"{run.folder / 'timeseries.csv'}: kv_cache_pct is that of about {told:,} KV blocks, and "
        f"{num_blocks:,} are simulated (in the {alike.sum()} seconds with as many running requests as predicted): "
        f"write what the engine logged as kv_cache.num_gpu_blocks in meta.json"
    ]


def plot(comparison: Comparison, path: str | Path) -> bool:
    """Running, waiting and KV usage over time as one picture; False, and no file, where no series was compared."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in _SERIES if name in comparison.series]
    if not names:
        return False
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
    save_picture(figure, path, dpi=120)
    plt.close(figure)
    return True
