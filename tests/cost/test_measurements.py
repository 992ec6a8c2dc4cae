"""Measurement files as people have them: packed, in other encodings, with other names and units."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from kvsim.catalog import load_model
from kvsim.cost.layer_ops import layer_dims, projection_shape, row_width
from kvsim.cost.measurements import load_measurements, read_rows
from kvsim.cost.shapes import model_shapes
from kvsim.types import ScenarioError

HEADER = "gpu,framework,version,kernel,op,tokens,n,k,latency_us\n"
TEXT = HEADER + "".join(f"X1,vllm,1.0,mm,gemm,{2**i},4096,512,{10 + i}.5\n" for i in range(10))
DECODE = (
    "gpu,framework,version,kernel,op,batch,ctx_len,heads,kv_heads,head_dim,kv_dtype,latency_us\n"
    "X1,vllm,1.0,fa,decode_attention,4,512,32,8,128,{kv_dtype},10\n"
)


@pytest.mark.parametrize(
    "packed",
    [TEXT.encode("utf-16"), TEXT.encode("utf-8-sig"), gzip.compress(TEXT.encode()), TEXT.replace(",", "|").encode()],
    ids=["utf-16", "utf-8 with a mark", "gzip", "bars"],
)
def test_files_are_read_however_they_are_packed(tmp_path: Path, packed: bytes) -> None:
    plain, other = tmp_path / "plain.csv", tmp_path / "other.csv"
    plain.write_text(TEXT)
    other.write_bytes(packed)
    assert read_rows(other) == read_rows(plain)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (TEXT.encode("utf-16-be"), "save it as UTF-8"),
        (gzip.compress(TEXT.encode())[:-20], "compressed data are damaged"),
        (HEADER.encode(), "no rows below the header; a measurements file has one row per kernel call"),
    ],
)
def test_files_that_cannot_be_read_say_why(tmp_path: Path, packed: bytes, said: str) -> None:
    (tmp_path / "x.csv").write_bytes(packed)
    with pytest.raises(ScenarioError, match=rf"x\.csv: .*{said}"):
        read_rows(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("column", "unit"), [("latency_us", 1.0), ("latency_ms", 1e-3), ("Latency (s)", 1e-6), ("latency_ns", 1e3)]
)
def test_the_latency_column_says_its_unit(tmp_path: Path, column: str, unit: float) -> None:
    lines = HEADER.replace("latency_us", column)
    lines += "".join(f"X1,vllm,1.0,mm,gemm,{2**i},4096,512,{(10 + i) * unit!r}\n" for i in range(10))
    (tmp_path / "x.csv").write_text(lines)
    (group,) = load_measurements(tmp_path / "x.csv").groups
    assert group.latency_us == pytest.approx([10.0 + i for i in range(10)])


def test_columns_may_go_by_the_names_of_engines_and_configurations(tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text(DECODE.format(kv_dtype="auto"))
    other = "Device,engine,version,kernel,op_name,batch_size,context_len,num_attention_heads,num_key_value_heads,"
    other += "head_size,kv_cache_dtype,latency_us\n" + DECODE.format(kv_dtype="auto").splitlines()[1]
    (tmp_path / "other.csv").write_text(other)
    assert [r for _, r in read_rows(tmp_path / "other.csv")] == [r for _, r in read_rows(tmp_path / "plain.csv")]
    # A column under its own name is the one that counts.
    (tmp_path / "both.csv").write_text(TEXT.replace("\n", ",7\n").replace("us,7", "us,m", 1))
    assert read_rows(tmp_path / "both.csv")[3][1]["tokens"] == "8"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("latency_us", "latency", "column 'latency_us' is missing (call 'latency' by its unit, one of latency_us,"),
        ("gpu,framework", "card,framwork", "column 'gpu', 'framework' is missing (did you mean 'framework' by 'fram"),
        (",n,k", ",latency_ms,k", "columns 'latency_us' and 'latency_ms' both say the latency; keep one"),
    ],
)
def test_a_header_that_cannot_be_used_says_what_to_write(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "x.csv").write_text(TEXT.replace(old, new, 1))
    with pytest.raises(ScenarioError, match=re.escape(said)):
        read_rows(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("allreduce", "'allreduce' is no known operation: did you mean 'all_reduce'?"),
        ("decode", "'decode' is no known operation: did you mean 'decode_attention'?"),
        ("softmax", "'softmax' is no known operation: known are gemm, "),
    ],
)
def test_an_operation_that_nobody_knows_is_named(tmp_path: Path, op: str, said: str) -> None:
    (tmp_path / "x.csv").write_text(DECODE.format(kv_dtype="").replace("decode_attention", op))
    with pytest.raises(ScenarioError, match=re.escape(f"line 2, column 'op': {said}")):
        load_measurements(tmp_path / "x.csv")


@pytest.mark.parametrize("value", ["31,5", "12us", "1,234.5"])
def test_a_number_is_digits_alone(tmp_path: Path, value: str) -> None:
    (tmp_path / "x.csv").write_text(TEXT.replace(",", ";").replace("10.5", value))
    with pytest.raises(ScenarioError, match=rf"line 2, column 'latency_us': '{value}' is not a number: write digits"):
        load_measurements(tmp_path / "x.csv")


@pytest.mark.parametrize("heads", ["8,32", "32,5"])
def test_kv_heads_divide_the_heads(tmp_path: Path, heads: str) -> None:
    (tmp_path / "x.csv").write_text(DECODE.format(kv_dtype="").replace("32,8", heads))
    said = f"line 2, column 'kv_heads': '{heads.split(',')[1]}' must divide heads, '{heads.split(',')[0]}'"
    with pytest.raises(ScenarioError, match=said):
        load_measurements(tmp_path / "x.csv")


@pytest.mark.parametrize(("kv_dtype", "kv_bytes"), [("", 2), ("auto", 2), ("BF16", 2), ("fp8", 1), ("fp8_inc", 1)])
def test_kv_formats_are_counted_in_bytes(tmp_path: Path, kv_dtype: str, kv_bytes: int) -> None:
    (tmp_path / "x.csv").write_text(DECODE.format(kv_dtype=kv_dtype))
    (group,) = load_measurements(tmp_path / "x.csv").groups
    assert group.columns["kv_bytes"] == [kv_bytes]


def test_rows_with_another_kv_format_are_left_out(tmp_path: Path) -> None:
    """Sixteen-bit ones they are not."""
    text = DECODE.format(kv_dtype="auto") + DECODE.format(kv_dtype="nvfp4").splitlines()[1] + "\n"
    (tmp_path / "x.csv").write_text(text)
    found = load_measurements(tmp_path / "x.csv")
    assert (found.num_rows, found.skipped) == (1, {"decode_attention with KV of nvfp4": 1})


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "qwen2.5-72b", "meta-llama/Llama-3.1-70B-Instruct"])
@pytest.mark.parametrize("tp", [1, 4])
def test_whole_layers_of_any_model_of_the_catalog_have_the_shapes_that_are_priced(model: str, tp: int) -> None:
    dims = layer_dims(model)
    assert dims is not None
    shapes = model_shapes(load_model(model), tp)
    ops = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
    assert [projection_shape(op, dims, tp) for op in ops] == [(m.n, m.k) for m in (*shapes.matrices, shapes.head)]
    assert [row_width(kind, dims, tp) for kind, _, _ in shapes.row_ops] == [width for _, width, _ in shapes.row_ops]


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3", "opt-13b", "nobody/knows-it"])
def test_models_with_other_operations_have_no_such_shapes(model: str) -> None:
    assert layer_dims(model) is None
