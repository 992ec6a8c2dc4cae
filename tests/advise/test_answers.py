"""Each answer flips when the workload is changed so that it should."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvsim.advise.advise import _warnings
from kvsim.advise.block_size import _verdict as block_size_verdict
from kvsim.advise.block_size import best_block_size
from kvsim.advise.cache import smallest_cache
from kvsim.advise.estimate import Estimate
from kvsim.advise.lab import Lab, Run, Runs, Values
from kvsim.advise.paging import METRICS, _gain, _is_worth, _verdict, is_paging_worth_it
from kvsim.advise.rate import LADDER, RateAnswer, highest_rate
from kvsim.advise.sharing import sharing_saves
from kvsim.advise.slo import describe_slo, parse_slo, with_slo
from kvsim.advise.workload import rate_knob
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.sweeps.work import Done, Task
from kvsim.types import ScenarioError

BUSY: dict[str, Any] = {
    "name": "busy",
    "seed": 1,
    "memory": {"num_gpu_blocks_override": 256},
    "scheduler": {"max_model_len": 1024},
    "workload": {
        "num_requests": 60,
        "arrivals": {"type": "poisson", "request_rate": 40.0},
        "lengths": {"type": "uniform", "prompt": [20, 200], "output": [20, 200]},
    },
    "slo": {"ttft": "1s", "tpot": "50ms"},
}
SEEDS = (1, 2, 3)
SHORT = {
    "scheduler__max_model_len": 64,
    "workload__num_requests": 25,
    "workload__arrivals__request_rate": 300,
    "workload__lengths": {"type": "uniform", "prompt": [3, 30], "output": [2, 20]},
}
ONE_STREAM = {"workload__max_concurrency": 1, "workload__arrivals": {"type": "batch"}, "workload__num_requests": 10}


def lab(**changes: Any) -> Lab:
    """BUSY with values changed by dotted key (double underscores for dots)."""
    base = scenario_from_dict(copy.deepcopy(BUSY))
    return Lab(base.with_values({name.replace("__", "."): value for name, value in changes.items()}), SEEDS)


def test_paging_is_worth_it_for_many_requests_of_unknown_length() -> None:
    answer = is_paging_worth_it(lab())
    assert answer.figures["is_worth_it"]
    assert answer.verdict.startswith("yes")
    assert answer.figures["gain"]["output_throughput"]["mean"] > 0.2
    assert len(answer.runs) == 4 * len(SEEDS)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"workload__arrivals__request_rate": 1}, id="few at once"),
        pytest.param(ONE_STREAM, id="one stream"),
        pytest.param({"memory__num_gpu_blocks_override": 20_000}, id="memory to spare"),
    ],
)
def test_paging_is_not_worth_it_where_memory_is_not_scarce(changes: dict[str, Any]) -> None:
    answer = is_paging_worth_it(lab(**changes))
    assert not answer.figures["is_worth_it"]
    assert answer.verdict.startswith("no")


def test_attainment_is_a_share_of_requests_and_no_rounded_quotient() -> None:
    """Rates have twelve digits: 19 of 20 requests are 95 %, and runs that all meet the goals are alike."""
    for duration in (0.238354595, 0.320164, 7.0, 1 / 3, 12345.6789):
        for met in (19, 20):
            goodput = float(f"{met / duration:.12g}")
            run = Run(1, "", {}, 1, {"num_requests": 20, "request_goodput": goodput, "duration": duration})
            assert run.attainment == met / 20
            assert run.meets_slo


def test_of_block_sizes_that_meet_the_slo_alike_the_fastest_is_the_best() -> None:
    """Where memory is tight small blocks are, by more than the kernel could make up for."""
    answer = best_block_size(
        lab(memory__num_gpu_blocks_override=60, allocator__block_size=4, **SHORT, slo={"ttft": "2s"})
    )
    latency = {int(size): value["mean"] for size, value in answer.figures["latency_against_best"].items()}
    assert min(latency.values()) == latency[answer.figures["recommended"]] == 0


def test_two_seeds_that_disagree_are_no_answer() -> None:
    unsure = lab(workload__arrivals__request_rate=8)
    unsure.seeds = (1, 2)
    answer = is_paging_worth_it(unsure)
    assert answer.verdict.startswith("cannot tell with 2 seeds; --seeds ")
    assert answer.figures["is_worth_it"] is None
    assert any("not surely above the price" in line for line in answer.lines)


@pytest.mark.parametrize(
    ("throughput", "latency", "expected"),
    [
        (([2.0, 2.1], [1.0, 1.0]), ([1.0, 1.0], [1.0, 1.0]), True),
        (([1.0, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.01, 1.01]), False),
        (([1.0, 3.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, 1.0]), None),
        (([1.0, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, 1.2]), None),
        (([0.9, 0.9], [1.0, 1.0]), ([1.0, 1.0], [0.9, 0.9]), False),
        (([2.0, 2.1], [1.0, 1.0]), ([1.0, 1.0], [0.99, 0.99]), True),
    ],
)
def test_paging_is_yes_no_or_unknown(
    throughput: tuple[list[float], list[float]], latency: tuple[list[float], list[float]], expected: bool | None
) -> None:
    def runs(index: int) -> Runs:
        figures = zip(throughput[index], latency[index], strict=True)
        return Runs(
            tuple(Run(0, "", {}, 0, {"output_throughput": more, "mean_e2el_ms": less}) for more, less in figures)
        )

    paged, rival = runs(0), runs(1)
    gains = {name: _gain(paged, rival, name, sign) for name, sign in METRICS}
    assert _is_worth(paged, rival, gains, 0.02) is expected
    start = {True: "yes: ", False: "no: ", None: "cannot tell with 2 seeds; "}[expected]
    assert _verdict(expected, "orca-max", gains, 0.02).startswith(start)


def test_a_gain_in_one_thing_that_costs_another_is_said_to() -> None:
    throughput, latency = Estimate(0.04, 0.01, 2), Estimate(-0.2, 0.01, 2)
    gains: dict[str, Estimate | None] = {"output_throughput": throughput, "mean_e2el_ms": latency}
    assert _verdict(True, "orca-pow2", gains, 0.02) == (
        "yes, at the cost of latency: +4.0 ± 1.0 % output throughput over contiguous pow2, "
        "under which requests take 20.0 ± 1.0 % less time"
    )
    gains = {"output_throughput": latency, "mean_e2el_ms": throughput}
    assert _verdict(True, "orca-pow2", gains, 0.02) == (
        "yes, at the cost of throughput: -20.0 ± 1.0 % output throughput over contiguous pow2, "
        "under which requests take +4.0 ± 1.0 % longer"
    )


def test_block_sizes_that_may_be_slower_are_not_called_as_good() -> None:
    slower = Estimate(0.065, 0.084, 6)
    assert block_size_verdict(32, [8, 32], [8, 32], {}) == "any of 8, 32 is as fast; 32 suits the kernel best"
    doubtful = block_size_verdict(32, [8, 32, 128], [8, 16, 32, 128], {128: slower})
    assert doubtful == (
        "32; no worse here: 8; slower: 16; slower or not: 128 (+6.5 ± 8.4 %): cannot tell with 6 seeds; --seeds 9 might"
    )
    own = block_size_verdict(128, [8, 128], [8, 128], {128: slower})
    assert own.startswith(
        "128, which suits the kernel best, if it is no slower; no worse here: 8; slower or not: 128 ("
    )


def test_demand_is_concurrency_times_length() -> None:
    stream = {"type": "fixed", "prompt": 100, "output": 101}
    answer = is_paging_worth_it(lab(**ONE_STREAM, workload__lengths=stream))
    assert answer.figures["concurrency"]["mean"] == pytest.approx(1.0)
    # One step computes the prompt; the hundred that follow store 100 to 199 tokens each before their own.
    assert answer.figures["mean_tokens"]["mean"] == pytest.approx(150, abs=2)


def test_any_block_size_does_where_memory_is_not_scarce() -> None:
    answer = best_block_size(lab(workload__arrivals__request_rate=2))
    assert answer.figures["as_good"] == [8, 16, 32, 64, 128]
    assert not answer.warnings


def test_large_blocks_lose_where_memory_is_scarce_and_texts_are_short() -> None:
    answer = best_block_size(
        lab(
            workload__lengths={"type": "uniform", "prompt": [5, 40], "output": [5, 40]},
            memory__num_gpu_blocks_override=64,
            workload__arrivals__request_rate=300,
        )
    )
    assert 128 not in answer.figures["as_good"]
    assert 8 in answer.figures["as_good"]
    assert any("refuted" in line or "half right" in line for line in answer.lines)
    # All sizes meet the SLO, so the fastest is the best: nothing is faster.
    slower = [entry["mean"] for entry in answer.figures["latency_against_best"].values()]
    assert slower == sorted(slower)
    assert slower[0] == 0.0


@pytest.mark.parametrize(("tokens", "blind"), [(20, "32, 64, 128"), (100, "128"), (7, "8, 16, 32, 64, 128")])
def test_a_shared_prefix_shorter_than_a_block_is_warned_of(tokens: int, blind: str) -> None:
    answer = best_block_size(
        lab(
            workload__content={"system_prompt": {"num_groups": 1, "tokens": tokens}}, workload__arrivals__request_rate=2
        )
    )
    (warning,) = answer.warnings
    assert f"a block of {blind}:" in warning
    assert ("scenario's block size" in warning) == (tokens < 16)


def test_a_shared_prefix_longer_than_any_block_is_not_warned_of() -> None:
    content = {"system_prompt": {"num_groups": 1, "tokens": 256}}
    assert not best_block_size(lab(workload__content=content, workload__arrivals__request_rate=2)).warnings


def test_the_kernel_side_is_said_to_be_priced_only_where_it_is() -> None:
    assert not best_block_size(lab()).figures["kernel_is_priced"]
    priced = best_block_size(lab(cost={"type": "kernels", "profile": "a100"}, gpu="a100-80gb"))
    assert priced.figures["kernel_is_priced"]


@pytest.mark.deep
def test_less_cache_or_a_stricter_slo_allows_a_lower_rate() -> None:
    rates = [
        highest_rate(one, describe_slo(one.base)).recommended
        for one in (lab(), lab(memory__num_gpu_blocks_override=128), lab(slo__ttft="50ms"))
    ]
    assert all(rates)
    assert rates[1] < rates[0]
    assert rates[2] < rates[0]


def test_a_rate_without_figures_is_not_one_at_which_nothing_is_served() -> None:
    class Impatient(Lab):
        """Knows no runs at low rates, as the clock holds none of a long trace that is stretched."""

        def _task(self, values: Values, seed: int) -> Task | Done:
            rate = values.get("workload.arrivals.request_rate", 40.0)
            return Done({}, "the clock holds no more") if rate < 18 else super()._task(values, seed)

    base = lab(workload__num_requests=120).base
    answer = highest_rate(laboratory := Impatient(base, SEEDS), "").answer
    recommended = answer.figures["recommended"]
    assert 18 < recommended < 36
    assert answer.table is not None
    assert [float(row[0]) for row in answer.table.rows] == pytest.approx(
        [recommended * factor for factor in LADDER if recommended * factor >= 18], rel=0.001
    )
    (note,) = [text for text in _warnings(laboratory) if "clock" in text]
    assert note.endswith("no figures, so no request meets the SLO: the clock holds no more")


def test_clients_that_wait_can_send_at_any_rate() -> None:
    found = highest_rate(lab(workload__max_concurrency=2), "the SLO")
    assert found.recommended is None
    assert found.answer.verdict.startswith("any")


@pytest.mark.deep
def test_a_slo_below_one_step_is_met_at_no_rate() -> None:
    assert highest_rate(lab(slo__ttft="1us"), "the SLO").answer.verdict.startswith("none")


def test_requests_written_out_have_no_rate() -> None:
    base = scenario_from_dict({"workload": {"requests": [{"prompt_tokens": 5, "output_tokens": 5}]}})
    assert rate_knob(base) is None
    assert "cannot be asked" in highest_rate(Lab(base, SEEDS), "").answer.verdict


@pytest.mark.parametrize(
    ("workload", "changed"),
    [
        ({"arrivals": {"type": "gamma", "request_rate": 2, "burstiness": 0.5}}, "workload.arrivals.request_rate"),
        ({"arrivals": {"type": "poisson", "request_rate": float("inf")}}, "workload.arrivals"),
        ({"arrivals": {"type": "batch"}}, "workload.arrivals"),
        ({"trace": "scenarios/traces/plain-sample.csv"}, "workload.rate"),
        (
            {"trace": "scenarios/traces/plain-sample.csv", "arrivals": {"type": "constant", "request_rate": 3}},
            "workload.rate",
        ),
        (
            {"trace": "untimed.csv", "arrivals": {"type": "constant", "request_rate": 3}},
            "workload.arrivals.request_rate",
        ),
    ],
)
def test_the_rate_is_turned_where_the_workload_has_it(
    workload: dict[str, Any], changed: str, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of a trace replace `arrivals`, whose rate then turns nothing."""
    (tmp_path / "untimed.csv").write_text("prompt_tokens,output_tokens\n10,5\n")
    (tmp_path / "scenarios").symlink_to(repo_root / "scenarios")
    monkeypatch.chdir(tmp_path)
    base = scenario_from_dict({"workload": workload})
    knob = rate_knob(base)
    assert knob is not None
    assert changed in knob.values_of(5.0)
    base.with_values(knob.values_of(5.0))


