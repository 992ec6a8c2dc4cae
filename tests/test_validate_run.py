"""A recorded run: the prediction reads queue times only, and comes out near."""

from __future__ import annotations

import gzip
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim.cli import main
from kvsim.cost.interface import CostModel
from kvsim.cost.profile import load_profile, profile_names
from kvsim.scheduling.plan import StepShape
from kvsim.types import ScenarioError
from kvsim.validate_run import METRICS, Setting, compare, fit_overhead, load_run, other_pool, predict, setting_of
from kvsim.validate_run.prediction import kernel_cost

RUNS = Path("data", "traces", "vllm-0.19-runs")


def write_run(folder: Path, *, slower: float = 1.0, meta: dict[str, object] | None = None, num: int = 12) -> Path:
    """A small made-up run of Llama-3.1-8B, and its workload beside it."""
    folder.mkdir(exist_ok=True)
    kwargs = {"model": "meta-llama/Llama-3.1-8B", "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    (folder / "meta.json").write_text(
        json.dumps(
            {"vllm_version": "0.19.0", "engine_kwargs": kwargs, "kv_cache": {"num_gpu_blocks": 2000, "block_size": 16}}
            | (meta or {})
        )
    )
    rows = [
        {
            "request_id": f"bench-{i}",
            "input_toks": 200 + i,
            "output_toks": 20,
            "queued_ts": 5.0 + 0.1 * i,
            "first_token_ts": 5.0 + 0.1 * i + 0.05 * slower,
            "last_token_ts": 5.0 + 0.1 * i + 0.4 * slower,
        }
        for i in range(num)
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    work = [
        {
            "timestamp": 100.0 * i,
            "input_length": 200 + i,
            "output_length": 20,
            "hash_ids": [1000 * i + j for j in range((200 + i + 15) // 16)],
        }
        for i in range(num)
    ]
    workload = folder / "workload.jsonl"
    workload.write_text("\n".join(map(json.dumps, work)))
    return workload


def test_the_prediction_does_not_see_measured_times(tmp_path: Path) -> None:
    workload = write_run(tmp_path / "rtx-4090-one")
    write_run(tmp_path / "rtx-4090-two", slower=3.0)
    results = []
    for name in ("rtx-4090-one", "rtx-4090-two"):
        run = load_run(tmp_path / name)
        prediction = predict(run, workload, setting_of(run))
        results.append((prediction.metrics(), compare(run, prediction)))
    (first, before), (second, after) = results
    assert first == second
    assert after.metrics["mean_ttft_ms"]["measured"] == pytest.approx(3 * before.metrics["mean_ttft_ms"]["measured"])


def test_the_engine_follows_version_and_arguments(tmp_path: Path) -> None:
    cases = {
        "0.19.0": ({}, "vllm-v1-async"),
        "0.13.2": ({}, "vllm-v1"),
        "0.14": ({"async_scheduling": False}, "vllm-v1"),
        "0.9": ({"async_scheduling": True}, "vllm-v1-async"),
    }
    for version, (kwargs, engine) in cases.items():
        meta = {"vllm_version": version, "engine_kwargs": {"model": "llama-3.1-8b", **kwargs}}
        write_run(tmp_path / "h100", meta=meta)
        setting = setting_of(load_run(tmp_path / "h100"))
        assert setting.engine == engine
        assert any(note.startswith(f"engine {engine}") for note in setting.notes)


def test_defaults_where_the_run_says_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run", meta={"kv_cache": None, "hardware": {"device_name": "NVIDIA H100 80GB HBM3"}})
    setting = setting_of(load_run(tmp_path / "run"))
    assert (setting.block_size, setting.enable_prefix_caching, setting.gpu) == (16, True, "h100-80gb")
    assert setting.num_gpu_blocks > 20_000


@pytest.mark.parametrize(
    ("folder", "gpu", "profile"),
    [
        ("A100_Llama-3.1-8B", "a100-80gb", "a100"),
        ("A100-SXM4-40GB_run", "a100-40gb", "a100"),
        ("H100_Qwen3-30B-A3B", "h100-80gb", "h100"),
        ("H200_Llama-3.1-8B", "h200", "h200"),
        ("RTX4090_Llama-3.1-8B", "rtx-4090", "rtx4090"),
        ("RTXPRO6000_Llama-4-8B", "rtx-pro-6000", "rtxpro6000"),
    ],
)
def test_the_folder_names_the_gpu_and_its_profile(tmp_path: Path, folder: str, gpu: str, profile: str) -> None:
    write_run(tmp_path / folder)
    setting = setting_of(load_run(tmp_path / folder))
    assert setting.gpu == gpu
    assert load_profile(str(setting.profile)).name == profile


def test_every_shipped_profile_predicts_a_run(tmp_path: Path) -> None:
    makespans = {}
    for name in profile_names():
        workload = write_run(tmp_path / name)
        run = load_run(tmp_path / name)
        setting = setting_of(run)
        assert setting.num_gpu_blocks == 2000
        makespans[name] = predict(run, workload, setting).metrics()["mean_tpot_ms"]
    # Decoding a few sequences reads the weights: the order is that of the memory bandwidths.
    assert sorted(makespans, key=lambda name: makespans[name]) == ["h200", "h100", "rtxpro6000", "a100", "rtx4090"]


def test_the_size_of_the_cache_comes_from_the_log_in_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "h100", meta={"kv_cache": None})
    (tmp_path / "h100" / "server.log").write_text("INFO [kv_cache_utils] GPU KV cache size: 31,240 tokens\n")
    setting = setting_of(load_run(tmp_path / "h100"))
    assert setting.num_gpu_blocks == 31_240 // 16
    assert "1952 KV blocks: 31,240 tokens in server.log" in setting.notes


def test_a_cache_too_small_for_the_limit_is_pointed_out(tmp_path: Path) -> None:
    write_run(tmp_path / "rtx4090", meta={"kv_cache": None})
    notes = setting_of(load_run(tmp_path / "rtx4090")).notes
    assert any("less than one sequence of 131,072 tokens" in note for note in notes)


def test_tensor_parallel_runs(tmp_path: Path) -> None:
    kwargs = {"model": "llama-3.1-8b", "tensor_parallel_size": 2, "max_model_len": -1}
    workload = write_run(tmp_path / "h100", meta={"engine_kwargs": kwargs})
    setting = setting_of(load_run(tmp_path / "h100"))
    assert (setting.tensor_parallel_size, setting.max_model_len) == (2, 131072)
    assert predict(load_run(tmp_path / "h100"), workload, setting).metrics()["mean_tpot_ms"] > 0
    run = load_run(tmp_path / "h100")
    with pytest.raises(ScenarioError, match="has no all_reduce measurements"):
        predict(run, workload, setting_of(run, gpu="rtx-4090"))
    write_run(tmp_path / "two", meta={"engine_kwargs": {"model": "llama-3.1-8b", "data_parallel_size": 2}})
    with pytest.raises(ScenarioError, match="data_parallel_size is 2"):
        setting_of(load_run(tmp_path / "two"), gpu="h100")


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no such folder"):
        load_run(tmp_path / "none")
    workload = write_run(tmp_path / "run")
    with pytest.raises(ScenarioError, match="--gpu"):
        setting_of(load_run(tmp_path / "run"))
    run = load_run(tmp_path / "run")
    setting = setting_of(run, gpu="h100")
    lines = workload.read_text().splitlines()
    workload.write_text("\n".join(lines[:3]))
    with pytest.raises(ScenarioError, match="3 requests, the run has 12"):
        predict(run, workload, setting)
    workload.write_text("\n".join(reversed(lines)))
    with pytest.raises(ScenarioError, match="prompt tokens"):
        predict(run, workload, setting)
    (tmp_path / "run" / "requests.jsonl").write_text('{"input_toks": 3}')
    with pytest.raises(ScenarioError, match=r"line 1: output_toks"):
        load_run(tmp_path / "run")


def change_rows(folder: Path, change: dict[int, dict[str, object]]) -> None:
    path = folder / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(row | change.get(i, {})) for i, row in enumerate(rows)))


