"""Other laws by which beams could branch, each with one parameter, to be held against Figure 15.

Every law's parameter is set by a single point, Alpaca at width 2. What the law says of the other points, ShareGPT's
among them, is then a prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from kvsim.reproduce.genealogy import Choose, Ints, lengths, saved
from kvsim.reproduce.recipe import SAVED_AT_WIDTH_2, SEED

Floats: TypeAlias = NDArray[np.float64]
MakeChoose: TypeAlias = Callable[[float, int, int, Generator], Choose]
"""(parameter, width, number of requests, generator)"""
Decay: TypeAlias = Callable[[int, Ints], Floats]
"""By how much the chance of branching has fallen: (output tokens, prompt lengths)."""


def _constant(step: int, prompts: Ints) -> Floats:
    return np.ones(len(prompts))


def _output(power: float) -> Decay:
    return lambda step, prompts: np.full(len(prompts), step**-power)


def _text(power: float) -> Decay:
    return lambda step, prompts: np.asarray((prompts + float(step)) ** -power, np.float64)


def scores_of_a_step(decay: Decay, *, differs: bool = False) -> MakeChoose:
    """The model that is used, its theta multiplied by `decay`; `differs`: and by a factor of the request's own."""

    def make(theta: float, width: int, num_requests: int, rng: Generator) -> Choose:
        own = rng.exponential(1.0, num_requests) if differs else np.ones(num_requests)

        def choose(step: int, prompts: Ints) -> Ints:
            spread = theta * decay(step, prompts) * own[: len(prompts)]
            scores = rng.standard_normal((len(prompts), width)) * spread[:, None]
            weights = np.exp(scores - scores.max(1, keepdims=True))
            return _resampled(width * weights / weights.sum(1, keepdims=True), rng)

        return choose

    return make


def _resampled(shares: Floats, rng: Generator) -> Ints:
    """Parents by systematic resampling; the beams stand in random order, so that none is treated by its kin."""
    num_requests, width = shares.shape
    order = np.argsort(rng.random(shares.shape), axis=1)
    upto = np.cumsum(np.take_along_axis(shares, order, 1), axis=1)
    upto = np.clip(np.floor(upto - rng.random((num_requests, 1))) + 1, 0, width)
    upto[:, -1] = width
    places = (upto[:, None, :] <= np.arange(width)[None, :, None]).sum(2)
    return np.sort(np.take_along_axis(order, places, 1), axis=1)


def each_replaced(decay: Decay) -> MakeChoose:
    """Every beam, with a chance, is overtaken by a child of a beam chosen at random."""

    def make(chance: float, width: int, num_requests: int, rng: Generator) -> Choose:
        def choose(step: int, prompts: Ints) -> Ints:
            shape = (len(prompts), width)
            is_hit = rng.random(shape) < chance * decay(step, prompts)[:, None]
            return np.sort(np.where(is_hit, rng.integers(0, width, shape), np.arange(width)), axis=1)

        return choose

    return make


def one_replaced(decay: Decay) -> MakeChoose:
    """With a chance, one beam of the request is overtaken by a child of another."""

    def make(chance: float, width: int, num_requests: int, rng: Generator) -> Choose:
        def choose(step: int, prompts: Ints) -> Ints:
            num = len(prompts)
            parents = np.tile(np.arange(width), (num, 1))
            hit = np.flatnonzero(rng.random(num) < chance * decay(step, prompts))
            dead = rng.integers(0, width, num)
            heir = (dead + rng.integers(1, width, num)) % width
            parents[hit, dead[hit]] = heir[hit]
            return np.sort(parents, axis=1)

        return choose

    return make


Candidates: TypeAlias = Callable[[float, int, tuple[int, int, int], Generator], Floats]
"""(parameter, output tokens, (requests, beams, candidates of a beam), generator): what each candidate adds."""


def accumulated(candidates: Candidates) -> MakeChoose:
    """Beam search itself: each beam proposes `width` candidates, the best `width` sums of log-probabilities survive."""

    def make(parameter: float, width: int, num_requests: int, rng: Generator) -> Choose:
        scores = candidates(parameter, 0, (num_requests, 1, width), rng)[:, 0, :].copy()

        def choose(step: int, prompts: Ints) -> Ints:
            num = len(prompts)
            added = candidates(parameter, step, (num, width, width), rng)
            sums = (scores[:num, :, None] + added).reshape(num, -1)
            best = np.sort(np.argpartition(-sums, width - 1, axis=1)[:, :width], axis=1)
            scores[:num] = np.take_along_axis(sums, best, 1)
            return best // width

        return choose

    return make


