"""The writer of tables against the library's, for every kind of column."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.metrics.columns import CHUNK_ROWS
from kvsim.metrics.export import write_records, write_table

TEXTS = st.text(st.sampled_from('ab%d,"\n\r é'), max_size=5)
INTS = st.integers(-(2**62), 2**62)
FLOATS = st.floats(allow_infinity=False, width=64)


def columns_of(num_rows: int) -> st.SearchStrategy[dict[str, Any]]:
    """Columns that stand still as well as columns that move."""

    def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=num_rows, max_size=num_rows) | values.map(lambda value: [value] * num_rows)

    ints, floats = (rows(kind).map(np.array) for kind in (INTS, FLOATS))
    return st.lists(rows(TEXTS) | ints | floats, min_size=1, max_size=4).map(
        lambda columns: {f"c{index}": column for index, column in enumerate(columns)}
    )


def written_plainly(columns: dict[str, Any]) -> str:
    """The rule: integers as they are, floats as they read back, nothing for NaN, texts quoted where they must be."""
    out = io.StringIO(newline="")
    out.write(",".join(columns) + "\n")
    cells = [
        [
            value if isinstance(value, str) else "" if value != value else repr(value)
            for value in (column if isinstance(column, list) else column.tolist())
        ]
        for column in columns.values()
    ]
    for row in zip(*cells, strict=True):
        for place, cell in enumerate(row):
            one = io.StringIO(newline="")
            # Both line ends, so that cells which hold one are quoted.
            csv.writer(one, lineterminator="\r\n").writerow([cell, ""])
            out.write(("," if place else "") + one.getvalue()[:-3])
        out.write("\n")
    return out.getvalue()


@given(columns=st.integers(1, 5).flatmap(columns_of))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_table_is_written_as_the_rule_says(columns: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(path, columns)
    assert path.read_bytes().decode() == written_plainly(columns)


@pytest.mark.parametrize("num_rows", [0, CHUNK_ROWS, 2 * CHUNK_ROWS + 1])
def test_tables_of_any_length(num_rows: int, tmp_path: Path) -> None:
    """Columns that stand still for a thousand rows and then move."""
    numbers = np.arange(num_rows, dtype=np.int64)
    columns = {
        "number": numbers,
        "late": np.maximum(numbers - CHUNK_ROWS, 0),
        "share": np.where(numbers % 3 == 0, np.nan, numbers / 7),
        "text": ["100 %" if number < CHUNK_ROWS else f"{number}, odd" for number in numbers.tolist()],
    }
    write_table(tmp_path / "table.csv", columns)
    assert (tmp_path / "table.csv").read_bytes().decode() == written_plainly(columns)


def test_texts_with_any_mark_read_back(tmp_path: Path) -> None:
    texts = ["a\nb", "c\rd", 'e"f', "g,h", "i", "100 %"]
    write_table(tmp_path / "t.csv", {"id": texts, "n": np.arange(len(texts), dtype=np.int64)})
    write_records(tmp_path / "r.csv", [{"id": text, "n": place} for place, text in enumerate(texts)])
    for name in ("t.csv", "r.csv"):
        with (tmp_path / name).open(newline="") as file:
            assert [row["id"] for row in csv.DictReader(file)] == texts
