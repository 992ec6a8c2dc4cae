"""Capacity: reported cases, logged start-ups, and the errors that say which number to change."""

from __future__ import annotations

import csv
import json
import re
from types import SimpleNamespace

import pytest

from kvsim.capacity import capacity, estimate_activation_bytes, kv_cache_bytes
from kvsim.catalog import GIB, load_gpu, load_model
from kvsim.cli import main
from kvsim.memory.geometry import DS_MLA, PACKED_BYTES, GeometryError, ModelGeometry, num_gpu_blocks
from kvsim.memory.weights import count_params
from kvsim.runs import run
from kvsim.types import ScenarioError

PLANNER = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "float16"}


def plan(kv_gib, max_model_len, **flags):
    return capacity(PLANNER, kv_cache_memory_bytes=int(kv_gib * GIB), max_model_len=max_model_len, **flags)


def test_k45_from_bytes_to_concurrency():
    report = plan(3.8125, 20_000)
    assert (report.bytes_per_token, report.block_bytes) == (131_072, 2 << 20)
    assert (report.num_gpu_blocks, report.num_tokens, report.fits) == (1952, 31_232, True)
    assert report.start_up_lines == (
        "GPU KV cache size: 31,232 tokens",
        "Maximum concurrency for 20,000 tokens per request: 1.56x",
    )


def test_k45_what_does_not_fit_says_why_and_what_to_change():
    report = plan(2.88671875, 29_000)
    assert (report.num_gpu_blocks, report.num_tokens, report.num_blocks_per_request) == (1478, 23_648, 1813)
    assert f"{report.max_concurrency:.2f}x" == "0.82x"
    assert not report.fits
    assert "29000 > 23648" in report.problem
    assert "one such request needs 1813 blocks" in report.problem
    assert "lower max_model_len to 23648 or less" in report.problem
    assert plan(2.88671875, 23_648).fits
    assert not plan(2.88671875, 23_649).fits


def test_k47_blocks_of_a_request_are_rounded_up():
    report = capacity(PLANNER, num_gpu_blocks_override=77_088 // 16, max_model_len=1000)
    assert report.num_gpu_blocks == 4818
    assert report.num_blocks_per_request == 63
    assert int(report.max_concurrency) == 4818 // 63 == 76
    assert 77 * 63 > 4818 >= 76 * 63


def test_the_textbook_40_gib():
    assert num_gpu_blocks(40 * GIB, 32, load_model("llama-2-7b").bytes_per_token()) == 2560
    assert capacity("llama-2-7b", kv_cache_memory_bytes=40 * GIB, block_size=32).num_gpu_blocks == 2560


def test_fp8_doubles_the_blocks_exactly():
    assert plan(4, 2048, kv_cache_dtype="fp8").num_gpu_blocks == 2 * plan(4, 2048).num_gpu_blocks == 4096


def test_every_term_can_be_given():
    report = capacity(
        PLANNER,
        {
            "name": "g",
            "total_memory_gib": 10,
            "memory_bandwidth_gb_s": 1,
            "peak_fp16_tflops": 1,
            "l2_mib": 1,
            "pcie_gb_s": 1,
        },
        gpu_memory_utilization=0.5,
        max_model_len=100,
        weight_bytes=2 * GIB,
        activation_bytes=GIB // 2,
        non_torch_bytes=GIB // 2,
    )
    assert report.kv_bytes == 2 * GIB
    assert report.num_gpu_blocks == 1024
    assert report.num_squeezing_blocks == 5 * 512
    assert report.num_blocks_with_head_room == 819


def test_more_ranks_share_heads_and_weights():
    one, two = (capacity("llama-2-70b", "h200", tensor_parallel_size=size, max_model_len=4096) for size in (1, 2))
    assert one.bytes_per_token == 2 * two.bytes_per_token
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=1e-3)


