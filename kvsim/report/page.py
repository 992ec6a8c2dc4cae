"""`report.html`: one self-contained page of a run, or of several engines on the same workload.

Figures with what they mean, pictures, the block map to play, warnings, the resolved scenario. Nothing is fetched from
anywhere: styles, script, pictures and data are in the file, and its content security policy forbids the rest.
"""

from __future__ import annotations

import base64
import html
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.files import whole_file
from kvsim.result import CompareResult, RunResult, share, text_of

if TYPE_CHECKING:
    from kvsim.report.blockmap import Recording

REPORT_NAME = "report.html"


class Figure(NamedTuple):
    """A figure of the summary: its key, its name, its unit, and what it means in one sentence."""

    key: str
    label: str
    unit: str
    meaning: str


FIGURES = (
    Figure("completed", "requests completed", "", "Requests whose last token was delivered."),
    Figure("duration", "duration", "s", "From the first arrival to the last token, or to the horizon."),
    Figure("output_throughput", "output throughput", "tok/s", "Tokens generated per second, all requests together."),
    Figure("mean_ttft_ms", "mean TTFT", "ms", "Time to first token: from a request's arrival to its first token."),
    Figure("mean_tpot_ms", "mean TPOT", "ms", "Time per output token after the first, averaged over requests."),
    Figure("running_mean", "running at once, mean", "", "Requests in a step, averaged over time: the batch."),
    Figure("running_peak", "running at once, peak", "", "The most requests that ever ran in one step."),
    Figure("block_utilization", "block utilization", "%", "Share of the allocated slots that hold tokens."),
    Figure("num_preemptions", "preemptions", "", "Times a running request lost its memory to another."),
    Figure("num_cow_copies", "blocks copied on write", "", "Shared blocks copied because one of their owners wrote."),
    Figure("num_swapped_out_blocks", "blocks swapped out", "", "Blocks moved to host memory to make room."),
    Figure("prefix_cache_hits", "prefix-cache hits", "tokens", "Prompt tokens that were found and not computed again."),
    Figure("num_rejected", "rejected", "", "Requests that can never be served."),
    Figure("num_aborted", "aborted", "", "Requests whose client gave up."),
    Figure("num_unfinished", "cut off", "", "Requests that had not ended, or not arrived, at the horizon."),
)
SHOWN_AT_ZERO = 9
"""The figures after these are shown only where something of the kind happened."""

PARTS = {
    "token_states": ("token states", "hold KV that a live request will still read"),
    "reserved": ("reserved", "are allocated and empty now, and will be filled by their owner before it ends"),
    "internal_frag": ("internal fragmentation", "are allocated, and will never hold a token that is read"),
    "external_frag": ("external fragmentation", "lie in holes too small for the request that waits, or in rounding"),
    "cached_idle": ("cached, idle", "keep text for the prefix cache; nobody uses them, and they can be taken"),
    "free": ("free", "are in no allocation"),
}

PICTURES = {
    "memory": "Where the KV memory goes over time.",
    "running": "Requests running and waiting over time.",
    "utilization": "How full the allocated memory is; that of blocks beside its theory.",
    "latency": "How long requests wait and take.",
}
COMPARE_PICTURES = {
    "compare_memory": "Where each engine's KV memory goes while requests wait.",
    "compare_running": "Requests each engine runs at once.",
    "compare_throughput": "Tokens each engine delivers per second.",
    "compare_latency": "How long requests take in each engine.",
}

PAGED_TEXT = (
    "Every cell is one physical block of {block_size} token slots. Its colour is the request that owns it (seven "
    "colours, used again and again: choose a request to see its blocks alone), the solid part is how full it is. The "
    "blocks of one request lie anywhere, in no order; its block table says where. Only its last block is partly empty."
)
CONTIGUOUS_TEXT = (
    "The address space, row by row: every request owns one unbroken region, taken whole when it was admitted. Solid is "
    "what holds tokens, pale is reserved for tokens that will come, hatched will never be used, grey is a hole between "
    "regions: it is free, but useless to a request that needs a longer one."
)
COMPARE_TEXT = (
    "The same requests, the same memory, the same clock; a cell is the same amount of memory on both sides. Any two "
    "engines can be chosen."
)
BOTH_KINDS_TEXT = (
    " Play it: paged memory is handed out block by block, as tokens come; contiguous memory in whole regions when a "
    "request is admitted, of which what is pale will be filled and what is hatched never."
)


