"""`kvsim reproduce`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from kvsim.cli import console
from kvsim.cli.options import Jobs, Json

if TYPE_CHECKING:
    from kvsim.reproduce.figure import Row


def command(
    figures: Annotated[
        list[str] | None,
        Argument(
            help="table1 fig2 fig12 fig13 fig14 fig15 fig16 fig17 fig18 fig19, and differences, beyond, worth; or all.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Fewer requests: minutes instead of an hour.")] = False,
    jobs: Jobs = None,
    out: Annotated[Path, Option("--out", help="Folder for tables, pictures and the page.")] = Path("results/reproduce"),
    as_json: Json = False,
) -> None:
    """Run the figures of the PagedAttention paper (SOSP 2023), and print what was published beside what comes out.

    Writes a CSV and a picture per figure; all figures together also write README.md, which says how near each is and
    why it differs. Needs no GPU, no data and no network.
    """
    from kvsim.reproduce import reproduce

    with console.progress_bar("reproduce") as progress:
        found = reproduce(figures or ["all"], quick=quick, jobs=jobs, out=out, progress=progress)
    if as_json:
        console.say_json([row._asdict() for row in found.rows])
        return
    from kvsim.reproduce.page import sentence

    for name, rows in found.tables.items():
        console.say(_table(name, rows))
        console.say(f"{sentence(rows)}\n")
    console.say(f"{found.cpu_s:.0f} s of processor time")
    console.say(f"results in {out}")
    console.say(console.list_files(out))


def _table(name: str, rows: list[Row]) -> str:
    from kvsim.reproduce import FIGURES
    from kvsim.reproduce.page import compared
    from kvsim.reproduce.remarks import number

    shown = [
        [
            f"{row.series}  {row.x}".strip(),
            row.quantity,
            row.paper or "–",
            number(row.ours),
            number(row.difference),
            row.mark,
        ]
        for row in compared(rows)
    ]
    return f"{FIGURES[name].title}\n" + console.table(shown, ["", "", "paper", "kvsim", "difference", "mark"])
