"""YAML read safely, with the place of every key kept for error messages.

Scalars follow YAML 1.2's core schema (`1e3` is a number, `1:30` and `yes` are text): what a reader expects.
Nothing is ever constructed but mappings, lists and scalars; size, nesting and aliases are bounded.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from kvsim.types import ScenarioError

MAX_BYTES = 2_000_000
MAX_DEPTH = 50
MAX_ALIASES = 50
MAX_NODES = 200_000

Key: TypeAlias = tuple[str | int, ...]
"""Where a value sits: `("allocator", "block_size")`."""

_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_TAGS = {
    _PREFIX + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
}
_TAGS.add("!")
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9](?:_?[0-9])*")
_HEX = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


class Mark(NamedTuple):
    """A place in a file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: plain data, and where each key (and list item) stands."""

    data: dict[str, Any]
    source: str
    marks: dict[Key, Mark] = field(default_factory=dict)
    text: str = ""

    def where(self, key: Key) -> str:
        """`file:line:column` of the key, or of the nearest key above it that is in the file."""
        while key and key not in self.marks:
            key = key[:-1]
        mark = self.marks.get(key)
        return f"{self.source}:{mark.line}:{mark.column}" if mark else self.source


def load_yaml(path: Path | str, what: str = "scenario") -> Document:
    """The mapping in a YAML file. Raises ScenarioError that says what is wrong with the file, and where."""
    return parse_yaml(read_text(Path(path), what), str(path), what)


def read_text(path: Path, what: str = "scenario", max_bytes: int = MAX_BYTES) -> str:
    """The text of a small regular UTF-8 file. Raises ScenarioError for anything else."""
    try:
        info = path.stat()
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot read the {what}: {_os_reason(error)}") from None
    if stat.S_ISDIR(info.st_mode):
        raise ScenarioError(f"{path}: is a directory; give the {what} file itself")
    if not stat.S_ISREG(info.st_mode):
        raise ScenarioError(
            f"{path}: is not a regular file (a pipe, socket or device); save the {what} to a file first"
        )
    if info.st_size > max_bytes:
        raise ScenarioError(f"{path}: has {info.st_size:,} bytes; a {what} has at most {max_bytes:,}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the {what}: {_os_reason(error)}") from None
    return _decode(raw, path, what)


def parse_yaml(text: str, source: str, what: str = "scenario") -> Document:
    """The mapping in a YAML text; `source` names it in messages. Raises ScenarioError."""
    if not text.strip():
        raise ScenarioError(f"{source}: is empty; a {what} is a mapping of keys to values")
    _check_text(text, source)
    node = _composed(text, source)
    if node is None:
        raise ScenarioError(f"{source}: holds only comments; a {what} is a mapping of keys to values")
    builder = _Builder(source)
    data = builder.build(node, (), 0)
    if not isinstance(data, dict):
        raise ScenarioError(f"{source}:1:1: a {what} is a mapping of keys to values; this is {_kind(data)}")
    return Document(data, source, builder.marks, text)


def parse_scalar(text: str) -> Any:
    """The value of one plain scalar: null, boolean, integer, float, or else the text itself."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        # Beyond a few thousand digits Python refuses to convert; no quantity here comes near.
        return int(text.replace("_", "")) if len(text) <= 400 else text
    if _HEX.fullmatch(text):
        return int(text, 0) if len(text) <= 400 else text
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if special := _SPECIAL.fullmatch(text):
        return float(f"{special[1] or ''}{'nan' if text.lower()[-1] == 'n' else 'inf'}")
    return text


def parse_value(text: str, source: str) -> Any:
    """The value of a command-line text, in YAML's flow style: `4`, `[a, b]`, `{type: batch}`."""
    if not text.strip():
        return None
    _check_text(text, source)
    if text.lstrip()[0] not in "[{\"'":
        return parse_scalar(text.strip())
    node = _composed(text, source)
    return None if node is None else _Builder(source).build(node, (), 0)


def _composed(text: str, source: str) -> yaml.Node | None:
    _check_bounds(text, source)
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, source) from None


