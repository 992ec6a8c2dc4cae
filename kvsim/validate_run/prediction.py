"""A recorded run simulated: its requests at its queue times, everything else predicted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.types import NS_PER_S, Ns, ScenarioError
from kvsim.validate_run.metrics import metrics_of
from kvsim.validate_run.recorded import RecordedRun
from kvsim.validate_run.setting import Setting

if TYPE_CHECKING:
    from kvsim.cost.kernels import GemmTiles, KernelCost
    from kvsim.request import Request, Sequence
    from kvsim.scenario.schema import Scenario
    from kvsim.scheduling.plan import StepOutcome, StepPlan, StepShape
    from kvsim.sim.run import Simulation
    from kvsim.workload.trace import Trace

HASH_BLOCK = 16
"""Tokens per hash id of the workloads that were recorded with the runs."""


@dataclass
class StepLog:
    """One entry per executed step: when it ended, what it was, and how full the engine was."""

    start_ns: list[Ns] = field(default_factory=list)
    end_ns: list[Ns] = field(default_factory=list)
    shapes: list[StepShape] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def on_submit(self, request: Request, reason: str | None, now: Ns) -> None:
        """Requests are read from the recorder."""

    def on_plan(self, plan: StepPlan, now: Ns) -> None:
        """Nothing to note before a step has run."""

    def on_step(self, plan: StepPlan, outcome: StepOutcome, start_ns: Ns, end_ns: Ns) -> None:
        """Note the step."""
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.shapes.append(plan.shape)
        self.running.append(plan.num_running)
        self.waiting.append(plan.num_waiting)

    def on_abort(self, request_id: str, sequences: tuple[Sequence, ...], now: Ns) -> None:
        """Recorded runs abort nothing."""


@dataclass(frozen=True)
class Prediction:
    """A simulated run: per request (in workload order) seconds after the first queued one, and the steps."""

    setting: Setting
    queued_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    output_len: np.ndarray
    steps: StepLog
    used_blocks: np.ndarray
    cost: KernelCost
    num_preemptions: int
    notes: tuple[str, ...] = ()
    """What of the workload the run did otherwise."""

    def metrics(self) -> dict[str, float]:
        """The comparison's metrics of the prediction."""
        return metrics_of(self.queued_s, self.first_token_s, self.last_token_s, self.output_len)

    def step_of(self, token_s: np.ndarray) -> np.ndarray:
        """The step at whose end each token came."""
        ends = np.array(self.steps.end_ns, dtype=float)
        return np.searchsorted(ends, token_s * NS_PER_S - 0.5)

    def series(self, times_s: np.ndarray) -> dict[str, np.ndarray]:
        """Running, waiting and KV usage in per cent at the given times after the first queued request."""
        ends = np.array(self.steps.end_ns, dtype=float) / NS_PER_S
        index = np.searchsorted(ends, times_s, side="right") - 1
        usable = self.setting.num_gpu_blocks - 1
        columns = {
            "running": np.array(self.steps.running, dtype=float),
            "waiting": np.array(self.steps.waiting, dtype=float),
            "kv_cache_pct": 100.0 * self.used_blocks / max(1, usable),
        }
        last = len(ends) - 1
        inside = (index >= 0) & (times_s <= ends[-1])
        return {name: np.where(inside, values[np.clip(index, 0, last)], 0.0) for name, values in columns.items()}


