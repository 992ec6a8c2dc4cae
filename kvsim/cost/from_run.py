"""The engine's time per step beside its kernels, from the gaps between events of a recorded run.

A gap lies between two events that the engine logged (a first or a last token). The simulator says which steps lie
between them and what their kernels cost; what is left of the measured gap is overhead, divided by the number of steps.
Gaps that do not come near kernels and overhead together hold other steps and are left out: which ones, and the
overhead, are found in turns. Gaps of decode-only steps give one overhead, gaps with prompts in them another. A run's
makespan is never used: it would smear one kind of step over the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.types import ScenarioError

_ANY = 1 << 30
GEMM_TILES: tuple[tuple[tuple[int, int], ...], ...] = (
    (),
    ((_ANY, 64),),
    ((_ANY, 128),),
    ((_ANY, 256),),
    ((768, 128), (_ANY, 256)),
    ((1024, 128), (_ANY, 256)),
)
"""Roundings tried: kernels are measured at token counts that are whole tiles, so only a run shows those between."""

MIN_GAPS = 5
_SANE_RATIO = 0.15
"""Gaps that differ more than this from kernels and overhead hold other steps than the simulated ones."""
_MAX_TURNS = 50
_ERROR_OF_MEDIAN = 0.93
"""Standard error of the median of normally distributed values, in distances of their quartiles over root n."""
MOST_US = 100_000.0
"""No engine spends this beside the kernels of a step; times in milliseconds look like it."""


@dataclass(frozen=True)
class Gap:
    """Between two events of a run: what passed, and the steps and kernel time that the simulator puts there."""

    measured_us: float
    kernel_us: float
    num_decode_steps: int
    num_mixed_steps: int


@dataclass(frozen=True)
class Overhead:
    """Microseconds per step, with interquartile ranges and the number of gaps each comes from."""

    decode_step_us: float
    decode_quartiles_us: tuple[float, float]
    num_decode_gaps: int
    num_decode_steps: int
    mixed_step_us: float
    mixed_quartiles_us: tuple[float, float]
    num_mixed_gaps: int
    num_mixed_steps: int
    source: str
    gemm_tiles: tuple[tuple[int, int], ...] = ()
    """(most tokens, tile) that explain the steps with prompts best."""
    mixed_spread_us: float = 0.0
    """Weighted mean absolute deviation of what is left of the steps with prompts."""
    num_gaps: int = 0
    """All gaps, used or not."""
    num_all_decode_gaps: int = 0
    """All of those without prompts, in which no engine is ever idle."""
    settled: bool = True
    """The gaps used are those that come near this very overhead."""
    other_doubts: tuple[str, ...] = ()
    """What else of the run says that it is not the simulated one."""

    @property
    def num_used(self) -> int:
        """The gaps that the figures come from; too few with prompts say nothing."""
        return self.num_decode_gaps + (self.num_mixed_gaps if self.num_mixed_gaps >= MIN_GAPS else 0)

    @property
    def standard_errors_us(self) -> tuple[float, float]:
        """How far chance moves either figure: a median over gaps, per decode-only step and per step with prompts."""
        both = (self.decode_quartiles_us, self.num_decode_gaps), (self.mixed_quartiles_us, self.num_mixed_gaps)
        decode_us, mixed_us = (_ERROR_OF_MEDIAN * (high - low) / max(1, num) ** 0.5 for (low, high), num in both)
        return decode_us, mixed_us

    def doubts(self) -> list[str]:
        """A line where most of what cannot be idle time is left unexplained, and what else speaks against the fit."""
        doubts = [*self.other_doubts]
        if 2 * self.num_decode_gaps < self.num_all_decode_gaps:
            doubts.append(
                f"{self.source}: only {self.num_decode_gaps} of {self.num_all_decode_gaps} gaps without prompts last "
                f"as long as the simulated steps: check that model, profile and engine arguments are those of the run"
            )
        return doubts

    def used_text(self) -> str:
        """How many of the gaps were used."""
        return f"{self.num_used} of {self.num_gaps} gaps used"

    def as_dict(self) -> dict[str, Any]:
        """What a profile keeps."""
        return {
            "decode_step_us": round(self.decode_step_us, 1),
            "decode_quartiles_us": [round(value, 1) for value in self.decode_quartiles_us],
            "num_decode_gaps": self.num_decode_gaps,
            "num_decode_steps": self.num_decode_steps,
            "mixed_step_us": round(self.mixed_step_us, 1),
            "mixed_quartiles_us": [round(value, 1) for value in self.mixed_quartiles_us],
            "num_mixed_gaps": self.num_mixed_gaps,
            "num_mixed_steps": self.num_mixed_steps,
            "mixed_spread_us": round(self.mixed_spread_us, 1),
            "num_gaps": self.num_gaps,
            "num_gaps_used": self.num_used,
            "gemm_tiles": [list(pair) for pair in self.gemm_tiles],
            "fitted_to": self.source,
        }

    def short(self) -> str:
        """The figures on a line."""
        decode_error_us, mixed_error_us = self.standard_errors_us
        return (
            f"{self.decode_step_us:.0f} ± {decode_error_us:.0f} us per decode step, {self.mixed_step_us:.0f} ± "
            f"{mixed_error_us:.0f} us per step with prompts, {self.tiles_text()}; {self.used_text()}"
        )

    def tiles_text(self) -> str:
        """The tiles in words."""
        if not self.gemm_tiles:
            return "GEMM time smooth in the tokens"
        parts = [f"{tile} up to {limit} tokens" if limit < _ANY else f"{tile}" for limit, tile in self.gemm_tiles]
        return f"GEMMs of whole tiles of {', '.join(parts)}"

    def text(self) -> str:
        """The figures with their spread."""
        low, high = self.decode_quartiles_us
        low_mixed, high_mixed = self.mixed_quartiles_us
        return (
            f"overhead per decode-only step: {self.decode_step_us:.0f} us (quartiles {low:.0f} to {high:.0f}, "
            f"{self.num_decode_gaps} gaps, {self.num_decode_steps} steps)\n"
            f"overhead per step with prompts: {self.mixed_step_us:.0f} us (quartiles {low_mixed:.0f} to "
            f"{high_mixed:.0f}, {self.num_mixed_gaps} gaps, {self.num_mixed_steps} steps); {self.tiles_text()}\n"
            f"{self.used_text()}"
        )


def overhead_of_gaps(
    gaps: list[Gap],
    source: str,
    gemm_tiles: tuple[tuple[int, int], ...] = (),
    first_guess_us: tuple[float, float] | None = None,
) -> Overhead | None:
    """Weighted medians over the gaps; None if there are too few decode-only ones to say anything.

    The first guess (per decode-only step, per step with prompts) says which gaps are looked at first.
    """
    guess = first_guess_us or _first_guess_us(gaps)
    found = _in_turns(gaps, source, gemm_tiles, guess)
    if found is None:
        return None
    # Steps with prompts may cost so much more than the others that none of them is near the guess.
    for mixed_us in _mixed_guesses_us(gaps, found.decode_step_us):
        other = _in_turns(gaps, source, gemm_tiles, (found.decode_step_us, mixed_us))
        if other is not None and other.settled and other.num_used > found.num_used:
            found = other
    return found


def _in_turns(
    gaps: list[Gap], source: str, gemm_tiles: tuple[tuple[int, int], ...], guess_us: tuple[float, float]
) -> Overhead | None:
    """Which gaps are near the overhead, and the overhead of these, until neither changes."""
    used: list[Gap] = []
    found: Overhead | None = None
    for _ in range(_MAX_TURNS):
        near = [gap for gap in gaps if _is_near(gap, guess_us)]
        if found is not None and near == used:
            return found
        used = near
        found = _overhead_of(used, gaps, source, gemm_tiles)
        if found is None:
            return None
        guess_us = found.decode_step_us, found.mixed_step_us
    return None if found is None else replace(found, settled=False)


def _mixed_guesses_us(gaps: list[Gap], decode_us: float) -> list[float]:
    """Quartiles over the gaps with prompts that last up to twice what they would at `decode_us`: the rest is idle."""
    over = [
        (gap.measured_us - gap.kernel_us - gap.num_decode_steps * decode_us) / gap.num_mixed_steps
        for gap in gaps
        if gap.num_mixed_steps
        and gap.measured_us <= 2.0 * (gap.kernel_us + (gap.num_decode_steps + gap.num_mixed_steps) * decode_us)
    ]
    return [max(0.0, float(value)) for value in np.quantile(over, (0.25, 0.5, 0.75))] if over else []


def too_slow(where: object, found: Overhead, times: str) -> ScenarioError:
    """The refusal of an overhead that no engine has."""
    return ScenarioError(
        f"{where}: {found.decode_step_us:.0f} us more per decode step than its kernels take ({found.used_text()}): "
        f"no engine does that; {times} must be in seconds, model and profile those of the run"
    )


def did_not_converge(where: object, found: Overhead) -> ScenarioError:
    """The refusal of an overhead that changes whenever it is used."""
    return ScenarioError(
        f"{where}: the overhead per step did not converge, {found.used_text()} (last: {found.decode_step_us:.0f} us "
        f"per decode step, {found.mixed_step_us:.0f} us per step with prompts): take a longer run, and check that "
        f"model, profile and engine arguments are those of the run"
    )


def _first_guess_us(gaps: list[Gap]) -> tuple[float, float]:
    """The median over all decode-only gaps; gaps with prompts are too often idle time to say anything by themselves."""
    pure = _pure(gaps)
    if not pure:
        return 0.0, 0.0
    per_step = np.array([(gap.measured_us - gap.kernel_us) / gap.num_decode_steps for gap in pure])
    weights = np.array([gap.num_decode_steps for gap in pure], dtype=float)
    guess_us = max(0.0, _weighted_quantile(per_step, weights, 0.5))
    return guess_us, guess_us


def _pure(gaps: list[Gap]) -> list[Gap]:
    return [gap for gap in gaps if gap.num_decode_steps and not gap.num_mixed_steps]


def _is_near(gap: Gap, overhead_us: tuple[float, float]) -> bool:
    expected_us = gap.kernel_us + gap.num_decode_steps * overhead_us[0] + gap.num_mixed_steps * overhead_us[1]
    return abs(gap.measured_us / max(expected_us, 1e-9) - 1.0) <= _SANE_RATIO


def _overhead_of(
    sane: list[Gap], gaps: list[Gap], source: str, gemm_tiles: tuple[tuple[int, int], ...]
) -> Overhead | None:
    pure = _pure(sane)
    if len(pure) < MIN_GAPS:
        return None
    per_step = np.array([(gap.measured_us - gap.kernel_us) / gap.num_decode_steps for gap in pure])
    weights = np.array([gap.num_decode_steps for gap in pure], dtype=float)
    decode_us = _weighted_quantile(per_step, weights, 0.5)
    mixed = [gap for gap in sane if gap.num_mixed_steps]
    rest = np.array(
        [(gap.measured_us - gap.kernel_us - gap.num_decode_steps * decode_us) / gap.num_mixed_steps for gap in mixed]
    )
    mixed_weights = np.array([gap.num_mixed_steps for gap in mixed], dtype=float)
    # Without enough gaps of their own, steps with prompts are taken to cost what the others do.
    few = len(mixed) < MIN_GAPS
    mixed_us = decode_us if few else _weighted_quantile(rest, mixed_weights, 0.5)
    return Overhead(
        max(0.0, decode_us),
        _quartiles(per_step, weights),
        len(pure),
        int(weights.sum()),
        max(0.0, mixed_us),
        (mixed_us, mixed_us) if few else _quartiles(rest, mixed_weights),
        len(mixed),
        int(mixed_weights.sum()),
        source,
        gemm_tiles,
        0.0 if few else float(np.average(np.abs(rest - mixed_us), weights=mixed_weights)),
        len(gaps),
        len(_pure(gaps)),
    )


def _quartiles(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    return _weighted_quantile(values, weights, 0.25), _weighted_quantile(values, weights, 0.75)


def _weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values, kind="stable")
    middle = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    return float(np.interp(share, middle, values[order]))


def gaps_between_events(
    event_s: Mapping[Any, float], step_of_event: Mapping[Any, int], kernel_us: np.ndarray, is_mixed: np.ndarray
) -> list[Gap]:
    """Gaps between neighbouring events in measured time.

    `event_s` holds measured seconds; `step_of_event` the simulated step at whose end the event comes. `kernel_us` and
    `is_mixed` are per simulated step.
    """
    kernel_sum = np.concatenate([[0.0], np.cumsum(kernel_us)])
    mixed_sum = np.concatenate([[0], np.cumsum(is_mixed.astype(int))])
    ordered = sorted(event_s, key=lambda event: (event_s[event], step_of_event[event]))
    gaps = []
    for left, right in pairwise(ordered):
        first, last = step_of_event[left] + 1, step_of_event[right] + 1
        if last <= first:
            continue
        num_mixed = int(mixed_sum[last] - mixed_sum[first])
        gaps.append(
            Gap(
                1e6 * (event_s[right] - event_s[left]),
                float(kernel_sum[last] - kernel_sum[first]),
                last - first - num_mixed,
                num_mixed,
            )
        )
    return gaps
