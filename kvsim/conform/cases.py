"""Recorded cases on disk: finding them, telling their formats apart, and refusing what cannot be replayed.

The checks below cover what a replay reads, so that a wrong file is named with what is wrong in it, and a fault of
ours is never mistaken for one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvsim.types import KvsimError

Kind: TypeAlias = Literal["bm", "sched", "v1"]

BM_ARITY = {
    "group": 3, "can_alloc": 1, "can_append": 1, "can_swap_out": 1, "can_swap_in": 1, "alloc": 1, "append": 1,
    "fork": 2, "free": 1, "recompute": 1, "swap_out": 1, "swap_in": 1,
}  # fmt: skip
"""Operations of a block-manager case and how many arguments each takes."""


MAX_SEQUENCES = {"bm": 100, "sched": 1000}
"""Sequences of a group: more would not have names of their own."""
_MOST = (1 << 31) - 1
_MOST_BLOCKS = 1_000_000
_MOST_BLOCK_SIZE = 1 << 20
_MOST_SECONDS = 9e9


class CaseError(KvsimError):
    """A case file is missing, or does not say what its format asks for."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case file: where it lies, its format, and its content."""

    path: Path
    kind: Kind
    data: dict[str, Any]


def find_cases(paths: Iterable[str | Path]) -> list[Path]:
    """Every case file among files and folders (searched through), in order. Raises CaseError, naming the path."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.rglob("*.json"))
            if not inside:
                raise CaseError(f"{path}: no *.json case in this folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise CaseError(f"{path}: no such file or folder")
    if not found:
        raise CaseError("no cases: name a case file, or a folder of them")
    return found


def load_case(path: Path) -> Case:
    """Read and check one case. Raises CaseError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise CaseError(f"{path}: not JSON: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{path}: cannot be read: {error}") from None
    try:
        return _checked(path, data)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from None


def _checked(path: Path, data: Any) -> Case:
    kind = _kind_of(data)
    _CHECKS[kind](data)
    name = "name" if kind == "v1" else "id"
    if name in data:
        _get(data, "", name, str)
    data.setdefault(name, path.stem)
    return Case(path, kind, data)


def _kind_of(data: Any) -> Kind:
    if not isinstance(data, dict):
        raise CaseError(f"a case is a JSON object, this is {_shown(data)}")
    if data.get("kind") in ("bm", "sched"):
        return "bm" if data["kind"] == "bm" else "sched"
    if "kind" in data:
        raise CaseError(f"kind: {_shown(data['kind'])} is unknown; it is bm or sched")
    if {"config", "requests", "expected"} & data.keys():
        return "v1"
    raise CaseError('not a case: it has neither "kind" (bm, sched) nor "config", "requests" and "expected" (v1)')


def _check_bm(case: dict[str, Any]) -> None:
    _check_pool(_get(case, "", "cfg", dict))
    ops, out = _get(case, "", "ops", list), _get(case, "", "out", list)
    if len(ops) != len(out):
        raise CaseError(f"{len(ops)} ops, but {len(out)} out")
    for index, op in enumerate(ops):
        _check_op(op, f"ops[{index}]")
        if not isinstance(out[index], list):
            raise CaseError(f"out[{index}]: {_shown(out[index])} is no list")


def _check_op(op: Any, where: str) -> None:
    if not (isinstance(op, list) and op and isinstance(op[0], str) and op[0] in BM_ARITY):
        raise CaseError(f"{where}: {_shown(op)} is no operation; those are {', '.join(BM_ARITY)}")
    name, *args = op
    if len(args) != BM_ARITY[name] or not all(map(_is_int, args)):
        raise CaseError(f"{where}: {name} takes {BM_ARITY[name]} integers, not {_shown(args)}")
    if not all(0 <= arg <= _MOST for arg in args):
        raise CaseError(f"{where}: {_shown(op)}: numbers of groups and sequences, and lengths, are 0 to {_MOST:,}")
    if name == "group" and not (1 <= args[1] <= MAX_SEQUENCES["bm"] and args[2] >= 1):
        raise CaseError(f"{where}: {_shown(op)}: a group has 1 to {MAX_SEQUENCES['bm']} sequences of at least 1 token")


