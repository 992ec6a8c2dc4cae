"""A second reader of block-map recordings, and what `events.csv` says of the same instants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from kvsim.memory.journal import Event

GAINS = ("taken", "ref_inc", "hit")

Holders = dict[int, dict[str, int]]
"""Block -> request -> how many of its tables name the block."""


def frames_of(recording: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every frame in full: `t_ns`, `step`, `rows` (sequence -> table or [start, length, size]), `tokens`, `idle`."""
    rows: dict[int, list[int]] = {}
    tokens: dict[int, int] = {}
    idle: set[int] = set()
    ended: set[int] = set()
    t_ns = step = 0
    for place, (tables, gone, changes, (added, removed), _, copies, more_ended) in enumerate(recording["frames"]):
        t_ns += recording["t_ns"][place]
        step += recording["step"][place]
        for seq in gone:
            del rows[seq], tokens[seq]
        for seq, *change in tables:
            tokens.setdefault(seq, 0)
            if recording["kind"] == "contiguous":
                rows[seq] = change
                continue
            table, block_id = rows.get(seq, [])[: change[0]], 0
            for difference in change[1:]:
                block_id += difference
                table.append(block_id)
            rows[seq] = table
        for seq, change in zip(tokens, changes, strict=True):
            tokens[seq] += change
        idle = (idle | set(accumulate(added))) - set(accumulate(removed))
        ended = (ended | set(more_ended)) & rows.keys()
        yield {
            "t_ns": t_ns,
            "step": step,
            "rows": {seq: list(row) for seq, row in rows.items()},
            "tokens": dict(tokens),
            "idle": set(idle),
            "copies": copies,
            "ended": set(ended),
        }


def holders_of(recording: dict[str, Any], frame: dict[str, Any]) -> Holders:
    """Which requests hold which blocks in a frame; a region is the block at its first slot."""
    found: dict[int, Counter[str]] = {}
    for seq, row in frame["rows"].items():
        request_id = recording["requests"][recording["sequences"][seq][0]]
        for block_id in row[:1] if recording["kind"] == "contiguous" else set(row):
            found.setdefault(block_id, Counter())[request_id] += 1
    return {block_id: dict(count) for block_id, count in found.items()}


def fills_of(recording: dict[str, Any], frame: dict[str, Any]) -> dict[int, int]:
    """Slots to be read of every block (contiguous: of every region, by its first slot)."""
    block_size = recording["block_size"]
    fills: dict[int, int] = {}
    for seq, row in frame["rows"].items():
        num_tokens = 0 if seq in frame["ended"] else frame["tokens"][seq]
        if recording["kind"] == "contiguous":
            fills[row[0]] = num_tokens
            continue
        for place, block_id in enumerate(row):
            fill = max(0, min(block_size, num_tokens - place * block_size))
            fills[block_id] = max(fill, fills.get(block_id, 0))
    return fills


def holders_at(events: Sequence[Event], t_ns: int) -> Holders:
    """Which requests hold which blocks after all events up to an instant."""
    found: dict[int, Counter[str]] = {}
    for event in events:
        if event.t_ns > t_ns:
            break
        if event.event in GAINS:
            found.setdefault(event.block_id, Counter())[event.request_id] += 1
        elif event.event == "ref_dec":
            found[event.block_id][event.request_id] -= 1
    return {block_id: dict(+count) for block_id, count in found.items() if +count}


def instants(num_frames: int, count: int = 10) -> list[int]:
    """`count` frames, spread over a run, the first and the last among them."""
    return sorted({round(place * (num_frames - 1) / (count - 1)) for place in range(count)})
