"""Is paging worth it: the KV demand, and the measured gain over contiguous reservation."""

from __future__ import annotations

from kvsim.advise.answer import Answer, Table, effect, interval, more_seeds, percent, shown
from kvsim.advise.estimate import MATERIAL, MAX_SEEDS, Estimate, estimate, is_surely_above, ratio, seeds_needed
from kvsim.advise.lab import Lab, Runs
from kvsim.cost.page_size import block_size_factor
from kvsim.result import share, text_of

QUESTION = "Is paging worth it?"
CONTIGUOUS = {"orca-max": "max", "orca-pow2": "pow2", "orca-oracle": "oracle"}
REAL = ("orca-max", "orca-pow2")
"""What an engine can do that does not know how long an answer gets."""
METRICS = (("output_throughput", 1), ("mean_e2el_ms", -1))
"""What a gain is, and whether more or less of it is better."""
LOST = {"output_throughput": "throughput", "mean_e2el_ms": "latency"}
"""What a gain in the other one may cost."""


def is_paging_worth_it(lab: Lab) -> Answer:
    """Yes if the gain over the best real reservation is surely above what paging may cost the kernel, no if not."""
    lab.topic = "paging"
    paged, *others = lab.try_out([{}, *({"engine": engine} for engine in CONTIGUOUS)])
    rivals = {engine: runs for engine, runs in zip(CONTIGUOUS, others, strict=True) if not runs.error}
    if paged.error or not any(engine in rivals for engine in REAL):
        reason = paged.error or next(runs.error for runs in others if runs.error)
        return Answer("paging", QUESTION, f"no comparison: {reason}", runs=paged.numbers)
    rival = _best_real(rivals)
    gains = {name: _gain(paged, rivals[rival], name, sign) for name, sign in METRICS}
    price = block_size_factor(lab.pool.block_size).high - 1
    is_worth = _is_worth(paged, rivals[rival], gains, price)
    return Answer(
        "paging",
        QUESTION,
        _verdict(is_worth, rival, gains, price),
        (*_demand(lab, paged), _price(price, is_worth, lab.pool.block_size), _against_oracle(paged, rivals)),
        table=_table(paged, rivals),
        figures={
            "is_worth_it": is_worth,
            "best_contiguous": rival,
            "gain": {name: interval(gain) for name, gain in gains.items()},
            "price": price,
            "concurrency": interval(paged.mean("running_mean")),
            "mean_tokens": interval(_mean_tokens(lab, paged)),
            "demand_gib": interval(_demand_gib(lab, paged)),
            "gains": {
                engine: {name: interval(_gain(paged, runs, name, sign)) for name, sign in METRICS}
                for engine, runs in rivals.items()
            },
        },
        runs=tuple(number for runs in (paged, *rivals.values()) for number in runs.numbers),
        curves={"paged": paged, "rivals": rivals},
    )


def _is_worth(paged: Runs, rival: Runs, gains: dict[str, Estimate | None], price: float) -> bool | None:
    """None where the seeds do not tell."""
    if any(is_surely_above(*_sides(paged, rival, name, sign), margin=price) for name, sign in METRICS):
        return True
    return None if any(_may_exceed(gain, price) for gain in gains.values()) else False


def _may_exceed(gain: Estimate | None, price: float) -> bool:
    """Whether the interval of a gain reaches so far above the price that it would matter."""
    return gain is not None and gain.high - price > MATERIAL


def _best_real(rivals: dict[str, Runs]) -> str:
    return max(
        (engine for engine in REAL if engine in rivals),
        key=lambda engine: (rivals[engine].mean("completed").mean, -rivals[engine].mean("mean_e2el_ms").mean),
    )


def _gain(paged: Runs, other: Runs, name: str, sign: int) -> Estimate | None:
    """How much better paged is: more throughput, or the other's latency above ours."""
    return ratio(*_sides(paged, other, name, sign))


def _sides(paged: Runs, other: Runs, name: str, sign: int) -> tuple[list[float], list[float]]:
    better, worse = (paged, other) if sign > 0 else (other, paged)
    return better.values(name), worse.values(name)


