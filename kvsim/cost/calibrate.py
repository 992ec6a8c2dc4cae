"""Fit a profile from kernel measurements, and say how far off it is on rows it did not see."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.cost.fit import OpFit, basis, log_features
from kvsim.cost.forms import FORMS
from kvsim.cost.kernel_times import ROW_LAUNCH_US, SAMPLER_US
from kvsim.cost.layer_ops import PROJECTIONS, ROW_OPS
from kvsim.cost.measured_columns import COLUMNS_OF
from kvsim.cost.measurements import Group, GroupKey, Measurements, load_measurements
from kvsim.cost.plausible import implausible_rows
from kvsim.cost.profile import Profile, version_order
from kvsim.files import save_picture
from kvsim.types import ScenarioError

VLLM_CUSTOM_ALL_REDUCE_BYTES = 2.0**23
"""vLLM's limit where it has none per number of GPUs: known from its source, so no fit need guess it."""
_HOPPER = ("h100", "h200", "h800", "h20", "gh200")
HOLD_OUT_SHARE = 0.2
MIN_ROWS = 8
NEEDED_OPS = ("gemm", "decode_attention", "prefill_attention")
"""A profile without a fit of any of these prices no step."""
ESTIMATED_ROW_OPS = ("embedding", "layernorm", "rotary_emb", "act_fn", "sampler")
"""What every model has, and a profile may do without."""
MIN_FITTED_ROWS = 4
"""What the held-out rows must leave of an operation."""
WIDE_RATIO = 1.5
"""Rows of the same call that are further apart than this were not measured alike."""
FAR_OFF_PCT = 50.0
"""Rows that are this far off on average follow no law that a fit could find."""
_MIN_ROWS_FOR_CORRECTION = 12
_LOG_PARAM_SPAN = 7.0
_NUM_STARTS = 3
_PULL_TO_START = 0.01
_MAX_LOG_SCALE = 0.0
"""A correction varies over one doubling of a feature at least: measurements are that far apart."""
_OUTLIER_LOG_ERROR = 0.4
_OUTLIER_SPREADS = 8.0
_MOST_OUTLIERS = 0.2
"""Share of the rows: where more contradict each other, nobody knows which are right."""


@dataclass(frozen=True)
class ErrorLine:
    """Held-out error of one operation; shares and errors in per cent, bias = mean of predicted / measured - 1."""

    op: str
    kernel: str
    version: str
    num_rows: int
    num_held_out: int
    mape_pct: float
    bias_pct: float
    worst_pct: float
    within_15_pct: float
    within_20_pct: float
    within_25_pct: float


@dataclass(frozen=True)
class Calibration:
    """A profile, its held-out errors, and the held-out pairs the picture shows."""

    profile: Profile
    errors: tuple[ErrorLine, ...]
    held_out: tuple[tuple[str, float, float], ...]
    """(operation, measured us, predicted us)."""
    warnings: tuple[str, ...] = ()
    """Rows that were left out or cannot be true, operations that the profile lacks or that no fit describes."""


