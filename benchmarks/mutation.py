"""Would the tests notice? A seeded sample of small faults in memory/, scheduling/ and metrics/ledger, one run each.

    python benchmarks/mutation.py --num 300 --seed 1 --minutes 60 --out results/mutation.json

A mutant is one changed operator, constant, condition or statement. It is judged in a copy of one commit: the tests that
execute the changed line run, the cheapest first, and it is killed if one fails, or if they do not end. Parts that no
test can be asked to notice are left out: texts of errors, annotations, docstrings, `__repr__`. The report goes to
`docs/testing.md` by hand, survivors judged. A run that was stopped goes on where it was, if it is asked for the same.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import hypothesis  # noqa: F401  (what every judged mutant needs is imported once, before it forks)
import numpy  # noqa: F401
import pandas  # noqa: F401
import pydantic  # noqa: F401
import pytest
import simpy  # noqa: F401
import typer  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent

TESTS = (
    "tests/memory", "tests/metrics", "tests/scheduling", "tests/sim", "tests/testing", "tests/test_run_fuzz.py",
    "tests/test_laws.py", "tests/conform", "tests/attention",
)  # fmt: skip
"""Whose tests a mutant meets, of the suite without the deep ones."""

FILES = ("kvsim/memory/*.py", "kvsim/scheduling/*.py", "kvsim/metrics/ledger.py")
LEFT_OUT = ("interface.py", "__init__.py", "geometry.py", "weights.py")
"""Protocols hold no rule; model geometry and weights are no part of the allocators."""

FIRST_S = 15.0
"""Every mutant meets tests of so many CPU seconds, the cheapest first; those that survive meet the rest afterwards."""
SLOW_S = 4.0
"""Tests that take longer are left out."""
MANY_CALLS = 3000
"""A function called more often in one test is not traced any further: the test counts as executing all of it."""
LIMIT_S, LIMIT_FACTOR = 20.0, 4.0
"""CPU seconds that a mutant may use, beside so many times what its tests take without it."""
MEMORY_LIMIT = 6 * 2**30
PYTEST = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not deep")

COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//"}


@dataclass(frozen=True)
class Mutant:
    """A span of bytes of a file, and what stands there instead."""

    path: str
    line: int
    last_line: int
    start: int
    end: int
    before: str
    after: str


def mutants_of(path: Path, tree: Path) -> Iterator[Mutant]:
    """Every mutant of a file, in order of place."""
    source = path.read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    name = str(path.relative_to(tree))
    for node in _mutable(ast.parse(source)):
        text = _changed(node)
        if text is None:
            continue
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        if text != before:
            yield Mutant(name, node.lineno, node.end_lineno, start, end, before, text)


def _mutable(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose change a test could notice."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords" if _is_class(tree) else ""):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_out(child):
                continue
            yield child
            yield from _mutable(child)


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.ImportFrom | ast.Import):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "describe_block", "describe_need") or node.name.startswith("_why")
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changed(node: ast.AST) -> str | None:
    """The mutant's text for a node; None for nodes that stay."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"({ast.unparse(left)} {COMPARE[type(op)]} {ast.unparse(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return f"({ast.unparse(left)} {ARITHMETIC[type(op)]} {ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            return "(" + word.join(f"({ast.unparse(value)})" for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value):
            sign = "-" if isinstance(op, ast.Add) else "+"
            return f"{ast.unparse(target)} {sign}= {ast.unparse(value)}"
        case ast.Expr(value=ast.Call()):
            return "pass"
        case ast.Break():
            return "pass"
        case ast.Continue():
            return "pass"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args) if len(args) == 2:
            other = "max" if name == "min" else "min"
            return f"{other}({', '.join(map(ast.unparse, args))})"
    return None


def sources(tree: Path) -> list[Path]:
    """The files whose faults are asked for."""
    return sorted(path for pattern in FILES for path in tree.glob(pattern) if path.name not in LEFT_OUT)


def sample(tree: Path, num: int, seed: int) -> list[Mutant]:
    """`num` of all mutants, by seed."""
    every = [mutant for path in sources(tree) for mutant in mutants_of(path, tree)]
    print(f"{len(every)} mutants in {len(sources(tree))} files, {min(num, len(every))} drawn", flush=True)
    return Random(seed).sample(every, min(num, len(every)))


