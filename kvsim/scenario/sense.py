"""What must be true of several values together, and what their user should be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvsim.scenario.fields import Block, Custom
from kvsim.scenario.layout import blocks, keys_at
from kvsim.scenario.messages import join, unknown_key
from kvsim.scenario.pool import Pool
from kvsim.scenario.schema import (
    ContiguousMemory,
    ContinuousScheduler,
    KernelCostConfig,
    LinearCostConfig,
    Memory,
    NoEvictScheduler,
    PagedMemory,
    RooflineCostConfig,
    Scenario,
    StaticScheduler,
    VllmV0Scheduler,
    VllmV1Scheduler,
)
from kvsim.scenario.words import did_you_mean
from kvsim.scenario.workload_schema import (
    BatchArrivals,
    FixedLengths,
    GammaArrivals,
    Sessions,
    UniformLengths,
    Workload,
)
from kvsim.types import ScenarioError, shown
from kvsim.yaml_loader import Key, dotted

if TYPE_CHECKING:
    from kvsim.scenario.resolve import ResolvedScenario


class Finding(NamedTuple):
    """A key, and what is wrong with its value (fatal), or worth knowing."""

    key: Key
    text: str
    is_fatal: bool = True


Check: TypeAlias = Callable[[Scenario], Iterator[Finding]]


def check_sense(resolved: ResolvedScenario) -> tuple[str, ...]:
    """The scenario's warnings. Raises ScenarioError with everything that cannot be right."""
    # Without a pool the other checks have nothing to stand on.
    told = tuple(text for checks in ((_memory_is_there,), CHECKS) for text in _told(resolved, checks))
    return (*told, *_hardware_is_priced(resolved))


class _Unpriced(NamedTuple):
    """What the step times of a cost model do not follow, the keys that say it by hand, and what to do."""

    names: tuple[str, ...]
    prices: tuple[str, ...]
    cure: str


_LINEAR = _Unpriced(
    ("model", "gpu", "tensor_parallel_size", "kv_cache_dtype"),
    ("step_ms", "prefill_token_us", "decode_us", "context_token_ns"),
    "use type kernels (profiles of GPUs) or roofline, or change its coefficients too",
)
_ROOFLINE = _Unpriced(
    ("gpu",), ("peak_tflops", "memory_bandwidth_gb_s"), "change peak_tflops and memory_bandwidth_gb_s too"
)
_PROFILE = _Unpriced(("gpu",), ("profile",), "leave profile out, and it is that of the GPU")


def _hardware_is_priced(resolved: ResolvedScenario) -> Iterator[str]:
    """Whoever varies the hardware, and does not merely name it, but leaves the prices finds the same step times.

    The text names no value, so that a sweep tells it once.
    """
    unpriced = _unpriced(resolved.scenario)
    if unpriced is None:
        return
    changed = {override.key for override in resolved.overrides}
    varied = [name for name in unpriced.names if any(key[0] == name for key in changed)]
    if varied and ("cost",) not in changed and not any(("cost", name) in changed for name in unpriced.prices):
        yield (
            f"{resolved.where(('cost',))}: cost: is {_kind_of(resolved.scenario)}: step times are the same for every "
            f"{' and '.join(varied)}; {unpriced.cure}"
        )


def _unpriced(scenario: Scenario) -> _Unpriced | None:
    cost = scenario.cost
    if isinstance(cost, LinearCostConfig):
        return _LINEAR
    if isinstance(cost, RooflineCostConfig):
        return _ROOFLINE
    return _PROFILE if isinstance(cost, KernelCostConfig) and cost.profile is not None else None


def _kind_of(scenario: Scenario) -> str:
    profile = getattr(scenario.cost, "profile", None)
    return scenario.cost.type + (f" with profile {profile}" if profile is not None else "")


