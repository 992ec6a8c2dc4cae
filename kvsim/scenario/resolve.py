"""From a file and a command line to a scenario in which every value is known, and where it came from."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvsim.catalog import is_model
from kvsim.scenario.fields import is_import_path
from kvsim.scenario.layout import blocks, keys_at, models_at, types_of
from kvsim.scenario.messages import join, problems_of
from kvsim.scenario.overrides import Override, apply_overrides, override_of, parse_overrides
from kvsim.scenario.presets import PRESETS
from kvsim.scenario.schema import ENGINES, Scenario
from kvsim.scenario.words import did_you_mean
from kvsim.types import ScenarioError, shown
from kvsim.yaml_loader import ABSENT, Document, Key, load_yaml, look_up, parse_scalar, parse_yaml

HEADER = "# kvsim scenario, resolved: every value, and where it came from. Running this file gives the same results."
_ORIGIN = re.compile(r"  # (default|file|command line|engine [a-z0-9-]+)$")
_DEFAULT_TYPES: dict[Key, str] = {
    ("workload", "arrivals"): "poisson",
    ("workload", "lengths"): "preset",
    ("cost",): "linear",
}


@dataclass(frozen=True)
class ResolvedScenario:
    """A valid scenario, the origin of its values, and what its user should know about it."""

    scenario: Scenario
    warnings: tuple[str, ...] = ()
    document: Document = field(default_factory=lambda: Document({}, "scenario"), repr=False)
    overrides: tuple[Override, ...] = field(default=(), repr=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The file, the command line and the engine's preset laid over each other, before defaults."""

    def where(self, key: Key) -> str:
        """Where a key was given, for messages: `--set ...`, `--engine ...`, or `file:line:column`."""
        return _where(key, self.document, self.overrides)

    def with_engine(self, engine: str, option: str = "engine") -> ResolvedScenario:
        """The same scenario under another engine; keys that engine does not have are left out.

        `option` is what messages call the place where the engine was named.
        """
        return resolve(self.document, (*self.overrides, _engine_override(engine, option)))

    def with_values(self, values: Mapping[str, Any], option: str | None = None) -> ResolvedScenario:
        """The same scenario with values changed, by dotted key; `option` as in `with_engine`. Raises ScenarioError."""
        changes = [override_of(name, value, option and f"{option} {name}={value}") for name, value in values.items()]
        return resolve(self.document, (*self.overrides, *changes))

    def origin(self, key: Key) -> str:
        """`default`, `file`, `command line`, or `engine NAME` for a value of the engine's preset."""
        last = next((change for change in reversed(self.overrides) if key[: len(change.key)] == change.key), None)
        if last is not None and look_up(last.value, key[len(last.key) :]) is not ABSENT:
            return "command line"
        # A block that was replaced as a whole has no values of the file's any more.
        if last is None and key in self._origins_in_file:
            return self._origins_in_file[key]
        given = look_up(self.document.data, key)
        gave_way = key[1:] == ("type",) and is_import_path(given) and look_up(self.raw, key) != given
        if last is None and given is not ABSENT and not gave_way:
            return "file"
        return (
            f"engine {self.scenario.engine}" if look_up(PRESETS[self.scenario.engine], key) is not ABSENT else "default"
        )

    @cached_property
    def _origins_in_file(self) -> dict[Key, str]:
        """The file may be a resolved scenario itself: its values keep the origins noted there."""
        if not self.document.text.startswith(HEADER):
            return {}
        lines = self.document.text.split("\n")
        found = {}
        for key, mark in self.document.marks.items():
            if note := _ORIGIN.search(lines[mark.line - 1]):
                found[key] = note[1]
        return found

    def to_yaml(self) -> str:
        """The scenario in full, one value per line, each with its origin."""
        lines = [HEADER]
        _write_block(self, self.scenario.model_dump(mode="json"), (), lines)
        return "\n".join(lines) + "\n"


