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
TESTED_ELSEWHERE = {"recipes.md": "tests/test_recipes.py", "cluster.md": "tests/sweeps/test_dask.py"}
"""Pages whose commands a test of their own runs and compares."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def goals() -> set[str]:
    """The goals of the Makefile."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the checkout's scenarios in it; what was imported from there is forgotten after."""
    for name, target in (("scenarios", "scenarios"), ("cases", "tests/golden")):
        (tmp_path / name).symlink_to(ROOT / target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("MPLBACKEND", "agg")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        where = getattr(sys.modules[name], "__file__", None)
        if where and Path(where).is_relative_to(tmp_path):
            del sys.modules[name]


RUN_HERE = [page for page in PAGES if page.name not in TESTED_ELSEWHERE]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_page(page: Path, reader: Path) -> None:
    Story(page, goals()).tell(slow=False)


def test_pages_left_to_other_tests_are_named_there() -> None:
    for page, test in TESTED_ELSEWHERE.items():
        assert page in (ROOT / test).read_text("utf-8")


def has_slow_blocks(page: Path) -> bool:
    return any(block.mark == "slow" for block in blocks_of(page))


@pytest.mark.deep
@pytest.mark.parametrize("page", [page for page in RUN_HERE if has_slow_blocks(page)], ids=lambda page: page.name)
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
    headings = re.findall(r"^#+\s+(.*?)\s*$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_number_of_scenarios_is_told() -> None:
    page = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert f"`scenarios/` has {len(list((ROOT / 'scenarios').glob('*.yaml')))} to start from" in page
