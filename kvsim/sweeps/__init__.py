"""Grids of scenarios: the same workload and seeds at every point, resumable, on one machine or on a cluster."""

from kvsim.sweeps.run import SweepResult, sweep

__all__ = ["SweepResult", "sweep"]
