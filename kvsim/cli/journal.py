"""`kvsim journal`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvsim.cli import console
from kvsim.cli.options import Json, check_input

MAX_ROWS = 50


def command(
    events: Annotated[Path, Argument(help="events.csv of a run with --debug.", show_default=False)],
    block: Annotated[int | None, Option("--block", help="Tell the life of this block.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Ask the block journal what happened: blocks never returned, references dropped twice, lives, histograms."""
    from kvsim.memory.journal import read_csv

    check_input(events, "journal (events.csv)")
    rows = read_csv(events)
    answer = _life(rows, block) if block is not None else _overview(rows)
    if as_json:
        console.say_json(answer)
    elif block is not None:
        _print_life(answer, block)
    else:
        _print_overview(answer)


def _life(rows: Any, block: int) -> dict[str, Any]:
    from kvsim.memory.journal import life_of
    from kvsim.types import NS_PER_S

    events = [event._asdict() for event in life_of(rows, block)]
    return {"block": block, "events": [{"t_s": event.pop("t_ns") / NS_PER_S, **event} for event in events]}


def _overview(rows: Any) -> dict[str, Any]:
    from kvsim.memory.journal import block_times, double_decrements, histogram, never_returned
    from kvsim.types import NS_PER_S

    times = block_times(rows)
    spans = {
        "kv_block_lifetime_seconds": times.lifetime_s,
        "kv_block_idle_before_evict_seconds": times.idle_before_evict_s,
        "kv_block_reuse_gap_seconds": times.reuse_gap_s,
    }
    return {
        "num_events": len(rows),
        "never_returned": [
            {
                "block_id": held.block_id,
                "ref_count": held.ref_count,
                "taken_s": held.taken_ns / NS_PER_S,
                "taken_by": held.taken_by,
                "holders": list(held.holders),
            }
            for held in never_returned(rows)
        ],
        "double_decrements": [
            {"t_s": drop.t_ns / NS_PER_S, "block_id": drop.block_id, "request_id": drop.request_id}
            for drop in double_decrements(rows)
        ],
        "histograms": {
            name: [{"upto_s": _edge(bin_.upto_s), "count": bin_.num_values} for bin_ in histogram(values)]
            for name, values in spans.items()
        },
    }


def _edge(upto_s: float) -> float | None:
    """None stands for infinity, which JSON has not."""
    return None if upto_s == float("inf") else upto_s


def _print_life(answer: dict[str, Any], block: int) -> None:
    if not answer["events"]:
        console.say(f"block {block}: nothing is recorded of it")
        return
    rows = [
        [
            f"{event['t_s']:.6f}",
            event["event"],
            event["request_id"],
            str(event["ref_count"]),
            "" if event["other_block_id"] is None else str(event["other_block_id"]),
        ]
        for event in answer["events"]
    ]
    console.say(console.table(rows, ("time s", "event", "request", "ref count", "other block")))


def _print_overview(answer: dict[str, Any]) -> None:
    console.say(f"{answer['num_events']:,} events\n")
    held, drops = answer["never_returned"], answer["double_decrements"]
    console.say(f"blocks taken and never returned: {len(held)}")
    for item in held[:MAX_ROWS]:
        holders = ", ".join(item["holders"]) or "nobody"
        console.say(
            f"  block {item['block_id']}: taken by {item['taken_by']} at {item['taken_s']:.6f} s, held by {holders}"
        )
    console.say(f"references dropped that were not held: {len(drops)}")
    for item in drops[:MAX_ROWS]:
        console.say(f"  block {item['block_id']}: by {item['request_id']} at {item['t_s']:.6f} s")
    for name, bins in answer["histograms"].items():
        console.say(f"\n{name}")
        if not bins:
            console.say("  no values")
        for item in bins:
            upto = "more" if item["upto_s"] is None else f"up to {item['upto_s']:g} s"
            console.say(f"  {upto:14} {item['count']:,}")