def _told(resolved: ResolvedScenario, checks: tuple[Check, ...]) -> list[str]:
    findings = [finding for check in checks for finding in check(resolved.scenario)]
    told = [(f"{resolved.where(key)}: {dotted(key)}: {text}", is_fatal) for key, text, is_fatal in findings]
    if fatal := [text for text, is_fatal in told if is_fatal]:
        raise ScenarioError(join(fatal))
    return [text for text, _ in told]


def longest_prompt(workload: Workload) -> int | None:
    """The longest prompt that can come, where the scenario alone tells."""
    if workload.trace is not None or workload.sessions is not None or workload.content is not None:
        return None
    if workload.requests is not None:
        lengths = [request.get("prompt_tokens") for request in workload.requests]
        known = [length for length in lengths if isinstance(length, int)]
        return max(known) if known and len(known) == len(lengths) else None
    if isinstance(workload.lengths, FixedLengths | UniformLengths):
        return _ends(workload.lengths.prompt)[1]
    return None


def _memory_is_there(scenario: Scenario) -> Iterator[Finding]:
    """Model, GPU and bytes make a pool that something fits into."""
    pool = Pool(scenario)
    if (finding := _unusable(scenario, pool)) is not None:
        yield finding
        return
    if problem := pool.problem():
        yield _too_small(scenario, pool, problem)
        return
    yield from _lengths_fit(scenario, pool)
    preemption, swap_space = getattr(scenario.scheduler, "preemption", None), scenario.memory.swap_space
    is_asked_for = preemption == "swap" or (swap_space and preemption in ("auto", "swap_forked"))
    if is_asked_for and pool.num_host_blocks == 0 and not isinstance(scenario.allocator, ContiguousMemory):
        size = f"holds no block ({swap_space:,} bytes)" if swap_space else "is 0"
        text = f"is {preemption}, and memory.swap_space {size}: victims are recomputed"
        yield Finding(("scheduler", "preemption"), text, False)


def _unusable(scenario: Scenario, pool: Pool) -> Finding | None:
    """The first part of the pool that cannot be told, with its key; None where all can."""
    from kvsim.memory.geometry import GeometryError

    asked: tuple[tuple[Key, Callable[[], object]], ...] = (
        (("model",), lambda: pool.geometry),
        (("model",), lambda: _has_a_dtype(pool)),
        (("gpu",), lambda: pool.gpu),
        (("kv_cache_dtype",), lambda: pool.geometry.layer_bytes_per_token(scenario.kv_cache_dtype)),
        (("tensor_parallel_size",), lambda: pool.bytes_per_token),
        (("memory",), lambda: pool.num_blocks),
    )
    for key, ask in asked:
        try:
            ask()
        except GeometryError as error:
            # What the memory arithmetic finds wrong is the model's all the same.
            return Finding(("model",) if key == ("memory",) else key, str(error))
        except ScenarioError as error:
            return Finding(key, str(error).removeprefix("memory: "))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # A config.json may hold anything; what its reader did not foresee is still the file's fault.
            return Finding(key, f"is {shown(getattr(scenario, str(key[0])))}, which cannot be used: {error}")
    return None


def _has_a_dtype(pool: Pool) -> None:
    from kvsim.memory.geometry import GeometryError

    try:
        pool.geometry.element_dtype(pool.scenario.kv_cache_dtype)
    except GeometryError as error:
        model = f"{pool.scenario.model}: " if isinstance(pool.scenario.model, str) else ""
        fault = str(error).removesuffix(": give dtype")
        raise ScenarioError(f"{model}{fault}; say kv_cache_dtype, such as bfloat16, or add dtype to it") from None


def _too_small(scenario: Scenario, pool: Pool, problem: str) -> Finding:
    """Blame the block size where smaller blocks would do, else whatever says how much memory there is."""
    memory = scenario.memory
    if memory.num_gpu_blocks_override is not None:
        return Finding(("memory", "num_gpu_blocks_override"), problem)
    num_tokens = pool.num_kv_bytes // pool.bytes_per_token
    if 0 < num_tokens < pool.block_size:
        text = f"is {pool.block_size}, and the KV cache holds {num_tokens} tokens: no block fits; must be at most that"
        return Finding(("allocator", "block_size"), text)
    name = "gpu_memory_utilization" if memory.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
    return Finding(("memory", name), problem)