def test_output_lengths_are_those_of_the_run(tmp_path: Path) -> None:
    workload = write_run(tmp_path / "h100")
    run = load_run(tmp_path / "h100")
    assert predict(run, workload, setting_of(run)).notes == ()
    change_rows(tmp_path / "h100", {2: {"output_toks": 7}, 5: {"output_toks": 33}})
    run = load_run(tmp_path / "h100")
    prediction = predict(run, workload, setting_of(run))
    assert prediction.output_len.tolist() == [20, 20, 7, 20, 20, 33, *[20] * 6]
    notes = compare(run, prediction).notes
    assert [note for note in notes if "2 of 12 requests put out more or less than the workload says" in note]


def test_outputs_beyond_the_model_length_are_refused(tmp_path: Path) -> None:
    workload = write_run(tmp_path / "h100", meta={"engine_kwargs": {"model": "llama-3.1-8b", "max_model_len": 300}})
    change_rows(tmp_path / "h100", {4: {"output_toks": 96}})
    run = load_run(tmp_path / "h100")
    assert predict(run, workload, setting_of(run)).output_len[4] == 96
    change_rows(tmp_path / "h100", {4: {"output_toks": 97}})
    run = load_run(tmp_path / "h100")
    with pytest.raises(
        ScenarioError, match="request bench-4 has input_toks 204 and output_toks 97, max_model_len is 300"
    ):
        predict(run, workload, setting_of(run))