def load_scenario(path: Path | str, overrides: Iterable[str] = (), *, engine: str | None = None) -> ResolvedScenario:
    """Read, complete and check a scenario. `overrides` are texts `key=value`. Raises ScenarioError."""
    parsed = parse_overrides(overrides)
    if engine is not None:
        parsed = (*parsed, _engine_override(engine, "--engine"))
    return resolve(load_yaml(path), parsed)


def _engine_override(engine: str, option: str) -> Override:
    return Override(("engine",), engine, f"{option} {engine:.100}")


def scenario_from_text(text: str, source: str = "scenario.yaml", overrides: Iterable[str] = ()) -> ResolvedScenario:
    """The same for a YAML text that is in no file. Raises ScenarioError."""
    return resolve(parse_yaml(text, source), parse_overrides(overrides))


def scenario_from_dict(data: Mapping[str, Any], source: str = "scenario") -> ResolvedScenario:
    """The same for plain Python data. Raises ScenarioError."""
    return resolve(Document(copy.deepcopy(dict(data)), source))


def resolve(document: Document, overrides: tuple[Override, ...] = ()) -> ResolvedScenario:
    """Lay file, command line, engine preset and defaults over each other, and check the result."""
    from kvsim.scenario.sense import check_sense

    data = copy.deepcopy(document.data)
    apply_overrides(data, overrides)
    engine = _engine_of(data, document, overrides)
    for path in blocks():
        _drop_empty(data, path)
    _fill_types(data)
    warnings = _fit_to_engine(data, engine, document, overrides)
    _merge_under(data, PRESETS[engine])
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(join(problems_of(error, data, lambda key: _where(key, document, overrides)))) from None
    scenario = _locate_files(scenario, document, overrides)
    resolved = ResolvedScenario(scenario, (), document, overrides, data)
    return ResolvedScenario(scenario, (*warnings, *check_sense(resolved)), document, overrides, data)


def _engine_of(data: dict[str, Any], document: Document, overrides: tuple[Override, ...]) -> str:
    engine = data.get("engine")
    if engine is None:
        engine = data["engine"] = "paged"
    if engine not in ENGINES:
        raise ScenarioError(
            f"{_where(('engine',), document, overrides)}: engine: is {shown(engine)}; must be one of "
            f"{', '.join(ENGINES)}{did_you_mean(engine, ENGINES)} "
            "(classes of your own go into allocator: and scheduler:)"
        )
    return str(engine)


def _drop_empty(data: Any, path: tuple[str, ...]) -> None:
    """A mapping whose lines are all commented out is read as null: it is left out."""
    *parents, last = path or ("",)
    for part in parents:
        data = data.get(part) if isinstance(data, dict) else None
    if isinstance(data, dict) and last in data and data[last] is None:
        del data[last]


def _fill_types(data: dict[str, Any]) -> None:
    for key, kind in _DEFAULT_TYPES.items():
        block = look_up(data, key)
        if isinstance(block, dict):
            block.setdefault("type", kind)


def _fit_to_engine(data: dict[str, Any], engine: str, document: Document, overrides: tuple[Override, ...]) -> list[str]:
    """Leave out keys that another engine has and this one has not, so that one file serves every engine.

    A `type:` of the file gives way where the command line names another engine. Misspelt keys stay, to be reported.
    """
    engine_is_chosen_late = any(override.key == ("engine",) for override in overrides)
    warnings = []
    for name in ("allocator", "scheduler", "cost"):
        block = data.get(name)
        if not isinstance(block, dict):
            continue
        is_set = any(override.key == (name, "type") for override in overrides)
        given = block.pop("type", None) if engine_is_chosen_late and name != "cost" and not is_set else None
        if is_import_path(given):
            warnings.append(
                f"{_where((name, 'type'), document, overrides)}: {name}.type: {given} is not used: "
                f"{_where(('engine',), document, overrides)} brings its own; to keep it, say --set {name}.type={given}"
            )
            data[name] = {key: value for key, value in block.items() if key in keys_at((name,))}
            block = data[name]
        kind = block.get("type", PRESETS[engine].get(name, {}).get("type"))
        if (name == "cost" and not is_set) or not any(kind in types_of(model) for model in models_at((name,))):
            continue
        own, known = keys_at((name,), kind), keys_at((name,))
        for key in [key for key in block if key in known and key not in own]:
            del block[key]
            warnings.append(
                f"{_where((name, key), document, overrides)}: {name}.{key}: not used: {name} {kind} has no such key"
            )
    return warnings


