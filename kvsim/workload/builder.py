"""From the `workload:` block to a source of requests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.request import Sampling
from kvsim.types import NS_PER_S, ScenarioError
from kvsim.workload.arrivals import draw_arrivals
from kvsim.workload.content import (
    GroupTexts,
    HashTexts,
    OwnTexts,
    PrefixedTexts,
    Texts,
    draw_prefixes,
    shares_of,
    zipf,
)
from kvsim.workload.lengths import draw_lengths
from kvsim.workload.sessions import SessionPlan, SessionRows, cut_to_context, draw_pauses, draw_turns
from kvsim.workload.source import ConcurrencySource, SessionSource, Source, TableSource
from kvsim.workload.spec import AbortSpec, ArrivalsSpec, LengthsSpec, WorkloadSpec
from kvsim.workload.streams import Streams, mix, streams
from kvsim.workload.table import ColumnTable, Traits
from kvsim.workload.trace import Trace
from kvsim.workload.trace_edits import at_rate, at_speed, first, repeated, window
from kvsim.workload.traces import load_trace
from kvsim.workload.written import written_source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

DEFAULT_NUM_REQUESTS = 1000


def build_source(spec: WorkloadSpec | Mapping[str, Any], seed: int = 0, base_dir: str | Path | None = None) -> Source:
    """The requests of a workload. Relative trace paths are looked up in `base_dir` (default: the working directory).

    Raises ScenarioError for a block that makes no sense and for a trace that cannot be read; `notes` of the source
    say what was skipped or replaced.
    """
    if not isinstance(spec, WorkloadSpec):
        spec = WorkloadSpec.from_dict(spec)
    _check(spec)
    rng = streams(seed)
    if spec.requests is not None:
        source: Source = written_source(spec.requests, seed)
    elif spec.trace is not None:
        source = trace_source(spec, load_spec_trace(spec, base_dir), rng)
    elif spec.sessions is not None:
        source = _session_source(spec, rng)
    else:
        source = _synthetic_source(spec, rng)
    return source if spec.max_concurrency is None else ConcurrencySource(source, spec.max_concurrency)


def load_spec_trace(spec: WorkloadSpec, base_dir: str | Path | None = None) -> Trace:
    """The trace a block names, with all its knobs applied: window, first, speed, rate, repeat, num_requests."""
    trace = load_trace(
        os.path.join(base_dir or "", spec.trace or ""),
        spec.trace_format,
        hash_block_size=spec.hash_block_size,
        chars_per_token=spec.chars_per_token,
        on_bad_row=spec.on_bad_row,
        needs_times=spec.arrivals is None or spec.arrivals.type == "trace",
    )
    if spec.window is not None:
        trace = window(trace, *spec.window)
    if spec.first is not None:
        trace = _first(trace, spec.first, "first")
    if spec.speed != 1.0:
        trace = at_speed(trace, spec.speed)
    if spec.rate is not None:
        trace = at_rate(trace, spec.rate)
    trace = repeated(trace, spec.repeat)
    return trace if spec.num_requests is None else _first(trace, spec.num_requests, "num_requests")


def _first(trace: Trace, num: int, key: str) -> Trace:
    """The first `num` requests; a note says so where there are fewer."""
    found = first(trace, num)
    if len(found) == num:
        return found
    note = (
        f"{trace.path}: workload.{key} is {num}, and the trace has {len(trace)} requests: all {len(trace)} are run "
        f"(workload.repeat plays a trace several times)"
    )
    return replace(found, notes=(*found.notes, note))


def _check(spec: WorkloadSpec) -> None:
    for key in ("num_requests", "max_output_tokens", "max_concurrency", "first", "repeat"):
        value = getattr(spec, key)
        if value is not None and value < 1:
            raise ScenarioError(f"workload.{key} is {value}; it must be at least 1")
    sampling = spec.sampling
    if sampling.n < 1 or sampling.beam_width < 0 or (sampling.n > 1 and sampling.beam_width > 0):
        raise ScenarioError(
            f"workload.sampling: n {sampling.n} with beam_width {sampling.beam_width}; "
            "n is at least 1, and one of the two is enough"
        )
    if spec.sessions is not None and (sampling.n > 1 or sampling.beam_width > 1):
        raise ScenarioError("workload.sampling: a session goes on with one answer; leave n and beam_width out")
    if spec.sessions is not None and (spec.trace is not None or spec.requests is not None):
        raise ScenarioError(
            "workload.sessions makes its own requests; leave out trace and requests (a trace may have a session column)"
        )
    if spec.window is not None and len(spec.window) != 2:
        raise ScenarioError(f"workload.window is {list(spec.window)}; it is [start, end] in seconds")


@dataclass(frozen=True)
class _Columns:
    """Times and lengths before anything else is added; `max_output` None: the output is the maximum."""

    arrivals: Ints
    prompts: Ints
    outputs: Ints
    max_output: Ints | None = None
    notes: tuple[str, ...] = ()


def _synthetic_source(spec: WorkloadSpec, rng: Streams) -> Source:
    num = DEFAULT_NUM_REQUESTS if spec.num_requests is None else spec.num_requests
    prompts, outputs = draw_lengths(spec.lengths or LengthsSpec(), rng["lengths"], num)
    arrivals = draw_arrivals(spec.arrivals or ArrivalsSpec(), rng["arrivals"], num)
    columns = _limited(_Columns(arrivals, prompts, outputs), spec.max_output_tokens)
    prefixes = draw_prefixes(spec.content, rng, num)
    texts: Texts = PrefixedTexts(prefixes, columns.prompts) if prefixes.kinds else OwnTexts(columns.prompts)
    return _open_loop(columns, texts, _traits(spec, rng, columns))


def _open_loop(columns: _Columns, texts: Texts, traits: Traits) -> Source:
    source = TableSource(ColumnTable(columns.arrivals, columns.outputs, texts, traits), columns.notes)
    source.shares = partial(shares_of, texts, namespaces=traits.loras)
    return source


def _limited(columns: _Columns, max_output_tokens: int | None) -> _Columns:
    """Outputs cut at what the client allows; that is then the maximum the scheduler knows."""
    import numpy as np

    if max_output_tokens is None:
        return columns
    stated = columns.max_output
    most = np.full(len(columns.outputs), max_output_tokens, dtype=np.int64)
    num_cut = int(np.sum(columns.outputs > max_output_tokens))
    notes = (f"{num_cut} outputs were cut at max_output_tokens: {max_output_tokens}",) if num_cut else ()
    return replace(
        columns,
        outputs=np.minimum(columns.outputs, max_output_tokens),
        max_output=most if stated is None else np.minimum(stated, most),
        notes=(*columns.notes, *notes),
    )


def _traits(spec: WorkloadSpec, rng: Streams, columns: _Columns, trace: Trace | None = None) -> Traits:
    """What the block draws for each request; a trace's own columns win over it."""
    num = len(columns.arrivals)
    loras = spec.content.num_loras if spec.content is not None else 0
    traits = Traits(
        sampling=Sampling(n=spec.sampling.n, beam_width=spec.sampling.beam_width),
        num_samples=None if trace is None else trace.n,
        priorities=_draw_priorities(spec.priorities, rng, num)
        if trace is None or trace.priority is None
        else trace.priority,
        patience_ns=_draw_patience(spec.abort, rng, num),
        loras=zipf(rng["content.loras"], num, loras, 0.0, "content") if loras else None,
        max_output=columns.max_output,
        seed=mix(int(rng["decoding"].integers(2**63))),
    )
    return _with_sample_lens(traits, spec, rng, columns)


