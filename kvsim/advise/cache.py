"""The smallest KV cache that serves the workload at the SLO; head-room and watermark, tried out."""

from __future__ import annotations

import math

from kvsim.advise.answer import Answer, Table, interval, more_seeds, shown
from kvsim.advise.estimate import Estimate, estimate, next_run_at_most
from kvsim.advise.lab import SLO_SHARE, Lab, Run, Runs, Values, peak_work
from kvsim.advise.rate import RateAnswer
from kvsim.advise.search import Scale, search
from kvsim.advise.workload import endless_blocks
from kvsim.result import share, text_of

QUESTION = "How small may the KV cache be?"
KEY = "memory.num_gpu_blocks_override"
HEAD_ROOM = 1.2
"""The rule that is checked: measure the peak, and leave 20 %."""
TOO_SMALL = 0.8
"""Where the check expects the SLO to be missed."""
WATERMARKS = (0.0, 0.01, 0.05, 0.1)


def smallest_cache(lab: Lab, slo: str, rate: RateAnswer) -> Answer:
    """Bisect the number of blocks for each seed, at the scenario's rate if that can be served at all."""
    lab.topic = "cache"
    (own,) = lab.try_out([{}])
    if own.error:
        return Answer("cache", QUESTION, f"cannot be asked: {own.error}", runs=own.numbers)
    endless = endless_blocks(lab.base, own, lab.pool.block_size)
    load: Values = {}
    (unbounded,) = lab.try_out([{KEY: endless}])
    note = "at the scenario's own rate"
    if not all(run.meets_slo for run in unbounded.runs):
        if rate.recommended is None or rate.knob is None:
            return _none(unbounded, slo)
        load = rate.knob.values_of(rate.recommended)
        note = f"at {text_of(rate.recommended)} {rate.knob.unit}: at the scenario's own rate no cache is large enough"
    scale = Scale(lambda blocks: {**load, KEY: int(blocks)}, 1, endless, better=1, is_whole=True)
    found, made = search(lab, scale, lab.pool.num_blocks)
    needed = [blocks for blocks in found.values() if blocks is not None]
    if len(needed) < len(found):
        return _none(unbounded, slo)
    return _Sized(lab, load, needed, endless, note, slo).answer(made)


