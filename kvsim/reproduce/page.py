"""The generated page: every figure by its number, how near we come, and what makes the difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.reproduce import engine2023, fig18, fig19, recipe
from kvsim.reproduce.figure import Row
from kvsim.reproduce.published import published
from kvsim.reproduce.remarks import REMARKS, Tables, number
from kvsim.reproduce.sustained import BOUND_S, LATENCY, RATE
from kvsim.reproduce.table import INPUT

if TYPE_CHECKING:
    from kvsim.reproduce.run import Reproduction


CURVES = (LATENCY, RATE, fig18.LATENCY, fig19.COST)
"""Quantities of which a figure has many points: those are in its CSV and its picture."""


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows to read: all but the points of curves."""
    return [row for row in rows if row.paper or row.quantity not in CURVES]


def sentence(rows: Sequence[Row]) -> str:
    """How near the figure is, counted against the bars that were set before it was run."""
    verdicts = [
        (row, published().get(row[:4])) for row in rows if row.paper and row.ours is not None and row.mark != INPUT
    ]
    judged = [(row, entry, bool(entry.is_met(row.ours or 0.0))) for row, entry in verdicts if entry and entry.bar]
    parts = []
    if judged:
        met = sum(is_met for *_, is_met in judged)
        parts.append(f"{met} of {len(judged)} values lie within their bar.")
        missed = ((row, entry) for row, entry, is_met in judged if not is_met)
        parts += [f"Missed: {_side_by_side(row)} (bar {entry.bar})." for row, entry in missed]
    others = [row for row, entry in verdicts if entry and not entry.bar]
    if others:
        parts.append("Without a bar: " + "; ".join(map(_side_by_side, others)) + ".")
    inputs = [row for row in rows if row.mark == INPUT and row.paper]
    if inputs:
        parts.append("Input, not predicted: " + "; ".join(map(_side_by_side, inputs)) + ".")
    return " ".join(parts) or f"{len(rows)} values of ours; nothing published to compare with."


def _side_by_side(row: Row) -> str:
    return f"{row.series} {row.x} {row.quantity}: paper {row.paper.replace('..', ' to ')}, kvsim {number(row.ours)}"


def page(found: Reproduction) -> str:
    """The whole page, as Markdown."""
    from kvsim.reproduce.run import FIGURES

    parts = [_head(found), _recipe(), _overview(found.tables)]
    for name, rows in found.tables.items():
        figure = FIGURES[name]
        parts.append(f"## {figure.title}\n\n{figure.text}\n\n**{sentence(rows)}**\n")
        remarks = REMARKS.get(name)
        if remarks is not None:
            parts.append(remarks(found.tables) + "\n")
        parts.append(
            f"![{figure.title}]({name}.png)\n\n{_markdown(compared(rows))}\n\nAll values: [{name}.csv]({name}.csv)\n"
        )
    return "\n".join(parts)


def _head(found: Reproduction) -> str:
    command = "kvsim reproduce all" + (" --quick" if found.quick else "")
    return (
        "# The PagedAttention paper, re-run\n\n"
        "Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023: "
        f"its figures by number, published values beside simulated ones. Made by `{command}`; no GPU was needed.\n\n"
        "Marks: **S** the value stands in the paper's text; **M** it comes from secondary sources and fits the rest by "
        "arithmetic; **illustration** the workload's lengths are not public, ours are stand-ins; **input** the value "
        "was used.\n"
    )


def _recipe() -> str:
    lengths = "; ".join(f"{name} {prompt:g} / {output:g}" for name, (prompt, output) in recipe.MEAN_LENGTHS.items())
    return (
        "## Recipe\n\n"
        "Inputs; everything else on this page is a prediction.\n\n"
        f"* **Lengths**: real (prompt, output) pairs, as quantile tables with their correlation, scaled so that the "
        f"means are the published ones with pairs above {recipe.MAX_MODEL_LEN:,} tokens dropped ({lengths}).\n"
        f"* **Memory**: OPT-13B with 12 GiB of KV, 800 KiB a token: 15,728 slots; blocks of 16; OPT-66B 21 GiB, "
        "OPT-175B 264 GiB (Table 1).\n"
        "* **Arrivals**: Poisson, or all at once where the memory at saturation is asked for.\n"
        "* **Orca**: iteration-level batching over contiguous regions (maximum; output rounded up to a power of two; "
        "exact) from a buddy allocator over the 15,728 slots.\n"
        "* **vLLM**: the engine of the releases of autumn 2023: prompt steps apart from decode steps, recompute for "
        "single sequences and swap for groups, watermark of 1 %. The paper's section 4.3 describes prompts and decodes "
        "in one step; Figures 12 and 14 are also run so.\n"
        f"* **Step time**: kernels of the A100 profile (an 80 GB card), {engine2023.STEP_OVERHEAD_US:g} us per step "
        f"and {engine2023.SEQUENCE_OVERHEAD_US:g} us per running sequence. The two overheads are fitted to two "
        "published figures of vLLM 0.1 and 0.2 with LLaMA-7B (11.19 and 11.48 ms a token at batch 1; 5.99 requests/s "
        "for 1000 ShareGPT requests at once), none of them from the paper. The card's size is not stated there; with "
        "80 GB the second overhead would be about 400 us. Every engine pays the same.\n"
        f"* **Beam search**: the one parameter of the beam model is set by Figure 15's points at width 2: theta = "
        f"{recipe.BEAM_THETA['alpaca']:g} for Alpaca, {recipe.BEAM_THETA['sharegpt']:g} for ShareGPT.\n"
        f"* **Sustained rate**: where mean latency / output tokens passes {BOUND_S:g} s.\n"
        f"* Seed {recipe.SEED} everywhere: the same command gives the same bytes.\n"
    )


def _overview(tables: Tables) -> str:
    from kvsim.reproduce.run import FIGURES

    lines = [f"| {FIGURES[name].title.partition(':')[0]} | {sentence(rows)} |" for name, rows in tables.items()]
    return "## How near\n\n| figure | |\n|---|---|\n" + "\n".join(lines) + "\n"


def _markdown(rows: Sequence[Row]) -> str:
    lines = ["| series | x | quantity | paper | kvsim | difference | mark |", "|---|---|---|---:|---:|---:|---|"]
    lines += [
        f"| {row.series} | {row.x} | {row.quantity} | {row.paper.replace('..', ' to ') or '–'} | {number(row.ours)} | "
        f"{number(row.difference)} | {row.mark} |"
        for row in rows
    ]
    return "\n".join(lines)
