"""Weights of models whose configuration is unusual, or damaged: never a negative number, never a guess."""

from __future__ import annotations

import pytest

from kvsim.catalog import load_model
from kvsim.memory.geometry import GeometryError, ModelGeometry
from kvsim.memory.weights import count_params, weight_bytes

LLAMA, DEEPSEEK, QWEN = load_model("llama-3.1-8b"), load_model("deepseek-v3"), load_model("qwen3-30b-a3b")


def changed(model, **change):
    return ModelGeometry.from_config({**model.config, **change})


def test_a_model_of_fewer_layers_than_are_dense_has_no_experts():
    two = changed(DEEPSEEK, num_hidden_layers=2, first_k_dense_replace=3)
    count = count_params(two)
    # Per layer: queries and keys out of their latents, values, output; and an MLP of 3 x 7168 x 18432.
    attention = 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    assert count.expert == 0
    assert count.linear == 2 * (attention + 3 * 7168 * 18_432)
    assert count.replicated == 2 * 7168 * (1536 + 512 + 64)
    assert count.embedding == 2 * 129_280 * 7168
    assert count.other == 2 * (2 * 7168 + 1536 + 512) + 7168
    # 8 bits an element of the matrices and one scale of 32 bits for 128 x 128 of them; the rest has 16.
    matrices = count.linear + count.replicated
    assert weight_bytes(two) == matrices + 4 * matrices // 128**2 + 2 * (count.embedding + count.other)
    assert weight_bytes(changed(two, quantization_config=None)) / (1 << 30) == pytest.approx(5.63, abs=0.005)


def shape(model_type, layers, hidden, heads, kv_heads, intermediate, vocab, **more):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
    } | more


