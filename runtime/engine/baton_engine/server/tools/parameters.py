"""The parameters of a tool one by one, for families that do not write arguments as one object of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton_api.errors import INVALID_FUNCTION_PARAMETERS, InvalidRequest
from baton_engine.server.tools import values
from baton_engine.server.tools.lark import Lark, joined
from baton_engine.server.tools.schemas import closed
from baton_engine.server.tools.toolbox import Tool

DEFINITIONS = ("$defs", "definitions")
COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired", "minProperties")
"""What a list of parameters cannot say."""


def members(
    lark: Lark,
    tool: Tool,
    checked: bool,
    one: Callable[[str, Mapping[str, Any]], str],
    separator: str = "",
) -> str:
    """
    The parameters in their order, with or without those that are not required; `one` writes name and value.

    Where arguments are not checked, names are the tool's and values are any. Raises InvalidRequest for a
    strict schema that says more than a list of parameters can.
    """
    schema = root_of(tool)
    if checked and tool.strict:
        for key in COMBINED:
            if key in schema:
                raise not_enforced(tool, f"it has '{key}' at its root")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    properties = {**properties, **{name: {} for name in required if name not in properties}}
    if not checked and not tool.custom:
        properties, required = {name: {} for name in properties}, []
    # From the last to the first: what follows if nothing was written before, and if something was.
    first = later = '""'
    for name, value in reversed(properties.items()):
        inner = dict(value) if isinstance(value, Mapping) else {}
        written = lark.rule(one(name, definitions(schema) | inner))
        skip_first, skip_later = ("", "") if name in required else (f" | {first}", f" | {later}")
        first = lark.rule(f"{written} {later}{skip_first}")
        later = lark.rule(joined(lark.literal(separator), written, later) + skip_later)
    return first


def root_of(tool: Tool) -> Mapping[str, Any]:
    """The tool's schema, a reference at its root followed."""
    schema = tool.schema
    target = values.resolved(schema["$ref"], schema) if "$ref" in schema else None
    if isinstance(target, Mapping):
        schema = definitions(schema) | dict(target)
    return schema if tool.strict or tool.custom else closed(schema)


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references in a part of `schema` may mean."""
    return {key: schema[key] for key in DEFINITIONS if key in schema}


def not_enforced(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid schema for function '{tool.name}': {reason}, which cannot be enforced in the form in which "
        "this model writes calls.",
        param="tools",
        code=INVALID_FUNCTION_PARAMETERS,
    )
