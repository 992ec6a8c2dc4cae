"""What every test may use: the reference material beside the checkout, and Hypothesis profiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("KVSIM_SHARED", ROOT.parent / "shared"))
"""Reference traces, measurements and recorded cases: `$KVSIM_SHARED`, else `../shared` beside the checkout."""

NO_SHARED = f"the reference material is not there: put it at {ROOT.parent / 'shared'} or set KVSIM_SHARED"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=NO_SHARED)
"""Marks a test that reads the reference material."""


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference material; skips the test where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(NO_SHARED)
    return SHARED


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return ROOT


def _register_hypothesis_profiles() -> None:
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ImportError:
        return
    slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=slow_is_fine)
    settings.register_profile(
        "ci", max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=slow_is_fine
    )
    # A mutant is dead at the first failure: nobody reads the smallest one.
    settings.register_profile(
        "mutation", settings.get_profile("ci"), max_examples=50, phases=(Phase.explicit, Phase.generate)
    )
    settings.register_profile("deep", max_examples=1000, deadline=None, suppress_health_check=slow_is_fine)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


_register_hypothesis_profiles()
