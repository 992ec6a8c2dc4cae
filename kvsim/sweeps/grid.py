"""Which scenarios a sweep runs: keys, their values, seeds."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvsim import __version__
from kvsim.scenario.fields import is_import_path
from kvsim.scenario.messages import join
from kvsim.scenario.overrides import plain
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.scenario.schema import Sweep
from kvsim.types import ScenarioError
from kvsim.yaml_loader import parse_scalar, parse_value

MAX_POINTS = 100_000
MAX_END = 1e18
"""Ends of ranges beyond this are typing errors."""
RANGE_SLACK = 1e-9
"""Ends of ranges are met within this share of a step: 0:1:0.1 has eleven values."""


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep: the varied keys with their values, the seed, and the scenario in full."""

    index: int
    values: dict[str, Any]
    seed: int
    scenario: ResolvedScenario

    @cached_property
    def key(self) -> str:
        """Names the point's file: what decides its figures, so that a grid that grows keeps what it has.

        That is the scenario, the content of the files it names, own code included, and the program's version.
        """
        values = self.scenario.scenario.model_dump(mode="json", exclude={"sweep", "record", "timeline"})
        files: list[str | Path] = [*(name for _, name in files_of(self.scenario)), *_own_code(values)]
        return _digest(__version__, json.dumps(values), *map(_file_digest, files))

    @property
    def record(self) -> dict[str, Any]:
        """The first columns of its row."""
        return {**self.values, "seed": self.seed}


def make_grid(
    base: ResolvedScenario,
    vary: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int],
    is_zipped: bool = False,
    option: str = "vary",
) -> list[Point]:
    """Every combination of the values (or, zipped, the lists side by side), each with every seed.

    `option` is what messages call the place that says what is varied. Raises ScenarioError for a key that no scenario
    has, and for values of which some combination makes no sense: before anything is simulated.
    """
    if "seed" in vary:
        raise ScenarioError("sweep: seed is not varied like other keys: say --seeds 1,2,7, or seeds: [1, 2, 7]")
    _check_size(vary, len(seeds), is_zipped)
    points: list[Point] = []
    problems: dict[str, None] = {}
    num_bad = 0
    combinations = list(_combinations(vary, is_zipped))
    for values in combinations:
        try:
            for seed in seeds:
                points.append(Point(len(points), values, seed, base.with_values({**values, "seed": seed}, option)))
        except ScenarioError as error:
            num_bad += 1
            problems |= dict.fromkeys(str(error).split("\n"))
    if num_bad:
        what = "the values" if num_bad == len(combinations) else f"{num_bad} of {len(combinations)} combinations"
        raise ScenarioError(
            f"sweep: {what} make no sense, nothing was run:\n{join(problems)}\n"
            "leave those values out, or list the combinations that make sense side by side (--zip)"
        )
    return points


def _check_size(vary: Mapping[str, Sequence[Any]], num_seeds: int, is_zipped: bool) -> None:
    num_points = num_seeds * (1 if is_zipped else math.prod(map(len, vary.values())))
    if num_points > MAX_POINTS:
        raise ScenarioError(f"sweep: has {num_points:,} points; at most {MAX_POINTS:,} are run")


def files_of(resolved: ResolvedScenario) -> list[tuple[tuple[str, ...], str]]:
    """The files that a scenario names, each with its key: what a worker without our disk needs."""
    scenario = resolved.scenario
    named: dict[tuple[str, ...], Any] = {
        ("workload", "trace"): getattr(scenario.workload, "trace", None),
        ("model",): scenario.model,
        ("cost", "profile"): getattr(scenario.cost, "profile", None),
    }
    files = {key: _file(name) for key, name in named.items() if isinstance(name, str)}
    return [(key, str(path)) for key, path in files.items() if path is not None]


def _file(name: str) -> Path | None:
    """A model may be named by its folder; other names without a file are those of the catalog."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    return path if path.is_file() else None


def _own_code(values: Mapping[str, Any]) -> Iterator[Path]:
    """The module of each `package.module:Name` in a scenario's blocks, or all that its package has."""
    names = {
        value.partition(":")[0].partition(".")[0]
        for block in values.values()
        if isinstance(block, Mapping)
        for value in block.values()
        if is_import_path(value)
    }
    for name in sorted(names - {"kvsim"}):
        for folder in map(Path, ("", *sys.path)):
            if (module := folder / f"{name}.py").is_file():
                yield module
                break
            if (package := folder / name).is_dir():
                yield from sorted(package.rglob("*.py"))
                break


def _file_digest(name: str | Path) -> str:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


