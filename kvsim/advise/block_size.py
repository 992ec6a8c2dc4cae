"""Which block size: each one simulated with the same memory and workload."""

from __future__ import annotations

from kvsim.advise.answer import Answer, Table, interval, more_seeds, percent, shown
from kvsim.advise.estimate import MATERIAL, MAX_SEEDS, Estimate, is_surely_above, seeds_needed
from kvsim.advise.lab import Lab, Runs, Values
from kvsim.advise.sharing import ideal_hits
from kvsim.advise.workload import endless_blocks
from kvsim.cost.page_size import block_size_factor
from kvsim.result import share

QUESTION = "Which block size?"
SIZES = (8, 16, 32, 64, 128)
RULES = (("short chats", (16, 32)), ("general use", (32, 64)), ("long texts", (64, 128)))
"""What practitioners say."""


def best_block_size(lab: Lab) -> Answer:
    """Sizes that are not measurably worse than the best are equally good; of these the kernel's favourite is taken."""
    lab.topic = "block size"
    trials = dict(zip(SIZES, lab.try_out([_values(lab, size) for size in SIZES]), strict=True))
    trials = {size: runs for size, runs in trials.items() if not runs.error}
    if not trials:
        return Answer("block_size", QUESTION, "cannot be asked: this allocator takes no such block sizes")
    best = max(trials, key=lambda size: (trials[size].attainment.mean, -trials[size].mean("mean_e2el_ms").mean))
    good = [size for size in trials if not _is_worse(trials, size, best, _is_priced(lab))]
    chosen = min(good, key=lambda size: (block_size_factor(size).factor, -trials[size].mean("block_utilization").mean))
    doubts = {size: gain for size in good if (gain := _slower(trials, size, best)) and _is_doubtful(gain)}
    shared, hits = _prefixes(lab, tuple(trials))
    return Answer(
        "block_size",
        QUESTION,
        _verdict(chosen, good, list(trials), doubts),
        tuple(_lines(lab, trials, best, good, doubts)),
        tuple(_warnings(lab, hits, shared)),
        _table(trials, hits, trials[best]),
        figures={
            "recommended": chosen,
            "as_good": good,
            "latency_against_best": {
                str(size): interval(runs.gain_over(trials[best], "mean_e2el_ms")) for size, runs in trials.items()
            },
            "block_utilization": {str(size): interval(runs.mean("block_utilization")) for size, runs in trials.items()},
            "prefix_hit_share_endless": {str(size): value for size, value in hits.items()},
            "kernel_factor_against_64": {str(size): block_size_factor(size)._asdict() for size in trials},
            "kernel_is_priced": _is_priced(lab),
        },
        runs=tuple(number for runs in trials.values() for number in runs.numbers),
        curves={"trials": trials, "best": best},
    )


