"""
Structural schemas for the API server, generated from the types: no references, defaults written out.

Four things differ from pydantic's own schema. References are resolved: the API server does not support them.
Optional fields are absent instead of null. The default of an object includes the defaults inside of it,
because the API server evaluates rules on it before it fills those in. And items of lists in a spec have no
defaults: clients that compare whole lists, such as `kubectl apply` and Argo CD, would find a difference after
each write. The types fill these defaults in when the operator reads an object.

Descriptions get the default and the range of their field, which `kubectl explain` does not show otherwise.
"""

from __future__ import annotations

from typing import Any

from baton_operator.kinds.part import Duration, Part

Schema = dict[str, Any]

_KEPT = (
    "type", "description", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip

LIST_TYPE = "x-kubernetes-list-type"
RULES = "x-kubernetes-validations"


def structural(kind: type[Part], *, of_spec: bool = True) -> Schema:
    """
    Return the OpenAPI v3 schema of `kind`, as a CustomResourceDefinition holds it.

    `of_spec`: users write it, so descriptions end with default and range, and items have no defaults.
    """
    whole = kind.model_json_schema(by_alias=True, mode="validation")
    return _object(whole, whole.get("$defs", {}), of_spec=of_spec)


def _object(
    schema: Schema, definitions: dict[str, Schema], *, of_spec: bool, in_list: bool = False
) -> Schema:
    if "$ref" in schema:
        named = definitions[schema["$ref"].rpartition("/")[2]]
        schema = {**named, **{name: value for name, value in schema.items() if name != "$ref"}}
    if "anyOf" in schema:
        (some,) = (one for one in schema["anyOf"] if one.get("type") != "null")
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
        return _object({**some, **rest}, definitions, of_spec=of_spec, in_list=in_list)
    result = {name: schema[name] for name in _KEPT if name in schema}
    result |= {name: value for name, value in schema.items() if name.startswith("x-kubernetes-")}
    if "const" in schema:
        result["enum"] = [schema["const"]]
    if result.get("x-kubernetes-int-or-string"):
        del result["type"]  # users may write a number
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        result["properties"] = {
            name: _object(field, definitions, of_spec=of_spec, in_list=in_list)
            for name, field in schema["properties"].items()
        }
        if schema.get("required"):
            result["required"] = schema["required"]
    elif result.get("type") == "object" and not result.get("x-kubernetes-preserve-unknown-fields"):
        (values,) = schema.get("patternProperties", {"": schema.get("additionalProperties")}).values()
        result["additionalProperties"] = _object(values, definitions, of_spec=False, in_list=in_list)
    if "items" in schema:
        result["items"] = _object(schema["items"], definitions, of_spec=of_spec, in_list=True)
        result.setdefault(LIST_TYPE, "atomic")
    default = schema.get("default")
    if default is not None and not (of_spec and in_list):
        result["default"] = _without_nulls(default)
    if "description" in result:
        words = [*result["description"].split(), *(_facts({**result, "default": default}) if of_spec else ())]
        result["description"] = " ".join(words)
    return {name: result[name] for name in sorted(result, key=_order)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


def _order(name: str) -> tuple[int, str]:
    """Description and type first."""
    first = ("description", "type")
    return (first.index(name) if name in first else len(first), name)


def _facts(field: Schema) -> list[str]:
    """Return sentences with default and range."""
    facts = []
    default = field.get("default")
    if isinstance(default, bool):
        facts.append(f"Default: {str(default).lower()}.")
    elif isinstance(default, int) or (isinstance(default, str) and default):
        facts.append(f"Default: {default}.")
    if {"minimum", "maximum"} <= field.keys():
        facts.append(f"Range: {field['minimum']} to {field['maximum']}.")
    elif field.get("pattern") == Duration.PATTERN and RULES in field:
        facts.append(
            f"Range: {field[RULES][0]['message'].removeprefix('must be between ').replace('and', 'to')}."
        )
    if field.get("type") == "array" and "maxItems" in field:
        facts.append(f"At most {field['maxItems']} items.")
    return facts
