"""The longest text of a model: the lengths that families give under names of their own, and rotary scalings."""

from __future__ import annotations

import pytest

from kvsim.memory.geometry import GeometryError, ModelGeometry
from kvsim.memory.model_len import max_model_len

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 2048}, 2048),
        ({"max_seq_len": 8192}, 8192),
        ({"seq_length": 131_072}, 131_072),
        ({"max_position_embeddings": 32_768, "seq_length": 8192}, 8192),  # Qwen-7B
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),  # Command-R
        ({"max_position_embeddings": 32_768, "rope_scaling": None}, 32_768),
        ({"max_position_embeddings": 32_768, "rope_scaling": YARN}, 131_072),  # Qwen2.5 with YaRN
        ({"max_position_embeddings": 40_960, "rope_scaling": YARN}, 131_072),  # Qwen3 with YaRN
        ({"max_position_embeddings": 163_840, "rope_scaling": {**YARN, "factor": 5}}, 163_840),
        ({"max_position_embeddings": 16_384, "rope_scaling": {"type": "linear", "factor": 4.0}}, 65_536),
        ({"max_position_embeddings": 32_768, "rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, 81_920),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131_072),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"type": "longrope", "factor": 32}}, 131_072),
        ({"max_position_embeddings": 128_000, "rope_scaling": {"type": "mrope", "mrope_section": [1]}}, 128_000),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131_072,
        ),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
                },
            },
            131_072,
        ),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
    ],
)
def test_the_longest_text(config, longest):
    assert max_model_len(config) == longest


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", "rope_scaling is 'yarn'; it must be a mapping"),
        ({"type": "linear", "factor": "4"}, "factor of the rotary scaling is '4'; it must be a number from 1"),
        ({"type": "linear", "factor": 0}, "factor of the rotary scaling is 0"),
        ({"type": 3}, "type is 3; it must be a text"),
        ({**YARN, "original_max_position_embeddings": -1}, "original_max_position_embeddings is -1"),
    ],
)
def test_a_scaling_that_cannot_be_used_is_named(scaling, message):
    with pytest.raises(GeometryError, match=message):
        max_model_len({"max_position_embeddings": 4096, "rope_scaling": scaling})


@pytest.mark.parametrize(
    ("config", "num_bytes", "longest"),
    [
        # MPT-7B: 2 x 32 layers x 32 heads x 128 x 2 bytes.
        ({"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048}, 524_288, 2048),
        # DBRX: 2 x 40 layers x 8 KV heads x 128 x 2 bytes.
        (
            {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768, "attn_config": {"kv_n_heads": 8}},
            163_840,
            32_768,
        ),
        (
            {"d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"attn_type": "multiquery_attention"}},
            16_384,
            None,
        ),
        # BLOOM-176B: 2 x 70 layers x 112 heads x 128 x 2 bytes.
        ({"n_embed": 14_336, "n_layer": 70, "num_attention_heads": 112, "seq_length": 2048}, 4_014_080, 2048),
        # Mistral-Nemo's params.json: 2 x 40 layers x 8 KV heads x 128 x 2 bytes.
        ({"dim": 5120, "n_layers": 40, "head_dim": 128, "n_heads": 32, "n_kv_heads": 8}, 163_840, None),
        # Step3: one KV head of 256 for 64 query heads, 2 x 61 layers x 256 x 2 bytes.
        (
            {
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "num_attention_heads": 64,
                "num_attention_groups": 1,
                "head_dim": 256,
                "max_position_embedding": 65_536,
            },
            62_464,
            65_536,
        ),
    ],
)
def test_families_with_names_of_their_own(config, num_bytes, longest):
    geometry = ModelGeometry.from_config({**config, "torch_dtype": "bfloat16"})
    assert geometry.bytes_per_token() == num_bytes
    assert geometry.max_model_len == longest
