"""Advice as text: one page for the terminal, the same for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvsim.advise.advise import Advice
from kvsim.advise.answer import Answer, Table

WIDTH = 110


def terminal(advice: Advice) -> str:
    """The page as plain text."""
    parts = [f"Advice for {advice.name}: {_conditions(advice)}", *(f"Note: {note}" for note in advice.notes)]
    return "\n\n".join([*parts, *("\n".join(_plain(answer)) for answer in advice.answers)])


def markdown(advice: Advice, pictures: Mapping[str, str]) -> str:
    """The page as Markdown; `pictures` are file names by topic."""
    lines = [f"# Advice for {advice.name}", "", f"{_conditions(advice)}. Every run is a row of runs.csv.", ""]
    for note in advice.notes:
        lines += [f"> {note}", ""]
    for answer in advice.answers:
        lines += [f"## {answer.question}", "", f"**{answer.verdict}**", ""]
        lines += [f"* {line}" for line in (*answer.lines, *(f"Warning: {text}" for text in answer.warnings))]
        if answer.lines or answer.warnings:
            lines.append("")
        if answer.table is not None:
            lines += [*_markdown_table(answer.table), ""]
        if answer.topic in pictures:
            lines += [f"![{answer.question}]({pictures[answer.topic]})", ""]
        lines += [f"Runs: {runs_of(answer.runs)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def runs_of(numbers: Sequence[int]) -> str:
    """`1-12, 40-51`."""
    if not numbers:
        return "none"
    ordered = sorted(set(numbers))
    begins = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(begins, ends, strict=True))


def _conditions(advice: Advice) -> str:
    return f"SLO {advice.slo}; {len(advice.runs)} runs; ± is the 95 % interval over {len(advice.seeds)} seeds"


def _plain(answer: Answer) -> list[str]:
    lines = [f"{answer.question}  {answer.verdict}"]
    for line in answer.lines:
        lines += _wrapped(line, "  - ")
    for warning in answer.warnings:
        lines += _wrapped(warning, "  ! ")
    if answer.table is not None:
        lines += ["", *(f"    {row}" for row in _columns(answer.table))]
    return [*lines, f"  runs {runs_of(answer.runs)}"]


def _wrapped(text: str, mark: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark))


def _columns(table: Table) -> list[str]:
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _markdown_table(table: Table) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = row(["---", *("--:" for _ in table.header[1:])])
    return [row(table.header), rule, *map(row, table.rows)]
