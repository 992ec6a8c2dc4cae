"""Sizes and times as people write them: `40GiB`, `4GB`, `2s`, `100ms`; plain numbers are bytes and seconds."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation

from kvsim.types import NS_PER_S

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_TIME_UNITS = {
    "": Decimal(1),
    "NS": Decimal("1e-9"),
    "US": Decimal("1e-6"),
    "MS": Decimal("1e-3"),
    "S": Decimal(1),
    "SEC": Decimal(1),
    "M": Decimal(60),
    "MIN": Decimal(60),
    "H": Decimal(3600),
}
_QUANTITY = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+)\s*([a-zA-Zµ]*)\s*")
_LARGEST = Decimal(10) ** 30

SIZE_EXAMPLES = "bytes, or a text such as 40GiB or 4GB"
TIME_EXAMPLES = "seconds, or a text such as 2s or 100ms"


def parse_bytes(value: object) -> int:
    """A size in bytes, rounded down. Raises ValueError that says how sizes are written."""
    return int(_quantity(value, _SIZE_UNITS, SIZE_EXAMPLES))


def parse_seconds(value: object) -> float:
    """A time in seconds. Raises ValueError that says how times are written."""
    return float(_quantity(value, _TIME_UNITS, TIME_EXAMPLES))


def parse_ns(value: object) -> int:
    """A time in integer nanoseconds, rounded to the nearest. Raises ValueError that says how times are written."""
    return int((_quantity(value, _TIME_UNITS, TIME_EXAMPLES) * NS_PER_S).to_integral_value())


def format_bytes(num_bytes: int) -> str | int:
    """The shortest exact way to write a size: `16GiB`, or plain bytes."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return num_bytes


def format_ns(ns: int) -> str:
    """An exact way to write a time: `2s`, `100ms`, `1500ns`."""
    for unit, factor in (("s", NS_PER_S), ("ms", 10**6), ("us", 10**3)):
        if ns % factor == 0:
            return f"{ns // factor}{unit}"
    return f"{ns}ns"


def _quantity(value: object, units: dict[str, int] | dict[str, Decimal], examples: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"give {examples}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be finite: give {examples}")
    number, unit = (str(value), "") if not isinstance(value, str) else _split(value, examples)
    unit = unit.replace("µ", "u")
    if unit.upper() not in units:
        known = "h, min, s, ms, us, ns" if "S" in units else "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ValueError(f"the unit {unit!r} is none of {known}: give {examples}")
    try:
        quantity = Decimal(number.replace("_", "")) * units[unit.upper()]
    except InvalidOperation:
        raise ValueError(f"give {examples}") from None
    if abs(quantity) > _LARGEST:
        raise ValueError(f"is out of all proportion: give {examples}")
    return quantity


def _split(text: str, examples: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"give {examples}")
    return match[1], match[2]
