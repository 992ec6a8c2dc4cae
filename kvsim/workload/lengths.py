"""How long prompts and outputs are: distributions, and presets measured on real text.

A preset is a quantile table for each of the two lengths and a copula that joins them: a square histogram of the pairs'
ranks (`kvsim/catalog/lengths/NAME.yaml`; figures only, the source in its header). A pair is drawn from a cell of the
histogram, and each rank within it is turned into a length by the table, interpolated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvsim.types import ScenarioError
from kvsim.workload.spec import LengthsSpec, Pair, hint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

MAX_LENGTH = 2**31 - 1
_CHUNK = 4096
_MIN_ACCEPTED = 1e-4


def draw_lengths(spec: LengthsSpec, rng: np.random.Generator, num: int) -> tuple[Ints, Ints]:
    """`num` pairs (prompt, output), each at least 1; pairs above `max_total` are drawn anew.

    The first n pairs of a longer run are those of a shorter. Raises ScenarioError for parameters without a meaning.
    """
    import numpy as np

    kept = [np.zeros((0, 2), dtype=np.int64)]
    num_kept = num_drawn = 0
    while num_kept < num:
        pairs = _pairs(spec, rng, _CHUNK if spec.max_total else num - num_kept)
        num_drawn += len(pairs)
        if spec.max_total:
            pairs = pairs[pairs.sum(axis=1) <= spec.max_total]
        kept.append(pairs)
        num_kept += len(pairs)
        if num_kept < num_drawn * _MIN_ACCEPTED:
            raise ScenarioError(
                f"workload.lengths.max_total is {spec.max_total}: of {num_drawn} pairs drawn "
                f"{num_kept} were that short; raise it or shorten the lengths"
            )
    both = np.concatenate(kept)[:num]
    return both[:, 0].copy(), both[:, 1].copy()


def _pairs(spec: LengthsSpec, rng: np.random.Generator, num: int) -> Ints:
    match spec.type:
        case "preset":
            return _preset_pairs(spec, rng, num)
        case "fixed":
            return _fixed_pairs(spec, num)
        case "uniform":
            return _uniform_pairs(spec, rng, num)
        case "normal" | "lognormal":
            return _normal_pairs(spec, rng, num)
    raise ScenarioError(f"workload.lengths.type is {spec.type!r}; known: fixed, uniform, normal, lognormal, preset")


def _whole(lengths: Floats) -> Ints:
    """Rounded to whole tokens, at least 1."""
    import numpy as np

    return np.clip(np.rint(lengths), 1, MAX_LENGTH).astype(np.int64)


def _fixed_pairs(spec: LengthsSpec, num: int) -> Ints:
    import numpy as np

    pair = [_one(spec.prompt, "prompt"), _one(spec.output, "output")]
    return np.tile(np.array(pair, dtype=np.int64), (num, 1))


def _one(value: Pair | None, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
        raise ScenarioError(f"workload.lengths.{key} is {value!r}; type fixed needs a number of tokens, at least 1")
    return value


def _range(value: Pair | None, key: str) -> tuple[int, int]:
    low, high = value if isinstance(value, tuple) and len(value) == 2 else (0, 0)
    if not 1 <= low <= high <= MAX_LENGTH:
        raise ScenarioError(f"workload.lengths.{key} is {value!r}; type uniform needs [low, high], 1 <= low <= high")
    return low, high


def _uniform_pairs(spec: LengthsSpec, rng: np.random.Generator, num: int) -> Ints:
    import numpy as np

    lows, highs = zip(_range(spec.prompt, "prompt"), _range(spec.output, "output"), strict=True)
    low, high = np.array(lows), np.array(highs)
    if spec.correlation:
        from scipy.special import ndtr

        ranks = np.asarray(ndtr(_normals(spec, rng, num)))
    else:
        ranks = rng.random((num, 2))
    lengths = np.minimum(low + np.floor(ranks * (high - low + 1)), high)
    return np.asarray(lengths, dtype=np.int64)


def _normals(spec: LengthsSpec, rng: np.random.Generator, num: int) -> Floats:
    """Pairs of standard normals whose Spearman correlation is the one asked for (Pearson's is 2 sin(pi rho / 6))."""
    rho = spec.correlation or 0.0
    if not -1 <= rho <= 1:
        raise ScenarioError(f"workload.lengths.correlation is {rho}; it lies between -1 and 1")
    normals = rng.standard_normal((num, 2))
    pearson = 2 * math.sin(math.pi * rho / 6)
    normals[:, 1] = pearson * normals[:, 0] + math.sqrt(1 - pearson * pearson) * normals[:, 1]
    return normals


def _normal_pairs(spec: LengthsSpec, rng: np.random.Generator, num: int) -> Ints:
    import numpy as np

    normals = _normals(spec, rng, num)
    columns = []
    for index, key in enumerate(("prompt", "output")):
        mean, std = _moments(spec, key)
        column = normals[:, index]
        columns.append(mean + std * column if spec.type == "normal" else np.exp(_log_normal(mean, std, column)))
    return _whole(np.stack(columns, axis=1))


def _moments(spec: LengthsSpec, key: str) -> tuple[float, float]:
    mean, std = getattr(spec, f"{key}_mean"), getattr(spec, f"{key}_std")
    if mean is None or not 1 <= mean <= MAX_LENGTH:
        raise ScenarioError(f"workload.lengths.{key}_mean is {mean}; type {spec.type} needs it, at least 1 token")
    if std is not None and not 0 <= std <= MAX_LENGTH:
        raise ScenarioError(f"workload.lengths.{key}_std is {std}; a standard deviation is at least 0 tokens")
    return float(mean), float(std or 0.0)


def _log_normal(mean: float, std: float, normals: Floats) -> Floats:
    variance = math.log1p((std / mean) ** 2)
    return math.log(mean) - variance / 2 + math.sqrt(variance) * normals


@dataclass(frozen=True)
class Preset:
    """Measured lengths: `prompt[k]` and `output[k]` are the quantiles at `levels[k]` (0 .. 1).

    `copula[i][j]` counts the pairs whose prompt is in the i-th and whose output is in the j-th of equal classes.
    """

    name: str
    source: str
    num_pairs: int
    prompt_mean: float
    output_mean: float
    spearman: float
    levels: Floats
    prompt: Floats
    output: Floats
    copula: Floats

    def draw(self, rng: np.random.Generator, num: int) -> Floats:
        """`num` pairs, unrounded."""
        import numpy as np

        uniforms = rng.random((num, 3))
        cells = np.cumsum(self.copula.ravel())
        cell = np.searchsorted(cells, uniforms[:, 0] * cells[-1], side="right")
        side = len(self.copula)
        prompt_rank = (cell // side + uniforms[:, 1]) / side
        output_rank = (cell % side + uniforms[:, 2]) / side
        lengths = [np.interp(prompt_rank, self.levels, self.prompt), np.interp(output_rank, self.levels, self.output)]
        return np.stack(lengths, axis=1)


def preset_names() -> list[str]:
    """All length presets of the catalog."""
    folder = files("kvsim") / "catalog" / "lengths"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


@cache
def preset(name: str) -> Preset:
    """The preset of this name; raises ScenarioError if there is none."""
    import numpy as np
    import yaml

    if name not in preset_names():
        known = preset_names()
        raise ScenarioError(
            f"workload.lengths.name {name!r} is no preset{hint(name, known)}; known: {', '.join(known)}"
        )
    text = (files("kvsim") / "catalog" / "lengths" / f"{name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for key in ("levels", "prompt", "output", "copula"):
        data[key] = np.array(data[key], dtype=np.float64)
    return Preset(name=name, **data)


def _preset_pairs(spec: LengthsSpec, rng: np.random.Generator, num: int) -> Ints:
    import numpy as np

    if spec.correlation is not None:
        raise ScenarioError("workload.lengths.correlation: a preset brings its own; leave it out")
    table = preset(spec.name)
    scale = np.array([_scale(spec, table, key) for key in ("prompt_mean", "output_mean")])
    return _whole(table.draw(rng, num) * scale)


def _scale(spec: LengthsSpec, table: Preset, key: str) -> float:
    wanted: float | None = getattr(spec, key)
    if wanted is None:
        return 1.0
    if not 1 <= wanted <= MAX_LENGTH:
        raise ScenarioError(f"workload.lengths.{key} is {wanted}; a mean length is at least 1 token")
    return wanted / float(getattr(table, key))
