"""Bad scenarios: each answers with one message that names the culprit, the value and the cure, and exit code 2."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.runs import Options, compare, run
from kvsim.scenario.resolve import scenario_from_text
from kvsim.sweeps import sweep
from kvsim.types import ScenarioError

BASE = """\
name: chat
seed: 7
engine: paged
model: llama-2-7b
gpu: a100-80gb
memory: {kv_cache_memory_bytes: 16GiB, swap_space: 4GiB}
allocator: {block_size: 16, watermark: 0.01}
scheduler: {max_num_seqs: 256, max_num_batched_tokens: 8192, max_model_len: 2048}
workload:
  num_requests: 20
  arrivals: {type: poisson, request_rate: 4.0}
  lengths: {type: uniform, prompt: [1, 100], output: [1, 50]}
  sampling: {n: 1}
cost: {type: linear, step_ms: 6.0}
slo: {ttft: 2s, tpot: 100ms}
horizon: null
"""

# (what stands in the file, what is written instead, what the message must contain)
EDITS = [
    # limits that a value meets in a unit other than its own
    ("name: chat", f"name: {'ü' * 101}", "s.yaml:1:1: name: is", "at most 200 bytes of UTF-8"),
    ("name: chat", "name: 'a\\b'", "s.yaml:1:1: name: is", "no slash, backslash or control character"),
    ("ttft: 2s", "ttft: 1e-12", "s.yaml:15:7: slo.ttft: is 1e-12", "at least a nanosecond"),
    # misspelt and misplaced keys
    ("block_size: 16", "blok_size: 16", "s.yaml:7:13: allocator.blok_size: unknown key", "did you mean block_size?"),
    ("max_num_seqs: 256", "max_num_seq: 256", "s.yaml:8:13: scheduler.max_num_seq", "did you mean max_num_seqs?"),
    ("seed: 7", "sead: 7", "s.yaml:2:1: sead: unknown key", "did you mean seed?"),
    ("engine: paged", "engines: paged", "s.yaml:3:1: engines", "did you mean engine?"),
    ("num_requests: 20", "num_prompts: 20", "workload.num_prompts", "did you mean num_requests?"),
    ("request_rate: 4.0", "qps: 4.0", "workload.arrivals.qps", "did you mean request_rate?"),
    ("request_rate: 4.0", "request_rat: 4.0", "arrivals.request_rat", "did you mean request_rate?"),
    ("seed: 7", "block_size: 16", "s.yaml:2:1: block_size", "did you mean allocator.block_size?"),
    ("seed: 7", "blok_size: 16", "s.yaml:2:1: blok_size: unknown key here", "did you mean allocator.block_size?"),
    ("seed: 7", "max_num_seq: 16", "s.yaml:2:1: max_num_seq", "did you mean scheduler.max_num_seqs?"),
    ("seed: 7", "tpo: 16ms", "s.yaml:2:1: tpo", "did you mean slo.tpot?"),
    ("watermark: 0.01", "max_num_seq: 8", "allocator.max_num_seq", "did you mean scheduler.max_num_seqs?"),
    ("step_ms: 6.0", "blok_size: 8", "cost.blok_size", "did you mean allocator.block_size?"),
    ("seed: 7", "max_num_seqs: 4", "max_num_seqs: unknown key here", "did you mean scheduler.max_num_seqs?"),
    ("seed: 7", "zzz: 1", "zzz: unknown key", "known here: name"),
    ("watermark: 0.01", "preemption_mode: swap", "allocator.preemption_mode", "did you mean scheduler.preemption?"),
    ("watermark: 0.01", "enable_prefix_cache: true", "enable_prefix_cache", "did you mean enable_prefix_caching?"),
    ("swap_space: 4GiB", "swap: 4GiB", "memory.swap", "did you mean swap_space?"),
    ("swap_space: 4GiB", "num_gpu_blocks: 4", "memory.num_gpu_blocks", "did you mean num_gpu_blocks_override?"),
    ("step_ms: 6.0", "step_us: 6.0", "cost.step_us", "did you mean step_ms?"),
    ("step_ms: 6.0", "profile: a100", "cost.profile: unknown key of type linear", "belongs to type kernels"),
    ("tpot: 100ms", "tpott: 100ms", "slo.tpott", "did you mean tpot?"),
    ("prompt: [1, 100]", "promt: [1, 100]", "lengths.promt", "did you mean prompt?"),
    ("horizon: null", "horizonn: 5", "horizonn", "did you mean horizon?"),
    ("{n: 1}", "{n: 1, best_of: 2}", "sampling.best_of: unknown key", "known here: n, beam_width"),
    # numbers that make no sense
    ("block_size: 16", "block_size: 0", "allocator.block_size: is 0", "at least 1"),
    ("block_size: 16", "block_size: -16", "allocator.block_size: is -16", "at least 1"),
    ("block_size: 16", "block_size: 16.5", "allocator.block_size: is 16.5", "whole number"),
    ("block_size: 16", "block_size: sixteen", "is 'sixteen'", "whole number"),
    ("block_size: 16", "block_size: '16'", "is '16'", "whole number"),
    ("block_size: 16", "block_size: true", "is True", "whole number"),
    ("block_size: 16", "block_size: [16]", "is [16]", "whole number"),
    ("block_size: 16", "block_size: {a: 1}", "allocator.block_size", "whole number"),
    ("block_size: 16", "block_size: .nan", "is nan", "whole number"),
    ("block_size: 16", "block_size: .inf", "is inf", "whole number"),
    ("block_size: 16", "block_size: ~", "allocator.block_size: is empty", "leave the key out"),
    ("block_size: 16", "block_size: 1000000", "allocator.block_size: is 1000000", "32768 tokens"),
    ("block_size: 16", "block_size: 100000000000000000000", "block_size: is 1000000000000000", "at most 1,048,576"),
    ("watermark: 0.01", "watermark: 1.5", "watermark: is 1.5", "below 1"),
    ("watermark: 0.01", "watermark: -0.1", "watermark: is -0.1", "at least 0"),
    ("watermark: 0.01", "watermark: .nan", "watermark: is nan", "finite"),
    ("watermark: 0.01", "watermark: 1%", "watermark: is '1%'", "number"),
    ("max_num_seqs: 256", "max_num_seqs: 0", "max_num_seqs: is 0", "at least 1"),
    ("max_num_seqs: 256", "max_num_seqs: -1", "max_num_seqs: is -1", "at least 1"),
    ("max_num_batched_tokens: 8192", "max_num_batched_tokens: 0", "max_num_batched_tokens: is 0", "at least 1"),
    ("max_model_len: 2048", "max_model_len: 0", "max_model_len: is 0", "at least 1"),
    ("max_model_len: 2048", "max_model_len: 1e30", "max_model_len: is 1e+30", "at most 100,000,000"),
    ("seed: 7", "seed: -1", "seed: is -1", "at least 0"),
    ("seed: 7", "seed: 1.5", "seed: is 1.5", "whole number"),
    ("seed: 7", "seed: abc", "seed: is 'abc'", "whole number"),
    ("num_requests: 20", "num_requests: 0", "num_requests: is 0", "at least 1"),
    ("num_requests: 20", "num_requests: -5", "num_requests: is -5", "at least 1"),
    ("num_requests: 20", "num_requests: 1000000000", "num_requests: is 1000000000", "at most 50,000,000"),
    ("request_rate: 4.0", "request_rate: 0", "request_rate: is 0", "above 0"),
    ("request_rate: 4.0", "request_rate: -4", "request_rate: is -4", "above 0"),
    ("request_rate: 4.0", "request_rate: .nan", "request_rate: is nan", "above 0"),
    ("request_rate: 4.0", "request_rate: fast", "request_rate: is 'fast'", "number of requests per second"),
    ("step_ms: 6.0", "step_ms: -6", "cost.step_ms: is -6", "at least 0"),
    ("step_ms: 6.0", "step_ms: .inf", "cost.step_ms: is inf", "finite"),
    ("{n: 1}", "{n: 0}", "sampling.n: is 0", "at least 1"),
    ("{n: 1}", "{n: 300}", "sampling.n: is 300", "max_num_seqs (256)"),
    ("{n: 1}", "{n: 2, beam_width: 2}", "workload.sampling", "exclude each other"),
    ("{n: 1}", "{n: 2, beam_width: 1}", "workload.sampling", "exclude each other"),
    ("{n: 1}", "{beam_width: -1}", "beam_width: is -1", "at least 0"),
    ("prompt: [1, 100]", "prompt: [100, 1]", "lengths.prompt: is [100, 1]", "low before high"),
    ("prompt: [1, 100]", "prompt: [0, 1]", "lengths.prompt: is [0, 1]", "1 to 100,000,000"),
    ("prompt: [1, 100]", "prompt: [1, 2, 3]", "lengths.prompt: is [1, 2, 3]", "[low, high]"),
    ("output: [1, 50]", "output: few", "lengths.output: is 'few'", "whole number"),
    (", output: [1, 50]", "", "lengths.output: is missing", "give it a value"),
    ("output: [1, 50]", "output: [1, 50], max_total: 1", "max_total: is 1", "at least 2"),
    ("output: [1, 50]", "output: [1, 50], correlation: 2", "correlation: is 2", "at most 1"),
    # sizes and times
    ("16GiB", "0", "kv_cache_memory_bytes: is 0", "above 0"),
    ("16GiB", "-16GiB", "kv_cache_memory_bytes: is '-16GiB'", "negative"),
    ("16GiB", "16GiBs", "'16GiBs'", "GiB"),
    ("16GiB", "16 gigs", "'16 gigs'", "40GiB"),
    ("16GiB", "much", "kv_cache_memory_bytes: is 'much'", "40GiB"),
    ("16GiB", ".nan", "kv_cache_memory_bytes: is nan", "finite"),
    ("16GiB", "1e25", "memory.kv_cache_memory_bytes", "at most 100,000,000"),
    ("16GiB", "1e400", "kv_cache_memory_bytes", "finite"),
    ("16GiB", "1KB", "kv_cache_memory_bytes", "at least 8,388,608 bytes"),
    ("4GiB", "-1", "swap_space: is -1", "negative"),
    ("4GiB", "[4]", "swap_space: is [4]", "40GiB"),
    ("kv_cache_memory_bytes: 16GiB", "gpu_memory_utilization: 0", "gpu_memory_utilization: is 0", "above 0"),
    ("kv_cache_memory_bytes: 16GiB", "gpu_memory_utilization: 90", "gpu_memory_utilization: is 90", "at most 1"),
    ("kv_cache_memory_bytes: 16GiB", "gpu_memory_utilization: 0.01", "gpu_memory_utilization", "weights"),
    ("kv_cache_memory_bytes: 16GiB", "num_gpu_blocks_override: 0", "num_gpu_blocks_override: is 0", "at least 1"),
    (
        "kv_cache_memory_bytes: 16GiB",
        "num_gpu_blocks_override: 1000000000000000000",
        "num_gpu_blocks_override: is 1000000000000000000",
        "at most 100,000,000",
    ),
    ("ttft: 2s", "ttft: -2s", "slo.ttft: is '-2s'", "above 0"),
    ("ttft: 2s", "ttft: 0", "slo.ttft: is 0", "above 0"),
    ("ttft: 2s", "ttft: soon", "slo.ttft: is 'soon'", "100ms"),
    ("ttft: 2s", "ttft: 2 weeks", "'2 weeks'", "100ms"),
    ("horizon: null", "horizon: -1", "horizon: is -1", "above 0"),
    ("horizon: null", "horizon: 0", "horizon: is 0", "above 0"),
    ("horizon: null", "horizon: .inf", "horizon: is inf", "finite"),
    ("horizon: null", "horizon: 1e30", "horizon: is 1e+30", "shorter time"),
    # names
    ("engine: paged", "engine: pagd", "s.yaml:3:1: engine: is 'pagd'", "did you mean paged?"),
    ("engine: paged", "engine: 5", "engine: is 5", "must be one of paged"),
    ("engine: paged", "engine: [paged]", "engine: is ['paged']", "must be one of paged"),
    ("engine: paged", "engine: vllm", "engine: is 'vllm'", "vllm-v1"),
    ("model: llama-2-7b", "model: llama-2-8b", "s.yaml:4:1: model: unknown model 'llama-2-8b'", "llama-2-7b"),
    ("model: llama-2-7b", "model: nowhere/config.json", "model: there is no file", "path that exists"),
    ("model: llama-2-7b", "model: {num_hidden_layers: 2}", "model", "num_key_value_heads"),
    ("model: llama-2-7b", "model: {num_hidden_layers: 0}", "model.num_hidden_layers: is 0", "at least 1"),
    ("model: llama-2-7b", "model: {num_hidden_layer: 2}", "num_hidden_layer", "did you mean num_hidden_layers?"),
    (
        "model: llama-2-7b",
        "model: {num_hidden_layers: 2, num_key_value_heads: 2, head_dim: 64, dtype: float17}",
        "model.dtype: is 'float17'",
        "did you mean float16?",
    ),
    ("gpu: a100-80gb", "gpu: a100-81gb", "gpu: unknown GPU 'a100-81gb'", "did you mean a100-80gb"),
    ("gpu: a100-80gb", "gpu: {memory: 0}", "gpu.memory: is 0", "above 0"),
    ("gpu: a100-80gb", "gpu: {}", "gpu.memory: is missing", "give it a value"),
    ("name: chat", "name: ../../etc", "name: is '../../etc'", "no slash"),
    ("name: chat", "name: ''", "name: is ''", "must not be empty"),
    ("name: chat", "name: [a]", "name: is ['a']", "must be a text"),
    ("type: poisson", "type: possion", "workload.arrivals: type is 'possion'", "did you mean poisson?"),
    ("type: poisson", "type: 3", "workload.arrivals: type is 3", "must be one of poisson"),
    ("type: uniform", "type: unifrom", "workload.lengths: type is 'unifrom'", "did you mean uniform?"),
    ("type: uniform", "type: fixed", "workload.lengths", "type: uniform"),
    ("type: linear", "type: linaer", "cost: type is 'linaer'", "did you mean linear?"),
    ("type: linear, step_ms: 6.0", "type: kernels, profile: mine", "cost.profile", "shipped: a100"),
    (
        "type: linear, step_ms: 6.0",
        "type: roofline, memory_bandwidth_gb_s: 1",
        "cost.peak_tflops: is missing",
        "give it a value",
    ),
    ("block_size: 16", "type: pagd", "allocator: type is 'pagd'", "did you mean paged?"),
    ("block_size: 16", "type: 'my module:Thing'", "allocator: type is 'my module:Thing'", "must be one of paged"),
    ("block_size: 16", "free_list: fifi", "allocator.free_list: is 'fifi'", "did you mean fifo?"),
    ("max_num_seqs: 256", "preemption: swop", "scheduler.preemption: is 'swop'", "did you mean swap?"),
    ("max_num_seqs: 256", "admission: all", "scheduler.admission: is 'all'", "full_prompt"),
    ("max_num_seqs: 256", "victim: oldest", "scheduler.victim: is 'oldest'", "package.module:name"),
    ("max_num_seqs: 256", "enable_chunked_prefill: maybe", "enable_chunked_prefill: is 'maybe'", "true or false"),
    ("horizon: null", "record: [stops]", "record: is ['stops']", "steps, requests"),
    ("horizon: null", "record: []", "record: is []", "steps, requests"),
    ("horizon: null", "engine_loop: fast", "engine_loop: is 'fast'", "plain"),
    ("horizon: null", "kv_cache_dtype: fp17", "kv_cache_dtype: is 'fp17'", "must be one of auto"),
    ("horizon: null", "kv_cache_dtype: fp8_ds_mla", "kv_cache_dtype: fp8_ds_mla stores latents", "does not have"),
    ("horizon: null", "tensor_parallel_size: 0", "tensor_parallel_size: is 0", "at least 1"),
    ("horizon: null", "tensor_parallel_size: 3", "tensor_parallel_size: 32 attention heads", "3 ranks"),
    ("horizon: null", "sweep: {vary: {allocator.blok_size: [8]}}", "allocator.blok_size", "did you mean block_size?"),
    ("horizon: null", "sweep: {vary: {blok_size: [8]}}", "vary.blok_size", "did you mean allocator.block_size?"),
    ("horizon: null", "sweep: {vary: {}}", "sweep.vary: is empty", "at least one key"),
    ("horizon: null", "sweep: {}", "sweep.vary: is missing", "give it a value"),
    ("horizon: null", "sweep: {vary: {seed: [1]}, seeds: []}", "s.yaml:16:28: sweep.seeds: is []", "at least one seed"),
    ("horizon: null", "sweep: {vary: {seed: [1]}, seeds: [1, x]}", "sweep.seeds[1]: is 'x'", "must be a whole number"),
    ("horizon: null", "sweep: {vary: {seed: [1]}, seeds: [-1]}", "sweep.seeds[0]: is -1", "must be at least 0"),
    ("horizon: null", "sweep: {vary: {seed: [1]}, seeds: 0}", "sweep.seeds: is 0", "must be at least 1"),
    (
        "{n: 1}",
        "{n: 1}\n  priorities: {3000000000: 1}",
        "s.yaml:14:16: workload.priorities.3000000000",
        "2,147,483,648",
    ),
    # blocks that are something else
    ("allocator: {block_size: 16, watermark: 0.01}", "allocator: 5", "allocator: is 5", "it takes keys: type"),
    ("allocator: {block_size: 16, watermark: 0.01}", "allocator: [1]", "allocator: is [1]", "it takes keys: type"),
    (
        "allocator: {block_size: 16, watermark: 0.01}",
        "allocator: 'mine:A'",
        "allocator: is 'mine:A'",
        "did you mean allocator.type: mine:A?",
    ),
    ("{type: poisson, request_rate: 4.0}", "poisson", "arrivals: is 'poisson'", "did you mean workload.arrivals.type:"),
    (
        "cost: {type: linear, step_ms: 6.0}",
        "cost: roofline",
        "cost: is 'roofline'",
        "did you mean cost.type: roofline?",
    ),
    ("slo: {ttft: 2s, tpot: 100ms}", "slo: fast", "slo: is 'fast'", "it takes keys: ttft"),
    ("cost: {type: linear, step_ms: 6.0}", "cost: free", "cost: is 'free'", "it takes keys: type"),
    ("  sampling: {n: 1}", "  requests: []", "requests is an empty list", "at least one request"),
    ("  sampling: {n: 1}", "  requests: 5", "workload.requests: is 5", "list"),
    ("  sampling: {n: 1}", "  sessions: {num_turns: 2}\n  requests: [{}]", "sessions and requests", "keep one"),
    ("  sampling: {n: 1}", "  trace: nowhere.csv", "s.yaml:13:3: workload.trace: there is no file", "path that exists"),
    ("  sampling: {n: 1}", "  trace: .", "workload.trace: '.' is not a regular file", "give the file itself"),
    ("  sampling: {n: 1}", "  priorities: {high: 1}", "workload.priorities.high", "whole number"),
    ("  sampling: {n: 1}", "  priorities: {}", "priorities is empty", "{0: 0.2, 1: 0.8}"),
    ("  sampling: {n: 1}", "  abort: {probability: 2}", "abort.probability: is 2", "at most 1"),
    ("  sampling: {n: 1}", "  window: [5, 1]", "workload.window: is [5, 1]", "end after it begins"),
    ("  sampling: {n: 1}", "  speed: 0", "workload.speed: is 0", "must be at least"),
    ("  sampling: {n: 1}", "  abort: {probability: 0.5, after: 5e8}", "abort.after: is 500000000.0", "at most 1e+08"),
    ("  sampling: {n: 1}", "  sessions: {num_turns: 2, think_time: 5e8}", "think_time: is 5000", "at most 1e+08"),
    ("  sampling: {n: 1}", "  sessions: {num_turns: 2, mean_turns: 3}", "workload.sessions", "keep one"),
    ("type: poisson, request_rate: 4.0", "type: trace", "arrivals of type trace", "trace: some.csv"),
    # values that contradict each other
    ("engine: paged", "engine: static", "scheduler", "max_num_seqs (256)"),
    ("block_size: 16", "block_size: 16, sliding_window: 100", "sliding_window: is 100", "multiple of block_size (16)"),
    (
        "block_size: 16",
        "block_size: 16, sliding_window: 160, enable_prefix_caching: true",
        "sliding_window",
        "exclude each other",
    ),
    (
        "max_num_batched_tokens: 8192",
        "max_num_batched_tokens: 64, enable_chunked_prefill: false",
        "max_num_batched_tokens: is 64, below the longest prompt (100)",
        "raise it to 100",
    ),
    ("block_size: 16", "type: contiguous", "scheduler.reservation: is missing", "max, pow2, oracle"),
    # YAML
    ("seed: 7", "seed: 7\nseed: 8", "s.yaml:3:1: seed: given twice (first on line 2)", "keep one"),
    ("block_size: 16", "block_size: 16, block_size: 32", "allocator.block_size: given twice", "keep one"),
    ("allocator: {block", "allocator:\n\tx: {block", "s.yaml:8:1: a tab", "indent with spaces"),
    ("seed: 7", "seed: 7: 8", "s.yaml:2:8: is not valid YAML", "check indentation"),
    ("seed: 7", "seed: [7", "is not valid YAML", "check indentation"),
    ("name: chat", 'name: "chat', "is not valid YAML", "quotes"),
    ("seed: 7", "seed: *x", "s.yaml:2:7: found undefined alias", "name it first with &"),
    ("seed: 7", "seed: &x [*x]", "nested more than 50", "s.yaml:2:"),
    ("seed: 7", "? [a]\n: 7", "s.yaml:2:3: a key must be a name", "not a list"),
    ("seed: 7", "seed: !!python/object/apply:os.system [ls]", "s.yaml:2:7: the tag", "write a plain value"),
    ("seed: 7", "seed: !mine 7", "the tag '!mine' is not allowed", "write a plain value"),
    ("seed: 7", "---\nseed: 7", "a second document", "keep one per file"),
    ("seed: 7", "seed: \x07", "s.yaml:2:7: the character U+0007", "remove it"),
    ("seed: 7", "seed: " + "9" * 5000, "seed: is '9999", "whole number"),
    ("seed: 7", "seed: " + "[" * 60 + "]" * 60, "s.yaml:2:", "nested more than 50 levels deep"),
    ("seed: 7", "seed: " + "{a: " * 60 + "1" + "}" * 60, "s.yaml:2:", "nested more than 50 levels deep"),
    ("seed: 7", "x: &x 1\ny: [" + "*x, " * 60 + "1]", "more than 50 aliases", "write the values out"),
]


def replaced(old: str, new: str) -> str:
    assert old in BASE, old
    return BASE.replace(old, new, 1)


def assert_refused(capsys: pytest.CaptureFixture[str], args: list[str], *expected: str) -> str:
    code = main(args)
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    for text in expected:
        assert text in captured.err, captured.err
    return captured.err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_base_is_valid(here: Path) -> None:
    Path("s.yaml").write_text(BASE)
    assert main(["validate", "s.yaml"]) == 0


def test_there_are_many() -> None:
    assert len({new for _, new, *_ in EDITS}) >= 120


@pytest.mark.parametrize(("old", "new", "expected"), [(old, new, rest) for old, new, *rest in EDITS])
def test_edit(here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, expected: list[str]) -> None:
    if new == "engine: static":
        new += "\n"  # the scheduler's budget is then below its number of places
        text = replaced(old, new).replace("max_num_batched_tokens: 8192", "max_num_batched_tokens: 8")
    else:
        text = replaced(old, new)
    Path("s.yaml").write_text(text, encoding="utf-8")
    error = assert_refused(capsys, ["validate", "s.yaml"], *expected)
    assert len(error.strip().splitlines()) == 1, error


WRITTEN = [
    ("{n: 2, beam_width: 2}", "requests[1].beam_width: 2 and n (2) exclude each other"),
    ("{n: 2, beam_width: 1}", "requests[1].beam_width: 1 and n (2) exclude each other"),
    ("{n: 0}", "requests[1].n: 0 is not in 1 .. "),
    ("{n: 1.5}", "requests[1].n: 1.5 is not a whole number"),
    ("{n: .inf}", "requests[1].n: inf is not"),
    ("{n: 9" + "9" * 30 + "}", "requests[1].n: 9"),
    ("{n: 2, session: a}", "requests[1].n: 2 is for single requests"),
    ("{beam_width: 2, session: a}", "requests[1].beam_width: 2 is for single requests"),
    ("{beam_with: 2}", "requests[1].beam_with: unknown key; did you mean beam_width?"),
    ("{foo: 1}", "requests[1].foo: unknown key; known here: id, arrival_s, prompt_tokens"),
    ("{prefix_tokens: 2}", "requests[1].prefix_tokens: 2 needs a prefix_group"),
    ("{prefix_group: a, prefix_tokens: 5}", "requests[1].prefix_tokens: 5 is more than the prompt's 4"),
    ("{prefix_group: [a]}", "requests[1].prefix_group: ['a'] is no name"),
    ("{session: [a]}", "requests[1].session: ['a'] is no name"),
    ("{id: [a]}", "requests[1].id: ['a'] is no name"),
    ("{id: '0'}", "requests[1].id: '0' is there twice: entry 0 has it too"),
    ("{prompt_tokens: ~}", "requests[1].prompt_tokens: is missing"),
    ("{output_tokens: 0}", "requests[1].output_tokens: 0 is not in 1 .. "),
    ("{prompt_tokens: many}", "requests[1].prompt_tokens: 'many' is not a number"),
    ("{arrival_s: .nan}", "requests[1].arrival_s: nan is not a finite number"),
    ("{arrival_s: 1e400}", "requests[1].arrival_s: inf is not a finite number"),
    ("{arrival_s: true}", "requests[1].arrival_s: True"),
    ("{arrival_s: ''}", "requests[1].arrival_s: ''"),
    ("{arrival_s: 1e300}", "requests[1].arrival_s: 1e+300"),
    ("{abort_s: -1}", "requests[1].abort_s: -1 is negative"),
    ("{priority: 99999999999}", "requests[1].priority: 99999999999 is not in"),
    ("{n: 20000}", "requests[1].n: 20000 is not in 1 .. 10000"),
    ("{beam_width: 20000}", "requests[1].beam_width: 20000 is not in 0 .. 10000"),
    ("{priority: high}", "requests[1].priority: 'high' is not a number"),
]


@pytest.mark.parametrize(("keys", "expected"), WRITTEN)
def test_written_request(here: Path, capsys: pytest.CaptureFixture[str], keys: str, expected: str) -> None:
    """Found without running anything, with the line it stands on."""
    missing = [f"{key}: 4" for key in ("prompt_tokens", "output_tokens") if key not in keys]
    entry = ", ".join([*missing, keys.strip("{}")])
    Path("s.yaml").write_text(
        f"workload:\n  requests:\n    - {{prompt_tokens: 4, output_tokens: 4}}\n    - {{{entry}}}\n"
    )
    error = assert_refused(capsys, ["validate", "s.yaml"], "s.yaml:4:", expected.removesuffix(" "))
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("engine", ["orca-max", "static", "vllm-v1"])
def test_written_beams_need_an_engine_that_has_them(
    here: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    Path("s.yaml").write_text("workload: {requests: [{prompt_tokens: 4, output_tokens: 4, beam_width: 2}]}\n")
    args = ["compare", "s.yaml", "--engines", f"paged,{engine}"]
    assert_refused(capsys, args, "s.yaml:1:", "workload.requests[0].beam_width: is 2", "use engine paged or vllm-v0")
    assert os.listdir(here) == ["s.yaml"]


IDLE = [
    ("memory: {kv_cache_memory_bytes: 1GiB, num_gpu_blocks_override: 99}", "memory.kv_cache_memory_bytes", "(99)"),
    ("memory: {gpu_memory_utilization: 0.5, num_gpu_blocks_override: 99}", "memory.gpu_memory_utilization", "(99)"),
    ("memory: {gpu_memory_utilization: 0.5, kv_cache_memory_bytes: 1GB}", "memory.gpu_memory", "(1,000,000,000)"),
    ("memory: {swap_space: 4GiB, num_cpu_blocks_override: 7}", "memory.swap_space", "num_cpu_blocks_override (7)"),
    ("memory: {swap_space: 4GiB}", "memory.swap_space", "nothing is swapped"),
    (
        "{scheduler: {preemption: swap}, memory: {swap_space: 4MiB}}",
        "scheduler.preemption",
        "swap_space holds no block",
    ),
    # vLLM's number was of GiB; here a number alone is bytes.
    (
        "{engine: vllm-v0, scheduler: {preemption: auto}, memory: {swap_space: 4}}",
        "scheduler.preemption: is auto",
        "holds no block (4 bytes)",
    ),
    ("{scheduler: {preemption: swap_forked}, memory: {swap_space: 4}}", "is swap_forked", "holds no block (4 bytes)"),
    ("scheduler: {preemption: swap}", "scheduler.preemption", "swap_space is 0"),
    ("memory: {num_cpu_blocks_override: 7}", "num_cpu_blocks_override", "nothing is swapped"),
    ("{engine: vllm-v1, memory: {swap_space: 4GiB}}", "memory.swap_space", "the vllm-v1 scheduler never swaps"),
    ("{engine: vllm-v0, allocator: {enable_prefix_caching: true}}", "prefix_caching", "nothing will hit"),
    (
        "{engine: vllm-v1, allocator: {sliding_window: 32, enable_prefix_caching: false}}",
        "allocator.sliding_window",
        "ring of 2 blocks",
    ),
    ("workload: {first: 3}", "workload.first", "there is no trace"),
    ("workload: {rate: 3}", "workload.rate", "there is no trace"),
    ("workload: {num_requests: 3, requests: [{prompt_tokens: 1, output_tokens: 1}]}", "num_requests", "written out"),
    ("workload: {sampling: {n: 2}, requests: [{prompt_tokens: 1, output_tokens: 1}]}", "sampling.n", "have their own"),
    ("workload: {requests: [{prompt_tokens: 1, output_tokens: 1, n: 999}]}", "requests[0].n: is 999", "be rejected"),
    ("workload: {sampling: {theta: 2}}", "workload.sampling.theta", "no request has beams"),
    (
        "workload: {sampling: {theta: 2}, requests: [{prompt_tokens: 1, output_tokens: 1, n: 2}]}",
        "workload.sampling.theta",
        "no request has beams",
    ),
    ("workload: {sampling: {lengths: independent}}", "workload.sampling.lengths", "a request has one sample"),
    ("workload: {lengths: {type: fixed, prompt: 9, output: 9, correlation: 0.5}}", "correlation", "do not vary"),
    ("workload: {arrivals: {type: batch, interval: 5}}", "workload.arrivals.interval", "in one group"),
    ("workload: {arrivals: {type: batch, batch_size: 5}}", "workload.arrivals.batch_size", "all groups come at once"),
    ("workload: {arrivals: {type: gamma, request_rate: .inf, burstiness: 2}}", "arrivals.burstiness", "come at once"),
    ("workload: {sessions: {num_turns: 1, think_time: 5}}", "workload.sessions.think_time", "has one turn"),
    ("workload: {sessions: {think_time_distribution: constant}}", "think_time_distribution", "think_time is 0"),
    ("workload: {abort: {after: 5s}}", "workload.abort.after", "nobody gives up"),
    ("workload: {content: {system_prompt: {zipf: 2}}}", "content.system_prompt.zipf", "num_groups is 1"),
    ("{engine: orca-max, memory: {swap_space: 4GiB}}", "memory.swap_space", "contiguous memory is never swapped"),
    ("{engine: orca-max, scheduler: {preemption: swap}}", "scheduler.preemption", "nobody is preempted"),
    ("{engine: orca-max, scheduler: {victim: least_urgent}}", "scheduler.victim", "nobody is preempted"),
]

USED = [
    "{sampling: {theta: 2, beam_width: 2}}",
    "{sampling: {theta: 2}, requests: [{prompt_tokens: 1, output_tokens: 1, beam_width: 2}]}",
    "{sampling: {lengths: independent, n: 2}}",
    "{lengths: {type: uniform, prompt: [1, 9], output: [1, 9], correlation: 0.5}}",
    "{arrivals: {type: batch, batch_size: 2, interval: 5}}",
    "{arrivals: {type: gamma, burstiness: 2}}",
    "{sessions: {think_time: 5, think_time_distribution: constant}}",
    "{abort: {probability: 0.5, after: 5s}}",
    "{content: {system_prompt: {num_groups: 2, zipf: 2}}}",
]
"""The same keys where they count."""


@pytest.mark.parametrize("text", USED)
def test_a_key_that_counts_is_no_reason_to_warn(text: str) -> None:
    assert scenario_from_text(f"workload: {text}").warnings == ()


def test_who_says_recompute_may_have_a_swap_space() -> None:
    text = "memory: {swap_space: 4GiB}\nscheduler: {preemption: recompute}\n"
    assert scenario_from_text(text).warnings == ()


IDLE_WITH_A_TRACE = [
    ("trace-plain", {"hash_block_size": 16}, "hash_block_size", "it has no hash ids"),
    ("trace-plain", {"chars_per_token": 3}, "chars_per_token", "it has lengths, not texts (read as csv)"),
    ("trace-azure", {"sampling.lengths": "independent"}, "sampling.lengths", "a request has one sample"),
    (
        "trace-mooncake",
        {"content": {"system_prompt": {"tokens": 9}}},
        "content.system_prompt",
        "it says what is shared",
    ),
    ("trace-sessions", {"content": {"few_shot": {"num_examples": 2}}}, "content.few_shot", "it says what is shared"),
    ("trace-mooncake", {"hash_block_size": 512}, None, ""),
    ("trace-sharegpt", {"chars_per_token": 3}, None, ""),
    ("trace-azure", {"content": {"system_prompt": {"tokens": 9}}}, None, ""),
]


@pytest.mark.parametrize(("name", "values", "key", "reason"), IDLE_WITH_A_TRACE)
def test_what_a_trace_makes_idle_is_said(
    repo_root: Path, name: str, values: dict[str, object], key: str | None, reason: str
) -> None:
    changed = {f"workload.{path}": value for path, value in values.items()}
    result = run(repo_root / f"scenarios/{name}.yaml", horizon="1ms", **changed)
    told = [text.split(": ", 1)[1] for text in result.summary["warnings"] if "is not used" in text]
    assert told == ([f"workload.{key} is not used: {reason}"] if key else [])


def test_columns_of_a_trace_win_over_keys(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,n,priority\n0,4,4,2,1\n")
    workload = {"trace": str(path), "priorities": {0: 1}, "sampling": {"n": 3, "lengths": "independent"}}
    warnings = run({"workload": workload}).summary["warnings"]
    assert [text for text in warnings if "is not used" in text] == [
        f"{path}: workload.priorities is not used: it has priorities of its own",
        f"{path}: workload.sampling.n is not used: it has numbers of samples of its own",
    ]


@pytest.mark.parametrize(("text", "key", "reason"), IDLE)
def test_what_does_not_count_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, key: str, reason: str
) -> None:
    Path("s.yaml").write_text(text)
    assert main(["run", "s.yaml", "--no-plots", "--out", "o", "--set", "horizon=1ms"]) == 0
    told = capsys.readouterr().err
    assert "warning: s.yaml:1:" in told
    assert key in told
    assert reason in told
    assert any(reason in warning for warning in json.loads(Path("o/summary.json").read_text())["warnings"])


@pytest.mark.parametrize(
    "text",
    [
        "{engine: vllm-v0, memory: {swap_space: 4GiB}}",
        "{memory: {swap_space: 4GiB}, scheduler: {preemption: swap_forked}}",
        "{memory: {swap_space: 0}}",
    ],
)
def test_host_blocks_that_may_be_used_are_no_reason_to_warn(text: str) -> None:
    assert scenario_from_text(text).warnings == ()


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + k)}: &{chr(98 + k)} [{', '.join(['*' + chr(97 + k)] * 8)}]\n" for k in range(8)
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ["is empty", "a mapping of keys to values"]),
        (b"\n\n", ["is empty"]),
        (b"# nothing\n", ["holds only comments"]),
        (b"- a\n- b\n", ["s.yaml:1:1", "a mapping of keys to values", "a list"]),
        (b"just text", ["s.yaml:1:1", "the single value 'just text'"]),
        (b"name: caf\xe9\n", ["s.yaml:1:10", "0xe9", "UTF-8"]),
        ("name: chat\n".encode("utf-16"), ["UTF-8"]),
        (b"\x00\x01\x02", ["s.yaml:1:1", "U+0000"]),
        (b"name: x\n" + b"# padding\n" * 300_000, ["bytes", "at most 2,000,000"]),
        (BOMB.encode(), ["aliases", "write the values out"]),
        (b"[" * 100_000, ["nested more than 50 levels deep"]),
        (b"{" * 100_000, ["nested more than 50 levels deep"]),
        (b"- " * 100_000, ["nested more than 50 levels deep"]),
    ],
)
def test_content(here: Path, capsys: pytest.CaptureFixture[str], content: bytes, expected: list[str]) -> None:
    Path("s.yaml").write_bytes(content)
    assert_refused(capsys, ["run", "s.yaml"], "s.yaml", *expected)
    assert os.listdir(here) == ["s.yaml"]


def test_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["run", "none.yaml"], "none.yaml: cannot read the scenario: No such file")


def test_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["run", "."], "is a directory", "give the scenario file itself")


def test_fifo(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe.yaml")
    assert_refused(capsys, ["run", "pipe.yaml"], "pipe.yaml: is not a regular file", "save the scenario to a file")


def test_device(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["run", "/dev/null"], "/dev/null: is not a regular file")


SETS = [
    ("allocator.block_size", "--set allocator.block_size: must be key=value", "allocator.block_size=32"),
    ("=5", "--set =5: must be key=value", "allocator.block_size=32"),
    ("allocator..block_size=5", "'allocator..block_size' is not a key", "memory.swap_space"),
    ("allocator.block_size=0", "--set allocator.block_size=0: allocator.block_size: is 0", "at least 1"),
    ("allocator.blok_size=8", "--set allocator.blok_size=8: allocator.blok_size", "did you mean block_size?"),
    ("seed.x=5", "--set seed.x=5: seed is the single value 7", "has no keys"),
    ("workload.lengths.prompt.0.x=1", "workload.lengths.prompt[0] is the single value 1;", "has no keys"),
    ("workload.lengths.prompt.5=1", "workload.lengths.prompt is a list of 2", "an index below that"),
    ("workload={a: [}", "--set workload={a: [}", "is not valid YAML"),
    ("seed=abc", "--set seed=abc: seed: is 'abc'", "whole number"),
    ("workload.trace=x.csv", "--set workload.trace=x.csv: workload.trace: there is no file x.csv", "path that exists"),
    ("engine=orca", "--set engine=orca: engine: is 'orca'", "orca-max"),
    ("horizon=-5s", "--set horizon=-5s: horizon: is '-5s'", "above 0"),
]


@pytest.mark.parametrize(("text", "culprit", "cure"), SETS)
def test_set(here: Path, capsys: pytest.CaptureFixture[str], text: str, culprit: str, cure: str) -> None:
    Path("s.yaml").write_text(BASE)
    assert_refused(capsys, ["run", "s.yaml", "--set", text], culprit, cure)
    assert os.listdir(here) == ["s.yaml"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--engine", "pagedd"], ["engine: is 'pagedd'", "did you mean paged?"]),
        (["--record", "stps"], ["--record stps: 'stps' is no table", "steps, requests"]),
        (["--record", ","], ["--record ','", "none of them empty"]),
        (["--max-memory", "much"], ["--max-memory much", "40GiB"]),
        (["--max-memory", "-1"], ["--max-memory -1", "above 0"]),
        (["--max-memory", "10MiB"], ["needs at least", "--max-memory allows", "--record summary"]),
        (["--out", "s.yaml"], ["s.yaml: is a file", "choose another name"]),
        (["--out", "."], [".: is the working directory"]),
        (["--out", "s.yaml/x"], ["s.yaml/x", "another folder"]),
        (["--out", "mine"], ["mine: is not empty and holds no results", "choose another folder"]),
        (["--out", "/proc/x/y"], ["/proc/x/y", "choose another folder"]),
    ],
)
def test_option(here: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: list[str]) -> None:
    Path("s.yaml").write_text(BASE)
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    assert_refused(capsys, ["run", "s.yaml", "--no-plots", *args], *expected)
    assert sorted(os.listdir(here)) == ["mine", "s.yaml"]
    assert os.listdir("mine") == ["thesis.txt"]


TRACE = "arrival_s,prompt_tokens,output_tokens\n0,10,20\n1,10,30\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--to", "t.csv"], ["--to t.csv: is the file that is read", "name another"]),
        (["--to", "./x/../t.csv"], ["is the file that is read"]),
        (["--to", "link.csv"], ["--to link.csv: is the file that is read"]),
        (["--to", "none/t2.csv"], ["--to none/t2.csv: there is no folder none", "make it first"]),
        (["--to", "x"], ["--to x: is a folder"]),
        (["--to", "t.csv/y"], ["there is no folder t.csv"]),
        (["--to", "/dev/null"], ["is no regular file"]),
        (["--picture", "t.csv"], ["--picture t.csv: is the file that is read"]),
        (["--picture", "none/p.png"], ["there is no folder none"]),
        (["--to", "a" * 300], ["cannot be written"]),
        (["--chars-per-token", "1e-9", "--format", "sharegpt"], ["chars_per_token is 1e-09", "from 0.01 to 1,000"]),
    ],
)
def test_trace_output(here: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: list[str]) -> None:
    Path("t.csv").write_text(TRACE)
    Path("link.csv").symlink_to("t.csv")
    Path("x").mkdir()
    assert_refused(capsys, ["trace", "t.csv", *args], *expected)
    assert Path("t.csv").read_text() == TRACE
    assert sorted(os.listdir(here)) == ["link.csv", "t.csv", "x"]


@pytest.mark.parametrize("option", ["--engine", "--engines"])
def test_an_engine_is_blamed_on_the_option_that_named_it(
    here: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    Path("s.yaml").write_text(BASE)
    command = "run" if option == "--engine" else "compare"
    error = assert_refused(capsys, [command, "s.yaml", option, "pagd"], f"error: {option} pagd: engine: is 'pagd'")
    assert "--set" not in error
    assert_refused(
        capsys, ["explain", "s.yaml", "--request", "1", "--engine", "x"], "error: --engine x: engine: is 'x'"
    )


def test_known_ids_are_told_in_their_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(
        "workload: {requests: ["
        + ", ".join(f"{{id: r{number}, prompt_tokens: 1, output_tokens: 1}}" for number in (10, 9, 2, 1, 100))
        + "]}\n"
    )
    assert_refused(capsys, ["explain", "s.yaml", "--request", "r3"], "this workload has r1, r2, r9, ... r100")


@pytest.mark.parametrize(
    "args",
    [
        ["--set", "9" * 50_000],
        ["--set", "x" * 50_000 + "=1"],
        ["--set", "a." * 5_000 + "b=1"],
        ["--set", "." * 50_000 + "=1"],
        ["--set", "seed=" + "9" * 50_000],
        ["--set", "seed=" + "[" * 50_000],
        ["--set", "name=" + "x" * 50_000],
        ["--set", "description=" + "x" * 50_000],
        ["--engine", "x" * 50_000],
        ["--record", "x" * 50_000],
        ["--record", "," * 50_000],
    ],
    ids=lambda args: f"{args[0]} {args[1][:8]}",
)
def test_long_options_make_short_messages(here: Path, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    Path("s.yaml").write_text(BASE)
    assert len(assert_refused(capsys, ["run", "s.yaml", *args], f"error: {args[0]} ")) < 1200


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--block-size", "0"], "--block-size 0: must be 1 to 1,048,576 tokens"),
        (["--block-size", "9" * 25], "must be 1 to 1,048,576 tokens"),
        (["--hash-block-size", "-1"], "--hash-block-size -1: must be 1 to"),
        (["--capacity", "-1"], "--capacity -1: must be 1 to"),
        (["--capacity", "9" * 30], "must be 1 to"),
        (["--capacity", "much"], "--capacity much: it is a number of blocks"),
    ],
)
def test_trace_option(here: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str) -> None:
    Path("t.csv").write_text(TRACE)
    assert_refused(capsys, ["trace", "t.csv", *args], expected)


def test_compare_names_an_unknown_engine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(BASE)
    assert_refused(capsys, ["compare", "s.yaml", "--engines", "paged,orka-max"], "'orka-max'", "did you mean orca-max?")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("[1]", ["config.json"]),
        ("{", ["config.json"]),
        ("{}", ["num_hidden_layers"]),
        ("[" * 100_000, ["config.json"]),
        ('{"num_hidden_layers": "many"}', ["num_hidden_layers", "'many'"]),
        ('{"num_hidden_layers": 2, "layer_types": 5, "dtype": "float16"}', ["model"]),
        ('{"num_hidden_layers": -2}', ["num_hidden_layers", "-2"]),
    ],
)
def test_model_config(here: Path, capsys: pytest.CaptureFixture[str], config: str, expected: list[str]) -> None:
    Path("config.json").write_text(config)
    Path("s.yaml").write_text(replaced("llama-2-7b", "config.json"))
    assert_refused(capsys, ["validate", "s.yaml"], *expected)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nowhere_to_be_found:Thing", ["cannot import 'nowhere_to_be_found'", "working directory"]),
        ("json:Thing", ["module 'json' has no 'Thing'"]),
        ("json:loads", ["allocator: json:loads cannot be made"]),
    ],
)
def test_own_class(here: Path, capsys: pytest.CaptureFixture[str], path: str, expected: list[str]) -> None:
    Path("s.yaml").write_text(replaced("{block_size: 16, watermark: 0.01}", f"{{type: '{path}'}}"))
    assert main(["validate", "s.yaml"]) == 0
    capsys.readouterr()
    assert_refused(capsys, ["run", "s.yaml"], "allocator", *expected)


def test_validate_never_imports(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("trap_module.py").write_text("raise SystemExit('imported')")
    Path("s.yaml").write_text(replaced("{block_size: 16, watermark: 0.01}", "{type: 'trap_module:Thing', quantum: 64}"))
    assert main(["validate", "s.yaml"]) == 0


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("{vary: {allocator.block_size: [8, foo]}}", ["1 of 2 combinations", "allocator.block_size: is 'foo'"]),
        ("{vary: {allocator.block_size: 8:1:1}}", ["sweep.vary.allocator.block_size", "low must not exceed high"]),
        ("{vary: {allocator.block_size: []}}", ["sweep.vary.allocator.block_size", "has an empty value"]),
        (
            "{vary: {gpu: [a100-80gb, a100-81gb]}}",
            ["1 of 2 combinations", "unknown GPU", "did you mean a100-80gb"],
        ),
        ("{vary: {seed: [1, 2]}}", ["seed is not varied like other keys", "seeds: [1, 2, 7]"]),
        ("{vary: {allocator.block_size: [8, 16], allocator.watermark: [0]}, zip: true}", ["equally long"]),
        ("{vary: {allocator.sliding_window: [160, 100]}}", ["is 100; must be a multiple of block_size (16)"]),
    ],
)
def test_validate_looks_at_every_point_of_a_sweep(
    here: Path, capsys: pytest.CaptureFixture[str], block: str, expected: list[str]
) -> None:
    (here / "s.yaml").write_text(replaced("horizon: null", f"sweep: {block}"))
    said = assert_refused(capsys, ["validate", "s.yaml"], *expected)
    assert assert_refused(capsys, ["sweep", "s.yaml"]) == said
    assert not (here / "results").exists()


def test_several_problems_are_told_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = replaced("block_size: 16", "block_size: 0").replace("max_num_seqs: 256", "max_num_seqs: -1")
    Path("s.yaml").write_text(text)
    error = assert_refused(capsys, ["validate", "s.yaml"], "s.yaml:7:13", "s.yaml:8:13")
    assert len(error.strip().splitlines()) == 2


@pytest.mark.parametrize("engine", ["orca-max", "static", "vllm-v1", "vllm-v1-async"])
def test_no_beam_search_there(here: Path, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    Path("s.yaml").write_text(replaced("{n: 1}", "{beam_width: 4}"))
    args = ["run", "s.yaml", "--engine", engine]
    assert_refused(capsys, args, "workload.sampling.beam_width: is 4", "no beam search", "use engine paged or vllm-v0")


def test_a_prompt_step_holds_a_whole_prompt(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is the model's where the scenario gives none."""
    text = replaced(", max_model_len: 2048", "").replace("8192", "2048")
    Path("s.yaml").write_text(text)
    args = ["validate", "s.yaml", "--engine", "vllm-v0"]
    assert_refused(capsys, args, "max_num_batched_tokens: is 2048", "at least max_model_len (4096)")


