"""Values that a schema must reject, read from the schema itself: each of its bounds, broken once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

LONGEST = 5000
"""Characters, beyond which a bound costs more to break than it is worth."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One invalid value, and the path by which the rejection must name it."""

    path: tuple[str, ...]
    """Of fields; `[]` stands for the first item of a list."""
    value: Any
    unknown: bool = False
    """Whether it is the field itself that does not exist."""

    @property
    def named(self) -> str:
        where = ".".join(self.path).replace(".[]", "[0]")
        return f'unknown field "{where}"' if self.unknown else f"{where}: "


def breaches(path: tuple[str, ...], schema: Schema) -> Iterator[Breach]:
    """All of a schema and of what is below it."""
    kind = schema.get("type")
    if kind == "object":
        yield Breach(path, 7)
        if "properties" in schema:
            yield Breach((*path, "nonsense"), 1, unknown=True)
        for name, below in schema.get("properties", {}).items():
            yield from breaches((*path, name), below)
    elif kind == "array":
        yield Breach(path, "no list")
        yield from breaches((*path, "[]"), schema["items"])
    elif kind == "integer":
        yield Breach(path, "no number")
        yield from (Breach(path, schema[bound] + by) for bound, by in LIMITS if bound in schema)
    elif kind == "boolean":
        yield Breach(path, "neither")
    elif kind == "string":
        yield Breach(path, 7)
        if "enum" in schema:
            yield Breach(path, "Nonsense")
        elif schema.get("maxLength", LONGEST) < LONGEST:
            yield Breach(path, "a" * (schema["maxLength"] + 1))


LIMITS = (("minimum", -1), ("maximum", 1))


def broken(spec: dict[str, Any], schema: Schema, breach: Breach) -> dict[str, Any]:
    """The spec with that value in its place, and whatever has to be around it."""
    changed: Any = copy.deepcopy(spec)
    if len(breach.path) == 1:  # the spec itself
        return {"spec": breach.value}
    where, here = changed, schema
    for name in breach.path[1:-1]:
        here = _below(here, name)
        if name == "[]":
            where = where[0]
        else:
            child = where.get(name)
            if not isinstance(child, dict | list) or child == []:
                where[name] = _least(here)
            where = where[name]
    last = breach.path[-1]
    if last == "[]":
        where[:] = [breach.value]
    else:
        where[last] = breach.value
    return {"spec": changed}


def _below(schema: Schema, name: str) -> Schema:
    below: Schema = schema["items"] if name == "[]" else schema["properties"][name]
    return below


def _least(schema: Schema) -> Any:
    """A value with what is required in it; of the rest another test knows more."""
    if schema.get("type") == "array":
        return [_least(schema["items"])]
    if schema.get("type") != "object":
        return schema.get("enum", ["a"])[0] if schema.get("type") == "string" else schema.get("minimum", 1)
    return {name: _least(schema["properties"][name]) for name in schema.get("required", ())}
