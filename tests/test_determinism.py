"""K70, law 6: the same scenario and seed give the same bytes, in every process and under every hash seed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsim.registry import build
from kvsim.runs import Options, run
from kvsim.scenario.resolve import scenario_from_dict
from kvsim.sim import run as sim_run

Scenario = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
EVERY_FILE = Options(plots=False, debug=True, timeline=True)


def case(num_blocks: int, requests: list[Scenario], *, swap: bool = False, caching: bool = False) -> Scenario:
    """A case of `paged` with blocks of 4 and steps of 1 s, as cases.md gives them."""
    return {
        "engine": "paged",
        "memory": {"num_gpu_blocks_override": num_blocks, "num_cpu_blocks_override": 4 if swap else 0},
        "allocator": {"block_size": 4, "watermark": 0, "enable_prefix_caching": caching},
        "scheduler": {"preemption": "swap" if swap else "recompute"},
        "workload": {"requests": requests},
        "cost": {"step_ms": 1000, "prefill_token_us": 0, "context_token_ns": 0},
    }


def request(name: str, prompt: int, output: int, at: float = 0, **more: Any) -> Scenario:
    return {"id": name, "prompt_tokens": prompt, "output_tokens": output, "arrival_s": at, **more}


RIVALS = [request("A", 8, 9), request("B", 8, 9)]
LOAD: Scenario = {
    "engine": "paged",
    "seed": 7,
    "memory": {"num_gpu_blocks_override": 60},
    "allocator": {"block_size": 4, "enable_prefix_caching": True},
    "workload": {
        "num_requests": 200,
        "arrivals": {"type": "poisson", "request_rate": 60},
        "lengths": {"type": "uniform", "prompt": [4, 60], "output": [1, 40]},
        "content": {"system_prompt": {"num_groups": 3, "tokens": 16}, "num_loras": 2},
        "abort": {"probability": 0.1, "after": 0.5},
        "priorities": {0: 0.5, 1: 0.5},
    },
    "scheduler": {"max_num_seqs": 16, "scheduling_policy": "priority"},
}
CASES: dict[str, Scenario] = {
    "k07": case(4, RIVALS),
    "k13": case(
        5,
        [
            request("X", 12, 1, prefix_group="g", prefix_tokens=12),
            request("W", 3, 2, 9),
            request("Y", 20, 1, 10, prefix_group="g", prefix_tokens=12),
        ],
        caching=True,
    ),
    "k15": case(3, [request("X", 12, 1, session="s"), request("Y", 4, 1, 10), request("X2", 12, 1, 20, session="s")],
                caching=True),
    "k31": case(4, RIVALS, swap=True),
    "load": LOAD,
    "load-v1": LOAD | {"engine": "vllm-v1"},
    "load-v1-async": LOAD | {"engine": "vllm-v1-async"},
    "load-orca": LOAD | {"engine": "orca-pow2", "allocator": {"block_size": 4},
                         "scheduler": {"max_num_seqs": 16, "max_model_len": 100}},
}  # fmt: skip


def write_all(folder: Path) -> None:
    """Every case with every file; what the processes below run."""
    for name, scenario in CASES.items():
        run(scenario, out=folder / name, options=EVERY_FILE)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written_by(folder: Path, hash_seed: str, python: str = sys.executable, **env: str) -> dict[str, bytes]:
    """What a process of its own writes under this hash seed."""
    code = "import sys; from pathlib import Path; import test_determinism as t; t.write_all(Path(sys.argv[1]))"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run(
        [python, "-c", code, str(folder)],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths, **env},
        cwd=folder.parent,
    )
    return contents(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("reference") / "out"
    folder.mkdir()
    write_all(folder)
    return contents(folder)


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def test_the_cases_exercise_what_could_depend_on_an_order() -> None:
    for name, counters in {
        "k07": {"num_preemptions": 1, "num_recomputed_tokens": 8},
        "k13": {"num_evicted_blocks": 1, "prefix_cache_hits": 12},
        "k15": {"num_evicted_blocks": 2, "prefix_cache_hits": 8},
        "k31": {"num_swapped_out_blocks": 2, "num_swapped_in_blocks": 2},
    }.items():
        summary = run(CASES[name]).summary
        assert {key: summary[key] for key in counters} == counters, name
    summary = run(LOAD).summary
    assert min(summary[key] for key in ("num_preemptions", "num_evicted_blocks", "prefix_cache_hits")) > 0


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_every_process_writes_the_same_bytes(hash_seed: str, reference: dict[str, bytes], tmp_path: Path) -> None:
    assert len(reference) >= 6 * len(CASES)
    assert differing(written_by(tmp_path / "out", hash_seed), reference) == []


BY_HASH = {"queue_order": "test_determinism:by_hash"}


def by_hash(group: Any) -> tuple[object, ...]:
    """An order that depends on the process, as a set of strings has it."""
    return (hash(group.request_id),)


def test_an_order_by_hash_would_be_noticed(tmp_path: Path) -> None:
    """Law 6 broken on purpose: a queue in the order of string hashes."""
    code = "import sys; from pathlib import Path; import test_determinism as t; t.run_by_hash(Path(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    for hash_seed in ("0", "1"):
        folder = str(tmp_path / hash_seed)
        subprocess.run([sys.executable, "-c", code, folder], check=True, env=env | {"PYTHONHASHSEED": hash_seed})
    assert "requests.csv" in differing(contents(tmp_path / "0"), contents(tmp_path / "1"))


def run_by_hash(folder: Path) -> None:
    run(LOAD | {"scheduler": LOAD["scheduler"] | BY_HASH}, out=folder)


def test_idle_events_change_nothing(
    reference: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else wakes up every millisecond of simulated time."""
    make_server = sim_run._make_server

    def with_a_ticker(env: Any, *parts: Any) -> Any:
        server = make_server(env, *parts)
        serve = server.run

        def ticking() -> Any:
            done = env.process(serve())

            def tick() -> Any:
                while not done.triggered:
                    yield env.timeout(1_000_000)

            env.process(tick())
            # The run ends when the engine does.
            yield done

        server.run = ticking
        return server

    monkeypatch.setattr(sim_run, "_make_server", with_a_ticker)
    for name in ("k07", "k31", "load"):
        run(CASES[name], out=tmp_path / name, options=EVERY_FILE)
    kept = {path: data for path, data in reference.items() if path.split("/")[0] in ("k07", "k31", "load")}
    assert differing(contents(tmp_path), kept) == []


