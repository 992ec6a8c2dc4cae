"""From a scenario to the objects that run it: allocator, scheduler, cost model, source of requests.

A policy's keywords are its configuration: the scenario has checked the built-in ones, and `package.module:Name`
gets its own. Classes of the user's are imported here, that is, only when a scenario is run.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvsim.scenario.fields import Custom, is_import_path
from kvsim.scenario.own_code import CheckedCost, CheckedScheduler, CheckedSource, checked_allocator, checked_policy
from kvsim.scenario.pool import Pool
from kvsim.scenario.schema import (
    ContiguousMemory,
    ContinuousScheduler,
    KernelCostConfig,
    LinearCostConfig,
    NoEvictScheduler,
    PagedMemory,
    RooflineCostConfig,
    Scenario,
    StaticScheduler,
    VllmV0Scheduler,
    VllmV1Scheduler,
)
from kvsim.types import KvsimError, ScenarioError

if TYPE_CHECKING:
    from kvsim.cost.interface import CostModel
    from kvsim.memory.interface import KVAllocator
    from kvsim.scheduling.interface import Scheduler
    from kvsim.workload.source import Source


@dataclass(frozen=True)
class Engine:
    """The parts of one simulation."""

    scheduler: Scheduler
    cost: CostModel
    source: Source
    bytes_per_token: int
    notes: tuple[str, ...] = ()

    def warnings(self) -> tuple[str, ...]:
        """What the parts have to say about themselves after a run: skipped rows, a profile left behind."""
        of_cost: Callable[[], Iterable[str]] = getattr(self.cost, "warnings", tuple)
        return (*self.notes, *self.source.notes, *of_cost())


def build(scenario: Scenario, *, detail: bool = False, journal: Any = None) -> Engine:
    """Make the parts of a scenario. `detail` fills every plan; `journal` observes every block. Raises ScenarioError."""
    pool = Pool(scenario)
    allocator = make_allocator(scenario, pool, journal)
    scheduler = make_scheduler(scenario, allocator, pool, detail=detail)
    return Engine(scheduler, make_cost(scenario, pool), make_source(scenario), pool.bytes_per_token, pool.notes())


_WITHOUT_ORIGINAL = (ContinuousScheduler, NoEvictScheduler, StaticScheduler)
"""Engines that imitate none, and so have none's faults."""


def make_allocator(scenario: Scenario, pool: Pool, journal: Any = None) -> KVAllocator:
    """The scenario's allocator over its memory. Raises ScenarioError."""
    config = scenario.allocator
    if problem := pool.problem():
        raise ScenarioError(f"memory: {problem}")
    if isinstance(config, PagedMemory):
        from kvsim.memory.paged import PagedAllocator

        return PagedAllocator(
            pool.num_blocks,
            config.block_size,
            num_host_blocks=pool.num_host_blocks,
            # vLLM 0.2.7 looks nothing up.
            enable_prefix_caching=config.enable_prefix_caching and not isinstance(scenario.scheduler, VllmV0Scheduler),
            free_list=config.free_list,
            sliding_window=config.sliding_window,
            null_block=config.null_block,
            upstream_faults=scenario.upstream_faults and not isinstance(scenario.scheduler, _WITHOUT_ORIGINAL),
            journal=journal,
        )
    if isinstance(config, ContiguousMemory):
        from kvsim.memory.contiguous import ContiguousAllocator

        return ContiguousAllocator(
            pool.num_slots, placement=config.placement, compaction=config.compaction, journal=journal
        )
    given = {"num_blocks": pool.num_blocks, "block_size": pool.block_size, "num_host_blocks": pool.num_host_blocks}
    if journal is not None:
        given["journal"] = journal
    return cast("KVAllocator", checked_allocator(_make_custom("allocator", config, (), given), config.type))


def make_scheduler(scenario: Scenario, allocator: KVAllocator, pool: Pool, *, detail: bool = False) -> Scheduler:
    """The scenario's scheduler over an allocator. Raises ScenarioError."""
    config = scenario.scheduler
    if isinstance(config, Custom):
        given = {"max_model_len": pool.max_model_len, "detail": detail, "engine_loop": scenario.engine_loop}
        return cast("Scheduler", CheckedScheduler(_make_custom("scheduler", config, (allocator,), given), config.type))
    keywords = {name: value for name, value in config.model_dump().items() if name != "type"}
    keywords |= {"max_model_len": pool.max_model_len, "detail": detail}
    make = _SCHEDULERS[type(config)]
    return make(config, allocator, keywords, scenario)


