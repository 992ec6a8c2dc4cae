"""What an answer is: a verdict, the figures behind it, and the runs behind those."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvsim.advise.estimate import MAX_SEEDS, Estimate, is_unclear, seeds_needed
from kvsim.result import text_of


@dataclass(frozen=True)
class Table:
    """Rows of texts under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Answer:
    """One question answered.

    `verdict` is the answer in a sentence, `lines` say why, `figures` are the numbers (JSON-ready), `runs` the numbers
    of the simulations behind them (rows of runs.csv).
    """

    topic: str
    question: str
    verdict: str
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    table: Table | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    runs: tuple[int, ...] = ()
    curves: dict[str, Any] = field(default_factory=dict, repr=False)
    """What its picture shows."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "question": self.question,
            "verdict": self.verdict,
            "lines": list(self.lines),
            "warnings": list(self.warnings),
            "figures": self.figures,
            "runs": list(self.runs),
        }


def interval(value: Estimate | None) -> dict[str, float | None] | None:
    """For JSON: the mean and its 95 % interval's half width; None where one seed knows no interval."""
    if value is None:
        return None
    width = value.half_width if value.half_width != float("inf") else None
    return {"mean": value.mean, "ci95": width}


def shown(value: Estimate | None, unit: str = "") -> str:
    """`12.3 ± 0.4 ms`."""
    if value is None:
        return "–"
    width = "?" if value.half_width == float("inf") else f"{float(f'{value.half_width:.2g}'):,.10g}"
    return f"{text_of(float(value.mean))} ± {width} {unit}".rstrip()


def percent(value: Estimate | None) -> str:
    """`+12.3 ± 0.4 %`, of a relative difference."""
    if value is None:
        return "–"
    width = "?" if value.half_width == float("inf") else f"{100 * value.half_width:.1f}"
    return f"{100 * value.mean:+.1f} ± {width} %"


def more_seeds(value: Estimate, margin: float = 0.0) -> str:
    """`cannot tell with 2 seeds; --seeds 14 might`."""
    needed = seeds_needed(value, margin)
    hope = f"--seeds {needed} might" if needed is not None else f"nor would {MAX_SEEDS:,}"
    return f"cannot tell with {value.num_values} seeds; {hope}"


def effect(value: Estimate | None) -> str:
    """A relative difference that is claimed: where it may be none at all, that is said."""
    return percent(value) + (f" ({more_seeds(value)})" if value is not None and is_unclear(value) else "")