@pytest.mark.deep
def test_less_load_needs_less_cache() -> None:
    blocks = [
        smallest_cache(lab(workload__arrivals__request_rate=rate), "the SLO", RateAnswer(None)).figures[  # type: ignore[arg-type]
            "recommended_blocks"
        ]
        for rate in (20.0, 2.0)
    ]
    assert blocks[1] < blocks[0]


@pytest.mark.deep
def test_a_load_beyond_any_cache_is_lowered_first() -> None:
    over = lab(workload__arrivals__request_rate=2000.0, slo__ttft="100ms")
    rate = highest_rate(over, "the SLO")
    answer = smallest_cache(over, "the SLO", rate)
    assert answer.figures["load"] == {"workload.arrivals.request_rate": rate.recommended}
    assert "no cache is large enough" in answer.lines[0]
    assert "no cache is large enough" in smallest_cache(over, "the SLO", RateAnswer(rate.answer)).verdict


def test_one_sequence_without_common_beginnings_shares_nothing() -> None:
    answer = sharing_saves(lab())
    assert answer.figures["cow_saving"]["mean"] == 0
    assert answer.figures["prefix_hit_share_endless"]["mean"] == 0


@pytest.mark.parametrize("sampling", [{"n": 4}, pytest.param({"beam_width": 4}, marks=pytest.mark.deep)])
def test_samples_and_beams_share_blocks(sampling: dict[str, int]) -> None:
    answer = sharing_saves(lab(workload__sampling=sampling, workload__arrivals__request_rate=5))
    assert answer.figures["cow_saving"]["mean"] > 0.2
    assert answer.figures["cow_copies"]["mean"] > 0


