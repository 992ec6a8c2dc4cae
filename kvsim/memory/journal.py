"""A journal of what happened to every block."""

from __future__ import annotations


class Journal:
    """Events of an allocator, with a tag that the caller sets."""
