"""Write the pages that follow from the code: docs/scenario.md (the schema) and docs/commands.md (the command line).

python docs/_gen/generate.py            write them
python docs/_gen/generate.py --check    exit code 1 if one is out of date
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent
GENERATED = "<!-- Written by docs/_gen/generate.py from the code; change the docstrings there. -->\n"

INTRO = """\
# The scenario

A scenario is one YAML file. Every key has a default, so an empty file is a scenario too; a key that is not on this page
is an error that names the line and suggests one that is. Keys carry vLLM's names where vLLM has one. Sizes are
`40GiB`, `4GB` or a number of bytes, times `2s`, `100ms` or a number of seconds.

`kvsim init` writes a commented file to start from, `kvsim validate FILE` checks one without running it, `kvsim schema`
prints the JSON Schema for an editor, and `--set allocator.block_size=32` overrides a key on the command line. The
`scenario.yaml` beside the results is complete: it says where each value came from, and running it gives the same bytes
(warnings apart: they name its own lines).

```yaml
name: chat
seed: 7
engine: paged
model: llama-2-7b
memory: {kv_cache_memory_bytes: 16GiB}
allocator: {block_size: 16}
scheduler: {max_num_seqs: 256, max_model_len: 2048}
workload:
  num_requests: 600
  arrivals: {type: poisson, request_rate: 28.0}
  lengths: {type: preset, name: sharegpt}
cost: {type: linear}
slo: {ttft: 2s, tpot: 100ms}
```

Where a `type` is chosen, `package.module:Name` names a class of yours, and the other keys of the block are its keyword
arguments: see [Extend](extend.md). Such a scenario runs that code.
"""

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Top level", ("Scenario",)),
    ("model, gpu", ("ModelGeometry", "GpuSpec")),
    ("memory", ("Memory",)),
    ("allocator", ("PagedMemory", "ContiguousMemory")),
    ("scheduler", ("ContinuousScheduler", "StaticScheduler", "NoEvictScheduler", "VllmV0Scheduler", "VllmV1Scheduler")),
    ("workload", ("Workload",)),
    (
        "workload.arrivals",
        ("PoissonArrivals", "GammaArrivals", "ConstantArrivals", "BatchArrivals", "TraceArrivals"),
    ),
    (
        "workload.lengths",
        ("FixedLengths", "UniformLengths", "NormalLengths", "LognormalLengths", "PresetLengths"),
    ),
    ("workload: sharing, sessions, clients", ("Sampling", "Content", "SystemPrompt", "FewShot", "Sessions", "Abort")),
    ("cost", ("LinearCostConfig", "KernelCostConfig", "RooflineCostConfig")),
    ("slo", ("Slo",)),
    ("sweep", ("Sweep",)),
)
TRACES = """\
## workload.trace

A file of requests, as it is or packed with gzip; which format it has is found out from its beginning, or said by
`trace_format`. `kvsim trace FILE` tells what is in one, and `--to` converts it.

| format | one request is |
|---|---|
{formats}

The plain CSV needs the first three columns; without `arrival_s` the scenario must have `arrivals`. Requests that are
written out (`requests:`) have the same keys, each by its first name.

| column, any of | meaning |
|---|---|
{columns}

Times are seconds since some start, Unix times or dates (`2026-11-02T09:00:00.5Z`). Dates and Unix times count from the
first request, and so do the times of `azure` and `burstgpt`.

