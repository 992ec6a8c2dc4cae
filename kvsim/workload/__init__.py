"""Workloads: arrivals, lengths, texts, sessions and public traces, as sources of requests. No clock, no engine."""

from kvsim.workload.builder import build_source
from kvsim.workload.source import ConcurrencySource, ListSource, SessionSource, Source, TableSource
from kvsim.workload.spec import WorkloadSpec
from kvsim.workload.streams import streams
from kvsim.workload.trace import Trace
from kvsim.workload.traces import load_trace

__all__ = [
    "ConcurrencySource",
    "ListSource",
    "SessionSource",
    "Source",
    "TableSource",
    "Trace",
    "WorkloadSpec",
    "build_source",
    "load_trace",
    "streams",
]
