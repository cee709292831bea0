"""The pages of the HTTP API and of the custom resources, written from their JSON schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from baton_api.openapi.document import document

Schema = Mapping[str, Any]

BETWEEN = "must be between "
"""Start of the message of the rule that bounds a duration."""

HTTP_API = """\
# HTTP API

Generated from `baton_api.openapi` by `make fix`. Do not edit.

Routers and workers serve the complete OpenAPI description at `/openapi.json`. `null` is the same as a
missing field. Unknown fields are ignored. [Errors](errors.md) and [Limits](limits.md) describe rejected
requests.
"""

RESOURCES = """\
# Custom resources

Generated from `crds/` by `make fix`. Do not edit. `kubectl explain` shows the same descriptions.
"""


def http_api_page() -> str:
    """Return the page of endpoints and of the bodies of requests."""
    router, worker = document(["MODEL"], "router"), document(["MODEL"], "worker")
    return "\n".join([HTTP_API, *_endpoints(router["paths"], worker["paths"]), *_bodies(router)])


def custom_resources_page(crds: Path) -> str:
    """Return the page of the custom resources in the folder `crds`."""
    definitions = [yaml.safe_load(path.read_text()) for path in sorted(crds.glob("*.yaml"))]
    return "\n".join([RESOURCES, *(line for definition in definitions for line in _resource(definition))])


def _endpoints(paths: Schema, of_workers: Schema) -> Iterator[str]:
    yield "## Endpoints\n"
    yield "| endpoint | purpose | request | statuses | served by |"
    yield "|---|---|---|---|---|"
    for path, methods in paths.items():
        for method, operation in methods.items():
            body = _body(operation)
            request = f"[{body}](#{body.lower()})" if body else ""
            statuses = ", ".join(operation["responses"])
            servers = "router, workers" if path in of_workers else "router"
            endpoint = f"`{method.upper()} {path}`"
            yield f"| {endpoint} | {operation['summary']} | {request} | {statuses} | {servers} |"
    yield ""


def _body(operation: Schema) -> str:
    """Return the name of the schema of the request's body, if there is one."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        return str(content["schema"]["$ref"]).rpartition("/")[2]
    return ""


def _bodies(described: Schema) -> Iterator[str]:
    schemas = described["components"]["schemas"]
    operations = [operation for methods in described["paths"].values() for operation in methods.values()]
    for name in sorted({body for operation in operations if (body := _body(operation))}):
        yield f"## {name}\n"
        yield "| field | type | range | required |"
        yield "|---|---|---|---|"
        forms = schemas[name].get("anyOf", [schemas[name]])
        required = set.intersection(*(set(form.get("required", ())) for form in forms))
        fields = {field: schema for form in forms for field, schema in form["properties"].items()}
        for field, schema in fields.items():
            plain = _without_null(schema)
            needed = "yes" if field in required else ""
            yield f"| `{field}` | {_type(plain)} | {_range(plain)} | {needed} |"
        yield ""


def _resource(definition: Schema) -> Iterator[str]:
    names = definition["spec"]["names"]
    version = definition["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    yield f"## {names['kind']}\n"
    yield f"{schema['description']}\n"
    yield f"`{definition['spec']['group']}/{version['name']}`, short name `{names['shortNames'][0]}`.\n"
    yield "| field | type | default | range | description |"
    yield "|---|---|---|---|---|"
    for part in ("spec", "status"):
        yield from _fields(part, schema["properties"].get(part, {}))
    yield ""


def _fields(path: str, schema: Schema) -> Iterator[str]:
    """Yield one row per field, depth first."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        value = field.get("default", "")
        default = "" if value == "" or isinstance(value, dict | list) else f"`{_shown(value)}`"
        text = _description(field)
        yield f"| `{here}` | {_type(field)} | {default} | {_range(field)} | {text} |"
        yield from _fields(here, field)
        yield from _fields(f"{here}[]", field.get("items", {}))


def _description(field: Schema) -> str:
    """Return the description without default and range, which have columns of their own."""
    text = " ".join(field.get("description", "").split()).replace("|", "\\|")
    text = re.sub(r"( Range: [^.]+\.)?( At most \d+ items\.)?$", "", text)
    return text.removesuffix(f" Default: {_shown(field['default'])}.") if "default" in field else text


def _without_null(schema: Schema) -> Schema:
    others = [form for form in schema.get("anyOf", ()) if form.get("type") != "null"]
    return others[0] if len(others) == 1 else {"anyOf": others} if others else schema


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(_without_null(form)) for form in schema["anyOf"]))
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _range(schema: Schema) -> str:
    """Return the allowed values, or the limits of a number, a text or an array."""
    if values := schema.get("enum"):
        return ", ".join(f"`{_shown(value)}`" for value in values if value != "")
    for rule in schema.get("x-kubernetes-validations", ()):
        if rule["message"].startswith(BETWEEN):  # a duration
            return str(rule["message"].removeprefix(BETWEEN).replace(" and ", " to "))
    least = next((schema[key] for key in ("minimum", "minLength", "minItems") if key in schema), None)
    most = next((schema[key] for key in ("maximum", "maxLength", "maxItems") if key in schema), None)
    if "exclusiveMinimum" in schema:
        least = f"over {schema['exclusiveMinimum']}"
    unit = " characters" if "maxLength" in schema else " items" if "maxItems" in schema else ""
    match (least, most):
        case (None, None):
            return ""
        case (None, _):
            return f"up to {most}{unit}"
        case (_, None):
            return f"from {least}{unit}"
    return f"{least} to {most}{unit}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
