"""
Tool parameters written one by one, for families that do not write arguments as one JSON object.

Values come as Python literals or as text between tags, and become JSON. A value that cannot be parsed
becomes a string with its text, so that nothing is lost.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton_api.errors import INVALID_FUNCTION_PARAMETERS, InvalidRequest
from baton_engine.api.parsing.tools.grammar import Lark, joined
from baton_engine.api.parsing.tools.toolbox import Tool

DEFINITIONS = ("$defs", "definitions")
COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired", "minProperties")
"""Schema members that a list of parameters cannot express."""


def members(
    lark: Lark,
    tool: Tool,
    checked: bool,
    write: Callable[[str, Mapping[str, Any]], str],
    separator: str = "",
) -> str:
    """
    Return the grammar of the parameters in order, with optional ones. `write` returns that of a parameter,
    from its name and schema.

    Without `checked`, the names are the tool's and values are unrestricted. Raises InvalidRequest for a
    strict schema that a list of parameters cannot express.
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
    # From the last parameter to the first: the rest of the list if no parameter precedes it, and if one does.
    first = later = '""'
    for name, value in reversed(properties.items()):
        inner = dict(value) if isinstance(value, Mapping) else {}
        written = lark.rule(write(name, definitions(schema) | inner))
        skip_first, skip_later = ("", "") if name in required else (f" | {first}", f" | {later}")
        first = lark.rule(f"{written} {later}{skip_first}")
        later = lark.rule(joined(lark.literal(separator), written, later) + skip_later)
    return first


def root_of(tool: Tool) -> Mapping[str, Any]:
    """Return the tool's schema, with a reference at its root resolved."""
    schema = tool.schema
    target = resolved(schema["$ref"], schema) if "$ref" in schema else None
    if isinstance(target, Mapping):
        schema = definitions(schema) | dict(target)
    return schema


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions to which references in a part of `schema` may refer."""
    return {key: schema[key] for key in DEFINITIONS if key in schema}


def not_enforced(tool: Tool, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid schema for function '{tool.name}': {reason}, which cannot be enforced in the tool call "
        "format of this model.",
        param="tools",
        code=INVALID_FUNCTION_PARAMETERS,
    )


DEPTH = 16
"""Maximum depth of references when a type is determined."""
NESTING = 64
"""Maximum nesting of brackets in a value."""
OF_PYTHON: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
    type(None): "null",
}  # fmt: skip


def literal(text: str) -> str:
    """Convert a literal of Python or JSON to JSON; other text becomes a string."""
    text = text.strip()
    try:
        return dumped(_parsed(text))
    except ValueError:
        return dumped(text)


def typed(text: str, types: frozenset[str]) -> str:
    """Convert text to JSON, preferring a value of one of `types`. Empty `types` allow any."""
    if types == {"string"}:
        return dumped(text)
    try:
        value = _parsed(text.strip())
    except ValueError:
        return dumped(text)
    kind = OF_PYTHON.get(type(value), "")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return dumped(value) if fits or "string" not in types else dumped(text)


def dumped(value: Any) -> str:
    """Serialize as JSON. Raises ValueError if JSON cannot represent the value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be sent as an escape
        return json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = DEPTH) -> frozenset[str]:
    """Return the types that `schema` allows; empty if it does not specify any."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if "type" in schema:
        given = schema["type"]
        return frozenset(given if isinstance(given, list) else [given])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset(OF_PYTHON.get(type(value), "string") for value in values)
    if "$ref" in schema:
        return types_of(resolved(schema["$ref"], root), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), Sequence):
            return frozenset().union(*(types_of(part, root, depth - 1) for part in schema[key]))
    return frozenset()


def resolved(reference: object, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference within the same schema, or None."""
    target: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference[1:].strip("/").split("/") if reference != "#" else ():
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _parsed(text: str) -> Any:
    """Raises ValueError."""
    if max(text.count(bracket) for bracket in "[{(") > NESTING and _depth(text) > NESTING:
        raise ValueError("brackets are nested too deeply")
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(str(error)) from error
    dumped(value)  # both parsers accept numbers that JSON cannot represent
    return value


def _depth(text: str) -> int:
    depth = most = 0
    for character in text:
        if character in "[{(":
            depth += 1
            most = max(most, depth)
        elif character in "]})":
            depth -= 1
    return most