def _lengths_fit(scenario: Scenario, pool: Pool) -> Iterator[Finding]:
    limit = getattr(scenario.scheduler, "max_model_len", None)
    # A block table holds all but the last token, which is never stored; a region may be reserved for it too.
    stored = limit if limit is None or isinstance(scenario.allocator, ContiguousMemory) else limit - 1
    if stored is not None and stored > pool.num_usable_slots:
        text = f"is {limit}, and the KV cache holds {pool.num_usable_slots} tokens: longer requests will be rejected"
        if getattr(scenario.scheduler, "reservation", None) == "max":
            text = f"is {limit}, and the KV cache holds {pool.num_usable_slots} tokens: no request could reserve it"
        yield Finding(("scheduler", "max_model_len"), text, False)
    if pool.max_model_len is None and getattr(scenario.scheduler, "reservation", None) is not None:
        yield Finding(("scheduler", "max_model_len"), "is not given and the model has none; a reservation needs it")


def _memory_is_said_once(scenario: Scenario) -> Iterator[Finding]:
    memory, default = scenario.memory, Memory()
    counts = "num_gpu_blocks_override" if memory.num_gpu_blocks_override is not None else "kv_cache_memory_bytes"
    value = getattr(memory, counts)
    for name in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
        if value is not None and name != counts and getattr(memory, name) != getattr(default, name):
            yield Finding(("memory", name), f"is not used: {counts} ({value:,}) says how much there is", False)
    if memory.num_cpu_blocks_override is not None and memory.swap_space:
        text = f"is not used: num_cpu_blocks_override ({memory.num_cpu_blocks_override:,}) says how much there is"
        yield Finding(("memory", "swap_space"), text, False)


def _host_blocks_are_used(scenario: Scenario) -> Iterator[Finding]:
    """Room for swapped blocks, and a scheduler that swaps some."""
    memory, scheduler = scenario.memory, scenario.scheduler
    name = "num_cpu_blocks_override" if memory.num_cpu_blocks_override is not None else "swap_space"
    if not getattr(memory, name) or isinstance(scheduler, Custom):
        return
    if isinstance(scenario.allocator, ContiguousMemory):
        yield Finding(("memory", name), "is not used: contiguous memory is never swapped", False)
    elif getattr(scheduler, "preemption", None) == "recompute" and "preemption" not in scheduler.model_fields_set:
        # Who says recompute knows; vLLM's usual swap space may stand beside it.
        yield Finding(("memory", name), "is not used: scheduler.preemption is recompute, so nothing is swapped", False)
    elif not hasattr(scheduler, "preemption"):
        yield Finding(("memory", name), f"is not used: the {scheduler.type} scheduler never swaps", False)


def _profile_exists(scenario: Scenario) -> Iterator[Finding]:
    if not isinstance(scenario.cost, KernelCostConfig):
        return
    from kvsim.cost.profile import profile_path

    pool = Pool(scenario)
    try:
        profile_path(scenario.cost.profile if scenario.cost.profile is not None else pool.gpu.name)
    except ScenarioError as error:
        yield Finding(("cost", "profile"), str(error))


def _model_can_be_priced(scenario: Scenario) -> Iterator[Finding]:
    """A cost model made of kernels needs every width, and layers that are alike."""
    if not isinstance(scenario.cost, KernelCostConfig | RooflineCostConfig):
        return
    from kvsim.cost.shapes import model_shapes

    try:
        model_shapes(Pool(scenario).geometry, scenario.tensor_parallel_size, scenario.kv_cache_dtype)
    except ScenarioError as error:
        yield Finding(("model",), str(error).removeprefix("the model ").removeprefix("model "))


