"""A GPU's calibrated kernel times: the file format, and finding it by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from kvsim.cost.fit import OpFit
from kvsim.cost.forms import FORMS
from kvsim.files import whole_file
from kvsim.types import ScenarioError
from kvsim.yaml_loader import load_yaml

if TYPE_CHECKING:
    from kvsim.catalog import GpuSpec

FORMAT_VERSION = 1
SUFFIXES = (".yaml", ".yml")
"""By which a scenario's `profile` is known to be a file."""
BASES = ("exponential", "matern32")
_LARGEST = 1e300
UNNAMED_GPU = "gpu"
"""What a scenario's GPU is called that has no name."""
PROFILE_DIR = Path(__file__).resolve().parent.parent / "catalog" / "profiles"


@dataclass(frozen=True)
class Profile:
    """Kernel times of one GPU and one framework, as fits."""

    name: str
    gpu: str
    framework: str
    version: str
    """The one used where several versions were measured."""
    fits: tuple[OpFit, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    overhead: Mapping[str, Any] = field(default_factory=dict)
    """`decode_step_us` and `mixed_step_us` of the engine, and the run they come from; empty if never measured."""

    def find(
        self, op: str, kind: str | None = None, *, kernel: str | None = None, version: str | None = None
    ) -> OpFit | None:
        """The fit of an operation: of `version` (default: the profile's, else the newest), of kernel `kernel`.

        Of several kernels the graph-captured one wins, as engines replay graphs in decode steps.
        """
        found = [f for f in self.fits if f.op == op and f.kind == (kind or op)]
        found = [f for f in found if kernel in (None, f.kernel)]
        wanted = version or self.version
        exact = [f for f in found if f.version == wanted]
        if version is not None and not exact:
            return None
        found = exact or found
        return max(
            found,
            key=lambda f: ("graph" in f.kernel, f.framework == self.framework, version_order(f.version), f.version),
            default=None,
        )


def version_order(version: str) -> tuple[int, ...]:
    """The numbers in a version, so that 0.20 is newer than 0.9."""
    return tuple(int(part) for part in "".join(c if c in "0123456789" else " " for c in version).split())


def profile_names() -> list[str]:
    """Names of the profiles that come with kvsim."""
    return sorted(path.stem for path in PROFILE_DIR.glob("*.yaml"))


def profile_path(name_or_path: str | Path) -> Path:
    """A shipped profile by name (any spelling: "RTX-4090"), or a file; raises ScenarioError that lists the names."""
    path = Path(name_or_path)
    if path.suffix.lower() in SUFFIXES:
        if path.is_file():
            return path
        raise ScenarioError(f"{path}: no such profile file; shipped profiles: {', '.join(profile_names())}")
    wanted = _plain(str(name_or_path))
    for name in profile_names():
        if _plain(name) == wanted:
            return PROFILE_DIR / f"{name}.yaml"
    words = _word_runs(str(name_or_path))
    for name in profile_names():  # a GPU's long name: "a100-80gb", "NVIDIA H100 80GB HBM3"; an A1000 is no A100
        if _plain(name) in words:
            return PROFILE_DIR / f"{name}.yaml"
    raise ScenarioError(
        f"no cost profile {str(name_or_path)!r}; shipped: {', '.join(profile_names()) or 'none'}. Make one with "
        f"`kvsim calibrate MEASUREMENTS.csv --out FILE.yaml`, or ask for the uncalibrated datasheet estimate: "
        f"{_roofline_offer(str(name_or_path))}"
    )


def _roofline_offer(gpu_name: str) -> str:
    """The roofline block of a scenario, with the catalog's figures where it knows the GPU."""
    from kvsim.catalog import load_gpu

    try:
        gpu = load_gpu(gpu_name)
    except ScenarioError:
        return "cost: {type: roofline, peak_tflops: ..., memory_bandwidth_gb_s: ...}"
    tflops, gb_s = gpu.peak_fp16_flops / 1e12, gpu.memory_bandwidth / 1e9
    return f"cost: {{type: roofline, peak_tflops: {tflops:g}, memory_bandwidth_gb_s: {gb_s:g}}}"


def measured_elsewhere(profile: Profile, gpu: GpuSpec) -> str | None:
    """What to say where a scenario's GPU is not the one that the profile was measured on; None where it is.

    A GPU without a name may be any.
    """
    own = gpu_of(profile)
    measured = profile.gpu if own is None else own.name
    if gpu.name == UNNAMED_GPU or _plain(gpu.name) in (_plain(measured), _plain(profile.gpu)):
        return None
    rates = [
        f"{spec.memory_bandwidth / 1e9:,g} GB/s and {spec.peak_fp16_flops / 1e12:g} TFLOP/s"
        if spec is not None and spec.memory_bandwidth
        else "unknown rates"
        for spec in (own, gpu)
    ]
    if own is not None and rates[0] == rates[1]:
        return None
    return f"measured on {measured} ({rates[0]}), and the scenario's gpu is {gpu.name} ({rates[1]})"


def gpu_of(profile: Profile) -> GpuSpec | None:
    """The catalog's entry of the GPU that was measured, if it has one."""
    from kvsim.catalog import load_gpu

    try:
        return load_gpu(str(profile.provenance.get("catalog_gpu", profile.gpu)))
    except ScenarioError:
        return None


def _word_runs(name: str) -> set[str]:
    """Every run of neighbouring words, written together."""
    words = re.findall("[a-z0-9]+", name.lower())
    return {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def load_profile(name_or_path: str | Path) -> Profile:
    """Read a profile by name or file; raises ScenarioError naming the file and what is wrong in it."""
    path = profile_path(name_or_path)
    data = load_yaml(path, "cost profile").data
    try:
        return _from_dict(data)
    except _BadEntry as error:
        raise ScenarioError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ScenarioError(f"{path}: not a kvsim cost profile ({type(error).__name__}: {error})") from None


class _BadEntry(Exception):
    """A value that no profile has, named by its key."""


_MAY_BE_ZERO = ("per_gpu_limits", "switch_bytes")
_MAY_BE_ABSENT = ("per_gpu_limits",)
_LARGEST_BLOCK = 1_048_576


def _need(data: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise _BadEntry(f"{where}{key} is missing; write it as kvsim calibrate does")
    return data[key]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _BadEntry(f"{where} is {value!r:.80}; it must be a mapping of keys to values")
    return value


def _check_texts(data: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if not isinstance(_need(data, key, where), str):
            raise _BadEntry(f"{where}{key} is {data[key]!r}; it must be a text (write it in quotes)")


def _check_params(params: Mapping[str, float], where: str) -> None:
    """Rates divide and times add up: zero or less is no fit of anything."""
    for name, value in params.items():
        if value < 0 or (value == 0 and name not in _MAY_BE_ZERO and not name.endswith("_us")):
            least = "of at least 0" if name in _MAY_BE_ZERO or name.endswith("_us") else "above 0"
            raise _BadEntry(f"{where}.{name} is {value!r}; it must be a number {least}")


def _check_form(op: str, params: Mapping[str, float], where: str) -> None:
    """Every parameter that the operation's formula reads is there."""
    form = FORMS[op]
    needed = {*form.start, *form.tiles} - {*_MAY_BE_ABSENT}
    for layer in form.layer_starts.values():
        if (params.keys() - form.start.keys()) & layer.keys():
            needed = {*layer, *form.tiles}
    needed -= {name for name, choice in form.only_with.items() if not params.get(choice)}
    for name in sorted(needed - params.keys()):
        raise _BadEntry(f"{where}.{name} is missing; {op} takes {', '.join(sorted(needed))}")


def _check_provenance(provenance: Mapping[str, Any]) -> None:
    size = provenance.get("block_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _LARGEST_BLOCK:
        raise _BadEntry(
            f"provenance.block_size is {size!r}; it must be a whole number from 1 to {_LARGEST_BLOCK:,}: the tokens of "
            f"a KV block where the rows were measured"
        )


def _check_tiles(tiles: Any) -> None:
    if not isinstance(tiles, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(part) is int and part > 0 for part in pair)
        for pair in tiles
    ):
        raise _BadEntry(
            f"overhead.gemm_tiles is {tiles!r:.80}; it must be a list of pairs [up to so many tokens, tile]"
        )


def _from_dict(data: Any) -> Profile:
    _mapping(data, "the file")
    if _need(data, "format", "") != FORMAT_VERSION:
        raise ValueError(f"format {data['format']!r}, this kvsim reads {FORMAT_VERSION}")
    overhead = _mapping(data.get("overhead") or {}, "overhead")
    # Quartiles say how a fit scattered, to both sides of nothing; times of a step are added to every step.
    times = {key: value for key, value in overhead.items() if str(key).endswith("_us") and "quartiles" not in key}
    _check_numbers(times, "overhead")
    for key, value in times.items():
        if value < 0:
            raise _BadEntry(f"overhead.{key} is {value!r}; it must be a number of at least 0")
    _check_tiles(overhead.get("gemm_tiles") or ())
    provenance = _mapping(data.get("provenance") or {}, "provenance")
    _check_provenance(provenance)
    _check_texts(data, ("name", "gpu", "framework"), "")
    fits = _need(data, "fits", "")
    if not isinstance(fits, list) or not fits:
        raise _BadEntry(f"fits is {fits!r:.80}; it must be a list of at least one fitted operation")
    return Profile(
        name=data["name"],
        gpu=data["gpu"],
        framework=data["framework"],
        version=str(_need(data, "version", "")),
        provenance=provenance,
        overhead=overhead,
        fits=tuple(
            _fit_from_dict(_mapping(entry, f"fits[{index}]"), f"fits[{index}]: ") for index, entry in enumerate(fits)
        ),
    )


def _check_numbers(value: Any, where: str) -> None:
    """Raise ValueError for anything but finite numbers in nested lists and mappings (YAML reads 1e400 as a text)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_numbers(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_numbers(item, f"{where}[{index}]")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{where} is {value!r}; it must be a finite number")


def _fit_from_dict(entry: Mapping[str, Any], place: str) -> OpFit:
    _check_texts(entry, ("op", "kind", "kernel", "framework"), place)
    op = entry["op"]
    if op not in FORMS:
        raise _BadEntry(f"{place}op is {op!r}; it must be one of {', '.join(FORMS)}")
    where = f"fit of {op}/{entry['kind']}"
    correction = _mapping(_need(entry, "correction", f"{where}: "), f"{where}: correction")
    params = _mapping(_need(entry, "params", f"{where}: "), f"{where}: params")
    _check_numbers(params, f"{where}: params")
    _check_form(op, params, f"{where}: params")
    _check_params(params, f"{where}: params")
    table = _correction_table(op, correction, f"{where}: correction")
    return OpFit(
        op=op,
        kind=entry["kind"],
        kernel=entry["kernel"],
        version=str(_need(entry, "version", f"{where}: ")),
        framework=entry["framework"],
        params=params,
        basis=correction["basis"],
        scales=tuple(correction["scales"]),
        points=table[:, :-1],
        weights=table[:, -1],
        error=_mapping(_need(entry, "held_out_error", f"{where}: "), f"{where}: held_out_error"),
    )


def _correction_table(op: str, correction: Mapping[str, Any], where: str) -> np.ndarray:
    """The points' features and weights; every other key of the correction is checked against the operation."""
    columns = (*FORMS[op].features, "weight")
    told = correction.get("columns", ",".join(columns))
    if not isinstance(told, str) or [name.strip() for name in told.split(",")] != [*columns]:
        raise _BadEntry(f"{where}.columns is {told!r:.80}; {op} has {','.join(columns)}")
    scales = _need(correction, "scales", f"{where}.")
    _check_numbers(scales, f"{where}.scales")
    if not isinstance(scales, list | tuple) or len(scales) != len(columns) - 1:
        raise _BadEntry(
            f"{where}.scales is {scales!r:.80}; it must be a list of {len(columns) - 1} numbers, one for each of "
            f"{', '.join(columns[:-1])}"
        )
    if _need(correction, "basis", f"{where}.") not in BASES:
        raise _BadEntry(f"{where}.basis is {correction['basis']!r}; it must be one of {', '.join(BASES)}")
    points = _need(correction, "points", f"{where}.")
    if not isinstance(points, str):
        raise _BadEntry(f"{where}.points is {points!r:.80}; it must be a text of one line for each point")
    rows = [line.split(",") for line in points.split("\n") if line]
    for row in rows:
        if len(row) != len(columns):
            raise _BadEntry(f"{where}.points: line {','.join(row)!r:.80} must have {len(columns)} numbers")
    table = np.array([[float(cell) for cell in row] for row in rows], dtype=float).reshape(-1, len(columns))
    if not np.isfinite(table).all():
        raise ValueError(f"{where}.points holds a value that is no finite number")
    return table


def profile_dict(profile: Profile) -> dict[str, Any]:
    """The profile as the plain data its file holds."""
    return {
        "format": FORMAT_VERSION,
        "name": profile.name,
        "gpu": profile.gpu,
        "framework": profile.framework,
        "version": profile.version,
        "provenance": dict(profile.provenance),
        "overhead": dict(profile.overhead),
        "fits": [_fit_dict(fit) for fit in profile.fits],
    }


def _fit_dict(fit: OpFit) -> dict[str, Any]:
    rows = (
        ",".join([*(f"{value:g}" if value < 1e6 else str(int(value)) for value in point), f"{weight:.6g}"])
        for point, weight in zip(fit.points, fit.weights, strict=True)
    )
    return {
        "op": fit.op,
        "kind": fit.kind,
        "framework": fit.framework,
        "version": fit.version,
        "kernel": fit.kernel,
        "held_out_error": {k: (float(f"{v:.4g}") if isinstance(v, float) else v) for k, v in fit.error.items()},
        "params": dict(fit.params),
        "correction": {
            "basis": fit.basis,
            "columns": ",".join([*FORMS[fit.op].features, "weight"]),
            "scales": list(fit.scales),
            "points": "\n".join(rows) + "\n",
        },
    }


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile's file, replacing it at once."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.dump(profile_dict(profile), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
