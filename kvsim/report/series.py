"""A run's steps as curves over time: time-weighted where there are more steps than pixels, broken where it idled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

FloatArray: TypeAlias = npt.NDArray[np.float64]

MAX_POINTS = 2000
IDLE_SHARE = 0.003
"""A pause longer than this share of the run is shown as a gap."""
SEEN_SHARE = 0.0026
"""Narrower than this nothing is seen (two pixels): work between two gaps is drawn that wide, as one piece."""

TIME_UNITS = ((7200.0, 3600.0, "h"), (1.0, 1.0, "s"), (0.0, 1e-3, "ms"))
"""From which span on (s), the unit (s), its name."""


class Curves(NamedTuple):
    """Piecewise constant curves: `values[name][i]` holds from `times[i]` to `times[i + 1]`; NaN is a pause."""

    times: FloatArray
    values: dict[str, FloatArray]
    unit: str

    @property
    def time_label(self) -> str:
        """Label of the time axis; it says what a gap means where there is one."""
        has_pause = any(np.isnan(column).any() for column in self.values.values())
        return f"time ({self.unit}); blank where nothing ran" if has_pause else f"time ({self.unit})"


def step_curves(steps: pd.DataFrame, names: list[str], max_points: int = MAX_POINTS) -> Curves:
    """Columns of `steps.csv` over time, in at most about `max_points` pieces: time-weighted means of their steps."""
    starts = steps["start_s"].to_numpy(np.float64)
    durations = steps["duration_ms"].to_numpy(np.float64) / 1e3
    columns = {name: steps[name].to_numpy(np.float64) for name in names}
    if not len(starts):
        return Curves(starts, columns, "s")
    ends = starts + durations
    span = float(ends[-1] - starts[0])
    if len(starts) > max_points:
        starts, ends, columns = _binned(starts, ends, columns, span / max_points)
    unit_s, unit = next((unit_s, name) for least, unit_s, name in TIME_UNITS if span >= least)
    starts, ends, columns = _widened(starts, ends, columns, span)
    times, columns = _with_pauses(starts, ends, columns, span * IDLE_SHARE)
    return Curves(times / unit_s, columns, unit)


def time_weighted_mean(steps: pd.DataFrame, values: Any) -> float:
    """Mean of a per-step quantity weighted with the steps' durations; NaN values are left out, NaN if none is left."""
    values = np.asarray(values, dtype=np.float64)
    weights = np.where(np.isnan(values), 0.0, steps["duration_ms"].to_numpy(np.float64))
    total = float(weights.sum())
    return float((np.nan_to_num(values) * weights).sum() / total) if total else float("nan")


def _binned(
    starts: FloatArray, ends: FloatArray, columns: dict[str, FloatArray], width: float
) -> tuple[FloatArray, FloatArray, dict[str, FloatArray]]:
    """Steps that begin in the same interval of `width` become one piece."""
    bins = ((starts - starts[0]) / width).astype(np.int64)
    return _merged(starts, ends, columns, np.flatnonzero(np.diff(bins, prepend=-1)))


def _widened(
    starts: FloatArray, ends: FloatArray, columns: dict[str, FloatArray], span: float
) -> tuple[FloatArray, FloatArray, dict[str, FloatArray]]:
    """Work that is too short to be seen between two gaps becomes one piece that is just wide enough."""
    is_first = np.append(True, starts[1:] - ends[:-1] > span * IDLE_SHARE)
    if is_first.sum() == 1:
        return starts, ends, columns
    begins = np.flatnonzero(is_first)
    spells = ends[np.append(begins[1:], len(starts)) - 1] - starts[begins]
    is_short = spells < span * SEEN_SHARE
    kept = is_first | ~is_short[np.cumsum(is_first) - 1]
    starts, ends, columns = _merged(starts, ends, columns, np.flatnonzero(kept))
    is_widened = is_short[np.cumsum(is_first[kept]) - 1]
    return starts, np.where(is_widened, starts + span * SEEN_SHARE, ends), columns


def _merged(
    starts: FloatArray, ends: FloatArray, columns: dict[str, FloatArray], first: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray, dict[str, FloatArray]]:
    """Steps from each of `first` to before the next one, as one piece with their time-weighted mean."""
    last = np.append(first[1:], len(starts)) - 1
    weights = ends - starts
    means = {name: _binned_mean(column, weights, first) for name, column in columns.items()}
    return starts[first], ends[last], means


def _binned_mean(column: FloatArray, weights: FloatArray, first: npt.NDArray[np.int64]) -> FloatArray:
    known = ~np.isnan(column)
    total = np.add.reduceat(np.where(known, weights, 0.0), first)
    summed = np.add.reduceat(np.where(known, column * weights, 0.0), first)
    return np.where(total > 0, summed / np.where(total > 0, total, 1.0), np.nan)


def _with_pauses(
    starts: FloatArray, ends: FloatArray, columns: dict[str, FloatArray], least: float
) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Insert NaN from the end of a step to the start of the next where nothing ran, and after the last step."""
    breaks = np.flatnonzero(starts[1:] - ends[:-1] > least) + 1
    times = np.append(np.insert(starts, breaks, ends[breaks - 1]), ends[-1])
    return times, {name: np.append(np.insert(column, breaks, np.nan), column[-1]) for name, column in columns.items()}
