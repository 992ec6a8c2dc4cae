"""Who wins, and where a value came from (K72); presets; one file for every engine; the resolved file reproduces."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.scenario.fields import Custom
from kvsim.scenario.layout import blocks, json_schema
from kvsim.scenario.presets import PRESETS
from kvsim.scenario.resolve import load_scenario, scenario_from_dict, scenario_from_text
from kvsim.scenario.schema import ENGINES, ContiguousMemory, PagedMemory, Scenario
from kvsim.scenario.workload_schema import PresetLengths, Workload
from kvsim.types import ScenarioError

DESIGN = """\
name: chat
seed: 7
engine: paged                      # a preset, or allocator: and scheduler: in full
model: llama-2-7b
gpu: a100-80gb
memory:
  gpu_memory_utilization: 0.9
  swap_space: 4GiB
allocator: {block_size: 16, watermark: 0.01, enable_prefix_caching: false}
scheduler: {max_num_seqs: 256, max_num_batched_tokens: 8192, max_model_len: 2048, preemption: recompute}
workload:
  num_requests: 2000
  arrivals: {type: poisson, request_rate: 4.0}
  lengths: {type: preset, name: sharegpt}
  sampling: {n: 1}
cost: {type: linear, step_ms: 6.0, prefill_token_us: 18, decode_us: 0, context_token_ns: 45}
slo: {ttft: 2s, tpot: 100ms}
horizon: null
"""


def test_the_documented_scenario() -> None:
    scenario = scenario_from_text(DESIGN).scenario
    assert scenario.memory.swap_space == 4 * 2**30
    assert scenario.slo.ttft == 2 * 10**9
    assert scenario.slo.tpot == 10**8
    assert isinstance(scenario.allocator, PagedMemory)
    assert isinstance(scenario.workload, Workload)
    assert scenario.workload.lengths == PresetLengths(type="preset", name="sharegpt")


def test_k72_file_then_command_line() -> None:
    """A file with horizon: 10 uses 10; a flag of 20 wins, and is shown as from the command line."""
    from_file = scenario_from_text("horizon: 10\n")
    assert from_file.scenario.horizon == 10 * 10**9
    assert "horizon: 10  # file" in from_file.to_yaml()
    from_flag = scenario_from_text("horizon: 10\n", overrides=["horizon=20"])
    assert from_flag.scenario.horizon == 20 * 10**9
    assert "horizon: 20  # command line" in from_flag.to_yaml()
    assert "horizon: null  # default" in scenario_from_text("seed: 1\n").to_yaml()


def test_k72_a_misspelt_key() -> None:
    with pytest.raises(ScenarioError, match=r"scenario.yaml:2:3: allocator.blok_size.*did you mean block_size"):
        scenario_from_text("allocator:\n  blok_size: 32\nscheduler: {max_num_seqs: 4}\n")


def test_a_block_that_is_replaced_brings_its_own_values_only() -> None:
    resolved = scenario_from_text("allocator: {block_size: 8, free_list: lifo}\nscheduler: {max_num_seqs: 4}\n")
    changed = resolved.with_values({"allocator": {"block_size": 32}, "scheduler.max_num_seqs": 8})
    origins = {name: changed.origin(("allocator", name)) for name in ("block_size", "free_list", "watermark")}
    assert origins == {"block_size": "command line", "free_list": "default", "watermark": "default"}
    assert changed.scenario.allocator.free_list == "fifo"
    assert changed.origin(("scheduler", "max_num_seqs")) == "command line"
    again = changed.with_values({"allocator.free_list": "lru"})
    assert again.origin(("allocator", "free_list")) == "command line"


def test_every_value_has_an_origin() -> None:
    text = scenario_from_text(DESIGN, overrides=["allocator.block_size=32"]).to_yaml()
    lines = text.splitlines()[1:]
    origins = {"default", "file", "command line", "engine paged"}
    assert all(line.endswith(":") or line.rsplit("  # ", 1)[1] in origins for line in lines)
    assert "  block_size: 32  # command line" in lines
    assert "  swap_space: 4GiB  # file" in lines
    assert "  type: paged  # engine paged" in lines


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resolved_scenario_resolves_to_itself(engine: str) -> None:
    first = scenario_from_text(DESIGN, overrides=[f"engine={engine}"])
    again = scenario_from_text(first.to_yaml())
    assert again.scenario == first.scenario
    assert again.to_yaml() == first.to_yaml()


@given(
    st.dictionaries(
        st.sampled_from(["name", "description", "seed", "horizon", "record", "timeline", "kv_cache_dtype"]),
        st.one_of(st.text(max_size=30), st.integers(), st.floats(), st.booleans(), st.none()),
    )
)
def test_what_is_accepted_resolves_to_itself(data: dict[str, object]) -> None:
    try:
        first = scenario_from_dict(data)
    except ScenarioError:
        return
    again = scenario_from_text(first.to_yaml())
    assert again.scenario == first.scenario


def test_an_override_of_a_resolved_scenario_is_from_the_command_line() -> None:
    resolved = scenario_from_text("seed: 3\n").to_yaml()
    again = scenario_from_text(resolved, overrides=["seed=4"]).to_yaml()
    assert "seed: 4  # command line" in again
    assert "engine: paged  # default" in again


@pytest.mark.parametrize("engine", ENGINES)
def test_one_file_serves_every_engine(engine: str) -> None:
    """Keys that an engine does not have are left out, and said to be."""
    resolved = scenario_from_text(DESIGN).with_engine(engine)
    assert resolved.scenario.engine == engine
    is_contiguous = isinstance(resolved.scenario.allocator, ContiguousMemory)
    assert is_contiguous == (PRESETS[engine]["allocator"]["type"] == "contiguous")
    assert any("allocator.watermark: not used" in text for text in resolved.warnings) == is_contiguous


def test_an_engine_chosen_late_gets_its_own_parts() -> None:
    text = "allocator: {type: 'mine:Thing', quantum: 64}\nscheduler: {max_num_seqs: 8}\n"
    resolved = scenario_from_text(text).with_engine("orca-pow2")
    assert isinstance(resolved.scenario.allocator, ContiguousMemory)
    assert getattr(resolved.scenario.scheduler, "reservation", None) == "pow2"
    left_out = "allocator.type: mine:Thing is not used: engine orca-pow2 brings its own; to keep it, say --set"
    assert any(left_out in text for text in resolved.warnings)
    assert "type: contiguous  # engine orca-pow2" in resolved.to_yaml()


def test_own_code_that_is_named_with_the_engine_stays() -> None:
    text = "allocator: {type: 'mine:Thing', quantum: 64}\n"
    resolved = scenario_from_text(text, overrides=["engine=no-evict", "allocator.type=mine:Thing"])
    assert resolved.scenario.allocator == Custom(type="mine:Thing", quantum=64)  # type: ignore[call-arg]
    assert resolved.warnings == ()


def test_the_file_beats_the_preset() -> None:
    resolved = scenario_from_text("engine: vllm-v1\nallocator: {enable_prefix_caching: false}\n")
    assert isinstance(resolved.scenario.allocator, PagedMemory)
    assert not resolved.scenario.allocator.enable_prefix_caching
    assert resolved.scenario.allocator.free_list == "lru"
    assert resolved.origin(("allocator", "free_list")) == "engine vllm-v1"
    assert resolved.origin(("allocator", "enable_prefix_caching")) == "file"


def test_with_values() -> None:
    resolved = scenario_from_text(DESIGN).with_values({"allocator.block_size": 64, "workload.arrivals.request_rate": 9})
    assert resolved.scenario.allocator.block_size == 64  # type: ignore[union-attr]
    with pytest.raises(ScenarioError, match="did you mean block_size"):
        resolved.with_values({"allocator.blok_size": 64})


def test_a_type_set_on_the_command_line_drops_keys_of_the_old_one() -> None:
    resolved = scenario_from_text(DESIGN, overrides=["cost.type=kernels"])
    assert resolved.scenario.cost.type == "kernels"
    assert any("cost.step_ms: not used" in text for text in resolved.warnings)


def test_a_block_whose_lines_are_commented_out_is_left_out() -> None:
    assert scenario_from_text("allocator:\n  # block_size: 32\nseed: 1\n").scenario.allocator == PagedMemory()


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    (folder / "s.yaml").write_text("workload: {trace: t.csv}\n")
    monkeypatch.chdir(tmp_path)
    resolved = load_scenario(Path("folder/s.yaml"))
    assert resolved.scenario.workload.trace == "folder/t.csv"  # type: ignore[union-attr]
    # The resolved scenario lies elsewhere, and finds the same file from the same working directory.
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "scenario.yaml").write_text(resolved.to_yaml())
    assert load_scenario(Path("results/scenario.yaml")).scenario == resolved.scenario


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == set(Scenario.model_fields)
    described = schema["$defs"]["PagedMemory"]["properties"]["block_size"]
    assert described["description"] == "Tokens per block."
    assert described["minimum"] == 1
    assert ("workload", "arrivals") in blocks()


UNPRICED = {"num_hidden_layers": 4, "num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 16}
UNEVEN = UNPRICED | {"num_key_value_heads_per_layer": [4, 4, 2, 2]}


@pytest.mark.parametrize(
    "cost", ["{type: kernels, profile: a100}", "{type: roofline, peak_tflops: 300, memory_bandwidth_gb_s: 1500}"]
)
@pytest.mark.parametrize(
    ("config", "message"),
    [(UNPRICED, "model: 'm' lacks hidden_size: "), (UNEVEN, "model: 'm' has layers of unequally many KV heads: ")],
)
def test_a_model_that_kernels_cannot_price_is_not_valid(tmp_path, cost, config, message):
    (tmp_path / "m.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    text = f"model: {tmp_path}/m.json\ncost: {cost}\nworkload: {{num_requests: 1, rate: 1}}\nmemory: "
    (tmp_path / "s.yaml").write_text(text + "{num_gpu_blocks_override: 100}\n")
    with pytest.raises(ScenarioError, match=re.escape(message)):
        load_scenario(tmp_path / "s.yaml")


@pytest.mark.parametrize(
    ("engine", "is_split"),
    [("vllm-v1", True), ("vllm-v1-async", True), ("orca-max", True), ("orca-oracle", True), ("paged", False),
     ("static", False), ("no-evict", False), ("vllm-v0", False)],
)  # fmt: skip
def test_samples_that_run_each_for_itself_need_no_seats_at_once(engine, is_split):
    """Three samples, two seats: an engine that runs them one by one serves them, and nothing else is said."""
    scenario = {
        "engine": engine,
        "memory": {"num_gpu_blocks_override": 30},
        "scheduler": {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 64},
        "workload": {"requests": [{"prompt_tokens": 6, "output_tokens": 2, "n": 3}]},
    }
    summary = kvsim.run(scenario).summary
    assert summary["completed"] == is_split
    assert ("it will be rejected" in str(summary["warnings"])) is not is_split
    drawn = {**scenario, "workload": {"num_requests": 1, "sampling": {"n": 3}}}
    if is_split:
        scenario_from_dict(drawn)
    else:
        with pytest.raises(ScenarioError, match=r"sampling\.n: is 3, above scheduler\.max_num_seqs \(2\)"):
            scenario_from_dict(drawn)


ROOFLINE = "{type: roofline, peak_tflops: 300, memory_bandwidth_gb_s: 2000}"


@pytest.mark.parametrize(
    ("cost", "overrides", "varied"),
    [
        ("{type: linear}", ["gpu=h100-80gb"], "gpu"),
        ("{type: linear}", ["model=opt-13b", "tensor_parallel_size=2"], "model and tensor_parallel_size"),
        ("{type: linear, step_ms: 9}", ["kv_cache_dtype=fp8"], "kv_cache_dtype"),
        ("{type: linear}", ["gpu=h100-80gb", "cost.swap_block_us=5"], "gpu"),
        (ROOFLINE, ["gpu=h100-80gb", "model=opt-13b"], "gpu"),
        ("{type: kernels, profile: a100}", ["gpu=h100-80gb"], "gpu"),
        ("{type: linear}", [], None),
        ("{type: linear}", ["allocator.block_size=8"], None),
        ("{type: linear}", ["gpu=h100-80gb", "cost.step_ms=5"], None),
        ("{type: linear}", ["gpu=h100-80gb", "cost={type: kernels}"], None),
        (ROOFLINE, ["model=opt-13b", "tensor_parallel_size=2"], None),
        (ROOFLINE, ["gpu=h100-80gb", "cost.peak_tflops=900"], None),
        ("{type: kernels}", ["gpu=h100-80gb", "model=opt-13b"], None),
        ("{type: kernels, profile: a100}", ["gpu=h100-80gb", "cost.profile=h100"], None),
    ],
)
def test_hardware_that_is_varied_and_not_priced(cost: str, overrides: list[str], varied: str | None) -> None:
    """Told to who varies it; a file that names a model or a GPU of its own is left in peace."""
    text = f"gpu: a100-40gb\nmodel: llama-3.1-8b\ncost: {cost}\n"
    told = [text for text in scenario_from_text(text, overrides=overrides).warnings if "step times" in text]
    assert len(told) == (varied is not None)
    if varied is not None:
        assert told[0].startswith("scenario.yaml:3:1: cost: is ")
        assert f"step times are the same for every {varied}; " in told[0]


def test_a_block_in_an_override_takes_no_values_of_an_engine_along() -> None:
    """One block for several engines: each lays its own preset under it, and the caller's stays as it was."""
    block = {"block_size": 32}
    scenario = {
        "memory": {"num_gpu_blocks_override": 64},
        "scheduler": {"max_model_len": 64},
        "workload": {"requests": [{"prompt_tokens": 8, "output_tokens": 4}]},
    }
    compared = kvsim.compare(scenario, ["paged", "vllm-v1", "no-evict", "orca-max"], allocator=block)
    sizes = {engine: run.summary["num_gpu_blocks"] for engine, run in compared.runs.items()}
    assert sizes == {"paged": 64, "vllm-v1": 63, "no-evict": 64, "orca-max": 64 * 32}
    assert all(run.summary["warnings"] == [] for run in compared.runs.values())
    assert block == {"block_size": 32}
    resolved = scenario_from_text("engine: vllm-v1\n", overrides=["allocator={block_size: 32}"])
    assert resolved.with_engine("no-evict").scenario.allocator.null_block is False


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            "num_gpu_blocks_override: 1",
            "num_gpu_blocks_override: is 1; must be at least 2 blocks, one of which is the null",
        ),
        ("kv_cache_memory_bytes: 8MiB", "and 2 must fit, one of which is the null block: give it at least 16,777,216"),
    ],
)
def test_a_pool_of_nothing_but_the_null_block_is_called_that(memory: str, words: str) -> None:
    """Llama-2-7B at 16 tokens a block: 8 MiB are one block, and vllm-v1 sets it aside."""
    with pytest.raises(ScenarioError, match=words):
        scenario_from_text(f"engine: vllm-v1\nmemory: {{{memory}}}\n")
    assert scenario_from_text(f"memory: {{{memory}}}\n").scenario.engine == "paged"


