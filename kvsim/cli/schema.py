"""`kvsim schema`"""

from __future__ import annotations

from kvsim.cli import console


def command() -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from kvsim.scenario.layout import json_schema

    console.say_json(json_schema())
