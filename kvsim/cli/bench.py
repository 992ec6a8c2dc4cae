"""`kvsim bench`"""

from __future__ import annotations

import time
from typing import Annotated

from typer import Option

from kvsim.cli import console
from kvsim.cli.options import Json, split_names
from kvsim.types import ScenarioError


def command(
    rows: Annotated[str | None, Option("--rows", help="Rows to measure, with commas.", show_default=False)] = None,
    sizes: Annotated[str, Option("--sizes", help="Numbers of requests, with commas.")] = "1000,10000,100000",
    repeat: Annotated[int, Option("--repeat", min=1, help="Runs of which the best counts.")] = 3,
    no_memory: Annotated[bool, Option("--no-memory", help="Do not measure peak memory (a run of its own).")] = False,
    as_json: Json = False,
) -> None:
    """Measure the simulator's speed on the common trace."""
    from kvsim.bench import ROWS, bench

    names = tuple(split_names(rows, "--rows")) if rows else tuple(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        raise ScenarioError(f"--rows {rows}: {unknown[0]!r} is no row; known are {', '.join(ROWS)}")
    results = []
    for result in bench(names, _sizes(sizes), time.perf_counter, repeat=repeat, memory=not no_memory):
        results.append(result)
        if not as_json:
            console.say(_line(result._asdict()))
    if as_json:
        console.say_json([result._asdict() for result in results])


def _sizes(text: str) -> tuple[int, ...]:
    parts = split_names(text, "--sizes")
    if not all(part.isdecimal() and 0 < int(part) <= 10_000_000 for part in parts):
        raise ScenarioError(f"--sizes {text}: must be numbers of requests, such as 1000,10000")
    return tuple(int(part) for part in parts)


def _line(result: dict[str, float | str | None]) -> str:
    peak = "" if result["peak_mb"] is None else f"  peak {result['peak_mb']:7.1f} MB"
    return (
        f"{result['row']:15} {result['num_requests']:>7,} requests  "
        f"{float(result['output_tokens_per_s'] or 0) / 1e6:6.2f} M output tokens/s  "
        f"{result['requests_per_s']:>9,.0f} requests/s  {result['us_per_step']:6.2f} us a step  "
        f"fast {float(result['fast_share'] or 0):6.1%}{peak}"
    )