def _continuous(config: Any, allocator: Any, keywords: dict[str, Any], scenario: Scenario) -> Scheduler:
    from kvsim.memory.paged import PagedAllocator

    for name in ("preemption", "victim", "queue_order", "gate"):
        keywords[name] = _policy(keywords[name], name)
    keywords |= {**_common(scenario), "beam_policy": _beam_policy(scenario)}
    if isinstance(allocator, PagedAllocator):
        keywords["reservation"] = None  # Tables grow on demand, those of a subclass as well.
    elif config.reservation is not None:
        keywords["reservation"] = _reservation(config.reservation, keywords["max_model_len"])
    if isinstance(scenario.allocator, ContiguousMemory):
        from kvsim.scheduling.orca import OrcaScheduler

        return OrcaScheduler(allocator, **keywords)
    from kvsim.scheduling.paged import PagedScheduler

    return PagedScheduler(allocator, **keywords)


def _static(config: Any, allocator: Any, keywords: dict[str, Any], scenario: Scenario) -> Scheduler:
    from kvsim.scheduling.static import StaticScheduler

    keywords["reservation"] = _reservation(config.reservation, keywords["max_model_len"])
    return cast("Scheduler", StaticScheduler(allocator, **keywords))


def _no_evict(config: Any, allocator: Any, keywords: dict[str, Any], scenario: Scenario) -> Scheduler:
    from kvsim.scheduling.no_evict import NoEvictScheduler

    return NoEvictScheduler(allocator, **keywords, **_common(scenario), beam_policy=_beam_policy(scenario))


def _vllm_v0(config: Any, allocator: Any, keywords: dict[str, Any], scenario: Scenario) -> Scheduler:
    from kvsim.scheduling.vllm_v0 import VllmV0Scheduler

    keywords["max_model_len"] = keywords["max_model_len"] or allocator.num_blocks * allocator.block_size
    if keywords["max_num_batched_tokens"] is None:
        keywords["max_num_batched_tokens"] = max(keywords["max_model_len"], 2048)
    keywords["preemption"] = _policy(keywords["preemption"], "preemption")
    return cast(
        "Scheduler", VllmV0Scheduler(allocator, **keywords, **_common(scenario), beam_policy=_beam_policy(scenario))
    )


def _vllm_v1(config: Any, allocator: Any, keywords: dict[str, Any], scenario: Scenario) -> Scheduler:
    from kvsim.scheduling.vllm_v1 import VllmV1Scheduler
    from kvsim.scheduling.vllm_v1_async import VllmV1AsyncScheduler

    keywords["reserve_full_isl"] = keywords.pop("scheduler_reserve_full_isl")
    make = VllmV1AsyncScheduler if config.type == "vllm-v1-async" else VllmV1Scheduler
    return make(allocator, **keywords, **_common(scenario))


_SCHEDULERS: dict[type, Callable[[Any, Any, dict[str, Any], Scenario], Scheduler]] = {
    ContinuousScheduler: _continuous,
    StaticScheduler: _static,
    NoEvictScheduler: _no_evict,
    VllmV0Scheduler: _vllm_v0,
    VllmV1Scheduler: _vllm_v1,
}


def _common(scenario: Scenario) -> dict[str, Any]:
    return {
        "watermark": getattr(scenario.allocator, "watermark", 0.0),
        "engine_loop": scenario.engine_loop,
        "upstream_faults": scenario.upstream_faults,
    }


def _beam_policy(scenario: Scenario) -> Any:
    from kvsim.workload.beam import beam_policy

    sampling = getattr(scenario.workload, "sampling", None)
    return beam_policy(1.0 if sampling is None else sampling.theta)


def _reservation(name: str, max_model_len: int | None) -> Any:
    from kvsim.scheduling.reservations import make_reservation

    if max_model_len is None:
        raise ScenarioError("scheduler.max_model_len: is not given, and the model has none; reservations need it")
    return make_reservation(name, max_model_len)


def _policy(value: Any, name: str) -> Any:
    """A built-in policy keeps its name; `package.module:name` becomes the function."""
    from kvsim.scheduling import policies

    if is_import_path(value):
        return checked_policy(import_object(value, f"scheduler.{name}"), value, name)
    if isinstance(value, str) and name in ("victim", "queue_order"):
        return getattr(policies, value)
    return value


