"""Errors that travel: pickle (sweep workers) and simpy copy an exception by calling its class with its args."""

from __future__ import annotations

import pickle

import pytest

from kvsim.memory.contiguous import NoHole
from kvsim.request import Request, Sequence
from kvsim.runs import run
from kvsim.scenario.resolve import scenario_from_text
from kvsim.scheduling.plan import Preemption
from kvsim.scheduling.vllm_v0 import OutOfHostBlocks
from kvsim.tokens import TokenStream
from kvsim.types import KvsimError, OutOfBlocks, ScenarioError

VICTIM = Preemption(Sequence(0, Request("victim", 0, TokenStream.from_segment(1, 3), 1, 1)), True, 3)
ERRORS = [OutOfBlocks(3, 1), NoHole(50, 70, 40), OutOfHostBlocks((VICTIM,))]


def all_errors(base: type[KvsimError] = KvsimError) -> set[type[KvsimError]]:
    return {base}.union(*(all_errors(one) for one in base.__subclasses__()))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_says_the_same(error: KvsimError) -> None:
    copy = type(error)(*error.args)
    assert str(copy) == str(error) != ""
    assert copy.__dict__ == error.__dict__


def test_pickled_errors_say_the_same() -> None:
    for error in ERRORS[:2]:
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_error_with_a_constructor_of_its_own_is_here() -> None:
    ours = {error for error in all_errors() if error.__module__.startswith("kvsim.")}
    assert {error for error in ours if "__init__" in vars(error)} == {type(error) for error in ERRORS}


def test_the_paper_s_engine_dies_of_a_full_host_with_its_own_words() -> None:
    scenario = {
        "engine": "vllm-v0",
        "upstream_faults": True,
        "memory": {"num_gpu_blocks_override": 6, "num_cpu_blocks_override": 0},
        "allocator": {"block_size": 4, "watermark": 0},
        "scheduler": {"preemption": "swap"},
        "workload": {"requests": [{"prompt_tokens": 8, "output_tokens": 9}, {"prompt_tokens": 8, "output_tokens": 9}]},
    }
    with pytest.raises(OutOfHostBlocks, match="no host blocks are left to swap out request '1'; raise swap_space"):
        run(scenario)


@pytest.mark.parametrize("value", ["\udcff", "[a, \udcff]", "{type: \udcff}"])
def test_bytes_on_the_command_line_that_are_no_text(value: str) -> None:
    with pytest.raises(ScenarioError, match=r"--set description.*'\\udcff'\) is no UTF-8 text; write it in UTF-8"):
        scenario_from_text("seed: 1\n", "s.yaml", ["description=" + value])


def test_a_text_that_is_none() -> None:
    with pytest.raises(ScenarioError, match=r"s\.yaml: character 1 "):
        scenario_from_text("\ud800seed: 1\n", "s.yaml")