def _parts_fit_each_other(scenario: Scenario) -> Iterator[Finding]:
    allocator, scheduler = scenario.allocator, scenario.scheduler
    is_contiguous = isinstance(allocator, ContiguousMemory)
    if isinstance(scheduler, ContinuousScheduler):
        if is_contiguous and scheduler.reservation is None:
            yield Finding(("scheduler", "reservation"), "is missing; contiguous memory needs one of max, pow2, oracle")
        if isinstance(allocator, PagedMemory) and scheduler.reservation is not None:
            yield Finding(("scheduler", "reservation"), "is not used: paged memory reserves nothing", False)
    elif isinstance(scheduler, StaticScheduler) and isinstance(allocator, PagedMemory):
        yield Finding(("allocator", "type"), "is paged; static batching reserves, so it needs type: contiguous")
    elif is_contiguous and isinstance(scheduler, NoEvictScheduler | VllmV0Scheduler | VllmV1Scheduler):
        yield Finding(("allocator", "type"), f"is contiguous; scheduler {scheduler.type} needs type: paged")
    if isinstance(scheduler, VllmV0Scheduler) and getattr(allocator, "enable_prefix_caching", False):
        text = "is not used: vLLM 0.2.7 has no prefix cache, nothing will hit; use engine paged or vllm-v1"
        yield Finding(("allocator", "enable_prefix_caching"), text, False)


