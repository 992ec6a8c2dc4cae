"""Answers to the common questions about a workload, each from simulation."""

from kvsim.advise.advise import Advice, advise
from kvsim.advise.answer import Answer

__all__ = ["Advice", "Answer", "advise"]
