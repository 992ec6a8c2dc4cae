"""A fitted operation: closed form times the exponential of an interpolated log residual.

The correction is a radial basis expansion around the measured points in the logarithm of the features, with one
length scale per feature. Its basis decays, so far from every measurement the bare form remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvsim.cost.forms import FORMS, Columns

_CHUNK = 4096


def log_features(op: str, columns: Columns) -> np.ndarray:
    """log2(16 + x) for prefix lengths (which may be zero), log2(max(x, 0.5)) for the others: (rows, features)."""
    parts = []
    for name in FORMS[op].features:
        value = np.asarray(columns[name], dtype=float)
        parts.append(np.log2(value + 16.0) if name == "prefix" else np.log2(np.maximum(value, 0.5)))
    return np.stack(np.broadcast_arrays(*parts), axis=-1).reshape(-1, len(parts))


def basis(kind: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Matrix of the decaying radial functions between two sets of scaled points."""
    squared = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2.0 * left @ right.T
    distance = np.sqrt(np.maximum(squared, 0.0))
    if kind == "exponential":
        return np.asarray(np.exp(-distance))
    scaled = np.sqrt(3.0) * distance
    return np.asarray((1.0 + scaled) * np.exp(-scaled))


@dataclass(frozen=True)
class OpFit:
    """One operation on one GPU as one kernel of one version measured it.

    `points` holds the raw feature values of the measurements that carry the correction, `weights` its coefficients.
    """

    op: str
    kind: str
    """The input's name of the operation; differs from `op` for layer operations ("act_fn" is elementwise)."""
    kernel: str
    version: str
    framework: str
    params: Mapping[str, float]
    basis: str
    scales: tuple[float, ...]
    points: np.ndarray
    weights: np.ndarray
    error: Mapping[str, float]

    @classmethod
    def bare(cls, op: str, kind: str, params: Mapping[str, float], *, kernel: str, framework: str = "") -> OpFit:
        """The closed form alone, with parameters that no measurement corrects; `kernel` says where they are from."""
        num_features = len(FORMS[op].features)
        scales, points = (1.0,) * num_features, np.zeros((0, num_features))
        return cls(op, kind, kernel, "", framework, params, "exponential", scales, points, np.zeros(0), {})

    @cached_property
    def _nodes(self) -> np.ndarray:
        columns = {name: self.points[:, i] for i, name in enumerate(FORMS[self.op].features)}
        return np.asarray(log_features(self.op, columns) * np.asarray(self.scales))

    @cached_property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest measured value of each feature."""
        if not len(self.points):
            return {}
        lows, highs = self.points.min(0), self.points.max(0)
        names = FORMS[self.op].features
        return {name: (float(lo), float(hi)) for name, lo, hi in zip(names, lows, highs, strict=True)}

    def bare_us(self, columns: Columns) -> np.ndarray:
        """The closed form alone, in microseconds."""
        return np.asarray(FORMS[self.op].formula(self.params, columns), dtype=float)

    def predict_us(self, columns: Columns) -> np.ndarray:
        """Latency in microseconds, one per row of the broadcast columns."""
        bare = self.bare_us(columns)
        if not len(self.points):
            return bare
        features = log_features(self.op, columns) * np.asarray(self.scales)
        log_ratio = np.concatenate(
            [basis(self.basis, part, self._nodes) @ self.weights for part in _parts(features)] or [np.zeros(0)]
        )
        return np.asarray(bare * np.exp(np.clip(log_ratio, -1.0, 1.0)).reshape(bare.shape))


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[i : i + _CHUNK] for i in range(0, len(rows), _CHUNK)]