def predict(
    run: RecordedRun,
    workload: str | Path,
    setting: Setting,
    *,
    decode_overhead_us: float | None = None,
    mixed_overhead_us: float | None = None,
    gemm_tiles: GemmTiles | None = None,
) -> Prediction:
    """Simulate the run's requests as they were queued. `None` overheads are those of the profile.

    Raises ScenarioError if the workload does not match the run.
    """
    from kvsim.metrics.export import request_columns, step_columns
    from kvsim.registry import make_allocator, make_scheduler
    from kvsim.scenario.pool import Pool
    from kvsim.sim.run import simulate
    from kvsim.workload.builder import trace_source
    from kvsim.workload.spec import WorkloadSpec
    from kvsim.workload.streams import streams

    scenario = _scenario(setting)
    pool = Pool(scenario)
    scheduler = make_scheduler(scenario, make_allocator(scenario, pool), pool)
    cost = kernel_cost(setting, decode_overhead_us, mixed_overhead_us, gemm_tiles)
    trace, order, notes = _queued_trace(run, workload, setting)
    source = trace_source(WorkloadSpec(trace=str(workload)), trace, streams(0))
    log = StepLog()
    simulation: Simulation = simulate(scheduler, cost, source, observers=(log,))
    columns = request_columns(simulation.recorder)
    rows = {str(name): index for index, name in enumerate(columns["request_id"])}
    place = np.array([rows[str(i)] for i in range(len(order))])[np.argsort(order)]
    unfinished = [i for i in place if columns["status"][i] != "finished"]
    if unfinished:
        reason = columns["reason"][unfinished[0]] or columns["status"][unfinished[0]]
        raise ScenarioError(f"{workload}: {len(unfinished)} requests do not finish in the simulation: {reason}")
    times = {name: np.asarray(columns[name], dtype=float)[place] for name in ("arrival_s", "first_token_s", "finish_s")}
    used = np.asarray(step_columns(simulation.recorder)["used_blocks"], dtype=float)
    return Prediction(
        setting,
        times["arrival_s"],
        times["first_token_s"],
        times["finish_s"],
        np.asarray(columns["output_tokens"], dtype=float)[place],
        log,
        used[: len(log.end_ns)],
        cost,
        int(np.sum(columns["num_preemptions"])),
        notes,
    )


def kernel_cost(
    setting: Setting, decode_overhead_us: float | None, mixed_overhead_us: float | None, tiles: GemmTiles | None
) -> KernelCost:
    """The price of the engine's steps; None overheads and tiles are those of the profile."""
    from kvsim.cost.kernels import KernelCost, vllm_graph_sizes

    return KernelCost.from_profile(
        setting.profile,
        setting.geometry,
        block_size=setting.block_size,
        tensor_parallel_size=setting.tensor_parallel_size,
        kv_cache_dtype=setting.kv_cache_dtype,
        overhead_us=decode_overhead_us,
        mixed_overhead_us=mixed_overhead_us,
        gemm_tiles=tiles,
        cuda_graph_sizes=vllm_graph_sizes(setting.max_num_seqs),
        adds_cpu_time=setting.engine == "vllm-v1",
        gpu=setting.gpu_spec,
    )


def _scenario(setting: Setting) -> Scenario:
    from kvsim.scenario.resolve import scenario_from_dict

    return scenario_from_dict(
        {
            "name": "validate-run",
            "engine": setting.engine,
            "model": setting.model,
            "gpu": setting.gpu
            if setting.gpu_spec.memory_bandwidth
            else {"name": setting.gpu, "memory": setting.gpu_memory_bytes},
            "tensor_parallel_size": setting.tensor_parallel_size,
            "kv_cache_dtype": setting.kv_cache_dtype,
            "memory": {"num_gpu_blocks_override": setting.num_gpu_blocks},
            "allocator": {
                "block_size": setting.block_size,
                "enable_prefix_caching": setting.enable_prefix_caching,
                "watermark": setting.watermark,
            },
            "scheduler": {
                "max_num_seqs": setting.max_num_seqs,
                "max_num_batched_tokens": setting.max_num_batched_tokens,
                "max_model_len": setting.max_model_len,
                "scheduling_policy": setting.scheduling_policy,
                "enable_chunked_prefill": setting.enable_chunked_prefill,
                "long_prefill_token_threshold": setting.long_prefill_token_threshold,
                "scheduler_reserve_full_isl": setting.scheduler_reserve_full_isl,
            },
        },
        source="the recorded run",
    ).scenario