class _Sized:
    """The limits are known: recommend, check, and compare with the rules."""

    def __init__(self, lab: Lab, load: Values, needed: list[float], endless: int, note: str, slo: str) -> None:
        self.lab = lab
        self.load = load
        self.needed = needed
        self.endless = endless
        self.note = note
        self.slo = slo
        self.blocks = math.ceil(next_run_at_most(needed))
        self.block_bytes = lab.pool.block_size * lab.pool.bytes_per_token

    def answer(self, searched: list[Run]) -> Answer:
        lab = self.lab
        inside, below = lab.try_out(
            [self._with(self.blocks), self._with(math.floor(self.blocks * TOO_SMALL))], lab.other_seeds
        )
        peak, ruled = self._head_room()
        marks = lab.try_out([self._with(self.blocks) | {"allocator.watermark": mark} for mark in WATERMARKS])
        limit = estimate([blocks * self.block_bytes / 2**30 for blocks in self.needed])
        lines = [
            f"{self.note}; the limit is {shown(limit, 'GiB')} over {len(self.needed)} seeds; SLO: {self.slo} for "
            f"{share(SLO_SHARE)} of the requests",
            f"checked with {len(inside.runs)} other seeds: {share(inside.attainment.mean)} of the requests meet it, "
            f"{share(below.attainment.mean)} with {TOO_SMALL:g} of that cache",
            self._rule(peak, ruled),
            _watermark_line(marks),
        ]
        numbers = [run.number for run in searched]
        numbers += [number for runs in (inside, below, *ruled, *marks) for number in runs.numbers]
        return Answer(
            "cache",
            QUESTION,
            f"{self._size(self.blocks)}; the scenario has {self._size(lab.pool.num_blocks)}"
            + (f"; the limit itself: {more_seeds(limit)}" if limit.low <= 0 else ""),
            tuple(lines),
            table=_watermark_table(marks),
            figures={
                "recommended_blocks": self.blocks,
                "recommended_bytes": self.blocks * self.block_bytes,
                "limit_gib": interval(limit),
                "limits_blocks": [int(blocks) for blocks in self.needed],
                "load": dict(self.load),
                "peak_blocks": interval(peak),
                "head_room_over_peak": self.blocks / peak.mean if peak is not None and peak.mean else None,
                "rule_attainment": [runs.attainment.mean for runs in ruled],
                "checked": {"recommended": inside.attainment.mean, "below": below.attainment.mean, "factor": TOO_SMALL},
            },
            runs=tuple(dict.fromkeys(numbers)),
            curves={"tried": searched, "block_bytes": self.block_bytes, "recommended": self.blocks, "key": KEY},
        )

    def _with(self, blocks: int) -> dict[str, object]:
        return {**self.load, KEY: max(1, blocks)}

    def _head_room(self) -> tuple[Estimate | None, tuple[Runs, ...]]:
        """The most that is in use at once where space is endless, and what 1.2 times that gives."""
        (unbounded,) = self.lab.try_out([self._with(self.endless)], worker=peak_work)
        if unbounded.error:
            return None, ()
        peak = unbounded.mean("peak_blocks")
        ruled = self.lab.try_out([self._with(math.ceil(peak.mean)), self._with(math.ceil(HEAD_ROOM * peak.mean))])
        return peak, tuple(ruled)

    def _rule(self, peak: Estimate | None, ruled: tuple[Runs, ...]) -> str:
        if peak is None:
            return "the 20 % rule was not checked: the peak is not known for this allocator"
        exact, roomy = ruled
        spare = self.blocks / peak.mean - 1
        if spare < 0:
            verdict = f"{share(-spare)} less than the peak is enough: the rule wastes memory here"
        elif spare <= HEAD_ROOM - 1:
            verdict = f"{share(spare)} above the peak are needed: the rule holds"
        else:
            verdict = f"{share(spare)} above the peak are needed: the rule falls short"
        return (
            f"the rule of 20 % above the measured peak: the peak is {self._size(math.ceil(peak.mean))} where space is "
            f"endless; {share(exact.attainment.mean)} meet the SLO with that, {share(roomy.attainment.mean)} with 20 % "
            f"more; {verdict}"
        )

    def _size(self, blocks: int) -> str:
        return f"{text_of(blocks * self.block_bytes / 2**30)} GiB ({blocks:,} blocks of {self.lab.pool.block_size})"


def _watermark_line(marks: list[Runs]) -> str:
    if any(runs.error for runs in marks):
        return "watermarks were not compared: this allocator has none"
    none, most = marks[0], marks[-1]
    before, after = none.mean("num_preemptions"), most.mean("num_preemptions")
    if before.mean == 0 and after.mean == 0:
        return "there is no preemption at this size, with a watermark or without"
    best = max(range(len(marks)), key=lambda index: marks[index].attainment.mean)
    name = "num_preemptions"
    fewer = estimate([a - b for a, b in zip(none.values(name), most.values(name), strict=True)])
    doubt = f" ({more_seeds(fewer)})" if fewer.low <= 0 <= fewer.high else ""
    return (
        f"a watermark of {WATERMARKS[-1]:g} takes preemptions from {shown(before)} to {shown(after)}{doubt}; most "
        f"requests meet the SLO with {WATERMARKS[best]:g}"
    )


def _watermark_table(marks: list[Runs]) -> Table | None:
    if any(runs.error for runs in marks):
        return None
    return Table(
        ("watermark", "preemptions", "recomputed tokens", "mean TTFT ms", "meet the SLO"),
        tuple(
            (
                f"{mark:g}",
                shown(runs.mean("num_preemptions")),
                shown(runs.mean("num_recomputed_tokens")),
                shown(runs.mean("mean_ttft_ms")),
                share(runs.attainment.mean),
            )
            for mark, runs in zip(WATERMARKS, marks, strict=True)
        ),
    )


def _none(unbounded: Runs, slo: str) -> Answer:
    return Answer(
        "cache",
        QUESTION,
        f"no cache is large enough: with endless memory {share(unbounded.attainment.mean)} meet the SLO ({slo})",
        figures={"recommended_blocks": None, "endless_attainment": unbounded.attainment.mean},
        runs=unbounded.numbers,
    )
