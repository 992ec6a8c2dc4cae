"""From names of figures to tables, pictures and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsim.files import whole_file
from kvsim.reproduce import (
    beyond,
    differences,
    fig2,
    fig12,
    fig13,
    fig14,
    fig15,
    fig16,
    fig17,
    fig18,
    fig19,
    table1,
    worth,
)
from kvsim.reproduce.figure import Figure, Row, Scale, Summary
from kvsim.reproduce.published import Key as PublishedKey
from kvsim.reproduce.published import Published, published
from kvsim.reproduce.table import beside, to_csv
from kvsim.reproduce.work import CPU_SECONDS, Key, run_cases
from kvsim.types import Progress, ScenarioError

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        table1.FIGURE,
        fig2.FIGURE,
        fig12.FIGURE,
        fig13.FIG13A,
        fig13.FIG13B,
        fig14.FIGURE,
        fig15.FIGURE,
        fig16.FIGURE,
        fig17.FIGURE,
        fig18.FIG18A,
        fig18.FIG18B,
        fig19.FIGURE,
        differences.FIGURE,
        beyond.FIGURE,
        worth.FIGURE,
    )
}
"""By name, in the paper's order; behind them what the paper does not have."""

GROUPS: dict[str, tuple[str, ...]] = {
    "fig13": ("fig13a", "fig13b"),
    "fig18": ("fig18a", "fig18b"),
    "all": tuple(FIGURES),
}

PAGE = "README.md"


@dataclass(frozen=True)
class Reproduction:
    """Tables by figure; `cpu_s` is the processor time that the runs took."""

    tables: dict[str, list[Row]]
    quick: bool
    cpu_s: float = field(compare=False)

    @property
    def rows(self) -> list[Row]:
        """All tables, one below the other."""
        return [row for rows in self.tables.values() for row in rows]


def figures_named(names: Sequence[str]) -> list[Figure]:
    """Figures by name or group, in the paper's order. Raises ScenarioError for an unknown name."""
    wanted: set[str] = set()
    for name in names:
        if name not in FIGURES and name not in GROUPS:
            known = ", ".join(dict.fromkeys([*FIGURES, *GROUPS]))
            raise ScenarioError(f"reproduce: there is no {name!r}; known are {known}")
        wanted.update(GROUPS.get(name, (name,)))
    return [figure for name, figure in FIGURES.items() if name in wanted]


def reproduce(
    names: Sequence[str] = ("all",),
    *,
    quick: bool = False,
    jobs: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    changes: Mapping[str, Any] | None = None,
    known: Mapping[PublishedKey, Published] | None = None,
) -> Reproduction:
    """Run the figures and put them beside what was published; files are written only with `out`.

    `changes` are dotted keys that every scenario gets (`{"memory.kv_cache_memory_bytes": "6GiB"}`), `known` replaces
    the published values. All figures together also write the page. Raises ScenarioError.
    """
    figures = figures_named(names)
    cases = {
        (figure.name, name): _changed(case, changes or {})
        for figure in figures
        for name, case in figure.cases(Scale(quick)).items()
    }
    if out is not None:
        _check_place(out, figures)
    results = run_cases(cases, jobs=jobs, progress=progress)
    beside_what = published() if known is None else known
    tables = {figure.name: beside(figure, figure.ours(_of(figure, results)), beside_what) for figure in figures}
    found = Reproduction(tables, quick, _cpu_s(results))
    if out is not None:
        write(found, out)
    return found


def _changed(case: Any, changes: Mapping[str, Any]) -> Any:
    from kvsim.reproduce.beam_laws import Trial
    from kvsim.reproduce.sustained import Search

    if not changes or isinstance(case, Trial):
        return case
    if isinstance(case, Search):
        return case._replace(scenario=_changed(case.scenario, changes))
    scenario = dict(case)
    for key, value in changes.items():
        block, _, name = key.partition(".")
        scenario[block] = scenario.get(block, {}) | {name: value} if name else value
    return scenario


def _of(figure: Figure, results: Mapping[Key, Summary]) -> dict[str, Summary]:
    return {name: summary for (owner, name), summary in results.items() if owner == figure.name}


def _cpu_s(results: Mapping[Key, Summary]) -> float:
    """Of the runs; a run that several figures share counts once."""
    return sum({id(summary): float(summary[CPU_SECONDS]) for summary in results.values()}.values())


def _check_place(out: Path, figures: Sequence[Figure]) -> None:
    """Raises ScenarioError where the results could not be written, or would replace a page that is none of ours."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"{out}: cannot hold the results: {error.strerror}; choose another --out") from None
    is_ours = any((out / f"{name}.csv").exists() for name in FIGURES)
    if len(figures) == len(FIGURES) and (out / PAGE).exists() and not is_ours:
        raise ScenarioError(f"{out / PAGE}: is no page of ours, and would be replaced; choose another --out")


def write(found: Reproduction, out: Path) -> None:
    """A CSV and a picture per figure, and the page where no figure is missing."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in found.tables.items():
        _write(out / f"{name}.csv", to_csv(rows))
        draw(FIGURES[name], rows, out / f"{name}.png")
    if set(found.tables) == set(FIGURES):
        from kvsim.reproduce.page import page

        _write(out / PAGE, page(found))


def _write(path: Path, text: str) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def draw(figure: Figure, rows: Sequence[Row], path: Path) -> None:
    """The figure's picture, drawn as the paper draws it, with the published points beside ours."""
    from kvsim.report.style import new_figure, save, styled

    with styled():
        picture = new_figure(3.6, fits_itself=True)
        figure.draw(picture, rows)
        picture.suptitle(figure.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    save(picture, path)
