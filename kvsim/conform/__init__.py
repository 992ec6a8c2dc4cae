"""Replays of recorded engine traces: where do we depart from the real engine, and at which step."""