class _Builder:
    """Turns composed nodes into data, and notes where keys stand."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.marks: dict[Key, Mark] = {}
        self.num_nodes = 0

    def build(self, node: yaml.Node, key: Key, depth: int) -> Any:
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise self._error(node, f"nested more than {MAX_DEPTH} levels deep")
        if self.num_nodes > MAX_NODES:
            raise self._error(node, f"aliases expand to more than {MAX_NODES:,} values; write the values out")
        if node.tag not in _TAGS:
            tag = node.tag.replace(_PREFIX, "!!")
            raise self._error(node, f"the tag {tag!r} is not allowed; write a plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key, depth)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.marks.setdefault((*key, index), _mark(item))
                items.append(self.build(item, (*key, index), depth + 1))
            return items
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, key: Key, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value == "<<" and not key_node.style:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            name = self._key(key_node)
            path = (*key, name)
            if name in data:
                first = self.marks[path]
                raise self._error(key_node, f"{dotted(path)}: given twice (first on line {first.line}); keep one")
            self.marks[path] = _mark(key_node)
            data[name] = self.build(value_node, path, depth + 1)
        for source in merged:
            self._merge(data, source, key, depth)
        return data

    def _merge(self, data: dict[str, Any], node: yaml.Node, key: Key, depth: int) -> None:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, "`<<` merges mappings; this is something else")
        for name, value in self.build(node, key, depth + 1).items():
            data.setdefault(name, value)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "a key must be a name, not a list or a mapping")
        if not node.value:
            raise self._error(node, "a key is missing before ':'")
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        return text if node.style else parse_scalar(text)  # a quoted scalar is text

    def _error(self, node: yaml.Node, problem: str) -> ScenarioError:
        return _at(node, self.source, problem)


ABSENT: Any = object()
"""What `look_up` answers where there is nothing."""


def look_up(data: Any, key: Key) -> Any:
    """The value at a key of plain data, or ABSENT."""
    for part in key:
        is_here = (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        )
        if not is_here:
            return ABSENT
        data = data[part]
    return data


def dotted(key: Key) -> str:
    """`workload.tenants[2].share`: a key as people write it."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _check_text(text: str, source: str) -> None:
    """A command line may hold bytes that are no text: Python keeps them as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ScenarioError(
            f"{source}: character {error.start + 1} ({text[error.start]!r}) is no UTF-8 text; write it in UTF-8"
        ) from None


def _check_bounds(text: str, source: str) -> None:
    """Nesting and aliases, found event by event: composing would recurse."""
    depth = num_aliases = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.events.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise _at(event, source, f"nested more than {MAX_DEPTH} levels deep")
            elif isinstance(event, yaml.events.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.events.AliasEvent):
                num_aliases += 1
                if num_aliases > MAX_ALIASES:
                    raise _at(event, source, f"more than {MAX_ALIASES} aliases (*name); write the values out")
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, source) from None
    except RecursionError:
        raise ScenarioError(f"{source}: nested more than {MAX_DEPTH} levels deep") from None


def _at(item: yaml.Node | yaml.events.Event, source: str, problem: str) -> ScenarioError:
    mark = _mark(item)
    return ScenarioError(f"{source}:{mark.line}:{mark.column}: {problem}")


def _syntax_error(error: yaml.YAMLError, text: str, source: str) -> ScenarioError:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character[:1] or "\0")
        return ScenarioError(f"{source}:{line}:{column}: the character U+{code:04X} is not allowed in YAML; remove it")
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return ScenarioError(f"{source}: is not valid YAML: {error}")
    lines = text.splitlines()
    line_text = lines[mark.line] if mark.line < len(lines) else ""
    where = f"{source}:{mark.line + 1}:{mark.column + 1}"
    if "\t" in line_text[: mark.column + 1] or "\t" in line_text[: len(line_text) - len(line_text.lstrip())]:
        return ScenarioError(f"{where}: a tab where YAML wants spaces; indent with spaces")
    problem = getattr(error, "problem", None) or str(error)
    if "nesting depth" in problem:
        return ScenarioError(f"{where}: nested more than {MAX_DEPTH} levels deep")
    if "undefined alias" in problem:
        return ScenarioError(f"{where}: {problem}: name it first with &")
    if "but found another document" in problem:
        return ScenarioError(f"{where}: a second document (`---`) begins; keep one per file")
    shown = f" at {line_text.strip()[:60]!r}" if line_text.strip() else ""
    return ScenarioError(f"{where}: is not valid YAML: {problem}{shown}; check indentation, colons and quotes")


def _decode(raw: bytes, path: Path, what: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise ScenarioError(
            f"{path}:{line}:{column}: the byte 0x{raw[error.start]:02x} is not UTF-8; save the {what} as UTF-8"
        ) from None


def _os_reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _mark(item: yaml.Node | yaml.events.Event) -> Mark:
    mark = item.start_mark
    return Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)


def _kind(data: object) -> str:
    return "a list" if isinstance(data, list) else "empty" if data is None else f"the single value {data!r:.60}"
