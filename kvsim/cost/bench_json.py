"""The engine's overhead per step from `vllm bench serve --save-detailed` JSON: gaps between a client's tokens.

Start times, times to the first token and inter-token latencies give the instant of every token. Tokens of all
requests that come together are one step; a step in which nobody got a first token was decode-only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.cost.from_run import MOST_US, Gap, Overhead, did_not_converge, overhead_of_gaps, too_slow
from kvsim.cost.interface import CostModel
from kvsim.scheduling.plan import StepShape
from kvsim.types import ScenarioError
from kvsim.workload.trace_files import open_text

_NEEDED = ("input_lens", "start_times", "ttfts", "itls")
_SAME_STEP_S = 0.002
"""Tokens of one step reach the clients within this; streams are flushed one after another."""
_MOST = 1e12


def read_bench(path: str | Path) -> Mapping[str, Any]:
    """The JSON of a benchmark. Raises ScenarioError naming the list that is missing or of another length."""
    path = Path(path)
    try:
        with open_text(path) as handle:
            data = json.loads(handle.read())
    except ValueError as error:
        several = "; of several results (--append-result) keep one" if "Extra data" in str(error) else ""
        raise ScenarioError(f"{path}: not JSON: {error}{several}") from None
    if not isinstance(data, Mapping):
        raise ScenarioError(f"{path}: must be a JSON object, as vllm bench serve --save-detailed writes it")
    for name in _NEEDED:
        if not isinstance(data.get(name), list):
            raise ScenarioError(
                f"{path}: has no list {name!r}; vllm bench serve writes it with --save-result --save-detailed "
                f"(start_times: since 0.12)"
            )
    num = len(data["input_lens"])
    for name in _NEEDED:
        if len(data[name]) != num:
            raise ScenarioError(f"{path}: {name} has {len(data[name])} entries, input_lens {num}")
    for index, (ttft, itls) in enumerate(zip(data["ttfts"], data["itls"], strict=True)):
        if not ttft and not itls:
            continue  # a failed request
        for name in ("input_lens", "start_times", "ttfts"):
            _check_number(data[name][index], f"{path}: {name}[{index}]")
        if data["input_lens"][index] % 1:
            raise ScenarioError(f"{path}: input_lens[{index}] is {data['input_lens'][index]}; it must be whole tokens")
        if not isinstance(itls, list):
            raise ScenarioError(
                f"{path}: itls[{index}] is {itls!r}; it must be the list of the request's inter-token latencies, which "
                f"vllm bench serve writes with --save-detailed"
            )
        for place, itl in enumerate(itls):
            _check_number(itl, f"{path}: itls[{index}][{place}]")
    return data


def _check_number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ScenarioError(
            f"{where} is {value!r}; it must be a number from 0 to {_MOST:g} (times in seconds): use the file as vllm "
            f"bench serve --save-detailed wrote it"
        )


def token_times(data: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(seconds, is the request's first token, tokens the request then holds) of every token, by time."""
    times, firsts, held = [], [], []
    for length, start, ttft, itls in zip(*(data[name] for name in _NEEDED), strict=True):
        if not ttft and not itls:
            continue  # a failed request
        instants = start + ttft + np.concatenate([[0.0], np.cumsum(itls)])
        times.append(instants)
        firsts.append(np.arange(len(instants)) == 0)
        held.append(length + np.arange(len(instants)))
    if not times:
        raise ScenarioError("the benchmark has no successful request")
    order = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(times)[order], np.concatenate(firsts)[order], np.concatenate(held)[order]


def bench_overhead(path: str | Path, cost: CostModel) -> Overhead:
    """Overhead per step; `cost` prices kernels alone. Raises ScenarioError where too few steps can be told apart."""
    times, firsts, held = token_times(read_bench(path))
    begins = np.flatnonzero(np.concatenate([[True], np.diff(times) > _SAME_STEP_S]))
    ends = np.append(begins[1:], len(times))
    gaps = []
    for before, (begin, end) in zip(begins[:-1], zip(begins[1:], ends[1:], strict=True), strict=True):
        shape = _shape(firsts[begin:end], held[begin:end])
        is_mixed = bool(shape.prefills)
        gaps.append(
            Gap(1e6 * float(times[begin] - times[before]), cost.step_ns(shape) / 1e3, int(not is_mixed), int(is_mixed))
        )
    found = overhead_of_gaps(gaps, Path(path).name)
    if found is None:
        raise ScenarioError(f"{path}: too few decode-only steps can be told apart")
    if found.decode_step_us > MOST_US:
        raise too_slow(path, found, "start_times, ttfts and itls")
    if not found.settled:
        raise did_not_converge(path, found)
    return found


def _shape(firsts: np.ndarray, held: np.ndarray) -> StepShape:
    context = held[~firsts]
    prefills = tuple((0, int(length)) for length in held[firsts])
    return StepShape(len(context), int(context.sum()), prefills)