@pytest.mark.deep
def test_a_small_cache_finds_less_than_an_endless_one() -> None:
    content = {"system_prompt": {"num_groups": 20, "zipf": 0, "tokens": 128}}
    tight = sharing_saves(lab(workload__content=content, workload__arrivals__request_rate=5))
    assert tight.figures["prefix_hit_share"]["mean"] < tight.figures["prefix_hit_share_endless"]["mean"]
    assert any("a larger cache would help" in line for line in tight.lines)
    roomy = sharing_saves(
        lab(workload__content=content, workload__arrivals__request_rate=5, memory__num_gpu_blocks_override=10_000)
    )
    assert any("would find no more" in line for line in roomy.lines)


def test_goals_are_read() -> None:
    assert parse_slo("ttft=2s, tpot=100ms") == {"ttft": "2s", "tpot": "100ms"}
    base, is_assumed = with_slo(scenario_from_dict({"slo": {"e2el": "9s"}}), {"ttft": "500ms"})
    assert describe_slo(base) == "TTFT 500 ms"
    assert not is_assumed
    base, is_assumed = with_slo(scenario_from_dict({}), None)
    assert is_assumed
    assert describe_slo(base) == "TTFT 2,000 ms, TPOT 100 ms"


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "speed=3", "ttft=1s,ttft=2s", "ttft=1s,"])
def test_goals_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match="--slo"):
        parse_slo(text)
