"""Which layers keep keys and values, family by family: bytes per token worked out from the published shapes."""

from __future__ import annotations

from typing import Any

import pytest

from kvsim.capacity import capacity
from kvsim.memory.geometry import GeometryError, LayerGroup, ModelGeometry

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def shape(num_layers: int, num_kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 262_144,
        **more,
    }


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LLAMA_4 = shape(48, 8, 128, model_type="llama4_text", attention_chunk_size=8192)

FAMILIES = {
    "MiniMax-Text-01": (shape(80, 8, 128, attn_type_list=([0] * 7 + [1]) * 10), 10 * 2 * 8 * 128 * 2),
    "Bamba": (shape(32, 8, 128, attn_layer_indices=[9, 18, 27]), 3 * 2 * 8 * 128 * 2),
    "Nemotron-H": (
        shape(52, 8, 128, hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        4 * 2 * 8 * 128 * 2,
    ),
    "Kimi-Linear": (
        shape(27, 32, 72, **LATENT, linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}),
        7 * 576 * 2,
    ),
    "Zamba2": (
        shape(54, 32, 160, layers_block_type=(["mamba"] * 6 + ["hybrid"]) * 7 + ["mamba"] * 4 + ["hybrid"])
        | {"head_dim": None, "attention_head_dim": 160, "kv_channels": 80},
        8 * 2 * 32 * 160 * 2,
    ),
    "RecurrentGemma": (
        shape(26, 1, 256, block_types=["recurrent", "recurrent", "attention"], attention_window_size=2048),
        8 * 2 * 1 * 256 * 2,
    ),
    "LFM2": (shape(16, 8, 64, full_attn_idxs=[2, 5, 8, 10, 12, 14]), 6 * 2 * 8 * 64 * 2),
    "Llama-3.2-Vision": (
        shape(40, 8, 128, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]),
        32 * 2 * 8 * 128 * 2,
    ),
    "DeciLM": (
        shape(4, 8, 128, num_key_value_heads_per_layer=[4, 2, 1, 4]) | {"num_key_value_heads": None},
        (4 + 2 + 1 + 4) * 2 * 128 * 2,
    ),
    "Nemotron-51B": (
        shape(
            4,
            8,
            128,
            block_configs=[
                {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
                {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
                {"attention": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": True}},
                {"attention": {"n_heads_in_group": 16, "no_op": False, "replace_with_linear": False}},
            ],
        )
        | {"num_key_value_heads": None},
        (32 // 8 + 32 // 16) * 2 * 128 * 2,
    ),
    "Hunyuan": (
        shape(64, 8, 128, use_cla=True, cla_share_factor=2) | {"head_dim": None, "attention_head_dim": 128},
        32 * 2 * 8 * 128 * 2,
    ),
    # The last of every 5 layers has softmax attention; of 22, the two behind the last whole group too.
    "Ring-mini-linear": (shape(20, 4, 128, layer_group_size=5), 4 * 2 * 4 * 128 * 2),
    "Ring with a rest": (shape(22, 4, 128, layer_group_size=5), 6 * 2 * 4 * 128 * 2),
    # A latent of 576 elements of 16 bits, and an indexer's key: 128 of 8 bits with one scale of 32.
    "DeepSeek-V3.2": (shape(61, 128, 128, **LATENT, index_head_dim=128), 61 * (576 * 2 + 128 + 4)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token_as_published(family):
    config, num_bytes = FAMILIES[family]
    geometry = ModelGeometry.from_config(config)
    report = capacity(config, kv_cache_memory_bytes=1 << 40, max_model_len=4096)
    assert geometry.bytes_per_token() == num_bytes == sum(geometry.group_bytes_per_token().values())
    assert (report.bytes_per_token, report.block_bytes) == (num_bytes, 16 * num_bytes)
    assert geometry.num_hidden_layers == config["num_hidden_layers"]


def test_what_is_counted_unlike_plain_layers_is_noted():
    notes = {
        family: " ".join(capacity(config, kv_cache_memory_bytes=1 << 40).notes)
        for family, (config, _) in FAMILIES.items()
    }
    assert "10 of 80 layers keep KV of their own" in notes["MiniMax-Text-01"]
    assert "the KV of an image" in notes["Llama-3.2-Vision"]
    assert "unequally many KV heads (2 of 4, 1 of 2, 1 of 1)" in notes["DeciLM"]
    assert "8,052 of the bytes of one token are keys of the indexer" in notes["DeepSeek-V3.2"]
    assert "of their own; others read that of an earlier layer" in notes["Hunyuan"]
    # Of Nemotron-51B's layers without KV none has a state; of Hunyuan's all have attention.
    with_a_state = [family for family, text in notes.items() if "the state per sequence" in text]
    assert with_a_state == [
        "MiniMax-Text-01", "Bamba", "Nemotron-H", "Kimi-Linear", "Zamba2", "RecurrentGemma", "LFM2",
        "Llama-3.2-Vision", "Ring-mini-linear", "Ring with a rest",
    ]  # fmt: skip


def test_what_multi_token_prediction_would_take_is_noted():
    """GLM-4.5: one layer more of 2 x 8 x 128 x 2 bytes, half of them in 8 bits."""
    glm = shape(92, 8, 128, num_nextn_predict_layers=1)
    for dtype, num_bytes in (("auto", "4,096"), ("fp8", "2,048")):
        (note,) = capacity(glm, kv_cache_memory_bytes=1 << 40, kv_cache_dtype=dtype).notes
        assert f"(num_nextn_predict_layers 1) is not counted: with it a token takes {num_bytes} bytes more" in note


def test_a_state_that_nothing_explains_is_noted():
    falcon_h1 = shape(44, 2, 128, mamba_d_state=256)
    explained = falcon_h1 | {"layer_types": ["attention"] * 44}
    (note,) = capacity(falcon_h1, kv_cache_memory_bytes=1 << 33).notes
    assert "has mamba_d_state, but no key that kvsim understands" in note
    assert capacity(explained, kv_cache_memory_bytes=1 << 33).notes == ()


def test_heads_of_layers_without_kv_do_not_count():
    config = shape(4, 8, 128, num_key_value_heads_per_layer=[2, 8, 2, 8], attn_type_list=[1, 0, 1, 0])
    assert ModelGeometry.from_config(config).bytes_per_token() == 2 * 2 * 2 * 128 * 2


def test_the_indexers_keys_do_not_shrink_with_the_caches_dtype():
    geometry = ModelGeometry.from_config(FAMILIES["DeepSeek-V3.2"][0])
    assert geometry.bytes_per_token("fp8") == 61 * (576 + 128 + 4)


def test_heads_of_every_layer_are_split_and_replicated_on_their_own():
    geometry = ModelGeometry.from_config(FAMILIES["DeciLM"][0])
    assert geometry.groups == (
        LayerGroup(FULL, 2, None, 4),
        LayerGroup(FULL, 1, None, 2),
        LayerGroup(FULL, 1, None, 1),
    )
    assert not geometry.is_hybrid
    # On each of two ranks: 2 of 4, 1 of 2, and the one head whole.
    assert geometry.bytes_per_token("auto", 2) == (2 + 1 + 1 + 2) * 2 * 128 * 2


def test_equal_heads_said_layer_by_layer_are_those_of_the_model():
    config = shape(32, 8, 128, num_key_value_heads_per_layer=[4] * 32)
    geometry = ModelGeometry.from_config(config)
    assert (geometry.num_key_value_heads, geometry.groups) == (4, (LayerGroup(FULL, 32),))
    assert geometry.bytes_per_token() == 65_536


@pytest.mark.parametrize(("family", "every"), [("gemma2", 2), ("gemma3", 6), ("gemma3_text", 6), ("cohere2", 4)])
def test_families_have_their_own_default_of_which_layers_are_global(family, every):
    config = shape(62, 16, 128, model_type=family, sliding_window=1024)
    num_global = 62 // every
    assert set(ModelGeometry.from_config(config).groups) == {
        LayerGroup(SLIDING, 62 - num_global, 1024),
        LayerGroup(FULL, num_global),
    }


def test_gemma_3_as_published_is_that_of_the_catalog():
    text = shape(62, 16, 128, model_type="gemma3_text", sliding_window=1024)
    published = ModelGeometry.from_config({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text})
    assert published.groups == (LayerGroup(SLIDING, 52, 1024), LayerGroup(FULL, 10))


@pytest.mark.parametrize(
    "said",
    [
        {"layer_types": ([CHUNKED] * 3 + [FULL]) * 12},
        {"no_rope_layers": [1, 1, 1, 0] * 12},
        {"no_rope_layers": []},
        {"no_rope_layer_interval": 4},
        {},
    ],
)
def test_llama_4_says_its_chunks_in_several_ways(said):
    geometry = ModelGeometry.from_config({**LLAMA_4, **said})
    assert geometry.groups == (LayerGroup(CHUNKED, 36, 8192), LayerGroup(FULL, 12))
    # Of 4 groups of 12 layers, one keeps 2^20 tokens (65,536 blocks), three a chunk and a step (1,024).
    report = capacity(
        geometry, kv_cache_memory_bytes=1 << 40, max_model_len=1 << 20, max_num_batched_tokens=8192, block_size=16
    )
    assert report.num_blocks_per_request == -(-(65_536 + 3 * 1024) // 4)


def test_a_recurrent_model_has_the_window_of_its_local_attention():
    geometry = ModelGeometry.from_config(FAMILIES["RecurrentGemma"][0])
    assert geometry.groups == (LayerGroup(SLIDING, 8, 2048),)
    assert geometry.sliding_window == 2048


MIMO = shape(48, 4, 192, hybrid_layer_pattern=([0] + [1] * 5) * 8, sliding_window=128)


def test_a_pattern_of_windows_over_equal_layers_is_counted():
    assert ModelGeometry.from_config(MIMO).groups == (LayerGroup(FULL, 8), LayerGroup(SLIDING, 40, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_head_dim": 128}, "v_head_dim is 128, and head_dim 192: .* not counted; write a configuration of layers"),
        ({"swa_num_key_value_heads": 8}, "swa_num_key_value_heads is 8, and num_key_value_heads 4"),
        (
            {"num_key_value_heads_per_layer": [4, 2] * 24},
            "num_key_value_heads_per_layer gives layers unequal KV heads, and some of them have a window",
        ),
        ({"attn_type_list": [1] * 47}, "attn_type_list has 47 entries, num_hidden_layers is 48"),
        ({"attn_type_list": [2] * 48}, r"attn_type_list\[0\] is 2; it must be a whole number from 0 to 1"),
        ({"attn_layer_indices": [48]}, r"attn_layer_indices\[0\] is 48; .* from 0 to 47"),
        ({"hybrid_override_pattern": "*" * 49}, "hybrid_override_pattern has 49 letters"),
        ({"hybrid_override_pattern": "?" * 48}, r"hybrid_override_pattern has \?; known are \*, M, -, E"),
        ({"layers_block_type": ["dream"] * 48}, "layers_block_type has dream; known are attention, hybrid"),
        ({"block_types": []}, r"block_types is \[\]; it must name at least one"),
        ({"linear_attn_config": {"num_heads": 32}}, "linear_attn_config lacks full_attn_layers"),
        ({"linear_attn_config": {"full_attn_layers": [0]}}, r"full_attn_layers\[0\] is 0; .* from 1 to 48"),
        ({"use_cla": True}, "lacks cla_share_factor"),
        ({"block_configs": [{"attention": 3}] * 48}, r"block_configs\[0\] is .*; it must be a mapping"),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": 5}}] * 48},
            r"n_heads_in_group is 5; it must divide num_attention_heads \(32\)",
        ),
        ({"sliding_window": None, "attention_chunk_size": 8192}, "attention_chunk_size but lacks layer_types"),
        ({"attn_type_list": [0] * 48}, "48 layers and none that keeps keys and values"),
        ({"global_head_dim": 512}, "global_head_dim is 512, and head_dim"),
        ({"num_global_key_value_heads": 1}, "num_global_key_value_heads is 1, and num_key_value_heads"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_its_key(change, message):
    with pytest.raises(GeometryError, match=message):
        ModelGeometry.from_config({**MIMO, **change})