def _combinations(vary: Mapping[str, Sequence[Any]], is_zipped: bool) -> Iterable[dict[str, Any]]:
    names, lists = list(vary), list(vary.values())
    if is_zipped and len({len(values) for values in lists}) > 1:
        sizes = ", ".join(f"{name} has {len(values)}" for name, values in vary.items())
        raise ScenarioError(f"sweep: lists side by side must be equally long: {sizes}; or leave out zip")
    rows = zip(*lists, strict=True) if is_zipped else itertools.product(*lists)
    distinct = {repr(row): row for row in rows}
    return (dict(zip(names, row, strict=True)) for row in distinct.values())


def seeds_of(given: int | Sequence[int], first: int) -> tuple[int, ...]:
    """`5` is the scenario's own seed and the four after it; a list is itself. Raises ScenarioError."""
    if isinstance(given, int):
        if not 1 <= given <= MAX_POINTS:
            raise ScenarioError(f"seeds is {given}; at least 1 is needed, and at most {MAX_POINTS:,} are run")
        return tuple(range(first, first + given))
    if not len(given):
        raise ScenarioError("seeds is empty; at least 1 is needed")
    return tuple(dict.fromkeys(plain(seed) for seed in given))


def parse_varies(texts: Iterable[str]) -> dict[str, list[Any]]:
    """All `--vary` of a command line. Raises ScenarioError where one key is given twice."""
    chosen: dict[str, list[Any]] = {}
    for text in texts:
        name, values = parse_vary(text)
        if name in chosen:
            raise ScenarioError(f"--vary {text}: {name} is varied twice; give all its values at once: {name}=a,b,c")
        chosen[name] = values
    return chosen


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """`key=8,16,32` or `key=1:10:1` (both ends included). Raises ScenarioError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise ScenarioError(f"--vary {text}: must be key=values, such as --vary allocator.block_size=8,16,32")
    return name.strip(), values_of(values, f"--vary {text}")


def values_of(given: Any, where: str) -> list[Any]:
    """A list, `a,b,c`, `low:high:step` or a single value as a list; null is a value. Raises ScenarioError."""
    if isinstance(given, str) and given.count(":") == 2 and "," not in given and not _is_block(given):
        values = _range(given, where)
    elif isinstance(given, str):
        values = [_value(part, where) for part in map(str.strip, _parts(given))]
    elif isinstance(given, Iterable) and not isinstance(given, Mapping):
        values = [plain(value) for value in given]
    else:
        values = [given]
    if not values or "" in values:
        raise ScenarioError(f"{where}: has an empty value; give values with commas between, or low:high:step")
    return values


def _parts(text: str) -> list[str]:
    """Split at commas, but not at those inside a list or a block, as far as its brackets close."""
    parts: list[str] = []
    for piece in text.split(","):
        if parts and _num_open(parts[-1]) > 0 and _num_open(text) == 0:
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _num_open(text: str) -> int:
    return sum(text.count(bracket) for bracket in "[{") - sum(text.count(bracket) for bracket in "]}")


def _is_block(text: str) -> bool:
    return text.lstrip().startswith(("[", "{"))


def _value(part: str, where: str) -> Any:
    if _is_block(part):
        return parse_value(part, where)
    return parse_scalar(part) if part else part


def _range(text: str, where: str) -> list[Any]:
    ends = [parse_scalar(part.strip()) for part in text.split(":")]
    if not all(_is_ordinary(end) for end in ends):
        raise ScenarioError(f"{where}: {text!r} is no range of numbers; write low:high:step, such as 1:10:1")
    low, high, step = ends
    if step <= 0 or high < low:
        raise ScenarioError(f"{where}: {text!r}: low must not exceed high, and the step must be above 0")
    if (high - low) / step > MAX_POINTS:
        raise ScenarioError(f"{where}: {text!r} has too many values; at most {MAX_POINTS:,} points are run")
    count = math.floor((high - low) / step + RANGE_SLACK) + 1
    is_whole = all(isinstance(end, int) for end in ends)
    values = [low + index * step for index in range(count)]
    return values if is_whole else [float(f"{value:.12g}") for value in values]


def _is_ordinary(value: Any) -> bool:
    """A number that can be counted with: no truth value, no infinity, nothing beyond floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_END


def vary_of(block: Sweep) -> dict[str, list[Any]]:
    """What a scenario's own `sweep:` block varies."""
    return {name: values_of(given, f"sweep.vary.{name}") for name, given in block.vary.items()}


def own_combinations(base: ResolvedScenario) -> list[Point]:
    """The combinations of a scenario's own `sweep:` block, each with the first seed: all that can be wrong with it.

    Empty if it has no such block. Raises ScenarioError as `make_grid` does.
    """
    block = base.scenario.sweep
    if block is None:
        return []
    vary, seeds = vary_of(block), seeds_of(block.seeds, base.scenario.seed)
    _check_size(vary, len(seeds), block.zip)
    return make_grid(base, vary, seeds=seeds[:1], is_zipped=block.zip, option="sweep.vary")