PUBLISHED = {
    "Command-R": (shape("cohere", 40, 8192, 64, 64, 22_528, 256_000), 34_980_831_232),
    "Command-R+": (shape("cohere", 64, 12_288, 96, 8, 33_792, 256_000, use_qk_norm=True), 103_810_674_688),
    "Command-R7B": (shape("cohere2", 32, 4096, 32, 8, 14_336, 256_000), 8_028_033_024),
    "GLM-4-9B-0414": (shape("glm4", 40, 4096, 32, 2, 13_696, 151_552, attention_bias=True), 9_400_279_040),
    "StarCoder2-3B": (shape("starcoder2", 30, 3072, 24, 2, 12_288, 49_152), 3_030_371_328),
    "StarCoder2-15B": (
        shape("starcoder2", 40, 6144, 48, 4, 24_576, 49_152, tie_word_embeddings=False),
        15_957_889_024,
    ),
    "GPT-NeoX-20B": (shape("gpt_neox", 44, 6144, 64, 64, 24_576, 50_432), 20_554_567_680),
    "Phi-2": (shape("phi", 32, 2560, 32, 32, 10_240, 51_200), 2_779_683_840),
    "Phi-3.5-MoE": (
        shape("phimoe", 32, 4096, 32, 8, 6400, 32_064, num_local_experts=16, attention_bias=True, lm_head_bias=True),
        41_873_153_344,
    ),
    "Baichuan2-7B": (shape("baichuan", 32, 4096, 32, 32, 11_008, 125_696), 7_505_973_248),
    "Baichuan-13B": (shape("baichuan", 40, 5120, 40, 40, 13_696, 64_000), 13_264_901_120),
    "InternLM2-20B": (shape("internlm2", 48, 6144, 48, 8, 16_384, 92_544, bias=False), 19_861_149_696),
    "Granite-3.1-8B": (
        shape("granite", 40, 4096, 32, 8, 12_800, 49_155, tie_word_embeddings=True),
        8_170_848_256,
    ),
    "Qwen1.5-MoE-A2.7B": (
        shape("qwen2_moe", 24, 2048, 16, 16, 5632, 151_936, num_experts=60, moe_intermediate_size=1408)
        | {"shared_expert_intermediate_size": 5632},
        14_315_784_192,
    ),
    "Llama-4-Scout, text": (
        shape("llama4_text", 48, 5120, 40, 8, 8192, 202_048, head_dim=128, num_local_experts=16)
        | {"interleave_moe_layer_step": 1},
        107_769_861_120,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name):
    config, num_params = PUBLISHED[name]
    assert count_params(ModelGeometry.from_config(config)).total == num_params


def test_a_biased_internlm2_has_biases_of_attention():
    config, num_params = PUBLISHED["InternLM2-20B"]
    biased = ModelGeometry.from_config({**config, "bias": None})
    assert count_params(biased).total == num_params + 48 * (128 * (48 + 2 * 8) + 6144)


def test_every_other_layer_of_llama_4_maverick_is_dense():
    config = PUBLISHED["Llama-4-Scout, text"][0]
    more = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 16_384}
    count = count_params(ModelGeometry.from_config(config | more))
    assert count.expert == 24 * 128 * 3 * 5120 * 8192
    attention = 2 * 5120 * 128 * (40 + 8)
    assert count.linear == 48 * attention + 24 * 3 * 5120 * 16_384 + 24 * 3 * 5120 * 8192


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (LLAMA, {"intermediate_size": -1}, "intermediate_size is -1; .* at least 1: give weight_bytes"),
        (LLAMA, {"intermediate_size": [1, 2]}, r"intermediate_size is \[1, 2\]"),
        (LLAMA, {"vocab_size": "x"}, "vocab_size is 'x'"),
        (LLAMA, {"vocab_size": float("nan")}, "vocab_size is nan"),
        (LLAMA, {"vocab_size": 1 << 41}, "vocab_size is 2199023255552; .* from 1 to 1099511627776"),
        (LLAMA, {"model_type": []}, r"model_type is \[\]; it must be a text"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        (LLAMA, {"num_key_value_heads_per_layer": [8, 4] * 16}, "unequally many KV heads"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN, {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        (QWEN, {"mlp_only_layers": ["x"]}, r"mlp_only_layers\[0\] is 'x'"),
        (DEEPSEEK, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_damaged_values_are_named(model, change, message):
    with pytest.raises(GeometryError, match=message):
        weight_bytes(changed(model, **change))


AWQ, PACKED = {"quant_method": "awq", "bits": 4, "group_size": 128}, {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("awq", "quantization_config is 'awq'; it must be a mapping"),
        ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]; known are awq"),
        ({**AWQ, "bits": -1}, "quantization_config.bits is -1; it must be a whole number from 1 to 32"),
        ({**AWQ, "bits": "4"}, "quantization_config.bits is '4'"),
        ({**AWQ, "bits": None}, "quantization_config lacks bits"),
        ({**AWQ, "group_size": -2}, "quantization_config.group_size is -2"),
        ({"quant_method": "fp8", "weight_block_size": 128}, r"weight_block_size is 128; .* a list, \[rows, columns\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size\[0\] is 0"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; .* \[rows, columns\]"),
        ({**PACKED, "config_groups": [1]}, r"quantization_config.config_groups is \[1\]; it must be a mapping"),
        ({**PACKED, "config_groups": {"g": 1}}, r"config_groups.g is 1"),
        ({**PACKED, "config_groups": {"g": {"weights": 1}}}, "config_groups.g.weights is 1"),
        ({**PACKED, "config_groups": {"g": {"weights": {"num_bits": 99}}}}, "num_bits is 99"),
    ],
)
def test_damaged_quantisation_is_named(quantization, message):
    with pytest.raises(GeometryError, match=message):
        weight_bytes(changed(LLAMA, quantization_config=quantization))


def test_groups_over_a_whole_channel_add_nothing():
    count = count_params(LLAMA)
    per_channel = changed(LLAMA, quantization_config={**AWQ, "group_size": -1})
    assert weight_bytes(per_channel) == count.linear // 2 + 2 * (count.embedding + count.other)