def write_run_report(folder: Path, result: RunResult, notes: Sequence[str] = (), *, draw_missing: bool = True) -> Path:
    """Write `report.html` of one run into its folder; its scenario and pictures are read from there if they exist.

    `notes` are shown with the warnings; `draw_missing` draws pictures that are not there. The block map is left out
    if the result has none.
    """
    return _put(folder / REPORT_NAME, run_page(result, folder, notes, draw_missing=draw_missing))


def write_compare_report(
    folder: Path, runs: Mapping[str, RunResult], notes: Sequence[str] = (), *, draw_missing: bool = True
) -> Path:
    """Write `report.html` of a comparison: a table of the figures, and two memories at a time side by side."""
    return _put(folder / REPORT_NAME, compare_page(runs, folder, notes, draw_missing=draw_missing))


def run_page(
    result: RunResult, folder: Path | None = None, notes: Sequence[str] = (), *, draw_missing: bool = True
) -> str:
    """The page of one run as text."""
    summary = result.summary
    warnings = [*notes, *summary["warnings"]]
    body = [
        _warnings(warnings),
        _section("Headline figures", _cards(summary)),
        _block_map([result]),
        _section("Where the KV memory went", _memory_table({"": summary})),
        _section("Pictures", _pictures(_run_pictures(result, folder, draw_missing), PICTURES)),
        _scenario(folder),
    ]
    lead = (
        f"One simulated run: engine {summary['engine']}, seed {summary['seed']}, "
        f"{_counted(summary['num_requests'], 'request')}, {_size(summary)}."
    )
    return _page(f"kvsim: {summary['name']}", lead, body, summary, [result])


def compare_page(
    runs: Mapping[str, RunResult], folder: Path | None = None, notes: Sequence[str] = (), *, draw_missing: bool = True
) -> str:
    """The page of a comparison as text."""
    summaries = {engine: run.summary for engine, run in runs.items()}
    first = next(iter(summaries.values()))
    warnings = [*notes, *(f"{name}: {text}" for name, summary in summaries.items() for text in summary["warnings"])]
    body = [
        _block_map(list(runs.values())),
        _warnings(warnings),
        _section("Headline figures", _compare_table(summaries)),
        _section("Where the KV memory went", _memory_table(summaries)),
        _section("Pictures", _pictures(_compare_pictures(runs, folder, draw_missing), COMPARE_PICTURES)),
        _scenario(folder),
    ]
    lead = (
        f"{_counted(first['num_requests'], 'request')} under {_counted(len(runs), 'engine')} with the same memory: "
        f"{', '.join(runs)}. Seed {first['seed']}."
    )
    return _page(f"kvsim: {first['name']}, compared", lead, body, first, list(runs.values()))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(summary: Mapping[str, Any]) -> str:
    """How large the memory is: blocks of slots, or (contiguous, whose summary has blocks of one) slots."""
    if summary["block_size"] == 1:
        return f"{_counted(summary['num_gpu_blocks'], 'slot')} of KV memory"
    return f"{_counted(summary['num_gpu_blocks'], 'KV block')} of {summary['block_size']:,} slots"


def _page(title: str, lead: str, body: Iterable[str], summary: Mapping[str, Any], runs: Sequence[RunResult]) -> str:
    recordings = _recordings(runs)
    scripts = ""
    if recordings:
        scripts = (
            f'<script type="application/json" id="kvsim-data">{_json(recordings)}</script>\n'
            f"<script>\n{_static('blockmap.js')}</script>"
        )
    return _filled(
        _static("page.html"),
        title=_text(title),
        css=_static("page.css"),
        lead=_text(lead),
        body="\n".join(part for part in body if part),
        footer=_text(f"kvsim {summary['kvsim_version']}. Simulated: no GPU was used, times come from a cost model."),
        scripts=scripts,
    )


def _recordings(runs: Sequence[RunResult]) -> list[Recording]:
    """The maps there are; of a run in which nothing ever ran there is none."""
    return [run.block_map for run in runs if run.block_map is not None and run.block_map["frames"]]


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _filled(template: str, **parts: str) -> str:
    """The template with every `{{name}}` replaced, once; what is put in is not looked at again."""
    pieces = template.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        filled += [parts[name], rest]
    return "".join(filled)


def _static(name: str) -> str:
    return files("kvsim.report").joinpath("static", name).read_text("utf-8")


def _text(value: object) -> str:
    return html.escape(str(value))


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{_text(title)}</h2>\n{content}\n</section>" if content else ""


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f"<li>{_text(warning)}</li>" for warning in warnings)
    return _section("Warnings", f'<ul class="warnings">{items}</ul>')