@pytest.mark.parametrize("rate", [-(10**400), -(10**5000)], ids=["400 digits", "5000 digits"])
def test_a_rate_far_below_0_is_not_infinite(rate: int) -> None:
    """Nor need it be one that Python writes out."""
    with pytest.raises(ScenarioError, match=r"workload.arrivals.request_rate: is .*; must be above 0"):
        scenario_from_dict({"workload": {"arrivals": {"request_rate": rate}}})


@pytest.mark.parametrize(("prompt", "is_told"), [(99, False), (100, True)])
def test_prompts_that_reach_the_limit_are_foretold_to_be_rejected(prompt: int, is_told: bool) -> None:
    """One token below it a request completes, its output cut to one token."""
    data = {
        "scheduler": {"max_model_len": 100},
        "workload": {"num_requests": 2, "lengths": {"type": "fixed", "prompt": prompt, "output": 50}},
        "memory": {"num_gpu_blocks_override": 50},
    }
    assert any("all will be rejected" in text for text in scenario_from_dict(data).warnings) is is_told
    assert kvsim.run(data).summary["num_rejected"] == 2 * is_told


@pytest.mark.parametrize("changes", [{"sampling": {"n": 4}}, {"sampling": {"beam_width": 4}}])
@pytest.mark.parametrize("engine", ["paged", "vllm-v1", "orca-max"])
def test_written_requests_ask_for_widths_of_their_own(engine: str, changes: dict[str, dict[str, int]]) -> None:
    """What `sampling` says beside them is idle, and no reason to refuse them."""
    data = {
        "engine": engine,
        "scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64},
        "workload": {"requests": [{"prompt_tokens": 5, "output_tokens": 2}], **changes},
        "memory": {"num_gpu_blocks_override": 50},
    }
    (key,) = changes["sampling"]
    assert any(f"workload.sampling.{key}: is not used" in text for text in scenario_from_dict(data).warnings)
    assert kvsim.run(data).summary["completed"] == 1


@pytest.mark.parametrize(
    ("engine", "limit", "is_told"), [("paged", 310, False), ("vllm-v1", 305, False), ("vllm-v1", 306, True)]
)
def test_a_null_block_holds_no_request(engine: str, limit: int, is_told: bool) -> None:
    """Of 20 blocks of 16 tokens vllm-v1 has 19: 304 tokens, and a request of 305 stores that many."""
    data = {
        "engine": engine,
        "scheduler": {"max_model_len": limit},
        "workload": {"num_requests": 1, "lengths": {"type": "fixed", "prompt": 300, "output": limit - 300}},
        "memory": {"num_gpu_blocks_override": 20},
    }
    told = f"is {limit}, and the KV cache holds 304 tokens: longer requests will be rejected"
    assert any(told in text for text in scenario_from_dict(data).warnings) is is_told
    assert kvsim.run(data).summary["num_rejected"] == is_told