def _verdict(is_worth: bool | None, rival: str, gains: dict[str, Estimate | None], price: float) -> str:
    figures = f"{percent(gains['output_throughput'])} output throughput"
    latency = gains["mean_e2el_ms"]
    answer = "yes" if is_worth else "no" if is_worth is not None else _unclear(gains, price)
    if is_worth and (lost := [name for name, gain in gains.items() if gain is not None and gain.high < -MATERIAL]):
        answer += f", at the cost of {LOST[lost[0]]}"
    slower = f"{percent(latency)} longer"
    if latency is not None and latency.high < 0:
        slower = f"{percent(latency._replace(mean=-latency.mean)).lstrip('+')} less time"
    return f"{answer}: {figures} over contiguous {CONTIGUOUS[rival]}, under which requests take {slower}"


def _unclear(gains: dict[str, Estimate | None], price: float) -> str:
    """With the number of seeds by which the first gain would show, or else the last doubt be gone."""
    doubtful = [gain for gain in gains.values() if gain is not None and _may_exceed(gain, price)]
    hopeful = [gain for gain in doubtful if gain.mean > price]
    ranked = sorted(hopeful or doubtful, key=lambda gain: seeds_needed(gain, price) or MAX_SEEDS + 1)
    return more_seeds(ranked[0] if hopeful else ranked[-1], price)


def _demand(lab: Lab, paged: Runs) -> list[str]:
    concurrency, tokens = paged.mean("running_mean"), _mean_tokens(lab, paged)
    reserved = lab.pool.max_model_len
    lines = [
        f"KV demand: {shown(concurrency)} requests at once x {shown(tokens)} tokens = "
        f"{shown(_demand_gib(lab, paged), 'GiB')} on average, of {text_of(_capacity_gib(lab))} GiB"
    ]
    if getattr(lab.base.scenario.allocator, "enable_prefix_caching", False):
        lines.append("prefix caching, which contiguous memory cannot have, is part of the gain")
    if reserved is not None:
        gib = concurrency.mean * reserved * lab.pool.bytes_per_token / 2**30
        lines.append(f"reserving {reserved:,} tokens for each of them would take {text_of(gib)} GiB")
    return lines


def _mean_tokens(lab: Lab, paged: Runs) -> Estimate:
    slots = lab.pool.num_usable_slots
    pairs = zip(paged.values("kv.token_states"), paged.values("running_mean"), strict=True)
    return estimate([filled * slots / running if running else 0.0 for filled, running in pairs])


def _demand_gib(lab: Lab, paged: Runs) -> Estimate:
    return estimate([filled * _capacity_gib(lab) for filled in paged.values("kv.token_states")])


def _capacity_gib(lab: Lab) -> float:
    return lab.pool.num_usable_slots * lab.pool.bytes_per_token / 2**30


def _price(price: float, is_worth: bool | None, block_size: int) -> str:
    relation = "above" if is_worth else "not above" if is_worth is not None else "not surely above"
    return (
        f"the gain is {relation} the price: kernels that read blocks of {block_size} are up to {share(price)} slower "
        "in published measurements"
    )


def _against_oracle(paged: Runs, rivals: dict[str, Runs]) -> str:
    oracle = rivals.get("orca-oracle")
    if oracle is None:
        return "the oracle, which knows every length, could not be run"
    gain = effect(_gain(paged, oracle, "output_throughput", 1))
    return f"against an oracle that knows every length in advance: {gain} output throughput"


def _table(paged: Runs, rivals: dict[str, Runs]) -> Table:
    rows = [("paged", paged), *((f"contiguous {CONTIGUOUS[engine]}", runs) for engine, runs in rivals.items())]
    return Table(
        ("memory", "at once", "output tok/s", "mean E2E ms", "meet the SLO", "rejected", "throughput of paged"),
        tuple(
            (
                name,
                shown(runs.mean("running_mean")),
                shown(runs.mean("output_throughput")),
                shown(runs.mean("mean_e2el_ms")),
                share(runs.attainment.mean),
                text_of(runs.mean("num_rejected").mean),
                "" if runs is paged else percent(_gain(paged, runs, "output_throughput", 1)),
            )
            for name, runs in rows
        ),
    )