def calibrate(
    path: str | Path,
    *,
    gpu: str | None = None,
    framework: str = "vllm",
    version: str | None = None,
    name: str | None = None,
    seed: int = 0,
    hold_out: float = HOLD_OUT_SHARE,
) -> Calibration:
    """Fit the rows of one GPU and one framework; what that framework does not measure is borrowed from others.

    A share `hold_out` of every operation's rows (seeded) is kept from a first fit and predicted; the profile itself
    is then fitted to all rows with the length scales of the first. Raises ScenarioError for unusable input.
    """
    if not 0.0 < hold_out < 1.0:
        raise ScenarioError(f"hold_out must lie between 0 and 1, not {hold_out}")
    if seed < 0:
        raise ScenarioError(f"seed is {seed}; it must be a whole number of at least 0")
    data, framework = load_measurements(path, gpu), framework.strip().lower()
    groups = _choose(data, Path(path), framework, version)
    rng = np.random.default_rng(seed)
    fits, errors, pairs = [], [], []
    left_out = [
        f"{path}: {count} rows of {what} left out: only 16-bit number formats are fitted"
        for what, count in data.skipped.items()
    ]
    for group in groups:
        if len(group.latency_us) < MIN_ROWS:
            left_out.append(_too_few(path, group))
            continue
        fitted, lines, group_pairs = _fit_and_test(group, rng, hold_out)
        fits.append(fitted)
        errors += lines
        pairs += group_pairs
    if not fits:
        told = ", ".join(f"{len(group.latency_us)} of {group.key.kind}" for group in groups)
        raise ScenarioError(
            f"{path}: no operation of framework {framework!r} has the {MIN_ROWS} rows with different sizes that a fit "
            f"needs; it has {told}: measure more sizes"
        )
    provenance = {
        "made_by": f"kvsim calibrate {Path(path).name} --gpu {data.gpu} --framework {framework} --seed {seed}",
        "block_size": data.block_sizes.get(framework, 64),
        "sources": ", ".join(data.sources),
        "num_rows": sum(len(g.latency_us) for g in groups if len(g.latency_us) >= MIN_ROWS),
        "hold_out": hold_out,
        "seed": seed,
    }
    newest = version or max((g.key.version for g in groups if g.key.framework == framework), key=version_order)
    profile = Profile(name or data.gpu.lower(), data.gpu, framework, newest, tuple(fits), provenance)
    notes = (
        *left_out,
        *_unknown_layers(path, groups),
        *(text for group in groups for text in implausible_rows(path, group, data.latency_column)),
        *(text for group in groups for text in _unequal(path, group, data.unread)),
        *_set_aside(path, fits),
        *_far_off(path, errors),
        *_rivals(path, profile),
        *_lacks(profile),
    )
    return Calibration(profile, tuple(errors), tuple(pairs), notes)


def _too_few(path: str | Path, group: Group) -> str:
    key = group.key
    return (
        f"{path}: {len(group.latency_us)} rows of {key.kind} ({key.kernel}, {key.framework} {key.version}) left out: "
        f"a fit needs {MIN_ROWS} with different sizes"
    )


def _unknown_layers(path: str | Path, groups: Sequence[Group]) -> list[str]:
    """One line per model in `kernel`, or operation, whose dimensions nobody knows: its rows price no step."""
    models: dict[str, int] = {}
    operations: dict[str, int] = {}
    for group in groups:
        if ":" in group.key.kind:
            operation = group.key.kind.rpartition(":")[2]
            is_known = operation in (*PROJECTIONS, *ROW_OPS)
            counts, name = (models, group.key.kernel) if is_known else (operations, operation)
            counts[name] = counts.get(name, 0) + len(group.latency_us)
    return [
        f"{path}: {count} rows of kernel {model!r} price no step: whole layers need a model that is known, by its name "
        f"in the catalog or on Hugging Face; name one, or measure op gemm with n and k"
        for model, count in models.items()
    ] + [
        f"{path}: {count} rows of op {operation!r} price no step: known are {', '.join(COLUMNS_OF)}, and of whole "
        f"layers {', '.join((*PROJECTIONS, *ROW_OPS))}"
        for operation, count in operations.items()
    ]


def _unequal(path: str | Path, group: Group, unread: Sequence[str]) -> list[str]:
    """A warning where rows that should be one measurement are far apart: something else was varied."""
    ratio, shape = group.widest
    if ratio <= WIDE_RATIO:
        return []
    others = f"; columns that are not read: {', '.join(unread)}" if unread else ""
    return [
        f"{path}: rows of {group.key.kind} with {shape} differ by a factor of {ratio:.3g}, and count as one at their "
        f"geometric mean: keep the rows of one setting{others}"
    ]


def _set_aside(path: str | Path, fits: Sequence[OpFit]) -> list[str]:
    return [
        f"{path}: {num} rows of {fit.kind} ({fit.kernel} {fit.version}) set aside: their neighbours contradict them "
        f"grossly"
        for fit in fits
        if (num := int(fit.error["num_set_aside"]))
    ]


def _far_off(path: str | Path, errors: Sequence[ErrorLine]) -> list[str]:
    """A warning for every operation whose held-out rows the fit is far from."""
    return [
        f"{path}: held-out rows of {line.op} ({line.kernel} {line.version}) are predicted {line.mape_pct:.0f} % off on "
        f"average: they contradict each other, or latencies have different units; do not use this fit"
        for line in errors
        if line.mape_pct > FAR_OFF_PCT
    ]


