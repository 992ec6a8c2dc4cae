"""What kvsim knows of models and GPUs: one YAML file each, travelling with the package.

A name is a file's (`llama-3.1-8b`), or one of its aliases (`meta-llama/Llama-3.1-8B`, `NVIDIA A40`), whatever its case.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from kvsim.memory.geometry import ModelGeometry
from kvsim.types import ScenarioError
from kvsim.yaml_loader import load_yaml

GIB = 1 << 30
MIB = 1 << 20

Kind = Literal["models", "gpus"]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOUN = {"models": "model", "gpus": "GPU"}


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU as a runtime sees it: bytes, bytes/s and flop/s."""

    name: str
    total_memory_bytes: int
    memory_bandwidth: float
    """Bytes per second, as the datasheet has it."""
    peak_fp16_flops: float
    """Dense, per second."""
    l2_bytes: int
    pcie_bandwidth: float
    """Bytes per second in one direction, theoretical."""


@lru_cache
def names(kind: Kind) -> tuple[str, ...]:
    """The names in the catalog, sorted."""
    folder = files("kvsim.catalog") / kind
    return tuple(sorted(path.name[:-5] for path in folder.iterdir() if path.name.endswith(".yaml")))


def model_names() -> tuple[str, ...]:
    """The models in the catalog."""
    return names("models")


def gpu_names() -> tuple[str, ...]:
    """The GPUs in the catalog."""
    return names("gpus")


def is_model(name: str) -> bool:
    """Whether the catalog knows a model by this name: its own, or the one on Hugging Face."""
    return _find("models", name) is not None


def load_model(spec: str | Path | Mapping[str, Any], *, base_dir: Path | None = None) -> ModelGeometry:
    """The geometry of a model: a name, a path (config.json, a folder with one, YAML), or a configuration as a mapping.

    Relative paths start at `base_dir` (else the working folder). Raises ScenarioError: an unknown name with the
    nearest ones and the list, or what is wrong with the configuration.
    """
    if isinstance(spec, Mapping):
        return ModelGeometry.from_config(spec)
    name = _find("models", str(spec))
    if name is not None:
        return ModelGeometry.from_config(_entry("models", name)["config"], name=name)
    path = _config_path(Path(base_dir or ".", spec))
    if path is None:
        raise _unknown("models", str(spec))
    return _from_file(path)


def load_gpu(spec: str | Mapping[str, Any]) -> GpuSpec:
    """A GPU by name, alias or device name, or from a mapping with the fields of a catalog file.

    Raises ScenarioError: an unknown name with the nearest ones and the list, or the field that is missing.
    """
    if isinstance(spec, Mapping):
        return _gpu(str(spec.get("name", "gpu")), spec)
    name = _find("gpus", spec)
    if name is None:
        raise _unknown("gpus", spec)
    return _gpu(name, _entry("gpus", name))


def _gpu(name: str, entry: Mapping[str, Any]) -> GpuSpec:
    def number(key: str) -> float:
        value = entry.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ScenarioError(f"gpu {name}: {key} is {value!r}; it must be a number above 0")
        return value

    return GpuSpec(
        name=name,
        total_memory_bytes=round(number("total_memory_gib") * GIB),
        memory_bandwidth=number("memory_bandwidth_gb_s") * 1e9,
        peak_fp16_flops=number("peak_fp16_tflops") * 1e12,
        l2_bytes=round(number("l2_mib") * MIB),
        pcie_bandwidth=number("pcie_gb_s") * 1e9,
    )


@lru_cache
def _entry(kind: Kind, name: str) -> dict[str, Any]:
    text = (files("kvsim.catalog") / kind / f"{name}.yaml").read_text("utf-8")
    entry: dict[str, Any] = yaml.load(text, _LOADER)
    return entry


@lru_cache
def _aliases(kind: Kind) -> dict[str, str]:
    """Every way to name an entry, normalised."""
    known: dict[str, str] = {}
    for name in names(kind):
        for alias in (name, *_entry(kind, name).get("aliases", ())):
            known[_normal(alias)] = name
    return known


def _normal(name: str) -> str:
    return " ".join(name.lower().replace("_", "-").split())


def _find(kind: Kind, name: str) -> str | None:
    normal = _normal(name)
    return normal if normal in names(kind) else _aliases(kind).get(normal)


def _unknown(kind: Kind, name: str) -> ScenarioError:
    known = names(kind)
    near = difflib.get_close_matches(_normal(name).rpartition("/")[2], known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    also = " A path to a config.json will do too." if kind == "models" else ""
    return ScenarioError(f"unknown {_NOUN[kind]} {name!r}{hint} The catalog has {', '.join(known)}.{also}")


def _config_path(path: Path) -> Path | None:
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    return path if path.is_file() else None


def _from_file(path: Path) -> ModelGeometry:
    config = _read_json(path) if path.suffix == ".json" else load_yaml(path, "model configuration").data
    if not isinstance(config, dict):
        raise ScenarioError(f"{path}: a model configuration is a mapping, this is {type(config).__name__}")
    try:
        return ModelGeometry.from_config(config.get("config", config), name=_name_of(path))
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        # Editors on Windows put a byte-order mark at the beginning.
        return json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read as a model configuration: {error}") from None


def _name_of(path: Path) -> str:
    """A file of that usual name goes by its folder's, any other by its own."""
    return (path.stem if path.name != "config.json" else path.parent.name) or path.stem
