"""A trace cut and rescaled: a window, the first requests, another speed or rate, several passes.

Each returns a new trace and raises ScenarioError, naming the file and the knob, for a value that cannot be used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvsim.types import NS_PER_S
from kvsim.workload.trace import Trace
from kvsim.workload.trace_files import MAX_SECONDS, fail

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

MAX_ROWS = 100_000_000


def window(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The requests that arrive in [start_s, end_s); `start_s` becomes time 0."""
    import numpy as np

    times = _times(trace, "window")
    if not start_s < end_s:
        fail(trace.path, f"window [{start_s}, {end_s}] is empty: its end must be later than its start")
    start = round(start_s * NS_PER_S)
    end = min(round(min(end_s, MAX_SECONDS) * NS_PER_S), 2**63 - 1)
    rows = np.flatnonzero((times >= start) & (times < end))
    if not len(rows):
        fail(
            trace.path,
            f"no request in window [{start_s}, {end_s}]; "
            f"the trace runs from {times[0] / NS_PER_S:g} to {times[-1] / NS_PER_S:g} s",
        )
    part = trace.take(rows)
    return replace(part, arrival_ns=times[rows] - start)


def first(trace: Trace, num_requests: int) -> Trace:
    """The first `num_requests` requests in order of time (all of them, if there are fewer)."""
    import numpy as np

    if num_requests < 1:
        fail(trace.path, f"first is {num_requests}; it is at least 1")
    return trace.take(np.arange(min(num_requests, len(trace))))


def at_speed(trace: Trace, speed: float) -> Trace:
    """The trace played `speed` times as fast."""
    import numpy as np

    if not 0 < speed < float("inf"):
        fail(trace.path, f"speed is {speed}; it is a number above 0, 2.0 plays the trace twice as fast")
    times = _times(trace, "speed")
    if float(times[-1]) / speed > MAX_SECONDS * NS_PER_S:
        fail(trace.path, f"speed {speed} stretches the trace beyond {MAX_SECONDS:g} s")
    return replace(trace, arrival_ns=np.rint(times / speed).astype(np.int64))


def at_rate(trace: Trace, rate_per_s: float) -> Trace:
    """The trace stretched or compressed to a mean rate; infinite: everything at once."""
    import numpy as np

    if not rate_per_s > 0:
        fail(trace.path, f"rate is {rate_per_s}; it is a number of requests per second above 0")
    if rate_per_s == float("inf"):
        return replace(trace, arrival_ns=np.zeros(len(trace), dtype=np.int64))
    _times(trace, "rate")
    mean_rate = trace.mean_rate
    if mean_rate is None:
        fail(trace.path, "has no mean rate (fewer than two distinct times), so rate cannot rescale it")
    return at_speed(trace, rate_per_s / mean_rate)


def repeated(trace: Trace, times: int) -> Trace:
    """The trace played `times` times, each pass one mean gap after the last: the same texts where they are known."""
    import numpy as np

    if times < 1:
        fail(trace.path, f"repeat is {times}; it is at least 1")
    if times == 1:
        return trace
    if len(trace) * times > MAX_ROWS:
        fail(trace.path, f"repeat {times} makes {len(trace) * times} requests; {MAX_ROWS} are the most")
    rows = np.tile(np.arange(len(trace)), times)
    passes = np.repeat(np.arange(times, dtype=np.int64), len(trace))
    # Passes follow each other, so that the order of the file no longer says anything.
    whole = replace(trace, file_rank=None).take(rows)
    if whole.session is not None:
        # A conversation of the second pass is another one.
        apart = whole.session + passes * (int(whole.session.max()) + 1)
        whole = replace(whole, session=np.where(whole.session < 0, -1, apart))
    if whole.arrival_ns is None:
        return whole
    first_ns, last_ns = int(whole.arrival_ns[0]), int(whole.arrival_ns[len(trace) - 1])
    period = last_ns - first_ns + (last_ns - first_ns) // max(1, len(trace) - 1)
    if last_ns + period * times > MAX_SECONDS * NS_PER_S:
        fail(trace.path, f"repeat {times} stretches the trace beyond {MAX_SECONDS:g} s")
    return replace(whole, arrival_ns=whole.arrival_ns + passes * period)


def _times(trace: Trace, knob: str) -> Ints:
    if trace.arrival_ns is None:
        fail(trace.path, f"has no arrival times, so {knob} means nothing; give workload.arrivals instead")
    return trace.arrival_ns