def _rivals(path: str | Path, profile: Profile) -> list[str]:
    """A warning where nothing but the name says which of several kernels prices the steps."""
    notes = []
    for op, kind in dict.fromkeys((fit.op, fit.kind) for fit in profile.fits):
        used = profile.find(op, kind)
        assert used is not None
        same = [
            f
            for f in profile.fits
            if (f.op, f.kind, f.framework, f.version) == (op, kind, used.framework, used.version)
        ]
        alike = [f.kernel for f in same if ("graph" in f.kernel) == ("graph" in used.kernel)]
        if len(alike) > 1:
            notes.append(
                f"{path}: {kind} of {used.framework} {used.version} was measured with kernels {', '.join(alike)}, and "
                f"steps are priced with {used.kernel}: keep the rows of the one that the engine runs"
            )
    return notes


def _lacks(profile: Profile) -> list[str]:
    missing = [op for op in NEEDED_OPS if profile.find(op) is None]
    if missing:
        return [f"profile {profile.name}: no fit of {', '.join(missing)}; without it no step can be priced"]
    assumed = [kind for kind in ESTIMATED_ROW_OPS if profile.find("elementwise", kind) is None]
    if not assumed:
        return []
    return [
        f"profile {profile.name}: no fit of {', '.join(assumed)}; they are priced as a launch ({ROW_LAUNCH_US:g} us, "
        f"the sampler {SAMPLER_US:g} us) and the memory rate of gemm"
    ]


def _choose(data: Measurements, path: Path, framework: str, version: str | None) -> list[Group]:
    own = [g for g in data.groups if g.key.framework == framework and version in (None, g.key.version)]
    if not own:
        known = sorted({(g.key.framework, g.key.version) for g in data.groups})
        wanted = framework + (f" {version}" if version else "")
        raise ScenarioError(
            f"{path}: no rows of {wanted!r}; it has {', '.join(f'{f} {v}' for f, v in known)}: name one with "
            f"--framework{' and --version' if version else ''}"
        )
    covered = {(g.key.op, g.key.kind) for g in own}
    borrowed = [g for g in data.groups if g.key.framework != framework and (g.key.op, g.key.kind) not in covered]
    borrowed = [g for g in borrowed if g.key.kind in ROW_OPS or g.key.op == "all_reduce"]
    return own + borrowed


def _fit_and_test(
    group: Group, rng: np.random.Generator, hold_out: float
) -> tuple[OpFit, list[ErrorLine], list[tuple[str, float, float]]]:
    order = rng.permutation(len(group.latency_us))
    num_test = max(1, round(hold_out * len(order)))
    if len(order) - num_test < MIN_FITTED_ROWS:
        raise ScenarioError(
            f"hold_out is {hold_out:g}: of the {len(order)} rows of {group.key.kind} it leaves {len(order) - num_test} "
            f"to fit; hold out less, so that at least {MIN_FITTED_ROWS} are left"
        )
    test, train = group.take(np.sort(order[:num_test])), group.take(np.sort(order[num_test:]))
    tested = fit_group(train)
    predicted = tested.predict_us(test.columns)
    lines = []
    for kind in sorted(set(test.kinds)):
        chosen = test.kinds == kind
        errors = predicted[chosen] / test.latency_us[chosen] - 1.0
        lines.append(error_line(group.key, kind, int((group.kinds == kind).sum()), errors))
    pairs = [(str(k), float(m), float(p)) for k, m, p in zip(test.kinds, test.latency_us, predicted, strict=True)]
    total = error_line(group.key, group.key.kind, len(order), predicted / test.latency_us - 1.0)
    error = {
        "num_held_out": total.num_held_out,
        "mape_pct": total.mape_pct,
        "bias_pct": total.bias_pct,
        "worst_pct": total.worst_pct,
        "within_15_pct": total.within_15_pct,
    }
    is_kept = {tuple(point) for point in tested.points}
    suspects = np.zeros(len(order), dtype=bool)
    suspects[np.sort(order[num_test:])] = [tuple(point) not in is_kept for point in _points(train)]
    fitted = fit_group(group, tested, suspects)
    return replace(fitted, error=error | {"num_set_aside": fitted.error["num_set_aside"]}), lines, pairs