def _window_fits(scenario: Scenario) -> Iterator[Finding]:
    allocator = scenario.allocator
    if not isinstance(allocator, PagedMemory) or allocator.sliding_window is None:
        return
    key: Key = ("allocator", "sliding_window")
    if allocator.sliding_window % allocator.block_size:
        yield Finding(key, f"is {allocator.sliding_window}; must be a multiple of block_size ({allocator.block_size})")
    if allocator.enable_prefix_caching:
        yield Finding(key, "and enable_prefix_caching exclude each other: a window overwrites its blocks")
    elif isinstance(scenario.scheduler, VllmV1Scheduler):
        num_blocks = -(-allocator.sliding_window // allocator.block_size)
        text = (
            f"is a ring of {num_blocks} blocks for each sequence, as in vLLM 0.2.7: today's vLLM frees whole blocks "
            f"behind the window, so it holds one block more, and a prompt's chunk besides"
        )
        yield Finding(key, text, False)


def _budget_fits(scenario: Scenario) -> Iterator[Finding]:
    scheduler = scenario.scheduler
    if isinstance(scheduler, Custom) or scheduler.max_num_batched_tokens is None:
        return
    key: Key = ("scheduler", "max_num_batched_tokens")
    budget = scheduler.max_num_batched_tokens
    if isinstance(scheduler, VllmV1Scheduler | StaticScheduler) and budget < scheduler.max_num_seqs:
        yield Finding(key, f"is {budget}; must be at least max_num_seqs ({scheduler.max_num_seqs})")
    if isinstance(scheduler, VllmV0Scheduler):
        limit = Pool(scenario).max_model_len
        if limit is not None and budget < limit and not scenario.upstream_faults:
            yield Finding(key, f"is {budget}; must be at least max_model_len ({limit}): prompts run whole")
    elif not getattr(scheduler, "enable_chunked_prefill", True):
        yield from _whole_prompts_fit(scenario, budget)


def _whole_prompts_fit(scenario: Scenario, budget: int) -> Iterator[Finding]:
    workload, scheduler = scenario.workload, scenario.scheduler
    longest = longest_prompt(workload) if isinstance(workload, Workload) else None
    limit = getattr(scheduler, "max_model_len", None)
    what = "the longest prompt"
    if longest is None and limit is not None:
        longest, what = limit, "max_model_len"
    if longest is not None and budget < longest:
        yield Finding(
            ("scheduler", "max_num_batched_tokens"),
            f"is {budget}, below {what} ({longest}), and enable_chunked_prefill is off: such a prompt never runs; "
            f"raise it to {longest}, or switch chunked prefill on",
        )


def _width_fits(scenario: Scenario) -> Iterator[Finding]:
    workload, scheduler = scenario.workload, scenario.scheduler
    if isinstance(workload, Custom) or isinstance(scheduler, Custom):
        return
    splits, is_fatal = _splits_samples(scheduler), workload.requests is None
    fate = "no request could run" if is_fatal else "it will be rejected"
    for key, name, width in _widths(workload):
        if width > scheduler.max_num_seqs and not (splits and name == "n"):
            text = f"is {width}, above scheduler.max_num_seqs ({scheduler.max_num_seqs}): {fate}"
            yield Finding(key, text, is_fatal)


def _splits_samples(scheduler: object) -> bool:
    """The engines that run each sample of a request on its own: those of today's vLLM, and the Orca ones."""
    if isinstance(scheduler, ContinuousScheduler):
        return scheduler.reservation is not None
    return isinstance(scheduler, VllmV1Scheduler)


def _widths(workload: Workload) -> Iterator[tuple[Key, str, int]]:
    """Key, its name and value wherever samples or beams are asked for: by every request, or by those written out."""
    places: list[tuple[Key, Any]] = [(("workload", "sampling"), workload.sampling.model_dump())]
    if workload.requests is not None:
        places = [(("workload", "requests", index), row) for index, row in enumerate(workload.requests)]
    for key, asked in places:
        for name, usual in (("n", 1), ("beam_width", 0)):
            if isinstance(asked.get(name), int) and asked[name] > usual:
                yield (*key, name), name, asked[name]


def _written_requests_can_be_read(scenario: Scenario) -> Iterator[Finding]:
    if isinstance(scenario.workload, Custom) or scenario.workload.requests is None:
        return
    from kvsim.workload.written import bad_cells

    for index, bad in bad_cells(scenario.workload.requests):
        yield Finding(("workload", "requests", index, *([bad.column] if bad.column else [])), str(bad))


_OF_TRACES = (
    "trace_format", "hash_block_size", "chars_per_token", "on_bad_row", "first", "window", "speed", "rate", "repeat",
)  # fmt: skip
_OF_DRAWN_REQUESTS = (
    "num_requests", "arrivals", "lengths", "max_output_tokens", "content", "priorities", "abort",
)  # fmt: skip


def _workload_keys_are_used(scenario: Scenario) -> Iterator[Finding]:
    workload = scenario.workload
    if isinstance(workload, Custom):
        return
    idle: dict[Key, str] = {}
    if workload.trace is None:
        idle |= {(name,): "there is no trace" for name in _OF_TRACES}
    if workload.requests is not None:
        idle |= {(name,): "the requests are written out" for name in _OF_DRAWN_REQUESTS}
        idle |= {("sampling", name): "written requests have their own" for name in ("n", "beam_width", "lengths")}
    else:
        idle |= dict((*_idle_times(workload), *_idle_texts(workload)))
    if not any(name == "beam_width" and width > 1 for _, name, width in _widths(workload)):
        idle["sampling", "theta"] = "no request has beams"
    for key, reason in idle.items():
        if _is_given(workload, key):
            yield Finding(("workload", *key), f"is not used: {reason}", False)


def _idle_times(workload: Workload) -> Iterator[tuple[Key, str]]:
    """Keys that say when something happens, where it does not happen or always at once."""
    arrivals, sessions, abort = workload.arrivals, workload.sessions, workload.abort
    if isinstance(arrivals, BatchArrivals) and arrivals.batch_size is None:
        yield ("arrivals", "interval"), "without batch_size all requests come in one group"
    if isinstance(arrivals, BatchArrivals) and arrivals.interval == 0:
        yield ("arrivals", "batch_size"), "without an interval all groups come at once"
    if isinstance(arrivals, GammaArrivals) and arrivals.request_rate == math.inf:
        yield ("arrivals", "burstiness"), "all requests come at once"
    if sessions is not None and _have_one_turn(sessions):
        yield ("sessions", "think_time"), "a session has one turn"
    if sessions is not None and sessions.think_time == 0:
        yield ("sessions", "think_time_distribution"), "think_time is 0"
    if abort is not None and abort.probability == 0:
        yield ("abort", "after"), "probability is 0, nobody gives up"
        yield ("abort", "distribution"), "probability is 0, nobody gives up"


def _have_one_turn(sessions: Sessions) -> bool:
    return 1 in (sessions.num_turns, sessions.mean_turns)


def _turns_find_their_history(scenario: Scenario) -> Iterator[Finding]:
    """What keeps a session's turns from the cache of the turns before, where one would look for hits."""
    workload, allocator = scenario.workload, scenario.allocator
    if isinstance(workload, Custom) or workload.sessions is None or _have_one_turn(workload.sessions):
        return
    if not getattr(allocator, "enable_prefix_caching", False) or isinstance(scenario.scheduler, VllmV0Scheduler):
        return
    if workload.sessions.truncate_to is not None:
        text = (
            f"is {workload.sessions.truncate_to}: a history that is cut begins elsewhere at every turn, so the prefix "
            "cache finds nothing of it; max_context ends a session instead"
        )
        yield Finding(("workload", "sessions", "truncate_to"), text, False)
    if workload.content is not None and workload.content.num_loras > 1:
        text = (
            f"is {workload.content.num_loras}: every turn draws an adapter, and finds its history in the prefix cache "
            "only behind an earlier turn with the same one; sessions written out (workload.requests) keep theirs"
        )
        yield Finding(("workload", "content", "num_loras"), text, False)


def _idle_texts(workload: Workload) -> Iterator[tuple[Key, str]]:
    """Keys that say how lengths and texts differ, where they do not."""
    if isinstance(workload.lengths, FixedLengths):
        yield ("lengths", "correlation"), "fixed lengths do not vary"
    # The rows of a trace may have a number of samples each.
    if workload.sampling.n == 1 and workload.trace is None:
        yield ("sampling", "lengths"), "a request has one sample"
    for name in ("system_prompt", "few_shot"):
        prefix = getattr(workload.content, name, None)
        if prefix is not None and prefix.num_groups == 1:
            yield ("content", name, "zipf"), "num_groups is 1"


def _is_given(workload: Workload, key: Key) -> bool:
    """Whether the key has another value than its default."""
    *parents, name = map(str, key)
    block: Block = workload
    for part in parents:
        block = getattr(block, part)
    return bool(getattr(block, name) != type(block).model_fields[name].default)


def _scheduler_keys_are_used(scenario: Scenario) -> Iterator[Finding]:
    scheduler = scenario.scheduler
    if isinstance(scheduler, ContinuousScheduler) and isinstance(scenario.allocator, ContiguousMemory):
        for name in ("preemption", "victim"):
            if getattr(scheduler, name) != ContinuousScheduler.model_fields[name].default:
                text = "is not used: over contiguous memory nobody is preempted"
                yield Finding(("scheduler", name), text, False)


def _adapters_matter(scenario: Scenario) -> Iterator[Finding]:
    """LoRA adapters separate prefix caches and, in vllm-v1, fill a batch's places; elsewhere they change nothing."""
    workload, scheduler = scenario.workload, scenario.scheduler
    if isinstance(workload, Custom) or isinstance(scheduler, Custom) or isinstance(scenario.allocator, Custom):
        return
    num_drawn = 0 if workload.content is None or workload.requests is not None else workload.content.num_loras
    most = getattr(scheduler, "max_loras", 0)
    if most and not num_drawn and not any(row.get("lora") is not None for row in workload.requests or ()):
        yield Finding(("scheduler", "max_loras"), "is not used: no request has a LoRA adapter", False)
    caches = getattr(scenario.allocator, "enable_prefix_caching", False) and not isinstance(scheduler, VllmV0Scheduler)
    if num_drawn and not most and not caches:
        text = "is not used: nothing is cached by adapter (enable_prefix_caching), and no batch is limited (max_loras)"
        yield Finding(("workload", "content", "num_loras"), text, False)


def _decoding_fits(scenario: Scenario) -> Iterator[Finding]:
    workload, scheduler = scenario.workload, scenario.scheduler
    if isinstance(workload, Custom):
        return
    engine = None
    if isinstance(scenario.allocator, ContiguousMemory):
        engine = "contiguous memory, which cannot share blocks, has"
    elif isinstance(scheduler, VllmV1Scheduler):
        engine = f"the {scheduler.type} scheduler has"
    for key, name, width in _widths(workload) if engine is not None else ():
        if name == "beam_width":
            yield Finding(key, f"is {width}, and {engine} no beam search: use engine paged or vllm-v0, or n")
    if workload.sessions is not None and any(width > 1 for _, _, width in _widths(workload)):
        yield Finding(
            ("workload", "sampling"), "is for single requests: a session goes on with one answer; leave it out"
        )


def _lengths_can_be_drawn(scenario: Scenario) -> Iterator[Finding]:
    workload = scenario.workload
    if isinstance(workload, Custom) or workload.lengths is None:
        return
    lengths = workload.lengths
    smallest = 2
    if isinstance(lengths, FixedLengths | UniformLengths):
        smallest = _ends(lengths.prompt)[0] + _ends(lengths.output)[0]
    if lengths.max_total is not None and lengths.max_total < smallest:
        yield Finding(
            ("workload", "lengths", "max_total"), f"is {lengths.max_total}; no pair is that short: at least {smallest}"
        )


def _prompts_fit_model(scenario: Scenario) -> Iterator[Finding]:
    """A prompt that reaches the limit is rejected; an output ends there."""
    workload, limit = scenario.workload, getattr(scenario.scheduler, "max_model_len", None)
    if isinstance(workload, Custom) or limit is None or not isinstance(workload.lengths, FixedLengths | UniformLengths):
        return
    shortest = _ends(workload.lengths.prompt)[0]
    if shortest >= limit and workload.trace is None and workload.requests is None:
        text = f"is {limit}, and every prompt has at least {shortest} tokens: all will be rejected"
        yield Finding(("scheduler", "max_model_len"), text, False)


def _sweep_varies_known_keys(scenario: Scenario) -> Iterator[Finding]:
    if scenario.sweep is None:
        return
    if not scenario.sweep.vary:
        yield Finding(("sweep", "vary"), "is empty; name at least one key and its values")
    for name in scenario.sweep.vary:
        *parents, last = name.split(".")
        if tuple(parents) in blocks() and last not in (*keys_at(tuple(parents)), "*"):
            yield Finding(("sweep", "vary", name), unknown_key((*parents, last), {}))
        elif tuple(parents) not in blocks():
            paths = [".".join(path) for path in blocks()]
            yield Finding(("sweep", "vary", name), f"unknown key{did_you_mean('.'.join(parents), paths)}")


def _ends(length: int | tuple[int, int]) -> tuple[int, int]:
    return (length, length) if isinstance(length, int) else length


CHECKS: tuple[Check, ...] = (
    _memory_is_said_once,
    _host_blocks_are_used,
    _profile_exists,
    _model_can_be_priced,
    _parts_fit_each_other,
    _window_fits,
    _budget_fits,
    _written_requests_can_be_read,
    _workload_keys_are_used,
    _turns_find_their_history,
    _scheduler_keys_are_used,
    _adapters_matter,
    _width_fits,
    _decoding_fits,
    _lengths_can_be_drawn,
    _prompts_fit_model,
    _sweep_varies_known_keys,
)
