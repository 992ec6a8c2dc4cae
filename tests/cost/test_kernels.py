"""The kernel cost model: its tables against its formulas, what moves its parts, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import num_lines

from kvsim.catalog import load_model
from kvsim.cost.kernel_times import KernelTimes
from kvsim.cost.kernels import KernelCost, vllm_graph_sizes
from kvsim.cost.page_size import block_size_factor, l2_share
from kvsim.cost.profile import load_profile, profile_names
from kvsim.cost.roofline import roofline_cost, roofline_profile
from kvsim.cost.shapes import model_shapes
from kvsim.memory.geometry import ModelGeometry
from kvsim.scheduling.plan import StepShape
from kvsim.types import ScenarioError

LLAMA = load_model("llama-3.1-8b")
COSTS = {name: KernelCost.from_profile(name, LLAMA, block_size=16, overhead_us=0.0) for name in profile_names()}


def decode(num: int, ctx: int) -> StepShape:
    return StepShape(num, num * ctx)


def direct_us(cost: KernelCost, shape: StepShape) -> float:
    """The step from the fits themselves, without tables (one chunk at most)."""
    times, num = cost.times, shape.num_decodes
    total = float(times.dense_us(np.array([float(shape.num_tokens)]))[0])
    total += float(times.head_us(np.array([float(num + len(shape.prefills))]))[0])
    ctx = shape.context_tokens / max(1, num)
    if not shape.prefills:
        return total + float(times.decode_us(np.array([float(num)]), np.array([ctx]))[0]) * cost._page_factor
    ((start, length),) = shape.prefills
    chunk, prefix = np.array([float(length)]), np.array([float(start)])
    if not num:
        return total + float(times.prefill_us(1.0, chunk, prefix)[0])
    return total + float(times.mixed_us(np.array([float(num)]), np.array([ctx]), 1.0, chunk, prefix)[0])


def test_the_shipped_profiles() -> None:
    assert profile_names() == ["a100", "h100", "h200", "rtx4090", "rtxpro6000"]


@pytest.mark.parametrize("name", profile_names())
@given(num=st.integers(1, 256), ctx=st.integers(64, 8000))
def test_decode_tables_agree_with_the_formula(name: str, num: int, ctx: int) -> None:
    shape = decode(num, ctx)
    assert COSTS[name].step_ns(shape) / 1e3 == pytest.approx(direct_us(COSTS[name], shape), rel=0.01)


@pytest.mark.parametrize("name", profile_names())
@given(num=st.integers(0, 128), ctx=st.integers(128, 4000), start=st.integers(0, 4000), length=st.integers(128, 2048))
def test_prompt_tables_agree_with_the_formula(name: str, num: int, ctx: int, start: int, length: int) -> None:
    shape = StepShape(num, num * ctx, ((start, length),))
    assert COSTS[name].step_ns(shape) / 1e3 == pytest.approx(direct_us(COSTS[name], shape), rel=0.01)


@pytest.mark.parametrize("length", range(230, 450, 9))
def test_prompt_tables_follow_a_correction_that_swings(length: int) -> None:
    """The attention of a chunk behind a long prefix, where this profile's falls by a quarter and more than recovers."""
    shape = StepShape(0, 0, ((3805, length),))
    assert COSTS["rtxpro6000"].step_ns(shape) / 1e3 == pytest.approx(direct_us(COSTS["rtxpro6000"], shape), rel=0.006)


@pytest.mark.parametrize("name", profile_names())
def test_more_work_costs_more(name: str) -> None:
    cost = COSTS[name]
    by_context = [cost.step_ns(decode(32, ctx)) for ctx in (128, 512, 2048, 8192)]
    by_prompt = [cost.step_ns(StepShape(0, 0, ((0, length),))) for length in (128, 512, 2048, 8192)]
    assert by_context == sorted(by_context)
    assert by_prompt == sorted(by_prompt)


