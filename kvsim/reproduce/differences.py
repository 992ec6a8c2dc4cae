"""Why we differ: the same runs with one assumption changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsim.reproduce import fig2, fig15
from kvsim.reproduce.beam_laws import LAWS, Trial
from kvsim.reproduce.draw import stacks
from kvsim.reproduce.fig15 import sampled
from kvsim.reproduce.figure import Case, Figure, Ours, Results, Row, Scale
from kvsim.reproduce.recipe import BEAM_THETA, MAX_MODEL_LEN, MEAN_LENGTHS, ORCA, VLLM, Scenario, saturated

OUTPUT_CV, PROMPT_CV = 1.1, 1.6
SWAP_SPACE = "64GiB"
CARRIED_REQUESTS = {"alpaca": 60, "sharegpt": 40}
"""Requests whose beams are run with the other data set's theta."""
SHARES = {"alpaca": 700, "sharegpt": 300}
LAW = "beam law: "
PARAMETER = "parameter"
POINTS = tuple(f"{dataset} {width}" for dataset in ("alpaca", "sharegpt") for width in (2, 4, 6))
LAW_REQUESTS = {"alpaca": 2000, "sharegpt": 600}


def lognormal(dataset: str) -> Scenario:
    """The published means with made-up spreads, instead of real pairs."""
    prompt_mean, output_mean = MEAN_LENGTHS[dataset]
    return {
        "type": "lognormal",
        "prompt_mean": prompt_mean,
        "prompt_std": PROMPT_CV * prompt_mean,
        "output_mean": output_mean,
        "output_std": OUTPUT_CV * output_mean,
        "max_total": MAX_MODEL_LEN,
    }


def carried_over(dataset: str) -> str:
    """The series of a data set's beams under the other's theta."""
    return f"the other's theta, {dataset} beam"


def cases(scale: Scale) -> dict[str, Case]:
    num = scale.pick(7200, 800)
    found: dict[str, Case] = {}
    for engine in ORCA[1:]:
        found[f"first-fit, {engine}"] = saturated(engine, "sharegpt", num, allocator={"placement": "first_fit"})
    for engine in (*ORCA, VLLM):
        found[f"log-normal, {engine}"] = saturated(engine, "sharegpt", num, lengths=lognormal("sharegpt"))
    for way in ("recompute", "swap"):
        found[f"{way}, {VLLM}"] = saturated(
            VLLM, "sharegpt", num, scheduler={"preemption": way}, memory={"swap_space": SWAP_SPACE}
        )
    for dataset, most in SHARES.items():
        for lengths in ("same", "independent"):
            for width in (2, 4, 6):
                sampling = {"n": width} | ({} if lengths == "same" else {"lengths": lengths})
                found[f"{lengths} lengths, {dataset} {width}"] = sampled(dataset, sampling, scale.pick(4 * most, most))
    for dataset, most in CARRIED_REQUESTS.items():
        (other,) = CARRIED_REQUESTS.keys() - {dataset}
        for width in fig15.WIDTHS:
            beams = {"beam_width": width, "theta": BEAM_THETA[other]}
            found[f"{carried_over(dataset)} {width}"] = sampled(dataset, beams, scale.pick(10 * most, most))
    sizes = tuple((dataset, scale.pick(10 * num, num)) for dataset, num in LAW_REQUESTS.items())
    return found | {LAW + law: Trial(law, sizes) for law in LAWS}


def ours(results: Results) -> list[Ours]:
    rows = []
    for name, summary in results.items():
        if name.startswith(LAW):
            rows.append(Ours(name, "", PARAMETER, summary[PARAMETER]))
            rows += [Ours(name, x, fig15.QUANTITY, summary[x]) for x in POINTS]
            continue
        if " lengths, " in name or name.startswith("the other's theta, "):
            series, _, width = name.rpartition(" ")
            rows.append(Ours(series, width, fig15.QUANTITY, 100 * summary["sharing_saving"]))
            continue
        rows += [Ours(name, part, fig2.QUANTITY, share) for part, share in fig2.parts_of(summary).items()]
        rows.append(Ours(name, "", "requests in a batch", summary["running_mean"]))
        if name.endswith(VLLM):
            rows.append(Ours(name, "", "requests/s", summary["request_throughput"]))
            rows.append(Ours(name, "", "preemptions per request", summary["num_preemptions"] / summary["completed"]))
    return rows


def draw(picture: Any, rows: Sequence[Row]) -> None:
    shares = [row for row in rows if row.quantity == fig2.QUANTITY]
    stacks(picture, shares, tuple(fig2.PARTS), "share of the KV memory")


FIGURE = Figure(
    name="differences",
    title="Where we differ, and why: one assumption changed at a time",
    cases=cases,
    ours=ours,
    draw=draw,
    text="Figure 2 with first-fit instead of the buddy allocator, and with log-normal lengths of the same means "
    f"(coefficient of variation {PROMPT_CV:g} and {OUTPUT_CV:g}); vLLM with swap instead of recompute; Figure 15 with "
    "independent lengths of a request's samples, with each data set's beams under the other's theta, and under other "
    "laws by which beams could branch (family trees alone, without an engine).",
)
