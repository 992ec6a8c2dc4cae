"""`kvsim trace`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvsim.cli import console
from kvsim.cli.options import Json, check_output
from kvsim.types import ScenarioError

MAX_BLOCK_SIZE = 1_048_576
"""As in a scenario."""
MAX_CAPACITY = 10**15


def command(
    file: Annotated[Path, Argument(help="A trace, in any of the known formats (.gz too).", show_default=False)],
    as_json: Json = False,
    trace_format: Annotated[
        str | None,
        Option(
            "--format",
            help="azure, mooncake, burstgpt, vidur, sharegpt or csv; default: found out.",
            show_default=False,
        ),
    ] = None,
    hash_block_size: Annotated[
        int | None,
        Option("--hash-block-size", help="Tokens per hash id; default 512, or what fits the file.", show_default=False),
    ] = None,
    block_size: Annotated[
        int, Option("--block-size", help="Block size for the prefixes of a plain CSV (groups, sessions).")
    ] = 16,
    capacity: Annotated[
        list[str] | None,
        Option(
            "--capacity",
            help="Cache capacity in blocks, or inf (repeatable); default: a whole curve.",
            show_default=False,
        ),
    ] = None,
    on_bad_row: Annotated[str, Option("--on-bad-row", help="error, or skip and count.")] = "error",
    chars_per_token: Annotated[float, Option("--chars-per-token", help="For ShareGPT's texts.")] = 4.0,
    picture: Annotated[
        Path | None, Option("--picture", help="Draw the prefix-hit curve to this file.", show_default=False)
    ] = None,
    to: Annotated[
        Path | None,
        Option(
            "--to",
            help="Convert: write the requests to this file (.jsonl as Mooncake's lines, else a plain CSV).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Describe a request trace: lengths, rate, burstiness, and what a prefix cache of which size could find in it."""
    from kvsim.workload.trace_convert import lost_columns, write_trace
    from kvsim.workload.trace_report import picture as draw
    from kvsim.workload.trace_report import render, trace_report
    from kvsim.workload.traces import load_trace

    for option, value in (("--block-size", block_size), ("--hash-block-size", hash_block_size)):
        if value is not None and not 1 <= value <= MAX_BLOCK_SIZE:
            raise ScenarioError(f"{option} {value}: must be 1 to {MAX_BLOCK_SIZE:,} tokens")
    check_output(to, "--to", file)
    check_output(picture, "--picture", file, to)
    trace = load_trace(
        file,
        trace_format,
        hash_block_size=hash_block_size,
        chars_per_token=chars_per_token,
        on_bad_row=on_bad_row,
        needs_times=False,
        skipped_by="give --on-bad-row skip",
    )
    report = trace_report(trace, block_size=block_size, capacities=_capacities(capacity))
    if as_json:
        console.say_json(report.to_dict())
    else:
        console.say(render(report))
    if picture is not None:
        if not report.prefix_hits:
            raise ScenarioError(f"{file}: nothing is known of its prefixes, so there is no curve to draw")
        draw(report, picture)
    if to is not None:
        write_trace(trace, to)
        if lost := lost_columns(trace, to):
            kind = "Mooncake's lines" if str(to).endswith(".jsonl") else "a plain CSV"
            console.warn(f"{to}: {kind} cannot hold {', '.join(lost)}, which are lost")


def _capacities(texts: list[str] | None) -> list[int | None] | None:
    if not texts:
        return None
    return [None if text.strip().lower() == "inf" else _blocks(text) for text in texts]


def _blocks(text: str) -> int:
    try:
        blocks = int(text)
    except ValueError:
        raise ScenarioError(f"--capacity {text:.100}: it is a number of blocks, or inf") from None
    if not 1 <= blocks <= MAX_CAPACITY:
        raise ScenarioError(f"--capacity {text:.100}: must be 1 to {MAX_CAPACITY:,} blocks, or inf")
    return blocks
