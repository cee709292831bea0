"""JSON schemas of many kinds, made by chance from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "größe", "a b", 'quo"te', "x-y", "tags", "née", "_", "0", "line\nbreak", "emoji🙂")
PATTERNS = (
    "^[a-z]{2,6}$",
    "^(red|green|blue)$",
    "^.{0,6}[0-9]",
    "^x.{0,8}y$",
    "^[A-Z][a-z\u00e9]{1,9}( [A-Z][a-z]+)?$",
    r"^\d{3}-\d{4}$",
)
FORMATS = ("date", "uuid", "email", "ipv4")
CONSTANTS = ("x", 'with "quotes"', "", 0, -7, 2.5, True, False, None, [1, "a"], {"k": [None]})


class Maker:
    """One schema for each seed; `depth` bounds how deep it goes."""

    names = NAMES
    prefix = "d"
    """The beginning of the names of definitions."""

    def __init__(self, seed: int, depth: int = 3) -> None:
        self._chance = random.Random(seed)
        self._depth = depth
        self._definitions: Schema = {}

    def make(self) -> Schema:
        schema = self._chance.choice(
            [self._object, self._object, self._object, self._array, self._tuple, self._any]
        )(0)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return schema

    def _any(self, level: int) -> Schema:
        leaves: list[Callable[[int], Schema]] = [
            self._string, self._string, self._integer, self._number, self._boolean, self._enum,
            self._constant, self._nullable, self._pattern, self._format,
        ]  # fmt: skip
        inner: list[Callable[[int], Schema]] = [
            self._object,
            self._array,
            self._tuple,
            self._map,
            self._either,
            self._reference,
            self._tree,
        ]
        choices = leaves if level >= self._depth else leaves + inner
        return self._chance.choice(choices)(level)

    def _object(self, level: int) -> Schema:
        names = self._chance.sample(self.names, self._chance.randint(0, 4))
        required = [name for name in names if self._chance.random() < 0.6]
        schema: Schema = {"type": "object", "properties": {name: self._any(level + 1) for name in names}}
        if required:
            schema["required"] = required
        if self._chance.random() < 0.7:
            schema["additionalProperties"] = False
        elif self._chance.random() < 0.5:
            schema["additionalProperties"] = self._any(level + 2)
        return schema

    def _map(self, level: int) -> Schema:
        schema: Schema = {"type": "object", "additionalProperties": self._any(level + 2)}
        if self._chance.random() < 0.5:
            schema["minProperties"] = 1
            schema["maxProperties"] = self._chance.randint(1, 3)
        return schema

    def _array(self, level: int) -> Schema:
        least = self._chance.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(level + 1),
            "minItems": least,
            "maxItems": least + self._chance.randint(0, 3),
        }

    def _tuple(self, level: int) -> Schema:
        count = self._chance.randint(1, 3)
        return {
            "type": "array",
            "prefixItems": [self._any(level + 1) for _ in range(count)],
            "items": False,
            "minItems": count,
        }

    def _either(self, level: int) -> Schema:
        ways = [self._any(level + 1) for _ in range(self._chance.randint(2, 3))]
        return {"anyOf": ways}

    def _reference(self, level: int) -> Schema:
        name = f"{self.prefix}{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(level + 1)
        return {"$ref": f"#/$defs/{name}"}

    def _tree(self, level: int) -> Schema:
        """A definition that refers to itself."""
        name = f"{self.prefix}{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = {
            "type": "object",
            "properties": {
                "value": self._any(self._depth),
                "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def _string(self, level: int) -> Schema:
        least = self._chance.choice([0, 0, 1, 5])
        schema: Schema = {"type": "string", "maxLength": least + self._chance.randint(0, 20)}
        if least:
            schema["minLength"] = least
        return schema

    def _pattern(self, level: int) -> Schema:
        return {"type": "string", "pattern": self._chance.choice(PATTERNS)}

    def _format(self, level: int) -> Schema:
        return {"type": "string", "format": self._chance.choice(FORMATS)}

    def _integer(self, level: int) -> Schema:
        schema: Schema = {"type": "integer"}
        low = self._chance.randint(-1000, 1000)
        high = low + self._chance.choice([0, 1, 7, 100, 12345])
        kind = self._chance.randrange(4)
        if kind == 0:
            schema |= {"minimum": low, "maximum": high}
        elif kind == 1:
            schema |= {"exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        elif kind == 2:
            schema |= {"multipleOf": self._chance.choice([2, 3, 5, 10, 12])}
        else:
            schema |= {"minimum": 0}
        return schema

    def _number(self, level: int) -> Schema:
        schema: Schema = {"type": "number"}
        kind = self._chance.randrange(3)
        if kind == 0:
            schema["multipleOf"] = self._chance.choice([0.5, 0.25, 2])
        elif kind == 1:
            low = self._chance.randint(-50, 50)
            schema |= {"minimum": low, "maximum": low + self._chance.choice([1, 20, 1000])}
        return schema

    def _boolean(self, level: int) -> Schema:
        return {"type": "boolean"}

    def _enum(self, level: int) -> Schema:
        return {"enum": self._chance.sample(CONSTANTS, self._chance.randint(1, 5))}

    def _constant(self, level: int) -> Schema:
        return {"const": self._chance.choice(CONSTANTS)}

    def _nullable(self, level: int) -> Schema:
        return {"type": [self._chance.choice(["string", "integer", "boolean"]), "null"]}


class OpenMaker(Maker):
    """As libraries write schemas: objects without `additionalProperties`, composed in each way there is."""

    prefix = "Page[Item~/ %]"

    def make(self) -> Schema:
        schema = self._composed(0)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _any(self, level: int) -> Schema:
        if level < self._depth and self._chance.random() < 0.5:
            return self._composed(level)
        return super()._any(level)

    def _composed(self, level: int) -> Schema:
        kinds = (
            self._record,
            self._all_of,
            self._extended,
            self._one_of,
            self._alternatives,
            self._names_map,
        )
        return self._chance.choice(kinds)(level)

    def _object(self, level: int) -> Schema:
        return self._record(level)

    def _reference(self, level: int) -> Schema:
        schema = super()._reference(level)
        return {"$ref": schema["$ref"].replace("~", "~0").replace("m~0/", "m~0~1")}

    def _tree(self, level: int) -> Schema:
        schema = super()._tree(level)
        name = schema["$ref"].removeprefix("#/$defs/")
        reference = {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}
        self._definitions[name]["properties"]["next"]["anyOf"][1] = reference
        del self._definitions[name]["additionalProperties"]
        return reference

    def _record(self, level: int, names: Sequence[str] = NAMES) -> Schema:
        """An open object; some of its required properties are not listed."""
        chosen = self._chance.sample(names, self._chance.randint(1, min(3, len(names))))
        schema: Schema = {"properties": {name: self._any(level + 1) for name in chosen}}
        required = [name for name in chosen if self._chance.random() < 0.5]
        if required:
            schema["required"] = required
        if self._chance.random() < 0.7:
            schema["type"] = "object"
        return schema

    def _parts(self, level: int, count: int) -> list[Schema]:
        """Objects with properties of their own."""
        names = self._chance.sample(NAMES, len(NAMES))
        size = len(names) // count
        return [self._record(level, names[at * size : (at + 1) * size]) for at in range(count)]

    def _defined(self, schema: Schema) -> Schema:
        if self._chance.random() < 0.5:
            return schema
        name = f"Type_{len(self._definitions)}"
        self._definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    def _all_of(self, level: int) -> Schema:
        return {"allOf": [self._defined(part) for part in self._parts(level, self._chance.randint(2, 3))]}

    def _extended(self, level: int) -> Schema:
        """Properties beside a base."""
        base, own = self._parts(level, 2)
        base = self._defined(base)
        return base | own if "$ref" in base else {**own, "allOf": [base]}

    def _one_of(self, level: int) -> Schema:
        """Alternatives that a property tells apart."""
        ways = []
        for number, part in enumerate(self._parts(level, 2)):
            part["properties"] = {"kind": {"const": f"kind {number}"}, **part["properties"]}
            part["required"] = ["kind", *part.get("required", ())]
            ways.append(self._defined(part | {"type": "object"}))
        return {"oneOf": ways}

    def _alternatives(self, level: int) -> Schema:
        """Alternatives beside properties that all of them have."""
        common, *ways = self._parts(level, 3)
        return {**common, "type": "object", "anyOf": [self._defined(way) for way in ways]}

    def _names_map(self, level: int) -> Schema:
        """A map whose names have a schema."""
        names: Schema = self._chance.choice(
            [
                {"enum": ["x", "y", "z"]},
                {"pattern": "^k[0-9]$"},
                {"minLength": 1, "maxLength": 3},
                {"const": "c"},
            ]
        )
        return {"type": "object", "propertyNames": names, "additionalProperties": self._any(level + 2)}