def test_stages_share_out_the_layers():
    """Llama-3.1-405B on 8 x 2 GPUs: 63 layers of one KV head of 128, half of the matrices and one embedding, over 8."""
    whole = load_model("llama-3.1-405b")
    report = capacity(whole, "h100-80gb", tensor_parallel_size=8, pipeline_parallel_size=2, max_model_len=32_768)
    assert report.bytes_per_token == 2 * 63 * 128 * 2
    count = count_params(whole)
    assert count.embedding == 2 * 128_256 * 16_384
    norms = (63 * 2 + 1) * 16_384
    assert report.weight_bytes == 2 * (count.linear // 2 + count.embedding // 2) // 8 + 2 * norms
    assert "one of 8 ranks, one of 2 stages" in report.render()


def test_uneven_stages_are_as_long_as_the_longest():
    """80 layers over 3 stages: 27, 27, 26."""
    report = capacity("llama-3.1-70b", kv_cache_memory_bytes=10 * GIB, pipeline_parallel_size=3)
    assert report.bytes_per_token == 2 * 27 * 8 * 128 * 2


HYBRID = {"num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 64, "dtype": "float16"}


@pytest.mark.parametrize(
    ("layers", "stages", "kept", "first", "last"),
    [
        # Attention in layers 4, 12, 20 and 28.
        ({"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}, 2, 2, 0, 15),
        ({"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}, 3, 2, 11, 21),
        # 4 + 3 layers: what is left over is not the last stage's.
        ({"num_hidden_layers": 7, "hybrid_override_pattern": "MMMM***"}, 2, 3, 4, 6),
        ({"num_hidden_layers": 7, "hybrid_override_pattern": "***M*MM"}, 2, 3, 0, 3),
        # 2 + 3 + 3 + 2
        ({"num_hidden_layers": 10, "full_attn_idxs": [1, 2, 4, 7, 8, 9]}, 4, 2, 2, 4),
        ({"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}, 4, 1, 1, 1),
        # 2 + 2 + 3 + 2, each with one that keeps KV but the first: the longest has the most weights.
        ({"num_hidden_layers": 9, "layer_types": ["conv", "conv", "full_attention"] * 3}, 4, 1, 4, 6),
    ],
)
def test_of_unequal_stages_the_one_that_keeps_most_counts(layers, stages, kept, first, last):
    whole = {**HYBRID, **layers, "mamba_d_state": 16}
    report = capacity(whole, kv_cache_memory_bytes=GIB, pipeline_parallel_size=stages, max_model_len=1024)
    assert report.bytes_per_token == kept * 2 * 2 * 64 * 2
    of = f"layers {first} to {last}" if first < last else f"layer {first}"
    assert f"this is the one of {of} (from 0), which keeps the most" in report.notes[0]
    num_layers = last - first + 1
    assert any(note.startswith(f"{kept} of {num_layers} layers keep KV") for note in report.notes) == (
        kept < num_layers
    )


def test_stages_of_unequal_heads_go_by_what_a_rank_keeps():
    """Two layers of a KV head each keep as much on one of eight ranks as two of eight heads; on one, a quarter."""
    heads = [1, 1, 1, 8, 1, 1]
    whole = {**HYBRID, "num_hidden_layers": 6, "num_key_value_heads_per_layer": heads}

    def report(stages, ranks):
        return capacity(
            whole,
            kv_cache_memory_bytes=GIB,
            pipeline_parallel_size=stages,
            tensor_parallel_size=ranks,
            max_model_len=64,
        )

    assert report(2, 1).bytes_per_token == (8 + 1 + 1) * 2 * 64 * 2
    assert "layers 3 to 5" in report(2, 1).notes[0]
    assert report(2, 8).bytes_per_token == 3 * 2 * 64 * 2
    assert "layers 0 to 2" in report(2, 8).notes[0]
    assert not any("unequally many KV heads" in note for note in report(2, 8).notes)
    assert "layers keep unequally many KV heads (1 of 8, 2 of 1)" in report(2, 1).notes[-1]


def test_images_of_a_stage_are_those_of_its_layers():
    whole = {**HYBRID, "num_hidden_layers": 8, "cross_attention_layers": [1, 6]}
    report = capacity(whole, kv_cache_memory_bytes=GIB, pipeline_parallel_size=4, max_model_len=64)
    assert report.bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert "layers 2 to 3" in report.notes[0]
    assert not any("KV of an image" in note for note in report.notes)


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        ({**HYBRID, "num_hidden_layers": 8, "num_kv_shared_layers": 2}, 2, "or read the KV of others"),
        ({**HYBRID, "num_hidden_layers": 8, "use_cla": True, "cla_share_factor": 2}, 2, "or read the KV of others"),
        ("llama-3.1-8b", 33, "pipeline_parallel_size is 33; it must be from 1 to 32, the number of layers"),
        ("llama-3.1-8b", 0, "pipeline_parallel_size is 0"),
        ("gpt-oss-20b", 2, "unequally much KV are not split over pipeline stages"),
    ],
)
def test_stages_that_cannot_be_counted(model, stages, message):
    with pytest.raises(GeometryError, match=message):
        capacity(model, kv_cache_memory_bytes=GIB, pipeline_parallel_size=stages)


def test_what_leaves_nothing_for_kv_says_which_number_to_change():
    report = capacity("llama-3.1-70b", "h100-80gb")
    assert report.num_gpu_blocks == 0
    assert "nothing is left for KV" in report.problem
    assert "Plan the peak" not in report.render()
    assert "blocks more take" not in report.render()
    assert "raise tensor_parallel_size to 4" in report.problem
    assert "DOES NOT FIT" in report.render()


def test_too_little_utilization_says_how_much_would_do():
    tight = capacity("llama-3.1-8b", "h100-80gb", max_model_len=131_072, gpu_memory_utilization=0.4)
    wanted = float(tight.problem.split("gpu_memory_utilization to ")[1].split()[0])
    assert not tight.fits
    assert capacity("llama-3.1-8b", "h100-80gb", max_model_len=131_072, gpu_memory_utilization=wanted).fits


def test_an_override_beyond_what_fits_says_what_it_squeezes():
    report = capacity(PLANNER, kv_cache_memory_bytes=GIB, max_model_len=100, num_gpu_blocks_override=612)
    assert report.num_gpu_blocks == 612
    assert "100 blocks (0.20 GiB) more" in report.notes[0]


@pytest.mark.parametrize("override", [10_000, 30_000, 32_185])
def test_where_nothing_is_left_does_not_depend_on_the_override(override):
    free = capacity("llama-3.1-8b", "a100-80gb")
    report = capacity("llama-3.1-8b", "a100-80gb", num_gpu_blocks_override=override)
    assert (free.num_blocks_that_fit, free.num_squeezing_blocks, free.num_blocks_at_most) == (28_133, 4_052, 32_185)
    assert (report.num_blocks_that_fit, report.num_blocks_at_most) == (28_133, 32_185)
    assert report.num_squeezing_blocks == 32_185 - override
    assert "A block cap above 28,133 squeezes" in report.render()
    assert "at 32,185 blocks nothing is left" in report.render()
    assert report.fits


@pytest.mark.parametrize("override", [32_186, 100_000_000])
def test_an_override_beyond_the_memory_does_not_fit(override):
    report = capacity("llama-3.1-8b", "a100-80gb", num_gpu_blocks_override=override)
    assert f"num_gpu_blocks_override {override} is beyond the memory of the GPU: 32185 blocks" in report.problem
    assert "Lower num_gpu_blocks_override to 28133 or less" in report.problem
    assert "at 32,185 blocks nothing is left" in report.render()


def test_an_override_does_not_hide_that_the_weights_do_not_fit():
    report = capacity("llama-3.1-70b", "a100-80gb", num_gpu_blocks_override=30_000)
    assert report.num_blocks_at_most == 0
    assert "nothing is left for KV" in report.problem


def test_a_length_beyond_the_models_is_noted():
    assert "beyond the model's own 2048" in capacity("opt-13b", kv_cache_memory_bytes=GIB, max_model_len=4096).notes[0]


def test_windowed_layers_raise_the_concurrency_not_the_tokens():
    windowed = load_model("gpt-oss-20b")
    full = ModelGeometry.from_config({**windowed.config, "layer_types": ["full_attention"] * 24})
    flags = {"kv_cache_memory_bytes": 4 * GIB, "max_model_len": 32_768, "max_num_batched_tokens": 2048}
    assert capacity(windowed, **flags).num_tokens == capacity(full, **flags).num_tokens
    # Full layers hold 2,048 blocks, windowed ones ceil((128 - 1 + 2048) / 16) + 1 = 137: half of each.
    assert capacity(windowed, **flags).num_blocks_per_request == (2048 + 137 + 1) // 2


def test_the_concurrency_of_layer_groups_is_not_rounded_by_request():
    """Of 12 full layers a request holds 256 blocks, of 12 windowed ones 137: 393 of 10,922 pages, 27.79 requests."""
    flags = {"kv_cache_memory_bytes": 4 * GIB, "max_model_len": 4096, "max_num_batched_tokens": 2048}
    report = capacity("gpt-oss-20b", **flags)
    assert (report.num_gpu_blocks, report.num_blocks_per_request) == (5461, 197)
    assert report.start_up_lines[1] == "Maximum concurrency for 4,096 tokens per request: 27.79x"
    assert "all 2 groups of layers; vLLM counts one per group, 2 times as many" in report.notes[0]


@pytest.mark.parametrize(
    ("model", "gpu", "flags", "message"),
    [
        (PLANNER, None, {"max_model_len": 10}, "needs a gpu, or kv_cache_memory_bytes"),
        (PLANNER, "l4", {"max_model_len": 10}, "lacks model_type"),
        (PLANNER, "l4", {"max_model_len": 10, "weight_bytes": 1}, "lacks hidden_size: give activation_bytes"),
        (PLANNER, "l4", {}, "lacks max_position_embeddings: give max_model_len"),
        ("opt-13b", "l4", {"gpu_memory_utilization": 90}, "gpu_memory_utilization is 90"),
        ("opt-13b", "l4", {"block_size": 0}, "block_size is 0"),
        ("opt-13b", "l4", {"num_gpu_blocks_override": -1}, "num_gpu_blocks_override is -1"),
        ("opt-13b", "l4", {"kv_cache_dtype": "fp9"}, "unknown dtype 'fp9'"),
        ("opt-13", "l4", {}, "unknown model 'opt-13'; did you mean opt-13b"),
        ("opt-13b", "l5", {}, "unknown GPU 'l5'"),
    ],
)
def test_what_cannot_be_answered_is_an_error_that_names_the_value(model, gpu, flags, message):
    with pytest.raises(ScenarioError, match=message):
        capacity(model, gpu, **flags)


def test_estimated_activations_say_of_which_steps():
    """A scenario has other limits than vLLM's defaults for the GPU, and so other blocks."""
    estimated = capacity("llama-3.1-70b", "a100-80gb", tensor_parallel_size=4)
    assert "1.21 GiB  (steps of 2,048 tokens, 256 sequences)\n" in estimated.render()
    given = capacity("llama-3.1-70b", "a100-80gb", tensor_parallel_size=4, activation_bytes=GIB)
    assert "- peak activations                  1.00 GiB\n" in given.render()
    assert (estimated.to_dict()["is_activation_estimated"], given.to_dict()["is_activation_estimated"]) == (True, False)


def test_json_and_text_say_the_same():
    report = capacity("llama-3.1-8b", "rtx-4090", max_model_len=8192)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["num_gpu_blocks"] == report.num_gpu_blocks
    assert data["start_up_lines"][0] in report.render()
    assert f"{report.num_gpu_blocks:,}" in report.render()
    budget = data["weight_bytes"] + data["activation_bytes"] + data["non_torch_bytes"] + data["kv_bytes"]
    assert budget == data["budget_bytes"]


def test_estimates_grow_with_the_flags():
    model = load_model("llama-3-8b")
    assert estimate_activation_bytes(model, 2048, 256) < estimate_activation_bytes(model, 2048, 1024)
    assert estimate_activation_bytes(model, 2048, 8) < estimate_activation_bytes(model, 32_768, 8)
    with pytest.raises(GeometryError, match="lacks vocab_size"):
        estimate_activation_bytes(ModelGeometry.from_config({**model.config, "vocab_size": None}), 2048, 8)


def rows(shared_dir, name):
    with (shared_dir / "data" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def geometry_of(row):
    return ModelGeometry(
        num_hidden_layers=int(row["layers"]),
        num_key_value_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        dtype={"2": "float16", "1": "fp8"}[row["kv_elt_bytes"]],
    )


def test_logged_kv_bytes_reproduce_the_logged_blocks(shared_dir):
    num_checked = 0
    for row in rows(shared_dir, "CAPACITY_FACTS.csv"):
        kv_bytes = row["kv_GiB_logged_per_rank"] and int(float(row["kv_GiB_logged_per_rank"]) * GIB)
        if not kv_bytes:
            continue
        report = capacity(
            geometry_of(row),
            kv_cache_memory_bytes=kv_bytes,
            block_size=int(row["block_size"]),
            tensor_parallel_size=int(row["tp"]),
            max_model_len=1024,
        )
        assert report.block_bytes == int(row["block_bytes_per_rank"])
        assert abs(report.num_gpu_blocks - int(row["blocks_from_logged_GiB"])) <= 1
        if "min over ranks" not in row["note"]:  # its log is one rank's, its blocks another's
            assert abs(report.num_gpu_blocks - int(row["blocks_reported"])) <= int(row["log_rounding_pm_blocks"])
            num_checked += 1
    assert num_checked == 4


def test_block_bytes_of_every_reported_model(shared_dir):
    for row in rows(shared_dir, "CAPACITY_FACTS.csv"):
        per_token = geometry_of(row).bytes_per_token("auto", int(row["tp"]))
        assert per_token * int(row["block_size"]) == int(row["block_bytes_per_rank"]), row["model"]


def test_the_memory_equation_is_that_of_the_logs(shared_dir):
    gib = {"weight_bytes": "weights_GiB", "activation_bytes": "peak_activation_GiB", "non_torch_bytes": "non_torch_GiB"}
    for row in rows(shared_dir, "calibration/VLLM_MEMORY_BREAKDOWN_H100.csv"):
        report = capacity(
            PLANNER,
            total_memory_bytes=round(float(row["total_GiB"]) * GIB),
            gpu_memory_utilization=float(row["util"]),
            max_model_len=int(row["max_model_len"]),
            **{flag: round(float(row[column]) * GIB) for flag, column in gib.items()},
        )
        printed = row["formula_util*total-weights-act-nontorch"]
        assert f"{report.kv_bytes / GIB:.2f}" == f"{float(printed):.2f}", row["model"]
        assert report.fits == (float(printed) > 2)


def scenario_like(**memory):
    return SimpleNamespace(
        memory=SimpleNamespace(gpu_memory_utilization=0.9, **memory),
        model="llama-3.1-8b",
        scheduler=SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192),
        kv_cache_dtype="auto",
        tensor_parallel_size=1,
    )


def test_a_scenario_gets_what_the_report_says():
    report = capacity("llama-3.1-8b", "rtx-4090", max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048)
    assert kv_cache_bytes(load_model("llama-3.1-8b"), load_gpu("rtx-4090"), scenario_like()) == report.kv_bytes


@pytest.mark.parametrize(
    ("model", "message"), [("llama-2-70b", "memory: nothing is left for KV"), (PLANNER, "memory.kv_cache_memory_bytes")]
)
def test_a_scenario_without_room_is_an_error(model, message):
    with pytest.raises(ScenarioError, match=message):
        kv_cache_bytes(load_model(model), load_gpu("rtx-4090"), scenario_like())


def test_layers_without_kv_make_the_blocks_smaller_and_are_noted():
    hybrid = capacity(
        {**PLANNER, "attn_layer_period": 8, "attn_layer_offset": 4}, kv_cache_memory_bytes=GIB, max_model_len=100
    )
    assert (hybrid.bytes_per_token, hybrid.num_gpu_blocks) == (16_384, 4096)
    assert "4 of 32 layers keep KV of their own" in hybrid.notes[0]


def run_of(model, engine="vllm-v1", allocator=None, max_model_len=32_768, **budget):
    result = run(
        {
            "engine": engine,
            "model": model,
            "memory": {"kv_cache_memory_bytes": "16GiB"},
            "allocator": allocator or {},
            "scheduler": {"max_model_len": max_model_len, **budget},
            "workload": {"requests": [{"prompt_tokens": 20, "output_tokens": 2}]},
            "cost": {"type": "linear"},
        }
    )
    return result.summary


@pytest.mark.parametrize(("model", "layers"), [("mistral-7b-v0.1", "32 of its 32"), ("gemma-3-27b", "52 of its 62")])
def test_a_run_of_a_windowed_model_says_how_much_more_fits(model, layers):
    summary = run_of(model, max_num_seqs=256, max_num_batched_tokens=2048)
    report = capacity(model, kv_cache_memory_bytes=16 * GIB, max_model_len=32_768, max_num_batched_tokens=2048)
    gain = report.max_concurrency / (summary["num_gpu_blocks"] * summary["block_size"] / 32_768)
    assert gain > 3.5
    (warning,) = summary["warnings"]
    assert f"{layers} layers keep a window of" in warning
    assert "simulates them as full attention" in warning
    assert f"{gain:.1f} times as many requests of 32,768 tokens" in warning


@pytest.mark.parametrize("engine", ["vllm-v0", "paged", "orca-max"])
def test_engines_without_a_token_budget_warn_of_windows_without_a_figure(engine):
    (warning,) = run_of("mistral-7b-v0.1", engine)["warnings"]
    assert "kvsim capacity says how much more fits" in warning
    assert ("allocator.sliding_window" in warning) == (engine != "orca-max")


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama-3.1-8b", {}),
        ("mistral-7b-v0.1", {"max_model_len": 4096}),
        ("mistral-7b-v0.1", {"engine": "paged", "allocator": {"sliding_window": 4096}}),
    ],
)
def test_a_run_whose_windows_are_used_or_never_reached_says_nothing(model, changes):
    assert run_of(model, **changes)["warnings"] == []


FALCON = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "hidden_size": 4544,
    "vocab_size": 65_024,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, "model_type 'falcon' is not among"),
        ({"model_type": None}, "lacks model_type, so its weights cannot be counted"),
        ({"model_type": "llama", "multi_query": None, "head_dim": 64}, "lacks intermediate_size"),
    ],
)
def test_on_the_command_line_the_cure_is_an_option(tmp_path, capsys, change, fault):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FALCON | change))
    assert main(["capacity", "--model", str(path), "--gpu", "a100-80gb"]) == 2
    error = capsys.readouterr().err
    assert fault in error
    assert "--kv-cache-memory-bytes 16GiB" in error
    assert "weight_bytes" not in error
    assert main(["capacity", "--model", str(path), "--kv-cache-memory-bytes", "16GiB"]) == 0