def _merge_under(data: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    for key, block in defaults.items():
        given = data.setdefault(key, {})
        # A part of another type has nothing to do with the preset's values.
        if isinstance(given, dict) and given.get("type") in (None, block["type"]):
            data[key] = {**block, **given}


def _locate_files(scenario: Scenario, document: Document, overrides: tuple[Override, ...]) -> Scenario:
    """Paths of the file are relative to it, or to the working directory; afterwards to the latter."""
    base = Path(document.source).parent if document.text else Path()
    changes: dict[str, Any] = {}
    model = scenario.model
    if isinstance(model, str) and _looks_like_file(model, (".json",)) and not is_model(model):
        changes["model"] = _find(model, ("model",), base, document, overrides)
    trace = getattr(scenario.workload, "trace", None)
    if isinstance(trace, str):
        found = _find(trace, ("workload", "trace"), base, document, overrides)
        changes["workload"] = scenario.workload.model_copy(update={"trace": found})
    profile = getattr(scenario.cost, "profile", None)
    if isinstance(profile, str) and _looks_like_file(profile, (".yaml", ".yml")):
        found = _find(profile, ("cost", "profile"), base, document, overrides)
        changes["cost"] = scenario.cost.model_copy(update={"profile": found})
    return scenario.model_copy(update=changes) if changes else scenario


def _looks_like_file(text: str, suffixes: tuple[str, ...]) -> bool:
    return text.lower().endswith(suffixes) or os.sep in text


def _find(text: str, key: Key, base: Path, document: Document, overrides: tuple[Override, ...]) -> str:
    is_set = any(key[: len(override.key)] == override.key for override in overrides)
    candidates = [Path(text)] if is_set or Path(text).is_absolute() else [base / text, Path(text)]
    for candidate in candidates:
        try:
            if candidate.is_file() or (key == ("model",) and (candidate / "config.json").is_file()):
                return text if Path(text).is_absolute() else os.path.relpath(candidate)
        except (OSError, ValueError):
            continue
    where = _where(key, document, overrides)
    name = ".".join(str(part) for part in key)
    for candidate in candidates:
        if os.path.exists(candidate):
            raise ScenarioError(f"{where}: {name}: {shown(text)} is not a regular file; give the file itself")
    tried = " or ".join(dict.fromkeys(str(candidate) for candidate in candidates))
    raise ScenarioError(f"{where}: {name}: there is no file {tried}; give a path that exists")


def _where(key: Key, document: Document, overrides: tuple[Override, ...]) -> str:
    for override in reversed(overrides):
        if key[: len(override.key)] == override.key:
            return str(override.text)
    return document.where(key)


def _write_block(resolved: ResolvedScenario, block: Mapping[str, Any], key: Key, lines: list[str]) -> None:
    indent = "  " * len(key)
    for name, value in block.items():
        path = (*key, name)
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{_flow(name)}:")
            _write_block(resolved, value, path, lines)
            continue
        given = _raw_leaf(resolved.raw, path)
        shown = value if given is None or isinstance(given, dict | list | tuple) else given
        if path in _PATHS:
            shown = value
        lines.append(f"{indent}{_flow(name)}: {_flow(shown)}  # {resolved.origin(path)}")


_PATHS = {("model",), ("workload", "trace"), ("cost", "profile")}
"""Rewritten when they were found: the resolved value counts."""


def _raw_leaf(raw: Any, key: Key) -> Any:
    for part in key:
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(part, raw.get(str(part)))
    return raw


def _flow(value: Any) -> str:
    """A value on one line of YAML; a text that would be read as something else is quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(name)}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    if isinstance(value, int):
        return str(value)
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z0-9_./+\-]+(?:[: ](?! )[A-Za-z0-9_./+\-]+)*", text) and ": " not in text
    if plain and isinstance(parse_scalar(text), str) and not text.startswith("-"):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", quoted)
