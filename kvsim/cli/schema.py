"""`kvsim schema`"""

from __future__ import annotations

import json

from kvsim.cli import console


def command() -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from kvsim.scenario.layout import json_schema

    console.say(json.dumps(json_schema(), indent=2))