def _value(figure: Figure, summary: Mapping[str, Any]) -> str:
    value = summary.get(figure.key)
    if figure.unit == "%":
        return share(value)
    return text_of(value, figure.unit)


def _happened(summaries: Iterable[Mapping[str, Any]]) -> list[Figure]:
    """The figures to show: the first ones always, the others where they are not zero."""
    all_of = list(summaries)
    return [
        figure
        for index, figure in enumerate(FIGURES)
        if index < SHOWN_AT_ZERO or any(summary.get(figure.key) for summary in all_of)
    ]


def _cards(summary: Mapping[str, Any]) -> str:
    cards = "".join(
        f"<div><dt>{_text(figure.label)}</dt><dd class='value'>{_text(_value(figure, summary))}</dd>"
        f"<dd class='meaning'>{_text(figure.meaning)}</dd></div>"
        for figure in _happened([summary])
    )
    return f'<dl class="cards">{cards}</dl>'


def _compare_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    return _table(
        summaries,
        (
            (figure.label, [_value(figure, summary) for summary in summaries.values()], figure.meaning)
            for figure in _happened(summaries.values())
        ),
    )


def _table(columns: Iterable[str], rows: Iterable[tuple[str, Sequence[str], str]]) -> str:
    """Figures by column; a row is its name, its cells, and what it means."""
    head = "".join(f'<th scope="col" class="number">{_text(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{_text(label)}</th>'
        + "".join(f'<td class="number">{_text(cell)}</td>' for cell in cells)
        + f"<td>{_text(meaning)}</td></tr>"
        for label, cells, meaning in rows
    )
    return f'<div class="scroll"><table><tr><th></th>{head}<th scope="col">what it means</th></tr>{body}</table></div>'