@pytest.mark.parametrize("name", profile_names())
def test_a_prefix_hit_saves_computation_but_not_attention(name: str) -> None:
    cost = COSTS[name]
    whole, hit, alone = (cost.step_ns(StepShape(0, 0, (chunk,))) for chunk in ((0, 2048), (1536, 512), (0, 512)))
    assert alone < hit < 0.5 * whole


def all_reduce_us(name: str, num_gpus: int, size: int) -> float:
    fit = load_profile(name).find("all_reduce")
    assert fit is not None
    return float(fit.predict_us({"bytes": np.array([float(size)]), "num_gpus": float(num_gpus)})[0])


MIB = 1 << 20


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_hopper_reduces_in_the_switch_from_256_kib_on_eight_gpus(name: str) -> None:
    for size in (MIB, 4 * MIB, 16 * MIB):
        # A two-shot among eight GPUs would move more than one among four.
        assert all_reduce_us(name, 8, size) < 1.3 * all_reduce_us(name, 4, size)
    assert all_reduce_us(name, 8, 32 * MIB) < 0.62 * all_reduce_us(name, 8, 64 * MIB)


@pytest.mark.parametrize("name", ["rtx4090", "rtxpro6000"])
def test_a_sequence_alone_saves_a_launch(name: str) -> None:
    fit = load_profile(name).find("decode_attention")
    assert fit is not None
    shape = {"heads": 32.0, "kv_heads": 8.0, "head_dim": 128.0, "kv_bytes": 2.0}
    alone, pair = (float(fit.predict_us({"batch": np.array([b]), "ctx_len": 64.0, **shape})[0]) for b in (1.0, 2.0))
    assert 2.5 < pair - alone < 6.0


@pytest.mark.parametrize("name", ["rtx4090", "rtxpro6000"])
def test_between_measured_batch_sizes_time_does_not_sag(name: str) -> None:
    """Attention of many long sequences is linear in their number, and only doublings were measured."""
    fit = load_profile(name).find("decode_attention")
    assert fit is not None
    shape = {"heads": 32.0, "kv_heads": 8.0, "head_dim": 128.0, "kv_bytes": 2.0, "ragged": True}
    ctx = np.array([600.0, 1100.0, 1500.0, 2500.0, 4000.0])
    for low in (16.0, 32.0, 64.0):
        ends, middle = (
            sum(fit.predict_us({"batch": batch, "ctx_len": ctx, **shape}) for batch in batches) / len(batches)
            for batches in ((low, 2 * low), (1.5 * low,))
        )
        assert middle == pytest.approx(ends, rel=0.03)


def test_overheads_go_to_their_own_kind_of_step() -> None:
    plain = COSTS["h100"]
    cost = KernelCost.from_profile("h100", LLAMA, block_size=16, overhead_us=100.0, mixed_overhead_us=5000.0)
    prompt = StepShape(4, 4000, ((0, 300),))
    assert cost.step_ns(decode(4, 1000)) - plain.step_ns(decode(4, 1000)) == pytest.approx(100_000, abs=1)
    assert cost.step_ns(prompt) - plain.step_ns(prompt) == pytest.approx(5_000_000, abs=1)


def test_decode_batches_are_padded_to_captured_graphs() -> None:
    sizes = vllm_graph_sizes(256)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-1] == 512
    padded = KernelCost.from_profile("h100", LLAMA, block_size=16, overhead_us=0.0, cuda_graph_sizes=sizes)
    assert padded._padded(9) == 16
    assert padded._padded(16) == 16
    assert padded._padded(600) == 600


def test_whole_gemm_tiles() -> None:
    cost = KernelCost.from_profile("h100", LLAMA, overhead_us=0.0, gemm_tiles=((768, 128), (1 << 30, 256)))
    assert [cost._tiled(n) for n in (200, 513, 640, 641, 769, 1024, 1025)] == [200, 640, 640, 768, 1024, 1024, 1280]


