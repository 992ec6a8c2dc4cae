"""Student's t, for intervals of means over a few seeds."""

from __future__ import annotations

CONFIDENCE = 0.95
"""Of two-sided intervals."""


def student_quantile(probability: float, num_values: int) -> float:
    """The quantile of Student's t that belongs to a sample of `num_values` values, at least 2."""
    # The same as `scipy.stats.t.ppf`, which takes a second to import.
    from scipy.special import stdtrit

    return float(stdtrit(num_values - 1, probability))


def interval_factor(num_values: int) -> float:
    """Standard errors of a mean in half of its interval."""
    return student_quantile((1 + CONFIDENCE) / 2, num_values)