def test_another_seed_is_another_workload() -> None:
    first, second = (run(LOAD | {"seed": seed}).requests for seed in (7, 8))
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert (first[column] != second[column]).mean() > 0.5


def drawn(scenario: Scenario) -> list[Any]:
    source = build(scenario_from_dict(scenario).scenario).source
    return source.take_due(1 << 62)


def test_a_request_more_at_the_end_leaves_the_others_alone() -> None:
    longer = LOAD | {"workload": LOAD["workload"] | {"num_requests": 201}}
    assert drawn(longer)[:200] == drawn(LOAD)
    assert len(drawn(longer)) == 201


def test_a_stream_of_its_own_for_each_purpose() -> None:
    """Other lengths leave the arrivals, priorities and aborts as they are."""
    lengths = {"type": "uniform", "prompt": [4, 9], "output": [1, 3]}
    other = LOAD | {"workload": LOAD["workload"] | {"lengths": lengths}}
    for one, two in zip(drawn(LOAD), drawn(other), strict=True):
        assert (one.arrival_ns, one.priority, one.abort_ns, one.namespace) == (
            two.arrival_ns, two.priority, two.abort_ns, two.namespace,
        )  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_writes_the_same_bytes(version: str, reference: dict[str, bytes], tmp_path: Path) -> None:
    """Another Python with kvsim's dependencies: the tables agree; the summary names numpy's version."""
    python = find_python(version)
    got = written_by(tmp_path / "out", "random", python)
    differences = differing(got, reference)
    same_numpy = b'"numpy_version"' in reference["load/summary.json"] and numpy_line(got) == numpy_line(reference)
    assert [name for name in differences if same_numpy or not name.endswith("summary.json")] == []


def numpy_line(files: dict[str, bytes]) -> list[bytes]:
    return [line for line in files["load/summary.json"].splitlines() if b"numpy_version" in line]


def find_python(version: str) -> str:
    """A python of this version, on PATH or under pyenv, that has the dependencies; skips the test without one."""
    found = [shutil.which(f"python{version}")]
    found += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))]
    found += [os.environ.get("KVSIM_PYTHON_" + version.replace(".", ""))]
    names = "simpy, numpy, pandas, yaml, pydantic, hypothesis, pytest"
    for python in filter(None, found):
        if subprocess.run([python, "-c", f"import {names}"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"no Python {version} with {names}; name one in KVSIM_PYTHON_{version.replace('.', '')}")
