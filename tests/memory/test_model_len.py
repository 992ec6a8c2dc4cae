"""The longest text of a model: the lengths that families give under names of their own, and rotary scalings."""

from __future__ import annotations

import json

import pytest

import kvsim
from kvsim.capacity import capacity
from kvsim.memory.geometry import GeometryError, ModelGeometry
from kvsim.memory.model_len import max_model_len

CHATGLM = {
    "num_layers": 28,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_group_num": 2,
    "seq_length": 32_768,
}
WHISPER = {
    "is_encoder_decoder": True,
    "d_model": 1280,
    "num_hidden_layers": 32,
    "decoder_layers": 32,
    "decoder_attention_heads": 20,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
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
        # ChatGLM with as many KV heads as query heads, and with 2: 2 x 28 layers x 32 or 2 heads x 128 x 2 bytes.
        ({**CHATGLM, "multi_query_attention": False}, 458_752, 32_768),
        ({**CHATGLM, "multi_query_attention": True}, 28_672, 32_768),
        # LongCat-Flash: two attentions in each of 28 layers, 2 x 28 x 576 x 2 bytes.
        (
            {
                "model_type": "longcat_flash",
                "num_layers": 28,
                "hidden_size": 6144,
                "num_attention_heads": 64,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            64_512,
            None,
        ),
        # Whisper large v3: 2 x 32 layers x 20 heads x 64 x 2 bytes.
        (WHISPER, 163_840, 448),
        # T5-large's decoder: 2 x 24 layers x 16 heads x 64 x 2 bytes.
        (
            {
                "is_encoder_decoder": True,
                "num_layers": 12,
                "num_decoder_layers": 24,
                "d_model": 1024,
                "d_kv": 64,
                "num_heads": 16,
                "n_positions": 512,
            },
            98_304,
            512,
        ),
    ],
)
def test_families_with_names_of_their_own(config, num_bytes, longest):
    geometry = ModelGeometry.from_config({**config, "torch_dtype": "bfloat16"})
    assert geometry.bytes_per_token() == num_bytes
    assert geometry.max_model_len == longest


def test_every_request_of_an_encoder_decoder_keeps_the_encoders_output(tmp_path):
    """448 tokens of text are 28 blocks of 16, 1,500 of speech 94: 122 of 6,553 blocks."""
    config = {**WHISPER, "torch_dtype": "float16"}
    report = capacity(config, kv_cache_memory_bytes=16 << 30)
    assert (report.num_gpu_blocks, report.num_blocks_per_request) == (6553, 122)
    assert report.max_concurrency == pytest.approx(6553 / 122)
    assert "keeps the KV of 1,500 tokens of the encoder's output" in " ".join(report.notes)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    workload = {"requests": [{"prompt_tokens": 4, "output_tokens": 2}]}
    run = kvsim.run({"model": str(path), "memory": {"kv_cache_memory_bytes": 1 << 30}, "workload": workload})
    assert "the run does not simulate it: kvsim capacity counts it" in " ".join(run.summary["warnings"])


def test_an_encoders_output_of_unknown_length_is_missed():
    config = {**WHISPER, "max_source_positions": None, "torch_dtype": "float16"}
    with pytest.raises(GeometryError, match="lacks max_source_positions"):
        ModelGeometry.from_config(config)