def _values(lab: Lab, size: int) -> Values:
    """The same memory in blocks of another size."""
    values: dict[str, object] = {"allocator.block_size": size}
    if lab.base.scenario.memory.num_gpu_blocks_override is not None:
        values["memory.num_gpu_blocks_override"] = max(1, lab.pool.num_slots // size)
    return values


def _is_worse(trials: dict[int, Runs], size: int, best: int, is_priced: bool) -> bool:
    """Slower beyond doubt, and by more than the kernel makes up for where its side is not priced."""
    if size == best:
        return False
    kernel = 1.0 if is_priced else block_size_factor(best).factor / block_size_factor(size).factor
    latency = "mean_e2el_ms"
    return is_surely_above(trials[size].values(latency), trials[best].values(latency), max(0.0, kernel - 1))


def _prefixes(lab: Lab, sizes: tuple[int, ...]) -> tuple[float, dict[int, float]]:
    """Share of prompt tokens that could be found if blocks were single tokens, and that each block size finds.

    Both with an endless cache: what the block size alone costs. Empty where prompts share nothing.
    """
    shared = ideal_hits(lab)
    if not shared:
        return 0.0, {}
    (own,) = lab.try_out([{}])
    variants = [
        {
            "allocator.block_size": size,
            "allocator.enable_prefix_caching": True,
            "memory.num_gpu_blocks_override": endless_blocks(lab.base, own, size),
        }
        for size in sizes
    ]
    found = lab.try_out(variants, lab.seeds[:1])
    return shared, {size: runs.hit_share for size, runs in zip(sizes, found, strict=True) if not runs.error}


def _is_doubtful(slower: Estimate) -> bool:
    """Whether a size that is not surely worse than the best may still be, by as much as would matter."""
    return slower.high > MATERIAL


def _verdict(chosen: int, good: list[int], tried: list[int], doubts: dict[int, Estimate]) -> str:
    others = [size for size in good if size != chosen and size not in doubts]
    worse = [size for size in tried if size not in good]
    if len(good) == len(tried) and not doubts:
        return f"any of {', '.join(map(str, tried))} is as fast; {chosen} suits the kernel best"
    text = str(chosen)
    if chosen in doubts:
        text += ", which suits the kernel best, if it is no slower"
    if others:
        text += f"; no worse here: {', '.join(map(str, others))}"
    text += f"; slower: {', '.join(map(str, worse))}" if worse else ""
    return text + (f"; {_doubt(doubts)}" if doubts else "")


def _doubt(doubts: dict[int, Estimate]) -> str:
    """Which sizes may be slower, and the seeds that the most doubtful of them would take."""
    hardest = max(doubts.values(), key=lambda slower: seeds_needed(slower) or MAX_SEEDS + 1)
    sizes = ", ".join(f"{size} ({percent(slower)})" for size, slower in doubts.items())
    return f"slower or not: {sizes}: {more_seeds(hardest)}"


def _lines(lab: Lab, trials: dict[int, Runs], best: int, good: list[int], doubts: dict[int, Estimate]) -> list[str]:
    lines = []
    for kind, sizes in RULES:
        known = [size for size in sizes if size in trials]
        bad = [size for size in known if size not in good]
        said = f"practitioners' {'/'.join(map(str, sizes))} for {kind}: "
        if not bad:
            unsure = " as far as these seeds tell" if any(size in doubts for size in known) else ""
            lines.append(f"{said}as good as the best for this workload{unsure}")
        else:
            losses = ", ".join(f"{size} is slower by {percent(_slower(trials, size, best))}" for size in bad)
            lines.append(said + ("refuted for this workload: " if len(bad) == len(known) else "half right: ") + losses)
    if _is_priced(lab):
        lines.append("the kernel's preference is priced at its central value; its range is in the table")
    else:
        lines.append(
            f"the kernel side is not priced by cost {getattr(lab.base.scenario.cost, 'type', 'of your own')}: the "
            "table has what is published; of sizes that are equally good, the kernel's favourite is taken"
        )
    return lines


def _slower(trials: dict[int, Runs], size: int, best: int) -> Estimate | None:
    return trials[size].gain_over(trials[best], "mean_e2el_ms")


def _is_priced(lab: Lab) -> bool:
    return getattr(lab.base.scenario.cost, "type", "") == "kernels"


def _warnings(lab: Lab, hits: dict[int, float], shared: float) -> list[str]:
    own = lab.pool.block_size
    blind = [size for size, value in hits.items() if value == 0]
    if not blind:
        return []
    text = f"prompts share their beginnings ({share(shared)} of the prompt tokens), but for less than a block of "
    here = f": the scenario's block size is {own}" if own in blind else ""
    return [text + f"{', '.join(map(str, blind))}: a prefix cache with such blocks finds nothing{here}"]


def _table(trials: dict[int, Runs], hits: dict[int, float], best: Runs) -> Table:
    rows = []
    for size, runs in trials.items():
        factor = block_size_factor(size)
        swapped = [out + back for out, back in zip(*map(runs.values, _SWAPPED), strict=True)]
        rows.append(
            (
                str(size),
                share(runs.mean("block_utilization").mean),
                "best" if runs is best else percent(runs.gain_over(best, "mean_e2el_ms")),
                share(runs.attainment.mean),
                shown(runs.mean("num_preemptions")),
                share(runs.hit_share) + (f" / {share(hits[size])}" if size in hits else ""),
                shown(runs.mean("num_cow_copies")),
                f"{sum(swapped) / len(swapped):,.0f}",
                f"{factor.factor:.3f} ({factor.low:.2f}-{factor.high:.2f})",
            )
        )
    header = ("block", "filled", "latency", "meet SLO", "preempted", "prefix hits", "copies", "swapped", "kernel x")
    return Table(header, tuple(rows))


_SWAPPED = ("num_swapped_out_blocks", "num_swapped_in_blocks")
