"""Recorded engine traces, replayed through the classes that a run uses; and what a departure looks like."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.conform import CaseError, as_text, conform, replay, v0
from kvsim.conform import as_json as json_of
from kvsim.conform.cases import Case, load_case

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LOOPS = ("calendar", "plain")


def run(*paths: Path, as_json: bool = False, engine_loop: str = "calendar") -> tuple[int, str]:
    report = conform(paths, engine_loop=engine_loop)
    return (0 if report.agrees else 1), json_of(report) if as_json else as_text(report)


@pytest.mark.parametrize("engine_loop", LOOPS)
def test_every_committed_case_agrees(engine_loop: str) -> None:
    code, text = run(GOLDEN, engine_loop=engine_loop)
    assert code == 0, text
    num_cases = len(list(GOLDEN.rglob("*.json")))
    assert text.splitlines()[-1].startswith(f"{num_cases} of {num_cases} cases agree (")


@pytest.mark.parametrize("engine_loop", LOOPS)
@pytest.mark.parametrize(("folder", "num_cases"), [("v0", 60), ("v1", 62)])
def test_every_recorded_case_agrees(shared_dir: Path, folder: str, num_cases: int, engine_loop: str) -> None:
    report = conform([shared_dir / "golden" / folder], engine_loop=engine_loop)
    assert [result for _, result in report.disagreeing] == []
    assert report.num_agreeing == num_cases
    assert report.num_fields > 100 * num_cases


def test_every_recorded_asynchronous_case_agrees(shared_dir: Path) -> None:
    assert conform([shared_dir / "golden" / "v1-async"]).agrees


def altered(value: Any) -> Any:
    """A value that is not the same, of the same kind where that is possible."""
    match value:
        case bool():
            return not value
        case None:
            return [0, 1]
        case int() | float():
            return value + 1
        case str():
            return "x" + value
        case [first, *rest]:
            return [altered(first), *rest]
        case dict() if value:
            key = next(iter(value))
            return value | {key: altered(value[key])}
    return ["x"]


def records_of(data: dict[str, Any]) -> list[Any]:
    return data["out"] if data.get("kind") == "bm" else data["steps"] if "steps" in data else data["expected"]["steps"]


def recorded_fields(case: Case) -> Iterator[tuple[int, Any]]:
    """The last record that has each field, for every field of the case."""
    last: dict[Any, int] = {}
    for index, record in enumerate(records_of(case.data)):
        for name in record if isinstance(record, dict) else range(len(record)):
            last[name] = index
    yield from ((index, name) for name, index in last.items())


ALTERED = [
    GOLDEN / f"{name}.json"
    for name in (
        *("v0/bm_000", "v0/bm_006", "v0/sched_030", "v0/sched_034", "v0/sched_035", "v0/sched_042", "v0/sched_051"),
        *("v0/sched_054", "v1/041", "v1/045", "v1-async/005"),
    )
]
"""Cases that have every kind of field between them."""


@pytest.mark.parametrize("path", ALTERED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_one_wrong_value_is_found_where_it_stands(path: Path) -> None:
    for index, name in recorded_fields(load_case(path)):
        case = load_case(path)
        record = records_of(case.data)[index]
        record[name] = altered(record[name])
        result = replay(case)
        assert result.mismatch is not None, f"record {index}, field {name}"
        if case.kind != "bm":
            assert result.mismatch.field == name
            assert result.mismatch.expected == record[name]


def test_every_field_of_the_scheduler_format_is_altered_somewhere() -> None:
    names = {name for path in ALTERED for _, name in recorded_fields(load_case(path))}
    assert names >= set(v0.FIELDS)


@pytest.mark.parametrize("edit", [lambda steps: steps.pop(), lambda steps: steps.append({"t": 999, "p": 0})])
def test_a_missing_or_surplus_record_is_a_departure(edit: Callable[[list[Any]], Any]) -> None:
    case = load_case(GOLDEN / "v0" / "sched_035.json")
    edit(case.data["steps"])
    result = replay(case)
    assert result.mismatch is not None
    assert result.mismatch.field == "record"


@pytest.mark.parametrize("name", ["v0/sched_035", "v1/041", "v1-async/005"])
@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_field_cannot_agree(name: str, value: int | None) -> None:
    case = load_case(GOLDEN / f"{name}.json")
    records_of(case.data)[3]["extra"] = value
    result = replay(case)
    assert result.mismatch is not None
    assert (result.mismatch.step, result.mismatch.field) == (3, "extra")


def test_a_null_is_a_value() -> None:
    case = load_case(GOLDEN / "v0" / "sched_035.json")
    case.data["steps"][3]["ab"] = None
    result = replay(case)
    assert result.mismatch is not None
    assert (result.mismatch.step, result.mismatch.field) == (3, "ab")


@pytest.mark.parametrize("name", ["v1/041", "v1-async/005", "v1-async/008"])
def test_a_total_that_is_lost_unknown_or_wrong_is_named(name: str) -> None:
    totals = load_case(GOLDEN / f"{name}.json").data["expected"]["end"]
    edits = [(key, edit) for key in totals for edit in (without(key), with_value(key, altered(totals[key])))]
    for key, edit in [*edits, ("extra", with_value("extra", None))]:
        case = load_case(GOLDEN / f"{name}.json")
        edit(case.data["expected"]["end"])
        result = replay(case)
        assert result.mismatch is not None, key
        assert result.mismatch.field == f"end.{key}"


@pytest.mark.parametrize(("wrong", "shown"), [(True, "true"), (1.0, "1.0"), ("1", '"1"')])
def test_a_value_of_another_type_is_another_value(tmp_path: Path, wrong: Any, shown: str) -> None:
    data = json.loads((GOLDEN / "v1" / "041.json").read_text())
    assert data["expected"]["steps"][4]["s"][0][2] == 1
    data["expected"]["steps"][4]["s"][0][2] = wrong
    (tmp_path / "case.json").write_text(json.dumps(data))
    code, text = run(tmp_path)
    assert code == 1
    assert "departs at step 4, field s" in text
    assert f"first difference: [0][2]: {shown}, got 1" in text


@pytest.fixture
def wrong_block(tmp_path: Path) -> Path:
    """Two good cases and one whose record of step 13 names block 99 where the engine takes 48."""
    for name in ("sched_025.json", "sched_050.json"):
        shutil.copy(GOLDEN / "v0" / name, tmp_path / name)
    data = json.loads((GOLDEN / "v0" / "sched_035.json").read_text())
    data["steps"][13]["bt"]["7000"][3] = 99
    (tmp_path / "sched_035.json").write_text(json.dumps(data))
    return tmp_path


def test_a_departure_is_shown_side_by_side_with_the_state_before(wrong_block: Path) -> None:
    code, text = run(wrong_block)
    assert code == 1
    assert "sched_035" in text
    assert "departs at step 13, field bt" in text
    assert "first difference: .7000[3]: 99, got 48" in text
    assert "expected" in text
    assert "  waiting    []" in text
    assert "  running    [3, 4]" in text
    assert "  free_gpu   [0, 1, 2," in text
    assert text.splitlines()[-1].startswith("2 of 3 cases agree (")


def test_json_holds_every_case_and_the_mismatch(wrong_block: Path) -> None:
    code, text = run(wrong_block, as_json=True)
    report = json.loads(text)
    assert code == 1
    assert (report["num_cases"], report["num_agree"]) == (3, 2)
    wrong = next(case for case in report["cases"] if not case["agrees"])
    assert wrong["case"] == "sched_035"
    assert (wrong["mismatch"]["step"], wrong["mismatch"]["field"]) == (13, "bt")
    assert wrong["mismatch"]["expected"]["7000"][3] == 99
    assert wrong["mismatch"]["state_before"]["running"] == [3, 4]


def refusal(*paths: Path) -> str:
    with pytest.raises(CaseError) as caught:
        run(*paths)
    return str(caught.value)


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing") == f"{tmp_path / 'nothing'}: no such file or folder"
    assert refusal(tmp_path) == f"{tmp_path}: no *.json case in this folder"
    assert refusal() == "no cases: name a case file, or a folder of them"


@pytest.mark.parametrize(("name", "code"), [("v0/sched_035.json", 0), ("nothing.json", 2)])
def test_exit_codes_of_the_command_line(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", str(GOLDEN / name)]) == code
    out, err = capsys.readouterr()
    assert ("1 of 1 cases agree" in out) == (code == 0)
    assert ("no such file or folder" in err) == (code == 2)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data.pop(key)


def with_value(*path: Any) -> Callable[[dict[str, Any]], Any]:
    *keys, last, value = path

    def edit(data: Any) -> None:
        for key in keys:
            data = data[key]
        data[last] = value

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("v0/sched_035.json", with_value("kind", "block"), 'kind: "block" is unknown; it is bm or sched'),
        ("v0/sched_035.json", with_value("kind", None), "kind: null is unknown; it is bm or sched"),
        ("v0/sched_035.json", lambda data: data["groups"][1].pop("mode"), "groups[1].mode is missing"),
        ("v1/041.json", lambda data: data["config"].pop("policy"), "config.policy is missing"),
        ("v0/sched_035.json", without("kind"), "not a case"),
        ("v0/sched_035.json", without("steps"), "steps is missing"),
        ("v0/sched_035.json", with_value("cfg", "bs", 0), "cfg.bs: 0 is not an integer from 1 to 1,048,576"),
        ("v0/sched_035.json", with_value("cfg", "sw", 7), "cfg.sw: 7 is not a multiple of the block size 5"),
        ("v0/sched_035.json", with_value("groups", 2, "out", [1]), "groups[2].out: [1] is not 4 output lengths"),
        ("v0/sched_035.json", with_value("groups", 2, "g", 1), "groups: numbers are not distinct"),
        ("v0/sched_035.json", with_value("groups", 1, "ev", [[["z", 1]]]), 'groups[1].ev[0]: [["z", 1]] is no list'),
        ("v0/sched_035.json", with_value("groups", 1, "ev", [[["f", 9]]]), "ev[0] names beams that are not there"),
        ("v0/sched_035.json", with_value("aborts", [[1]]), "aborts[0]: [1] is not [step, group]"),
        ("v0/sched_035.json", with_value("steps", 3, 5), "steps[3]: 5 is no record"),
        ("v0/bm_000.json", with_value("ops", 0, ["grow", 1]), "ops[0]: [\"grow\", 1] is no operation"),
        ("v0/bm_000.json", with_value("ops", 0, ["alloc"]), "ops[0]: alloc takes 1 integers, not []"),
        ("v0/bm_000.json", with_value("out", []), "ops, but 0 out"),
        ("v0/bm_000.json", with_value("ops", 0, ["alloc", 77]), "there is no group 77; made so far: none."),
        ("v0/bm_000.json", with_value("ops", 0, [["alloc"], 0]), "ops[0]: [[\"alloc\"], 0] is no operation"),
        ("v0/bm_000.json", with_value("ops", 0, ["group", 0, 10**30, 5]), "numbers of groups and sequences, and"),
        ("v0/bm_000.json", with_value("ops", 0, ["group", 0, 101, 5]), "a group has 1 to 100 sequences"),
        ("v0/bm_000.json", with_value("cfg", "gpu", 10**12), "cfg.gpu: 1000000000000 is not an integer from 1 to"),
        ("v0/bm_000.json", with_value("id", 3), "id: 3 is no string"),
        ("v0/sched_035.json", with_value("groups", 2, "n", 10**30), "groups[2].n: 1000"),
        ("v0/sched_035.json", with_value("groups", 2, "arr", 1e300), "groups[2].arr: 1e+300 is no number of seconds"),
        ("v0/sched_035.json", with_value("aborts", [[1, 99]]), "aborts[0]: [1, 99] names a group that is not there"),
        ("v1/041.json", with_value("config", "watermark", None), "config.watermark: null is not a fraction"),
        ("v1/041.json", with_value("config", "max_loras", -1), "config.max_loras: -1 is not an integer from 0"),
        ("v1/041.json", with_value("trace", "short"), 'trace: "short" is unknown; it is full or compact'),
        ("v1/041.json", with_value("requests", 0, "max_tokens", None), "requests[0].max_tokens: null is not an"),
        ("v1/041.json", with_value("requests", 0, "priority", [1]), "requests[0].priority: [1] is not an integer"),
        ("v1/041.json", with_value("requests", 0, "abort_mid", 1), "requests[0].abort_mid: 1 is no boolean"),
        ("v1/041.json", with_value("requests", 0, "lora", 1), "requests[0].lora: 1 is no string"),
        ("v1/041.json", with_value("config", "policy", "sjf"), 'config.policy: "sjf" is unknown'),
        ("v1/041.json", with_value("requests", 0, "prompt_token_ids", []), "requests[0].prompt_token_ids: []"),
        ("v1/041.json", with_value("requests", 1, "prompt_token_ids", [1] * 44), "prompt_token_ids: length 44; a"),
        ("v1/041.json", lambda data: data["expected"].pop("end"), "expected.end is missing"),
    ],
)  # fmt: skip
def test_a_malformed_case_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    data = json.loads((GOLDEN / name).read_text())
    edit(data)
    path = tmp_path / "case.json"
    path.write_text(json.dumps(data))
    text = refusal(path)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "7", '"sched"', "\x00\xff"])
def test_what_is_no_case_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CaseError, match=r"case\.json: "):
        load_case(path)


@pytest.mark.parametrize(
    ("ops", "said"),
    [
        ([["group", 0, 1, 5], ["group", 0, 1, 5]], 'ops[1]: ["group", 0, 1, 5]: group 0 is there already'),
        ([["group", 0, 1, 5], ["free", 7]], 'ops[1]: ["free", 7]: there is no sequence 7; group 0 has 0'),
        ([["group", 0, 1, 5], ["append", 0]], 'ops[1]: ["append", 0]: sequence 0 has no table'),
        ([["group", 0, 1, 5], ["fork", 0, 1]], 'ops[1]: ["fork", 0, 1]: sequence 0 has no table'),
        ([["group", 0, 1, 5], ["fork", 0, 100]], "sequence 100 cannot be the child: it must be new, and of group 0"),
    ],
)
def test_an_operation_that_makes_no_sense_is_named(tmp_path: Path, ops: list[list[Any]], said: str) -> None:
    data = json.loads((GOLDEN / "v0" / "bm_000.json").read_text())
    path = tmp_path / "case.json"
    path.write_text(json.dumps(data | {"ops": ops, "out": [[None]] * len(ops)}))
    assert said in refusal(path)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a case, its records left out; of a list the first entries."""
    yield path
    if isinstance(value, dict):
        for key in value.keys() - {"steps", "out", "expected"} if not path else value:
            yield from places_of(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from places_of(value[index], (*path, index))


@pytest.mark.parametrize("name", ["v0/bm_000", "v0/sched_035", "v1/041", "v1-async/005"])
def test_any_value_in_any_place_is_replayed_or_refused(tmp_path: Path, name: str) -> None:
    text = (GOLDEN / f"{name}.json").read_text()
    path = tmp_path / "case.json"
    for place in places_of(json.loads(text)):
        for value in (None, [], {}, -1, 10**30, 1e308, float("nan"), "x", True, [[1]]):
            if place:
                data = json.loads(text)
                with_value(*place, value)(data)
                path.write_text(json.dumps(data))
                assert "cannot be replayed" not in outcome(path), (place, value)


def outcome(path: Path) -> str:
    """Why a case is refused; empty if it is replayed."""
    try:
        replay(load_case(path))
    except CaseError as error:
        return str(error)
    return ""