def make_cost(scenario: Scenario, pool: Pool) -> CostModel:
    """The scenario's cost model. Raises ScenarioError."""
    config = scenario.cost
    if isinstance(config, LinearCostConfig):
        from kvsim.cost.linear import LinearCost

        keywords = config.model_dump(exclude={"type"})
        return LinearCost(**keywords, bytes_per_token=pool.bytes_per_token, block_size=pool.block_size)
    if isinstance(config, Custom):
        given = {"bytes_per_token": pool.bytes_per_token, "block_size": pool.block_size}
        return CheckedCost(_make_custom("cost", config, (), given), config.type)
    return _kernel_cost(config, scenario, pool)


def _kernel_cost(config: KernelCostConfig | RooflineCostConfig, scenario: Scenario, pool: Pool) -> CostModel:
    from kvsim.cost.kernels import KernelCost, vllm_graph_sizes

    max_num_seqs = getattr(scenario.scheduler, "max_num_seqs", None) or 256
    common: dict[str, Any] = {
        "block_size": pool.block_size,
        "tensor_parallel_size": scenario.tensor_parallel_size,
        "kv_cache_dtype": scenario.kv_cache_dtype,
        "table_sync": config.table_sync,
        "cuda_graph_sizes": vllm_graph_sizes(max_num_seqs) if scenario.engine.startswith("vllm") else (),
        "cpu_schedule_us": config.cpu_schedule_us,
        # An engine that plans a step while the one before runs hides this work; its server takes the longer of both.
        "adds_cpu_time": scenario.engine != "vllm-v1-async",
        "table_entry_bytes": config.table_entry_bytes,
    }
    if isinstance(config, KernelCostConfig):
        profile = pool.gpu.name if config.profile is None else config.profile
        return KernelCost.from_profile(
            profile, pool.geometry, overhead_us=config.step_overhead_us, gpu=pool.gpu, **common
        )
    from kvsim.cost.roofline import roofline_cost

    return roofline_cost(
        pool.geometry,
        peak_tflops=config.peak_tflops,
        memory_bandwidth_gb_s=config.memory_bandwidth_gb_s,
        efficiency=config.efficiency,
        step_overhead_us=config.step_overhead_us,
        pcie_bandwidth_gb_s=config.pcie_bandwidth_gb_s,
        interconnect_gb_s=config.interconnect_gb_s,
        **common,
    )


def make_source(scenario: Scenario) -> Source:
    """The scenario's requests. Raises ScenarioError, also for a workload without any."""
    workload = scenario.workload
    if isinstance(workload, Custom):
        made = _make_custom("workload", workload, (), {"seed": scenario.seed})
        source = cast("Source", CheckedSource(made, workload.type))
    else:
        from kvsim.workload import build_source

        source = build_source(workload.model_dump(exclude_defaults=False), scenario.seed)
    if source.next_ns() is None and source.num_left == 0:
        limit = getattr(getattr(workload, "sessions", None), "max_context", None)
        if limit is not None:
            raise ScenarioError(
                f"workload.sessions.max_context: is {limit}, and the first turn of every session is longer: "
                "no request ever comes; raise it"
            )
        raise ScenarioError("workload: is empty: no request ever comes; check first, window and the trace")
    return source


def import_object(path: str, key: str) -> Any:
    """What `package.module:name` names. Raises ScenarioError if it cannot be imported."""
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ScenarioError(
            f"{key}: cannot import {module_name!r}: {type(error).__name__}: {error}; "
            "it must be installed, or lie in the working directory"
        ) from error
    if not hasattr(module, name):
        raise ScenarioError(f"{key}: module {module_name!r} has no {name!r}")
    return getattr(module, name)


def _make_custom(key: str, config: Custom, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    """Call a class of the user's with its own keywords, and those of `given` that it takes."""
    make = import_object(config.type, f"{key}.type")
    accepted = _keywords_of(make)
    offered = {name: value for name, value in given.items() if accepted is None or name in accepted}
    if accepted is not None and (unknown := [name for name in config.keywords if name not in accepted]):
        raise ScenarioError(
            f"{key}: {config.type} does not take {unknown[0]!r}; it takes {', '.join(sorted(accepted)) or 'nothing'}"
        )
    try:
        return make(*args, **(offered | config.keywords))
    except KvsimError:
        raise
    except Exception as error:
        raise ScenarioError(f"{key}: {config.type} cannot be made: {type(error).__name__}: {error}") from error


def _keywords_of(make: Callable[..., Any]) -> set[str] | None:
    """Names it can be called with; None if it takes any."""
    parameters = inspect.signature(make).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
