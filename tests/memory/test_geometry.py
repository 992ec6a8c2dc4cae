"""Bytes per token and per model: textbook values, and parameter counts as published."""

from __future__ import annotations

import json

import pytest

from kvsim.catalog import gpu_names, load_gpu, load_model, model_names
from kvsim.memory.geometry import GeometryError, LayerGroup, ModelGeometry, dtype_bytes, num_gpu_blocks
from kvsim.memory.weights import count_params, weight_bytes
from kvsim.types import ScenarioError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "torch_dtype": "float16",
}


def test_textbook_512_kib_a_token():
    geometry = ModelGeometry.from_config(
        {"num_hidden_layers": 32, "num_key_value_heads": 32, "head_dim": 128, "dtype": "float16"}
    )
    assert geometry.bytes_per_token() == 512 * KIB
    assert geometry.bytes_per_token() * 2048 == 1 * GIB
    assert geometry.bytes_per_token() * 32 * 4096 == 64 * GIB
    assert num_gpu_blocks(40 * GIB, 32, geometry.bytes_per_token()) == 2560


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("opt-13b", 800 * KIB),
        ("opt-66b", 9 * MIB // 4),
        ("opt-175b", 9 * MIB // 2),
        ("llama-2-7b", 512 * KIB),
        ("llama-3.1-8b", 128 * KIB),
        ("deepseek-v3", 61 * 576 * 2),
        ("command-r", 1280 * KIB),
        ("llama-3.1-405b", 504 * KIB),
        ("qwen3-235b-a22b", 188 * KIB),
        ("gemma-3-12b", 384 * KIB),
        ("gpt-oss-120b", 72 * KIB),
        ("phi-4", 200 * KIB),
    ],
)
def test_bytes_per_token_of_presets(name, num_bytes):
    assert load_model(name).bytes_per_token() == num_bytes


def test_the_papers_slots():
    assert 12 * GIB // load_model("opt-13b").bytes_per_token() == 15_728


def test_blocks_are_rounded_down():
    assert num_gpu_blocks(2 * 16 * 100 - 1, 16, 100) == 1
    assert num_gpu_blocks(-5, 16, 100) == 0


