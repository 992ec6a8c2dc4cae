"""Ask a scenario the common questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.advise.answer import Answer
from kvsim.advise.block_size import best_block_size
from kvsim.advise.cache import smallest_cache
from kvsim.advise.lab import Lab, Run
from kvsim.advise.paging import is_paging_worth_it
from kvsim.advise.rate import highest_rate
from kvsim.advise.sharing import sharing_saves
from kvsim.advise.slo import describe_slo, with_slo
from kvsim.metrics.outdir import check_kind
from kvsim.runs import resolve
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.sweeps.executors import default_jobs, executor_for
from kvsim.sweeps.grid import seeds_of
from kvsim.sweeps.tables import told
from kvsim.types import Progress, ScenarioError

SEEDS = 6
"""Simulations per variant: the scenario's own seed and those after it."""
RUNS_EXPECTED = 45
"""Variants that five answers take, about: for the progress bar."""


@dataclass(frozen=True)
class Advice:
    """Five answers about a scenario, and every run behind them."""

    name: str
    slo: str
    seeds: tuple[int, ...]
    answers: tuple[Answer, ...]
    runs: tuple[Run, ...] = field(repr=False)
    out: Path | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, topic: str) -> Answer:
        """An answer by its topic: block_size, rate, cache, paging, sharing."""
        return next(answer for answer in self.answers if answer.topic == topic)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: answers, and how each run differs from the scenario."""
        return {
            "scenario": self.name,
            "slo": self.slo,
            "seeds": list(self.seeds),
            "notes": list(self.notes),
            "answers": {answer.topic: answer.as_dict() for answer in self.answers},
            "runs": [
                {"run": run.number, "topic": run.topic, "values": run.values, "seed": run.seed, "error": run.error}
                for run in self.runs
            ],
        }


def advise(
    scenario: str | Path | dict[str, Any] | ResolvedScenario,
    *,
    slo: dict[str, str] | None = None,
    seeds: int = SEEDS,
    jobs: int | None = None,
    out: str | Path | None = None,
    plots: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    **values: Any,
) -> Advice:
    """Block size, request rate, cache size, paging, sharing: each answered by simulating variants of the scenario.

    `slo` names goals (`{"ttft": "2s"}`); default: the scenario's. With `out` a page (advice.md), the runs (runs.csv)
    and pictures are written; `force` lets them replace the results of another command. Raises ScenarioError.
    """
    if seeds < 2:
        raise ScenarioError(f"seeds is {seeds}; at least 2 are needed to know how sure an answer is")
    if out is not None and not force:
        check_kind(Path(out), "advise")
    base, is_assumed = with_slo(resolve(scenario, values), slo)
    base, notes = _on_blocks(base)
    notes = (*notes, *base.warnings)
    if is_assumed:
        notes = (*notes, f"the scenario has no SLO; assumed is {describe_slo(base)} (say --slo)")
    if base.scenario.tensor_parallel_size > 1:
        notes = (*notes, f"GiB are those of each of the {base.scenario.tensor_parallel_size} GPUs")
    chosen = seeds_of(seeds, base.scenario.seed)
    expected = RUNS_EXPECTED * seeds
    with executor_for(jobs or default_jobs()) as executor:
        tell = None if progress is None else lambda count: progress(count, max(expected, count + seeds))
        lab = Lab(base, chosen, executor, tell)
        answers = _ask(lab)
        notes = (*notes, *_chance(lab), *_cut(lab), *_warnings(lab))
    advice = Advice(base.scenario.name, describe_slo(base), chosen, answers, tuple(lab.log), None, notes)
    if out is None:
        return advice
    from kvsim.advise.files import write_advice

    return write_advice(advice, base, Path(out), plots=plots, force=force)


def _ask(lab: Lab) -> tuple[Answer, ...]:
    """The scenario as it is must run at all; then the questions, in the order of the report."""
    (own,) = lab.try_out([{}], lab.seeds[:1])
    if own.error:
        raise ScenarioError(own.error)
    slo = describe_slo(lab.base)
    paging, block_size = is_paging_worth_it(lab), best_block_size(lab)
    rate = highest_rate(lab, slo)
    return (paging, block_size, rate.answer, smallest_cache(lab, slo, rate), sharing_saves(lab))


def _chance(lab: Lab) -> Iterator[str]:
    """Where seeds change nothing, an interval of nothing is no certainty."""
    (own,) = lab.try_out([{}])
    first, *others = (run.summary | {"seed": 0} for run in own.runs)
    if all(other == first for other in others):
        yield "nothing is drawn in this workload, every seed is the same: ± 0 says nothing about another day's requests"


def _cut(lab: Lab) -> Iterator[str]:
    """Requests that the clock stopped count as misses, whatever they would have become."""
    (own,) = lab.try_out([{}])
    cut = int(sum(run["num_unfinished"] - run["num_not_arrived"] for run in own.runs))
    if lab.base.scenario.horizon is not None and cut:
        yield (
            f"the scenario's horizon cuts {cut} requests off in {len(own.runs)} runs of the scenario itself, and "
            f"what is cut off misses the SLO: ask without a horizon (--set horizon=null)"
        )


def _warnings(lab: Lab) -> list[str]:
    """What came up only while runs ran: a cost profile left behind, outputs cut, requests that no variant can serve."""
    rows = [{"run": run.number, "seed": run.seed, "warnings": json.dumps(list(_told_by(run)))} for run in lab.log]
    return told(rows, ("run",), "runs")


def _told_by(run: Run) -> Iterator[str]:
    """Why a run has no figures; its warnings, without those that a value is of no use which was tried for an answer."""
    if run.error:
        yield f"no figures, so no request meets the SLO: {run.error}"
    for text in json.loads(run.summary.get("warnings") or "[]"):
        if not any(text.startswith(f"{key}: ") for key in run.values):
            yield text


def _on_blocks(base: ResolvedScenario) -> tuple[ResolvedScenario, tuple[str, ...]]:
    """The questions are about paged memory: a scenario on contiguous memory is asked as if it were paged."""
    if getattr(base.scenario.allocator, "type", None) != "contiguous":
        return base, ()
    note = f"the scenario's engine {base.scenario.engine} has contiguous memory; the answers are for engine paged"
    return base.with_engine("paged"), (note,)
