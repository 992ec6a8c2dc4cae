"""A figure of the paper as data: the scenarios it needs, and how their results become rows and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

from kvsim.reproduce.recipe import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from kvsim.reproduce.beam_laws import Trial
    from kvsim.reproduce.sustained import Search

Case: TypeAlias = Union[Scenario, "Search", "Trial"]
Summary = Mapping[str, Any]
"""A run's summary, flattened with dots (`kv_saturated.free`), or what a search or a trial found."""
Results = Mapping[str, Summary]
"""Summaries by the names that the figure gave its scenarios."""


class Ours(NamedTuple):
    """One simulated value. It knows nothing of what was published."""

    series: str
    x: str
    quantity: str
    value: float | None


class Row(NamedTuple):
    """One line of a figure's table: a published value (a number, or a range `low..high`) and ours.

    `difference` is ours - paper, 0 inside a range and counted from its nearer end outside. `mark` says where the
    published value is from: S seen in the paper's text, M secondary sources; `illustration`, `input`, or empty where
    nothing was published.
    """

    figure: str
    series: str
    x: str
    quantity: str
    paper: str
    ours: float | None
    difference: float | None
    mark: str


def bounds_of(paper: str) -> tuple[float, float]:
    """(low, high) of a published value; equal for a number."""
    low, _, high = paper.partition("..")
    return float(low), float(high or low)


@dataclass(frozen=True)
class Scale:
    """How much is simulated: as much as the paper did, or less in quick mode."""

    quick: bool = False

    def pick(self, full: int, quick: int) -> int:
        """A number of requests or seconds."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Figure:
    """One figure. `ours` sees summaries only; published values join later, in `kvsim.reproduce.table`."""

    name: str
    title: str
    cases: Callable[[Scale], Mapping[str, Case]]
    ours: Callable[[Results], list[Ours]]
    draw: Callable[[Picture, Sequence[Row]], None]
    text: str
    """What is simulated, in a sentence or two."""
    inputs: frozenset[tuple[str, str]] = frozenset()
    """(series, x) of published values that were used, and are no prediction."""
    illustration: bool = False
    """Its lengths are stand-ins."""
