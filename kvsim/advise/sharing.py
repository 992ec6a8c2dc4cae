"""What sharing saves: copy-on-write between the sequences of a request, and prefixes between requests."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.advise.answer import Answer, effect, interval, more_seeds, shown
from kvsim.advise.estimate import MATERIAL, Estimate, estimate
from kvsim.advise.lab import Lab, Runs, Values
from kvsim.advise.workload import endless_blocks
from kvsim.result import share

QUESTION = "What does sharing save?"
CACHING = "allocator.enable_prefix_caching"
BLOCKS = "memory.num_gpu_blocks_override"


def sharing_saves(lab: Lab) -> Answer:
    """Runs without and with prefix caching, now and with an endless cache, and what copy-on-write shares."""
    lab.topic = "sharing"
    (own,) = lab.try_out([{}])
    endless = endless_blocks(lab.base, own, lab.pool.block_size)
    variants: list[Values] = [{CACHING: False}, {CACHING: True}, {CACHING: True, BLOCKS: endless}]
    off, on, unbounded = lab.try_out(variants)
    forks, prefix = _forks(own if off.error else off), _prefixes(lab, off, on, unbounded)
    return Answer(
        "sharing",
        QUESTION,
        f"{forks.verdict}; {prefix.verdict}",
        (*forks.lines, *prefix.lines),
        figures=forks.figures | prefix.figures,
        runs=tuple(dict.fromkeys(number for runs in (own, off, on, unbounded) for number in runs.numbers)),
        curves={"off": off, "on": on, "endless": unbounded} if not prefix.is_refused else {},
    )


@dataclass(frozen=True)
class _Part:
    """What one kind of sharing adds to the answer."""

    verdict: str
    lines: list[str]
    figures: dict[str, object]
    is_refused: bool = False


def _forks(runs: Runs) -> _Part:
    """Sequences of one request, no prefix cache: what is shared is shared copy-on-write."""
    saving, copies = runs.mean("sharing_saving"), runs.mean("num_cow_copies")
    figures: dict[str, object] = {"cow_saving": interval(saving), "cow_copies": interval(copies)}
    if saving.mean == 0:
        return _Part("copy-on-write: nothing, every request is one sequence", [], figures)
    line = (
        f"copy-on-write: without sharing the same sequences would hold {_times(saving)} the blocks; "
        f"{shown(copies)} blocks were copied for it"
    )
    doubt = f" ({more_seeds(saving)} how much)" if saving.low <= 0 else ""
    return _Part(f"copy-on-write saves {_share(saving)} of the blocks{doubt}", [line], figures)


def _prefixes(lab: Lab, off: Runs, on: Runs, unbounded: Runs) -> _Part:
    if error := off.error or on.error or unbounded.error:
        return _Part("prefix caching: not possible with this engine", [error], {"prefix_error": error}, is_refused=True)
    now, most = _hits(on), _hits(unbounded)
    figures: dict[str, object] = {"prefix_hit_share": interval(now), "prefix_hit_share_endless": interval(most)}
    if most.mean == 0:
        shared = ideal_hits(lab)
        why = f"they share {share(shared)} of their tokens, in less than a block" if shared else "no two begin alike"
        return _Part(f"prefix caching finds nothing in these prompts: {why}", [], figures)
    ttft, speed = on.gain_over(off, "mean_ttft_ms"), on.gain_over(off, "output_throughput")
    ideal = unbounded.gain_over(off, "mean_ttft_ms")
    figures |= {
        "ttft_change": interval(ttft),
        "ttft_change_endless": interval(ideal),
        "throughput_change": interval(speed),
    }
    lines = [
        f"prefix caching now: {_share(now)} of the prompt tokens are found; mean TTFT {effect(ttft)}, output "
        f"throughput {effect(speed)}",
        f"with an endless cache: {_share(most)} are found, mean TTFT {effect(ideal)}: {_larger_cache(on, unbounded)}",
    ]
    return _Part(f"prefix caching finds {_share(now)} of the prompt tokens", lines, figures)


def _larger_cache(on: Runs, unbounded: Runs) -> str:
    found = [(a.hit_share, b.hit_share) for a, b in zip(_each(on), _each(unbounded), strict=True)]
    more = estimate([most - now for now, most in found])
    if more.low > 0:
        return "a larger cache would help"
    if more.high <= MATERIAL:
        return "a larger cache would find no more"
    return f"whether a larger cache would help: {more_seeds(more)}"


def _each(runs: Runs) -> list[Runs]:
    return [Runs((run,)) for run in runs.runs]


def _hits(runs: Runs) -> Estimate:
    return estimate([one.hit_share for one in _each(runs)])


def ideal_hits(lab: Lab) -> float:
    """Share of the prompt tokens that an endless cache of single-token blocks would find; 0 where it cannot run."""
    (own,) = lab.try_out([{}], lab.seeds[:1])
    if own.error:
        return 0.0
    values = {"allocator.block_size": 1, CACHING: True, BLOCKS: endless_blocks(lab.base, own, 1)}
    (found,) = lab.try_out([values], lab.seeds[:1])
    return 0.0 if found.error else found.hit_share


def _share(value: Estimate) -> str:
    return f"{100 * value.mean:.1f} ± {100 * value.half_width:.1f} %"


def _times(saving: Estimate) -> str:
    return f"{1 / (1 - saving.mean):.2f} times" if saving.mean < 1 else "many times"
