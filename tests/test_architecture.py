"""The architecture, held: imports point down, the clock stays in sim/, heavy modules wait until they are needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "kvsim"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    {"types", "tokens", "request", "files", "yaml_loader"},
    {"memory"},
    {"scheduling"},
    {"workload", "cost", "attention", "catalog", "capacity"},
    {"metrics", "testing"},
    {"sim"},
    {"scenario", "registry", "footprint"},
    None,  # everything else: runs, sweeps, figures, pages, conformance
    {"cli", "__main__"},
)
"""From the bottom to the top; a module may import its own layer and those below."""

OTHERS = LAYERS.index(None)
HEAVY = {"pandas", "matplotlib", "scipy", "dask", "distributed", "rich"}
ONLY_IN = {"simpy": "sim", "hypothesis": "testing", "typer": "cli"}
UNPREDICTABLE = {"time", "random", "secrets", "datetime", "uuid"}


class Import(NamedTuple):
    module: str
    line: int
    is_lazy: bool


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, those for type checkers left out."""

    def walk(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, is_lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (Import(name, child.lineno, is_lazy) for name in _targets(child))
            else:
                yield from walk(child, is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return walk(ast.parse(path.read_text("utf-8")), False)


def _targets(node: ast.ImportFrom) -> list[str]:
    """`from kvsim import plots` imports kvsim.plots; other imports name their module."""
    module = node.module or ""
    return [f"{module}.{alias.name}" for alias in node.names] if module == "kvsim" else [module]


def part_of(module: str) -> str:
    """`kvsim.memory.paged` -> `memory`; another package -> its name."""
    names = module.split(".")
    return names[1] if names[0] == "kvsim" and len(names) > 1 else names[0]


def part_of_file(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(part: str) -> int:
    return next((index for index, parts in enumerate(LAYERS) if parts and part in parts), OTHERS)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent != PACKAGE or path.stem != "__init__"], ids=name_of
)
def test_imports_point_down(path: Path) -> None:
    own = layer_of(part_of_file(path))
    upward = [
        f"{name_of(path)}:{line} imports {module}"
        for module, line, _ in imports_of(path)
        if module.startswith("kvsim.") and layer_of(part_of(module)) > own and part_of(module) != "__version__"
    ]
    assert not upward


def test_the_map_for_contributors_has_every_part_in_its_layer() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8").partition("| layer | what |")[2].partition("## ")[0]
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("|")]
    parts = [part for row in rows for part in row]
    assert sorted(parts) == sorted({part_of_file(path) for path in FILES} - {"__init__", "__main__"})
    layers = [layer_of(part) for part in parts]
    assert layers == sorted(layers, reverse=True)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_some_packages_have_one_place(path: Path) -> None:
    for module, line, _ in imports_of(path):
        home = ONLY_IN.get(part_of(module))
        assert home in (None, part_of_file(path)), f"{name_of(path)}:{line} imports {module}: that belongs to {home}/"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_modules_are_imported_by_the_functions_that_need_them(path: Path) -> None:
    early = [
        f"{name_of(path)}:{line} {module}"
        for module, line, is_lazy in imports_of(path)
        if part_of(module) in HEAVY and not is_lazy
    ]
    assert not early


@pytest.mark.parametrize(
    "path", [path for path in FILES if part_of_file(path) in ("memory", "scheduling")], ids=name_of
)
def test_memory_and_scheduling_have_no_clock_and_no_frames(path: Path) -> None:
    modules = {part_of(module) for module, _, _ in imports_of(path)}
    assert not modules & {"simpy", "pandas"}
    if part_of_file(path) == "memory":
        assert not modules & (UNPREDICTABLE | {"request"})


@pytest.mark.parametrize("path", [path for path in FILES if part_of_file(path) not in ("cli", "__main__")], ids=name_of)
def test_only_the_command_line_prints_and_exits(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    assert not {"print", "exit", "quit", "sys.exit", "os._exit", "input"} & set(names)


def test_pictures_are_written_in_one_place() -> None:
    """Whole or not at all: `kvsim.files`. (A notebook's picture is no file.)"""
    found = {name_of(path) for path in FILES if ".savefig(" in path.read_text("utf-8")}
    assert found == {"kvsim/files.py", "kvsim/report/style.py"}