Requests of one instant come in the order of the file. Where there are sessions, the one that began first is first: in
a trace the session whose first row is the earliest (equal times: in the order of the file), in `requests:` the one that
is named first, and among synthetic ones the one with the lower number. A row without a session is one of its own.
"""
JSON_FORMATS = {
    "mooncake": "a line of JSON, or an entry of a list: `timestamp` (milliseconds), `input_length`, `output_length`, "
    "`hash_ids` (equal ids at equal places: the same text)",
    "sharegpt": "a conversation in a list, or a line of JSON: its first message that is answered, and the answer; "
    "it has no times",
    "csv": "a row of a log of your own, see below",
}
CSV_MEANINGS = {
    "arrival_ns": "When the request comes.",
    "prompt": "Tokens of its prompt.",
    "output": "Tokens that come out: of each sample, if there are several.",
    "max_output": "Tokens that the client allows: what an engine that reserves memory knows. Empty: `output_tokens`.",
    "prefix_group": "Prompts of one group begin with the same text ...",
    "prefix_tokens": "... of so many tokens. Empty: it shares nothing.",
    "n": "Parallel samples.",
    "priority": "Lower is more urgent, under `scheduling_policy: priority`.",
    "session": "Rows of one session are its turns: each prompt, history included, begins with the same text, and comes "
    "at its time, but not before the last answer.",
}
SINGULAR = {"Sampling", "Content", "SystemPrompt", "FewShot", "Sessions", "Abort"}
"""Blocks whose heading is their key, not a `type`."""


def scenario_page() -> str:
    """docs/scenario.md: a table of keys for every block of the schema."""
    from kvsim.scenario import schema, workload_schema

    blocks = {**vars(workload_schema), **vars(schema)}
    shown = {name for _, names in SECTIONS for name in names}
    used = set(schema.Scenario.model_json_schema()["$defs"]) | {"Scenario"}
    if missing := used - shown - {"Custom"}:
        raise SystemExit(f"docs/_gen/generate.py: SECTIONS lacks {sorted(missing)}")
    parts = [INTRO, GENERATED]
    for title, names in SECTIONS:
        parts.append(f"## {title}\n")
        for name in names:
            parts.append(_block(blocks[name], with_heading=len(names) > 1))
        if title == "workload":
            parts.append(_traces())
    parts.append(_catalog())
    return "\n".join(parts)


def _block(block: Any, *, with_heading: bool) -> str:
    fields = block.model_json_schema()
    types = fields["properties"].get("type", {})
    kinds = types.get("enum") or [types["const"]] if "type" in fields["properties"] else []
    title = _snake(block.__name__) if block.__name__ in SINGULAR else " and ".join(f"`type: {kind}`" for kind in kinds)
    lines = [f"### {title or block.__name__}\n"] if with_heading else []
    lines.append(f"{inspect.getdoc(block)}\n")
    rows = [_row(name, text, fields) for name, text in _documented_fields(block).items() if name != "type"]
    if rows:
        lines += ["| key | value | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")


def _documented_fields(block: Any) -> dict[str, str]:
    """Field name to docstring, inherited ones after the block's own."""
    found: dict[str, str] = {}
    for owner in block.__mro__:
        if not owner.__module__.startswith("kvsim"):
            continue
        body = ast.parse(inspect.getsource(owner))
        statements = body.body[0].body  # type: ignore[attr-defined]
        for at, statement in enumerate(statements):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            after = statements[at + 1] if at + 1 < len(statements) else None
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found.setdefault(statement.target.id, after.value.value if is_text else "")  # type: ignore[union-attr]
    return {name: text for name, text in found.items() if name in block.model_fields}


