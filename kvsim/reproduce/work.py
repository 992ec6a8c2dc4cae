"""Running a figure's scenarios in several processes, through the ordinary API."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, as_completed
from typing import Any

from kvsim.reproduce.beam_laws import Trial, try_law
from kvsim.reproduce.figure import Case, Summary
from kvsim.reproduce.recipe import Scenario
from kvsim.reproduce.sustained import Search, search
from kvsim.types import Progress

Key = tuple[str, str]
"""(figure, name of the case)"""
CPU_SECONDS = "cpu_s"
"""Beside the figures of a summary: what the case took. It enters no table."""


WARM_UP_S = 60.0


def run_cases(
    cases: Mapping[Key, Case], *, jobs: int | None = None, progress: Progress | None = None
) -> dict[Key, Summary]:
    """All of them, what looks longest first; in this process with `jobs=1`."""
    from kvsim.sweeps.executors import default_jobs, executor_for

    results: dict[Key, Summary] = {}
    groups = _without_repeats(cases)
    with executor_for(min(default_jobs() if jobs is None else jobs, max(1, len(groups)))) as executor:
        for num_done, (keys, summary) in enumerate(_results(groups, executor), start=1):
            results |= dict.fromkeys(keys, summary)
            if progress is not None:
                progress(num_done, len(groups))
    return {key: results[key] for key in cases}


def run_case(case: Case) -> dict[str, Any]:
    """One case: the flattened summary of a scenario, what a search for a rate found, or what a beam law says."""
    started = _cpu_s()
    found: dict[str, Any]
    if isinstance(case, Trial):
        found = dict(try_law(case))
    elif isinstance(case, Search):
        found = search(case, _latency_at, _throughput_of)
    else:
        from kvsim.metrics.export import flatten

        result = _run(case)
        found = flatten(result.summary)
        if result.step_columns:
            found["steady_running_mean"] = _steady_running_mean(result)
    return found | {CPU_SECONDS: _cpu_s() - started}


def _run(scenario: Scenario) -> Any:
    from kvsim.runs import run

    return run(scenario)


def _steady_running_mean(result: Any) -> float:
    """Time-weighted mean of running requests, the first minute left out: the server fills then."""
    steps = result.steps
    steps = steps[steps["start_s"] >= WARM_UP_S]
    return float((steps["num_running"] * steps["duration_ms"]).sum() / steps["duration_ms"].sum())


def _throughput_of(scenario: Scenario) -> float:
    return float(_run(scenario).summary["request_throughput"])


def _latency_at(scenario: Scenario) -> float:
    """Mean over requests of end-to-end latency / output length, s (PagedAttention paper, section 6.1).

    The length is one sample's or beam's.
    """
    requests = _run(scenario | {"record": ["summary", "requests"]}).requests
    served = requests[requests["status"] == "finished"]
    lengths = lengths_of_one(served["output_tokens"], scenario)
    return float((served["e2el_ms"] / lengths).mean() / 1000)


def lengths_of_one(output_tokens: Any, scenario: Scenario) -> Any:
    """From all tokens that requests emitted to the length of one sample or beam of theirs.

    Samples emit their first token each; beams fork after it, and it was emitted once.
    """
    num = num_outputs(scenario)
    if scenario["workload"].get("sampling", {}).get("beam_width", 0) > 1:
        return 1 + (output_tokens - 1) / num
    return output_tokens / num


def num_outputs(scenario: Scenario) -> int:
    """Samples or beams of a request."""
    sampling = scenario["workload"].get("sampling", {})
    return max(1, int(sampling.get("n", 1)), int(sampling.get("beam_width", 0)))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _without_repeats(cases: Mapping[Key, Case]) -> list[tuple[list[Key], Case]]:
    """Figures share runs; each is made once."""
    groups: dict[str, tuple[list[Key], Case]] = {}
    for key, case in cases.items():
        groups.setdefault(repr(case), ([], case))[0].append(key)
    return sorted(groups.values(), key=lambda group: -_size(group[1]))


def _size(case: Case) -> float:
    if isinstance(case, Trial):
        return float(sum(dict(case.num_requests).values()))
    scenario = case.scenario if isinstance(case, Search) else case
    num_sequences = scenario["workload"]["num_requests"] * num_outputs(scenario)
    return float("inf") if isinstance(case, Search) else float(num_sequences)


def _results(
    groups: list[tuple[list[Key], Case]], executor: Executor | None
) -> Iterator[tuple[list[Key], dict[str, Any]]]:
    if executor is None:
        for keys, case in groups:
            yield keys, run_case(case)
        return
    futures = {executor.submit(run_case, case): keys for keys, case in groups}
    for future in as_completed(futures):
        yield futures[future], future.result()
