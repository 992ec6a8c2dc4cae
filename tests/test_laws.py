"""The numbered laws over whole runs of every engine; and for each law a rule which, broken, is caught by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from law_watch import watched_run
from random_runs import PAGED, draw_scenario

from kvsim.memory import prefix_cache
from kvsim.memory.interface import BlockCopy
from kvsim.memory.paged import PagedAllocator
from kvsim.metrics.ledger import Ledger
from kvsim.request import Status
from kvsim.runs import Options, run
from kvsim.scenario.schema import ENGINES
from kvsim.scheduling.calendar import Calendar
from kvsim.scheduling.emission import TokenEmission
from kvsim.scheduling.queues import FcfsQueue
from kvsim.sim.server import AsyncServer
from kvsim.types import KvsimError, LawViolation, OutOfBlocks

Scenario = dict[str, Any]
Break = Callable[[pytest.MonkeyPatch], None]

SEEDS = st.integers(0, 2**40)
# A smaller seed is no smaller scenario, so there is nothing to shrink.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
REPLAYED = Options(plots=False, check=True, replay=True)
EVERY_FILE = Options(plots=False, debug=True, timeline=True)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=50, phases=PHASES)
@given(seed=SEEDS)
def test_laws_of_a_run(engine: str, seed: int) -> None:
    """Laws 1-5, 7, 8 and 11-13: aborts, priorities, forks, swaps, chunks, shared prefixes, windows, limits."""
    watched_run(draw_scenario(engine, seed))


@pytest.mark.deep
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=2_000, phases=PHASES)
@given(seed=SEEDS)
def test_laws_of_a_run_deep(engine: str, seed: int) -> None:
    watched_run(draw_scenario(engine, seed))


NOT_OURS = {"vllm-v0": {"prefix_cache_hits", "num_evicted_blocks"}, "no-evict": {"num_preemptions"}}
FORKING = {"num_cow_copies"}


@pytest.mark.parametrize("engine", PAGED)
def test_the_scenarios_put_the_engine_under_pressure(engine: str) -> None:
    """Otherwise the laws would hold for nothing."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        summary = run(draw_scenario(engine, seed), options=Options(plots=False, record=("summary",))).summary
        seen.update(name for name, value in summary.items() if isinstance(value, int) and value)
    expected = {"num_preemptions", "prefix_cache_hits", "num_evicted_blocks", "num_aborted", "num_rejected"}
    expected |= set() if engine.startswith("vllm-v1") else FORKING
    for name in expected - NOT_OURS.get(engine, set()):
        assert seen[name] >= 4, (name, seen)
    assert seen["completed"] >= 40


def assert_both_loops_write_the_same(scenario: Scenario, folder: Path) -> None:
    """Every file of a run, byte for byte, but the line that says which loop ran."""
    loops = ("calendar", "plain")
    for loop in loops:
        run(scenario, out=folder / loop, options=EVERY_FILE, engine_loop=loop)
    names = [sorted(path.name for path in (folder / loop).iterdir()) for loop in loops]
    assert names[0] == names[1] >= ["events.csv", "requests.csv"]
    for name in names[0]:
        one, other = ((folder / loop / name).read_text() for loop in loops)
        if name == "scenario.yaml":
            one = one.replace("engine_loop: calendar", "engine_loop: plain")
        if one != other:
            lines = zip(one.splitlines(), other.splitlines(), strict=False)
            number, (first, second) = next((n, pair) for n, pair in enumerate(lines, 1) if pair[0] != pair[1])
            raise LawViolation(f"law 9: {name}, line {number}: {first!r} by calendar, {second!r} by the plain loop")


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=15, phases=PHASES)
@given(seed=SEEDS)
def test_law_9_calendar_is_plain_loop_in_every_file(
    engine: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_both_loops_write_the_same(draw_scenario(engine, seed), tmp_path_factory.mktemp("loops"))


@pytest.mark.deep
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=400, phases=PHASES)
@given(seed=SEEDS)
def test_law_9_calendar_is_plain_loop_in_every_file_deep(
    engine: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_both_loops_write_the_same(draw_scenario(engine, seed), tmp_path_factory.mktemp("loops"))


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=10, phases=PHASES)
@given(seed=SEEDS)
def test_law_10_plans_of_a_run_compute_dense_attention(engine: str, seed: int) -> None:
    run(draw_scenario(engine, seed), options=REPLAYED)


@pytest.mark.deep
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=300, phases=PHASES)
@given(seed=SEEDS)
def test_law_10_plans_of_a_run_compute_dense_attention_deep(engine: str, seed: int) -> None:
    run(draw_scenario(engine, seed), options=REPLAYED)


