"""The direct formula: kernel times of one step from a profile's fits, with NumPy.

`kernels.KernelCost` tabulates these functions once and interpolates; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvsim.cost.fit import OpFit
from kvsim.cost.forms import FORMS, maximum, minimum
from kvsim.cost.profile import Profile
from kvsim.cost.shapes import Matrix, ModelShapes
from kvsim.types import ScenarioError

# A launch inside a captured graph, and the head's sampling kernels: medians of the whole-layer measurements on RTX
# cards (Llama-3.1-8B, vLLM 0.19), used where a profile measured neither.
ROW_LAUNCH_US = 2.5
SAMPLER_US = 25.0

MIXED_NOT_MEASURED = "mixed_attention (not measured: the sum of prefill and decode attention)"
"""What `extrapolated` says of a step whose prefill and decode attention were added up."""


class KernelTimes:
    """Microseconds of the parts of a step; all arguments may be NumPy arrays.

    `extrapolated` collects, in words, which operations were asked for outside their measured range.
    """

    def __init__(self, profile: Profile, shapes: ModelShapes) -> None:
        self.profile = profile
        self.shapes = shapes
        self.extrapolated: dict[str, None] = {}
        self._gemm = self._need("gemm")
        self._decode = self._need("decode_attention")
        self._prefill = self._need("prefill_attention")
        self._mixed = profile.find("mixed_attention")
        self._all_reduce = profile.find("all_reduce")
        if shapes.tensor_parallel_size > 1 and self._all_reduce is None:
            raise ScenarioError(
                f"profile {profile.name!r} has no all_reduce measurements, so tensor_parallel_size must be 1, not "
                f"{shapes.tensor_parallel_size}"
            )
        self._rows = {kind: self._row_fit(kind) for kind, _, _ in shapes.row_ops}
        self._rows |= {kind: self._row_fit(kind) for kind in ("embedding", "final_layernorm", "sampler")}
        self._attention: dict[str, Any] = {
            "heads": shapes.heads,
            "kv_heads": shapes.kv_heads,
            "head_dim": shapes.head_dim,
            "kv_bytes": shapes.kv_bytes,
            "ragged": True,
        }

    def _need(self, op: str) -> OpFit:
        fit = self.profile.find(op)
        if fit is None:
            raise ScenarioError(f"profile {self.profile.name!r} has no {op} measurements; a step cannot be priced")
        return fit

    def _row_fit(self, kind: str) -> OpFit:
        fit = self.profile.find("elementwise", kind)
        if fit is None and kind == "final_layernorm":
            fit = self.profile.find("elementwise", "layernorm")
        if fit is not None:
            return fit
        launch = SAMPLER_US if kind == "sampler" else ROW_LAUNCH_US
        params = {"launch_us": launch, "gbps": self._gemm.params["gbps"], "row_us": 1e-9, "sharpness": 3.0}
        return OpFit.bare("elementwise", kind, params, kernel="estimate")

    def note_extrapolated(self, what: str) -> None:
        """Add to `extrapolated`, once."""
        self.extrapolated[what] = None

    def dense_us(self, num_tokens: Any) -> Any:
        """Everything but attention and the head: embedding, and per layer projections, row operations, all-reduces."""
        shapes = self.shapes
        layer = sum(self._matrix_us(matrix, num_tokens) for matrix in shapes.matrices)
        for kind, width, times in shapes.row_ops:
            layer = layer + times * self._row_us(kind, num_tokens, width)
        if shapes.all_reduces_per_layer:
            layer = layer + shapes.all_reduces_per_layer * self._all_reduce_us(num_tokens)
        ends = self._row_us("embedding", num_tokens, 2 * shapes.hidden_size)
        ends = ends + self._row_us("final_layernorm", num_tokens, 4 * shapes.hidden_size)
        return shapes.num_layers * layer + ends

    def head_us(self, num_sequences: Any) -> Any:
        """Output projection and sampling of one row per scheduled sequence."""
        return self._matrix_us(self.shapes.head, num_sequences) + self._row_us(
            "sampler", num_sequences, self.shapes.vocab_size
        )

    def _matrix_us(self, matrix: Matrix, num_tokens: Any) -> Any:
        if matrix.num_experts > 1:
            return self._experts_us(matrix, num_tokens)
        columns = {"tokens": num_tokens, "n": matrix.n, "k": matrix.k}
        self._check(self._gemm, columns)
        return self._gemm.predict_us(columns)

    def _experts_us(self, matrix: Matrix, num_tokens: Any) -> Any:
        """Uniform routing: the expected number of experts touched is read, every token's are computed."""
        self.note_extrapolated("mixture-of-experts layers")
        tokens = np.asarray(num_tokens, dtype=float)
        missed = (1.0 - matrix.experts_per_token / matrix.num_experts) ** tokens
        touched = matrix.num_experts * (1.0 - missed)
        params = self._gemm.params
        compute = 2.0 * tokens * matrix.experts_per_token * matrix.n * matrix.k / params["tflops"] * 1e-6
        memory = 2.0 * touched * matrix.n * matrix.k / params["gbps"] * 1e-3
        return params["launch_us"] + np.maximum(compute, memory)

    def _row_us(self, kind: str, num_tokens: Any, width: int) -> Any:
        return self._rows[kind].predict_us({"tokens": num_tokens, "width": width})

    def _all_reduce_us(self, num_tokens: Any) -> Any:
        assert self._all_reduce is not None
        size = 2.0 * np.asarray(num_tokens, dtype=float) * self.shapes.hidden_size
        columns = {"bytes": size, "num_gpus": self.shapes.tensor_parallel_size}
        self._check(self._all_reduce, columns)
        return self._all_reduce.predict_us(columns)

    def decode_us(self, batch: Any, ctx_len: Any) -> Any:
        """Attention of all layers, a decode-only step: `batch` sequences of `ctx_len` tokens on average."""
        return self._over_windows(
            lambda window: self._predict(self._decode, batch=batch, ctx_len=_within(ctx_len, window))
        )

    def prefill_us(self, num_chunks: Any, chunk: Any, prefix: Any) -> Any:
        """Attention of all layers, a prompt-only step: equal chunks, each on top of `prefix` tokens."""
        return self._over_windows(
            lambda window: self._predict(self._prefill, **_prefill_columns(num_chunks, chunk, prefix, window))
        )

    def mixed_us(self, batch: Any, ctx_len: Any, num_chunks: Any, chunk: Any, prefix: Any) -> Any:
        """Attention of all layers, decodes and chunks in one step."""
        mixed = self._mixed
        if mixed is None:
            self.note_extrapolated(MIXED_NOT_MEASURED)
            return self.decode_us(batch, ctx_len) + self.prefill_us(num_chunks, chunk, prefix)
        return self._over_windows(
            lambda window: self._predict(mixed, **_mixed_columns(batch, ctx_len, num_chunks, chunk, prefix, window))
        )

    def bare_prefill_us(self, num_chunks: float, chunk: float, prefix: float) -> float:
        """The closed form of `prefill_us` alone, of numbers."""
        return self._bare_over_windows(
            self._prefill, lambda window: _prefill_columns(num_chunks, chunk, prefix, window)
        )

    def bare_mixed_us(self, batch: float, ctx_len: float, num_chunks: float, chunk: float, prefix: float) -> float:
        """The closed form of `mixed_us` alone, of numbers; only where mixed attention was measured."""
        assert self._mixed is not None
        return self._bare_over_windows(
            self._mixed, lambda window: _mixed_columns(batch, ctx_len, num_chunks, chunk, prefix, window)
        )

    @property
    def has_mixed(self) -> bool:
        """Mixed attention was measured as an operation of its own."""
        return self._mixed is not None

    def _bare_over_windows(self, fit: OpFit, columns_of: Callable[[int | None], dict[str, Any]]) -> float:
        formula, attention = FORMS[fit.op].formula, self._attention
        return float(self._over_windows(lambda window: formula(fit.params, {**columns_of(window), **attention})))

    def _over_windows(self, one_layer: Any) -> Any:
        return sum(num_layers * one_layer(window) for num_layers, window in self.shapes.windows)

    def _predict(self, fit: OpFit, **columns: Any) -> Any:
        every: Mapping[str, Any] = {**columns, **self._attention}
        self._check(fit, {name: every[name] for name in ("heads", "kv_heads", "kv_bytes")})
        return fit.predict_us(every)

    def _check(self, fit: OpFit, columns: Mapping[str, Any]) -> None:
        """Note fixed dimensions outside the measured range (what varies per step is checked by the caller)."""
        for name, value in columns.items():
            low, high = fit.bounds.get(name, (0.0, np.inf))
            if np.ndim(value) == 0 and not low / 1.05 <= value <= high * 1.05:
                self.note_extrapolated(f"{fit.op}: {name} {value:g} (measured {low:g} to {high:g})")