def error_line(key: GroupKey, kind: str, num_rows: int, errors: np.ndarray) -> ErrorLine:
    """Summarise relative errors (predicted / measured - 1)."""
    size = np.abs(errors)
    shares = [round(100.0 * float(np.mean(size <= limit)), 1) for limit in (0.15, 0.20, 0.25)]
    return ErrorLine(
        kind,
        key.kernel,
        key.version,
        num_rows,
        len(errors),
        round(100.0 * float(size.mean()), 2),
        round(100.0 * float(errors.mean()), 2),
        round(100.0 * float(size.max()), 1),
        *shares,
    )


def fit_group(group: Group, like: OpFit | None = None, suspects: np.ndarray | None = None) -> OpFit:
    """Closed form by robust least squares in the logarithm, then the correction.

    `like` lends its tiles, length scales and nugget, so that only coefficients are fitted; `suspects` are the rows that
    it set aside.
    """
    form = FORMS[group.key.op]
    columns = {**group.columns}
    keep = np.ones(len(group.latency_us), dtype=bool)
    params = _fit_params(group, like)
    log_ratio = np.log(group.latency_us / np.asarray(form.formula(params, columns)))
    features = log_features(group.key.op, columns)
    spec = _CorrectionSpec.of(like) if like else None
    if len(log_ratio) >= _MIN_ROWS_FOR_CORRECTION:
        spec = spec or _choose_correction(features, log_ratio)
        keep = ~_outliers(spec, features, log_ratio, ~keep if suspects is None else suspects)
        if not keep.all() and like is None:
            spec = _choose_correction(features[keep], log_ratio[keep])
        weights = spec.weights(features[keep], log_ratio[keep])
    else:
        spec = spec or _CorrectionSpec("exponential", (1.0,) * features.shape[1], 0.1)
        weights = spec.weights(features, log_ratio)
    return OpFit(
        op=group.key.op,
        kind=group.key.kind,
        kernel=group.key.kernel,
        version=group.key.version,
        framework=group.key.framework,
        # Choices are kept to the last digit: a row that lies on a limit must stay on its side.
        params={k: float(v if k in form.tiles else f"{v:.6g}") for k, v in params.items()},
        basis=spec.basis,
        scales=tuple(float(f"{s:.4g}") for s in spec.scales),
        points=_points(group)[keep],
        weights=weights,
        error={"nugget": spec.nugget, "num_set_aside": int((~keep).sum())},
    )


def _points(group: Group) -> np.ndarray:
    """The raw feature values of every row."""
    return np.stack([np.asarray(group.columns[name], dtype=float) for name in FORMS[group.key.op].features], axis=-1)


def _fit_params(group: Group, like: OpFit | None) -> dict[str, float]:
    form = FORMS[group.key.op]
    if like is not None:
        tiles = [{name: like.params[name] for name in form.tiles}]
    else:
        tiles = [dict(zip(form.tiles, values, strict=True)) for values in product(*form.tiles.values())]
        if group.key.op == "all_reduce" and group.key.framework == "vllm":
            # Older versions have one limit on every GPU: on Hopper the rows decide which it was.
            limits = (0.0, 1.0) if group.gpu.lower().startswith(_HOPPER) else (0.0,)
            tiles = [
                tile
                for tile in tiles
                if tile["switch_bytes"] == VLLM_CUSTOM_ALL_REDUCE_BYTES and tile["per_gpu_limits"] in limits
            ]
    best: tuple[float, dict[str, float]] | None = None
    for tile in tiles:
        cost, params = _least_squares(group, tile)
        if best is None or cost < best[0]:
            best = cost, params
    assert best is not None
    return best[1]