def _with_sample_lens(traits: Traits, spec: WorkloadSpec, rng: Streams, columns: _Columns) -> Traits:
    """Samples of a length of their own: the first keeps the request's, the others are drawn as outputs are."""
    import numpy as np

    if spec.sampling.lengths != "independent" or spec.sampling.beam_width > 1:
        return traits
    num = len(columns.outputs)
    counts = np.full(num, spec.sampling.n, dtype=np.int64) if traits.num_samples is None else traits.num_samples
    if num == 0 or int(counts.max()) == 1:
        return traits
    offsets = np.concatenate(([0], np.cumsum(counts)))
    lens = _more_outputs(spec, rng, columns, int(offsets[-1]))
    lens[offsets[:-1]] = columns.outputs
    return replace(traits, sample_lens=lens, sample_offsets=offsets)


def _more_outputs(spec: WorkloadSpec, rng: Streams, columns: _Columns, num: int) -> Ints:
    """Outputs like those of the workload: of its distribution, or of random rows of its trace."""
    import numpy as np

    if spec.trace is None:
        outputs = draw_lengths(spec.lengths or LengthsSpec(), rng["decoding.lengths"], num)[1]
    else:
        rows = np.floor(rng["decoding.lengths"].random(num) * len(columns.outputs)).astype(np.int64)
        outputs = columns.outputs[rows]
    return outputs if spec.max_output_tokens is None else np.minimum(outputs, spec.max_output_tokens)


