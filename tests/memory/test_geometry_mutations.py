"""Damaged configurations, key by key: a finite answer or an error of ours, never another exception, never a hang."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvsim.capacity import capacity
from kvsim.catalog import load_model
from kvsim.cost.shapes import model_shapes
from kvsim.memory.geometry import ModelGeometry
from kvsim.types import KvsimError

BAD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    1.5,
    10**30,
    10**400,
    float("nan"),
    float("inf"),
    "x",
    "",
    "4096",
    [],
    [1],
    [[]],
    ["x"] * 32,
    [None] * 32,
    [-1] * 32,
    {},
    {"a": 1},
]

COMMON = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "model_type": "llama",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": COMMON
    | {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "multi_query": False,
        "new_decoder_architecture": False,
        "_name_or_path": "mine",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    },
    "windows": COMMON
    | {
        "model_type": "cohere2",
        "sliding_window": 4096,
        "use_sliding_window": True,
        "sliding_window_pattern": 4,
        "max_window_layers": 28,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "listed": {
        "torch_dtype": "bfloat16",
        "text_config": COMMON
        | {
            "model_type": "gemma3",
            "layer_types": ["sliding_attention", "full_attention"] * 16,
            "sliding_window": 512,
            "num_kv_shared_layers": 4,
            "num_key_value_heads_per_layer": None,
        },
    },
    "experts": dict(load_model("qwen3-30b-a3b").config)
    | {
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
        },
    },
    "latent": dict(load_model("deepseek-v3").config)
    | {"index_head_dim": 128, "linear_attn_config": {"full_attn_layers": [4, 8, 61]}},
    "chunks": COMMON
    | {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0] * 8,
        "no_rope_layer_interval": 4,
    },
    "hybrid": COMMON
    | {
        "attn_layer_indices": [4, 12, 20],
        "full_attn_idxs": [4, 12, 20],
        "attn_type_list": [1] * 32,
        "hybrid_override_pattern": "*" * 32,
        "layers_block_type": ["attention", "mamba"] * 16,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "full_attention_interval": 1,
    },
    "recurrent": COMMON
    | {"block_types": ["recurrent", "attention"], "attention_window_size": 2048, "cross_attention_layers": [3]},
    "shared": COMMON | {"use_cla": True, "cla_share_factor": 2, "v_head_dim": 128, "swa_num_key_value_heads": 8},
    "uneven": COMMON | {"num_key_value_heads_per_layer": [8, 4] * 16},
    "blocks": COMMON
    | {
        "hybrid_layer_pattern": [0, 1] * 16,
        "block_configs": [{"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False}}] * 32,
    },
    "stretched": COMMON
    | {
        "seq_length": 4096,
        "model_max_length": 8192,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    },
    "mpt": {"torch_dtype": "bfloat16", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768}
    | {"attn_config": {"kv_n_heads": 8, "attn_type": "multihead_attention"}},
    "opt": dict(load_model("opt-13b").config) | {"word_embed_proj_dim": 5120, "do_layer_norm_before": True},
    "gpt-oss": dict(load_model("gpt-oss-20b").config),
}


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key, and the first entry of every list."""
    children = node.items() if isinstance(node, dict) else enumerate(node[:1]) if isinstance(node, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from paths(child, (*path, key))


def mutated(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    node: Any = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return config


def answers(config: dict[str, Any]) -> Iterator[float]:
    """All that is ever asked of a configuration; one answer that is refused keeps none of the others."""
    for ask in (_of_memory, _of_a_cache, _of_shapes):
        with suppress(KvsimError):
            yield from ask(config)


def _of_memory(config: dict[str, Any]) -> Iterator[float]:
    report = capacity(config, "h200", max_model_len=4096, tensor_parallel_size=2)
    json.dumps(report.to_dict())
    assert report.render()
    yield from (report.bytes_per_token, report.block_bytes, report.weight_bytes or 0, report.activation_bytes or 0)
    yield report.num_blocks_per_request


def _of_a_cache(config: dict[str, Any]) -> Iterator[float]:
    report = capacity(config, kv_cache_memory_bytes=1 << 33, kv_cache_dtype="fp8")
    assert report.render()
    yield report.bytes_per_token
    yield report.num_blocks_per_request


def _of_shapes(config: dict[str, Any]) -> Iterator[float]:
    shapes = model_shapes(ModelGeometry.from_config(config))
    yield from (shapes.num_layers, shapes.hidden_size, shapes.bytes_per_token, shapes.kv_bytes)
    yield from (size for matrix in shapes.matrices for size in (matrix.n, matrix.k, matrix.num_experts))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_in_place_of_any_other_is_answered_or_refused(name):
    config = CONFIGS[name]
    for path in paths(config):
        for value in BAD:
            for answer in answers(mutated(config, path, value)):
                assert math.isfinite(answer), (path, value)
                assert answer > 0, (path, value)


@pytest.mark.parametrize("name", CONFIGS)
def test_undamaged_they_are_answered(name):
    assert any(True for _ in _of_a_cache(CONFIGS[name]))


@pytest.mark.parametrize("value", BAD)
def test_no_mapping_is_no_configuration(value):
    if not isinstance(value, dict):
        with pytest.raises(KvsimError, match="a model configuration is a mapping"):
            ModelGeometry.from_config(value)
