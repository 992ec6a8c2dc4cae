"""Reference attention in NumPy: dense, paged, and the replay that runs an engine's plans on real arrays."""

from kvsim.attention.dense import dense_attention
from kvsim.attention.paged import paged_attention, paged_attention_loop
from kvsim.attention.replay import Replay

__all__ = ["Replay", "dense_attention", "paged_attention", "paged_attention_loop"]
