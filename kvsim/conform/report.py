"""What a conformance run found, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from kvsim.conform.cases import Case
from kvsim.conform.result import CaseResult, Mismatch, is_same

_COLUMN_WIDTH = 56
_MAX_LINES = 40
_MAX_STATE_LINES = 6


@dataclass(frozen=True, slots=True)
class ConformReport:
    """Every case that was replayed, with its result, in order."""

    results: tuple[tuple[Case, CaseResult], ...]

    @property
    def num_cases(self) -> int:
        return len(self.results)

    @property
    def disagreeing(self) -> tuple[tuple[Case, CaseResult], ...]:
        return tuple((case, result) for case, result in self.results if not result.agrees)

    @property
    def num_agreeing(self) -> int:
        return self.num_cases - len(self.disagreeing)

    @property
    def num_fields(self) -> int:
        """Recorded values compared."""
        return sum(result.num_fields for _, result in self.results)

    @property
    def agrees(self) -> bool:
        return not self.disagreeing


def as_text(report: ConformReport) -> str:
    """The first disagreement in full, the names of the others, and the count."""
    lines: list[str] = []
    if report.disagreeing:
        (case, result), *others = report.disagreeing
        lines += [*_describe(case, result), ""]
        if others:
            lines += [f"also departs: {_place(other, found)}" for other, found in others] + [""]
    lines.append(f"{report.num_agreeing} of {report.num_cases} cases agree ({report.num_fields} fields compared)")
    return "\n".join(lines)


def as_json(report: ConformReport) -> str:
    """Counts, and one object per case."""
    cases = [
        {
            "case": result.name,
            "file": str(case.path),
            "kind": case.kind,
            "agrees": result.agrees,
            "num_fields": result.num_fields,
            "mismatch": _mismatch_json(result.mismatch),
        }
        for case, result in report.results
    ]
    counts = {"num_cases": report.num_cases, "num_agree": report.num_agreeing, "num_fields": report.num_fields}
    return json.dumps({**counts, "cases": cases}, indent=2, default=str)


def _mismatch_json(mismatch: Mismatch | None) -> dict[str, Any] | None:
    if mismatch is None:
        return None
    return {
        "step": mismatch.step,
        "field": mismatch.field,
        "expected": mismatch.expected,
        "got": mismatch.got,
        "state_before": mismatch.state,
    }


def _place(case: Case, result: CaseResult) -> str:
    assert result.mismatch is not None
    return f"{case.path} at step {result.mismatch.step}, field {result.mismatch.field}"


def _describe(case: Case, result: CaseResult) -> Iterator[str]:
    mismatch = result.mismatch
    assert mismatch is not None
    yield f"{result.name} ({case.path}) departs at step {mismatch.step}, field {mismatch.field}"
    yield ""
    yield from _side_by_side(mismatch.expected, mismatch.got)
    if where := _first_difference(mismatch.expected, mismatch.got):
        yield f"first difference: {where}"
    if mismatch.state:
        yield ""
        yield "state just before:"
        for name, value in mismatch.state.items():
            yield from _entry(name, value)


def _side_by_side(expected: object, got: object) -> Iterator[str]:
    yield f"{'expected':{_COLUMN_WIDTH}} | got"
    yield f"{'-' * _COLUMN_WIDTH}-+-{'-' * _COLUMN_WIDTH}"
    rows = list(zip_longest(_column(expected), _column(got), fillvalue=""))
    for left, right in rows[:_MAX_LINES]:
        yield f"{left:{_COLUMN_WIDTH}} | {right}".rstrip()
    if len(rows) > _MAX_LINES:
        yield f"... {len(rows) - _MAX_LINES} more lines (--json shows everything)"


def _column(value: object) -> list[str]:
    if isinstance(value, str) and " " in value:
        return wrap(value, _COLUMN_WIDTH)
    if value is None:
        return ["(absent)"]
    return wrap(_compact(value), _COLUMN_WIDTH, break_on_hyphens=False) or [""]


def _entry(name: str, value: object) -> Iterator[str]:
    lines = wrap(_compact(value), 100, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines[:_MAX_STATE_LINES]):
        yield f"  {name if index == 0 else '':10} {line}"
    if len(lines) > _MAX_STATE_LINES:
        yield f"  {'':10} ... (--json shows everything)"


def _first_difference(expected: object, got: object, path: str = "") -> str:
    """Where two nested values first differ; empty if they are no containers of one kind."""
    if isinstance(expected, list) and isinstance(got, list):
        for index, (left, right) in enumerate(zip(expected, got, strict=False)):
            if not is_same(left, right):
                return _first_difference(left, right, f"{path}[{index}]")
        return f"{path or 'the list'} has {len(expected)} entries, got {len(got)}"
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            if not is_same(expected.get(key), got.get(key)):
                return _first_difference(expected.get(key), got.get(key), f"{path}.{key}")
    return f"{path}: {_brief(expected)}, got {_brief(got)}" if path else ""


def _compact(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _brief(value: object) -> str:
    text = "nothing" if value is None else _compact(value)
    return text if len(text) <= 80 else text[:77] + "..."