@pytest.mark.parametrize(("tensor_parallel_size", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_are_split_then_replicated(tensor_parallel_size, heads):
    geometry = load_model("llama-2-70b")
    assert geometry.kv_heads_per_rank(tensor_parallel_size) == heads
    assert geometry.bytes_per_token("auto", tensor_parallel_size) == 80 * 2 * heads * 128 * 2


def test_heads_that_cannot_be_split_are_an_error():
    with pytest.raises(GeometryError, match="64 attention heads cannot be split over 3 ranks"):
        load_model("llama-2-70b").bytes_per_token("auto", 3)


def test_a_latent_is_on_every_rank():
    geometry = load_model("deepseek-v3")
    assert geometry.bytes_per_token("auto", 8) == geometry.bytes_per_token()
    assert geometry.bytes_per_token("fp8") == 61 * 576


def test_fp8_halves_the_bytes():
    geometry = load_model("llama-3-8b")
    assert geometry.bytes_per_token("fp8") * 2 == geometry.bytes_per_token()
    assert dtype_bytes("torch.bfloat16") == 2


@pytest.mark.parametrize(
    ("dtype", "mib"),
    # Llama-3-8B with 8,192 tokens: 2^29 elements; llama.cpp says 1024, 544 and 288 MiB.
    [("float16", 1024), ("q8_0", 544), ("q5_0", 352), ("q4_0", 288), ("nvfp4", 288), ("int4", 256)],
)
def test_packed_elements_of_a_cache(dtype, mib):
    assert load_model("llama-3-8b").bytes_per_token(dtype) * 8192 == mib * MIB


def test_odd_rows_of_packed_elements_are_rounded_up():
    geometry = ModelGeometry.from_config({**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 33})
    assert geometry.bytes_per_token("int4") == 2 * 17


def test_vllms_own_format_of_a_latent():
    """512 elements of 8 bits with four 32-bit scales, and 64 of 16 bits: 656 bytes a layer, and 132 of the indexer."""
    geometry = load_model("deepseek-v3")
    assert geometry.bytes_per_token("fp8_ds_mla", 8) == 61 * 656
    sparse = ModelGeometry.from_config({**geometry.config, "index_head_dim": 128})
    assert sparse.bytes_per_token("fp8_ds_mla") == 61 * (656 + 132)
    with pytest.raises(GeometryError, match=r"fp8_ds_mla stores latents of 512 \+ 64 elements"):
        load_model("llama-3-8b").bytes_per_token("fp8_ds_mla")


def test_an_unknown_format_of_a_cache_gets_the_list():
    with pytest.raises(GeometryError, match=r"unknown dtype 'fp9'; known are .*int8.*int4, nvfp4, q8_0.*fp8_ds_mla"):
        load_model("llama-3-8b").bytes_per_token("fp9")


def test_missing_kv_heads_and_head_dim_follow_from_the_attention_heads():
    geometry = ModelGeometry.from_config(LLAMA)
    assert (geometry.num_key_value_heads, geometry.head_dim) == (32, 128)


def test_the_text_model_of_a_thinker_is_used():
    """28 layers of 4 KV heads of 128 at two bytes, keys and values: 57,344 bytes, whatever the other parts have."""
    text = {"num_hidden_layers": 28, "num_key_value_heads": 4, "num_attention_heads": 28, "hidden_size": 3584}
    talker = {"num_hidden_layers": 24, "num_key_value_heads": 4, "num_attention_heads": 12, "hidden_size": 896}
    thinker = {"text_config": text, "audio_config": {"num_hidden_layers": 32}, "torch_dtype": "bfloat16"}
    config = {"torch_dtype": "bfloat16", "thinker_config": thinker, "talker_config": talker}
    assert ModelGeometry.from_config(config).bytes_per_token() == 57_344


def test_a_nested_text_config_is_used():
    geometry = ModelGeometry.from_config({"torch_dtype": "bfloat16", "text_config": {**LLAMA, "torch_dtype": None}})
    assert (geometry.dtype, geometry.num_hidden_layers) == ("bfloat16", 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_attention_heads": None}, "lacks num_key_value_heads"),
        ({"num_attention_heads": None, "num_key_value_heads": 8}, "lacks head_dim"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": 4097}, "hidden_size 4097 is no multiple"),
        ({"torch_dtype": 16}, "torch_dtype is 16; it must be a name such as bfloat16"),
        ({"torch_dtype": "float17"}, "unknown dtype 'float17'"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"kv_lora_rank": 512}, "lacks qk_rope_head_dim"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["linear_attention"] * 32}, "32 layers and none that keeps keys and values"),
        ({"layer_types": ["telepathy"] * 32}, "layer_types has telepathy; known are attention, full_attention"),
        ({"num_kv_shared_layers": 32}, "none that keeps keys and values"),
        ({"num_kv_shared_layers": 33}, "num_kv_shared_layers is 33; it must be a whole number from 0 to 32"),
        ({"attn_layer_period": 8}, "lacks attn_layer_offset"),
        ({"attn_layer_period": 8, "attn_layer_offset": 8}, "attn_layer_offset is 8; .* from 0 to 7"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 10+; it must be a whole number from 1 to 10000"),
        ({"sliding_window": 4096, "max_window_layers": [1]}, r"max_window_layers is \[1\]; it must be a whole number"),
        ({"text_config": []}, r"text_config is \[\]; it must be a mapping"),
    ],
)
def test_what_is_missing_or_wrong_is_named(change, message):
    with pytest.raises(GeometryError, match=message):
        ModelGeometry.from_config({**LLAMA, **change})


def test_a_missing_dtype_is_missed_only_by_what_needs_it():
    geometry = ModelGeometry.from_config({**LLAMA, "torch_dtype": None})
    assert geometry.bytes_per_token("bfloat16") == 512 * KIB
    assert geometry.bytes_per_token("fp8") == 256 * KIB
    with pytest.raises(GeometryError, match=r"lacks dtype \(or torch_dtype\); found hidden_size, .*: give dtype"):
        geometry.bytes_per_token()
    assert ModelGeometry.from_config({**LLAMA, "torch_dtype": None}, dtype="float32").bytes_per_token() == 1 * MIB


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ({"sliding_window": None}, (LayerGroup("full_attention", 32),)),
        ({"sliding_window": 4096}, (LayerGroup("sliding_attention", 32, 4096),)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (LayerGroup("full_attention", 32),)),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28},
            (LayerGroup("full_attention", 28), LayerGroup("sliding_attention", 4, 4096)),
        ),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
            (LayerGroup("sliding_attention", 16, 128), LayerGroup("full_attention", 16)),
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 6},
            (LayerGroup("sliding_attention", 27, 1024), LayerGroup("full_attention", 5)),
        ),
    ],
)
def test_windowed_layers(change, groups):
    geometry = ModelGeometry.from_config({**LLAMA, **change})
    assert geometry.groups == groups
    assert sum(geometry.group_bytes_per_token().values()) == geometry.bytes_per_token() == 512 * KIB