def _least_squares(group: Group, tile: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    from scipy.optimize import least_squares

    form = FORMS[group.key.op]
    own = group.key.kernel == "whole-layer" and group.key.framework == "vllm"
    begin = (form.layer_starts.get(group.key.kind) if own else None) or form.start
    names = [name for name in begin if name not in form.only_with or tile[form.only_with[name]]]
    start = np.log([begin[name] for name in names])
    target = np.log(group.latency_us)

    def residuals(logs: np.ndarray) -> np.ndarray:
        params = dict(zip(names, np.exp(logs), strict=True), **tile)
        misfit = np.log(form.formula(params, group.columns)) - target
        # What no row depends on (a kernel's path that nobody measured) stays where it starts.
        return np.concatenate([misfit, _PULL_TO_START * (logs - start)])

    rng = np.random.default_rng(0)
    span = np.array([3.5 if name == "sharpness" else _LOG_PARAM_SPAN for name in names])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        starts = [start + shift * rng.uniform(-1.5, 1.5, len(names)) for shift in (0.0, *[1.0] * (_NUM_STARTS - 1))]
        tries = [
            least_squares(
                residuals, first, bounds=(start - span, start + span), loss="soft_l1", f_scale=0.1, max_nfev=60
            )
            for first in starts
        ]
    found = min(tries, key=lambda one: float(one.cost))
    return float(found.cost), {**dict(zip(names, map(float, np.exp(found.x)), strict=True)), **tile}


@dataclass(frozen=True)
class _CorrectionSpec:
    """Shape of the correction: basis, inverse length scale per feature, and nugget (noise to signal variance)."""

    basis: str
    scales: tuple[float, ...]
    nugget: float

    @staticmethod
    def of(fit: OpFit) -> _CorrectionSpec:
        return _CorrectionSpec(fit.basis, fit.scales, fit.error["nugget"])

    def inverse(self, features: np.ndarray) -> np.ndarray:
        scaled = features * np.asarray(self.scales)
        matrix = basis(self.basis, scaled, scaled)
        matrix[np.diag_indices_from(matrix)] += self.nugget
        return np.asarray(np.linalg.inv(matrix))

    def weights(self, features: np.ndarray, log_ratio: np.ndarray) -> np.ndarray:
        return np.asarray(self.inverse(features) @ log_ratio)

    def left_out_errors(self, features: np.ndarray, log_ratio: np.ndarray) -> np.ndarray:
        """What each point is off by when the others predict it (closed form, no refit)."""
        inverse = self.inverse(features)
        return np.asarray((inverse @ log_ratio) / np.diag(inverse))


def _choose_correction(features: np.ndarray, log_ratio: np.ndarray) -> _CorrectionSpec:
    """Scales and nugget with the least leave-one-out error; a soft norm, so that a wild row does not steer them."""
    from scipy.optimize import minimize

    varies = features.std(axis=0) > 0
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(features))[:400]
    chosen, target = features[rows], log_ratio[rows]

    def spec_of(kind: str, logs: np.ndarray) -> _CorrectionSpec:
        scales = np.ones(len(varies))
        scales[varies] = np.exp(np.clip(logs[:-1], -5.0, _MAX_LOG_SCALE))
        return _CorrectionSpec(kind, tuple(scales), float(np.exp(np.clip(logs[-1], -9.0, 1.0))))

    def objective(kind: str) -> Callable[[np.ndarray], float]:
        def value(logs: np.ndarray) -> float:
            error = spec_of(kind, logs).left_out_errors(chosen, target)
            return float(np.mean(np.sqrt(error**2 + 0.02**2)))

        return value

    best: tuple[float, _CorrectionSpec] | None = None
    for kind, start in (("exponential", -1.5), ("matern32", -1.0)):
        first = np.append(np.full(int(varies.sum()), start), -4.0)
        found = minimize(
            objective(kind),
            first,
            method="Nelder-Mead",
            options={"maxfev": 40 * len(first), "xatol": 0.05, "fatol": 1e-5},
        )
        if best is None or found.fun < best[0]:
            best = float(found.fun), spec_of(kind, found.x)
    assert best is not None
    return best[1]


