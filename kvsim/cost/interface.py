"""What a cost model promises."""

from __future__ import annotations

from typing import Protocol

from kvsim.scheduling.plan import StepShape
from kvsim.types import Ns


class CostModel(Protocol):
    """Prices one engine iteration; pure."""

    def step_ns(self, shape: StepShape) -> Ns:
        """Duration of the step in integer nanoseconds, at least 1."""
        ...
