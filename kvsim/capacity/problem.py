"""Why an engine would refuse to start, and which numbers to change."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from math import ceil

from kvsim.capacity.terms import Flags, Pages, Terms, num_blocks_at_most, terms_of
from kvsim.catalog import GIB, MIB
from kvsim.memory.geometry import GeometryError, ModelGeometry

USUAL_BLOCKS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Sizes to advise, in tokens: what engines offer, and the smaller ones for a cache that holds next to nothing."""


def problem_of(geometry: ModelGeometry, flags: Flags, pages: Pages, terms: Terms, override: int | None) -> str | None:
    """Why the engine would refuse to start, and which number to change."""
    num_that_fit, needed = max(0, terms.kv) // pages.block_bytes, pages.num_per_request
    num_blocks = num_that_fit if override is None else override
    if terms.total is not None and terms.budget is not None:
        at_most = num_blocks_at_most(terms.kv, terms.total - terms.budget, pages.block_bytes)
        if num_blocks > at_most and num_that_fit >= needed:
            return (
                f"num_gpu_blocks_override {num_blocks} is beyond the memory of the GPU: {at_most} blocks would fill it "
                f"to the last byte. Lower num_gpu_blocks_override to {num_that_fit} or less, which "
                f"gpu_memory_utilization {flags.gpu_memory_utilization:g} leaves room for."
            )
        if num_blocks > at_most:
            num_blocks = num_that_fit  # A smaller override would not help: the memory must grow first.
    if num_blocks >= needed:
        return None
    is_overrides_fault = override == num_blocks and (terms.total is None or num_that_fit >= needed)
    change = "Change one of"
    if override is not None and not is_overrides_fault:
        change = "Leave num_gpu_blocks_override out, and change one of"
    if terms.kv <= 0:
        cures = _cures_of_memory(geometry, flags, pages, terms)
        return f"nothing is left for KV ({terms.kv / GIB:.2f} GiB). {change}: {'; '.join(cures)}."
    if num_blocks <= 0:
        return (
            f"no block fits: one of {flags.block_size} tokens takes {_size(pages.block_bytes)}, and {_size(terms.kv)} "
            f"are left for KV. {change}: {'; '.join(_cures_of_a_large_block(geometry, flags, pages, terms))}."
        )
    if is_overrides_fault:
        cures = [f"raise num_gpu_blocks_override to {needed} or more"]
    else:
        cures = _cures_of_memory(geometry, flags, pages, terms)
        if smaller := _smaller_block_that_fits(geometry, flags, terms):
            cures.insert(0, f"lower block_size to {smaller}")
    longest = _longest_that_fits(geometry, flags, num_blocks if is_overrides_fault else num_that_fit)
    if longest:
        cures.insert(0, f"lower max_model_len to {longest} or less")
    num_tokens = num_blocks * flags.block_size
    return (
        f"max_model_len {flags.max_model_len} > {num_tokens} tokens of KV cache: one such request needs "
        f"{needed} blocks, {num_blocks} are there. {change}: {'; '.join(cures)}."
    )


def _cures_of_memory(geometry: ModelGeometry, flags: Flags, pages: Pages, terms: Terms) -> list[str]:
    missing = pages.num_per_request * pages.block_bytes - terms.kv
    return _cures_of_the_budget(geometry, flags, terms, missing) or [f"give the KV cache {_size(missing)} more"]


def _cures_of_a_large_block(geometry: ModelGeometry, flags: Flags, pages: Pages, terms: Terms) -> list[str]:
    """Smaller blocks, if need be with shorter requests: more memory would be a poor cure where there is some."""
    if smaller := _smaller_block_that_fits(geometry, flags, terms):
        return [f"lower block_size to {smaller}"]
    return _with_smaller_blocks(geometry, flags, terms) + _cures_of_memory(geometry, flags, pages, terms)


def _size(num_bytes: int) -> str:
    """Bytes as a person reads them: GiB, or MiB and bytes where two decimals of a GiB say too little."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB" if num_bytes >= MIB / 10 else f"{num_bytes:,} bytes"


def _smaller_block_that_fits(geometry: ModelGeometry, flags: Flags, terms: Terms) -> int | None:
    """The largest usual block below this one with which a request of `max_model_len` fits; None where none does."""
    for block_size in _smaller_blocks(flags):
        pages = Pages.of(geometry, replace(flags, block_size=block_size))
        if terms.kv // pages.block_bytes >= pages.num_per_request:
            return block_size
    return None


def _with_smaller_blocks(geometry: ModelGeometry, flags: Flags, terms: Terms) -> list[str]:
    """Smaller blocks and shorter requests together, where that is a cure."""
    for block_size in _smaller_blocks(flags):
        smaller = replace(flags, block_size=block_size)
        num_blocks = terms.kv // Pages.of(geometry, smaller).block_bytes
        if num_blocks > 0 and (longest := _longest_that_fits(geometry, smaller, num_blocks)):
            return [f"lower block_size to {block_size} and max_model_len to {longest} or less"]
    return []


def _smaller_blocks(flags: Flags) -> list[int]:
    return [size for size in USUAL_BLOCKS if size < flags.block_size]


def _longest_that_fits(geometry: ModelGeometry, flags: Flags, num_blocks: int) -> int:
    """The largest max_model_len whose request fits; 0 if none does."""

    def does_not_fit(max_model_len: int) -> bool:
        return Pages.of(geometry, replace(flags, max_model_len=max_model_len)).num_per_request > num_blocks

    return bisect_left(range(1, flags.max_model_len + 1), True, key=does_not_fit)


def _cures_of_the_budget(geometry: ModelGeometry, flags: Flags, terms: Terms, missing: int) -> list[str]:
    if terms.total is None or terms.budget is None:
        return []
    cures = []
    utilization = (terms.budget + missing) / terms.total
    if utilization <= 1:
        cures.append(f"raise gpu_memory_utilization to {ceil(utilization * 1000) / 1000:g} or more")
    if terms.activations is not None and terms.activations > missing:
        cures.append("lower max_num_seqs or max_num_batched_tokens (peak activations)")
    num_ranks = _enough_ranks(geometry, flags, terms.total)
    if num_ranks is not None:
        cures.append(f"raise tensor_parallel_size to {num_ranks}")
    needed = (terms.budget + missing) / flags.gpu_memory_utilization / GIB
    cures.append(f"use a GPU of {needed:.1f} GiB or more")
    cures.append("use fewer bits (kv_cache_dtype fp8, quantised weights)")
    return cures


def _enough_ranks(geometry: ModelGeometry, flags: Flags, total: int) -> int | None:
    """The smallest doubling of tensor_parallel_size at which the model fits, if its heads can be split so."""
    for doubling in range(1, 7):
        more = replace(flags, tensor_parallel_size=flags.tensor_parallel_size << doubling)
        try:
            pages = Pages.of(geometry, more)
            kv_bytes = terms_of(geometry, more, total, None, None, None).kv
        except GeometryError:
            return None
        if kv_bytes >= pages.num_per_request * pages.block_bytes:
            return more.tensor_parallel_size
    return None
