"""Reservations: how many slots beyond the prompt each variant sets aside."""

from __future__ import annotations

import pytest

from kvsim.request import Request
from kvsim.scheduling.reservations import make_reservation
from kvsim.tokens import TokenStream
from kvsim.types import ScenarioError


def request(prompt_len, output_len, **keywords):
    return Request("r", 0, TokenStream.from_segment(1, prompt_len), output_len, output_len, **keywords)


@pytest.mark.parametrize(
    ("name", "prompt_len", "output_len", "total"),
    [
        ("max", 2, 4, 2048),
        ("max", 2047, 1, 2048),
        ("pow2", 100, 25, 132),
        ("pow2", 100, 32, 132),
        ("pow2", 100, 1, 101),
        ("pow2", 2000, 40, 2048),
        ("oracle", 2, 4, 5),
        ("oracle", 2000, 100, 2047),
        ("oracle", 7, 1, 7),
    ],
)
def test_slots_in_total(name, prompt_len, output_len, total):
    reservation = make_reservation(name, 2048)
    assert prompt_len + reservation(request(prompt_len, output_len)) == total


def test_textbook_three_stored_two_reserved_three_internal():
    given = 2 + make_reservation("max", 8)(request(2, 4))
    stored, final = 3, 2 + 4 - 1
    assert (given, final - stored, given - final) == (8, 2, 3)


def test_samples_may_differ():
    two = request(10, 9, sample_lens=(9, 3))
    assert [make_reservation("oracle", 64)(two, sample) for sample in (0, 1)] == [8, 2]
    assert [make_reservation("pow2", 64)(two, sample) for sample in (0, 1)] == [16, 4]


def test_unknown_names_are_listed():
    with pytest.raises(ScenarioError, match="'orcale'; it is one of max, pow2, oracle"):
        make_reservation("orcale", 64)
