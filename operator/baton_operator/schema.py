"""
From types to the schema that an API server takes: structural, without references, defaults written out.

Three things differ from pydantic's own schema. References are resolved, because the API server knows none.
A field that may be left out simply is not required, because there is no null. And a default that is an object
is written out with all the defaults inside of it, because rules are tried on it before those are filled in.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = (
    "type", "description", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip


def structural(kind: type[BaseModel]) -> Schema:
    """The OpenAPI v3 schema of `kind`, as a CustomResourceDefinition holds it."""
    whole = kind.model_json_schema(by_alias=True, mode="validation")
    return _object(whole, whole.get("$defs", {}))


def _object(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        schema = {**named, **{name: value for name, value in schema.items() if name != "$ref"}}
    if "anyOf" in schema:
        (some,) = (one for one in schema["anyOf"] if one.get("type") != "null")
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
        return _object({**some, **rest}, definitions)
    made = {name: schema[name] for name in _KEPT if name in schema}
    made |= {name: value for name, value in schema.items() if name.startswith("x-kubernetes-")}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if made.get("x-kubernetes-int-or-string"):
        del made["type"]  # it may be written as a number
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        made["properties"] = {
            name: _object(field, definitions) for name, field in schema["properties"].items()
        }
        if schema.get("required"):
            made["required"] = schema["required"]
    elif made.get("type") == "object" and not made.get("x-kubernetes-preserve-unknown-fields"):
        (values,) = schema.get("patternProperties", {"": schema.get("additionalProperties")}).values()
        made["additionalProperties"] = _object(values, definitions)
    if "items" in schema:
        made["items"] = _object(schema["items"], definitions)
    if schema.get("default") is not None:
        made["default"] = _without_nulls(schema["default"])
    if "description" in made:
        made["description"] = " ".join(made["description"].split())
    return {name: made[name] for name in sorted(made, key=_order)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


def _order(name: str) -> tuple[int, str]:
    """What is read first stands first."""
    first = ("description", "type")
    return (first.index(name) if name in first else len(first), name)
