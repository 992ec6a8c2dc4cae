"""Any value under any key is accepted, or refused with a message: never another exception, never a hang."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.scenario.layout import blocks, keys_at
from kvsim.scenario.overrides import Override
from kvsim.scenario.resolve import ResolvedScenario, resolve, scenario_from_text
from kvsim.types import ScenarioError
from kvsim.yaml_loader import parse_value, parse_yaml

PATHS = sorted((*path, key) for path in blocks() for key in keys_at(path))
WORDS = [
    "paged",
    "contiguous",
    "vllm-v1",
    "static",
    "orca-max",
    "kernels",
    "a:b",
    "trace",
    "fixed",
    "auto",
    "40GiB",
    "2s",
    "-1s",
]

numbers = st.one_of(
    st.integers(-5, 300),
    st.sampled_from([0, -1, 10**9, 10**18, 10**400, 2**63, 0.0, -0.0, 1e-300, 1e300, float("inf"), float("nan")]),
    st.floats(),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(WORDS), st.text(max_size=8))
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "x", "n"]), inner, max_size=3),
    max_leaves=6,
)
overrides = st.lists(st.tuples(st.sampled_from(PATHS), values), min_size=1, max_size=3)


def resolved_or_refused(changes: list[tuple[tuple[str, ...], Any]]) -> ResolvedScenario | str:
    try:
        return resolve(
            parse_yaml("seed: 1\n", "s.yaml"), tuple(Override(key, value, "--set x") for key, value in changes)
        )
    except ScenarioError as error:
        return str(error)


@given(overrides)
@settings(max_examples=400)
def test_any_value_under_any_key(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    found = resolved_or_refused(changes)
    if isinstance(found, str):
        assert found.startswith("--set x") or found.startswith("s.yaml")
    else:
        again = scenario_from_text(found.to_yaml())
        assert again.scenario == found.scenario
        assert again.to_yaml() == found.to_yaml()


@pytest.mark.deep
@given(overrides)
@settings(max_examples=5000)
def test_any_value_under_any_key_at_length(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    resolved_or_refused(changes)


@given(st.text(max_size=30))
def test_any_text_as_a_value(text: str) -> None:
    try:
        parse_value(text, "--set x")
    except ScenarioError as error:
        # The message begins with what was typed, so that it is found again.
        if not str(error).startswith("--set x"):
            raise AssertionError(text) from error
