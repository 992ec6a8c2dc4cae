"""The commands, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from support import listen_to_interrupts

from kvsim import __version__
from kvsim.cli import COMMANDS, main
from kvsim.runs import compare, run
from kvsim.types import ScenarioError

SMALL = """\
name: small
memory: {num_gpu_blocks_override: 60}
allocator: {block_size: 4}
scheduler: {max_model_len: 64}
workload:
  num_requests: 12
  arrivals: {type: poisson, request_rate: 200}
  lengths: {type: uniform, prompt: [3, 30], output: [2, 20]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SMALL)
    return tmp_path


def kvsim(*args: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvsim", *args],
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name}" in text for name in ("run", "compare", "validate", "schema", "init"))


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if main([name, "--help"]) == 0:
        assert "Usage: kvsim" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvsim {__version__}\n"


def test_help_is_quick() -> None:
    """Under 0.3 s: counted in processor time, so that a busy machine does not matter."""
    kvsim("--help")
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert kvsim("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvsim.cli import main; main(['--help']);"
        "print([m for m in ('numpy', 'pandas', 'pydantic', 'matplotlib', 'simpy', 'rich', 'yaml') if m in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_run_writes_everything(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "s.yaml"]) == 0
    out = here / "results" / "small"
    names = set(os.listdir(out))
    assert {"summary.json", "steps.csv", "requests.csv", "scenario.yaml", "memory.png"} <= names
    text = capsys.readouterr().out
    assert "results in results/small" in text
    assert "requests.csv" in text
    assert "requests completed" in text


def test_requests_that_did_not_complete_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what became of them, where it happened."""
    cut = ["--set", "horizon=20ms", "--no-plots", "--force"]
    assert main(["run", "s.yaml", *cut]) == 0
    summary = json.loads((here / "results" / "small" / "summary.json").read_text())
    assert re.search(rf"cut off +{summary['num_unfinished']}\n", capsys.readouterr().out)
    assert main(["compare", "s.yaml", "--engines", "paged,static", *cut]) == 0
    assert "completed  rejected  cut off\n" in capsys.readouterr().out
    assert main(["run", "s.yaml", "--no-plots", "--force"]) == 0
    assert "cut off" not in capsys.readouterr().out


def test_a_sweep_says_what_its_intervals_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "workload.lengths={type: fixed, prompt: 9, output: 4},{type: fixed, prompt: 9, output: 9}"]
    assert main(["sweep", "s.yaml", *vary, "--jobs", "1", "--no-plots", "--seeds", "2", "--out", "a"]) == 0
    told = capsys.readouterr().out
    assert "±: half the width of the mean's 95 % interval over the seeds\n" in told
    assert "4 points, 0 failed" in told
    assert main(["sweep", "s.yaml", "--vary", "allocator.block_size=8", "--jobs", "1", "--no-plots", "--out", "b"]) == 0
    told = capsys.readouterr().out
    assert "±" not in told
    assert "1 point, 0 failed" in told


def test_what_is_printed_as_json_is_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which has no infinity: a rate of .inf is a text, and a scenario takes that text too."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rates = ["--vary", "workload.arrivals.request_rate=5,.inf"]
    assert main(["sweep", "s.yaml", *rates, "--jobs", "1", "--no-plots", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [row["workload.arrivals.request_rate"] for row in rows] == [5, "inf"]
    assert (
        main(
            [
                "validate",
                "s.yaml",
                "--set",
                f"workload.arrivals.request_rate={rows[1]['workload.arrivals.request_rate']}",
            ]
        )
        == 0
    )


def test_what_lies_in_a_folder_is_listed(here: Path) -> None:
    from kvsim.cli.console import list_files

    for name in ("advice.md", "report.html", "runs.csv"):
        (here / "x" / name).parent.mkdir(exist_ok=True)
        (here / "x" / name).touch()
    assert list_files(here / "x") == "  tables    runs.csv\n  pages     advice.md, report.html"


def test_commands_of_one_scenario_keep_each_others_results(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "allocator.block_size=8,16", "--jobs", "1"]
    for command in (["compare", "s.yaml", "--engines", "paged"], ["run", "s.yaml"], ["sweep", "s.yaml", *vary]):
        for _ in range(2):
            assert main([*command, "--no-plots"]) == 0
    told = capsys.readouterr()
    assert sorted(os.listdir("results")) == ["small", "small-run", "small-sweep"]
    assert "results in results/small-run\n" in told.out
    assert "warning: results/small holds the results of kvsim compare: those of sweep go to" in told.err
    assert {"compare.csv"} <= set(os.listdir("results/small"))
    assert main(["run", "s.yaml", "--no-plots", "--out", "results/small"]) == 2
    assert "holds the results of kvsim compare" in capsys.readouterr().err
    assert main(["run", "s.yaml", "--no-plots", "--force"]) == 0
    assert "compare.csv" not in os.listdir("results/small")


def test_run_again_from_the_resolved_scenario_gives_the_same_bytes(here: Path) -> None:
    assert main(["run", "s.yaml", "--out", "one", "--no-plots", "--set", "seed=3"]) == 0
    assert main(["run", "one/scenario.yaml", "--out", "two", "--no-plots"]) == 0
    assert set(os.listdir("one")) == set(os.listdir("two"))
    for name in os.listdir("one"):
        assert (here / "one" / name).read_bytes() == (here / "two" / name).read_bytes(), name


def test_json_is_the_summary_and_nothing_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "s.yaml", "--json", "--no-plots", "--out", "o"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(Path("o/summary.json").read_text())
    assert printed["completed"] == 12


def test_record_summary_writes_no_tables(here: Path) -> None:
    assert main(["run", "s.yaml", "--record", "summary", "--out", "o"]) == 0
    assert not {"steps.csv", "requests.csv"} & set(os.listdir("o"))


def test_compare_puts_engines_side_by_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "s.yaml", "--engines", "paged,orca-max,static", "--no-plots", "--out", "c"]) == 0
    text = capsys.readouterr().out
    first_words = [line.split()[0] for line in text.splitlines()[:5]]
    assert first_words == ["engine", "-----------"[: len(first_words[1])], "paged", "orca-max", "static"]
    assert {"compare.csv", "paged", "orca-max", "static"} <= set(os.listdir("c"))
    rows = Path("c/compare.csv").read_text().splitlines()
    assert rows[0].split(",")[0] == "engine"
    assert [row.split(",")[0] for row in rows[1:]] == ["paged", "orca-max", "static"]


def test_engines_of_python_may_be_one_and_not_none(here: Path) -> None:
    assert list(compare("s.yaml", "paged").runs) == ["paged"]
    with pytest.raises(ScenarioError, match="engines is empty"):
        compare("s.yaml", [])


def test_a_number_of_numpy_is_a_number(here: Path) -> None:
    assert run("s.yaml", **{"allocator.block_size": np.int64(8)}).summary["block_size"] == 8


@pytest.mark.parametrize("command", ["run", "validate", "compare", "sweep", "explain"])
def test_keys_that_do_not_count_are_told(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {
        "compare": ["--engines", "paged"],
        "sweep": ["--vary", "allocator.block_size=4", "--jobs", "1"],
        "explain": ["--request", "3"],
    }
    assert main([command, "s.yaml", "--set", "workload.speed=2", *more.get(command, [])]) == 0
    assert "--set workload.speed=2: workload.speed: is not used: there is no trace" in capsys.readouterr().err


def test_init_then_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert main(["validate", "scenario.yaml"]) == 0
    assert main(["run", "scenario.yaml", "--no-plots", "--set", "workload.num_requests=20"]) == 0
    assert main(["init"]) == 2
    assert main(["init", "--force"]) == 0


def test_schema_accepts_the_shipped_scenarios(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.validate(yaml.safe_load((repo_root / "scenarios/quickstart.yaml").read_text()), schema)


def test_validate_prints_the_resolved_scenario(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "s.yaml", "--resolved", "--set", "seed=5"]) == 0
    assert "seed: 5  # command line" in capsys.readouterr().out


def test_shipped_scenarios_are_valid(repo_root: Path) -> None:
    for path in (repo_root / "scenarios").glob("*.yaml"):
        trace = "workload.trace" if "trace:" in path.read_text() else None
        sets = ["--set", f"{trace}=null"] if trace else []
        assert main(["validate", str(path), *sets]) == 0, path


def test_a_broken_pipe_is_quiet(here: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m kvsim schema | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
    )
    assert done.stdout == "{"
    assert done.stderr == ""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(here: Path, sent: int, code: int) -> None:
    args = ["run", "s.yaml", "--no-plots", "--out", "o", "--set", "workload.num_requests=200000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvsim", *args],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=listen_to_interrupts,
    )
    deadline = time.monotonic() + 30
    while not list(here.glob(".o.kvsim-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"Traceback" not in errors
    assert sorted(os.listdir(here)) == ["s.yaml"]


def test_a_memory_bound_holds(here: Path) -> None:
    done = kvsim(
        "run", "s.yaml", "--no-plots", "--max-memory", "150MB", "--set", "workload.num_requests=400000", cwd=here
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "memory" in done.stderr
    assert sorted(os.listdir(here)) == ["s.yaml"]


def test_same_bytes_under_any_hash_seed(here: Path) -> None:
    for seed in ("0", "1", "random"):
        args = ["run", "s.yaml", "--no-plots", "--debug", "--out", f"h{seed}"]
        assert kvsim(*args, cwd=here, env={"PYTHONHASHSEED": seed}).returncode == 0
    for name in os.listdir("h0"):
        assert len({Path(f"h{seed}/{name}").read_bytes() for seed in ("0", "1", "random")}) == 1, name


@pytest.mark.deep
@pytest.mark.parametrize("command", ["run", "compare"])
def test_sigkill_at_any_moment(here: Path, command: str) -> None:
    """Killed at 30 moments spread over a run: the old result or the new one, whole; the next run cleans up."""
    args = [sys.executable, "-m", "kvsim", command, "s.yaml", "--no-plots", "--out", "o"]
    subprocess.run([*args, "--set", "seed=1"], check=True, capture_output=True)
    marker = "summary.json" if command == "run" else "compare.csv"
    started = time.monotonic()
    subprocess.run([*args, "--set", "seed=2"], check=True, capture_output=True)
    duration = time.monotonic() - started
    whole = {Path("o", marker).read_bytes()}
    subprocess.run([*args, "--set", "seed=1"], check=True, capture_output=True)
    whole.add(Path("o", marker).read_bytes())
    names = set(os.listdir("o"))
    for moment in range(30):
        seed = 1 + moment % 2
        process = subprocess.Popen(
            [*args, "--set", f"seed={seed}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(duration * moment / 30)
        process.kill()
        process.wait()
        assert Path("o", marker).read_bytes() in whole
        assert set(os.listdir("o")) == names
    subprocess.run(args, check=True, capture_output=True)
    assert sorted(os.listdir(here)) == ["o", "s.yaml"]


@pytest.mark.deep
@pytest.mark.parametrize("limit", [0, 100, 1_000, 3_000, 10_000])
def test_a_file_size_limit(here: Path, limit: int) -> None:
    """No room for a file: one message, exit code 2, nothing half-written, the old result kept."""
    assert main(["run", "s.yaml", "--no-plots", "--out", "o"]) == 0
    before = {name: Path("o", name).read_bytes() for name in os.listdir("o")}
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "from kvsim.cli import main; sys.exit(main(['run', 's.yaml', '--no-plots', '--out', 'o', '--set', 'seed=9',"
        " '--set', 'workload.num_requests=500']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot write the results" in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: Path("o", name).read_bytes() for name in os.listdir("o")} == before
    assert sorted(os.listdir(here)) == ["o", "s.yaml"]


NOISY = """\
print("imported")


def newest(running):
    print("asked")
    return list(running)[-1]
"""


@pytest.mark.parametrize(
    "command",
    [("run", "--no-plots"), ("sweep", "--vary", "allocator.block_size=2,4", "--jobs", "2"), ("compare", "--no-plots")],
)
def test_json_is_alone_on_stdout_whatever_own_code_prints(here: Path, command: tuple[str, ...]) -> None:
    (here / "noisy.py").write_text(NOISY)
    tight = ("--set", "memory.num_gpu_blocks_override=16", "--set", "scheduler.victim=noisy:newest")
    done = kvsim(command[0], "s.yaml", *command[1:], *tight, "--out", "out", "--json", cwd=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert {"imported", "asked"} <= set(done.stderr.splitlines())


def test_help_is_read_beside_json_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: kvsim run")
