"""Parts of the user's own, held to their word: what they return that no engine can use is told with their name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from typing import Any, SupportsIndex

from kvsim.memory.interface import PrefixMatch
from kvsim.request import Group, Request
from kvsim.scenario.fields import LONGEST_NS
from kvsim.scheduling.plan import Rejection, StepOutcome, StepPlan, StepShape
from kvsim.types import AllocStatus, Ns, ScenarioError, shown


def checked_policy(policy: Any, path: str, name: str) -> Callable[..., Any]:
    """A function that a scheduler asks; raises ScenarioError where it returns what is no answer."""
    if not callable(policy):
        raise ScenarioError(f"scheduler.{name}: {path} is {shown(policy)}; must be a function")

    @functools.wraps(policy)
    def ask(*args: Any) -> Any:
        value = policy(*args)
        if wanted := _wrong_answer(name, args, value):
            raise ScenarioError(f"scheduler.{name}: {path} returned {shown(value)}; must be {wanted}")
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


_ALLOCATOR_OFFERS = (
    *("block_size", "num_blocks", "num_free_blocks", "can_allocate", "allocate", "append_slots", "free"),
    *("has_table", "num_tokens", "num_slots", "block_table", "usage"),
)
"""What every run needs; without forks, swaps and a prefix cache nobody asks for their methods."""
_ALLOCATOR_ANSWERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "can_allocate": (lambda value: isinstance(value, AllocStatus), "a kvsim.types.AllocStatus: OK, LATER or NEVER"),
    "match_prefix": (lambda value: isinstance(value, PrefixMatch), "a kvsim.memory.PrefixMatch, NO_MATCH for none"),
    "append_slots": (lambda value: isinstance(value, tuple | list), "a tuple of BlockCopy, () where none is copied"),
    "swap_out": (lambda value: value is None or isinstance(value, tuple | list), "a tuple of BlockMove, or None"),
    "swap_in": (lambda value: value is None or isinstance(value, tuple | list), "a tuple of BlockMove, or None"),
}


def checked_allocator(allocator: Any, path: str) -> Any:
    """The allocator itself, whose answers raise ScenarioError where no engine could use them.

    Engines look at the class of an allocator and call some of its methods often, so it is not wrapped.
    """
    _check_offers(allocator, f"allocator: {path}", _ALLOCATOR_OFFERS)
    for name, (is_right, wanted) in _ALLOCATOR_ANSWERS.items():
        method = getattr(allocator, name, None)
        with suppress(AttributeError):  # A class with slots is taken at its word.
            if callable(method):
                setattr(allocator, name, _answering(method, is_right, f"allocator: {path}: {name}", wanted))
    return allocator


def _answering(
    method: Callable[..., Any], is_right: Callable[[Any], bool], culprit: str, wanted: str
) -> Callable[..., Any]:
    @functools.wraps(method)
    def ask(*args: Any, **keywords: Any) -> Any:
        value = method(*args, **keywords)
        if not is_right(value):
            raise ScenarioError(f"{culprit} returned {shown(value)}; must be {wanted}")
        return value

    return ask


def _check_offers(part: Any, culprit: str, offers: tuple[str, ...]) -> None:
    if missing := [name for name in offers if not hasattr(part, name)]:
        raise ScenarioError(f"{culprit}: has no {', '.join(missing)}; see docs/extend.md for what it must offer")


class _Checked:
    """A part of the user's that passes everything on; subclasses look at what comes back."""

    KEY = ""
    OFFERS: tuple[str, ...] = ()

    def __init__(self, part: Any, path: str) -> None:
        self._part = part
        self._path = path
        _check_offers(part, f"{self.KEY}: {path}", self.OFFERS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def _checked(self, method: str, value: Any, is_right: bool, wanted: str) -> Any:
        if not is_right:
            raise ScenarioError(f"{self.KEY}: {self._path}: {method} returned {shown(value)}; must be {wanted}")
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
        for request in value:
            if problem := _wrong_request(request, now):
                raise ScenarioError(f"{self.KEY}: {self._path}: request {shown(request.request_id)}: {problem}")
        if not value and (due := self.next_ns()) is not None and due <= now:
            self._checked("take_due", value, False, f"the requests of {due} ns that next_ns named: it is {now} ns now")
        return list(value)


def _wrong_request(request: Request, now: Ns) -> str:
    """Why no engine can serve it now; empty if one can."""
    if not isinstance(request.request_id, str):
        return f"request_id is of type {type(request.request_id).__name__}; must be a text"
    if not 0 <= request.arrival_ns <= now:
        return f"arrival_ns is {request.arrival_ns}; must be from 0 to the {now} ns at which take_due hands it out"
    outputs = request.sample_lens or (request.output_len,)
    if not all(isinstance(length, SupportsIndex) for length in (*outputs, request.max_output_len)):
        return f"its lengths are {shown((*outputs, request.max_output_len))}; must be whole numbers"
    num_samples, width = request.sampling.n, request.sampling.beam_width
    if request.prompt_len < 1:
        return "its prompt has no tokens; must have at least 1"
    if num_samples < 1 or width < 0:
        return f"sampling has n {num_samples} and beam_width {width}; n must be at least 1, beam_width at least 0"
    if request.sample_lens and len(request.sample_lens) != num_samples:
        return f"sample_lens has {len(request.sample_lens)} lengths; must be one for each of n = {num_samples} samples"
    if min(outputs) < 1:
        return f"an output has {min(outputs)} tokens; must have at least 1"
    if max(outputs) > request.max_output_len:
        return f"max_output_len is {request.max_output_len}; must be at least its output's {max(outputs)}"
    return ""


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