def test_one_token_each_has_no_time_per_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write_run(tmp_path / "h100")
    change_rows(tmp_path / "h100", {i: {"output_toks": 1, "last_token_ts": 5.05 + 0.1 * i} for i in range(12)})
    command = ["validate-run", str(tmp_path / "h100"), "--workload", str(workload), "--no-plots"]
    assert main([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown["mean_tpot_ms"] == {"predicted": None, "measured": None, "error_pct": None}
    assert main(command) == 0
    assert "nan" not in capsys.readouterr().out


def test_a_picture_is_announced_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a time series nothing is drawn."""
    workload, picture = write_run(tmp_path / "h100"), tmp_path / "series.png"
    command = ["validate-run", str(tmp_path / "h100"), "--workload", str(workload), "--plot", str(picture)]
    for series in ("", "t,running\n0.1,1\n0.4,2\n"):
        (tmp_path / "h100" / "timeseries.csv").write_text(series)
        assert main(command) == 0
        assert ("wrote" in capsys.readouterr().out) == picture.exists() == bool(series)


def test_the_command_says_which_overhead_it_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write_simulated_run(tmp_path / "h100", (2_000, 2_000))
    command = ["validate-run", str(tmp_path / "h100"), "--workload", str(workload), "--no-plots", "--fit"]
    assert main(command) == 0
    assert re.search(r"fitted to this very run: .*; \d+ of \d+ gaps used", capsys.readouterr().out)
    assert main([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["overhead"]["decode_step_us"] == pytest.approx(2_000, rel=0.1)
    assert shown["overhead"]["num_gaps_used"] <= shown["overhead"]["num_gaps"]
    assert abs(shown["fitted"]["makespan_s"]["error_pct"]) < 1.0


def write_simulated_run(
    folder: Path,
    overhead_us: tuple[float, float],
    num: int = 60,
    max_num_seqs: int | None = None,
    num_gpu_blocks: int | None = None,
) -> Path:
    """A run that the simulator made with a known overhead (decode-only steps, steps with prompts).

    With `max_num_seqs` and `num_gpu_blocks` in truth, where the folder's meta.json says 8 and 2,000. The
    series has four lines a second.
    """
    workload = write_run(folder, num=num)
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    work = [json.loads(line) for line in workload.read_text().splitlines()]
    for i, (row, request) in enumerate(zip(rows, work, strict=True)):
        length = 30 + 37 * i % 101
        row |= {"output_toks": length, "queued_ts": 5.0 + 0.02 * i, "first_token_ts": 100.0, "last_token_ts": 200.0}
        request["output_length"] = length
    workload.write_text("\n".join(map(json.dumps, work)))
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = load_run(folder)
    setting = setting_of(run)
    setting = setting if max_num_seqs is None else replace(setting, max_num_seqs=max_num_seqs)
    setting = setting if num_gpu_blocks is None else replace(setting, num_gpu_blocks=num_gpu_blocks)
    true = predict(run, workload, setting, decode_overhead_us=overhead_us[0], mixed_overhead_us=overhead_us[1])
    for i, row in enumerate(rows):
        row |= {
            "first_token_ts": 5.0 + float(true.first_token_s[i]),
            "last_token_ts": 5.0 + float(true.last_token_s[i]),
        }
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    times = np.arange(0.25, float(true.last_token_s.max()), 0.25)
    names = ("running", "waiting", "kv_cache_pct")
    table = np.column_stack([times, *(true.series(times)[name] for name in names)])
    lines = [f"{t:g},{running:g},{waiting:g},{usage:.1f}" for t, running, waiting, usage in table]
    (folder / "timeseries.csv").write_text("\n".join([",".join(("t", *names)), *lines]))
    return workload


@pytest.mark.parametrize(("num_blocks", "is_told"), [(2_000, False), (2_400, False), (1_000, True), (4_000, True)])
def test_a_pool_of_other_blocks_than_the_simulated_one_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_blocks: int, is_told: bool
) -> None:
    folder = tmp_path / "h100"
    workload = write_simulated_run(folder, (2_000, 2_000), num_gpu_blocks=num_blocks)
    command = ["validate-run", str(folder), "--workload", str(workload), "--no-plots"]
    for more in ([], ["--fit"]):
        assert main([*command, *more]) == 0
        shown = capsys.readouterr().err
        told = re.findall(r"kv_cache_pct is that of about ([\d,]+) KV blocks, and 2,000 are simulated", shown)
        assert [int(number.replace(",", "")) for number in told] == [pytest.approx(num_blocks, rel=0.1)] * is_told
    doubts = fit_overhead(folder, workload).doubts()
    assert ["kv_cache.num_gpu_blocks in meta.json" in text for text in doubts] == [True] * is_told
    run = load_run(folder)
    windowed = replace(setting_of(run), model="gemma-3-4b")
    assert not other_pool(run, replace(predict(run, workload, setting_of(run)), setting=windowed))


@pytest.mark.parametrize("overhead_us", [(500, 500), (2_000, 2_000), (6_000, 6_000), (500, 2_000), (2_000, 6_000)])
def test_a_known_overhead_is_found_again(tmp_path: Path, overhead_us: tuple[float, float]) -> None:
    workload = write_simulated_run(tmp_path / "h100", overhead_us)
    found = fit_overhead(tmp_path / "h100", workload)
    assert found.decode_step_us == pytest.approx(overhead_us[0], rel=0.1)
    assert found.mixed_step_us == pytest.approx(overhead_us[1], rel=0.1)
    assert 0 < found.num_used <= found.num_gaps


class UnevenSteps:
    """A cost model whose steps take now a little more, now a little less."""

    def __init__(self, cost: CostModel, spread: float) -> None:
        self.cost, self.spread, self.rng = cost, spread, np.random.default_rng(1)

    def step_ns(self, shape: StepShape) -> int:
        return max(1, round(self.cost.step_ns(shape) * math.exp(self.spread * self.rng.standard_normal())))


@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_steps_that_scatter_do_not_keep_a_fit_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "kvsim.validate_run.prediction.kernel_cost", lambda *args: UnevenSteps(kernel_cost(*args), spread)
        )
        workload = write_simulated_run(tmp_path / "h100", (2_000, 2_000), num=120)
    found = fit_overhead(tmp_path / "h100", workload)
    for figure_us, error_us in zip((found.decode_step_us, found.mixed_step_us), found.standard_errors_us, strict=True):
        assert figure_us == pytest.approx(2_000, abs=max(3 * error_us, 50))
    assert not found.doubts()


def test_arguments_that_are_not_those_of_the_run_may_be_why_nothing_fits(tmp_path: Path) -> None:
    """Truly 12 sequences ran at once where meta.json says 8."""
    workload = write_simulated_run(tmp_path / "h100", (500, 500), max_num_seqs=12)
    with pytest.raises(ScenarioError, match=r"h100: too few gaps .* check that model, profile and engine arguments"):
        fit_overhead(tmp_path / "h100", workload)


def test_a_fit_that_does_not_converge_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = write_simulated_run(tmp_path / "h100", (500, 6_000))
    monkeypatch.setattr("kvsim.validate_run.overhead._MAX_ROUNDS", 1)
    with pytest.raises(ScenarioError, match=r"h100: .* did not converge, \d+ of \d+ gaps used"):
        fit_overhead(tmp_path / "h100", workload)


@pytest.mark.parametrize(
    ("where", "key", "value", "said"),
    [
        ("engine_kwargs", "max_num_seqs", "many", "must be a number"),
        ("engine_kwargs", "max_num_seqs", True, "must be a number"),
        ("engine_kwargs", "max_num_seqs", -1, "whole number from 1"),
        ("engine_kwargs", "max_num_batched_tokens", 0, "whole number from 1"),
        ("engine_kwargs", "max_model_len", "32k", "must be a number"),
        ("engine_kwargs", "block_size", 0, "whole number from 1"),
        ("engine_kwargs", "async_scheduling", "maybe", "true or false"),
        ("engine_kwargs", "enable_prefix_caching", [], "true or false"),
        ("engine_kwargs", "gpu_memory_utilization", 90, "share above 0"),
        ("engine_kwargs", "gpu_memory_utilization", "nan", "must be a number"),
        ("engine_kwargs", "num_gpu_blocks_override", 2.5, "whole number from 1"),
        ("engine_kwargs", "tensor_parallel_size", {}, "must be a number"),
        ("engine_kwargs", "data_parallel_size", "two", "must be a number"),
        ("engine_kwargs", "kv_cache_dtype", 8, "must be a text"),
        ("engine_kwargs", "kv_cache_dtype", "fp3", "must be one of auto, "),
        ("engine_kwargs", "kv_cache_memory_bytes", 0, "whole number from 1"),
        ("engine_kwargs", "dtype", "foo", "must be one of auto, bfloat16"),
        ("engine_kwargs", "enable_chunked_prefill", 2, "true or false"),
        ("engine_kwargs", "scheduling_policy", "lifo", "must be one of fcfs, priority"),
        ("engine_kwargs", "long_prefill_token_threshold", -1, "whole number from 0"),
        ("engine_kwargs", "watermark", 1, "share of at least 0, below 1"),
        ("engine_kwargs", "model", 7, "must be a text"),
        ("kv_cache", "num_gpu_blocks", "lots", "must be a number"),
        ("kv_cache", "block_size", "big", "must be a number"),
        ("hardware", "device_total_memory_bytes", 0, "whole number from 1"),
        ("hardware", "device_name", 4090, "must be a text"),
        ("", "engine_kwargs", [1], "must be a JSON object"),
        ("", "kv_cache", 5, "must be a JSON object"),
        ("", "hardware", "H100", "must be a JSON object"),
        ("", "vllm_version", "nightly", "must be a version"),
        ("", "vllm_version", 0.2, "must be a text"),
        ("", "started_at", "yesterday", "must be a date"),
    ],
)
def test_a_bad_value_in_meta_is_named(tmp_path: Path, where: str, key: str, value: object, said: str) -> None:
    meta: dict[str, object] = {"engine_kwargs": {"model": "llama-3.1-8b"}, "kv_cache": {}, "hardware": {}}
    inner = meta if not where else meta[where]
    assert isinstance(inner, dict)
    inner[key] = value
    write_run(tmp_path / "h100", meta=meta)
    with pytest.raises(ScenarioError) as caught:
        setting_of(load_run(tmp_path / "h100"))
    shown = str(caught.value)
    assert f"meta.json: {where + '.' if where else ''}{key} is {value!r}; it " in shown
    assert said in shown


BARE = {"kv_cache": None, "hardware": {"device_name": "NVIDIA H100 80GB HBM3"}}


def setting_with(folder: Path, **kwargs: object) -> Setting:
    """What is read from a run of Llama-3.1-8B on an H100 that logged no blocks, with these arguments."""
    write_run(folder, meta=BARE | {"engine_kwargs": {"model": "llama-3.1-8b", **kwargs}})
    return setting_of(load_run(folder))


def test_the_size_of_the_cache_follows_the_arguments(tmp_path: Path) -> None:
    told = setting_with(tmp_path / "run", kv_cache_memory_bytes=4 << 30)
    assert told.num_gpu_blocks == 2048  # 2 MiB a block of 16 tokens in 16 bit
    assert "2048 KV blocks: kv_cache_memory_bytes 4,294,967,296 in the run's arguments" in told.notes
    assert setting_with(tmp_path / "run", kv_cache_memory_bytes=4 << 30, dtype="float32").num_gpu_blocks == 1024
    fixed = setting_with(tmp_path / "run", kv_cache_memory_bytes=4 << 30, num_gpu_blocks_override=5000)
    assert fixed.num_gpu_blocks == 5000
    assert "5000 KV blocks: num_gpu_blocks_override in the run's arguments" in fixed.notes
    usual, wide = setting_with(tmp_path / "run"), setting_with(tmp_path / "run", dtype="float32")
    assert wide.num_gpu_blocks < usual.num_gpu_blocks // 2
    assert usual.warnings == ()
    assert [text for text in wide.warnings if "dtype is float32" in text and "16-bit" in text]
    assert setting_with(tmp_path / "run", dtype="torch.bfloat16").num_gpu_blocks == usual.num_gpu_blocks


def test_the_scheduler_follows_the_arguments(tmp_path: Path) -> None:
    setting = setting_with(
        tmp_path / "run",
        enable_chunked_prefill=False,
        scheduling_policy="priority",
        long_prefill_token_threshold=0,
        scheduler_reserve_full_isl=False,
        watermark=0.05,
        max_model_len=20_000,
    )
    assert (setting.enable_chunked_prefill, setting.scheduling_policy) == (False, "priority")
    assert (setting.scheduler_reserve_full_isl, setting.watermark) == (False, 0.05)
    assert setting.max_num_batched_tokens == 20_000  # the longest prompt has to fit into one step
    assert setting.warnings == ()


def test_prompts_are_cut_as_the_arguments_say(tmp_path: Path) -> None:
    def chunks(**more: object) -> set[int]:
        told = {"model": "llama-3.1-8b", "max_num_seqs": 8, "max_num_batched_tokens": 350, "max_model_len": 350, **more}
        workload = write_run(tmp_path / "h100", meta={"engine_kwargs": told})
        change_rows(tmp_path / "h100", {i: {"queued_ts": 5.0} for i in range(12)})
        run = load_run(tmp_path / "h100")
        shapes = predict(run, workload, setting_of(run)).steps.shapes
        return {num_tokens for shape in shapes for _, num_tokens in shape.prefills}

    whole = set(range(200, 212))
    assert min(chunks()) < 200
    assert chunks(enable_chunked_prefill=False) == whole
    assert max(chunks(long_prefill_token_threshold=64)) == 64


def test_arguments_that_are_not_simulated_are_named_in_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {
        "model": "llama-3.1-8b",
        "quantization": "fp8",
        "pipeline_parallel_size": 2,
        "max_num_seq": 64,
        "seed": 42,
        "enable_expert_parallel": False,
        "cpu_offload_gb": 0,
        "speculative_config": None,
    }
    workload = write_run(tmp_path / "h100", meta={"engine_kwargs": kwargs})
    (warning,) = setting_of(load_run(tmp_path / "h100")).warnings
    assert "quantization: 'fp8', pipeline_parallel_size: 2, max_num_seq: 64 (did you mean max_num_seqs?);" in warning
    assert "seed" not in warning
    assert main(["validate-run", str(tmp_path / "h100"), "--workload", str(workload), "--json"]) == 0
    assert f"warning: {warning}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t,running\n0,1\n1,x\n", "line 3, column 'running': 'x' is not a number"),
        ("t,running\n0,1\n,2\n", "line 3, column 't': '' is not a number"),
        ("t,running,running\n0,1,1\n", "column 'running' is there 2 times; keep one"),
        ("t,running\n0,\xff\n", "line 2, column 'running': '\ufffd' is not a number"),
    ],
)
def test_a_bad_cell_of_the_series_is_named(tmp_path: Path, text: str, said: str) -> None:
    write_run(tmp_path / "h100")
    (tmp_path / "h100" / "timeseries.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ScenarioError, match=re.escape(f"timeseries.csv: {said}")):
        load_run(tmp_path / "h100")


def test_files_of_a_run_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_run(tmp_path / "h100")
    (tmp_path / "h100" / "timeseries.csv").write_text("t,running\n0,1\n1,\n")
    for path in (tmp_path / "h100").iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    run = load_run(tmp_path / "h100")
    assert run.requests[0].input_len == 200
    assert run.series["t"].tolist() == [0.0, 1.0]
    assert run.series["running"][0] == 1.0


def test_text_in_meta_is_read_as_what_it_says(tmp_path: Path) -> None:
    kwargs = {
        "model": "llama-3.1-8b",
        "max_num_seqs": "64",
        "max_num_batched_tokens": "4096",
        "max_model_len": "16384",
        "gpu_memory_utilization": "0.8",
        "block_size": "32",
        "async_scheduling": "false",
        "enable_prefix_caching": "False",
    }
    write_run(tmp_path / "h100", meta={"engine_kwargs": kwargs, "kv_cache": None})
    setting = setting_of(load_run(tmp_path / "h100"))
    assert (setting.max_num_seqs, setting.max_num_batched_tokens, setting.max_model_len) == (64, 4096, 16384)
    assert (setting.block_size, setting.enable_prefix_caching, setting.engine) == (32, False, "vllm-v1")
    assert any("at utilization 0.8" in note for note in setting.notes)


@pytest.mark.parametrize(
    ("version", "engine"), [("v0.9.2", "vllm-v1"), ("v0.19.0rc1", "vllm-v1-async"), ("0.1.dev1+g12", "vllm-v1")]
)
def test_versions_may_begin_with_a_v(tmp_path: Path, version: str, engine: str) -> None:
    write_run(tmp_path / "h100", meta={"vllm_version": version})
    assert setting_of(load_run(tmp_path / "h100")).engine == engine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first_token_ts": 1.0}, "first_token_ts is 1.0; it must not be before queued_ts, 5.1"),
        ({"last_token_ts": 5.11}, "last_token_ts is 5.11; it must not be before first_token_ts"),
        ({"output_toks": 0}, "output_toks is 0; it must be a whole number, at least 1"),
        ({"input_toks": 2.5}, "input_toks is 2.5; it must be a whole number"),
        ({"queued_ts": None}, "queued_ts is None; it must be a number, at most 1e12 (times in seconds)"),
        ({"arrival_time": "now"}, "arrival_time is 'now'; it must be a number"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    write_run(tmp_path / "h100")
    path = tmp_path / "h100" / "requests.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    path.write_text("\n".join(lines))
    with pytest.raises(ScenarioError, match=re.escape(f"requests.jsonl: line 2: {said}")):
        load_run(tmp_path / "h100")


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "h100")
    (tmp_path / "h100" / "requests.jsonl").write_text('{"id": "a", "prompt_tokens": 5}\n')
    with pytest.raises(ScenarioError, match=r"line 1: input_toks is missing; a request has .*has id, prompt_tokens"):
        load_run(tmp_path / "h100")


def test_a_request_is_there_once(tmp_path: Path) -> None:
    write_run(tmp_path / "h100")
    change_rows(tmp_path / "h100", {3: {"request_id": "bench-1"}})
    with pytest.raises(ScenarioError, match="request_id bench-1 is there 2 times"):
        load_run(tmp_path / "h100")


def test_a_line_ends_where_a_file_s_lines_end(tmp_path: Path) -> None:
    """A text in it may hold what else counts as a separator."""
    write_run(tmp_path / "h100")
    path = tmp_path / "h100" / "requests.jsonl"
    path.write_text(path.read_text().replace('bench-1"', 'bench\u2028\u0085"'), newline="\r")
    assert load_run(tmp_path / "h100").requests[1].request_id == "bench\u2028\u0085"


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: data.decode().encode("utf-16")], ids=["gzip", "utf-16"])
def test_files_of_a_run_are_read_however_they_are_packed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    write_run(tmp_path / "h100")
    (tmp_path / "h100" / "timeseries.csv").write_text("t;running\n0;1\n1;\n")
    plain = load_run(tmp_path / "h100")
    for path in (tmp_path / "h100").iterdir():
        path.write_bytes(pack(path.read_bytes()))
    packed = load_run(tmp_path / "h100")
    assert (packed.meta, packed.requests) == (plain.meta, plain.requests)
    assert packed.series["running"][0] == plain.series["running"][0] == 1.0


@pytest.mark.parametrize(("unit", "name"), [(1e3, "milliseconds"), (1e6, "microseconds"), (1.0, "")])
def test_times_that_are_no_seconds_are_questioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: float, name: str
) -> None:
    workload = write_run(tmp_path / "h100")
    rows = [json.loads(line) for line in (tmp_path / "h100" / "requests.jsonl").read_text().splitlines()]
    times = ("queued_ts", "first_token_ts", "last_token_ts")
    change_rows(tmp_path / "h100", {i: {key: row[key] * unit for key in times} for i, row in enumerate(rows)})
    assert main(["validate-run", str(tmp_path / "h100"), "--workload", str(workload), "--json"]) == 0
    said = capsys.readouterr().err
    assert ("must be in seconds" in said) == bool(name)
    assert not name or f"these look like {name}" in said
    if name:
        with pytest.raises(ScenarioError, match=r"no engine does that; times in requests\.jsonl must be in seconds"):
            fit_overhead(tmp_path / "h100", workload)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kept", [range(12), range(3, 9), (0, 2, 3, 11)])
def test_requests_find_their_rows_and_those_that_are_missing_are_counted(
    tmp_path: Path, first: int, kept: Iterable[int]
) -> None:
    """Ids may count from 0 or from 1."""
    workload = write_run(tmp_path / "h100")
    path = tmp_path / "h100" / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = list(kept)
    path.write_text("\n".join(json.dumps(rows[i] | {"request_id": f"cmpl-{i + first}"}) for i in kept))
    run = load_run(tmp_path / "h100")
    prediction = predict(run, workload, setting_of(run))
    assert prediction.queued_s == pytest.approx([0.1 * (i - kept[0]) for i in kept])
    missing = f"{12 - len(kept)} of the workload's 12 requests are not in the run"
    assert any(missing in note for note in prediction.notes) == (len(kept) < 12)


def test_a_bad_row_of_the_workload_can_only_be_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write_run(tmp_path / "h100")
    workload.write_text(workload.read_text().replace('"output_length": 20', '"output_length": -20', 1))
    assert main(["validate-run", str(tmp_path / "h100"), "--workload", str(workload)]) == 2
    assert capsys.readouterr().err.endswith("; correct the row\n")


def test_block_ids_of_another_size_are_found_from_the_rows(tmp_path: Path) -> None:
    """The second half of the requests repeats the first's prompts: what they hit does not depend on the ids' size."""
    workload = write_run(tmp_path / "h100", num=12)
    rows = [json.loads(line) for line in workload.read_text().splitlines()]
    hits = []
    for size in (16, 64):
        ids = [[1000 * (i % 6) + j for j in range(192 // size)] for i in range(12)]
        lines = [row | {"input_length": 192, "hash_ids": ids[i]} for i, row in enumerate(rows)]
        workload.write_text("\n".join(map(json.dumps, lines)))
        change_rows(tmp_path / "h100", {i: {"input_toks": 192} for i in range(12)})
        run = load_run(tmp_path / "h100")
        prediction = predict(run, workload, setting_of(run))
        hits.append([shape.num_prefill_tokens for shape in prediction.steps.shapes if shape.prefills])
    assert hits[0] == hits[1]
    assert min(hits[0]) == 16


@pytest.mark.parametrize("scale", [1000.0, 1.0])
def test_a_series_of_another_time_is_left_out(tmp_path: Path, scale: float) -> None:
    workload = write_run(tmp_path / "h100")
    series = [f"{10.0 + t if scale > 1 else t},{t}" for t in range(3)]
    (tmp_path / "h100" / "timeseries.csv").write_text("t,running\n" + "\n".join(series))
    run = load_run(tmp_path / "h100")
    found = compare(run, predict(run, workload, setting_of(run)))
    assert bool(found.series_error) == (scale == 1.0)
    assert any("no time in column 't' (10 to 12)" in text for text in found.warnings) == (scale > 1)


@pytest.mark.parametrize(
    ("text", "compared", "said"),
    [
        ("t,running,waiting\n0,0,0\n0.1,,0\n0.2,1,0\n", {"running", "waiting"}, ""),
        ("t,running,waiting\n0,0,\n0.1,0,\n", set(), ""),
        ("t,num_running\n0,1\n", set(), "it has t, num_running; columns t"),
        ("time,running\n0,1\n", set(), "it has time, running; columns t"),
    ],
)
def test_what_a_series_lacks(tmp_path: Path, text: str, compared: set[str], said: str) -> None:
    """One empty cell is no reason to leave a column out, and nobody waiting is no empty log."""
    workload = write_run(tmp_path / "h100")
    (tmp_path / "h100" / "timeseries.csv").write_text(text)
    run = load_run(tmp_path / "h100")
    found = compare(run, predict(run, workload, setting_of(run)))
    assert set(found.series_error) == compared
    assert all(math.isfinite(error) for error in found.series_error.values())
    assert any(said in warning for warning in found.warnings) == bool(said)


@pytest.mark.parametrize(("logged", "error"), [(0.3, 0.5), (0.003, 0.5), (30.0, 40.0)])
def test_usage_is_a_share_only_where_the_prediction_says_so(tmp_path: Path, logged: float, error: float) -> None:
    """Some 0.3 % of the cache is in use: 0.3 is that many per cent, and no 30; 0.003 is the same as a share."""
    workload = write_run(tmp_path / "h100")
    (tmp_path / "h100" / "timeseries.csv").write_text(f"t,kv_cache_pct\n0.05,{logged}\n0.15,{logged}\n")
    run = load_run(tmp_path / "h100")
    found = compare(run, predict(run, workload, setting_of(run))).series_error["kv_cache_pct"]
    assert found < error if logged < 1 else found == pytest.approx(logged, rel=0.1)


def test_a_date_without_a_time_zone_does_not_depend_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "h100", meta={"started_at": "2026-04-25T18:47:18"})
    change_rows(tmp_path / "h100", {0: {"arrival_time": 1777142838.0 + 7.0}})
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert load_run(tmp_path / "h100").series_offset_s == 7.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_gpu_that_the_catalog_lacks_takes_a_profile_of_its_own(tmp_path: Path) -> None:
    hardware: dict[str, object] = {"device_name": "X9000"}
    workload = write_run(tmp_path / "run", meta={"hardware": hardware})
    run = load_run(tmp_path / "run")
    mine = replace(load_profile("rtx4090"), name="mine", gpu="X9000")
    for profile in (None, mine):
        with pytest.raises(ScenarioError, match=r"unknown GPU 'X9000'.*--profile.*device_total_memory_bytes"):
            setting_of(run, profile=profile)
    write_run(tmp_path / "run", meta={"hardware": hardware | {"device_total_memory_bytes": 24 << 30}})
    run = load_run(tmp_path / "run")
    setting = setting_of(run, profile=mine)
    assert (setting.gpu, setting.max_num_seqs) == ("X9000", 8)
    comparison = compare(run, predict(run, workload, setting))
    assert comparison.metrics["mean_tpot_ms"]["predicted"] > 0
    assert not [note for note in comparison.notes if "measured on" in note]


def test_a_run_without_time_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "h100", num=1)
    path = tmp_path / "h100" / "requests.jsonl"
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {"first_token_ts": row["queued_ts"], "last_token_ts": row["queued_ts"]}))
    with pytest.raises(ScenarioError, match="all times are the same"):
        load_run(tmp_path / "h100")


def test_the_command_prints_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write_run(tmp_path / "h100")
    assert main(["validate-run", str(tmp_path / "h100"), "--workload", str(workload), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(METRICS) <= set(shown)
    assert set(shown["makespan_s"]) == {"predicted", "measured", "error_pct"}


@pytest.mark.deep
def test_a_real_run_comes_out_five_per_cent_low(shared_dir: Path) -> None:
    run = load_run(shared_dir / RUNS / "RTXPRO6000_Llama-3.1-8B")
    prediction = predict(run, shared_dir / RUNS / "sharegpt_llama31_8b_300_sps10.jsonl", setting_of(run))
    comparison = compare(run, prediction)
    assert -6.0 < comparison.metrics["makespan_s"]["error_pct"] < -3.0
    assert abs(comparison.metrics["mean_tpot_ms"]["error_pct"]) < 5.0


def test_only_a_picture_that_there_is_is_said_to_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rtx-4090"
    args = ["validate-run", str(folder), "--workload", str(write_run(folder)), "--plot", str(tmp_path / "p.png")]
    assert main(args) == 0
    assert "wrote" not in capsys.readouterr().out
    (folder / "timeseries.csv").write_text("t,running\n0,1\n1,2\n")
    assert main(args) == 0
    assert f"wrote {tmp_path / 'p.png'}" in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main([*args[:-1], str(tmp_path / "p.bmpp")]) == 2
    assert "p.bmpp: no picture can be written as 'bmpp'; name the file .png" in capsys.readouterr().err