class Stopwatch:
    """A pytest plugin: what each test takes, and which fail."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.process_time() - start, 4)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @property
    def found(self) -> Any:
        return self.seconds


class Tracer:
    """A pytest plugin: which lines of the mutated files each test executes."""

    def __init__(self, tree: Path) -> None:
        self.names = {str(path): str(path.relative_to(tree)) for path in sources(tree)}
        self.found: dict[str, dict[str, list[int]]] = {}
        self.failed: list[str] = []
        self._lines: set[tuple[str, int]] = set()
        self._calls: dict[CodeType, int] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._lines, self._calls = set(), {}
        sys.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            by_file: dict[str, list[int]] = {}
            for name, line in sorted(self._lines):
                by_file.setdefault(self.names[name], []).append(line)
            self.found[item.nodeid] = by_file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in self.names:
            return None
        self._calls[code] = calls = self._calls.get(code, 0) + 1
        if calls > MANY_CALLS:
            if calls == MANY_CALLS + 1:
                self._lines.update((code.co_filename, line) for _, _, line in code.co_lines() if line)
            return None
        self._lines.add((code.co_filename, frame.f_lineno))
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._on_line


def run_tests(tree: Path, tests: list[str], plugin: Any, limit_s: float, writes_bytecode: bool = False) -> str:
    """Run tests in a process of their own: "survived", "killed (by which test)" or "timeout".

    What `plugin.found` holds afterwards is left in `found.json` beside the tree.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(_in_child(tree, tests, plugin, limit_s, writes_bytecode))
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "killed by a crash"
    if os.WEXITSTATUS(status) == 0:
        return "survived"
    failed = json.loads(_notes(tree).read_text())["failed"]
    return f"killed by {failed[0] if failed else 'an import'}"


def _notes(tree: Path) -> Path:
    return tree.with_name("found.json")