def _draw_priorities(shares: Mapping[int, float] | None, rng: Streams, num: int) -> Ints | None:
    import numpy as np

    if not shares:
        return None
    bounds = np.cumsum(np.array(list(shares.values()), dtype=np.float64))
    if min(shares.values()) < 0 or not 0 < bounds[-1] < float("inf"):
        raise ScenarioError(f"workload.priorities is {dict(shares)}; shares are numbers of 0 or more, not all 0")
    chosen = np.searchsorted(bounds, rng["priorities"].random(num) * bounds[-1], side="right")
    return np.asarray(np.array(list(shares), dtype=np.int64)[chosen], dtype=np.int64)


def _draw_patience(abort: AbortSpec | None, rng: Streams, num: int) -> Ints | None:
    import numpy as np

    if abort is None or abort.probability == 0:
        return None
    if not 0 <= abort.probability <= 1 or not 0 <= abort.after <= 1e8:
        raise ScenarioError(
            f"workload.abort: probability {abort.probability}, after {abort.after:g} s; "
            "a probability lies between 0 and 1, a time between 0 and 1e8 s"
        )
    draws = rng["aborts"].random((num, 2))
    waits = np.full(num, abort.after) if abort.distribution == "constant" else -np.log1p(-draws[:, 1]) * abort.after
    return np.where(draws[:, 0] < abort.probability, np.rint(waits * NS_PER_S), -1).astype(np.int64)


def _session_source(spec: WorkloadSpec, rng: Streams) -> Source:
    import numpy as np

    assert spec.sessions is not None
    num = DEFAULT_NUM_REQUESTS if spec.num_requests is None else spec.num_requests
    turns = draw_turns(spec.sessions, rng, num)
    prefixes = draw_prefixes(spec.content, rng, len(turns))
    messages, outputs = draw_lengths(spec.lengths or LengthsSpec(), rng["lengths"], num)
    columns = _limited(_Columns(np.zeros(num, dtype=np.int64), messages, outputs), spec.max_output_tokens)
    kept = cut_to_context(turns, prefixes.num_tokens, columns.prompts, columns.outputs, spec.sessions)
    plan = SessionPlan(
        arrivals=draw_arrivals(spec.arrivals or ArrivalsSpec(), rng["arrivals"], len(turns)),
        offsets=np.concatenate(([0], np.cumsum(turns))),
        messages=columns.prompts,
        outputs=columns.outputs,
        pauses=draw_pauses(spec.sessions, rng, num),
        prefixes=prefixes,
        traits=_traits(spec, rng, columns),
        truncate_to=spec.sessions.truncate_to,
    )
    notes = columns.notes
    if num_cut := int((turns - kept).sum()):
        notes += (
            f"{num_cut} of {num} turns left out: their sessions had reached max_context {spec.sessions.max_context}",
        )
    source = SessionSource(plan.sessions(kept), notes)
    if int(kept.max(initial=0)) <= 1:
        # A later turn shares the whole history with the one before it.
        firsts, loras = plan.offsets[:-1], plan.traits.loras
        texts = PrefixedTexts(prefixes, columns.prompts[firsts])
        source.shares = partial(shares_of, texts, namespaces=None if loras is None else loras[firsts])
    return source


def trace_source(spec: WorkloadSpec, trace: Trace, rng: Streams) -> Source:
    """The requests of a trace that is loaded; what the block draws for it comes from `rng`. Raises ScenarioError."""
    trace = replace(trace, notes=(*trace.notes, *_idle_keys(spec, trace)))
    columns = _trace_columns(spec, trace, rng)
    traits = _traits(spec, rng, columns, trace)
    if trace.session is not None:
        return _trace_sessions(spec, trace, columns, traits)
    return _open_loop(columns, _trace_texts(spec, trace, columns, rng), traits)