def _row(name: str, text: str, fields: Mapping[str, Any]) -> str:
    field = fields["properties"][name]
    is_required = name in fields.get("required", ())
    default = "required" if is_required else _default(field.get("default"))
    meaning = " ".join(text.split()).replace("|", "\\|")
    return f"| `{name}` | {_values(field, fields.get('$defs', {}))} | {default} | {meaning} |"


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return "see below"
    if value is None:
        return "null"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def _values(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a field may hold, in words."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return "`package.module:Name` and its keywords" if name == "Custom" else "a block"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        kinds = [_values(option, definitions) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    return _plain(field, definitions)


_PLURALS = re.compile(r"^(whole number|number|mapping)\b")


def _plain(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    kind = field.get("type")
    if field.get("pattern") == ":":
        return "`package.module:name`"
    if kind == "array":
        items = _values(field["items"], definitions)
        if field.get("maxItems") == 2 == field.get("minItems"):
            return f"two in a list, each {items}"
        several = _PLURALS.sub(r"\1s", items.removeprefix("a "))
        return f"a list of {several}"
    if kind == "object":
        return "a mapping"
    words = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}
    return words.get(str(kind), "any") + _bounds(field)


def _bounds(field: Mapping[str, Any]) -> str:
    low = field.get("ge", field.get("minimum"))
    above = field.get("gt", field.get("exclusiveMinimum"))
    high, below = field.get("le", field.get("maximum")), field.get("lt")
    signs = ((">=", low), (">", above), ("<=", high), ("<", below))
    shown = ", ".join(f"{sign} {_number(value)}" for sign, value in signs if value is not None)
    return f" {shown}" if shown else ""


def _number(value: float) -> str:
    if value == 2**63 or value == 2**63 - 1:
        return "2^63" if value == 2**63 else "2^63 - 1"
    return f"{value:,.10g}" if isinstance(value, float) else f"{value:,}"


def _traces() -> str:
    """The formats of traces, and the columns of the plain one."""
    from kvsim.workload.trace_csv import CSV_FORMATS

    def code(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    formats = [
        f"| `{name}` | a row: {code(column.names[0] for column in columns)} |"
        for name, columns in CSV_FORMATS.items()
        if name != "csv"
    ] + [f"| `{name}` | {text} |" for name, text in JSON_FORMATS.items()]
    columns = [f"| {code(column.names)} | {CSV_MEANINGS[column.fills]} |" for column in CSV_FORMATS["csv"]]
    return TRACES.format(formats="\n".join(formats), columns="\n".join(columns))


def _catalog() -> str:
    folder = DOCS.parent / "kvsim" / "catalog"
    lines = ["## Presets\n", "Files of `kvsim/catalog`; each says where its figures come from.\n"]
    for kind, title in (
        ("models", "`model:`"),
        ("gpus", "`gpu:`"),
        ("lengths", "`workload.lengths.name:`"),
        ("profiles", "`cost.profile:`"),
    ):
        names = ", ".join(f"`{path.stem}`" for path in sorted((folder / kind).glob("*.yaml")))
        lines.append(f"* {title} {names}")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """docs/commands.md: every command with its arguments and options."""
    from kvsim import cli

    lines = [
        "# Commands\n",
        GENERATED,
        "Exit codes: 0 done; 2 the input cannot be used (one message says what, where and what would be right); "
        "1 the answer is no (a case differs, a point failed, a model does not fit); 130 interrupted. "
        "`--help` behind a command lists what is here, and `kvsim --version` prints the version.\n",
    ]
    for name in cli.COMMANDS:
        try:
            function = importlib.import_module(f"kvsim.cli.{name.replace('-', '_')}").command
        except ModuleNotFoundError:
            continue
        lines.append(_command(name, function))
    return "\n".join(lines)


def _command(name: str, function: Callable[..., Any]) -> str:
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(function)
    command = typer.main.get_command(app)
    usage = " ".join(filter(None, ["kvsim", name, *(_usage(parameter) for parameter in command.params), "[OPTIONS]"]))
    told = [" ".join(part.split()) for part in (inspect.getdoc(function) or cli_help(name)).split("\n\n")]
    lines = [f"## kvsim {name}\n", f"`{usage}`\n", *(f"{part}\n" for part in told)]
    rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
    return "\n".join([*lines, *(["| | |", "|---|---|", *rows] if rows else [])]) + "\n"


def cli_help(name: str) -> str:
    from kvsim.cli import COMMANDS

    return COMMANDS[name]


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
        return name if parameter.required else f"[{name}]"
    return f"{parameter.opts[0]} ..." if parameter.required else ""


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        shown = f"`{parameter.name.upper()}`"
    else:
        names = "/".join([*parameter.opts, *parameter.secondary_opts])
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        shown = f"`{names}{value}`"
    text = (parameter.help or "").strip()
    return f"| {shown} | {text.replace('|', chr(92) + '|')}{_shown_default(parameter)} |"


def _shown_default(parameter: Any) -> str:
    default = parameter.default
    is_plain = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
    return f" Default: {default}." if is_plain and "efault" not in (parameter.help or "") else ""


PAGES: dict[str, Callable[[], str]] = {"scenario.md": scenario_page, "commands.md": commands_page}


def out_of_date() -> Iterator[str]:
    """Names of the pages that differ from what the code says."""
    for name, write in PAGES.items():
        path = DOCS / name
        if not path.exists() or path.read_text("utf-8") != write():
            yield name


def main(args: list[str]) -> int:
    """Write the pages, or with `--check` say which are out of date."""
    if args == ["--check"]:
        stale = list(out_of_date())
        if stale:
            print(f"out of date: {', '.join(stale)}; run: python docs/_gen/generate.py")
        return 1 if stale else 0
    for name, write in PAGES.items():
        (DOCS / name).write_text(write(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
