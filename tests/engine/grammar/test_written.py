"""
Schemas as libraries write them: each can be enforced leniently, and answers are valid by it.

`written/` has what zod and zod-to-json-schema wrote for one schema of each kind.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import random
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import jsonschema
import pydantic
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from baton_api.openapi.document import document
from baton_api.sampling import Constraint
from baton_engine.grammar import texts
from tests.engine.grammar.schemas import Schema
from tests.engine.grammar.tokenizers import GRAMMARS, drawn

FOLDER = pathlib.Path(__file__).parent / "written"


# --- pydantic ---

Item = TypeVar("Item")


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = "Rex"


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    next: str | None = None


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Author(BaseModel):
    book: Book | None = None


class Book(BaseModel):
    author: Author | None = None


class Base(BaseModel):
    id: int


class Derived(Base):
    name: str = Field(max_length=5, description="Of the thing.", examples=["x"])


class Extra(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class NoExtra(BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Names(pydantic.RootModel[dict[str, int]]):
    pass


class Aliased(BaseModel):
    of: int = Field(alias="from", deprecated=True)

    @pydantic.computed_field
    def double(self) -> int:
        return 2 * self.of


class Point(NamedTuple):
    x: int
    y: str = "y"


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


@dataclasses.dataclass
class Plain:
    a: int
    b: list[str]


@pydantic.dataclasses.dataclass
class Checked:
    a: Annotated[int, Field(gt=1)]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]

OF_PYDANTIC: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "bytes": bytes, "None": type(None), "Any": Any,
    "Decimal": decimal.Decimal, "condecimal": pydantic.condecimal(max_digits=5, decimal_places=2, ge=0),
    "Fraction": fractions.Fraction, "complex": complex,
    "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time,
    "timedelta": datetime.timedelta,
    "AwareDatetime": pydantic.AwareDatetime, "NaiveDatetime": pydantic.NaiveDatetime,
    "PastDate": pydantic.PastDate,
    "UUID": uuid.UUID, "UUID4": pydantic.UUID4,
    "IPvAnyAddress": pydantic.IPvAnyAddress, "IPvAnyNetwork": pydantic.IPvAnyNetwork,
    "IPv4Address": ipaddress.IPv4Address, "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "AnyUrl": pydantic.AnyUrl, "HttpUrl": pydantic.HttpUrl, "PostgresDsn": pydantic.PostgresDsn,
    "Enum": Color, "IntEnum": Level, "Literal": Literal["a", 1, True, None],
    "Path": pathlib.Path, "FilePath": pydantic.FilePath, "DirectoryPath": pydantic.DirectoryPath,
    "Pattern": re.Pattern[str], "SecretStr": pydantic.SecretStr, "SecretBytes": pydantic.SecretBytes,
    "Json": pydantic.Json[list[int]], "Base64Str": pydantic.Base64Str,
    "Base64UrlBytes": pydantic.Base64UrlBytes,
    "ByteSize": pydantic.ByteSize, "ImportString": pydantic.ImportString, "JsonValue": pydantic.JsonValue,
    "list": list[int], "set": set[int], "frozenset": frozenset[Color], "deque": collections.deque[int],
    "tuple": tuple[int, str], "tuple of any length": tuple[int, ...], "empty tuple": tuple[()],
    "dict": dict[str, int], "dict of int": dict[int, str], "dict of Enum": dict[Color, int],
    "dict of Literal": dict[Literal["p", "q"], int], "dict of UUID": dict[uuid.UUID, int],
    "dict of constr": dict[Annotated[str, Field(pattern="^k[0-9]$")], int],
    "dict of str with lengths": dict[Annotated[str, Field(min_length=2, max_length=3)], int],
    "Counter": collections.Counter[str], "defaultdict": collections.defaultdict[str, list[int]],
    "Optional": int | None, "Union": int | str | Base, "discriminated union": Pet,
    "list of a discriminated union": list[Pet],
    "conint": pydantic.conint(gt=3, le=9, multiple_of=3),
    "integers of 64 bits": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "unsigned integers": Annotated[int, Field(ge=0, le=2**64 - 1)], "PositiveInt": pydantic.PositiveInt,
    "NonNegativeFloat": pydantic.NonNegativeFloat, "FiniteFloat": pydantic.FiniteFloat,
    "constr": pydantic.constr(min_length=2, max_length=5, pattern="^[a-z]+$"),
    "a word boundary": Annotated[str, Field(pattern=r"^[a-z]+\b")],
    "conlist": pydantic.conlist(int, min_length=1, max_length=3),
    "conset": pydantic.conset(Color, min_length=1),
    "model": Derived, "generic": Page[Cat], "generic of a generic": Page[Page[int]], "recursive": Tree,
    "mutually recursive": Author, "extra=allow": Extra, "extra=forbid": NoExtra, "RootModel": Names,
    "alias": Aliased,
    "NamedTuple": Point, "TypedDict": Movie, "dataclass": Plain, "pydantic dataclass": Checked,
    "nested": dict[str, list[Page[Pet] | None]],
}  # fmt: skip


def of_pydantic(name: str) -> Iterator[Schema]:
    """Return the schemas of a model with a required and an optional field of the type."""
    kind = OF_PYDANTIC[name]
    model = pydantic.create_model("Model", must=(kind, ...), may=(kind | None, None))
    yield model.model_json_schema()
    yield model.model_json_schema(mode="serialization")
    yield model.model_json_schema(
        ref_template="#/components/schemas/{model}", union_format="primitive_type_array"
    ) | {"components": {"schemas": model.model_json_schema().get("$defs", {})}}


# --- OpenAPI ---

OPENAPI: dict[str, Schema] = {
    "schemas": {
        "Id": {"type": "integer", "format": "int64", "minimum": -(2**63), "example": 1},
        "Resource": {
            "type": "object",
            "required": ["id", "kind"],
            "properties": {
                "id": {"$ref": "#/components/schemas/Id"},
                "kind": {"type": "string"},
                "url": {"type": "string", "format": "uri-template", "readOnly": True},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            },
            "discriminator": {"propertyName": "kind", "mapping": {"order": "#/components/schemas/Order"}},
        },
        "Order": {
            "description": "A base, and properties of its own.",
            "allOf": [
                {"$ref": "#/components/schemas/Resource"},
                {
                    "type": "object",
                    "required": ["lines"],
                    "properties": {
                        "kind": {"type": "string", "enum": ["order"]},
                        "lines": {
                            "type": "array", "items": {"$ref": "#/components/schemas/Line"}, "maxItems": 2,
                        },
                        "state": {"type": "string", "nullable": True, "enum": ["open", "paid", None]},
                        "total": {
                            "type": "number", "minimum": 0, "exclusiveMinimum": False, "multipleOf": 0.01,
                        },
                        "created": {"type": "string", "format": "date-time"},
                        "parent": {"$ref": "#/components/schemas/Order"},
                    },
                },
            ],
        },
        "Line": {
            "type": "object",
            "required": ["sku"],
            "properties": {
                "sku": {"type": "string", "pattern": "^(?=.{3,8}$)[A-Z]{2}[0-9]+$"},
                "count": {"type": "integer", "format": "int32", "default": 1, "maximum": 99, "minimum": 1},
                "note": {"allOf": [{"$ref": "#/components/schemas/Text"}], "nullable": True},
            },
            "externalDocs": {"url": "https://x.test"},
        },
        "Text": {"type": "string", "maxLength": 5, "xml": {"name": "text"}},
        "Payment": {
            "oneOf": [
                {"$ref": "#/components/schemas/Card"},
                {"title": "Invoice", "type": "object", "properties": {"invoice": {"type": "boolean"}},
                 "required": ["invoice"]},
                {"type": "string", "maxLength": 4},
            ]
        },
        "Card": {
            "type": "object",
            "properties": {"card": {"type": "string", "format": "password"}, "year": {"type": "integer"}},
            "required": ["card", "owner"],
            "additionalProperties": False,
        },
        "Layer": {
            "oneOf": [{"$ref": "#/components/schemas/Group"}, {"$ref": "#/components/schemas/Frame"}],
            "discriminator": {"propertyName": "type"},
        },
        "Group": {
            "allOf": [
                {"type": "object", "properties": {"type": {"type": "string", "enum": ["GROUP"]}},
                 "required": ["type"]},
                {"$ref": "#/components/schemas/HasLayers"},
            ]
        },
        "Frame": {
            "description": "Its parts contain layers, and so does a part of a part.",
            "allOf": [
                {"type": "object", "properties": {"type": {"type": "string", "enum": ["FRAME"]}},
                 "required": ["type"]},
                {"$ref": "#/components/schemas/HasMask"},
                {"$ref": "#/components/schemas/HasLayers"},
            ],
        },
        "HasLayers": {
            "type": "object",
            "properties": {
                "layers": {"type": "array", "items": {"$ref": "#/components/schemas/Layer"}, "maxItems": 1},
            },
        },
        "HasMask": {
            "allOf": [
                {"$ref": "#/components/schemas/HasLayers"},
                {"type": "object", "properties": {"mask": {"$ref": "#/components/schemas/Layer"}}},
            ]
        },
        "Patch": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
            "anyOf": [{"required": ["name"]}, {"required": ["size"]}],
            "minProperties": 1,
        },
    }
}  # fmt: skip


# --- The law ---


def _pattern(validator: Any, pattern: str, text: Any, schema: Schema) -> Iterator[jsonschema.ValidationError]:
    """Look-around is dropped, and Python knows no names of groups and classes as in JavaScript."""
    pattern = re.sub(r"\(\?<\w+>", "(", pattern)
    unchecked = not isinstance(text, str) or re.search(r"\(\?<?[=!]|\\p|\\b", pattern)
    if not unchecked and not re.search(pattern, text):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


def _nothing(
    validator: Any, value: Any, instance: Any, schema: Schema
) -> Iterator[jsonschema.ValidationError]:
    yield from ()


UNCHECKED: dict[str, Callable[..., Any]] = {
    "pattern": _pattern,
    "uniqueItems": _nothing,
    "propertyNames": _nothing,
}
DRAFTS = {
    "draft-04": jsonschema.validators.extend(jsonschema.Draft4Validator, UNCHECKED),
    "draft-07": jsonschema.validators.extend(jsonschema.Draft7Validator, UNCHECKED),
    "2020-12": jsonschema.validators.extend(jsonschema.Draft202012Validator, UNCHECKED),
}


def check(schema: Schema, count: int = 2) -> None:
    text = json.dumps(schema)
    if "draft-04" in text or re.search(r'"exclusiveM\w+": (true|false)', text):
        validator = DRAFTS["draft-04"](schema)
    else:
        validator = DRAFTS["draft-07" if "draft-07" in text or '"items": [' in text else "2020-12"](schema)
    matchers = GRAMMARS.matchers(Constraint("json_schema", texts.schema(schema, lenient=True)), None)
    for seed in range(count):
        validator.validate(json.loads(drawn(matchers(), random.Random(seed), most=8000)))


@pytest.mark.parametrize("name", OF_PYDANTIC)
def test_law_schemas_of_pydantic_are_enforced(name: str) -> None:
    for schema in of_pydantic(name):
        check(schema)


def of_zod(file: str) -> dict[str, Schema]:
    schemas: dict[str, Schema] = json.loads((FOLDER / file).read_text())["schemas"]
    return schemas


NEVER = ("undef, openAi", "nul, openapi-3.0/input", "strictIntersection", "cidr, ", "starts, ")
"""Contradictions as JSON schemas, and a text that random letters hardly end."""


@pytest.mark.parametrize("file", ["zod.json", "zod_to_json_schema.json"])
def test_law_schemas_of_zod_are_enforced(file: str) -> None:
    for name, schema in of_zod(file).items():
        if name.startswith(NEVER):
            GRAMMARS.check(Constraint("json_schema", texts.schema(schema, lenient=True)))
        else:
            check(schema)


@pytest.mark.parametrize("name", [name for name in OPENAPI["schemas"] if name != "Card"])
@pytest.mark.parametrize("version", ["3.0", "3.1"])
def test_law_schemas_of_openapi_are_enforced(name: str, version: str) -> None:
    components = OPENAPI
    if version == "3.1":
        components = json.loads(json.dumps(OPENAPI).replace(', "exclusiveMinimum": false', ""))
        components["schemas"]["Line"]["properties"]["note"]["type"] = ["string", "null"]
    check({"$ref": f"#/components/schemas/{name}", "components": components}, count=4)


def test_schemas_of_baton_s_own_openapi_document_are_enforced() -> None:
    components = document(["m"], "baton")["components"]
    for name in components["schemas"]:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        GRAMMARS.check(Constraint("json_schema", texts.schema(schema, lenient=True)))
