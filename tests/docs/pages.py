"""The blocks of a documentation page, and a runner that executes them as a reader would, one after another.

A page is one story: its blocks share a working directory, and its Python blocks share their names. A block with
`title="FILE"` is that file. In bash blocks every line that begins with `kvsim` is run; `make` lines must name a goal
of the Makefile. HTML comments before a block say what is special about it:

    <!-- not run: REASON -->     never executed
    <!-- slow: REASON -->        executed with the deep tests only
    <!-- output -->              a text block: lines that the commands before it print ("..." stands for any others)
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
COMMENT = re.compile(r"<!--\s*(?P<kind>not run|slow|output)\b(?::\s*(?P<reason>[^>]+?))?\s*-->")
TITLE = re.compile(r'title="([^"]+)"')
SHELLS = {"bash", "sh", "console", "shell"}


@dataclass(frozen=True)
class Block:
    """One fenced block (or indented commands) of a page."""

    line: int
    language: str
    title: str | None
    code: str
    mark: str | None
    reason: str | None


def blocks_of(path: Path) -> list[Block]:
    """Every block of a Markdown page, in order."""
    return list(_scan(path.read_text("utf-8").splitlines()))


def _scan(lines: list[str]) -> Iterator[Block]:
    mark: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        if comment := COMMENT.search(line):
            mark = comment
        elif fence := FENCE.match(line):
            end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == "```")
            indent = len(fence["indent"])
            yield _block(number + 1, fence["info"], [text[indent:] for text in lines[number + 1 : end]], mark)
            number, mark = end, None
        elif re.match(r"^ {4}kvsim ", line):
            yield _block(number + 1, "bash", [line.strip()], mark)
            if not re.match(r"^ {4}", lines[number + 1] if number + 1 < len(lines) else ""):
                mark = None
        elif line.strip():
            mark = None
        number += 1


def _block(line: int, info: str, lines: list[str], mark: re.Match[str] | None) -> Block:
    title = TITLE.search(info)
    return Block(
        line,
        (info.split() or [""])[0],
        title[1] if title else None,
        "\n".join(lines) + "\n",
        mark["kind"] if mark else None,
        mark["reason"] if mark else None,
    )


class Story:
    """Runs the blocks of one page in a working directory; `goals` are those of the Makefile."""

    def __init__(self, page: Path, goals: set[str]) -> None:
        self.page = page
        self.goals = goals
        self.names: dict[str, Any] = {"__name__": "__page__"}
        self.printed = ""

    def tell(self, *, slow: bool) -> None:
        """Run every block that is not marked otherwise; AssertionError names the page and the line."""
        for block in blocks_of(self.page):
            if block.mark == "not run" or (block.mark == "slow" and not slow):
                assert block.reason, f"{self.page.name}:{block.line}: say why it is not run"
                continue
            try:
                self._run(block)
            except Exception as error:
                message = f"{self.page.name}:{block.line}: {type(error).__name__}: {error}"
                raise AssertionError(message) from error

    def _run(self, block: Block) -> None:
        if block.mark == "output":
            check_output(block.code, self.printed)
        elif block.title:
            Path(block.title).write_text(block.code)
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.code, f"{self.page.name}:{block.line}", "exec"), self.names)
            self.printed = out.getvalue()
        elif block.language in SHELLS:
            self.printed = "".join(self._command(line) for line in joined(block.code))
        elif block.language == "yaml":
            valid_scenario(block.code)

    def _command(self, line: str) -> str:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["make"]:
            unknown = {word for word in words[1:] if "=" not in word} - self.goals
            assert not unknown, f"the Makefile has no {unknown}"
        if words[:1] != ["kvsim"]:
            return ""
        target = words.index(">") if ">" in words else len(words)
        code, printed = call(words[1:target])
        assert code == 0, f"{line}: exit code {code}: {printed[-2000:]}"
        if target < len(words):
            Path(words[target + 1]).write_text(printed)
        return printed


def joined(code: str) -> Iterator[str]:
    """Command lines, continuations put together."""
    yield from code.replace("\\\n", " ").splitlines()


def call(args: list[str]) -> tuple[int, str]:
    """Run `kvsim ARGS` in this process: its exit code, and what it printed."""
    from kvsim.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue() + (err.getvalue() if code else "")


def check_output(shown: str, printed: str) -> None:
    """Every line shown was printed, in that order; between `...` lines may be left out."""
    have = [line.rstrip() for line in printed.splitlines()]
    place = 0
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        assert line.rstrip() in have[place:], f"not printed: {line!r}; printed was\n{printed}"
        place = have.index(line.rstrip(), place) + 1


def valid_scenario(code: str) -> None:
    """A YAML block is a scenario, or a piece of one."""
    import yaml

    from kvsim.scenario.resolve import scenario_from_dict

    scenario_from_dict(yaml.safe_load(code))