def _idle_keys(spec: WorkloadSpec, trace: Trace) -> Iterator[str]:
    """The keys of a block that this trace makes idle, and why: what only the file tells."""
    own_lengths = spec.lengths is None or spec.arrivals is None or spec.arrivals.type != "trace"
    # By hash ids, by groups, or by sessions, whose turns share what was said before.
    is_told = trace.hash_ids is not None or trace.prefix_group is not None
    says_what_is_shared = trace.session is not None or (own_lengths and is_told)
    num_samples = spec.sampling.n if trace.n is None else int(trace.n.max(initial=1))
    idle: list[tuple[str, bool, str]] = [
        ("hash_block_size", spec.hash_block_size is not None and trace.hash_ids is None, "it has no hash ids"),
        (
            "chars_per_token",
            spec.chars_per_token != WorkloadSpec().chars_per_token and trace.format != "sharegpt",
            f"it has lengths, not texts (read as {trace.format})",
        ),
        ("priorities", spec.priorities is not None and trace.priority is not None, "it has priorities of its own"),
        ("sampling.n", spec.sampling.n > 1 and trace.n is not None, "it has numbers of samples of its own"),
        ("sampling.lengths", spec.sampling.lengths == "independent" and num_samples == 1, "a request has one sample"),
    ]
    for name in ("system_prompt", "few_shot"):
        is_given = getattr(spec.content, name, None) is not None
        idle.append((f"content.{name}", is_given and says_what_is_shared, "it says what is shared"))
    for key, is_idle, reason in idle:
        if is_idle:
            yield f"{trace.path}: workload.{key} is not used: {reason}"


def _trace_columns(spec: WorkloadSpec, trace: Trace, rng: Streams) -> _Columns:
    notes = trace.notes
    arrivals, prompts, outputs, max_output = trace.arrival_ns, trace.prompt, trace.output, trace.max_output
    if arrivals is None:
        if spec.arrivals is None:
            raise ScenarioError(
                f"{trace.path}: has no arrival times (read as {trace.format}); say when its requests "
                "come, for instance workload.arrivals: {type: poisson, request_rate: 4}"
            )
        arrivals = draw_arrivals(spec.arrivals, rng["arrivals"], len(trace))
    elif spec.arrivals is not None and spec.arrivals.type != "trace":
        notes += (f"{trace.path}: its times replace workload.arrivals",)
    if spec.arrivals is not None and spec.arrivals.type == "trace" and spec.lengths is not None:
        prompts, outputs = draw_lengths(spec.lengths, rng["lengths"], len(trace))
        max_output = None
        notes += (f"{trace.path}: its times are used, lengths are those of workload.lengths",)
    elif spec.lengths is not None:
        notes += (f"{trace.path}: its lengths replace workload.lengths",)
    return _limited(_Columns(arrivals, prompts, outputs, max_output, notes), spec.max_output_tokens)


def _trace_texts(spec: WorkloadSpec, trace: Trace, columns: _Columns, rng: Streams) -> Texts:
    if trace.hash_ids is not None and trace.hash_offsets is not None and columns.prompts is trace.prompt:
        return HashTexts(columns.prompts, trace.hash_ids, trace.hash_offsets, trace.hash_block_size)
    if (groups := _group_texts(trace, columns)) is not None:
        return groups
    prefixes = draw_prefixes(spec.content, rng, len(trace))
    return PrefixedTexts(prefixes, columns.prompts) if prefixes.kinds else OwnTexts(columns.prompts)


def _group_texts(trace: Trace, columns: _Columns) -> GroupTexts | None:
    """The prefixes that the trace names; those of its own prompts, for drawn ones may be shorter."""
    if trace.prefix_group is None or trace.prefix_tokens is None or columns.prompts is not trace.prompt:
        return None
    return GroupTexts(trace.prompt, trace.prefix_group, trace.prefix_tokens)


def _trace_sessions(spec: WorkloadSpec, trace: Trace, columns: _Columns, traits: Traits) -> Source:
    if spec.sampling.n > 1 or spec.sampling.beam_width > 1 or (trace.n is not None and int(trace.n.max()) > 1):
        raise ScenarioError(
            f"{trace.path}: a session goes on with one answer; several samples and a session column exclude each other"
        )
    assert trace.session is not None
    groups = _group_texts(trace, columns)
    rows = SessionRows(columns.arrivals, columns.prompts, columns.outputs, trace.session, groups, traits)
    return SessionSource(rows.sessions(), columns.notes)