def _memory_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Shares of the capacity: of one run in all steps and while requests waited, of several the latter."""
    if len(summaries) == 1:
        (summary,) = summaries.values()
        columns = {"in all steps": summary["kv"], "while requests wait": summary["kv_saturated"]}
        intro = "Shares of all KV slots, averaged over the time of the steps: idle times do not count."
    else:
        columns = {engine: _while_waiting(summary) for engine, summary in summaries.items()}
        intro = (
            "Shares of all KV slots, averaged over the steps in which requests wait (over all steps where none did)."
        )
    columns = {name: shares for name, shares in columns.items() if isinstance(shares, Mapping)}
    rows = (
        (label, [share(shares.get(part)) for shares in columns.values()], f"slots that {meaning}")
        for part, (label, meaning) in PARTS.items()
    )
    return f"<p>{intro}</p>{_table(columns, rows)}"


def _while_waiting(summary: Mapping[str, Any]) -> Any:
    """The ledger over the steps in which requests waited; over all steps where none did."""
    saturated = summary["kv_saturated"]
    is_known = isinstance(saturated, Mapping) and saturated.get("token_states") is not None
    return saturated if is_known else summary["kv"]


def _block_map(runs: Sequence[RunResult]) -> str:
    recordings = _recordings(runs)
    if not recordings:
        return ""
    kinds = {recording["kind"] for recording in recordings}
    if len(recordings) > 1:
        explanation = COMPARE_TEXT + (BOTH_KINDS_TEXT if len(kinds) > 1 else "")
    elif "paged" in kinds:
        explanation = PAGED_TEXT.format(block_size=recordings[0]["block_size"])
    else:
        explanation = CONTIGUOUS_TEXT
    sights = set().union(*map(_sights, recordings))
    legend = "\n".join(
        f'<li><svg viewBox="0 0 18 18" aria-hidden="true">{drawing}</svg>{_text(words)}</li>'
        for sight, drawing, words in LEGEND
        if sight in sights
    )
    return _filled(_static("blockmap.html"), explanation=_text(explanation), legend=legend)


def _sights(recording: Recording) -> set[str]:
    """What there is to see on a map, by the names of the legend."""
    frames = recording["frames"]
    sights = {"tokens", "free" if recording["kind"] == "paged" else "hole"}
    if recording["kind"] == "paged":
        requests = [request for request, *_ in recording["sequences"]]
        has_idle = any(idle[0] for _, _, _, idle, *_ in frames)
        sights |= {"partial"} | ({"idle"} if has_idle else set())
        sights |= {"shared"} if has_idle or len(set(requests)) < len(requests) else set()
    else:
        sights |= {"reserved", "unused"}
        is_rounded = any(size > length for tables, *_ in frames for _, _, length, size in tables)
        sights |= {"rounding"} if is_rounded else set()
        sights |= {"ended"} if any(ended for *_, ended in frames) else set()
    return sights | ({"copied"} if any(copies for *_, copies, _ in frames) else set())


_FULL = '<rect x="1" y="1" width="16" height="16" fill="#0072B2"/>'
_HATCH = '<path d="M1 12L12 1M4 17L17 4M11 17L17 11" stroke="var(--unused-mark)"/>'
LEGEND = (
    ("tokens", _FULL, "holds tokens, in its request's colour"),
    (
        "partial",
        '<rect x="1" y="1" width="16" height="16" fill="#0072B2" opacity=".3"/>'
        '<rect x="1" y="11" width="16" height="6" fill="#0072B2"/>',
        "partly filled",
    ),
    (
        "shared",
        _FULL + '<circle cx="9" cy="9" r="4" fill="var(--shared)" stroke="var(--shared-edge)"/>',
        "shared: more than one table names it",
    ),
    (
        "copied",
        _FULL + '<rect x="2" y="2" width="14" height="14" fill="none" stroke="var(--ink)" stroke-width="3"/>',
        "just copied (dashed line: from where)",
    ),
    (
        "idle",
        '<rect x="1" y="1" width="16" height="16" fill="var(--idle)"/><path d="M3 9H15" stroke="var(--idle-mark)"/>',
        "cached, idle",
    ),
    ("reserved", '<rect x="1" y="1" width="16" height="16" fill="#0072B2" opacity=".35"/>', "reserved, to be filled"),
    (
        "unused",
        f'<rect x="1" y="1" width="16" height="16" fill="var(--unused)"/>{_HATCH}',
        "reserved, never used (internal fragmentation)",
    ),
    (
        "ended",
        f'<rect x="1" y="1" width="16" height="16" fill="#0072B2" opacity=".35"/>{_HATCH}',
        "held by an ended request until its batch ends",
    ),
    (
        "rounding",
        '<rect x="1" y="1" width="16" height="16" fill="var(--rounding)"/>'
        '<path d="M1 6L12 17M4 1L17 14M11 1L17 7" stroke="var(--unused-mark)"/>',
        "rounding by the buddy placement",
    ),
    ("free", '<rect x="1" y="1" width="16" height="16" fill="var(--free)"/>', "free"),
    ("hole", '<rect x="1" y="1" width="16" height="16" fill="var(--free)"/>', "free: a hole between regions"),
)


def _pictures(images: Mapping[str, bytes], captions: Mapping[str, str]) -> str:
    figures = "".join(
        f'<figure><img alt="{_text(captions[name])}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        f"<figcaption>{_text(captions[name])}</figcaption></figure>"
        for name, image in images.items()
    )
    return f'<div class="plots">{figures}</div>' if figures else ""


def _run_pictures(result: RunResult, folder: Path | None, draw_missing: bool) -> dict[str, bytes]:
    drawable = [name for name in PICTURES if (result.request_columns if name == "latency" else result.step_columns)]
    found = _read_pictures(folder, drawable)
    if found or not draw_missing or not drawable:
        return found
    from kvsim.report.plots import write_run_plots

    with tempfile.TemporaryDirectory() as temporary:
        write_run_plots(result.steps, result.requests, result.summary, temporary)
        return _read_pictures(Path(temporary), drawable)


def _compare_pictures(runs: Mapping[str, RunResult], folder: Path | None, draw_missing: bool) -> dict[str, bytes]:
    found = _read_pictures(folder, COMPARE_PICTURES)
    if found or not draw_missing:
        return found
    from kvsim.report.plots import write_compare_plots

    with tempfile.TemporaryDirectory() as temporary:
        write_compare_plots(CompareResult(dict(runs)).table, temporary)
        return _read_pictures(Path(temporary), COMPARE_PICTURES)


def _read_pictures(folder: Path | None, names: Iterable[str]) -> dict[str, bytes]:
    """The pictures of a folder; none unless all are there."""
    if folder is None:
        return {}
    paths = {name: folder / f"{name}.png" for name in names}
    if not all(path.is_file() for path in paths.values()):
        return {}
    return {name: path.read_bytes() for name, path in paths.items()}


def _scenario(folder: Path | None) -> str:
    if folder is None or not (folder / "scenario.yaml").is_file():
        return ""
    text = (folder / "scenario.yaml").read_text("utf-8")
    intro = "<p>Every value, and where it came from. Running this file gives the same results.</p>"
    return _section(
        "The resolved scenario", f"{intro}<details><summary>scenario.yaml</summary><pre>{_text(text)}</pre></details>"
    )


def _put(path: Path, text: str) -> Path:
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return path
