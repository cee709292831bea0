"""What a schema may ask, strict and lenient: what is dropped, closed and rejected, and where."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from baton_api.errors import InvalidRequest
from baton_api.sampling import Constraint
from baton_engine.grammar import schemas, texts
from baton_engine.grammar.schemas import LENIENT, OPTIONS, PATH, PLACE, SchemaError
from tests.engine.grammar.schemas import OpenMaker, Schema
from tests.engine.grammar.tokenizers import GRAMMARS, drawn, takes
from tests.seeds import seeds

LOOK = "^(?!a)b{2}$"
NAME: Schema = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED: Schema = NAME | {"additionalProperties": False}


def enforced(schema: Schema, *, lenient: bool) -> Schema:
    written = schemas.enforced(schema | {OPTIONS: {LENIENT: lenient}})
    del written[OPTIONS]
    return written


CLOSING: dict[str, tuple[Schema, Schema]] = {
    "an object": (NAME, CLOSED),
    "an object without a type": ({"properties": NAME["properties"]}, CLOSED),
    "an open object": (NAME | {"additionalProperties": True}, NAME | {"additionalProperties": True}),
    "a map": ({"type": "object"}, {"type": "object"}),
    "a required name that is not listed": (
        NAME | {"required": ["age"]},
        CLOSED | {"properties": {**NAME["properties"], "age": True}, "required": ["age"]},
    ),
    "items": ({"items": NAME}, {"items": CLOSED}),
    "items as an array": (
        {"items": [NAME], "additionalItems": NAME},
        {"prefixItems": [CLOSED], "items": CLOSED},
    ),
    "prefixItems": ({"prefixItems": [NAME]}, {"prefixItems": [CLOSED], "items": False}),
    "a tuple with more items": (
        {"prefixItems": [NAME], "minItems": 3},
        {"prefixItems": [CLOSED], "minItems": 3, "items": True},
    ),
    "patternProperties": (
        {"patternProperties": {"^x": NAME}},
        {"patternProperties": {"^x": CLOSED}, "additionalProperties": False},
    ),
    "additionalProperties": ({"additionalProperties": NAME}, {"additionalProperties": CLOSED}),
    "anyOf": ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    "oneOf": ({"oneOf": [NAME, {"type": "null"}]}, {"oneOf": [CLOSED, {"type": "null"}]}),
    "allOf of one": ({"allOf": [NAME]}, {"allOf": [CLOSED]}),
    "allOf of several: each knows the properties of the others": (
        {"allOf": [NAME, {"type": "object", "properties": {"age": {}}}]},
        {
            "allOf": [
                CLOSED | {"properties": {"name": {"type": "string"}, "age": True}},
                {"type": "object", "properties": {"age": {}, "name": True}, "additionalProperties": False},
            ]
        },
    ),
    "alternatives beside properties": (
        {**NAME, "anyOf": [{"properties": {"a": {}}}, {"required": ["b"]}]},
        {
            **NAME,
            "properties": {"name": {"type": "string"}, "a": True, "b": True},
            "anyOf": [
                {"properties": {"a": {}, "name": True}, "type": "object", "additionalProperties": False},
                {"required": ["b"]},
            ],
            "additionalProperties": False,
        },
    ),
    "beside a map nothing is closed": (
        {"allOf": [NAME, {"type": "object", "additionalProperties": True}]},
        {"allOf": [NAME, {"type": "object", "additionalProperties": True}]},
    ),
    "unevaluatedProperties": (
        {"allOf": [NAME], "unevaluatedProperties": False},
        {"allOf": [CLOSED]},
    ),
    "a definition": (
        {"$ref": "#/$defs/a", "$defs": {"a": NAME, "unused": {"properties": {"x": {"type": "string"}}}}},
        {"$ref": "#/$defs/0", "$defs": {"0": CLOSED}},
    ),
    "a definition that refers to itself": (
        {"$ref": "#/definitions/a", "definitions": {"a": {"properties": {"b": {"$ref": "#/definitions/a"}}}}},
        {
            "$ref": "#/$defs/0",
            "$defs": {
                "0": {
                    "properties": {"b": {"$ref": "#/$defs/0"}},
                    "type": "object",
                    "additionalProperties": False,
                }
            },
        },
    ),
}


@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize("case", CLOSING)
def test_schema_without_additional_properties_is_closed(case: str, lenient: bool) -> None:
    given, written = CLOSING[case]
    assert enforced(given, lenient=lenient) == written


REFERENCES: dict[str, Schema] = {
    "brackets": {"$ref": "#/$defs/Page[Item]", "$defs": {"Page[Item]": {"const": 7}}},
    "brackets with percent signs": {"$ref": "#/$defs/Page%5BItem%5D", "$defs": {"Page[Item]": {"const": 7}}},
    "a slash and a tilde": {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": {"const": 7}}},
    "angle brackets": {"$ref": "#/definitions/Page<Item>", "definitions": {"Page<Item>": {"const": 7}}},
    "OpenAPI": {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"const": 7}}}},
    "a property": {"anyOf": [{"const": 7}, {"$ref": "#/anyOf/0"}]},
    "a chain": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": 7}}},
    "an anchor": {"$ref": "#seven", "$defs": {"a": {"$anchor": "seven", "const": 7}}},
    "an id": {"$ref": "https://x.test/a", "$defs": {"a": {"$id": "https://x.test/a", "const": 7}}},
    "its own id": {"$id": "urn:x", "$ref": "urn:x#/$defs/a", "$defs": {"a": {"const": 7}}},
    "siblings": {"$ref": "#/$defs/a", "maximum": 7, "$defs": {"a": {"enum": [7, 8]}}},
}


@pytest.mark.parametrize("case", REFERENCES)
def test_schema_references_of_all_forms_are_followed(case: str) -> None:
    assert takes("json_schema", texts.schema(REFERENCES[case]), "7")
    assert not takes("json_schema", texts.schema(REFERENCES[case]), "8")


KIND: Schema = {"properties": {"kind": {"const": "node"}}, "required": ["kind"]}
CHILDREN: Schema = {"properties": {"children": {"items": {"$ref": "#/$defs/node"}, "type": "array"}}}
RECURSIVE: dict[str, Schema] = {
    "a part that has the whole": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"allOf": [KIND, {"$ref": "#/$defs/parent"}]}, "parent": CHILDREN},
    },
    "a part of a part": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {"allOf": [KIND, {"$ref": "#/$defs/parent"}]},
            "parent": {"allOf": [{"$ref": "#/$defs/named"}, {"$ref": "#/$defs/children"}]},
            "named": {"properties": {"name": {"type": "string"}}},
            "children": CHILDREN,
        },
    },
    "each reference beside something": {
        "type": "object",
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    **KIND["properties"],
                    "children": {"type": "array", "items": {"type": "object", "$ref": "#/$defs/node"}},
                },
                "required": ["kind"],
            }
        },
    },
    "alternatives that share a part": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {"oneOf": [{"$ref": "#/$defs/group"}, {"$ref": "#/$defs/frame"}]},
            "group": {"allOf": [KIND, {"$ref": "#/$defs/parent"}]},
            "frame": {
                "allOf": [
                    {"properties": {"kind": {"const": "frame"}}, "required": ["kind"]},
                    {"$ref": "#/$defs/parent"},
                ]
            },
            "parent": CHILDREN,
        },
    },
    "a part twice": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {"allOf": [KIND, {"$ref": "#/$defs/parent"}, {"$ref": "#/$defs/masked"}]},
            "masked": {"allOf": [{"properties": {"mask": {}}}, {"$ref": "#/$defs/parent"}]},
            "parent": CHILDREN,
        },
    },
    "a part of itself": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"allOf": [KIND, CHILDREN, {"$ref": "#/$defs/node"}]}},
    },
    "the root": {
        "allOf": [KIND, {"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}],
    },
}


@pytest.mark.parametrize("case", RECURSIVE)
def test_schema_recursion_through_parts_is_enforced(case: str) -> None:
    schema = RECURSIVE[case]
    enforced(schema, lenient=False)  # nothing had to be dropped
    for lenient in (False, True):
        source = texts.schema(schema, lenient=lenient)
        assert takes("json_schema", source, '{"kind":"node","children":[{"kind":"node","children":[]}]}')
        assert not takes("json_schema", source, '{"kind":"node","children":[{"kind":"other","children":[]}]}')
        assert not takes("json_schema", source, '{"kind":"node","children":[],"else":1}')


def test_schema_parts_that_double_end() -> None:
    """Each definition has the next one twice: 2 ** 40 parts."""
    definitions: Schema = {
        f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}, {"$ref": f"#/$defs/d{at + 1}"}]}
        for at in range(40)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d40": {"type": "integer"}}}
    GRAMMARS.check(Constraint("json_schema", texts.schema(schema, lenient=True)))


TRANSLATED: dict[str, tuple[Schema, str, str]] = {
    "oneOf": (
        {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": ["x"]}}},
        '"x"',
        '"y"',
    ),
    "the lowest integer of 64 bits": ({"type": "integer", "minimum": -(2**63)}, "-5", "5.5"),
    "the highest integer without a sign": ({"type": "integer", "maximum": 2**64 - 1}, "5", "5.5"),
    "the highest number": ({"type": "number", "maximum": 1.7e308}, "1.5", '"x"'),
    "a count without a limit": ({"type": "string", "maxLength": 2**40}, '"x"', "1"),
    "a count as a double": ({"type": "string", "maxLength": 1.0}, '"x"', '"xy"'),
    "names of a map": (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"const": 1}},
        '{"a":1}',
        '{"b":1}',
    ),
    "a pattern of names": (
        {"type": "object", "propertyNames": {"pattern": "^a$"}, "additionalProperties": {"const": 1}},
        '{"a":1}',
        '{"b":1}',
    ),
    "lengths of names": (
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": {"const": 1}},
        '{"a":1}',
        '{"bb":1}',
    ),
    "never": ({"properties": {"a": {"not": {}}, "b": {"const": 1}}}, '{"b":1}', '{"a":1}'),
    "annotations": ({"const": 1, "deprecated": True, "default": 2, "x-y": {}, "nullable": True}, "1", "null"),
    "a format of numbers": ({"type": "integer", "format": "int32"}, "1", '"x"'),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSLATED)
def test_schema_strict_too_what_can_be_said_otherwise_is_enforced(case: str) -> None:
    schema, fits, differs = TRANSLATED[case]
    for lenient in (False, True):
        source = texts.schema(schema, lenient=lenient)
        assert takes("json_schema", source, fits)
        assert not takes("json_schema", source, differs)


DROPPED: dict[str, tuple[Schema, Schema, str]] = {
    "look-around": ({"pattern": LOOK}, {"pattern": "^b{2}$"}, "/pattern: look-around"),
    "a pattern that is none": ({"type": "string", "pattern": "("}, {"type": "string"}, "/pattern: unclosed"),
    "a word boundary": ({"pattern": r"^a\b"}, {"pattern": "^a"}, "/pattern: "),
    "below": (
        {"properties": {"a/b": {"items": {"anyOf": [{}, {"pattern": LOOK}]}}}},
        {
            "properties": {"a/b": {"items": {"anyOf": [{}, {"pattern": "^b{2}$"}]}}},
            "type": "object",
            "additionalProperties": False,
        },
        "/properties/a~1b/items/anyOf/1/pattern: look-around",
    ),
    "in a definition": (
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"pattern": LOOK}}},
        {"items": {"$ref": "#/$defs/0"}, "$defs": {"0": {"pattern": "^b{2}$"}}},
        "/$defs/a/pattern: look-around",
    ),
    "an unknown format": ({"type": "string", "format": "cuid"}, {"type": "string"}, "/format: Unknown"),
    "uniqueItems": ({"items": {}, "uniqueItems": True}, {"items": {}}, "/uniqueItems: "),
    "conditions": ({"if": {"type": "string"}, "then": {"minLength": 1}}, {}, "/if: "),
    "not": ({"not": {"const": 1}}, {}, "/not: "),
    "names of a map that have a format": (
        {"type": "object", "propertyNames": {"format": "uuid"}},
        {"type": "object"},
        "/propertyNames: ",
    ),
    "a required name that may not be": (
        CLOSED | {"required": ["name", "age"]},
        CLOSED | {"required": ["name"]},
        "/required: ",
    ),
    "a multiple of zero": ({"type": "number", "multipleOf": 0}, {"type": "number"}, "/multipleOf: "),
    "a minimum that llguidance cannot read": (
        {"type": "integer", "minimum": 2**64},
        {"type": "integer"},
        "/minimum: ",
    ),
    "an integer that is no double": ({"enum": [2**53 + 1]}, {}, "/enum: "),
    "a negative count": ({"type": "string", "minLength": -1}, {"type": "string"}, "/minLength: "),
    "a number of optional properties": (
        {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        {"properties": {"a": {}, "b": {}, "c": {}}, "type": "object", "additionalProperties": False},
        "/minProperties: ",
    ),
    "patterns of names that overlap": (
        {"type": "object", "patternProperties": {"^a": {"const": 1}, "^ab": {"type": "string"}}},
        {"type": "object"},
        "/patternProperties: ",
    ),
    "a reference to elsewhere": ({"$ref": "https://x.test/y.json"}, {}, "/$ref: "),
    "a contradiction": ({"type": "string", "const": 1}, {"type": "string"}, "/const: "),
    "a contradiction through references": (
        {"properties": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "required": ["a"],
         "$defs": {"a": {"type": "string"}}},
        {"properties": {"a": {"$ref": "#/$defs/0"}}, "required": ["a"], "type": "object",
         "additionalProperties": False, "$defs": {"0": {}}},
        "/properties/a/allOf: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPPED)
def test_schema_lenient_what_cannot_be_enforced_is_dropped(case: str) -> None:
    given, written, _ = DROPPED[case]
    assert enforced(given, lenient=True) == written


@pytest.mark.parametrize("case", DROPPED)
def test_schema_strict_what_cannot_be_enforced_is_named_with_its_place(case: str) -> None:
    given, _, reason = DROPPED[case]
    options = {LENIENT: False, PLACE: "function 'f', ", PATH: "/properties/x"}
    with pytest.raises(SchemaError) as error:
        schemas.enforced(given | {OPTIONS: options})
    path = reason if reason.startswith("/$defs") else f"/properties/x{reason}"
    assert str(error.value).startswith(f"function 'f', at {path}")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "poem"}, {"properties": []}, {"anyOf": {}}, {"items": 5}, {"required": "a"}, {"not": {}}],
    ids=str,
)
def test_schema_that_is_none_is_rejected(schema: Schema, lenient: bool) -> None:
    with pytest.raises(SchemaError):
        enforced(schema, lenient=lenient)


def test_schema_long_chain_of_references_stops_no_worker() -> None:
    chain: dict[str, Any] = {f"d{at}": {"items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(3000)}
    circle = {f"d{at}": {"$ref": f"#/$defs/d{(at + 1) % 3000}"} for at in range(3000)}
    for definitions in (chain | {"d3000": {"const": 7}}, circle):
        source = texts.schema({"$ref": "#/$defs/d0", "$defs": definitions}, lenient=True)
        with pytest.raises(InvalidRequest, match="too"):
            GRAMMARS.check(Constraint("json_schema", source))
    assert takes("json_schema", '{"const": 7}', "7")


@pytest.mark.parametrize("seed", seeds(400, 60))
def test_law_what_a_composed_schema_allows_is_valid_by_it(seed: int) -> None:
    """Closing an object leaves out texts, but allows none that the client's schema does not."""
    schema = OpenMaker(seed).make()
    enforced(schema, lenient=False)  # nothing had to be dropped
    matchers = GRAMMARS.matchers(Constraint("json_schema", texts.schema(schema, lenient=True)), None)
    for number in range(2):
        value = json.loads(drawn(matchers(), random.Random(number)))
        jsonschema.Draft202012Validator(schema).validate(value)
