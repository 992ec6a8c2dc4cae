"""The tables of a sweep: every point, and means with confidence intervals over seeds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsim.metrics.export import write_records
from kvsim.metrics.intervals import interval_factor
from kvsim.sweeps.grid import Point
from kvsim.sweeps.store import write_whole
from kvsim.sweeps.work import Done


def rows_of(points: Iterable[Point], results: Mapping[int, Done]) -> list[dict[str, Any]]:
    """One flat record per finished point, in grid order: varied keys, seed, status and reason, every figure."""
    rows = []
    for point in points:
        done = results.get(point.index)
        if done is None:
            continue
        figures = {name: value for name, value in done.summary.items() if name not in point.record}
        if "warnings" in figures:
            figures["warnings"] = json.dumps([*point.scenario.warnings, *json.loads(figures["warnings"])])
        rows.append({**point.record, "status": "failed" if done.error else "ok", "reason": done.error} | figures)
    return rows


def told(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], what: str = "points") -> list[str]:
    """The warnings of all rows, each once, with how many have it; numbers in it may differ between them.

    `what` is what messages call the rows, which `keys` name.
    """
    found: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for row in rows:
        for text in json.loads(row.get("warnings") or "[]"):
            found.setdefault(re.sub(r"[0-9][0-9.,]*", "#", text), []).append((row, text))
    texts = []
    for where in found.values():
        row, text = where[0]
        if len(where) == len(rows) and len({text for _, text in where}) == 1:
            texts.append(text)
        else:
            point = ", ".join(f"{key}={row[key]}" for key in (*keys, "seed"))
            texts.append(f"{len(where)} of {len(rows)} {what}, the first is {point}: {text}")
    return texts


def aggregate(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Mean and half-width of the 95 % interval over seeds (`name` and `name.ci95`) for each combination of `keys`.

    Points that failed are left out; `num_seeds` says how many are in. With one seed the interval is empty.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault(tuple(repr(row[key]) for key in keys), []).append(row)
    return [_aggregate_one(group, keys) for group in groups.values()]


def _aggregate_one(group: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    record: dict[str, Any] = {key: group[0][key] for key in keys} | {"num_seeds": len(group)}
    known = dict.fromkeys(name for row in group for name in row)
    names = [name for name in known if name not in keys and name not in ("seed", "status", "reason")]
    for name in names:
        values = [row[name] for row in group if _is_number(row.get(name))]
        if not values:
            continue
        mean = math.fsum(values) / len(values)
        record[name] = mean
        record[f"{name}.ci95"] = _half_width(values, mean)
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _half_width(values: Sequence[float], mean: float) -> float | None:
    """Student's interval for the mean; None for a single value."""
    if len(values) < 2:
        return None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return interval_factor(len(values)) * math.sqrt(variance / len(values))


def write_tables(out: Path, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """`sweep.csv` and `sweep_agg.csv`, each whole or as it was."""
    write_whole(out / "sweep.csv", lambda path: write_records(path, rows))
    write_whole(out / "sweep_agg.csv", lambda path: write_records(path, aggregate(rows, keys)))