READERS = [
    ["journal", "{}"],
    ["conform", "{}"],
    ["trace", "{}"],
    ["calibrate", "{}"],
    ["calibrate", "--profile", "a100", "--test", "{}"],
    ["validate-run", ".", "--workload", "{}"],
    ["capacity", "--model", "{}"],
    ["plot", "{}"],
    ["report", "{}"],
]


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/full", "/proc/self/mem", "fifo", "loop", "none"])
@pytest.mark.parametrize("args", READERS, ids=lambda args: args[0] + (args[1] if args[1] != "{}" else ""))
def test_what_is_no_file_is_not_read(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], place: str
) -> None:
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    assert_refused(capsys, [arg.format(place) for arg in args])


@pytest.mark.parametrize("content", ["[" * 200_000, "9" * 6000, "null", "[]", "{}", b"\xff\xfe", b""])
def test_case_file(here: Path, capsys: pytest.CaptureFixture[str], content: str | bytes) -> None:
    Path("case.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(capsys, ["conform", "case.json"], "case.json: ")


@pytest.mark.parametrize("key", ["lora", "prompt_token_ids", "output_token_ids", "arrival_step", "id"])
@pytest.mark.parametrize("value", [5.5, -1, None, {}, [None], 10**30])
def test_case_with_a_wrong_value(here: Path, capsys: pytest.CaptureFixture[str], key: str, value: object) -> None:
    """An answer or a message; a case may also disagree (1)."""
    case = json.loads((Path(__file__).parent / "golden/v1/008.json").read_text())
    case["requests"][0][key] = value
    Path("case.json").write_text(json.dumps(case))
    assert main(["conform", "case.json"]) in (1, 2)
    assert "fault of kvsim" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    (folder / "s.yaml").write_text(BASE)
    assert main(["run", str(folder / "s.yaml"), "--no-plots", "--out", str(folder / "run")]) == 0
    return folder / "run"


DAMAGE = [
    ("summary.json", "{"),
    ("summary.json", "[]"),
    ("summary.json", "[" * 200_000),
    ("summary.json", json.dumps({"name": 1, "engine": [], "kv": 5, "warnings": 3})),
    ("steps.csv", "a,b\n1\n"),
    ("steps.csv", "\xff\x00"),
    ("requests.csv", "x" * 200_000),
    ("requests.csv", 'request_id\n"'),
    ("compare.csv", "x\n1\n"),
    ("compare.csv", "engine\n../../etc\n"),
    ("sweep.csv", ""),
    ("sweep.csv", "seed,status\n1,ok\n"),
    ("scenario.yaml", "["),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE, ids=lambda text: text[:30])
@pytest.mark.parametrize("command", ["plot", "report"])
def test_damaged_results(
    here: Path, capsys: pytest.CaptureFixture[str], results: Path, command: str, name: str, content: str
) -> None:
    """Drawn without what is damaged, or refused with the folder's name."""
    shutil.copytree(results, "r")
    Path("r", name).write_text(content, encoding="latin-1")
    code = main([command, "r"])
    error = capsys.readouterr().err
    assert code in (0, 2), error
    assert "fault of kvsim" not in error
    assert code == 0 or error.startswith("error: r")


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_without_an_end(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr("kvsim.workload.trace_files.MAX_LINE_CHARS", 1000)
    for row in ("x" * 5000, '0,1,"' + "x" * 5000, '{"timestamp": ' + "1" * 5000):
        data = (TRACE + row).encode()
        Path("t.csv").write_bytes(gzip.compress(data) if packed else data)
        assert_refused(capsys, ["trace", "t.csv"], "t.csv: has a line of more than 1,000 characters")


def test_a_list_without_an_end(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.workload.trace_json.MAX_LINE_CHARS", 1000)
    args = ["trace", "t.json", "--format", "sharegpt"]
    Path("t.json").write_text('[{"a": "' + "x" * 5000)
    assert_refused(capsys, args, "t.json: has an entry of more than 1,000 characters in its list")
    Path("t.json").write_text("[" + " \n" * 5000)
    assert_refused(capsys, args, "t.json: is no JSON: entry 1: Expecting value")


def kvsim(*args: str, redirect: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell, as somebody with unusual streams would run it."""
    command = f"{shlex.quote(sys.executable)} -m kvsim {shlex.join(args)} {redirect}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, errors="replace", env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("args", "redirect", "code"),
    [
        (["schema"], ">&-", 0),
        (["schema"], "2>&-", 0),
        (["schema"], "<&-", 0),
        (["schema"], ">/dev/full", 2),
        (["run", "none.yaml"], ">&- 2>&-", 2),
        (["run", "s.yaml", "--no-plots", "--out", "o"], ">&- 2>&-", 0),
        (["schema"], "| head -1; exit ${PIPESTATUS[0]}", 141),
    ],
)
def test_streams_that_are_closed(here: Path, args: list[str], redirect: str, code: int) -> None:
    Path("s.yaml").write_text(BASE)
    done = kvsim(*args, redirect=redirect)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin1", "cp437"])
def test_a_terminal_that_lacks_letters(here: Path, encoding: str) -> None:
    """`–` and `±` are printed as `?` there."""
    Path("s.yaml").write_text(BASE)
    args = ["compare", "s.yaml", "--engines", "paged,orca-max", "--no-plots", "--out", "c"]
    done = kvsim(*args, PYTHONIOENCODING=encoding, LC_ALL="C", TERM="dumb", NO_COLOR="1")
    assert done.returncode == 0, done
    assert "orca-max" in done.stdout
    done = kvsim("run", "caf\u00e9-\u2013.yaml", PYTHONIOENCODING=encoding, LC_ALL="C.UTF-8")
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: caf")


def test_a_working_directory_that_is_gone(here: Path) -> None:
    Path("s.yaml").write_text(BASE)
    redirect = f"; cd {here} && mkdir gone && cd gone && rmdir ../gone && "
    redirect += f"{shlex.quote(sys.executable)} -m kvsim run {here}/s.yaml --no-plots"
    done = kvsim("--version", redirect=redirect, PYTHONPATH=str(Path(__file__).parent.parent))
    assert done.returncode == 2, done
    assert "error: results/chat: cannot be used for results" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(BASE)
    Path("locked").mkdir()
    Path("locked").chmod(0o500)
    assert_refused(capsys, ["run", "s.yaml", "--no-plots", "--out", "locked/o"], "locked/o", "Permission denied")
    Path("s.yaml").chmod(0)
    assert_refused(capsys, ["run", "s.yaml"], "s.yaml: cannot read the scenario: Permission denied")


def test_json_goes_nowhere_on_errors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(replaced("16GiB", "lots"))
    assert_refused(capsys, ["run", "s.yaml", "--json"], "kv_cache_memory_bytes")


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["run"], ["run", "--nonsense", "x"], ["nonsense"], ["run", "a", "b"]):
        assert main(args) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_request_larger_than_the_pool_is_told_in_requests_csv(here: Path) -> None:
    """Not an error of the run: the request is rejected, with both numbers."""
    Path("s.yaml").write_text(
        "memory: {num_gpu_blocks_override: 50}\n"
        "workload: {requests: [{arrival_s: 0, prompt_tokens: 801, output_tokens: 1}]}\n"
    )
    assert main(["run", "s.yaml", "--no-plots", "--out", "o"]) == 0
    rows = Path("o/requests.csv").read_text()
    assert "rejected" in rows
    assert "51" in rows
    assert "50" in rows
    assert json.loads(Path("o/summary.json").read_text())["num_rejected"] == 1


SMALL_RUN = {"workload": {"requests": [{"prompt_tokens": 1, "output_tokens": 1}]}}
CALLS = [
    (lambda: run(None), "the scenario is None; must be the path of a YAML file, or a dict"),
    (lambda: compare([SMALL_RUN]), r"the scenario is \[\{.*; must be the path of a YAML file, or a dict"),
    (lambda: sweep(3, {"seed": [1]}), "the scenario is 3; must be the path of a YAML file, or a dict"),
    (
        lambda: sweep(SMALL_RUN, ["seed"]),
        r"vary is \['seed'\]; must be a mapping of keys to values, such as \{'all",
    ),
    (lambda: run(SMALL_RUN, options={"check": True}), r"options is \{'check': True\}; must be kvsim.Options"),
    (
        lambda: run(SMALL_RUN, check=True),
        r"check=True: is no key of a scenario; say options=kvsim.Options\(check=",
    ),
    (lambda: compare(SMALL_RUN, plots=True), r"plots=True: is no key .* say options=kvsim.Options\(plots=True\)"),
    (
        lambda: Options(record=("step",)),
        r"record is \('step',\); must be some of summary, steps, requests, as a tup",
    ),
    (lambda: Options(record="steps"), "record is 'steps'; must be some of summary, steps, requests, as a tuple"),
]


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_a_call_that_cannot_be_meant_is_told_as_one_message(call: Callable[[], object], expected: str) -> None:
    with pytest.raises(ScenarioError, match=expected):
        call()


def test_a_path_of_any_kind_names_a_scenario(tmp_path: Path) -> None:
    class Elsewhere:
        def __fspath__(self) -> str:
            return str(tmp_path / "a.yaml")

    (tmp_path / "a.yaml").write_text(json.dumps(SMALL_RUN))
    options = Options(record=("summary",))
    for path in (tmp_path / "a.yaml", str(tmp_path / "a.yaml"), Elsewhere()):
        assert run(path, options=options, record=["steps"]).summary["completed"] == 1  # type: ignore[arg-type]