def lose_victims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FcfsQueue, "add_front", lambda self, group: None)


def revive_the_finished(patch: pytest.MonkeyPatch) -> None:
    end = TokenEmission._end

    def broken(self: Any, seq: Any, outcome: Any) -> None:
        end(self, seq, outcome)
        seq.status = Status.RUNNING

    patch.setattr(TokenEmission, "_end", broken)


def end_before_the_start(patch: pytest.MonkeyPatch) -> None:
    apply = AsyncServer._apply
    patch.setattr(AsyncServer, "_apply", lambda self, plan, start_ns, end_ns: apply(self, plan, start_ns, start_ns - 1))


def forget_to_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedAllocator, "free", lambda self, seq_id: self._tables.pop(seq_id, None))


def report_a_token_twice(patch: pytest.MonkeyPatch) -> None:
    emit = TokenEmission._emit

    def broken(self: Any, seq: Any, outcome: Any) -> None:
        emit(self, seq, outcome)
        outcome.num_emitted += 1

    patch.setattr(TokenEmission, "_emit", broken)


def store_before_refusing(patch: pytest.MonkeyPatch) -> None:
    append = PagedAllocator.append_slots

    def broken(self: Any, seq_id: Any, num_tokens: int = 1) -> Any:
        try:
            return append(self, seq_id, num_tokens)
        except OutOfBlocks:
            self._tables[seq_id].num_tokens += 1
            raise

    patch.setattr(PagedAllocator, "append_slots", broken)


def write_into_shared_tails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedAllocator, "_copy_tail", lambda self, table: BlockCopy(*[table.block_ids[-1]] * 2, 0))


def cross_in_reverse(patch: pytest.MonkeyPatch) -> None:
    crossing = Calendar.crossing
    patch.setattr(Calendar, "crossing", lambda self: crossing(self)[::-1])


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    copy = PagedAllocator._copy_tail
    patch.setattr(PagedAllocator, "_copy_tail", lambda self, table: copy(self, table)._replace(num_tokens=0))


def ignore_namespaces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "_namespace_ints", lambda namespace: (0, 0))


def overlook_growth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_regrow", lambda self, grown: None)


def take_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    allocate = PagedAllocator.allocate

    def broken(self: Any, seq_id: Any, *args: Any, **keywords: Any) -> None:
        allocate(self, seq_id, *args, **keywords)
        if self.num_free_blocks:
            self._tables[seq_id].block_ids += self.pool.take(1)

    patch.setattr(PagedAllocator, "allocate", broken)


BREAKS: dict[int, tuple[str, Break]] = {
    1: ("paged", lose_victims),
    2: ("vllm-v1", revive_the_finished),
    3: ("vllm-v1-async", end_before_the_start),
    4: ("paged", forget_to_release),
    5: ("paged", report_a_token_twice),
    7: ("paged", store_before_refusing),
    8: ("paged", write_into_shared_tails),
    9: ("paged", cross_in_reverse),
    10: ("paged", copy_nothing),
    11: ("vllm-v1", ignore_namespaces),
    12: ("paged", overlook_growth),
    13: ("paged", take_one_block_too_many),
}
"""Law 6 has its own in test_determinism.py."""

PROBES: dict[int, Callable[[Scenario, Path], Any]] = {
    8: lambda scenario, folder: watched_run(scenario, audits=False),  # The audit sees its counters drift first.
    9: assert_both_loops_write_the_same,
    10: lambda scenario, folder: run(scenario, options=REPLAYED),
}


@pytest.mark.parametrize("law", BREAKS)
def test_a_broken_rule_breaks_its_law(law: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first violation that anything reports is that of the law whose rule was broken."""
    engine, break_rule = BREAKS[law]
    probe = PROBES.get(law, lambda scenario, folder: watched_run(scenario))
    break_rule(monkeypatch)
    violations = (violation_of(probe, engine, seed, tmp_path / str(seed)) for seed in range(200))
    first = next(filter(None, violations), "nobody noticed")
    assert first.startswith(f"law {law}:"), first


def violation_of(probe: Callable[[Scenario, Path], Any], engine: str, seed: int, folder: Path) -> str:
    """What a scenario's probe complains of; empty if nothing, or if a guard that is no law ended the run."""
    scenario = draw_scenario(engine, seed)
    scenario["scheduler"].pop("scheduling_policy", None)
    try:
        probe(scenario, folder)
    except LawViolation as violation:
        return str(violation)
    except KvsimError:
        pass
    return ""
