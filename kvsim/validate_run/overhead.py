"""The engine's overhead per step, fitted to the gaps of a recorded run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.types import ScenarioError
from kvsim.validate_run.comparison import other_pool
from kvsim.validate_run.prediction import Prediction, kernel_cost, predict
from kvsim.validate_run.recorded import RecordedRun, load_run
from kvsim.validate_run.setting import Setting, setting_of

if TYPE_CHECKING:
    from kvsim.cost.from_run import Gap, Overhead
    from kvsim.cost.profile import Profile

_MAX_GUESSES = 6
_MAX_ROUNDS = 12
_SAME_US, _SAME_SHARE = 20.0, 0.02
"""Overheads that differ by no more than either of these are the same, or by no more than chance moves them."""
_SAME_SPREAD = 1.05
"""Tiles stay where others explain the gaps no better than this."""


def fit_overhead(
    run: str | Path,
    workload: str | Path | None = None,
    *,
    gpu: str | None = None,
    profile: str | Profile | None = None,
    model: str | None = None,
) -> Overhead:
    """The engine's overhead per step, decode-only and with prompts, from a recorded run's gaps.

    The simulation is repeated with what was found until nothing changes: its steps then lie where the run's did. Raises
    ScenarioError if the run has too few decode-only gaps, or if this does not converge.
    """
    from kvsim.cost.from_run import GEMM_TILES, MOST_US, did_not_converge, overhead_of_gaps, too_slow

    if workload is None:
        raise ScenarioError(f"{run}: the run's requests are needed: give --workload FILE.jsonl")
    recorded = load_run(run)
    setting = setting_of(recorded, gpu=gpu, profile=profile, model=model)
    decode_us = mixed_us = _guess_overhead_us(recorded, workload, setting)
    gemm_tiles: tuple[tuple[int, int], ...] = ()
    for _ in range(_MAX_ROUNDS):
        prediction = predict(
            recorded,
            workload,
            setting,
            decode_overhead_us=decode_us,
            mixed_overhead_us=mixed_us,
            gemm_tiles=gemm_tiles,
        )
        name, before = recorded.folder.name, (decode_us, mixed_us)
        found = [overhead_of_gaps(_gaps(recorded, prediction, tiles), name, tiles, before) for tiles in GEMM_TILES]
        sane = [one for one in found if one is not None]
        if not sane:
            raise ScenarioError(
                f"{run}: too few gaps between events are those of simulated decode-only steps: take a longer run, and "
                f"check that model, profile and engine arguments are those of the run"
            )
        overhead = min(sane, key=lambda one: one.mixed_spread_us)
        for one in sane:
            if one.gemm_tiles == gemm_tiles and one.mixed_spread_us <= _SAME_SPREAD * overhead.mixed_spread_us:
                overhead = one
        is_same = overhead.gemm_tiles == gemm_tiles
        gemm_tiles, decode_us, mixed_us = overhead.gemm_tiles, overhead.decode_step_us, overhead.mixed_step_us
        if overhead.decode_step_us > MOST_US:
            raise too_slow(run, overhead, "times in requests.jsonl")
        errors_us = (0.0, 0.0) if overhead.doubts() else overhead.standard_errors_us
        if overhead.settled and is_same and all(map(_are_same, before, (decode_us, mixed_us), errors_us)):
            return replace(overhead, other_doubts=tuple(other_pool(recorded, prediction)))
    raise did_not_converge(run, overhead)


def _are_same(before_us: float, after_us: float, error_us: float = 0.0) -> bool:
    return abs(after_us - before_us) <= max(_SAME_US, _SAME_SHARE * after_us, error_us)


def _guess_overhead_us(run: RecordedRun, workload: str | Path, setting: Setting) -> float:
    """One overhead for every step, from each request's time between its first and last token.

    How many steps lie between these two is known whatever the simulation makes of the rest, so that a large overhead
    shows here while the gaps between different requests' events still hold other steps than the run's.
    """
    cost = kernel_cost(setting, 0.0, 0.0, ())
    measured_us = np.array([1e6 * (request.last_token_s - request.first_token_s) for request in run.requests])
    guess_us = 0.0
    for _ in range(_MAX_GUESSES):
        before_us = guess_us
        prediction = predict(
            run, workload, setting, decode_overhead_us=before_us, mixed_overhead_us=before_us, gemm_tiles=()
        )
        kernel_us = np.array([cost.step_ns(shape) for shape in prediction.steps.shapes]) / 1e3
        kernel_sum = np.concatenate([[0.0], np.cumsum(kernel_us)])
        first, last = prediction.step_of(prediction.first_token_s), prediction.step_of(prediction.last_token_s)
        several = last > first
        if not several.any():
            return 0.0
        over_us = measured_us - (kernel_sum[last + 1] - kernel_sum[first + 1])
        guess_us = max(0.0, float(np.median(over_us[several] / (last - first)[several])))
        if _are_same(before_us, guess_us):
            break
    return guess_us


def _gaps(run: RecordedRun, prediction: Prediction, tiles: tuple[tuple[int, int], ...]) -> list[Gap]:
    """The run's gaps, with the steps that the simulation puts there, priced without overhead."""
    from kvsim.cost.from_run import gaps_between_events

    cost = kernel_cost(prediction.setting, 0.0, 0.0, tiles)
    kernel_us = np.array([cost.step_ns(shape) for shape in prediction.steps.shapes]) / 1e3
    is_mixed = np.array([bool(shape.prefills) for shape in prediction.steps.shapes])
    event_s: dict[Any, float] = {}
    step_of: dict[Any, int] = {}
    first, last = prediction.step_of(prediction.first_token_s), prediction.step_of(prediction.last_token_s)
    for index, request in enumerate(run.requests):
        for kind, measured, predicted in (
            ("first", request.first_token_s, first[index]),
            ("last", request.last_token_s, last[index]),
        ):
            event_s[index, kind] = measured
            step_of[index, kind] = int(predicted)
    return gaps_between_events(event_s, step_of, kernel_us, is_mixed)