def _queued_trace(
    run: RecordedRun, workload: str | Path, setting: Setting
) -> tuple[Trace, np.ndarray, tuple[str, ...]]:
    """The workload's requests at the run's queue times; the order in which they were queued; and what differs."""
    from kvsim.workload.trace import in_file_order

    trace = in_file_order(_load_workload(workload))
    notes = trace.notes
    wanted = np.array([request.input_len for request in run.requests])
    rows = _workload_rows(run, np.asarray(trace.prompt), wanted, workload)
    if len(rows) < len(trace):
        notes += (
            f"{len(trace) - len(rows)} of the workload's {len(trace)} requests are not in the run: they are not "
            f"simulated, and what load they were to the engine is not predicted",
        )
    trace = trace.take(rows)
    if not np.array_equal(np.asarray(trace.prompt), wanted):
        at = int(np.flatnonzero(np.asarray(trace.prompt) != wanted)[0])
        raise ScenarioError(
            f"{workload}: row {int(rows[at]) + 1} has {int(trace.prompt[at])} prompt tokens, request "
            f"{run.requests[at].request_id} of the run {int(wanted[at])}: not the workload of this run, or in "
            "another order: a request is the row whose number ends its id, else the row at its own place"
        )
    trace, changed = _with_outputs(run, trace, setting)
    notes += changed
    start = run.first_queued_s
    queued = np.array([round((request.queued_s - start) * NS_PER_S) for request in run.requests], dtype=np.int64)
    order = np.argsort(queued, kind="stable")
    queued_trace = replace(trace.take(order), arrival_ns=queued[order], file_rank=None)
    return queued_trace, order, notes


def _with_outputs(run: RecordedRun, trace: Trace, setting: Setting) -> tuple[Trace, tuple[str, ...]]:
    """The run's own output lengths: an end-of-sequence token or max_tokens may have ended what the workload says."""
    outputs = np.array([request.output_len for request in run.requests], dtype=np.int64)
    too_long = np.flatnonzero(np.asarray(trace.prompt) + outputs > setting.max_model_len)
    if len(too_long):
        request = run.requests[int(too_long[0])]
        raise ScenarioError(
            f"{run.folder / 'requests.jsonl'}: request {request.request_id} has input_toks {request.input_len} and "
            f"output_toks {request.output_len}, max_model_len is {setting.max_model_len}: correct the row, or "
            f"max_model_len in meta.json"
        )
    num_other = int(np.sum(outputs != np.asarray(trace.output)))
    if not num_other:
        return trace, ()
    stated = None if trace.max_output is None else np.maximum(trace.max_output, outputs)
    note = (
        f"{num_other} of {len(outputs)} requests put out more or less than the workload says: simulated as in the run"
    )
    return replace(trace, output=outputs, max_output=stated), (note,)


def _load_workload(workload: str | Path) -> Trace:
    """Its ids stand for 16 tokens each, or for as many as fit the file where those do not."""
    from kvsim.workload.traces import load_trace

    trace = load_trace(workload, hash_block_size=HASH_BLOCK, needs_times=False, skipped_by=None)
    if trace.hash_ids is None:
        return trace
    num_ids, prompt = np.diff(np.asarray(trace.hash_offsets)), np.asarray(trace.prompt)
    is_right = (num_ids == -(-prompt // HASH_BLOCK)) | (num_ids == prompt // HASH_BLOCK)
    return trace if 2 * is_right.sum() >= len(trace) else load_trace(workload, needs_times=False, skipped_by=None)


def _workload_rows(run: RecordedRun, prompts: np.ndarray, wanted: np.ndarray, workload: str | Path) -> np.ndarray:
    """The workload row of every request: the number in its id, counted from 0 or from 1, or its place.

    Of these the first whose prompts are the run's; the first at all if there is none.
    """
    num_rows, num_requests = len(prompts), len(run.requests)
    if num_requests > num_rows:
        raise ScenarioError(f"{workload}: {num_rows} requests, the run has {num_requests}")
    tails = ["".join(c for c in request.request_id.rsplit("-", 1)[-1] if c.isdigit()) for request in run.requests]
    numbers = [int(tail) if tail else -1 for tail in tails]
    ways = [np.arange(num_requests)]
    if len(set(numbers)) == len(numbers):
        for first in (1, 0):
            if first <= min(numbers) and max(numbers) - first < num_rows:
                ways.insert(0, np.array(numbers) - first)
    return next((rows for rows in ways if np.array_equal(prompts[rows], wanted)), ways[0])