@pytest.mark.parametrize(
    ("change", "groups"),
    [
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, (LayerGroup("full_attention", 4),)),
        ({"attn_layer_period": 8, "attn_layer_offset": 0}, (LayerGroup("full_attention", 4),)),
        ({"attn_layer_period": 9, "attn_layer_offset": 4}, (LayerGroup("full_attention", 4),)),
        ({"attn_layer_period": 9, "attn_layer_offset": 5}, (LayerGroup("full_attention", 3),)),
        ({"full_attention_interval": 4}, (LayerGroup("full_attention", 8),)),
        ({"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}, (LayerGroup("full_attention", 8),)),
        ({"layer_types": ["mamba"] * 30 + ["attention"] * 2}, (LayerGroup("full_attention", 2),)),
        (
            {"layer_types": ["mamba", "sliding_attention"] * 16, "sliding_window": 8, "use_sliding_window": False},
            (LayerGroup("full_attention", 16),),
        ),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"] * 16,
                "sliding_window": 512,
                "num_kv_shared_layers": 9,
            },
            (LayerGroup("sliding_attention", 12, 512), LayerGroup("full_attention", 11)),
        ),
        ({"num_kv_shared_layers": 0}, (LayerGroup("full_attention", 32),)),
    ],
)
def test_only_layers_with_kv_of_their_own_count(change, groups):
    geometry = ModelGeometry.from_config({**LLAMA, **change})
    assert geometry.groups == groups
    assert geometry.num_hidden_layers == 32
    assert geometry.num_kv_layers == sum(group.num_layers for group in groups)
    assert geometry.bytes_per_token() == geometry.num_kv_layers * 16 * KIB


def test_a_hybrid_that_states_attention_by_period_keeps_an_eighth():
    jamba = {**LLAMA, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4}
    assert ModelGeometry.from_config(jamba).bytes_per_token() == 16_384


def test_a_window_on_every_layer_is_the_models():
    assert load_model("mistral-7b-v0.1").sliding_window == 4096
    assert load_model("gemma-2-9b").sliding_window is None
    assert load_model("gemma-2-9b").is_hybrid


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("opt-125m", 125_239_296),
        ("opt-13b", 12_853_473_280),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("yi-34b", 34_388_917_248),
        ("gemma-2-9b", 9_241_705_984),
        ("gpt-oss-20b", 20_914_757_184),
        ("deepseek-v3", 671_026_419_200),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-r1-distill-qwen-14b", 14_770_033_664),
        ("deepseek-r1-distill-qwen-32b", 32_763_876_352),
        ("command-r", 34_980_831_232),
        ("command-r-plus", 103_810_674_688),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-12b", 11_766_034_176),
        ("glm-4-9b", 9_400_279_040),
        ("gpt-oss-120b", 116_829_156_672),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-4-scout", 107_769_861_120),
        ("mistral-large", 122_610_069_504),
        ("mistral-small-24b", 23_572_403_200),
        ("mixtral-8x22b", 140_620_634_112),
        ("phi-4", 14_659_507_200),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_parameter_counts_as_published(name, total):
    assert count_params(load_model(name)).total == total


