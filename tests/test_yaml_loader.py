"""YAML with the place of every key, and the values that it gives."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.types import ScenarioError
from kvsim.yaml_loader import Mark, dotted, look_up, parse_value, parse_yaml


def test_every_key_knows_its_place() -> None:
    document = parse_yaml("a: 1\nb:\n  c: [x, {d: 2}]\n", "f.yaml")
    assert document.data == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    assert document.marks[("b", "c")] == Mark(3, 3)
    assert document.marks[("b", "c", 1, "d")] == Mark(3, 11)
    assert document.where(("b", "c", 1, "e")) == "f.yaml:3:10"
    assert document.where(("z",)) == "f.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("", None),
        ("0x10", 16),
        ("010", 10),
        ("1_000", 1000),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("2023-11-16", "2023-11-16"),
        ("'1'", "1"),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("8,16,32", "8,16,32"),
        ("1:10:1", "1:10:1"),
        ("mine:Thing", "mine:Thing"),
    ],
)
def test_scalars_are_what_a_reader_expects(text: str, value: object) -> None:
    assert parse_value(text, "--set") == value
    if text and text[0] not in "[{" and "," not in text:
        assert parse_yaml(f"k: {text}\n", "f").data == {"k": value}


def test_merge_keys_fill_in() -> None:
    data = parse_yaml("base: &b {x: 1, y: 2}\nmine:\n  <<: *b\n  y: 3\n", "f").data
    assert data["mine"] == {"x": 1, "y": 3}


def test_dotted() -> None:
    assert dotted(("workload", "requests", 2, "id")) == "workload.requests[2].id"


def test_look_up() -> None:
    assert look_up({"a": [{"b": 1}]}, ("a", 0, "b")) == 1


def refusal_of(text: str) -> str | None:
    try:
        parse_yaml(text, "f.yaml")
    except ScenarioError as error:
        return str(error)
    return None


yaml_like = st.text(alphabet="ab:-[]{}&*!|>'\"#,? \n\t0.<", max_size=60)


@given(st.text(max_size=200) | yaml_like)
def test_any_text_is_data_or_one_message(text: str) -> None:
    message = refusal_of(text)
    assert message is None or message.startswith("f.yaml")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1: a: given twice (first on line 1)"),
        ("a:\n  - {x: 1, y: {z: 1,\n     z: 2}}\n", "3:6: a[0].y.z: given twice (first on line 2)"),
        ("a: &a {b: 1, b: 2}\nc: *a\n", "1:14: a.b: given twice (first on line 1)"),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2}\nb: 3\n", "3:1: b: given twice (first on line 2)"),
    ],
)
def test_a_key_given_twice_is_named_with_both_lines(text: str, place: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(f"f:{place}; keep one")):
        parse_yaml(text, "f")
