"""From a scenario to the parts of a run, and to the life of one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsim.memory.contiguous import ContiguousAllocator
from kvsim.memory.paged import PagedAllocator
from kvsim.registry import build
from kvsim.runs import Options, resolve, run, tell_life
from kvsim.scenario.resolve import scenario_from_text
from kvsim.scenario.schema import ENGINES
from kvsim.types import LawViolation, ScenarioError

SMALL = """\
memory: {num_gpu_blocks_override: 100, num_cpu_blocks_override: 10}
allocator: {block_size: 8}
scheduler: {max_num_seqs: 4, max_num_batched_tokens: 512, max_model_len: 256}
workload: {num_requests: 3, lengths: {type: fixed, prompt: 10, output: 5}}
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", ["calendar", "plain"])
def test_every_engine_is_made(engine: str, loop: str) -> None:
    engine_parts = build(scenario_from_text(SMALL, overrides=[f"engine={engine}", f"engine_loop={loop}"]).scenario)
    allocator = engine_parts.scheduler.allocator
    if isinstance(allocator, ContiguousAllocator):
        assert allocator.num_blocks == 800
    else:
        assert isinstance(allocator, PagedAllocator)
        assert allocator.num_blocks == (99 if engine.startswith("vllm-v1") else 100)
        assert allocator.usage().num_host_blocks == 10


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [
        # 32 layers x 32 heads x 128 in 16 bits: 512 KiB a token; 40 GiB at block size 32: 2,560 blocks
        ("model: llama-2-7b\nmemory: {kv_cache_memory_bytes: 40GiB}\nallocator: {block_size: 32}\n", 2560),
        ("model: llama-3.1-8b\nmemory: {kv_cache_memory_bytes: 16GiB}\n", 8192),
        (
            "model: {num_hidden_layers: 32, num_key_value_heads: 8, head_dim: 128}\n"
            "memory: {kv_cache_memory_bytes: 3.8125GiB}\n",
            1952,
        ),
        ("memory: {num_gpu_blocks_override: 77}\n", 77),
    ],
)
def test_bytes_become_blocks(memory: str, num_blocks: int) -> None:
    assert build(scenario_from_text(memory).scenario).scheduler.allocator.num_blocks == num_blocks


OWN = """\
from kvsim.memory.paged import PagedAllocator


class Thing(PagedAllocator):
    def __init__(self, num_blocks, block_size, *, quantum=1):
        super().__init__(num_blocks, block_size)
        self.quantum = quantum


class Flat:
    def __init__(self, ms=1.0):
        self.ns = round(ms * 1e6)

    def step_ns(self, shape):
        return self.ns


def youngest(running):
    return next(iter(reversed(running)))
"""


def test_own_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    text = SMALL.replace("{block_size: 8}", "{type: 'own_parts:Thing', block_size: 8, quantum: 64}")
    text = text.replace("max_num_seqs: 4", "max_num_seqs: 4, victim: 'own_parts:youngest'")
    parts = build(scenario_from_text(text + "cost: {type: 'own_parts:Flat', ms: 2}\n").scenario)
    assert parts.scheduler.allocator.quantum == 64  # type: ignore[attr-defined]
    assert parts.scheduler.allocator.num_blocks == 100
    assert parts.cost.step_ns(None) == 2_000_000  # type: ignore[arg-type]


def test_unknown_keywords_of_an_own_class_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_more_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    text = SMALL.replace("{block_size: 8}", "{type: 'own_more_parts:Thing', block_size: 8, quantun: 64}")
    with pytest.raises(ScenarioError, match="does not take 'quantun'; it takes block_size, num_blocks, quantum"):
        build(scenario_from_text(text).scenario)


