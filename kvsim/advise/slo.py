"""`--slo ttft=2s,tpot=100ms`: goals from the command line, the scenario, or assumed."""

from __future__ import annotations

from typing import Any

from kvsim.result import text_of
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.types import NS_PER_MS, ScenarioError

NAMES = ("ttft", "tpot", "e2el")
ASSUMED = {"ttft": "2s", "tpot": "100ms"}
"""Where nobody says anything; the report says that it was assumed."""


def parse_slo(text: str) -> dict[str, str]:
    """`ttft=2s,tpot=100ms` as values by name; units are checked with the scenario. Raises ScenarioError."""
    goals: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in NAMES or not value:
            raise ScenarioError(f"--slo {text}: must be goals such as ttft=2s,tpot=100ms; known are {', '.join(NAMES)}")
        if name in goals:
            raise ScenarioError(f"--slo {text}: {name} is there twice; keep one")
        goals[name] = value
    return goals


def with_slo(base: ResolvedScenario, goals: dict[str, str] | None) -> tuple[ResolvedScenario, bool]:
    """The scenario with these goals and no others; whether they had to be assumed."""
    if goals:
        return base.with_values({f"slo.{name}": goals.get(name) for name in NAMES}), False
    if any(getattr(base.scenario.slo, name) is not None for name in NAMES):
        return base, False
    return base.with_values({f"slo.{name}": value for name, value in ASSUMED.items()}), True


def describe_slo(base: ResolvedScenario) -> str:
    """`TTFT 2,000 ms, TPOT 100 ms`."""
    slo: Any = base.scenario.slo
    goals = {name: getattr(slo, name) for name in NAMES}
    return ", ".join(
        f"{name.upper()} {text_of(goal / NS_PER_MS)} ms" for name, goal in goals.items() if goal is not None
    )
