"""What a trace is like: lengths, rate, burstiness, and how much of it a prefix cache could find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.files import save_picture
from kvsim.types import NS_PER_S
from kvsim.workload.prefix_hits import BlockTrace, PrefixHits, block_trace, prefix_curve, prefix_hits
from kvsim.workload.trace import Trace
from kvsim.workload.traces import load_trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LengthStats:
    """Tokens: linear percentiles."""

    mean: float
    std: float
    min: int
    median: float
    p95: float
    p99: float
    max: int


@dataclass(frozen=True)
class TraceReport:
    """Statistics of a trace; times are None where it has none, `prefix_hits` is empty where prefixes are unknown.

    `rate` is gaps over the time they fill (per second), `burstiness_cv` the standard deviation of the gaps over
    their mean: 1 for Poisson arrivals. `prefix_block_size` is in tokens.
    """

    path: str
    format: str
    rows: int
    num_skipped: int
    num_failed: int
    prompt_tokens: LengthStats
    output_tokens: LengthStats
    duration_s: float | None
    rate: float | None
    burstiness_cv: float | None
    prefix_block_size: int | None
    distinct_blocks: int | None
    prefix_hits: tuple[PrefixHits, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON takes it; an infinite cache has capacity "inf"."""
        data = asdict(self)
        data["warnings"] = list(self.warnings)
        data["prefix_hits"] = [_hits_dict(hits) for hits in self.prefix_hits]
        return data


def _hits_dict(hits: PrefixHits) -> dict[str, Any]:
    return {
        "capacity": "inf" if hits.capacity is None else hits.capacity,
        "block_hit_rate": hits.block_hit_rate,
        "token_hit_rate": hits.token_hit_rate,
        "block_hit_rate_capped": hits.block_hit_rate_capped,
        "hit_blocks": hits.hit_blocks,
        "total_blocks": hits.total_blocks,
        "hit_tokens": hits.hit_tokens,
        "total_tokens": hits.total_tokens,
        "evictions": hits.num_evictions,
    }


def trace_report(
    path: str | Path | Trace,
    *,
    trace_format: str | None = None,
    hash_block_size: int | None = None,
    block_size: int = 16,
    chars_per_token: float = 4.0,
    on_bad_row: str = "error",
    capacities: Sequence[int | None] | None = None,
) -> TraceReport:
    """The report of a file (or of a loaded trace). `block_size` cuts prompts whose prefixes are known by group.

    Raises ScenarioError for a file that cannot be read.
    """
    trace = (
        path
        if isinstance(path, Trace)
        else load_trace(
            path,
            trace_format,
            hash_block_size=hash_block_size,
            chars_per_token=chars_per_token,
            on_bad_row=on_bad_row,
            needs_times=False,
        )
    )
    blocks = block_trace(trace, block_size)
    duration_s, cv = _gaps(trace.arrival_ns)
    return TraceReport(
        path=trace.path,
        format=trace.format,
        rows=len(trace),
        num_skipped=trace.num_skipped,
        num_failed=trace.num_failed,
        prompt_tokens=_stats(trace.prompt),
        output_tokens=_stats(trace.output),
        duration_s=duration_s,
        rate=trace.mean_rate,
        burstiness_cv=cv,
        prefix_block_size=None if blocks is None else blocks.block_size,
        distinct_blocks=None if blocks is None else blocks.num_distinct,
        prefix_hits=() if blocks is None else tuple(prefix_curve(blocks, capacities)),
        warnings=(*trace.notes, *_warnings(trace, blocks)),
    )


def _stats(lengths: Ints) -> LengthStats:
    import numpy as np

    median, p95, p99 = (float(value) for value in np.percentile(lengths, [50, 95, 99]))
    return LengthStats(
        float(lengths.mean()), float(lengths.std()), int(lengths.min()), median, p95, p99, int(lengths.max())
    )


def _gaps(arrivals: Ints | None) -> tuple[float | None, float | None]:
    """Duration in seconds, and the coefficient of variation of the gaps."""
    import numpy as np

    if arrivals is None:
        return None, None
    gaps = np.diff(arrivals)
    duration_s = float(arrivals[-1] - arrivals[0]) / NS_PER_S
    return duration_s, float(gaps.std() / gaps.mean()) if duration_s > 0 else None


