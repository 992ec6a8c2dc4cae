"""Recorded cases on disk: finding them, telling their formats apart, and refusing what cannot be replayed."""

from __future__ import annotations

from kvsim.types import KvsimError


class CaseError(KvsimError):
    """A case file is missing, or does not say what its format asks for."""