def sure_by(power: float) -> Candidates:
    """Log-probabilities of logits whose gaps are exponential, of a mean that grows with the output."""

    def candidates(mean: float, step: int, shape: tuple[int, int, int], rng: Generator) -> Floats:
        logits = -np.cumsum(rng.exponential(mean * (step + 1) ** power, shape), axis=-1)
        logits -= logits[..., :1]
        return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))

    return candidates


def _same_gaps(spread: float, step: int, shape: tuple[int, int, int], rng: Generator) -> Floats:
    """All beams of a request have the same gaps (mean 1); noise of standard deviation `spread` sets them apart."""
    num_requests, num_beams, num_candidates = shape
    gaps = np.cumsum(rng.exponential(1.0, (num_requests, 1, num_candidates)), axis=-1)
    return np.asarray(spread * rng.standard_normal((num_requests, num_beams, 1)) - (gaps - gaps[..., :1]))


class Law(NamedTuple):
    """One law: how to make it, where its parameter is sought, what speaks for it, whether more of it shares more."""

    make: MakeChoose
    bounds: tuple[float, float]
    reason: str
    shares_more: bool = True


LAWS: dict[str, Law] = {
    "theta": Law(scores_of_a_step(_constant), (0.02, 4.0), "the model that is used"),
    "theta / sqrt(output)": Law(
        scores_of_a_step(_output(0.5)), (0.1, 20.0), "the lead of a random walk changes ever more rarely"
    ),
    "theta / output": Law(
        scores_of_a_step(_output(1.0)), (1.0, 200.0), "the newest of t tokens is the most telling one with chance 1 / t"
    ),
    "theta / sqrt(text)": Law(
        scores_of_a_step(_text(0.5)), (0.1, 20.0), "new words of a text come like this (Heaps' law), prompt included"
    ),
    "theta / text": Law(
        scores_of_a_step(_text(1.0)),
        (1.0, 200.0),
        "scores per token of the text, prompt included, as vLLM 0.x normalises them",
    ),
    "theta by request": Law(
        scores_of_a_step(_constant, differs=True), (0.02, 10.0), "texts differ in how sure the model is (exponentially)"
    ),
    "each beam": Law(each_replaced(_constant), (0.001, 1.0), "any beam is overtaken with a constant chance"),
    "each beam / output": Law(each_replaced(_output(1.0)), (0.1, 100.0), "records, beam by beam"),
    "one beam": Law(one_replaced(_constant), (0.001, 1.0), "one overtaking at a time, whatever the width"),
    "one beam / output": Law(one_replaced(_output(1.0)), (0.1, 100.0), "records, one at a time"),
    "search": Law(accumulated(sure_by(0.0)), (0.05, 50.0), "beam search over accumulated log-probabilities", False),
    "search, surer with the output": Law(
        accumulated(sure_by(1.0)), (0.0005, 5.0), "the same; repetitive text leaves ever less to choose", False
    ),
    "search, same gaps": Law(
        accumulated(_same_gaps), (0.005, 5.0), "the same; beams that read nearly the same text see nearly the same odds"
    ),
}
"""What was tried. The first is the model that is used."""

WIDTHS = (2, 4, 6)


class Trial(NamedTuple):
    """A law to be set and asked; `num_requests` of each data set."""

    law: str
    num_requests: tuple[tuple[str, int], ...]
    num_halvings: int = 9


def try_law(trial: Trial) -> dict[str, float]:
    """`parameter`, and the percentage of blocks saved as `alpaca 2` ... `sharegpt 6`."""
    law = LAWS[trial.law]
    drawn = {dataset: lengths(dataset, num_requests) for dataset, num_requests in trial.num_requests}

    def saved_at(parameter: float, dataset: str, width: int) -> float:
        prompts, outputs = drawn[dataset]
        choose = law.make(parameter, width, len(prompts), np.random.default_rng(SEED))
        return saved(prompts, outputs, width, choose)

    low, high = law.bounds
    for _ in range(trial.num_halvings):
        middle = (low * high) ** 0.5
        if (saved_at(middle, "alpaca", 2) < SAVED_AT_WIDTH_2["alpaca"]) == law.shares_more:
            low = middle
        else:
            high = middle
    parameter = (low * high) ** 0.5
    found = {f"{dataset} {width}": saved_at(parameter, dataset, width) for dataset in drawn for width in WIDTHS}
    return {"parameter": parameter} | found
