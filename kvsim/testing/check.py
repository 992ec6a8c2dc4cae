"""One call that tests an allocator against every memory law."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvsim.testing.harness import Eviction, Features
from kvsim.testing.machine import Factory, machine_for


def check_allocator(
    factory: Factory,
    *,
    max_examples: int = 100,
    num_steps: int = 50,
    fork: bool = True,
    swap: bool | None = None,
    prefix_cache: bool | None = None,
    eviction: Eviction = "tail_first",
    exact_blocks: bool = True,
    shrink: bool = True,
    derandomize: bool = True,
) -> int:
    """Run `max_examples` random histories of up to `num_steps` commands on allocators made by `factory`.

    `factory` takes nothing and returns a fresh allocator; a small one (8 to 20 blocks of 2 to 4 tokens) reaches
    exhaustion and eviction soonest. The other arguments are those of `Features`. Returns the number of histories.
    Raises LawViolation at the first law that does not hold; the printed history is the shortest found, unless
    `shrink` is off.
    """
    features = Features(fork, swap, prefix_cache, eviction, exact_blocks)
    machine = machine_for(factory, features)
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    options: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "database": None, "deadline": None}
    # There is no test function of the caller's that Hypothesis's decorator for repeating a failure could go on.
    options["print_blob"] = False
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            phases=phases,
            derandomize=derandomize,
            report_multiple_bugs=False,
            **options,
        ),
    )
    return machine.num_examples
