"""Family trees of beams without an engine: what is shared is counted right, and laws are families of survivors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.reproduce.beam_laws import LAWS, Trial, try_law
from kvsim.reproduce.differences import LAW
from kvsim.reproduce.genealogy import BLOCK_SIZE, in_common, lengths, saved
from kvsim.reproduce.recipe import SAVED_AT_WIDTH_2
from kvsim.reproduce.table import from_csv

COMMITTED = Path(__file__).resolve().parents[2] / "results" / "reproduce"

WIDTH = 4
FAMILY = st.lists(st.integers(0, WIDTH - 1), min_size=WIDTH, max_size=WIDTH).map(sorted)
"""Parents of the survivors of one step."""


def plain_saving(prompt_len: int, output_len: int, families: list[list[int]]) -> float:
    """The same figure from whole texts: blocks with equal content from the start are one block."""
    width = len(families[0])
    texts = [[("prompt", place) for place in range(prompt_len)] for _ in range(width)]
    used = without_sharing = 0
    for step in range(1, output_len):
        texts = [[*text, (step, beam)] for beam, text in enumerate(texts)]
        ends = range(BLOCK_SIZE, len(texts[0]) + BLOCK_SIZE, BLOCK_SIZE)
        used += sum(len({tuple(text[:end]) for text in texts}) for end in ends)
        without_sharing += width * len(ends)
        texts = [texts[parent] for parent in families[step - 1]]
    return 100 * (1 - used / without_sharing)


@given(st.integers(1, 40), st.lists(FAMILY, min_size=1, max_size=40))
def test_sharing_is_that_of_whole_texts(prompt_len: int, families: list[list[int]]) -> None:
    found = saved(
        np.array([prompt_len]),
        np.array([len(families) + 1]),
        WIDTH,
        lambda step, prompts: np.array([families[step - 1]]),
    )
    assert found == pytest.approx(plain_saving(prompt_len, len(families) + 1, families))


def test_children_have_all_in_common_and_cousins_what_their_parents_have() -> None:
    common = np.array([[30, 10, 20]])
    assert in_common(common, np.array([40]), np.array([[0, 0, 2, 3]])).tolist() == [[40, 10, 20]]
    assert in_common(common, np.array([40]), np.array([[1, 1, 1, 3]])).tolist() == [[40, 40, 10]]


@pytest.mark.parametrize("name", LAWS)
def test_survivors_are_as_many_as_the_width(name: str) -> None:
    law = LAWS[name]
    prompts, outputs = lengths("alpaca", 50)
    choose = law.make((law.bounds[0] * law.bounds[1]) ** 0.5, WIDTH, 50, np.random.default_rng(1))
    for step, alive in ((1, 50), (2, 50), (3, 20)):
        parents = choose(step, prompts[:alive])
        assert parents.shape == (alive, WIDTH)
        assert (np.diff(parents, axis=1) >= 0).all()
        assert 0 <= parents.min() <= parents.max() < WIDTH
    assert (np.diff(outputs) <= 0).all()


@pytest.mark.parametrize("name", ["theta", "one beam / output", "search"])
def test_a_law_is_set_by_alpaca_at_width_2_alone(name: str) -> None:
    found = try_law(Trial(name, (("alpaca", 1000), ("sharegpt", 12))))
    assert found["alpaca 2"] == pytest.approx(SAVED_AT_WIDTH_2["alpaca"], abs=0.3)
    assert try_law(Trial(name, (("alpaca", 1000),)))["parameter"] == found["parameter"]


def test_the_committed_laws_were_set() -> None:
    rows = {(row.series, row.x): row.ours for row in from_csv((COMMITTED / "differences.csv").read_text("utf-8"))}
    for name, law in LAWS.items():
        low, high = law.bounds
        parameter = rows[LAW + name, ""]
        assert parameter is not None
        assert low * 1.05 < parameter < high / 1.05, "the bounds hold the parameter"
        assert rows[LAW + name, "alpaca 2"] == pytest.approx(SAVED_AT_WIDTH_2["alpaca"], abs=0.1)
