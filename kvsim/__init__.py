"""kvsim: a wind tunnel for KV-cache allocators."""

__version__ = "0.1.0"
