"""JSON schemas (draft 2020-12, as OpenAPI 3.1 has it) from the table of limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_api.limits import Limit

Schema = dict[str, Any]

ANYTHING: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def integer(limit: Limit) -> Schema:
    return {"type": "integer", "minimum": limit.least, "maximum": limit.most}


def number(limit: Limit) -> Schema:
    least = "exclusiveMinimum" if limit.open_below else "minimum"
    return {"type": "number", least: limit.least, "maximum": limit.most}


def text(limit: Limit) -> Schema:
    return {"type": "string", "minLength": limit.least, "maxLength": limit.most}


def array(items: Schema, limit: Limit | None = None, least: int = 0) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if limit is not None:
        schema |= {"minItems": limit.least, "maxItems": limit.most}
    elif least:
        schema["minItems"] = least
    return schema


def mapping(values: Schema, limit: Limit | None = None) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": values}
    return schema if limit is None else schema | {"maxProperties": limit.most}


def one_of(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def exactly(value: str) -> Schema:
    return {"type": "string", "const": value}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return either(schema, NULL)


def record(properties: dict[str, Schema], required: Sequence[str] = ()) -> Schema:
    """An object that may have other members too."""
    schema: Schema = {"type": "object", "properties": properties}
    return schema | {"required": list(required)} if required else schema


def full(properties: dict[str, Schema], **more: Schema) -> Schema:
    """An object that has all of `properties`, and may have `more`."""
    return record(properties | more, tuple(properties))


def optional(**properties: Schema) -> dict[str, Schema]:
    """Fields of a request that may be left out, and for which null says the same."""
    return {name: nullable(schema) for name, schema in properties.items()}