def _check_sched(case: dict[str, Any]) -> None:
    cfg = _get(case, "", "cfg", dict)
    _check_pool(cfg)
    for key, least in (("mns", 1), ("mnbt", 1), ("mpad", 0), ("mml", 1)):
        _integer(cfg, "cfg.", key, least)
    groups = _get(case, "", "groups", list)
    for index, group in enumerate(groups):
        _check_group(group, f"groups[{index}]")
    numbers = [group["g"] for group in groups]
    if len(set(numbers)) < len(numbers):
        raise CaseError(f"groups: numbers are not distinct: {_shown(numbers)}")
    for index, abort in enumerate(_get(case, "", "aborts", list)):
        if not (isinstance(abort, list) and len(abort) == 2 and all(map(_is_int, abort)) and abort[0] >= 0):
            raise CaseError(f"aborts[{index}]: {_shown(abort)} is not [step, group]")
        if abort[1] not in numbers:
            raise CaseError(f"aborts[{index}]: {_shown(abort)} names a group that is not there: {_shown(numbers)}")
    _check_records(_get(case, "", "steps", list), "steps")


def _check_pool(cfg: dict[str, Any]) -> None:
    for key, least, most in (("bs", 1, _MOST_BLOCK_SIZE), ("gpu", 1, _MOST_BLOCKS), ("cpu", 0, _MOST_BLOCKS)):
        _integer(cfg, "cfg.", key, least, most)
    _fraction(cfg, "cfg.", "wm")
    window = cfg.get("sw")
    if window is not None and not (_is_int(window) and 0 < window <= _MOST and window % cfg["bs"] == 0):
        raise CaseError(f"cfg.sw: {_shown(window)} is not a multiple of the block size {cfg['bs']}")


def _check_group(group: Any, where: str) -> None:
    if not isinstance(group, dict):
        raise CaseError(f"{where}: {_shown(group)} is no object")
    for key, least, most in (("g", 0, _MOST), ("at", 0, _MOST), ("plen", 1, _MOST), ("n", 1, MAX_SEQUENCES["sched"])):
        _integer(group, f"{where}.", key, least, most)
    _seconds(group, f"{where}.", "arr")
    mode = _there(group, f"{where}.", "mode")
    if mode not in ("greedy", "par", "beam"):
        raise CaseError(f"{where}.mode: {_shown(mode)} is unknown; it is greedy, par or beam")
    if mode == "beam":
        for step, moves in enumerate(_get(group, f"{where}.", "ev", list)):
            if not (isinstance(moves, list) and all(map(_is_move, moves))):
                raise CaseError(
                    f'{where}.ev[{step}]: {_shown(moves)} is no list of ["k", parent, child] and ["f", beam]'
                )
        return
    lengths = _get(group, f"{where}.", "out", list)
    if len(lengths) != group["n"] or not all(_is_int(length) and 0 < length <= _MOST for length in lengths):
        raise CaseError(f"{where}.out: {_shown(lengths)} is not {group['n']} output lengths of at least 1")


def _check_v1(case: dict[str, Any]) -> None:
    config = _get(case, "", "config", dict)
    _integer(config, "config.", "block_size", 1, _MOST_BLOCK_SIZE)
    # One block is the null block's.
    _integer(config, "config.", "num_blocks", 2, _MOST_BLOCKS)
    for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        _integer(config, "config.", key, 1)
    for key in ("long_prefill_token_threshold", "max_loras"):
        _integer(config, "config.", key, 0)
    for key in ("enable_prefix_caching", "enable_chunked_prefill", "reserve_full_isl"):
        _get(config, "config.", key, bool)
    _fraction(config, "config.", "watermark")
    if case.get("trace", "full") not in ("full", "compact"):
        raise CaseError(f"trace: {_shown(case['trace'])} is unknown; it is full or compact")
    policy = _there(config, "config.", "policy")
    if policy not in ("fcfs", "priority"):
        raise CaseError(f"config.policy: {_shown(policy)} is unknown; it is fcfs or priority")
    requests = _get(case, "", "requests", list)
    for index, request in enumerate(requests):
        _check_request(request, f"requests[{index}]")
        if (num_tokens := len(request["prompt_token_ids"])) >= config["max_model_len"]:
            rule = f"a prompt is shorter than config.max_model_len, {config['max_model_len']}"
            raise CaseError(f"requests[{index}].prompt_token_ids: length {num_tokens}; {rule}")
    names = [request["id"] for request in requests]
    if len(set(names)) < len(names):
        raise CaseError(f"requests: ids are not distinct: {_shown(names)}")
    expected = _get(case, "", "expected", dict)
    _check_records(_get(expected, "expected.", "steps", list), "expected.steps")
    _get(expected, "expected.", "end", dict)


