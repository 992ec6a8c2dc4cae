"""Traces in JSON, one object a line or one list of them: Mooncake's requests and ShareGPT's conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from kvsim.types import NS_PER_MS, NS_PER_S
from kvsim.workload.trace import Trace
from kvsim.workload.trace_files import (
    MAX_LINE_CHARS,
    MAX_TOKENS,
    BadRow,
    MissingKey,
    RowErrors,
    fail,
    parse_int,
    parse_seconds,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

MOONCAKE_BLOCK = 512
_DECODER = json.JSONDecoder()
_READ_CHARS = 1 << 20
_SPACES = "\ufeff \t\r\n"
_MESSAGE_LISTS = ("conversations", "conversation", "messages")
"""Where published conversations keep their messages."""
_ASKS = frozenset({"human", "user"})
_SETS_OUT = frozenset({"system", "developer"})
_SESSION_KEYS = ("session_id", "session")
_HASH_BLOCKS = (512, 16, 32, 64, 128, 256, 1024, 8)
"""Tokens per hash id that are tried when the scenario names none."""


def format_of_object(start: str) -> str:
    """The format of a file that begins with this line, an object."""
    has_messages = any(f'"{key}"' in start for key in _MESSAGE_LISTS)
    return "sharegpt" if has_messages and '"input_length"' not in start else "mooncake"


def format_of_entries(entries: Iterable[object]) -> tuple[str, Iterable[object]]:
    """A list of conversations, or of the objects that Mooncake's lines hold; and all of its entries."""
    left = iter(entries)
    looked_at: list[object] = []
    first: Mapping[str, object] = {}
    for entry in left:
        looked_at.append(entry)
        if isinstance(entry, dict):
            first = entry
            break
    is_mooncake = "conversations" not in first and bool({"input_length", "output_length", "hash_ids"} & first.keys())
    return "mooncake" if is_mooncake else "sharegpt", chain(looked_at, left)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a file, not yet read as JSON."""

    text: str


def json_lines(text: TextIO) -> Iterator[_Line]:
    """The lines of a file, each decoded when its turn comes."""
    for line in text:
        yield _Line(line.strip().strip("\ufeff"))


class _ListText:
    """The text of a JSON list, read piece by piece, and how far it is decoded."""

    def __init__(self, text: TextIO, path: str) -> None:
        self._text = text
        self._path = path
        self._read = ""
        self._at = 0

    def _more(self) -> bool:
        """Forget what is decoded and read as much again as is left; False at the end of the file."""
        self._read, self._at = self._read[self._at :], 0
        if len(self._read) >= MAX_LINE_CHARS:
            fail(self._path, f"has an entry of more than {MAX_LINE_CHARS:,} characters in its list; this is no trace")
        piece = self._text.read(max(_READ_CHARS, len(self._read)))
        self._read += piece
        return bool(piece)

    def next_char(self) -> str:
        """Pass over spaces and take the character behind them; "" at the end of the file."""
        while True:
            for at in range(self._at, len(self._read)):
                if self._read[at] not in _SPACES:
                    self._at = at + 1
                    return self._read[at]
            self._at = len(self._read)
            if not self._more():
                return ""

    def untake(self) -> None:
        """The character taken last is the next one again."""
        self._at -= 1

    def entry(self, number: int) -> object:
        """Entry `number` of the list; it may go on behind what has been read."""
        value: object = None
        while True:
            problem, left = "", len(self._read) - self._at
            try:
                value, end = _DECODER.raw_decode(self._read, self._at)
                left = len(self._read) - end
            except (ValueError, RecursionError) as error:
                problem = _json_problem(error)
            # "1e+" may be the beginning of another number.
            if (not problem and left > 2) or not self._more():
                break
        if problem:
            self.fail(f"entry {number}: {problem}")
        self._at = len(self._read) - left
        return value

    def fail(self, problem: str) -> NoReturn:
        fail(self._path, f"is no JSON: {problem}")


def json_list(text: TextIO, path: str) -> Iterator[object]:
    """The entries of one JSON list, each decoded when its turn comes: the whole need not fit into memory."""
    source = _ListText(text, path)
    source.next_char()
    number = 0
    found = source.next_char()
    while found != "]" or number:
        number += 1
        if found:
            source.untake()
        yield source.entry(number)
        if (end := source.next_char()) != ",":
            if end != "]":
                source.fail(f"entry {number} is followed by {end or 'the end of the file'!r}, not by a comma or ]")
            break
        found = source.next_char()
    if source.next_char():
        source.fail("text follows the end of the list")


def _object(entry: object) -> Mapping[str, Any]:
    """An entry of a list, or a line, as the object it should be; else BadRow."""
    place, value = "(entry)", entry
    if isinstance(entry, _Line):
        place = "(line)"
        try:
            value = json.loads(entry.text)
        except (ValueError, RecursionError) as error:
            raise BadRow(place, entry.text, f"is no JSON ({_json_problem(error)})") from None
    if not isinstance(value, dict):
        raise BadRow(place, entry.text if isinstance(entry, _Line) else entry, "is no JSON object")
    return value


def _json_problem(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


@dataclass
class _Mooncake:
    """A Mooncake trace under construction."""

    times: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    codes: dict[int | str, int] = field(default_factory=dict)
    has_ids: bool = False
    unnamed: list[int] = field(default_factory=list)
    """Numbers of the rows without hash ids, as long as no row has any."""
    first_unnamed: MissingKey | None = None
    num_in_seconds: int = 0
    session_key: str = ""
    """What the first row that names its session calls it."""

    def add(self, row: Mapping[str, Any], number: int) -> None:
        """Append object `number`; raises BadRow and leaves the columns as they were."""
        for column in ("timestamp", "input_length", "output_length"):
            if column not in row:
                raise MissingKey(column, row)
        # Qwen-Bailian's lines are Mooncake's with the chat's number in each, and with seconds.
        in_seconds = "chat_id" in row
        time = parse_seconds("timestamp", row["timestamp"], NS_PER_S if in_seconds else NS_PER_MS)
        prompt = parse_int("input_length", row["input_length"], 1)
        output = parse_int("output_length", row["output_length"], 1)
        ids = self._ids(row)
        if row.get("hash_ids") is None:
            self.first_unnamed = self.first_unnamed or MissingKey("hash_ids", row)
            self.unnamed.append(number)
        self.num_in_seconds += in_seconds
        if not self.session_key:
            self.session_key = next((key for key in _SESSION_KEYS if row.get(key) is not None), "")
        self.times.append(time)
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.ids.extend(self.codes.setdefault(id_, len(self.codes)) for id_ in ids)
        self.offsets.append(len(self.ids))

    def _ids(self, row: Mapping[str, Any]) -> list[int | str]:
        # Tables written as lines have null where a column is empty.
        if row.get("hash_ids") is None:
            if self.has_ids:
                raise MissingKey("hash_ids", row)
            return []
        ids = row["hash_ids"]
        if not isinstance(ids, list):
            raise BadRow("hash_ids", ids, "is not a list")
        for id_ in ids:
            if isinstance(id_, bool) or not isinstance(id_, int | str):
                raise BadRow("hash_ids", id_, "is neither a whole number nor a name")
        self.has_ids = True
        return ids

    def drop_unnamed(self, errors: RowErrors) -> None:
        """Report the rows before the first one with hash ids as bad, and forget them; nothing where no row has any."""
        if not self.has_ids or self.first_unnamed is None:
            return
        for number in self.unnamed:
            errors.report(f"row {number}", self.first_unnamed)
        num_dropped = len(self.unnamed)
        del self.times[:num_dropped], self.prompts[:num_dropped], self.outputs[:num_dropped]
        del self.offsets[:num_dropped]
        self.first_unnamed = None
        self.unnamed.clear()


def load_mooncake(entries: Iterable[object], errors: RowErrors, hash_block_size: int | None) -> Trace:
    """Requests with lengths, times and hash ids; `hash_block_size` None: the size that fits most rows."""
    import numpy as np

    if hash_block_size is not None and hash_block_size < 1:
        fail(errors.path, f"hash_block_size is {hash_block_size}; it is at least 1")
    lines = _Mooncake()
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, _Line) and not entry.text:
            continue
        try:
            lines.add(_object(entry), number)
        except BadRow as bad:
            errors.report(f"row {number}", bad)
    lines.drop_unnamed(errors)
    prompt = np.array(lines.prompts, dtype=np.int64)
    trace = Trace(
        errors.path, "mooncake", np.array(lines.times, dtype=np.int64), prompt, np.array(lines.outputs, dtype=np.int64)
    )
    if lines.num_in_seconds:
        note = (
            f"{errors.path}: {lines.num_in_seconds} rows have a chat_id, as Qwen-Bailian's: their timestamps are "
            "seconds, and every turn comes at its own"
        )
        trace = replace(trace, notes=(note,))
    if lines.session_key:
        note = (
            f"{errors.path}: key {lines.session_key!r} is not read in the mooncake format: every request comes at its "
            "own time"
        )
        trace = replace(trace, notes=(*trace.notes, note))
    if not lines.ids:
        return trace
    offsets = np.array(lines.offsets, dtype=np.int64)
    size, notes = _hash_block_size(errors.path, prompt, np.diff(offsets), hash_block_size)
    return replace(
        trace,
        hash_ids=np.array(lines.ids, dtype=np.int64),
        hash_offsets=offsets,
        hash_block_size=size,
        notes=(*trace.notes, *notes),
    )


def _hash_block_size(path: str, prompt: Ints, num_ids: Ints, stated: int | None) -> tuple[int, tuple[str, ...]]:
    """Tokens per id: as stated, or the size for which most rows have one id per begun block."""
    import numpy as np

    fits = {}
    for size in (stated,) if stated else _HASH_BLOCKS:
        # Some files name the last, partial block, some do not.
        fits[size] = int(np.sum((num_ids == -(-prompt // size)) | (num_ids == prompt // size)))
    size = max(fits, key=lambda candidate: fits[candidate])
    notes = []
    if stated is None and fits[size] * 2 < len(prompt):
        fail(
            path,
            f"its hash_ids fit no known block size (row 1: {prompt[0]} tokens, {num_ids[0]} ids); "
            "set hash_block_size to the tokens one id stands for",
        )
    if stated is None and size != MOONCAKE_BLOCK:
        notes.append(f"{path}: hash_block_size {size} was found from the rows")
    if odd := len(prompt) - fits[size]:
        notes.append(
            f"{path}: {odd} rows do not have one hash id per {size} tokens; "
            "missing ids count as unshared text, surplus ones stand for no token"
        )
    return size, tuple(notes)


def load_sharegpt(entries: Iterable[object], errors: RowErrors, chars_per_token: float) -> Trace:
    """First exchange of each conversation; those without a prompt and an answer are left out and counted."""
    import numpy as np

    if not 0.01 <= chars_per_token <= 1000:
        fail(errors.path, f"chars_per_token is {chars_per_token}; it is a number from 0.01 to 1,000, such as 4")
    lengths: list[tuple[int, int]] = []
    num_failed = 0
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, _Line) and not entry.text:
            continue
        try:
            chars = _first_exchange(_object(entry) if isinstance(entry, _Line) else entry)
        except BadRow as bad:
            errors.report(f"row {number}", bad)
            continue
        if chars is None:
            num_failed += 1
        else:
            lengths.append((_tokens(chars[0], chars_per_token), _tokens(chars[1], chars_per_token)))
    columns = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    notes = [f"{errors.path}: lengths are estimates, {chars_per_token:g} characters per token"]
    if num_failed:
        notes.append(f"{errors.path}: {num_failed} conversations without a first exchange skipped")
    return Trace(
        errors.path,
        "sharegpt",
        None,
        columns[:, 0].copy(),
        columns[:, 1].copy(),
        num_failed=num_failed,
        notes=tuple(notes),
    )


def _tokens(num_chars: int, chars_per_token: float) -> int:
    return min(MAX_TOKENS, max(1, round(num_chars / chars_per_token)))


def _first_exchange(entry: object) -> tuple[int, int] | None:
    """Characters of the first message that is answered, with the system prompt before it, and of the answer.

    None if no message is answered, or if one of the two has no text. Who speaks is looked at where it is told.
    """
    if not isinstance(entry, dict):
        raise BadRow("(entry)", entry, "is no conversation; it should be {id, conversations: [{from, value}]}")
    name = next((key for key in _MESSAGE_LISTS if key in entry), None)
    if name is None:
        raise MissingKey("conversations", entry)
    messages = entry[name]
    if not isinstance(messages, list):
        raise BadRow(name, messages, "is not a list")
    system = question = 0
    is_asked = False
    for message in messages:
        role, num_chars = _message(message)
        if role in _SETS_OUT:
            system += num_chars
        elif is_asked and role not in _ASKS:
            return (system + question, num_chars) if question and num_chars else None
        else:
            is_asked = role in _ASKS or not role
            question = num_chars
    return None


def _message(message: object) -> tuple[str, int]:
    """Who speaks ("" where that is not told), and how many characters."""
    if isinstance(message, dict):
        text = message.get("value", message.get("content"))
        role = message.get("from", message.get("role"))
        if isinstance(text, str):
            return (role.strip().lower() if isinstance(role, str) else ""), len(text)
    raise BadRow("value", message, "is no message; it should be {from, value} or {role, content}, with a text")
