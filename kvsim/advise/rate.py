"""The highest request rate that meets the SLO, and what happens beyond it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsim.advise.answer import Answer, Table, effect, interval, more_seeds, percent, shown
from kvsim.advise.estimate import MATERIAL, estimate, next_run_at_least
from kvsim.advise.lab import SLO_SHARE, Lab, Runs
from kvsim.advise.search import Scale, search
from kvsim.advise.workload import AT_ONCE, RateKnob, own_rate, rate_knob
from kvsim.result import share, text_of

QUESTION = "Which request rate meets the SLO?"
LADDER = (0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Rates around the recommended one, to see what happens beyond it."""
BEYOND = 1.25
"""Where the check expects the SLO to be missed."""
SLOWEST = 2.0**-7
"""Share of the scenario's rate below which no search goes."""


@dataclass(frozen=True)
class RateAnswer:
    """The answer, and the rate that other questions may use (None: there is none to recommend)."""

    answer: Answer
    recommended: float | None = None
    knob: RateKnob | None = None


def highest_rate(lab: Lab, slo: str) -> RateAnswer:
    """Bisect the rate for each seed; recommend what a run with another seed is expected to meet, and check it."""
    lab.topic = "rate"
    knob = rate_knob(lab.base)
    if knob is None:
        return RateAnswer(Answer("rate", QUESTION, "cannot be asked: the requests are written out with their times"))
    (own,) = lab.try_out([{}])
    start = own_rate(knob, own)
    (flood,) = lab.try_out([knob.values_of(AT_ONCE)])
    if all(run.meets_slo for run in flood.runs):
        return RateAnswer(_no_limit(lab, flood, slo, knob), None, knob)
    found, made = search(lab, Scale(knob.values_of, start * SLOWEST, AT_ONCE, better=-1), start)
    reached = [rate for rate in found.values() if rate is not None]
    if len(reached) < len(found):
        return RateAnswer(_never(lab, [run.number for run in made], slo, len(reached)), None, knob)
    recommended = _round_down(max(next_run_at_least(reached), min(reached) / 2))
    return RateAnswer(_answer(lab, knob, slo, reached, recommended, [run.number for run in made]), recommended, knob)


def _answer(
    lab: Lab, knob: RateKnob, slo: str, reached: list[float], recommended: float, searched: list[int]
) -> Answer:
    limit = estimate(reached)
    rates = [recommended * factor for factor in LADDER]
    ladder = lab.try_out([knob.values_of(rate) for rate in rates])
    # A rate without figures is told as such, not as one at which nothing is served.
    if with_figures := [(rate, runs) for rate, runs in zip(rates, ladder, strict=True) if not runs.error]:
        rates, ladder = [rate for rate, _ in with_figures], [runs for _, runs in with_figures]
    inside, beyond = lab.try_out([knob.values_of(recommended), knob.values_of(recommended * BEYOND)], lab.other_seeds)
    lines = [
        f"the limit is {shown(limit, knob.unit)} over {len(reached)} seeds "
        f"({text_of(min(reached))} to {text_of(max(reached))}); SLO: {slo} for {share(SLO_SHARE)} of the requests",
        f"checked with {len(inside.runs)} other seeds: {share(inside.attainment.mean)} of the requests meet it at "
        f"{text_of(recommended)}, {share(beyond.attainment.mean)} at {text_of(recommended * BEYOND)}",
        _beyond(rates, ladder, knob),
    ]
    if knob.note:
        lines.append(knob.note)
    return Answer(
        "rate",
        QUESTION,
        f"{text_of(recommended)} {knob.unit}" + (f"; the limit itself: {more_seeds(limit)}" if limit.low <= 0 else ""),
        tuple(lines),
        table=_table(rates, ladder, knob),
        figures={
            "recommended": recommended,
            "unit": knob.unit,
            "limit": interval(limit),
            "limits": reached,
            "checked": {"recommended": inside.attainment.mean, "beyond": beyond.attainment.mean, "factor": BEYOND},
        },
        runs=tuple(
            dict.fromkeys([*searched, *(number for runs in (*ladder, inside, beyond) for number in runs.numbers)])
        ),
        curves={"rates": rates, "ladder": ladder, "limits": reached, "unit": knob.unit, "recommended": recommended},
    )


def _table(rates: list[float], ladder: list[Runs], knob: RateKnob) -> Table:
    rows = tuple(
        (
            text_of(rate),
            share(runs.attainment.mean),
            text_of(runs.mean("request_goodput").mean),
            shown(runs.mean("output_throughput")),
            shown(runs.mean("mean_ttft_ms")),
            shown(runs.mean("num_preemptions")),
        )
        for rate, runs in zip(rates, ladder, strict=True)
    )
    return Table((knob.unit, "meet the SLO", "goodput", "output tok/s", "mean TTFT ms", "preemptions"), rows)


def _beyond(rates: list[float], ladder: list[Runs], knob: RateKnob) -> str:
    """Whether throughput falls from its peak, and where the requests that meet the SLO do."""
    best = max(range(len(rates)), key=lambda index: ladder[index].mean("output_throughput").mean)
    last = ladder[-1].gain_over(ladder[best], "output_throughput")
    good = max(range(len(rates)), key=lambda index: ladder[index].mean("request_goodput").mean)
    lost = ladder[-1].gain_over(ladder[good], "request_goodput")
    fall = f"by {effect(lost)}" if lost is not None else "to nothing"
    text = f"goodput peaks near {text_of(rates[good])} {knob.unit} and changes {fall} at {text_of(rates[-1])}; "
    if best < len(rates) - 1 and last is not None and last.high < 0:
        worst = next(index for index in range(best + 1, len(rates)) if _is_below(ladder[index], ladder[best]))
        return text + f"throughput falls from {text_of(rates[worst])} on ({percent(last)} at {text_of(rates[-1])})"
    if best < len(rates) - 1 and last is not None and last.low < -MATERIAL:
        return (
            text + f"whether output throughput falls up to {text_of(rates[-1])} ({percent(last)}): {more_seeds(last)}"
        )
    return text + f"output throughput does not collapse up to {text_of(rates[-1])}"


def _is_below(runs: Runs, best: Runs) -> bool:
    change = runs.gain_over(best, "output_throughput")
    return change is not None and change.high < 0


def _no_limit(lab: Lab, flood: Runs, slo: str, knob: RateKnob) -> Answer:
    clients = getattr(lab.base.scenario.workload, "max_concurrency", None)
    why = f"the clients never have more than {clients} requests under way" if clients else "all requests at once do"
    throughput = flood.mean("request_throughput")
    return Answer(
        "rate",
        QUESTION,
        f"any: {why}, and {share(flood.attainment.mean)} of them meet the SLO ({slo})",
        (f"as fast as they can be sent, {shown(throughput, 'requests/s')} are served",),
        figures={"recommended": None, "unit": knob.unit, "served": interval(throughput)},
        runs=flood.numbers,
    )


def _never(lab: Lab, searched: list[int], slo: str, num_reached: int) -> Answer:
    reason = next((run.error for run in lab.log if run.number in searched and run.error), "")
    return Answer(
        "rate",
        QUESTION,
        f"none: for {len(lab.seeds) - num_reached} of {len(lab.seeds)} seeds no rate meets the SLO ({slo})",
        (reason,) if reason else ("requests that are alone in the engine miss it too: larger goals, or a faster GPU",),
        figures={"recommended": None},
        runs=tuple(searched),
    )


def _round_down(value: float) -> float:
    """Three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit) * unit:.12g}")
