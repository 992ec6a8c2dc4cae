"""Parts of the user's own, held to their word: what they return that no engine can use is told with their name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import ceil
from typing import Any

from kvsim.request import Group, Request
from kvsim.scenario.fields import LONGEST_NS
from kvsim.scenario.words import shorten
from kvsim.scheduling.plan import Rejection, StepOutcome, StepPlan, StepShape
from kvsim.types import Ns, ScenarioError


def checked_policy(policy: Any, path: str, name: str) -> Callable[..., Any]:
    """A function that a scheduler asks; raises ScenarioError where it returns what is no answer."""
    if not callable(policy):
        raise ScenarioError(f"scheduler.{name}: {path} is {shorten(policy)}; must be a function")

    @functools.wraps(policy)
    def ask(*args: Any) -> Any:
        value = policy(*args)
        if wanted := _wrong_answer(name, args, value):
            raise ScenarioError(f"scheduler.{name}: {path} returned {shorten(value)}; must be {wanted}")
        return value

    return ask


def _wrong_answer(name: str, args: tuple[Any, ...], value: Any) -> str:
    """What the policy should have returned; empty if it did."""
    if name == "victim":
        # Any group would do for the type, but one that does not run has no blocks to give.
        is_running = isinstance(value, Group) and any(value is group for group in args[0])
        return "" if is_running else "one of the running groups it was given"
    if name == "queue_order":
        return "a key to sort by, such as a tuple" if value is None else ""
    # Who forgets to return anything says None.
    return "True or False" if value is None else ""


class _Checked:
    """A part of the user's that passes everything on; subclasses look at what comes back."""

    KEY = ""
    OFFERS: tuple[str, ...] = ()

    def __init__(self, part: Any, path: str) -> None:
        self._part = part
        self._path = path
        if missing := [name for name in self.OFFERS if not hasattr(part, name)]:
            raise ScenarioError(
                f"{self.KEY}: {path}: has no {', '.join(missing)}; see docs/extend.md for what it must offer"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def _checked(self, method: str, value: Any, is_right: bool, wanted: str) -> Any:
        if not is_right:
            raise ScenarioError(f"{self.KEY}: {self._path}: {method} returned {shorten(value)}; must be {wanted}")
        return value


class CheckedCost(_Checked):
    """What a cost model returns must be a time, and is rounded to whole nanoseconds."""

    KEY = "cost"
    OFFERS = ("step_ns",)

    def step_ns(self, shape: StepShape) -> Ns:
        value: Any = self._part.step_ns(shape)
        try:
            ns = int(value + 0.5)
        except (TypeError, ValueError, OverflowError):
            ns = 0
        wanted = "a time in nanoseconds, at least 1 and at most thirty years"
        self._checked("step_ns", value, 1 <= ns <= LONGEST_NS, wanted)
        return ns


class CheckedSource(_Checked):
    """A source of requests must hand out requests, and what it says to be due."""

    KEY = "workload"
    OFFERS = ("notes", "num_left", "next_ns", "take_due", "on_end")

    def next_ns(self) -> Ns | None:
        value = self._part.next_ns()
        if value is None:
            return None
        try:
            ns: int = ceil(value)
        except (TypeError, ValueError, OverflowError):
            ns = -1
        self._checked("next_ns", value, ns >= 0, "a time in nanoseconds of 0 or more, or None")
        return ns

    def take_due(self, now: Ns) -> list[Request]:
        value = self._part.take_due(now)
        are_requests = isinstance(value, list | tuple) and all(isinstance(request, Request) for request in value)
        self._checked("take_due", value, are_requests, "a list of kvsim.request.Request")
        if not value and (due := self.next_ns()) is not None and due <= now:
            self._checked("take_due", value, False, f"the requests of {due} ns that next_ns named: it is {now} ns now")
        return list(value)


class CheckedScheduler(_Checked):
    """A scheduler must plan steps and say what became of them."""

    KEY = "scheduler"
    OFFERS = ("allocator", "submit", "has_work", "schedule", "complete")

    def submit(self, request: Request) -> Rejection | None:
        value = self._part.submit(request)
        is_answer = value is None or isinstance(value, Rejection)
        self._checked("submit", value, is_answer, "None, or a kvsim.scheduling.plan.Rejection")
        return value  # type: ignore[no-any-return]

    def schedule(self, now: Ns) -> StepPlan:
        value = self._part.schedule(now)
        self._checked("schedule", value, isinstance(value, StepPlan), "a kvsim.scheduling.plan.StepPlan")
        return value  # type: ignore[no-any-return]

    def complete(self, plan: StepPlan) -> StepOutcome:
        value = self._part.complete(plan)
        self._checked("complete", value, isinstance(value, StepOutcome), "a kvsim.scheduling.plan.StepOutcome")
        return value  # type: ignore[no-any-return]
