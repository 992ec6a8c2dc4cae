"""Shapes of models whose layers differ: priced where they are alike after all, else refused by name."""

from __future__ import annotations

import pytest

from kvsim.catalog import load_model, model_names
from kvsim.cost.shapes import Matrix, model_shapes
from kvsim.memory.geometry import ModelGeometry
from kvsim.memory.weights import count_params
from kvsim.types import ScenarioError

LLAMA = dict(load_model("llama-3.1-8b").config)


def test_a_list_of_equal_widths_is_one_width():
    listed = ModelGeometry.from_config(LLAMA | {"intermediate_size": [14_336] * 32})
    assert model_shapes(listed).matrices == model_shapes(ModelGeometry.from_config(LLAMA)).matrices


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": [14_336, 7168] * 16}, r"intermediate_size is \[14336, 7168, .*type: linear"),
        ({"intermediate_size": "x"}, "intermediate_size is 'x'; it must be a whole number"),
        ({"num_local_experts": [8]}, r"num_local_experts is \[8\]"),
        ({"num_key_value_heads_per_layer": [8, 4] * 16}, "unequally many KV heads: .*type: linear"),
    ],
)
def test_layers_that_are_not_alike_are_refused(change, message):
    with pytest.raises(ScenarioError, match=message):
        model_shapes(ModelGeometry.from_config(LLAMA | change))


def test_sparse_attention_is_priced_as_dense_and_says_so():
    sparse = dict(load_model("deepseek-v3").config) | {"index_head_dim": 128}
    assert any("sparse attention" in note for note in model_shapes(ModelGeometry.from_config(sparse)).notes)


WINDOWED = LLAMA | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}


@pytest.mark.parametrize(
    ("change", "windows", "num_kv_layers"),
    [
        ({}, [(32, None)], 32),
        ({"num_kv_shared_layers": 12}, [(32, None)], 20),
        ({"use_cla": True, "cla_share_factor": 2}, [(32, None)], 16),
        (WINDOWED | {"num_kv_shared_layers": 10}, [(16, 512), (16, None)], 22),
        ({"full_attention_interval": 4}, [(8, None)], 8),
    ],
)
def test_layers_that_read_the_kv_of_others_are_priced_too(change, windows, num_kv_layers):
    geometry = ModelGeometry.from_config(LLAMA | change)
    shapes = model_shapes(geometry)
    assert geometry.num_kv_layers == num_kv_layers
    assert list(shapes.windows) == windows
    assert any("24 layers without attention" in note for note in shapes.notes) == ("full_attention_interval" in change)


QWEN2_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


@pytest.mark.parametrize(
    ("config", "tp", "width", "active"),
    [
        (load_model("llama-4-scout").config, 1, 8192, 2 * 8192),
        (load_model("deepseek-v2-lite").config, 1, 2 * 1408, 8 * 1408),
        (load_model("deepseek-v3").config, 2, 1024, 9 * 1024),
        (LLAMA | QWEN2_MOE | {"shared_expert_intermediate_size": 5632}, 1, 5632, 4 * 1408 + 5632),
        (load_model("mixtral-8x7b").config, 1, 0, 2 * 14_336),
        (load_model("qwen3-30b-a3b").config, 1, 0, 8 * 768),
    ],
)
def test_experts_that_every_token_passes_are_dense(config, tp, width, active):
    shapes = model_shapes(ModelGeometry.from_config(config), tp)
    hidden = shapes.hidden_size
    last_expert = max(index for index, matrix in enumerate(shapes.matrices) if matrix.num_experts > 1)
    behind = [Matrix(2 * width, hidden), Matrix(hidden, width)] if width else []
    assert list(shapes.matrices[last_expert + 1 :]) == behind
    assert [width for kind, width, _ in shapes.row_ops if kind == "act_fn"] == [3 * active]


@pytest.mark.parametrize(("model", "said"), [("deepseek-v3", True), ("mixtral-8x7b", False), ("llama-3.1-8b", False)])
def test_layers_without_experts_are_pointed_out(model, said):
    notes = model_shapes(load_model(model)).notes
    assert any("layers without experts are priced as those with them" in note for note in notes) == said


@pytest.mark.parametrize(
    ("model", "dtype", "kv_bytes"),
    [
        ("llama-3.1-8b", "auto", 2),
        ("llama-3.1-8b", "fp8", 1),
        ("llama-3.1-8b", "q8_0", 34 / 32),
        ("llama-3.1-8b", "int4", 0.5),
        # A latent counts as K and V, and is read once.
        ("deepseek-v3", "auto", 2 / 2),
        ("deepseek-v3", "fp8", 1 / 2),
        ("deepseek-v3", "fp8_ds_mla", 656 / 576 / 2),
    ],
)
def test_attention_reads_the_bytes_of_its_cache(model, dtype, kv_bytes):
    shapes = model_shapes(load_model(model), 1, dtype)
    assert shapes.kv_bytes == kv_bytes
    assert any("unpacking" in note for note in shapes.notes) == (dtype in ("q8_0", "int4", "fp8_ds_mla"))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", model_names())
def test_the_matrices_priced_are_the_weights_counted(name, tp):
    """Layers without experts are left out: they are priced as those with them, which is said."""
    model = ModelGeometry.from_config(dict(load_model(name).config) | {"first_k_dense_replace": 0})
    shapes, counted = model_shapes(model, tp), count_params(model)
    dense = sum(matrix.n * matrix.k for matrix in shapes.matrices if matrix.num_experts == 1)
    experts = sum(matrix.n * matrix.k * matrix.num_experts for matrix in shapes.matrices if matrix.num_experts > 1)
    assert shapes.num_layers * dense == counted.linear / tp + counted.replicated
    assert shapes.num_layers * experts == counted.expert / tp


def test_latent_projections_without_their_widths_are_priced_as_wide_heads_and_said_to_be():
    config = {**load_model("deepseek-v2-lite").config, "v_head_dim": None}
    shapes = model_shapes(ModelGeometry.from_config(config))
    assert shapes.matrices[:2] == (Matrix((16 + 2) * 576, 2048), Matrix(2048, 16 * 576))
    assert any("lacks qk_nope_head_dim or v_head_dim" in note for note in shapes.notes)
    assert len(shapes.notes) == len(model_shapes(load_model("deepseek-v2-lite")).notes) + 1


def test_the_rotary_part_of_a_latent_is_all_that_is_rotated():
    rotary = [width for kind, width, _ in model_shapes(load_model("deepseek-v3"), 8).row_ops if kind == "rotary_emb"]
    assert rotary == [2 * (16 + 1) * 64]


@pytest.mark.parametrize(
    ("config", "num_kv_tensors"),
    [
        (LLAMA, 64),
        (load_model("deepseek-v3").config, 61),
        (LLAMA | {"full_attention_interval": 4}, 16),
        (LLAMA | {"num_kv_shared_layers": 12}, 40),
    ],
)
def test_a_swapped_block_is_a_copy_of_each_tensor_that_it_is_in(config, num_kv_tensors):
    assert model_shapes(ModelGeometry.from_config(config)).num_kv_tensors == num_kv_tensors