def test_weights_of_quantised_models_are_smaller():
    plain = load_model("mistral-7b")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    quantised = ModelGeometry.from_config({**plain.config, "quantization_config": awq})
    assert weight_bytes(plain) == 2 * count_params(plain).total
    assert weight_bytes(quantised) / GIB == pytest.approx(3.88, abs=0.02)
    assert weight_bytes(plain, 2) < 0.501 * weight_bytes(plain)


def test_projections_into_the_latent_are_on_every_rank():
    model = load_model("deepseek-v3")
    count = count_params(model)
    # q_a_proj (7168 x 1536) and kv_a_proj_with_mqa (7168 x (512 + 64)) of 61 layers.
    assert count.replicated == 61 * 7168 * (1536 + 512 + 64)
    plain = ModelGeometry.from_config({**model.config, "quantization_config": None})
    split = count.embedding + count.linear + count.expert
    assert weight_bytes(plain) == 2 * count.total
    assert weight_bytes(plain, 8) == 2 * (split // 8 + count.other + count.replicated)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "lacks model_type"),
        ({"model_type": "brandnew"}, "model_type 'brandnew' is not among"),
        ({}, "lacks vocab_size"),
        ({"vocab_size": 32000}, "lacks intermediate_size"),
    ],
)
def test_weights_are_never_guessed(change, message):
    geometry = ModelGeometry.from_config({**LLAMA, **change})
    with pytest.raises(GeometryError, match=message):
        count_params(geometry)


@pytest.mark.parametrize("name", model_names())
def test_every_model_of_the_catalog_loads_and_can_be_counted(name):
    geometry = load_model(name)
    assert geometry.name == name
    assert geometry.max_model_len
    assert geometry.bytes_per_token() > 0
    assert weight_bytes(geometry) > 0


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_of_the_catalog_loads(name):
    gpu = load_gpu(name)
    assert gpu.name == name
    assert 10 * GIB < gpu.total_memory_bytes < 200 * GIB
    assert 1e11 < gpu.memory_bandwidth < 1e13


def test_names_may_be_those_of_the_hub_and_of_the_driver():
    assert load_model("meta-llama/Llama-3.1-8B").name == "llama-3.1-8b"
    assert load_model("Qwen/Qwen3-32B").name == "qwen3-32b"
    assert load_model("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B").max_model_len == 131_072
    assert load_model("Qwen/Qwen2.5-14B-Instruct").max_model_len == 32_768
    assert load_gpu("NVIDIA H100 80GB HBM3").name == "h100-80gb"


def test_a_misspelt_name_gets_the_nearest_and_the_list():
    with pytest.raises(
        ScenarioError, match=r"unknown model 'lama-2-7b'; did you mean llama-2-7b.*The catalog has .*opt-13b"
    ):
        load_model("lama-2-7b")
    with pytest.raises(ScenarioError, match=r"unknown GPU 'a100-80g'; did you mean a100-80gb.*rtx-4090"):
        load_gpu("a100-80g")


def test_a_config_file_will_do(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(folder).name == "mine"
    assert load_model("mine", base_dir=tmp_path).bytes_per_token() == 512 * KIB
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert load_model(folder).bytes_per_token() == 512 * KIB
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ScenarioError, match=r"config\.json: a model configuration is a mapping"):
        load_model(folder / "config.json")
    (folder / "config.json").write_text('{"dtype": "float16"}')
    with pytest.raises(ScenarioError, match=r"config\.json: the model configuration lacks num_hidden_layers"):
        load_model(folder)


def test_a_gpu_may_be_given_in_full():
    with pytest.raises(ScenarioError, match="gpu mine: memory_bandwidth_gb_s is None"):
        load_gpu({"name": "mine", "total_memory_gib": 10})
