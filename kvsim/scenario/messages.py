"""Turns what pydantic found into messages for people: where, which value, what would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from kvsim.scenario.fields import is_import_path
from kvsim.scenario.layout import homes, keys_at, models_at, types_of
from kvsim.scenario.words import did_you_mean, likeness
from kvsim.types import shown
from kvsim.yaml_loader import ABSENT, Key, dotted, look_up

MAX_PROBLEMS = 10
MAX_KEY = 200
"""Characters of a key that messages show."""

SYNONYMS = {
    "num_prompts": "num_requests",
    "preemption_mode": "preemption",
    "qps": "request_rate",
    "rps": "request_rate",
    "max_batch_size": "max_num_seqs",
    "batch_size": "max_num_seqs",
    "num_blocks": "num_gpu_blocks_override",
    "num_gpu_blocks": "num_gpu_blocks_override",
    "num_cpu_blocks": "num_cpu_blocks_override",
    "max_tokens": "max_output_tokens",
    "swap": "swap_space",
    "tp": "tensor_parallel_size",
    "prefix_caching": "enable_prefix_caching",
    "chunked_prefill": "enable_chunked_prefill",
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
}
"""Names used elsewhere for keys of ours."""
CLEARLY_CLOSER = 0.1
"""A key of another mapping is suggested only if it resembles the misspelt one this much more than any key here does."""
TAKES_CODE: tuple[Key, ...] = (("allocator",), ("scheduler",), ("workload",), ("cost",))
"""Mappings whose `type` may be `package.module:Name`."""


def problems_of(error: ValidationError, data: dict[str, Any], where: Callable[[Key], str]) -> list[str]:
    """One line per problem, in the order of the file; unknown keys alone if there are any (the rest may follow)."""
    details = [(_locate(tuple(item["loc"]), data, item["type"]), item) for item in error.errors(include_url=False)]
    unknown = [(key, item) for key, item in details if item["type"] == "extra_forbidden"]
    lines = [
        f"{where(key)}: {dotted(key)[:MAX_KEY] or 'scenario'}: {_explain(key, item, data)}"
        for key, item in unknown or details
    ]
    return list(dict.fromkeys(lines))


def join(problems: Iterable[str]) -> str:
    """All problems as one text, the first ones if there are many."""
    lines = list(problems)
    if len(lines) > MAX_PROBLEMS:
        lines[MAX_PROBLEMS:] = [f"... and {len(lines) - MAX_PROBLEMS} more"]
    return "\n".join(lines)


def unknown_key(key: Key, data: dict[str, Any]) -> str:
    """What to say of a key that its mapping does not take: a close name, another home, or the list of known keys."""
    *parents, name = key
    path = tuple(str(part) for part in parents if not isinstance(part, int))
    kind = look_up(data, (*parents, "type"))
    known = keys_at(path, kind)
    text = "unknown key"
    synonym = SYNONYMS.get(str(name))
    if synonym in known:
        return f"{text}; did you mean {synonym}?"
    others = [types_of(model)[0] for model in models_at(path) if name in model.model_fields and types_of(model)]
    if others:
        return f"{text} of type {kind}; it belongs to type {' or '.join(others)}"
    suggestion, home = did_you_mean(name, known), _home_of(str(name), synonym)
    if home and (
        not suggestion or likeness(name, str(home[-1])) > max(likeness(name, word) for word in known) + CLEARLY_CLOSER
    ):
        return f"{text} here; did you mean {dotted(home)}?"
    return text + (suggestion or f"; known here: {', '.join(known)}")


def _home_of(name: str, synonym: str | None) -> Key | None:
    """Where a key of that name, or of one much like it, belongs."""
    close = get_close_matches(name, homes(), n=1, cutoff=0.8)
    for word in (name, synonym, *close):
        if word in homes():
            return (*homes()[word][0], word)
    return None


def _locate(loc: tuple[Any, ...], data: Any, kind: str) -> Key:
    """The key in the file that a pydantic location means: tags of unions are left out."""
    key: list[str | int] = []
    for index, part in enumerate(loc):
        is_new = index == len(loc) - 1 and kind in ("missing", "extra_forbidden")
        if look_up(data, (*key, part)) is ABSENT and not (is_new and isinstance(look_up(data, tuple(key)), dict)):
            continue
        key.append(part)
    return tuple(key)


def _explain(key: Key, item: Any, data: dict[str, Any]) -> str:
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if value is None and kind not in ("missing", "extra_forbidden"):
        return "is empty (null); give it a value, or leave the key out for its default"
    if kind == "extra_forbidden":
        return unknown_key(key, data)
    if kind == "missing":
        return "is missing; give it a value"
    if kind in ("literal_error", "union_tag_invalid"):
        return _not_one_of(value, str(context.get("expected", context.get("expected_tags"))))
    if kind == "union_tag_not_found":
        return _tag_missing(key, value)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = ": " + ", ".join(known) if (known := keys_at(_names(key))) else " and values"
        return f"is {shown(value)}; it takes keys{keys}" + (
            f"; did you mean {dotted((*key, 'type'))}: {value}?" if _names_a_type(key, value) else ""
        )
    if kind == "value_error":
        reason = str(context.get("error", item["msg"]))
        return reason if isinstance(value, dict) else f"is {shown(value)}; {reason}"
    return f"is {shown(value)}; {_limit(kind, context) or item['msg'][0].lower() + item['msg'][1:]}"


def _names(key: Key) -> tuple[str, ...]:
    """The path of a mapping, whichever of a list's items it is in."""
    return tuple(part for part in key if isinstance(part, str))


def _types_at(key: Key) -> list[str]:
    return [kind for model in models_at(_names(key)) for kind in types_of(model)]


def _names_a_type(key: Key, value: object) -> bool:
    """Whether a single value where a mapping belongs is what its `type:` could be."""
    return value in _types_at(key) or (key in TAKES_CODE and is_import_path(value))


def _limit(kind: str, context: dict[str, Any]) -> str | None:
    match kind:
        case "greater_than":
            return f"must be above {_plain(context['gt'])}"
        case "greater_than_equal":
            return f"must be at least {_plain(context['ge'])}"
        case "less_than":
            return f"must be below {_plain(context['lt'])}"
        case "less_than_equal":
            return f"must be at most {_plain(context['le'])}"
        case "string_pattern_mismatch":
            return "must be package.module:Name"
        case "string_too_long" | "too_long":
            return f"must have at most {context['max_length']} characters"
        case "tuple_type" | "list_type":
            return "must be a list: [a, b]"
    return None


def _plain(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _not_one_of(value: Any, expected: str) -> str:
    choices = [word.strip("' ") for word in expected.replace(" or ", ", ").split(",")]
    given = value.get("type") if isinstance(value, dict) else value
    what = "type is" if isinstance(value, dict) else "is"
    return f"{what} {shown(given)}; must be one of {', '.join(choices)}{did_you_mean(given, choices)}"


def _tag_missing(key: Key, value: Any) -> str:
    choices = ", ".join(_types_at(key))
    if isinstance(value, dict) and "type" in value:
        return f"type is {shown(value['type'])}; must be one of {choices}"
    return f"type is missing; it is one of {choices}"