def test_an_empty_workload_is_an_error(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    scenario = scenario_from_text(f"workload: {{trace: {trace}, window: [10, 20]}}\n").scenario
    with pytest.raises(ScenarioError, match="empty"):
        build(scenario)


@pytest.mark.parametrize("value", ["0", "-5", "0.4", "float('nan')", "'x'", "None", "10**19", "np.inf"])
def test_a_step_of_the_users_takes_a_time(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of no time makes rates of nothing."""
    name = f"cost_{value.encode().hex()}"
    (tmp_path / f"{name}.py").write_text(
        f"import numpy as np\nclass Cost:\n    def step_ns(self, shape):\n        return {value}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"workload": {"num_requests": 2}, "cost": {"type": f"{name}:Cost"}}
    with pytest.raises(ScenarioError, match=r"cost: cost_.*:Cost: step_ns returned .*; must be a time in nanoseconds"):
        run(scenario)


@pytest.mark.parametrize("value", ["np.int64(1000)", "999.6", "np.float32(1000)"])
def test_a_step_of_the_users_is_rounded_to_nanoseconds(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"cost_{value.encode().hex()}"
    (tmp_path / f"{name}.py").write_text(
        f"import numpy as np\nclass Cost:\n    def step_ns(self, shape):\n        return {value}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = run({"workload": {"num_requests": 2}, "cost": {"type": f"{name}:Cost"}})
    assert set(result.steps["duration_ms"]) == {0.001}


def test_sessions_that_end_before_they_begin_are_an_error() -> None:
    text = "workload: {num_requests: 6, sessions: {num_turns: 2, max_context: 1}}"
    with pytest.raises(ScenarioError, match=r"workload\.sessions\.max_context: is 1, .* raise it"):
        build(scenario_from_text(text).scenario)


def test_code_of_the_users_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_parts.py").write_text("class Lost:\n    def step_ns(self, shape): return shape.no_such\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = {"workload": {"requests": [{"id": "a", "prompt_tokens": 4, "output_tokens": 3}]}}
    with pytest.raises(ScenarioError, match=r"broken_parts:Lost: the run failed in or on this code.*no_such"):
        run(base | {"cost": {"type": "broken_parts:Lost"}})
    with pytest.raises(ScenarioError, match=r"broken_parts:Lost: the run failed in or on this code.*no_such"):
        tell_life(resolve(base | {"cost": {"type": "broken_parts:Lost"}}, {}), "a")


def test_a_law_that_an_own_allocator_breaks_is_told_with_its_name(tmp_path, monkeypatch):
    code = "from kvsim.memory import PagedAllocator\n\nclass Mine(PagedAllocator):\n"
    code += "    def free(self, seq_id): self._tables.pop(seq_id)\n"
    (tmp_path / "lawless_parts.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    scenario = {
        "allocator": {"type": "lawless_parts:Mine", "block_size": 4},
        "memory": {"num_gpu_blocks_override": 12},
        "workload": {"requests": [{"prompt_tokens": 4, "output_tokens": length} for length in (2, 5)]},
    }
    with pytest.raises(LawViolation, match=r"^law 4: .* \(lawless_parts:Mine: the run uses this code\)$"):
        run(scenario, options=Options(plots=False, check=True))


@pytest.mark.parametrize("takes", [True, False])
def test_an_own_allocator_that_takes_a_journal_gets_one(takes: bool, tmp_path, monkeypatch) -> None:
    name = f"journaled_{takes}"
    (tmp_path / f"{name}.py").write_text(
        "from kvsim.memory import PagedAllocator\n\n"
        "class Mine(PagedAllocator):\n"
        f"    def __init__(self, num_blocks, block_size{', journal=None' * takes}):\n"
        f"        super().__init__(num_blocks, block_size{', journal=journal' * takes})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scenario = {
        "allocator": {"type": f"{name}:Mine", "block_size": 4},
        "memory": {"num_gpu_blocks_override": 12},
        "workload": {"requests": [{"prompt_tokens": 4, "output_tokens": 3}]},
    }
    result = run(scenario, out=tmp_path / "out", options=Options(plots=False, debug=True))
    rows = (tmp_path / "out" / "events.csv").read_text().splitlines()
    assert (len(rows) > 1) == takes
    assert any("Mine told the journal nothing" in text for text in result.summary["warnings"]) != takes


BROKEN = """\
from kvsim.memory import PagedAllocator
from kvsim.request import Request, Sampling
from kvsim.scheduling.paged import PagedScheduler
from kvsim.tokens import TokenStream
from kvsim.types import AllocStatus


def a_request(prompt=5, output=3, most=9, n=1, lens=(), name="a", at=0):
    return Request(name, at, TokenStream.from_segment(1, prompt), output, most, Sampling(n), lens)


def leave():
    raise SystemExit(0)


class Allocator(PagedAllocator):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)

    def {name}(self, *args, **keywords):
        return None

    def can_allocate(self, *args, **keywords):
        answer = super().can_allocate(*args, **keywords)
        return answer if answer is AllocStatus.OK else {refused}


class Scheduler(PagedScheduler):
    def {name}(self, *args):
        return None


def policy(*args):
    return None


class Source:
    notes, num_left = (), 1
    next_ns = lambda self: {next_ns}
    take_due = lambda self, now: {due}
    on_end = lambda self, request_id, now: None


class Nothing:
    pass


number = 7
"""


def broken_run(folder: Path, patch: pytest.MonkeyPatch, values: dict[str, Any], **code: str) -> None:
    name = f"broken_{folder.name.encode().hex()}"
    code = {"name": "schedule", "next_ns": "0", "due": "[]", "refused": "AllocStatus.LATER"} | code
    text = BROKEN
    for mark, value in code.items():
        text = text.replace(f"{{{mark}}}", value)
    (folder / f"{name}.py").write_text(text)
    patch.syspath_prepend(folder)
    tight = {"num_gpu_blocks_override": 12}
    scenario: dict[str, Any] = {
        "memory": tight,
        "workload": {
            "num_requests": 6,
            "arrivals": {"type": "batch"},
            "lengths": {"type": "fixed", "prompt": 30, "output": 40},
        },
    }
    scenario["engine"] = values.pop("engine", "paged")
    for key, value in values.items():
        block, _, last = key.partition(".")
        if last == "type":
            scenario[block] = {}
        scenario.setdefault(block, {})[last] = f"{name}:{value}"
    run(scenario)


@pytest.mark.parametrize(
    ("values", "code", "expected"),
    [
        ({"scheduler.victim": "policy"}, {}, "scheduler.victim: .*:policy returned None; must be one of the running"),
        ({"scheduler.queue_order": "policy"}, {}, "queue_order: .*:policy returned None; must be a key to sort by"),
        ({"scheduler.gate": "policy"}, {}, "scheduler.gate: .*:policy returned None; must be True or False"),
        ({"scheduler.preemption": "policy"}, {}, "scheduler.preemption: .*:policy returned None; must be True or"),
        ({"scheduler.gate": "number"}, {}, "scheduler.gate: .*:number is 7; must be a function"),
        ({"scheduler.type": "Scheduler"}, {}, "schedule returned None; must be a kvsim.scheduling.plan.StepPlan"),
        ({"scheduler.type": "Scheduler"}, {"name": "complete"}, "complete returned None; must be a kvsim.*StepOutcome"),
        ({"scheduler.type": "Nothing"}, {}, "Nothing cannot be made|Nothing: has no allocator, submit"),
        ({"workload": "Nothing"}, {}, "workload: .*:Nothing: has no notes, num_left, next_ns, take_due, on_end; see"),
        ({"workload": "Source"}, {"next_ns": "-1"}, "next_ns returned -1; must be a time in nanoseconds of 0 or more"),
        ({"workload": "Source"}, {"due": "None"}, "take_due returned None; must be a list of kvsim.request.Request"),
        ({"workload": "Source"}, {"due": "[1]"}, r"take_due returned \[1\]; must be a list of kvsim.request.Request"),
        ({"workload": "Source"}, {}, r"take_due returned \[\]; must be the requests of 0 ns that next_ns named"),
        ({"cost": "Nothing"}, {}, "cost: .*:Nothing: has no step_ns; see docs/extend.md"),
        ({"workload": "Source"}, {"due": "[a_request(prompt=0)]"}, "request 'a': its prompt has no tokens"),
        ({"workload": "Source"}, {"due": "[a_request(output=0)]"}, "request 'a': an output has 0 tokens; must have"),
        (
            {"workload": "Source"},
            {"due": "[a_request(most=2)]"},
            "max_output_len is 2; must be at least its output's 3",
        ),
        (
            {"workload": "Source"},
            {"due": "[a_request(n=0)]"},
            "sampling has n 0 and beam_width 0; n must be at least 1",
        ),
        ({"workload": "Source"}, {"due": "[a_request(n=2, lens=(1,))]"}, "sample_lens has 1 lengths; must be one for"),
        ({"workload": "Source"}, {"due": "[a_request(at=5)]"}, "arrival_ns is 5; must be from 0 to the 0 ns at which"),
        ({"workload": "Source"}, {"due": "[a_request(at=-1)]"}, "request 'a': arrival_ns is -1; must be from 0 to"),
        ({"workload": "Source"}, {"due": "[a_request(name=5)]"}, "request 5: request_id is of type int; must be a te"),
        ({"workload": "Source"}, {"due": "[a_request(output=2.5)]"}, r"lengths are \(2.5, 9\); must be whole numbers"),
        ({"workload": "Source"}, {"due": "[a_request()] * 2"}, "Source: the run failed .*'a' is submitted twice"),
        ({"workload": "Source"}, {"due": "leave()"}, "Source: the run failed in or on this code: SystemExit: 0; see"),
        ({"workload": "leave"}, {}, "leave: the run failed in or on this code: SystemExit: 0; see"),
        (
            {"allocator": "Nothing"},
            {},
            "allocator: .*:Nothing: has no block_size, num_blocks.*, usage; see docs/extend",
        ),
        ({"allocator": "Allocator"}, {"refused": "False"}, "can_allocate returned False; must be a kvsim.types.AllocS"),
        ({"allocator": "Allocator"}, {"name": "append_slots"}, "append_slots returned None; must be a tuple of BlockC"),
        ({"allocator": "Allocator"}, {"refused": "AllocStatus.OK"}, "Allocator: the run failed in .*OutOfBlocks: need"),
        (
            {"allocator": "Allocator", "engine": "static"},
            {},
            "static scheduler works on a ContiguousAllocator or a sub",
        ),
    ],
)
def test_own_code_that_breaks_its_word_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], code: dict[str, str], expected: str
) -> None:
    blocks = {"workload", "cost", "allocator"}
    named = {f"{key}.type" if key in blocks else key: value for key, value in values.items()}
    with pytest.raises(ScenarioError, match=expected):
        broken_run(tmp_path, monkeypatch, named, **code)