def _within(length: Any, window: int | None) -> Any:
    return length if window is None else minimum(length, window)


def _prefill_columns(num_chunks: Any, chunk: Any, prefix: Any, window: int | None) -> dict[str, Any]:
    num_chunks, chunk, prefix = _chunks_within(num_chunks, chunk, prefix, window)
    return {"batch": num_chunks, "seq_len": chunk, "prefix": prefix}


def _mixed_columns(
    batch: Any, ctx_len: Any, num_chunks: Any, chunk: Any, prefix: Any, window: int | None
) -> dict[str, Any]:
    num_chunks, _, prefix = _chunks_within(num_chunks, chunk / num_chunks, prefix, window)
    return {
        "batch": batch,
        "ctx_len": _within(ctx_len, window),
        "chunk": chunk,
        "prefix": prefix,
        "num_chunks": num_chunks,
    }


def _chunks_within(num_chunks: Any, chunk: Any, prefix: Any, window: int | None) -> tuple[Any, Any, Any]:
    """Equal chunks, none longer than the window, that have as many tokens and score as many query-key pairs.

    Within the window a kernel has no form of its own: beyond it keys are skipped.
    """
    if window is None:
        return num_chunks, chunk, prefix
    chunk = maximum(chunk, 1.0)
    length = minimum(chunk, window)
    # The first queries see all that is before them, the others a whole window.
    num_first = minimum(maximum(window - prefix, 0.0), chunk)
    mean_keys = (num_first * (prefix + num_first / 2) + (chunk - num_first) * window) / chunk
    return num_chunks * chunk / length, length, mean_keys - length / 2
