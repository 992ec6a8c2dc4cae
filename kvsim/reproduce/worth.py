"""When paging is worth it: its gain over regions of the maximum length, mapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.report.style import CYCLE
from kvsim.reproduce.figure import Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import ALL_AT_ONCE, MAX_MODEL_LEN, VLLM, Scenario, scenario

SPREADS = (0.0, 0.5, 1.0, 2.0)
"""Coefficients of variation of the output's length."""
MEAN_SHARES = (0.0625, 0.25, 0.5)
"""Mean length / maximum length."""
CLIENTS = (2, 8, 32, 128)
MEAN_LENGTHS = (128, 512, 1024)
PROMPT_SHARE = 0.25
"""Of the mean length, the same for all requests, so that the spread is the output's alone."""
MOST_TOKENS_PER_S = 4000
"""Above what any of the engines reaches."""
GAIN = "output throughput, paged / preallocated"
BY_SPREAD, BY_LOAD = "length spread", "clients"


def cases(scale: Scale) -> dict[str, Scenario]:
    seconds = scale.pick(1200, 150)
    found = {}
    for engine in (VLLM, "orca-max"):
        for share in MEAN_SHARES:
            for spread in SPREADS:
                mean = share * MAX_MODEL_LEN
                found[f"{engine}|{BY_SPREAD}|{share:g}|{spread:g}"] = _scenario(engine, mean, spread, seconds)
        for mean in MEAN_LENGTHS:
            for clients in CLIENTS:
                found[f"{engine}|{BY_LOAD}|{mean}|{clients}"] = _scenario(
                    engine, mean, 1.0, seconds, max_concurrency=clients
                )
    return found


def _scenario(engine: str, mean: float, spread: float, seconds: float, **workload: Any) -> Scenario:
    """More requests than can be served before the clock stops, so that no run ends with a few stragglers."""
    num_requests = round(seconds * MOST_TOKENS_PER_S / mean)
    return scenario(engine, _lengths(mean, spread), ALL_AT_ONCE, num_requests, horizon_s=seconds, workload=workload)


def _lengths(mean: float, spread: float) -> Scenario:
    output = (1 - PROMPT_SHARE) * mean
    return {
        "type": "lognormal",
        "prompt_mean": PROMPT_SHARE * mean,
        "output_mean": output,
        "output_std": spread * output,
        "max_total": MAX_MODEL_LEN,
    }


def ours(results: Results) -> list[Ours]:
    rows = []
    for name, summary in results.items():
        engine, kind, mean, x = name.split("|")
        if engine != VLLM:
            continue
        other = results["|".join(("orca-max", kind, mean, x))]
        series = f"mean / maximum {mean}, by spread" if kind == BY_SPREAD else f"mean length {mean}, by clients"
        rows.append(Ours(series, x, GAIN, summary["output_throughput"] / other["output_throughput"]))
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    left, right = picture.subplots(1, 2, sharey=True)
    for axes, kind, label in ((left, "spread", "coefficient of variation"), (right, "clients", "clients")):
        mine = [row for row in rows if row.series.endswith(kind)]
        for name, color in zip(dict.fromkeys(row.series for row in mine), CYCLE, strict=False):
            points = [row for row in mine if row.series == name]
            axes.plot(
                [float(row.x) for row in points],
                [row.ours for row in points],
                marker="o",
                ms=4,
                color=color,
                label=name.partition(",")[0],
            )
        axes.axhline(1.0, color="#555555", lw=0.8)
        axes.set_xlabel(label)
        axes.legend()
    right.set_xscale("log", base=2)
    right.set_xticks(list(CLIENTS), [str(clients) for clients in CLIENTS])
    left.set_ylabel(GAIN)


FIGURE = Figure(
    name="worth",
    title="When paging is worth it",
    cases=cases,
    ours=ours,
    draw=draw,
    text="OPT-13B with 12 GiB of KV, log-normal outputs behind a prompt of a quarter of the mean; throughput of vLLM "
    "over that of regions of 2,048 slots. Left: all requests at once. Right: closed loop of so many clients, spread 1.",
)
