"""The kinds of values a scenario holds: numbers without surprises, sizes, times, ranges, names of Python objects."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from kvsim.scenario.units import (
    SIZE_EXAMPLES,
    TIME_EXAMPLES,
    format_bytes,
    format_ns,
    parse_bytes,
    parse_ns,
    parse_seconds,
)

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
MAX_TOKENS = 100_000_000
"""No text, window or limit is longer: larger values are slips of the keyboard."""
LONGEST_NS = 10**18
"""Thirty years: the longest time that a scenario, or a part of the user's own, may name."""


class Block(BaseModel):
    """A mapping of the scenario: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Custom(BaseModel):
    """A class of yours, `package.module:Name`, and its keywords; imported when the scenario is run, not before."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(pattern=f"^{IMPORT_PATH.pattern}$", description="package.module:Name")

    @property
    def keywords(self) -> dict[str, Any]:
        """Everything beside `type`: the keyword arguments."""
        return dict(self.model_extra or {})


def is_import_path(text: object) -> bool:
    """Whether a text names a Python object as `package.module:Name`."""
    return isinstance(text, str) and IMPORT_PATH.fullmatch(text) is not None


def _integer(value: Any) -> int:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _integer_key(value: Any) -> int:
    number = _integer(int(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]{1,400}", value) else value)
    if abs(number) >= 2**31:
        raise ValueError("must be below 2,147,483,648, with or without a minus")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    number = _as_float(value)
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number


def _as_float(value: float) -> float:
    """As Python reads `1e400`: what is too large is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _rate(value: Any) -> float:
    if value in ("inf", "Infinity"):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number of requests per second")
    rate = _as_float(value)
    if math.isnan(rate) or rate <= 0:
        raise ValueError("must be above 0 (requests per second; .inf: all at once)")
    return rate


def _boolean(value: Any) -> bool:
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("must be a text")
    if not str(value).strip():
        raise ValueError("must not be empty")
    return str(value)


def _folder_name(value: Any) -> str:
    name = _text(value).strip()
    if len(name.encode()) > 200 or name.startswith((".", "-")) or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise ValueError(
            "names a folder: at most 200 bytes of UTF-8, no slash, backslash or control character, "
            "no dot or dash in front"
        )
    return name


def _size(value: Any) -> int:
    size = parse_bytes(value)
    if size < 0:
        raise ValueError(f"must not be negative: give {SIZE_EXAMPLES}")
    return size


def _positive_size(value: Any) -> int:
    size = _size(value)
    if size == 0:
        raise ValueError(f"must be above 0: give {SIZE_EXAMPLES}")
    return size


def _ns(value: Any) -> int:
    ns = parse_ns(value)
    if ns <= 0:
        raise ValueError(f"must be above 0, at least a nanosecond: give {TIME_EXAMPLES}")
    if ns > LONGEST_NS:
        raise ValueError("is longer than thirty years: give a shorter time")
    return ns


def _seconds(value: Any) -> float:
    seconds = parse_seconds(value)
    if not 0 <= seconds <= 10**9:
        raise ValueError(f"must be between 0 and 1e9 seconds: give {TIME_EXAMPLES}")
    return seconds


def _length_range(value: Any) -> tuple[int, int]:
    ends = [_integer(end) for end in (value if isinstance(value, list | tuple) else [value])]
    if len(ends) != 2:
        raise ValueError("must be two lengths: [low, high]; a single one needs type: fixed")
    low, high = ends
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"must be lengths of 1 to {MAX_TOKENS:,} tokens, low before high")
    return low, high


def _window(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("must be two times: [begin, end]")
    begin, end = (parse_seconds(part) for part in value)
    if not 0 <= begin < end:
        raise ValueError("must begin at 0 or later and end after it begins")
    return begin, end


def _two(items: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a pair."""
    return {"type": "array", "items": items, "minItems": 2, "maxItems": 2}


def _or_text(example: str, **number: Any) -> WithJsonSchema:
    """JSON Schema of a number that may be a text with its unit."""
    return WithJsonSchema({"anyOf": [number, {"type": "string"}], "examples": [example]})


Bool: TypeAlias = Annotated[bool, BeforeValidator(_boolean)]
Text: TypeAlias = Annotated[str, BeforeValidator(_text), Field(max_length=4096)]
FolderName: TypeAlias = Annotated[str, BeforeValidator(_folder_name)]
Int: TypeAlias = Annotated[int, BeforeValidator(_integer)]
IntKey: TypeAlias = Annotated[int, BeforeValidator(_integer_key)]
Seed: TypeAlias = Annotated[int, BeforeValidator(_integer), Field(ge=0, lt=2**63)]
Count: TypeAlias = Annotated[int, BeforeValidator(_integer), Field(ge=1, le=MAX_TOKENS)]
CountOrZero: TypeAlias = Annotated[int, BeforeValidator(_integer), Field(ge=0, le=MAX_TOKENS)]
Number: TypeAlias = Annotated[float, BeforeValidator(_number)]
Positive: TypeAlias = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1e15)]
NotNegative: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e15)]
Share: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Rate: TypeAlias = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(_rate),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "inf"}]}),
]
Size: TypeAlias = Annotated[
    int, BeforeValidator(_size), PlainSerializer(format_bytes), _or_text("40GiB", type="integer", minimum=0)
]
PositiveSize: TypeAlias = Annotated[
    int, BeforeValidator(_positive_size), PlainSerializer(format_bytes), _or_text("40GiB", type="integer", minimum=1)
]
TimeNs: TypeAlias = Annotated[
    int,
    BeforeValidator(_ns),
    PlainSerializer(format_ns),
    _or_text("100ms", type="number", exclusiveMinimum=0, maximum=1e9),
]
Seconds: TypeAlias = Annotated[
    float, BeforeValidator(_seconds), _or_text("100ms", type="number", minimum=0, maximum=1e9)
]
Delay: TypeAlias = Annotated[
    float, BeforeValidator(_seconds), Field(le=1e8), _or_text("100ms", type="number", minimum=0, maximum=1e8)
]
"""Seconds that may be drawn around: the longest of many draws is still a time that the clock can hold."""
LengthRange: TypeAlias = Annotated[
    tuple[int, int],
    BeforeValidator(_length_range),
    WithJsonSchema(_two({"type": "integer", "minimum": 1, "maximum": MAX_TOKENS})),
]
Window: TypeAlias = Annotated[
    tuple[float, float],
    BeforeValidator(_window),
    WithJsonSchema(_two({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]})),
]
