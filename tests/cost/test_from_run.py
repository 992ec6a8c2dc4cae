"""Engine overhead from gaps between events, and from a benchmark's token times."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsim.cost.bench_json import bench_overhead, token_times
from kvsim.cost.from_run import Gap, gaps_between_events, overhead_of_gaps
from kvsim.scheduling.plan import StepShape
from kvsim.types import ScenarioError


def test_each_kind_of_step_gets_its_own_overhead() -> None:
    gaps = [Gap(10 * (10_000 + 300), 100_000, 10, 0) for _ in range(8)]
    gaps += [Gap(50_000 + 10_000 + 300 + 2_000, 60_000, 1, 1) for _ in range(8)]
    found = overhead_of_gaps(gaps, "made up")
    assert found is not None
    assert found.decode_step_us == pytest.approx(300)
    assert found.mixed_step_us == pytest.approx(2_000)


def test_gaps_that_hold_other_steps_are_left_out() -> None:
    gaps = [Gap(10_300, 10_000, 1, 0)] * 9 + [Gap(20_600, 10_000, 1, 0)] * 3
    found = overhead_of_gaps(gaps, "made up")
    assert found is not None
    assert found.num_decode_gaps == 9


@pytest.mark.parametrize("overhead_us", [500, 2_000, 6_000, 30_000])
def test_an_overhead_of_any_size_is_found_and_the_gaps_used_are_counted(overhead_us: int) -> None:
    gaps = [Gap(kernel + overhead_us, kernel, 1, 0) for kernel in range(7_000, 9_000, 50)]
    gaps += [Gap(kernel + 2 * overhead_us, kernel, 1, 1) for kernel in range(20_000, 22_000, 100)]
    gaps += [Gap(10e6 + 1e6 * i, 20_000, 0, 1) for i in range(30)]  # idle until a request came
    found = overhead_of_gaps(gaps, "made up")
    assert found is not None
    assert found.decode_step_us == pytest.approx(overhead_us)
    assert found.mixed_step_us == pytest.approx(overhead_us)
    assert found.settled
    assert "60 of 90 gaps used" in found.text()
    assert "60 of 90 gaps used" in found.short()
    assert (found.as_dict()["num_gaps_used"], found.as_dict()["num_gaps"]) == (60, 90)


def test_steps_with_prompts_that_cost_far_more_are_found() -> None:
    gaps = [Gap(9_000, 7_000, 1, 0)] * 20 + [Gap(18_000, 10_000, 1, 1)] * 20
    found = overhead_of_gaps(gaps, "made up")
    assert found is not None
    assert (found.decode_step_us, found.mixed_step_us) == (pytest.approx(2_000), pytest.approx(6_000))


@pytest.mark.parametrize(("num_near", "is_doubted"), [(8, True), (9, False)])
def test_gaps_without_prompts_that_nothing_explains_are_doubted(num_near: int, is_doubted: bool) -> None:
    """An engine is idle before a prompt at most: whatever else lasts too long held other steps."""
    gaps = [Gap(10_300, 10_000, 1, 0)] * num_near + [Gap(20_600, 10_000, 1, 0)] * 9
    gaps += [Gap(1e6 * i, 20_000, 0, 1) for i in range(30)]
    found = overhead_of_gaps(gaps, "made up", first_guess_us=(300, 300))
    assert found is not None
    assert [f"only {num_near} of {num_near + 9} gaps" in text for text in found.doubts()] == [True] * is_doubted


def test_chance_moves_a_median_by_its_standard_error() -> None:
    """Over a hundred runs of 400 gaps that scatter by 1 %, the figure scatters as much as it says."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(100):
        gaps = [Gap(10_000 + 300 + 100 * rng.standard_normal(), 10_000, 1, 0) for _ in range(400)]
        found.append(overhead_of_gaps(gaps, "made up"))
    spread = np.std([one.decode_step_us for one in found if one is not None])
    assert np.mean([one.standard_errors_us[0] for one in found if one is not None]) == pytest.approx(spread, rel=0.2)


def test_times_in_milliseconds_are_no_overhead(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="must be in seconds"):
        bench_overhead(bench(tmp_path / "b.json", 10.5), TenMilliseconds())


def test_a_guess_says_where_to_look_first() -> None:
    gaps = [Gap(10_300, 10_000, 1, 0)] * 9 + [Gap(18_000, 10_000, 1, 0)] * 8
    found = [overhead_of_gaps(gaps, "made up", first_guess_us=guess) for guess in ((0.0, 0.0), (7_000.0, 7_000.0))]
    assert [one and one.decode_step_us for one in found] == [pytest.approx(300), pytest.approx(8_000)]


def test_an_overhead_that_does_not_settle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.cost.from_run._MAX_TURNS", 1)
    with pytest.raises(ScenarioError, match=r"b\.json: .* did not converge, 39 of 39 gaps used"):
        bench_overhead(bench(tmp_path / "b.json", 0.0105), TenMilliseconds())


