"""What a run has to say about itself once it is over: what would puzzle whoever reads its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvsim.metrics.recorder import Recorder
from kvsim.metrics.requests import EndedRequests
from kvsim.metrics.sums import Integrals
from kvsim.scenario.fields import Custom, is_import_path
from kvsim.scenario.resolve import ResolvedScenario
from kvsim.scenario.schema import VllmV1Scheduler
from kvsim.scheduling.plan import LIMITS
from kvsim.types import shown
from kvsim.yaml_loader import dotted

if TYPE_CHECKING:
    from kvsim.registry import Engine
    from kvsim.scenario.schema import Scenario


def run_warnings(
    resolved: ResolvedScenario, engine: Engine, recorder: Recorder, summary: dict[str, Any]
) -> Iterator[str]:
    """One line for each; `summary` is that of the run."""
    scenario = resolved.scenario
    yield from _unfound_shares(resolved, engine, summary)
    yield from _idle_priorities(summary, scenario.scheduler)
    yield from _other_limits(summary, engine.scheduler, recorder.integrals)
    yield from _refused_swaps(scenario, engine, recorder.totals.num_refused_swaps)
    yield from _ends(summary, recorder.ended)


UTILIZATION_GAP = 0.1
"""How far below its theory block utilization may be before the summary says so."""


def _ends(summary: dict[str, Any], ended: EndedRequests) -> Iterable[str]:
    measured, theory = summary["block_utilization"], summary["block_utilization_theory"]
    if (
        measured is not None
        and theory is not None
        and summary["block_size"] > 1
        and measured < theory - UTILIZATION_GAP
    ):
        saving = summary["sharing_saving"] or 0.0
        # Each sequence leaves half a block of its own empty; the full ones it shares count once.
        is_shared = (1 - measured) * (1 - saving) <= 1 - theory + UTILIZATION_GAP
        why = f"they share {saving:.1%} of their blocks, and each leaves half a block of its own empty"
        yield (
            f"block utilization is {measured:.3f}, {theory:.3f} would be usual for sequences of these lengths: "
            f"{why if is_shared else 'requests end early, are preempted or aborted'}"
        )
    # Worded for any number, so that runs that differ in it say the same.
    if ended.num_cut:
        yield f"outputs cut where prompt and output together reach scheduler.max_model_len: {ended.num_cut}"
    if ended.first_rejected is not None:
        request_id, reason = ended.first_rejected
        yield (
            f"requests rejected because they can never be served: {summary['num_rejected']}; "
            f"the first is {shown(request_id)}: {reason}"
        )


def _idle_priorities(summary: dict[str, Any], scheduler: Any) -> Iterable[str]:
    """Requests of unequal priority, under a scheduler that does not look at it."""
    policies = [getattr(scheduler, name, None) for name in ("victim", "queue_order", "gate", "preemption")]
    looks = isinstance(scheduler, Custom) or any(map(is_import_path, policies)) or any(policies[:2])
    policy = getattr(scheduler, "scheduling_policy", None)
    if not summary.get("by_priority") or looks or policy not in (None, "fcfs"):
        return
    why = (
        f"scheduler {scheduler.type} has no scheduling_policy"
        if policy is None
        else "scheduler.scheduling_policy is fcfs, not priority"
    )
    yield f"requests differ in priority, and none is served or preempted by it: {why}"


OFTEN, ROOM = 0.1, 0.5
"""The summary says why, if requests wait in this share of the time at least while this share of memory is left."""


def _other_limits(summary: dict[str, Any], scheduler: Any, sums: Integrals) -> Iterable[str]:
    """Requests that wait beside memory with room: whoever looks for a full one in `kv_saturated` is puzzled."""
    limited_ns = sums.limited_ns
    if not limited_ns or 2 * sum(limited_ns.values()) < sums.saturated_ns or summary["saturated_share"] < OFTEN:
        return
    room = summary["kv_saturated"]["free"] + summary["kv_saturated"]["cached_idle"]
    if room >= ROOM:
        name = max(limited_ns, key=lambda limit: limited_ns[limit])
        limit = f"{LIMITS[name]} {getattr(scheduler, LIMITS[name], '?')}" if name in LIMITS else name
        yield (
            f"requests waited in {summary['saturated_share']:.1%} of the time, for a limit ({limit}) and not for "
            f"memory: {room:.1%} of it was to be had meanwhile, so kv_saturated shows no full memory"
        )


def _refused_swaps(scenario: Scenario, engine: Engine, num_refused: int) -> Iterable[str]:
    """Victims that are recomputed, where one would look for swaps."""
    num_blocks = engine.scheduler.allocator.usage().num_host_blocks
    # Who asks for swaps without any host memory was told before the run.
    if num_refused and (num_blocks or getattr(scenario.scheduler, "preemption", None) != "swap"):
        key = "swap_space" if scenario.memory.num_cpu_blocks_override is None else "num_cpu_blocks_override"
        yield (
            f"victims recomputed that were to be swapped, for the host had no room for their blocks: {num_refused}; "
            f"it holds {num_blocks:,} blocks (memory.{key})"
        )


def _unfound_shares(resolved: ResolvedScenario, engine: Engine, summary: dict[str, Any]) -> Iterable[str]:
    """Why a prefix cache finds nothing of what requests have in common: it knows whole blocks that were computed."""
    count, allocator = getattr(engine.source, "shares", None), engine.scheduler.allocator
    if count is None or not getattr(allocator, "enable_prefix_caching", False):
        return
    block_size = allocator.block_size
    shares = count(block_size)
    if shares.num_short:
        yield (
            f"{shares.num_short} of {shares.num_sharing} requests that begin as others do cannot hit the prefix cache: "
            f"what they share is {shares.longest} tokens at most, less than a block of {block_size}: share more, or "
            f"set allocator.block_size to {shares.longest} or less"
        )
    # Without a look-up there is no prefix cache, or nobody ran; one request alone has nobody to share with.
    if summary["prefix_cache_hits"] or not summary["prefix_cache_queries"] or summary["num_requests"] < 2:
        return
    if shares.num_findable:
        num_evicted = summary["num_evicted_blocks"]
        evicted = f", or it was evicted again (num_evicted_blocks is {num_evicted})" if num_evicted else ""
        yield (
            f"{shares.num_findable} requests begin with a block or more that others begin with, and none found it in "
            f"the prefix cache: when they were admitted it was not computed yet ({_when_findable(resolved)}){evicted}"
        )
    elif shares.num_apart:
        yield (
            f"{shares.num_apart} requests begin as others do, and under another LoRA adapter or salt: their caches are "
            "apart, so nothing can hit"
        )
    elif shares.num_ending:
        yield (
            f"{shares.num_ending} requests of {block_size} tokens are all of what they share with others: a hit leaves "
            f"a token to compute and is made of whole blocks of {block_size}, so they cannot hit the prefix cache"
        )
    elif not shares.num_short and resolved.origin(_CACHING) in ("file", "command line"):
        yield (
            f"{dotted(_CACHING)}: is on, and no two prompts of this workload begin alike: "
            f"only preempted requests can find what they left; {_how_to_share(resolved.scenario)}"
        )


_CACHING = ("allocator", "enable_prefix_caching")


def _when_findable(resolved: ResolvedScenario) -> str:
    if isinstance(resolved.scenario.scheduler, VllmV1Scheduler):
        return "a block is findable once it is planned"
    return "a block is findable when the step that fills it is over"


def _how_to_share(scenario: Scenario) -> str:
    if getattr(scenario.workload, "trace", None) is not None:
        return (
            "a trace says by hash ids, groups or sessions what they share, and where it does not, workload.content can"
        )
    if getattr(scenario.workload, "requests", None) is not None:
        return "prefix_group and prefix_tokens, or session, say what requests share"
    return "workload.content and workload.sessions say what they share"
