"""What a run gives back: the summary, the tables as DataFrames, the files it wrote."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.metrics.export import Column

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.report.accessor import Plots

HEADLINES = (
    ("completed", "requests completed", ""),
    ("duration", "duration", "s"),
    ("output_throughput", "output throughput", "tok/s"),
    ("mean_ttft_ms", "mean TTFT", "ms"),
    ("mean_tpot_ms", "mean TPOT", "ms"),
    ("running_mean", "running at once, mean", ""),
    ("running_peak", "running at once, peak", ""),
    ("block_utilization", "block utilization", ""),
    ("num_preemptions", "preemptions", ""),
)

ENDS = (
    ("num_rejected", "rejected", ""),
    ("num_aborted", "aborted", ""),
    ("num_unfinished", "cut off", ""),
)
"""What else becomes of requests; shown where it happened."""


@dataclass(frozen=True)
class RunResult:
    """One simulated run.

    `summary` has every figure (documented in docs/columns.md); `out` is the folder written, None if none was.
    `steps` and `requests` are DataFrames with the columns of steps.csv and requests.csv; a table that was not
    recorded is empty.
    """

    summary: dict[str, Any]
    out: Path | None = None
    step_columns: dict[str, Column] = field(default_factory=dict, repr=False)
    request_columns: dict[str, Column] = field(default_factory=dict, repr=False)
    block_map: dict[str, Any] | None = field(default=None, repr=False)
    """Frames for the page's block map (`kvsim.report.blockmap.recording`), where a report was asked for."""

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per engine iteration."""
        import pandas as pd

        return pd.DataFrame(self.step_columns)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request."""
        import pandas as pd

        return pd.DataFrame(self.request_columns)

    @property
    def plot(self) -> Plots:
        """The pictures of this run: `result.plot.memory()` and so on, each a matplotlib Figure."""
        from kvsim.report.accessor import Plots

        return Plots(self)

    def headline(self) -> list[tuple[str, str]]:
        """The figures to look at first, as (label, text)."""
        return [(label, text_of(self.summary.get(key), unit)) for key, label, unit in _headlines([self])]

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{label}</th><td>{text}</td></tr>" for label, text in self.headline())
        title = html.escape(f"{self.summary.get('name', 'run')} · {self.summary.get('engine', '')}")
        return f"<table><caption>{title}</caption>{rows}</table>"


@dataclass(frozen=True)
class CompareResult:
    """The same workload under several engines, in the order given."""

    runs: dict[str, RunResult]
    out: Path | None = None

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per engine: the flattened summary, as in compare.csv."""
        import pandas as pd

        return pd.DataFrame(self.records())

    def records(self) -> list[dict[str, Any]]:
        """Flat records, the engine first."""
        from kvsim.metrics.export import flatten

        return [{"engine": engine} | flatten(run.summary) for engine, run in self.runs.items()]

    def _repr_html_(self) -> str:
        headlines = _headlines(self.runs.values())
        head = "".join(f"<th>{label}</th>" for _, label, _ in headlines)
        body = "".join(
            f"<tr><th>{engine}</th>"
            + "".join(f"<td>{text_of(run.summary.get(key), unit)}</td>" for key, _, unit in headlines)
            + "</tr>"
            for engine, run in self.runs.items()
        )
        return f"<table><tr><th>engine</th>{head}</tr>{body}</table>"


def _headlines(runs: Iterable[RunResult]) -> list[tuple[str, str, str]]:
    """Key, label and unit of the figures to look at first."""
    summaries = [run.summary for run in runs]
    return [*HEADLINES, *(end for end in ENDS if any(summary.get(end[0]) for summary in summaries))]


def text_of(value: Any, unit: str = "") -> str:
    """A figure for people: at most four digits, thousands with commas, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    else:
        text = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{text} {unit}".rstrip()


def share(value: float | None) -> str:
    """`97.3 %`; a dash for None."""
    return "–" if value is None else f"{100 * value:.1f} %"