def test_the_terms_that_an_engine_logged_can_be_given(capsys):
    terms = ["--gpu", "79.11GiB", "--weight-bytes", "14.99GiB", "--activation-bytes", "1.19GiB"]
    assert main(["capacity", "--model", "llama-3.1-8b", *terms, "--non-torch-bytes", "0.10GiB"]) == 0
    told = capsys.readouterr().out
    # 0.9 x 79.11 - 14.99 - 1.19 - 0.10 = 54.919 GiB, and a block takes 2 MiB.
    assert "llama-3.1-8b on a GPU of 79.11GiB" in told
    assert "blocks                            28,118\n" in told


def test_the_swap_space_of_a_gpu_holds_blocks_too(capsys):
    """vLLM's usual 4 GiB: 512 blocks of 8 MiB for Llama-2-7B, twice as many where two GPUs share the heads."""
    asked = ["capacity", "--model", "llama-2-7b", "--gpu", "a100-80gb", "--swap-space", "4GiB"]
    assert main(asked) == 0
    assert "blocks of swap space                 512\n" in capsys.readouterr().out
    assert main([*asked, "--tensor-parallel-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_cpu_blocks"] == 1024


def test_terms_that_an_engine_does_not_subtract_are_zero(capsys):
    """SGLang's sum: a share of the memory less the weights, 0.88 x 79.11 - 15 = 54.6168 GiB, 128 KiB a token."""
    options = ["--gpu", "79.11GiB", "--gpu-memory-utilization", "0.88", "--block-size", "1", "--weight-bytes", "15GiB"]
    terms = ["--activation-bytes", "0", "--non-torch-bytes", "0"]
    assert main(["capacity", "--model", "llama-3.1-8b", *options, *terms, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == int((0.88 * 79.11 - 15) * 8192)


def test_a_family_that_cannot_be_counted_needs_two_terms(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FALCON))
    asked = ["capacity", "--model", str(path), "--gpu", "24GiB", "--weight-bytes", "13.45GiB"]
    assert main(asked) == 2
    assert "lacks intermediate_size: give --activation-bytes, such as 1.2GiB" in capsys.readouterr().err
    assert main([*asked, "--activation-bytes", "0.5GiB", "--json"]) == 0
    # One KV head of 64 in 32 layers: 8,192 bytes a token.
    kv_bytes = int(0.9 * 24 * GIB) - int(13.45 * GIB) - GIB // 2 - round(0.14 * GIB)
    assert json.loads(capsys.readouterr().out)["num_gpu_blocks"] == kv_bytes // (16 * 8192)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "t5"], "unknown GPU 't5'; did you mean t4.* Its memory will do too, such as --gpu 24GiB"),
        (["--gpu", "24XB"], "--gpu 24XB: the unit 'XB' is none of"),
        (["--gpu", "0GiB"], "--gpu 0GiB: must be above 0"),
        (["--gpu", "80"], "--gpu 80: is 80 bytes; say the unit too, such as 80GiB"),
        (["--gpu", "l4", "--weight-bytes", "15"], "--weight-bytes 15: is 15 bytes; say the unit too"),
        (["--gpu", "l4", "--weight-bytes", "many"], "--weight-bytes many: "),
        (["--gpu", "l4", "--weight-bytes", "-1GiB"], "--weight-bytes -1GiB: must be at least 0"),
    ],
)
def test_a_size_that_cannot_be_used_is_named(capsys, options, message):
    assert main(["capacity", "--model", "opt-13b", *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_cure_that_is_an_option_stays(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FALCON | {"max_position_embeddings": None}))
    assert main(["capacity", "--model", str(path), "--gpu", "a100-80gb"]) == 2
    assert "give max_model_len" in capsys.readouterr().err


def saved(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


LLAMA = dict(load_model("llama-3.1-8b").config)
WITHOUT_DTYPE = {key: value for key, value in LLAMA.items() if key not in ("dtype", "torch_dtype")}


def test_a_configuration_without_dtype_needs_the_flag_and_says_so(tmp_path, capsys):
    path = str(saved(tmp_path, WITHOUT_DTYPE))
    assert main(["capacity", "--model", path, "--gpu", "a100-80gb"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: the model configuration lacks dtype (or torch_dtype)" in error
    assert "give --dtype, such as bfloat16" in error
    assert main(["capacity", "--model", path, "--gpu", "a100-80gb", "--dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_gpu_blocks"] == capacity(LLAMA, "a100-80gb").num_gpu_blocks
    size = ["--kv-cache-memory-bytes", "16GiB"]
    assert main(["capacity", "--model", path, *size, "--kv-cache-dtype", "fp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 65_536


def scenario_of(path, memory, **more):
    return {
        "model": str(path),
        "memory": memory,
        "scheduler": {"max_model_len": 2048},
        "workload": {"requests": [{"prompt_tokens": 20, "output_tokens": 2}]},
        "cost": {"type": "linear"},
        **more,
    }


def test_a_scenario_may_say_the_dtype_of_its_cache(tmp_path):
    path = saved(tmp_path, WITHOUT_DTYPE)
    memory = {"kv_cache_memory_bytes": "2GiB"}
    assert run(scenario_of(path, memory, kv_cache_dtype="bfloat16")).summary["num_gpu_blocks"] == 1024
    with pytest.raises(ScenarioError, match=r"model: .*config\.json: .* lacks dtype .*; say kv_cache_dtype, such as"):
        run(scenario_of(path, memory))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"vocab_size": "x"}, r"vocab_size is 'x'; it must be a whole number"),
        ({"intermediate_size": [1]}, r"intermediate_size is \[1\]; it must be a whole number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, r"quantization_config\.bits is '4'"),
    ],
)
def test_a_scenario_blames_the_models_file_for_what_is_in_it(tmp_path, change, fault):
    path = saved(tmp_path, LLAMA | change)
    cure = r"or say how much there is with memory\.kv_cache_memory_bytes"
    with pytest.raises(ScenarioError, match=rf"model: .*config\.json: {fault}.*{cure}"):
        run(scenario_of(path, {}, gpu="a100-80gb"))
    assert run(scenario_of(path, {"kv_cache_memory_bytes": "2GiB"})).summary["num_gpu_blocks"] == 1024


@pytest.mark.parametrize(
    "damage",
    [
        {"layer_types": 5},
        {"vocab_size": "x"},
        {"vocab_size": float("nan")},
        {"model_type": []},
        {"num_hidden_layers": 10**30},
        {"quantization_config": "awq"},
    ],
)
def test_on_the_command_line_damage_is_the_files_fault(tmp_path, capsys, damage):
    path = saved(tmp_path, LLAMA | damage)
    assert main(["capacity", "--model", str(path), "--gpu", "a100-80gb"]) == 2
    error = capsys.readouterr().err
    assert f"{path}: {next(iter(damage))} is " in error
    assert "it must be" in error


@pytest.mark.parametrize("flag", ["--max-model-len", "--max-num-seqs", "--block-size", "--tensor-parallel-size"])
def test_a_flag_beyond_all_machines_is_refused(capsys, flag):
    assert main(["capacity", "--model", "opt-13b", "--gpu", "h200", flag, "9" * 23]) == 2
    assert f"{flag[2:].replace('-', '_')} is {'9' * 23}; it must be at most" in capsys.readouterr().err


def test_a_block_larger_than_the_cache_is_told_apart_from_no_memory():
    report = capacity("llama-3.1-8b", "h100-80gb", block_size=1_000_000)
    # 131,072 bytes a token.
    assert report.block_bytes == 131_072_000_000
    assert report.problem.startswith(
        f"no block fits: one of 1000000 tokens takes {131_072_000_000 / GIB:.2f} GiB, and "
    )
    assert report.problem.endswith("Change one of: lower block_size to 128.")
    assert capacity("llama-3.1-8b", "h100-80gb", block_size=128).fits


@pytest.mark.parametrize(
    ("max_model_len", "cures"),
    [
        # 24 tokens of 128 KiB are there: 3 blocks of 8 for 20 of them, 1 of 16 or 3 of 8 for more.
        (20, "lower block_size to 8."),
        (200, "lower block_size to 16 and max_model_len to 16 or less; give the KV cache 25.00 MiB more."),
    ],
)
def test_a_tiny_cache_gets_cures_of_its_own_size(max_model_len, cures):
    report = capacity(PLANNER, kv_cache_memory_bytes=3 << 20, block_size=32, max_model_len=max_model_len)
    assert "no block fits: one of 32 tokens takes 4.00 MiB, and 3.00 MiB are left for KV" in report.problem
    assert report.problem.endswith(f"Change one of: {cures}")


def test_a_block_that_wastes_what_is_missing_should_be_smaller():
    report = capacity(PLANNER, kv_cache_memory_bytes=7 << 20, block_size=32, max_model_len=40)
    # Two blocks of 4 MiB are 1 MiB too many; three of 2 MiB fit.
    assert report.problem.endswith(
        "lower max_model_len to 32 or less; lower block_size to 16; give the KV cache 1.00 MiB more."
    )
    assert capacity(PLANNER, kv_cache_memory_bytes=7 << 20, block_size=16, max_model_len=40).fits


def test_an_override_below_what_a_request_needs_should_be_larger():
    report = capacity("llama-3.1-8b", "h200", max_model_len=1600, num_gpu_blocks_override=10)
    assert report.problem.endswith("lower max_model_len to 160 or less; raise num_gpu_blocks_override to 100 or more.")


@pytest.mark.parametrize(("override", "max_model_len", "enough"), [(1, 4096, 0.201), (10_000_000, 300_000, 0.657)])
def test_an_override_that_stands_in_the_way_of_the_cures_is_to_be_left_out(override, max_model_len, enough):
    """Of one block a request has too few at any utilization, of ten millions any GPU."""
    flags = {"max_model_len": max_model_len, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    report = capacity("llama-3-8b", "h100-80gb", gpu_memory_utilization=0.1, num_gpu_blocks_override=override, **flags)
    cures = f"Leave num_gpu_blocks_override out, and change one of: raise gpu_memory_utilization to {enough} or more"
    assert cures in report.problem
    assert capacity("llama-3-8b", "h100-80gb", gpu_memory_utilization=enough, **flags).fits


def test_layers_of_several_widths_count_with_the_widest():
    config = LLAMA | {"intermediate_size": [100, 14_336]}
    estimate = estimate_activation_bytes(ModelGeometry.from_config(config), 2048, 8)
    assert estimate == estimate_activation_bytes(ModelGeometry.from_config(LLAMA), 2048, 8)


@pytest.mark.parametrize("dtype", [*PACKED_BYTES, DS_MLA])
def test_a_run_takes_every_format_that_the_capacity_report_takes(tmp_path, dtype):
    model = "deepseek-v3" if dtype == DS_MLA else "llama-3.1-8b"
    size = {"kv_cache_memory_bytes": 1 << 30}
    scenario = scenario_of(model, size, kv_cache_dtype=dtype)
    summary = run(scenario).summary
    report = capacity(model, max_model_len=2048, kv_cache_dtype=dtype, **size)
    assert (summary["num_gpu_blocks"], summary["bytes_per_token"]) == (report.num_gpu_blocks, report.bytes_per_token)


def test_a_speculative_model_takes_weights_and_kv_of_every_token():
    """Llama-3.2-1B: 2 x 16 layers x 8 heads x 64 x 2 bytes, and 1.24 billion parameters of 16 bits."""
    target, draft = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
    alone, both = (capacity(target, "a100-80gb", speculative_model=model) for model in (None, draft))
    assert both.bytes_per_token == alone.bytes_per_token + 2 * 16 * 8 * 64 * 2
    assert both.weight_bytes == alone.weight_bytes + 2 * count_params(draft).total
    assert both.kv_bytes == alone.kv_bytes - 2 * count_params(draft).total
    assert both.num_gpu_blocks == both.kv_bytes // (16 * both.bytes_per_token)
    assert both.num_blocks_per_request == alone.num_blocks_per_request
    assert both.notes == ("32,768 of the bytes of one token are those of llama-3.2-1b",)
    shared = capacity(target, "a100-80gb", speculative_model=draft, tensor_parallel_size=2, kv_cache_dtype="fp8")
    assert shared.bytes_per_token == both.bytes_per_token // 4


def test_a_head_of_one_layer_is_a_speculative_model(tmp_path, capsys):
    """A draft head as engines load it: one layer more of the target's own shape."""
    path = saved(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    size = ["--kv-cache-memory-bytes", "16GiB", "--max-model-len", "4096", "--json"]
    assert main(["capacity", "--model", "llama-3.1-8b", "--speculative-model", str(path), *size]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 131_072 // 32 * 33


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("gpt-oss-20b", {}, "windowed layers beside a speculative model"),
        ("llama-3.1-8b", {"pipeline_parallel_size": 2}, "beside pipeline stages is not counted"),
        ("llama-3.1-8b", {"speculative_model": {**LLAMA, "model_type": None}}, "the speculative model: .* model_type"),
    ],
)
def test_a_speculative_model_that_cannot_be_counted_is_refused(model, more, message):
    with pytest.raises(ScenarioError, match=message):
        capacity(model, "a100-80gb", **{"speculative_model": "llama-3.2-1b", **more})