def _warnings(trace: Trace, blocks: BlockTrace | None) -> list[str]:
    import numpy as np

    warnings = []
    if trace.arrival_ns is None:
        warnings.append(f"{trace.path}: no arrival times; a run needs workload.arrivals beside it")
    if blocks is None:
        return warnings
    size = blocks.block_size
    if trace.hash_ids is None and trace.prefix_group is not None and trace.prefix_tokens is not None:
        shared = trace.prefix_tokens[(trace.prefix_group >= 0) & (trace.prefix_tokens > 0)]
        if short := int(np.sum(shared < size)):
            warnings.append(
                f"{short} of {len(shared)} requests with a shared prefix can never hit: their shared part "
                f"is shorter than a block of {size} tokens"
            )
    if prefix_hits(blocks).hit_blocks == 0:
        warnings.append(f"no two prompts begin with the same block of {size} tokens: a prefix cache finds nothing")
    return warnings


def render(report: TraceReport) -> str:
    """The report as plain text for a terminal."""
    lines = [f"{report.path} ({report.format}): {report.rows} requests{_left_out(report)}"]
    if report.duration_s is not None:
        lines.append(
            f"  arrivals  {report.duration_s:.3f} s, {_number(report.rate)} requests/s, "
            f"burstiness (CV of gaps) {_number(report.burstiness_cv)}"
        )
    lines.append(f"  {'tokens':<8}{'mean':>10}{'median':>10}{'p95':>10}{'p99':>10}{'max':>10}")
    for name, stats in (("prompt", report.prompt_tokens), ("output", report.output_tokens)):
        lines.append(
            f"  {name:<8}{stats.mean:>10.1f}{stats.median:>10.1f}{stats.p95:>10.1f}{stats.p99:>10.1f}{stats.max:>10d}"
        )
    if report.prefix_hits:
        lines += _curve_lines(report)
    return "\n".join([*lines, *(f"  warning: {text}" for text in report.warnings)])


def _left_out(report: TraceReport) -> str:
    parts = [
        f"{count} {what}"
        for count, what in ((report.num_skipped, "bad rows skipped"), (report.num_failed, "failed requests left out"))
        if count
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _curve_lines(report: TraceReport) -> list[str]:
    lines = [
        f"  prefix hits, LRU, blocks of {report.prefix_block_size} tokens ({report.distinct_blocks} distinct)",
        f"  {'capacity':>10}{'blocks':>10}{'tokens':>10}",
    ]
    bound = report.prefix_hits[-1].hit_blocks or 1
    for hits in report.prefix_hits:
        name = "infinite" if hits.capacity is None else str(hits.capacity)
        bar = "#" * round(30 * hits.hit_blocks / bound)
        lines.append(f"  {name:>10}{hits.block_hit_rate:>10.4f}{hits.token_hit_rate:>10.4f}  {bar}")
    return lines


def picture(report: TraceReport, path: str | Path) -> None:
    """Write the prefix-hit curve as an image: hit rate against cache capacity, the infinite cache as bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    finite = [hits for hits in report.prefix_hits if hits.capacity is not None]
    sizes = [hits.capacity or 0 for hits in finite]
    for label, attribute in (("blocks", "block_hit_rate"), ("tokens", "token_hit_rate")):
        (line,) = axes.plot(sizes, [getattr(hits, attribute) for hits in finite], marker="o", label=label)
        for hits in report.prefix_hits:
            if hits.capacity is None:
                axes.axhline(getattr(hits, attribute), linestyle="--", color=line.get_color(), linewidth=1)
    if sizes:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"cache capacity in blocks of {report.prefix_block_size} tokens (dashed: infinite)")
    axes.set_ylabel("hit rate")
    axes.set_title(f"Prefix hits under LRU: {Path(report.path).name}")
    axes.legend(loc="center right")
    axes.grid(alpha=0.3)
    save_picture(figure, path, dpi=120)