def _outliers(spec: _CorrectionSpec, features: np.ndarray, log_ratio: np.ndarray, suspects: np.ndarray) -> np.ndarray:
    """Rows that their neighbours contradict grossly: set aside, and counted in the profile.

    A wild row also makes its neighbours look wrong, so only the worst of them is dropped at a time; `suspects` are out.
    """
    dropped = suspects.copy()
    while dropped.sum() < max(1, int(_MOST_OUTLIERS * len(log_ratio))):
        kept = np.flatnonzero(~dropped)
        error = np.abs(spec.left_out_errors(features[kept], log_ratio[kept]))
        limit = max(_OUTLIER_LOG_ERROR, _OUTLIER_SPREADS * float(np.median(error)))
        if error.max() <= limit:
            break
        dropped[kept[int(error.argmax())]] = True
    return dropped


def calibration_dict(result: Calibration) -> dict[str, Any]:
    """The JSON form of a calibration's errors."""
    return {
        "profile": result.profile.name,
        "gpu": result.profile.gpu,
        "framework": result.profile.framework,
        "version": result.profile.version,
        "provenance": dict(result.profile.provenance),
        "errors": [line.__dict__ for line in result.errors],
        "warnings": list(result.warnings),
    }


def plot_held_out(pairs: Sequence[tuple[str, float, float]], path: str | Path) -> None:
    """Predicted against measured latency of the held-out rows, one colour per operation, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 6.5))
    for op in sorted({op for op, _, _ in pairs}):
        rows = [(m, p) for name, m, p in pairs if name == op]
        axes.scatter([m for m, _ in rows], [p for _, p in rows], s=12, alpha=0.7, label=f"{op} ({len(rows)})")
    low, high = min(m for _, m, _ in pairs) / 1.5, max(m for _, m, _ in pairs) * 1.5
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between([low, high], [low * 0.85, high * 0.85], [low * 1.15, high * 1.15], color="grey", alpha=0.15)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured (us)",
        ylabel="predicted (us)",
        title="Held-out kernel times; the band is +-15 %",
    )
    axes.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    save_picture(figure, path, dpi=120)
    plt.close(figure)


def profile_errors(profile: Profile, path: str | Path, *, gpu: str | None = None) -> tuple[ErrorLine, ...]:
    """Errors of a profile on the rows of another file, per operation, kernel and version it has a fit for.

    Raises ScenarioError if it has one for none of them.
    """
    lines = []
    groups = load_measurements(path, gpu).groups
    for group in groups:
        fit = _fit_for(profile, group.key)
        if fit is None:
            continue
        errors = fit.predict_us(group.columns) / group.latency_us - 1.0
        for kind in sorted(set(group.kinds)):
            chosen = errors[group.kinds == kind]
            lines.append(error_line(group.key, kind, len(chosen), chosen))
    if not lines:
        raise ScenarioError(
            f"{path}: no row is of an operation, kernel and version that profile {profile.name!r} has: the file has "
            f"{_listed(group.key for group in groups)}; the profile {_listed(profile.fits)}"
        )
    return tuple(lines)


def unpredicted_rows(profile: Profile, path: str | Path, *, gpu: str | None = None) -> list[str]:
    """What `profile_errors` leaves out of a file: rows of other number formats, and those that no fit is for."""
    data = load_measurements(path, gpu)
    notes = [
        f"{path}: {count} rows of {what} are not predicted: only 16-bit number formats are"
        for what, count in data.skipped.items()
    ]
    strange = [group for group in data.groups if _fit_for(profile, group.key) is None]
    if strange:
        notes.append(
            f"{path}: {sum(len(group.latency_us) for group in strange)} rows are not predicted: profile "
            f"{profile.name!r} has no fit of {_listed(group.key for group in strange)}"
        )
    return notes


def _listed(entries: Iterable[GroupKey | OpFit]) -> str:
    names = dict.fromkeys(f"{e.kind} ({e.kernel}, {e.framework} {e.version})" for e in entries)
    return ", ".join([*names][:6]) + (", ..." if len(names) > 6 else "")


def _fit_for(profile: Profile, key: GroupKey) -> OpFit | None:
    for fit in profile.fits:
        if (fit.op, fit.kind, fit.framework, fit.kernel, fit.version) == (
            key.op,
            key.kind,
            key.framework,
            key.kernel,
            key.version,
        ):
            return fit
    return None