def test_the_block_table_costs_what_it_says() -> None:
    shape = StepShape(8, 8000, num_table_updates=8, num_table_rows=8, num_table_entries=500, num_alloc_decisions=8)
    bare = COSTS["a100"].step_ns(decode(8, 1000))
    # a100: 32 GB/s x 0.8; one copy call 2.3 us; entries of 4 bytes
    by_mode = {
        mode: KernelCost.from_profile("a100", LLAMA, block_size=16, overhead_us=0.0, table_sync=mode)
        for mode in ("on_change", "every_step", "device")
    }
    extra = {mode: cost.step_ns(shape) - bare for mode, cost in by_mode.items()}
    assert extra["on_change"] == pytest.approx(2300 + 8 * 4 / 25.6, abs=1)
    assert extra["every_step"] == pytest.approx(2300 + 500 * 4 / 25.6, abs=1)
    assert extra["device"] == pytest.approx(8 * 10_000, abs=1)


def test_swapped_blocks_pay_a_call_per_layer_for_keys_and_values() -> None:
    cost = COSTS["a100"]
    per_block = cost.step_ns(StepShape(num_swapped_out_blocks=10)) - cost.step_ns(StepShape())
    # 64 copies x 2.3 us + 16 x 131072 bytes / 25.6 GB/s
    assert per_block / 10 == pytest.approx(64 * 2300 + 16 * 131072 / 25.6, rel=1e-3)


def test_an_empty_step_takes_a_nanosecond() -> None:
    assert COSTS["a100"].step_ns(StepShape()) == 1


def test_block_size_is_a_stated_factor() -> None:
    assert block_size_factor(16, 16) == (1.0, 1.0, 1.0)
    one = block_size_factor(1, 64)
    assert one.low < 1.0 < one.factor < one.high
    assert block_size_factor(4096, 64) == block_size_factor(256, 64)


def test_l2_share() -> None:
    assert l2_share(10, 40) == 1.0
    assert l2_share(160, 40) == 0.25


def test_outside_the_measured_range_it_says_so() -> None:
    cost = KernelCost.from_profile("rtx4090", LLAMA, overhead_us=0.0)
    assert cost.warnings() == []
    cost.step_ns(decode(1, 100_000))
    assert any("ctx_len" in text for text in cost.warnings())
    assert cost.is_extrapolated


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (decode(4, 400), None),
        (StepShape(0, 0, ((0, 16),) * 8), None),
        (StepShape(0, 0, ((0, 16),) * 400), "prefill_attention: batch above"),
        (StepShape(0, 0, ((0, 250_000),)), "all_reduce: bytes above"),
    ],
)
def test_every_size_that_nobody_measured_is_said(shape: StepShape, said: str | None) -> None:
    cost = KernelCost.from_profile("h100", LLAMA, tensor_parallel_size=4)
    cost.step_ns(decode(4, 400))
    before = cost.warnings()
    cost.step_ns(shape)
    found = [text for text in cost.warnings() if text not in before]
    assert any(said in text for text in found) if said else not found


def test_a_gpu_without_profile_lists_those_that_exist_and_offers_the_roofline() -> None:
    with pytest.raises(ScenarioError, match=r"a100, h100, .*type: roofline, peak_tflops: 149.7"):
        load_profile("a40")


def test_a_model_without_dimensions_is_refused() -> None:
    bare = ModelGeometry(num_hidden_layers=2, num_key_value_heads=2, head_dim=64, dtype="float16")
    with pytest.raises(ScenarioError, match="hidden_size"):
        KernelCost.from_profile("a100", bare)


def test_tensor_parallelism_needs_all_reduce_measurements() -> None:
    with pytest.raises(ScenarioError, match="all_reduce"):
        KernelCost.from_profile("rtx4090", LLAMA, tensor_parallel_size=2)
    one, two = (
        KernelCost.from_profile("h100", load_model("llama-3.1-70b"), tensor_parallel_size=n).step_ns(decode(32, 1000))
        for n in (2, 4)
    )
    assert two < one < 2 * two


