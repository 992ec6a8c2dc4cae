"""The README and every page of the documentation do what they say: their Python, their commands, their scenarios."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import Story, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def goals() -> set[str]:
    """The goals of the Makefile."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the checkout's scenarios in it; what was imported from there is forgotten after."""
    for name in ("scenarios", "tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("MPLBACKEND", "agg")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        where = getattr(sys.modules[name], "__file__", None)
        if where and Path(where).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, reader: Path) -> None:
    Story(page, goals()).tell(slow=False)


def has_slow_blocks(page: Path) -> bool:
    return any(block.mark == "slow" for block in blocks_of(page))


@pytest.mark.deep
@pytest.mark.parametrize("page", [page for page in PAGES if has_slow_blocks(page)], ids=lambda page: page.name)
def test_slow_page(page: Path, reader: Path) -> None:
    Story(page, goals()).tell(slow=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures of a page exist, and so do the headings they point to."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = Path(os.path.normpath(page.parent / name)) if name else page
        assert path.exists(), f"{page.name}: {target}"
        if heading and path.suffix == ".md":
            assert heading in anchors(path), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Ids of the headings, as MkDocs makes them."""
    from markdown.extensions.toc import slugify

    headings = re.findall(r"^#+\s+(.*?)\s*$", page.read_text("utf-8"), re.MULTILINE)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}
