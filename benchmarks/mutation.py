"""Would the tests notice? A seeded sample of small faults in memory/, scheduling/ and metrics/ledger, one run each.

    python benchmarks/mutation.py --num 300 --seed 1 --minutes 60 --out results/mutation.json

A mutant is one changed operator, constant, condition or statement. The tests of its area run in a copy of the tree;
it is killed if one fails, or if they do not end. Parts that no test can be asked to notice are left out: texts of
errors, annotations, docstrings, `__repr__`. The report goes to `docs/testing.md` by hand, survivors judged.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent

ENGINES = ["tests/scheduling/test_paged_cases.py", "tests/sim/test_cases.py", "tests/test_run_fuzz.py", "-k", "not k47"]
LAWS = ["tests/test_laws.py", "-k", "not law_9 and not law_10 and not orca"]
TESTS = {
    "memory": [["tests/memory"], ENGINES, ["tests/testing/test_kit.py"], LAWS],
    "scheduling": [
        ENGINES,
        ["tests/scheduling/test_v1_golden.py", "tests/scheduling/test_vllm_v0.py", "tests/scheduling/test_orca.py"],
        ["tests/scheduling/test_static.py", "tests/scheduling/test_continuous_engines.py"],
        ["tests/test_laws.py", "-k", "not law_9"],
        ["tests/scheduling/test_calendar_equals_plain.py", "-k", "same_decisions"],
    ],
    "metrics": [ENGINES, ["tests/metrics"], ["tests/scheduling/test_static.py"], LAWS],
}
"""Groups of tests by area, run in this order until one fails."""

FILES = ("kvsim/memory/*.py", "kvsim/scheduling/*.py", "kvsim/metrics/ledger.py")
LEFT_OUT = ("interface.py", "__init__.py", "geometry.py", "weights.py")
"""Protocols hold no rule; model geometry and weights are no part of the allocators."""

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
    start: int
    end: int
    before: str
    after: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file, in order of place."""
    source = path.read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    name = str(path.relative_to(ROOT))
    for node in _mutable(ast.parse(source)):
        text = _changed(node)
        if text is None:
            continue
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        if text != before:
            yield Mutant(name, node.lineno, start, end, before, text)


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


def sample(num: int, seed: int) -> list[Mutant]:
    """`num` of all mutants, by seed."""
    paths = sorted(path for pattern in FILES for path in ROOT.glob(pattern) if path.name not in LEFT_OUT)
    every = [mutant for path in paths for mutant in mutants_of(path)]
    print(f"{len(every)} mutants in {len(paths)} files, {min(num, len(every))} drawn", flush=True)
    return Random(seed).sample(every, min(num, len(every)))


def judge(mutant: Mutant, tree: Path, timeout_s: float) -> str:
    """ "killed", "timeout" or "survived"."""
    target = tree / mutant.path
    source = target.read_bytes()
    target.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
    try:
        for tests in TESTS[mutant.path.split("/")[1]]:
            if (verdict := _run(tests, tree, timeout_s)) != "survived":
                return verdict
        return "survived"
    finally:
        target.write_bytes(source)


def _run(tests: list[str], tree: Path, timeout_s: float) -> str:
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m",
               "not deep", *tests]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "HYPOTHESIS_PROFILE": "mutation",
        "KVSIM_SHARED": str(ROOT.parent / "shared"),
    }
    with subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timeout"
    return "survived" if status == 0 else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600, help="stop then, with what was judged so far")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one group of tests")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutation.json")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(exist_ok=True)
    judged = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "kvsim-mutated"
        tree.mkdir()
        for name in ("kvsim", "tests", "scenarios"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for tests in [group for groups in TESTS.values() for group in groups] if options.minutes > 60 else []:
            if _run(tests, tree, options.timeout) != "survived":
                print(f"the tests do not pass without a mutant: {' '.join(tests)}")
                return 1
        for mutant in sample(options.num, options.seed):
            if time.monotonic() > deadline:
                break
            verdict = judge(mutant, tree, options.timeout)
            judged.append({**asdict(mutant), "verdict": verdict})
            print(
                f"{len(judged):4} {verdict:8} {mutant.path}:{mutant.line} {mutant.before!r} -> {mutant.after!r}",
                flush=True,
            )
            options.out.write_text(json.dumps(judged, indent=1))
    killed = sum(one["verdict"] != "survived" for one in judged)
    print(f"{killed} of {len(judged)} mutants killed ({100 * killed / max(1, len(judged)):.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