def _in_child(tree: Path, tests: list[str], plugin: Any, limit_s: float, writes_bytecode: bool) -> int:
    status = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 10))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        sys.dont_write_bytecode = not writes_bytecode
        os.environ |= {
            "PYTHONPATH": str(tree),
            "HYPOTHESIS_PROFILE": "mutation",
            "KVSIM_SHARED": os.environ.get("KVSIM_SHARED", str(ROOT.parent / "shared")),
        }
        os.dup2(os.open(tree.with_name("pytest.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        _notes(tree).write_text('{"failed": []}')
        status = int(pytest.main([*PYTEST, *tests], plugins=[plugin]))
        _notes(tree).write_text(json.dumps({"failed": plugin.failed, "found": plugin.found}))
        sys.stdout.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    return status


@dataclass(frozen=True)
class Map:
    """Which tests execute which lines, and what each takes without a mutant."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[int]]]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Those that execute it, the cheapest first; for lines that run at the import, those that execute the file."""
        place = set(range(mutant.line, mutant.last_line + 1))
        reached = [test for test, lines in self.lines.items() if mutant.path in lines]
        chosen = [test for test in reached if place.intersection(self.lines[test][mutant.path])]
        return sorted(chosen or reached, key=lambda test: self.seconds[test])

    def first_of(self, tests: list[str]) -> int:
        """How many of them fit into the first round."""
        spent = itertools.accumulate(self.seconds[test] for test in tests)
        return sum(seconds <= FIRST_S for seconds in spent)

    def limit_s(self, tests: list[str]) -> float:
        """CPU seconds after which a mutant is taken to be in a loop without end."""
        return LIMIT_S + LIMIT_FACTOR * sum(self.seconds[test] for test in tests)


def make_map(tree: Path, commit: str, kept: Path) -> Map:
    """Run the tests once to time them, and once to trace them; `kept` keeps what came out.

    Exits where they do not pass without a mutant.
    """
    known = _read_json(kept)
    if known.get("commit") == commit:
        return Map(known["seconds"], known["lines"])
    _pass_or_exit(tree, list(TESTS), Stopwatch())
    seconds: dict[str, float] = json.loads(_notes(tree).read_text())["found"]
    traced = [test for test, duration in seconds.items() if duration < SLOW_S]
    _pass_or_exit(tree, traced, Tracer(tree))
    lines = json.loads(_notes(tree).read_text())["found"]
    kept.write_text(json.dumps({"commit": commit, "seconds": seconds, "lines": lines}))
    return Map(seconds, lines)


def _pass_or_exit(tree: Path, tests: list[str], plugin: Any) -> None:
    if (verdict := run_tests(tree, tests, plugin, 3600, writes_bytecode=True)) != "survived":
        sys.exit(f"without a mutant the tests should pass: {verdict}, see {tree.with_name('pytest.log')}")


def judge(mutant: Mutant, tree: Path, tests: list[str], limit_s: float) -> str:
    """The verdict of `run_tests` with the mutant in place."""
    if not tests:
        return "survived"
    target = tree / mutant.path
    source = target.read_bytes()
    # Compiled code is looked up by size and second of its source: a mutant could be mistaken for what it replaces.
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
        compiled.unlink()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    try:
        return run_tests(tree, tests, Stopwatch(), limit_s)
    finally:
        target.write_bytes(source)


def snapshot(commit: str, tree: Path) -> str:
    """The files of a commit, unpacked into `tree`; returns its full name."""
    name = subprocess.run(
        ["git", "rev-parse", f"{commit}^{{commit}}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    archive = subprocess.run(["git", "archive", name], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="HEAD", help="whose files are mutated and tested")
    parser.add_argument("--minutes", type=float, default=600, help="stop then, with what was judged so far")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutation.json")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvsim-mutation-") as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        commit = snapshot(options.commit, tree)
        mutants = sample(tree, options.num, options.seed)
        tests = make_map(tree, commit, options.out.with_suffix(".map.json"))
        total_s = sum(tests.seconds[test] for test in tests.lines)
        print(f"{commit[:8]}: {len(tests.lines)} tests in {total_s:.0f} s pass without a mutant", flush=True)
        run = Run(tree, tests, {"commit": commit, "num": options.num, "seed": options.seed}, options.out)
        for all_tests in (False, True):
            for number, mutant in enumerate(mutants):
                if time.monotonic() < deadline:
                    run.judge(number, mutant, all_tests)
    return run.summarise()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


class Run:
    """The verdicts so far, kept on disk; what an earlier run of the same sample left counts."""

    def __init__(self, tree: Path, tests: Map, asked: dict[str, Any], out: Path) -> None:
        self.tree, self.tests, self.asked, self.out = tree, tests, asked, out
        earlier = _read_json(out)
        is_same = all(earlier.get(key) == value for key, value in asked.items())
        self.judged: dict[str, dict[str, Any]] = earlier["mutants"] if is_same else {}

    def judge(self, number: int, mutant: Mutant, all_tests: bool) -> None:
        """Judge a mutant by its first tests, or, if it survived those, by the rest."""
        known = self.judged.get(str(number), {"num_tests": 0, "seconds": 0.0})
        chosen = self.tests.tests_of(mutant)
        last = len(chosen) if all_tests else self.tests.first_of(chosen)
        tests = chosen[known["num_tests"] : last]
        if known.get("verdict", "survived") != "survived" or (known.get("verdict") and not tests):
            return
        start = sum(os.times()[2:4])
        verdict = judge(mutant, self.tree, tests, self.tests.limit_s(tests))
        spent = round(known["seconds"] + sum(os.times()[2:4]) - start, 1)
        record = {**asdict(mutant), "num_tests": last, "of_tests": len(chosen), "seconds": spent, "verdict": verdict}
        self.judged[str(number)] = record
        change = f"{mutant.path}:{mutant.line} {mutant.before!r} -> {mutant.after!r}"
        print(f"{number:4} {spent:6.1f} s {change}: {verdict} ({last} of {len(chosen)} tests)", flush=True)
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self.asked, "mutants": self.judged}, indent=1))
        temporary.replace(self.out)

    def summarise(self) -> int:
        """Print the score."""
        verdicts = [one["verdict"] for one in self.judged.values()]
        killed = sum(verdict != "survived" for verdict in verdicts)
        print(f"{killed} of {len(verdicts)} mutants killed ({100 * killed / max(1, len(verdicts)):.1f} %)")
        return 0


if __name__ == "__main__":
    sys.exit(main())
