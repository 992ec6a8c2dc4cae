"""Feed the parsers of scenarios and traces with damaged input for some minutes: an answer or a message, nothing else.

    python benchmarks/fuzz.py --minutes 10

Hypothesis steers (`target`) towards inputs of which much is understood before something is wrong. Every round has a
seed of its own; the first input that gives another exception than the plain error ends the run with a traceback.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings, target
from hypothesis import strategies as st

from kvsim.scenario.resolve import scenario_from_text
from kvsim.types import ScenarioError
from kvsim.workload.traces import FORMATS, load_trace

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES_PER_ROUND = 500

TRACES = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.99,396,1\r\n",
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
    "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,7\n1.25,2000,3\n",
    "arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens,n,priority,session\n0.5,100,20,a,64,2,1,\n1,9,2,,,,-1,s\n",
    '{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n',
    '[{"id": "a", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}]',
)
SCENARIOS = tuple(path.read_text(encoding="utf-8") for path in sorted((ROOT / "scenarios").glob("*.yaml")))
NASTY = (
    "", " ", "\n", "\t", "0", "-1", "1e400", ".inf", ".nan", "null", "~", "9" * 400, "{", "}", "[", "]", "&a", "*a",
    "<<: *a", "!!python/object:os.system", "? ", "|", ">", "---\n", "%YAML 9", "'", '"', "\x00", "\ufeff", "\ud800",
    "engine: ", "n: 0", "1GiB", "-5s", "2023-13-45 99:00", ",", ",,", ";", "a:b", "type: static", "block_size: 0",
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, originals: tuple[str, ...]) -> str:
    """A good text in which some places are replaced, repeated, cut or moved."""
    text = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        piece = draw(st.sampled_from(NASTY) | st.text(max_size=5) | st.just(text[start:end] * 2))
        text = text[:start] + piece + text[end:]
    return text


def try_scenario(text: str) -> str:
    """Resolve a scenario; how far into it the first complaint is, is what Hypothesis shall raise."""
    try:
        scenario_from_text(text, "fuzz.yaml")
    except ScenarioError as error:
        where = str(error).split(":")
        line = int(where[1]) if len(where) > 1 and where[1].isdigit() else 0
        target(float(line), label="line of the first complaint")
        return "refused"
    target(float(len(text.splitlines())), label="line of the first complaint")
    return "accepted"


def try_trace(text: str, trace_format: str | None, skip: bool, path: Path) -> str:
    """Load a trace; the more rows the better."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        trace = load_trace(path, trace_format, on_bad_row="skip" if skip else "error")
    except ScenarioError:
        target(0.0, label="rows")
        return "refused"
    target(float(len(trace)), label="rows")
    return "accepted"


def fuzz_once(number: int, path: Path, seen: Counter[str]) -> None:
    """One round over both parsers."""
    rounds = settings(
        max_examples=EXAMPLES_PER_ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )

    @seed(number)
    @rounds
    @given(damaged(SCENARIOS))
    def scenarios(text: str) -> None:
        seen["scenario " + try_scenario(text)] += 1

    @seed(number)
    @rounds
    @given(damaged(TRACES), st.sampled_from([None, *FORMATS]), st.booleans())
    def traces(text: str, trace_format: str | None, skip: bool) -> None:
        seen["trace " + try_trace(text, trace_format, skip, path)] += 1

    scenarios()
    traces()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    seen: Counter[str] = Counter()
    number = options.seed
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() < deadline:
            fuzz_once(number, Path(scratch) / "trace.any", seen)
            number += 1
    print(
        f"{number - options.seed} rounds, no traceback: " + ", ".join(f"{seen[name]} x {name}" for name in sorted(seen))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
