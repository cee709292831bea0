"""Validation of the JSON schema of a function's parameters, as far as JSON Schema's drafts agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
ONES = ("items", "additionalProperties", "not")
OTHERS = (
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "patternProperties",
    "unevaluatedProperties",
    "additionalProperties",
)
"""Members that can add properties to those that a schema lists."""


def problem(schema: object, path: str = "") -> str:
    """Return the first error of `schema` and its path; empty if it is valid. The body limits its depth."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"{_at(path)}a schema is an object or a boolean"
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in TYPES:
            return f"{_at(path)}{str(name)[:40]!r} is not a type"
    if "enum" in schema and not isinstance(schema["enum"], list):
        return f"{_at(path)}'enum' is not an array"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{_at(path)}'required' is not an array of strings"
    for key in OF_SCHEMAS:
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            return f"{_at(path)}'{key}' is not an object"
        for name, value in inner.items():
            if reason := problem(value, f"{path}/{key}/{name}"):
                return reason
    for key in LISTS:
        inner = schema.get(key, [])
        if not isinstance(inner, list):
            return f"{_at(path)}'{key}' is not an array"
        for position, value in enumerate(inner):
            if reason := problem(value, f"{path}/{key}/{position}"):
                return reason
    for key in ONES:
        value = schema.get(key, True)
        if isinstance(value, list) and key == "items":
            continue  # older drafts use an array for `prefixItems`
        if reason := problem(value, f"{path}/{key}"):
            return reason
    return ""


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """
    Set `additionalProperties` to false in a schema that does not specify it, recursively.

    JSON Schema would allow any additional properties, and a model under a grammar would invent them.
    """
    result = dict(schema)
    properties = result.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {
            name: closed(value) if isinstance(value, dict) else value for name, value in properties.items()
        }
        if not any(key in result for key in OTHERS):
            result["additionalProperties"] = False
    if isinstance(result.get("items"), dict):
        result["items"] = closed(result["items"])
    return result


def _at(path: str) -> str:
    return f"at {path[:80]}: " if path else ""