def _check_request(request: Any, where: str) -> None:
    if not isinstance(request, dict):
        raise CaseError(f"{where}: {_shown(request)} is no object")
    _get(request, f"{where}.", "id", str)
    _integer(request, f"{where}.", "arrival_step", 0)
    for key in ("prompt_token_ids", "output_token_ids"):
        tokens = _get(request, f"{where}.", key, list)
        if not tokens or not all(_is_int(token) and 0 <= token <= _MOST for token in tokens):
            raise CaseError(f"{where}.{key}: {_shown(tokens)} is not a list of token ids from 0 to {_MOST:,}")
    if "max_tokens" in request:
        _integer(request, f"{where}.", "max_tokens", len(request["output_token_ids"]))
    if "priority" in request:
        _integer(request, f"{where}.", "priority", -_MOST)
    if "arrival_time" in request:
        _seconds(request, f"{where}.", "arrival_time")
    for key in ("cache_salt", "lora"):
        if request.get(key) is not None:
            _get(request, f"{where}.", key, str)
    if request.get("abort_at_step") is not None:
        _integer(request, f"{where}.", "abort_at_step", 0)
    if "abort_mid" in request:
        _get(request, f"{where}.", "abort_mid", bool)


def _check_records(records: list[Any], where: str) -> None:
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise CaseError(f"{where}[{index}]: {_shown(record)} is no record")
        _integer(record, f"{where}[{index}].", "t", 0)


def _there(holder: dict[str, Any], where: str, key: str) -> Any:
    if key not in holder:
        raise CaseError(f"{where}{key} is missing")
    return holder[key]


def _get(holder: dict[str, Any], where: str, key: str, kind: type) -> Any:
    value = _there(holder, where, key)
    if not isinstance(value, kind):
        raise CaseError(f"{where}{key}: {_shown(value)} is no {_TYPE_NAMES[kind]}")
    return value


def _integer(holder: dict[str, Any], where: str, key: str, least: int, most: int = _MOST) -> None:
    value = _there(holder, where, key)
    if not _is_int(value) or not least <= value <= most:
        raise CaseError(f"{where}{key}: {_shown(value)} is not an integer from {least} to {most:,}")


def _fraction(holder: dict[str, Any], where: str, key: str) -> None:
    value = _there(holder, where, key)
    if not _is_number(value) or not 0 <= value <= 1:
        raise CaseError(f"{where}{key}: {_shown(value)} is not a fraction from 0 to 1")


def _seconds(holder: dict[str, Any], where: str, key: str) -> None:
    value = _there(holder, where, key)
    if not _is_number(value) or not abs(value) <= _MOST_SECONDS:
        raise CaseError(f"{where}{key}: {_shown(value)} is no number of seconds, at most {_MOST_SECONDS:.0f}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_move(move: Any) -> bool:
    return (
        isinstance(move, list)
        and bool(move)
        and (move[0], len(move)) in (("k", 3), ("f", 2))
        and all(map(_is_int, move[1:]))
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


_TYPE_NAMES: dict[type, str] = {dict: "object", list: "list", str: "string", bool: "boolean"}
_CHECKS: dict[Kind, Callable[[dict[str, Any]], None]] = {"bm": _check_bm, "sched": _check_sched, "v1": _check_v1}