def test_roofline_is_within_a_factor_of_the_measured_kernels() -> None:
    cost = roofline_cost(LLAMA, peak_tflops=989.4, memory_bandwidth_gb_s=3350, step_overhead_us=0.0)
    for shape in (decode(1, 500), decode(64, 1000), StepShape(0, 0, ((0, 2048),))):
        assert 0.6 < cost.step_ns(shape) / COSTS["h100"].step_ns(shape) < 1.6
    assert "datasheet" in cost.warnings()[0]


WINDOWED = load_model("gemma-3-4b")
"""Windows of 1,024 tokens in 29 layers, and 5 full ones."""


@pytest.mark.parametrize(("start", "length"), [(0, 512), (0, 8192), (700, 900), (5000, 300), (5000, 4096), (1024, 1)])
def test_a_window_scores_no_more_pairs_than_its_queries_see(start: int, length: int) -> None:
    """Attention that its operations bind: its time is that of the pairs of query and key, counted one by one."""
    profile = roofline_profile(1.0, 1e9, efficiency=1.0)
    shapes = replace(model_shapes(WINDOWED), windows=((1, 1024),))
    seen = sum(min(start + i, 1024) for i in range(1, length + 1))
    flops = 4 * shapes.heads * shapes.head_dim * seen
    attention_us = KernelTimes(profile, shapes).bare_prefill_us(1, length, start) - 3.0
    assert attention_us == pytest.approx(flops / 1e6, rel=0.002)


@pytest.mark.parametrize("name", ["h100", "rtxpro6000"])
@pytest.mark.parametrize("num", [0, 64])
def test_tables_of_windowed_layers_agree_with_the_formula(name: str, num: int) -> None:
    cost = KernelCost.from_profile(name, WINDOWED, overhead_us=0.0)
    for start, length in ((0, 128), (300, 700), (0, 6000), (1500, 2048), (20_000, 2048), (50_000, 512)):
        shape = StepShape(num, num * 3000, ((start, length),))
        assert cost.step_ns(shape) / 1e3 == pytest.approx(direct_us(cost, shape), rel=0.01)


@pytest.mark.parametrize("name", profile_names())
def test_a_prompt_behind_a_window_costs_what_its_pieces_do(name: str) -> None:
    """Attention to a window grows with the text, not with its square."""
    cost = KernelCost.from_profile(name, replace(model_shapes(WINDOWED), windows=((34, 1024),)), overhead_us=0.0)
    times = cost.times
    whole = times.bare_prefill_us(1, 16_384, 0)
    pieces = sum(times.bare_prefill_us(1, 2048, start) for start in range(0, 16_384, 2048))
    assert 0.7 < whole / pieces < 1.1


def test_same_answer_in_any_order() -> None:
    shapes = [decode(n, 100 * n) for n in range(1, 60, 7)]
    shapes += [StepShape(n, n * 500, ((0, 40 * n),)) for n in range(1, 9)]
    forth = KernelCost.from_profile("rtxpro6000", LLAMA, overhead_us=0.0)
    back = KernelCost.from_profile("rtxpro6000", LLAMA, overhead_us=0.0)
    assert [forth.step_ns(s) for s in shapes] == [back.step_ns(s) for s in reversed(shapes)][::-1]


def test_a_decode_step_is_priced_in_few_lines() -> None:
    cost = COSTS["h100"]
    shapes = [decode(1 + i % 256, 200 + 13 * (i % 100)) for i in range(2560)]
    for shape in shapes[:256]:
        cost.step_ns(shape)
    assert num_lines(lambda: [cost.step_ns(shape) for shape in shapes]) / len(shapes) < 40


def test_what_no_datasheet_says_is_assumed_aloud() -> None:
    """The host link and the memory of a GPU that the catalog lacks, once something is copied or swapped."""
    profile = replace(load_profile("rtx4090"), gpu="X1")
    cost = KernelCost.from_profile(profile, LLAMA)
    cost.step_ns(decode(4, 400))
    assert cost.warnings() == []
    cost.step_ns(decode(4, 400)._replace(num_swapped_out_blocks=3))
    (said,) = cost.warnings()
    assert "the catalog lacks X1, 2000 GB/s of memory and 25 GB/s to the host are assumed" in said
