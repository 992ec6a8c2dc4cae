"""Which keys a scenario can have, and where: read off the models, for suggestions, schema and reference pages."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from kvsim.scenario.fields import Block
from kvsim.scenario.schema import Scenario

Names = tuple[str, ...]


@cache
def blocks() -> dict[Names, tuple[type[Block], ...]]:
    """Path of each mapping of a scenario -> the models it may be."""
    found: dict[Names, tuple[type[Block], ...]] = {}
    _collect(Scenario, (), found)
    return found


def _collect(model: type[Block], path: Names, found: dict[Names, tuple[type[Block], ...]]) -> None:
    if model in found.get(path, ()):
        return
    found[path] = (*found.get(path, ()), model)
    for name, field in model.model_fields.items():
        for nested in _block_types(field.annotation):
            _collect(nested, (*path, name), found)


def _block_types(annotation: Any) -> Iterator[type[Block]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if issubclass(annotation, Block):
            yield annotation
        return
    for part in get_args(annotation):
        yield from _block_types(part)


def models_at(path: Names, kind: object = None) -> tuple[type[Block], ...]:
    """The models of the mapping at `path`; only that of type `kind` where it is one of them."""
    models = blocks().get(path, ())
    fitting = tuple(model for model in models if kind in types_of(model))
    return fitting or models


def types_of(model: type[Block]) -> tuple[str, ...]:
    """The values of `type:` that mean this model."""
    field = model.model_fields.get("type")
    return tuple(get_args(field.annotation)) if field is not None else ()


def keys_at(path: Names, kind: object = None) -> tuple[str, ...]:
    """The keys that the mapping at `path` takes."""
    return tuple(dict.fromkeys(name for model in models_at(path, kind) for name in model.model_fields))


@cache
def homes() -> dict[str, tuple[Names, ...]]:
    """Key name -> the mappings that have such a key."""
    found: dict[str, tuple[Names, ...]] = {}
    for path, models in blocks().items():
        for name in dict.fromkeys(name for model in models for name in model.model_fields):
            found[name] = (*found.get(name, ()), path)
    return found


@cache
def describe_fields(model: type[BaseModel]) -> dict[str, str]:
    """Field name -> the sentence below it in the source."""
    sentences: dict[str, str] = {}
    for parent in reversed(model.__mro__):
        if isinstance(parent, type) and issubclass(parent, Block) and parent is not Block:
            sentences |= _attribute_docs(parent)
    return sentences


def _attribute_docs(model: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    sentences = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                sentences[name] = inspect.cleandoc(text).replace("\n", " ")
    return sentences


def json_schema() -> dict[str, Any]:
    """JSON Schema of a scenario file, for editors."""
    schema = Scenario.model_json_schema()
    for model in {model for models in blocks().values() for model in models}:
        definition = schema["$defs"].get(model.__name__) if model is not Scenario else schema
        for name, sentence in describe_fields(model).items():
            if definition is not None and name in definition["properties"]:
                definition["properties"][name].setdefault("description", sentence)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "kvsim scenario"
    _loosen(schema)
    return schema


_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""pydantic's names of bounds on values that a validator of ours reads, and JSON Schema's."""


def _loosen(node: Any) -> None:
    """A block may leave out its `type` (the engine or a default gives it), so that several variants may match.

    Not one of the user's own: it may have any keys, and without its `type` everything would be one.
    """
    if isinstance(node, dict):
        if "oneOf" in node:
            node["anyOf"] = node.pop("oneOf")
        node.pop("discriminator", None)
        for ours, theirs in _BOUNDS.items():
            if isinstance(node.get(ours), int | float):
                node[theirs] = node.pop(ours)
        required = node.get("required")
        is_own = node.get("additionalProperties") is True
        if isinstance(required, list) and "type" in required and "properties" in node and not is_own:
            required.remove("type")
            if not required:
                del node["required"]
        for value in node.values():
            _loosen(value)
    elif isinstance(node, list):
        for value in node:
            _loosen(value)
