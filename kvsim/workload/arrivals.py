"""When requests come: point processes, as sorted integer nanoseconds.

Each function draws its values one after another, so that the first n arrivals of a longer run are those of a shorter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvsim.types import NS_PER_S, ScenarioError
from kvsim.workload.spec import ArrivalsSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_MAX_SECONDS = 9e9


def draw_arrivals(spec: ArrivalsSpec, rng: np.random.Generator, num: int) -> Ints:
    """`num` arrivals of the process; raises ScenarioError for parameters that make none."""
    import numpy as np

    rate = _positive("request_rate", spec.request_rate)
    if math.isinf(rate) or (spec.type == "batch" and spec.batch_size is None):
        return np.zeros(num, dtype=np.int64)
    match spec.type:
        case "poisson":
            return gamma(rng, num, rate, 1.0)
        case "gamma":
            return gamma(rng, num, rate, _positive("burstiness", spec.burstiness))
        case "constant":
            return _to_ns(np.arange(num) / rate)
        case "batch":
            return _batches(spec, num, rate)
    raise ScenarioError(f"workload.arrivals.type is {spec.type!r}, which needs workload.trace: a file with times")


def gamma(rng: np.random.Generator, num: int, rate_per_s: float, burstiness: float) -> Ints:
    """Gaps from a gamma distribution of shape `burstiness`: 1 is Poisson, below 1 burstier; CV = 1 / sqrt(shape)."""
    import numpy as np

    if burstiness == 1.0:
        gaps = rng.standard_exponential(num) / rate_per_s
    else:
        gaps = rng.standard_gamma(burstiness, num) / (burstiness * rate_per_s)
    return _to_ns(np.cumsum(gaps))


def _batches(spec: ArrivalsSpec, num: int, rate: float) -> Ints:
    """Groups of `batch_size` at once, `interval` apart; without one, as far apart as the rate asks for."""
    import numpy as np

    size = spec.batch_size or 0
    if size < 1:
        raise ScenarioError(f"workload.arrivals.batch_size is {spec.batch_size}; it must be at least 1")
    interval = size / rate if spec.interval is None else spec.interval
    if not 0 <= interval < math.inf:
        raise ScenarioError(f"workload.arrivals.interval is {spec.interval}; it must be a time of 0 s or more")
    return _to_ns(np.arange(num) // size * interval, "shorten interval")


def _to_ns(seconds: NDArray[np.floating[Any]], cure: str = "raise request_rate") -> Ints:
    import numpy as np

    if len(seconds) and not seconds[-1] <= _MAX_SECONDS:
        raise ScenarioError(
            f"workload.arrivals: the last of {len(seconds)} requests would come after "
            f"{seconds[-1]:g} s; {_MAX_SECONDS:g} s is the most: {cure}"
        )
    return np.asarray(np.rint(seconds * NS_PER_S), dtype=np.int64)


def _positive(key: str, value: float) -> float:
    if not value > 0:
        raise ScenarioError(f"workload.arrivals.{key} is {value}; it must be above 0")
    return float(value)