def test_too_few_gaps_say_nothing() -> None:
    assert overhead_of_gaps([Gap(10_300, 10_000, 1, 0)] * 4, "made up") is None


def test_gaps_count_the_steps_between_events() -> None:
    kernel_us, is_mixed = np.array([10.0, 20.0, 30.0, 40.0]), np.array([False, True, False, False])
    events, steps = {"a": 1.0, "b": 1.5, "c": 3.0}, {"a": 0, "b": 1, "c": 3}
    assert gaps_between_events(events, steps, kernel_us, is_mixed) == [
        Gap(pytest.approx(5e5), 20.0, 0, 1),
        Gap(pytest.approx(1.5e6), 70.0, 2, 0),
    ]


class TenMilliseconds:
    """A cost model that prices every step alike."""

    def step_ns(self, shape: StepShape) -> int:
        return 10_000_000


def bench(path: Path, step_s: float, num: int = 3, output: int = 40) -> Path:
    """Requests that start together and decode in lockstep."""
    data = {
        "model_id": "llama-3.1-8b",
        "input_lens": [100] * num,
        "start_times": [0.0] * num,
        "ttfts": [0.05] * num,
        "itls": [[step_s] * (output - 1)] * num,
    }
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("overhead_us", [500, 2_000, 6_000])
def test_benchmark_gaps_give_the_overhead(tmp_path: Path, overhead_us: int) -> None:
    found = bench_overhead(bench(tmp_path / "b.json", 0.01 + 1e-6 * overhead_us), TenMilliseconds())
    assert found.decode_step_us == pytest.approx(overhead_us, abs=1)


def test_token_times_are_start_plus_gaps(tmp_path: Path) -> None:
    data = json.loads(bench(tmp_path / "b.json", 0.01, num=1, output=3).read_text())
    times, firsts, held = token_times(data)
    assert times == pytest.approx([0.05, 0.06, 0.07])
    assert firsts.tolist() == [True, False, False]
    assert held.tolist() == [100, 101, 102]


def test_of_several_results_in_a_file_one_is_kept(tmp_path: Path) -> None:
    path = bench(tmp_path / "b.json", 0.01)
    path.write_text(path.read_text() + "\n" + path.read_text())
    with pytest.raises(ScenarioError, match=r"of several results .* keep one"):
        bench_overhead(path, TenMilliseconds())


def test_a_benchmark_without_details_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps({"mean_ttft_ms": 3}))
    with pytest.raises(ScenarioError, match="--save-detailed"):
        bench_overhead(tmp_path / "b.json", TenMilliseconds())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("itls", ["0.01"], "itls[1][0] is '0.01'; it must be a number"),
        ("itls", [0.01, float("nan")], "itls[1][1] is nan; it must be a number"),
        ("itls", [0.01, -0.01], "itls[1][1] is -0.01; it must be a number from 0 to 1e+12"),
        ("itls", 0.01, "itls[1] is 0.01; it must be the list"),
        ("itls", "0.01", "itls[1] is '0.01'; it must be the list"),
        ("start_times", "2026-01-01", "start_times[1] is '2026-01-01'; it must be a number"),
        ("ttfts", None, "ttfts[1] is None; it must be a number"),
        ("ttfts", [0.05], "ttfts[1] is [0.05]; it must be a number"),
        ("input_lens", None, "input_lens[1] is None; it must be a number"),
        ("input_lens", 12.5, "input_lens[1] is 12.5; it must be whole tokens"),
        ("input_lens", 10**18, "input_lens[1] is 1000000000000000000; it must be a number from 0 to 1e+12"),
    ],
)
def test_what_a_benchmark_holds_is_checked(tmp_path: Path, name: str, value: object, said: str) -> None:
    path = bench(tmp_path / "b.json", 0.01)
    data = json.loads(path.read_text())
    data[name][1] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ScenarioError, match=re.escape(f"b.json: {said}")):
        bench_overhead(path, TenMilliseconds())


@pytest.mark.parametrize(
    "pack",
    [lambda data: b"\xef\xbb\xbf" + data, gzip.compress, lambda data: data.decode().encode("utf-16")],
    ids=["byte-order mark", "gzip", "utf-16"],
)
def test_a_benchmark_is_read_however_it_is_packed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = bench(tmp_path / "b.json", 0.0105)
    path.write_bytes(pack(path.read_bytes()))
    assert bench_overhead(path, TenMilliseconds()).decode_step_us == pytest.approx(500, abs=1)


def test_failed_requests_of_a_benchmark_are_left_out(tmp_path: Path) -> None:
    path = bench(tmp_path / "b.json", 0.0105)
    data = json.loads(path.read_text())
    for name, value in (("start_times", None), ("ttfts", None), ("itls", None)):
        data[name][1] = value
    path.write_text(json.dumps(data))
    assert bench_overhead(path, TenMilliseconds()).decode_step_us == pytest.approx(500, abs=1)
