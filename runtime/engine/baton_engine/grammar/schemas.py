"""
What a JSON schema may ask of an answer: for all fields, tools and tags, strict or lenient.

A schema of a client becomes one that llguidance enforces, and every answer that it allows is valid by the
client's schema, except for keywords that were dropped:

- Objects that list their properties are closed unless the schema says otherwise, because a model under a
  grammar would invent properties until it has no tokens left. Tuples are closed likewise.
- References of any form become references to `$defs`. llguidance cannot join a definition with other schemas
  while it reads that definition, so what is joined is written in place, and recursion goes through values.
- A keyword that a grammar cannot express is dropped in a lenient schema, and an error that names its place in
  a strict one. llguidance itself decides: if it rejects the schema, its parts are tried one by one.

It runs in the process that validates constraints, which has limits of time and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

OPTIONS = "x-guidance"
"""Member of a schema with llguidance's options. Values of clients are overwritten."""

LENIENT, PLACE, PATH = "lenient", "place", "path"
"""Options for this module: whether keywords may be dropped, and what errors and their paths begin with."""

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ONES = ("items", "additionalProperties", "not")
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Lists of schemas of the same value."""
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
CONDITIONS = ("if", "then", "else")
LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
REGEX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?<?[=!])?|.", re.DOTALL)
"""Matches one part of a regular expression: an escape, a class of characters, a beginning of a group."""
REFERENCE_DEPTH = 16
"""Maximum references to the schema of a map's names."""

IN_PLACE_LIMIT = 5_000
"""Maximum references of a schema that are written in place: each may double what the one before wrote."""

INEXPRESSIBLE = (
    *CONDITIONS, "not", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "uniqueItems", "unevaluatedItems", "propertyNames",
)  # fmt: skip
"""Keywords that no grammar expresses, except for values that the code below translates."""

ENFORCED = (
    "pattern", "format", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum",
    "minLength", "maxLength", "minProperties", "maxProperties", "patternProperties", "minItems", "maxItems",
    "required", "oneOf", "anyOf", "allOf", "enum", "const", "$ref", "prefixItems", "items",
    "additionalProperties", "properties", "type",
)  # fmt: skip
"""Keywords that llguidance enforces, in the order in which a lenient schema gives them up."""

COMBINING = ("required", "oneOf", "anyOf", "allOf", "$ref")
"""Keywords that can contradict others through references."""

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
COUNT_LIMIT = 2**31
"""Higher maximum counts limit no answer, and llguidance does not parse them."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
BOUND_LIMIT = 2**63 - 1024
"""Highest integer below 2**63 that is also a double, as which llguidance reads bounds."""

EXACT_LIMIT = 2**53
"""Highest integer up to which all are doubles."""

REMEDY = ". Change it, or leave out 'strict', so that it is ignored"

Names = tuple[str, ...] | None
"""Properties that a value has because of other schemas of the same value. None: any."""


class SchemaError(ValueError):
    """The schema cannot be enforced. The message contains the place within the schema and the reason."""


def problem(schema: object, path: str = "") -> str:  # noqa: C901 - one rule after the other
    """
    Return the first error in the form of `schema` and its path; empty if there is none.

    Checks what JSON Schema's drafts agree on. The caller has limited the depth.
    """
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
    for key in MAPS:
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            return f"{_at(path)}'{key}' is not an object"
        for name, value in inner.items():
            if reason := problem(value, f"{path}/{key}/{_escaped(name)}"):
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


def enforced(source: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the schema for llguidance. `source` has its options in `OPTIONS`.

    Raises SchemaError if the schema is strict and a keyword cannot be enforced, or if nothing is left.
    """
    options = {"coerce_one_of": True, **source.get(OPTIONS, {})}
    place, path, lenient = options.pop(PLACE, ""), options.pop(PATH, ""), options.pop(LENIENT, False)
    root = _without(source, {OPTIONS})
    try:
        if reason := problem(root, path):
            raise SchemaError(reason)
        return _enforced(root, path, lenient=lenient) | {OPTIONS: options}
    except SchemaError as error:
        raise SchemaError(f"{place}{error}") from error
    except RecursionError as error:
        raise SchemaError(f"{place}it is nested too deeply") from error


def _enforced(root: dict[str, Any], path: str, *, lenient: bool) -> dict[str, Any]:
    writer = _Writer(root, lenient=lenient)
    schema, definitions = writer.written(path)
    if not (reason := _error(_joined(schema, definitions))):
        return _joined(schema, definitions)
    stubs = dict.fromkeys(definitions, True)
    for known, keys in ((stubs, ENFORCED), (definitions, COMBINING)):  # each part alone, then with references
        mender = _Mender(writer.places, known, keys, lenient=lenient)
        for part in (*definitions.values(), schema):
            mender.mend(part)
        if not (reason := _error(_joined(schema, definitions))):
            return _joined(schema, definitions)
    raise SchemaError(reason)


def _joined(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    return schema | {"$defs": definitions} if definitions else schema


def _error(schema: Mapping[str, Any]) -> str:
    """Return why llguidance rejects `schema`; empty if it accepts it."""
    options = {OPTIONS: {"coerce_one_of": True}}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({**schema, **options}))
    return rejection(grammar)


def rejection(grammar: str) -> str:
    """Return llguidance's reason why it rejects a grammar, without the text of the grammar; empty if none."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
    if not failed:
        return ""
    reason = messages[0] if messages else "it cannot be enforced"
    return reason.rpartition("error: ")[2].split("\n")[0]  # a regular expression comes before its error


class _Writer:
    """Writes the schema anew, with references to `definitions`, and closed."""

    def __init__(self, root: dict[str, Any], *, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._anchors: dict[str, tuple[dict[str, Any], str]] | None = None
        self._names: dict[tuple[str, frozenset[str] | None], str] = {}
        self._in_place = 0
        """Number of references that were written in place."""
        self._unwritten: list[tuple[str, Any, str, Names]] = []
        """Definitions: name, schema, path in the client's schema, and properties beside it."""
        self._listing: dict[str, Names] = {}
        self._rejections: dict[tuple[str, str], str] = {}
        self.places: dict[int, str] = {}
        """Path in the client's schema of each written schema, by its identity."""

    def written(self, at: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the root, which is at `at`, and the definitions."""
        schema = self.schema(self._root, at)
        if not isinstance(schema, dict):
            raise SchemaError("no value matches the schema")
        definitions: dict[str, Any] = {}
        while self._unwritten:  # not by recursion: references may form long chains
            name, value, path, beside = self._unwritten.pop()
            definitions[name] = self.schema(value, path, beside)
        return schema, definitions

    def _value(self, value: Any, at: str) -> dict[str, Any] | bool:
        """Write the schema of a value within another one; with references in place, as a definition."""
        if isinstance(value, dict) and _joins(value):
            return {"$ref": f"#/$defs/{self._defined(value, at, ())}"}
        return self.schema(value, at)

    def schema(  # noqa: C901 - one branch for each keyword
        self, value: Any, at: str, beside: Names = (), parts: set[str] | None = None
    ) -> dict[str, Any] | bool:
        """
        Write the schema at `at`. Other schemas of its value list the properties `beside`.

        If there are others, so that references are written in place, `parts` has the paths of what was
        written for the same value. It grows.
        """
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise SchemaError(f"{_at(at)}a schema is an object or a boolean")
        if value.get("not") in (True, {}):
            return False
        if "propertyNames" in value:
            value = self._named(value)
        written: dict[str, Any] = {}
        self.places[id(written)] = at
        around = self._around(value, beside)
        if parts is None and _several(value):
            parts = {at}
        for key, inner in value.items():
            path = f"{at}/{_escaped(key)}"
            if key in ("properties", "patternProperties"):
                written[key] = {
                    name: self._value(part, f"{path}/{_escaped(name)}") for name, part in inner.items()
                }
            elif key in IN_PLACE:
                written[key] = written.get(key, []) + [
                    self.schema(
                        part,
                        f"{path}/{position}",
                        around[f"{key}/{position}"],
                        parts if key == "allOf" or parts is None else {*parts},
                    )
                    for position, part in enumerate(inner)
                ]
            elif key in REFERENCES:
                self._refer(inner, path, around[key], written, parts)
            elif key == "prefixItems" or (key == "items" and isinstance(inner, list)):
                written["prefixItems"] = [
                    self._value(part, f"{path}/{position}") for position, part in enumerate(inner)
                ]
                if key == "items" and "additionalItems" in value:
                    written["items"] = self._value(value["additionalItems"], f"{at}/additionalItems")
            elif key in ("items", "additionalProperties"):
                written[key] = self._value(inner, path)
            elif key in COUNTS:
                if (count := _count(inner)) is not None:
                    written[key] = count
            elif key in BOUNDS and isinstance(inner, int | float) and not isinstance(inner, bool):
                least = key in ("minimum", "exclusiveMinimum")
                written[key] = max(inner, -BOUND_LIMIT) if least else min(inner, BOUND_LIMIT)
            elif key in ("format", "pattern"):
                self._text(key, inner, value, written, path)
            elif key in ("enum", "const") and any(map(_inexact, inner if key == "enum" else [inner])):
                self._reject(path, f"a grammar cannot enforce integers beyond {EXACT_LIMIT}")
            elif key in ENFORCED or key in BOUNDS:
                written[key] = inner
            elif key in INEXPRESSIBLE:
                self._translate(key, inner, value, written, path)
        self._close(value, written, at, around["self"])
        return written

    # --- Closing ---

    def _around(self, value: dict[str, Any], beside: Names) -> dict[str, Names]:
        """
        Return the names beside each schema of the same value, and beside `value` as "self".

        Alternatives do not count for one another, but all count for a schema that is always required.
        """
        parts = {key: [self._listed(part) for part in value.get(key, ())] for key in IN_PLACE}
        parts |= {key: [self._listed({"$ref": value[key]})] for key in REFERENCES if key in value}
        united = {key: _united(lists) for key, lists in parts.items()}
        around = {"self": _united([beside, *united.values()])}
        listed = _united([beside, self._own(value)])
        for key, lists in parts.items():
            around[key] = _united([listed, *(names for other, names in united.items() if other != key)])
            for position in range(len(lists)):
                others = lists[:position] + lists[position + 1 :] if key == "allOf" else ()
                around[f"{key}/{position}"] = _united([around[key], *others])
        return around

    def _own(self, value: dict[str, Any]) -> Names:
        """Return the properties that `value` itself lists. None if it allows others explicitly."""
        if value.get("additionalProperties", False) is not False or value.get("patternProperties"):
            return None
        if value.get("unevaluatedProperties", False) is not False:
            return None
        names = (*value.get("properties", {}), *value.get("required", ()))
        conditional = [value.get(key, True) for key in CONDITIONS]
        conditional += value.get("dependentSchemas", {}).values()
        return _united([names, *(self._listed(part) for part in conditional)])

    def _listed(self, value: Any) -> Names:
        """Return the properties that `value` and its parts list. None if one of them allows others."""
        if not isinstance(value, dict):
            return ()
        lists: list[Names] = [self._own(value)]
        for key in IN_PLACE:
            lists += map(self._listed, value.get(key, ()))
        for key in REFERENCES:
            if key in value and (target := self._target(value[key])) is not None:
                schema, path = target
                if path not in self._listing:
                    self._listing[path] = ()  # ends a circle
                    self._listing[path] = self._listed(schema)
                lists.append(self._listing[path])
        return _united(lists)

    def _close(self, value: dict[str, Any], written: dict[str, Any], at: str, beside: Names) -> None:
        """Add what `value` means, but does not say: its type, and no other properties or items."""
        properties = written.get("properties")
        if properties is not None and not ({"type", "enum", "const"} & value.keys()):
            written["type"] = "object"
        if "additionalProperties" not in value:
            self._close_object(value, written, at, beside)
        elif value["additionalProperties"] is False and self._lenient and "patternProperties" not in written:
            written["required"] = [name for name in value.get("required", ()) if name in (properties or ())]
        prefix = written.get("prefixItems")
        if prefix is not None and not ({"items", "maxItems"} & written.keys()):
            least = written.get("minItems", 0)
            written["items"] = isinstance(least, int) and least > len(prefix)

    def _close_object(self, value: dict[str, Any], written: dict[str, Any], at: str, beside: Names) -> None:
        others = value.get("unevaluatedProperties", False)
        if others is not False:
            if not value.keys() & {*IN_PLACE, *REFERENCES}:
                written["additionalProperties"] = self.schema(others, f"{at}/unevaluatedProperties")
            elif others not in (True, {}):
                self._reject(f"{at}/unevaluatedProperties", "a grammar cannot enforce it here")
        elif beside is not None and ("properties" in written or "patternProperties" in written):
            if "properties" in written:
                for name in (*value.get("required", ()), *beside):
                    written["properties"].setdefault(name, True)
            written["additionalProperties"] = False

    # --- References ---

    def _refer(
        self, reference: Any, at: str, beside: Names, written: dict[str, Any], parts: set[str] | None
    ) -> None:
        """Write what `reference` refers to: its definition, or itself beside other `parts` of the value."""
        target = self._target(reference)
        if target is None:
            self._reject(at, f"the reference {str(reference)[:60]!r} leads nowhere in this schema")
            return
        schema, path = target
        if parts is None or self._in_place >= IN_PLACE_LIMIT:
            written["$ref"] = f"#/$defs/{self._defined(schema, path, beside)}"
        elif path not in parts:
            self._in_place += 1
            parts.add(path)
            written["allOf"] = [*written.get("allOf", ()), self.schema(schema, path, beside, parts)]

    def _defined(self, schema: Any, path: str, beside: Names) -> str:
        """Return the name of the definition of a schema."""
        key = path, None if beside is None else frozenset(beside)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = str(len(self._names))
            self._unwritten.append((name, schema, path, beside))
        return name

    def _target(self, reference: Any) -> tuple[Any, str] | None:
        """Return the schema to which a reference leads, and its path. None if it is not in this schema."""
        if not isinstance(reference, str):
            return None
        document, _, fragment = reference.partition("#")
        start: tuple[Any, str] | None = (self._root, "")
        if document and document not in (self._root.get("$id"), self._root.get("id")):
            start = self._anchored(document)
        if start is None or not fragment:
            return start
        if not fragment.startswith("/"):
            return self._anchored(f"#{fragment}")
        return _resolved(start, fragment) or _resolved(start, unquote(fragment))

    def _anchored(self, name: str) -> tuple[Any, str] | None:
        if self._anchors is None:
            self._anchors = {}
            for schema, path in _walk(self._root, ""):
                for key in ("$id", "id", "$anchor", "$dynamicAnchor"):
                    given = schema.get(key)
                    if isinstance(given, str):
                        anchor = f"#{given}" if key.endswith("nchor") else given
                        self._anchors.setdefault(anchor, (schema, path))
        return self._anchors.get(name)

    # --- Keywords that llguidance does not have ---

    def _translate(
        self, key: str, inner: Any, value: dict[str, Any], written: dict[str, Any], at: str
    ) -> None:
        if key == "unevaluatedItems" and not value.keys() & {*IN_PLACE, *REFERENCES}:
            written.setdefault("items", self.schema(inner, at))
        elif inner not in (False, {}, []) and (inner is not True or key == "uniqueItems"):
            self._reject(at, f"a grammar cannot enforce '{key}'")

    def _text(self, key: str, inner: Any, value: dict[str, Any], written: dict[str, Any], at: str) -> None:
        """Write `pattern` or `format`, or only that part of a pattern that a grammar can express."""
        if "string" not in value.get("type", "string"):
            return
        reason = self._rejection(key, inner)
        if reason and self._lenient and key == "pattern":
            inner = _without_assertions(inner)
            reason = self._rejection(key, inner)
        if reason:
            self._reject(at, reason)
        else:
            written[key] = inner

    def _rejection(self, key: str, value: Any) -> str:
        """Return why llguidance rejects a keyword of a string; empty if it accepts it."""
        known = key, str(value)
        if known not in self._rejections:
            self._rejections[known] = _error({"type": "string", key: value})
        return self._rejections[known]

    def _named(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a map with its `propertyNames` as properties or as a pattern, if that is possible."""
        names = value["propertyNames"]
        for _ in range(REFERENCE_DEPTH):
            target = self._target(names.get("$ref")) if isinstance(names, dict) else None
            names = names if target is None else target[0]
        if not isinstance(names, dict):
            return value
        rules = {key: names[key] for key in ENFORCED if key in names and key != "type"}
        inner = value.get("additionalProperties", True)
        closed = _without(value, {"propertyNames"}) | {"additionalProperties": False}
        if not rules:
            return _without(value, {"propertyNames"})
        if value.keys() & {"properties", "patternProperties", *IN_PLACE, *REFERENCES}:
            return value
        if isinstance(rules.get("const"), str):
            return closed | {"properties": {rules["const"]: inner}}
        if isinstance(rules.get("enum"), list):
            return closed | {"properties": {name: inner for name in rules["enum"] if isinstance(name, str)}}
        if rules.keys() <= {"minLength", "maxLength"}:
            most = _count(rules.get("maxLength", ""))
            pattern = rf"^[\s\S]{{{rules.get('minLength', 0)},{'' if most is None else most}}}$"
            return closed | {"patternProperties": {pattern: inner}}
        if rules.keys() == {"pattern"} and isinstance(rules["pattern"], str):
            return closed | {"patternProperties": {rules["pattern"]: inner}}
        return value

    def _reject(self, at: str, reason: str) -> None:
        if not self._lenient:
            raise SchemaError(f"{_at(at)}{reason}{REMEDY}")


class _Mender:
    """Finds the keywords that llguidance rejects, and drops them from a lenient schema."""

    def __init__(
        self, places: Mapping[int, str], known: Mapping[str, Any], keys: Sequence[str], *, lenient: bool
    ) -> None:
        """`known` are the definitions, `keys` the keywords that may be to blame."""
        self._places = places
        self._known = known
        self._keys = keys
        self._lenient = lenient

    def mend(self, schema: Any) -> None:
        """
        Drop keywords until llguidance accepts `schema`. Raises SchemaError for a strict one.

        If the absence of none of them helps, they stay.
        """
        if not isinstance(schema, dict):
            return
        for inner in _inner(schema):
            self.mend(inner)
        if not (reason := self._error(schema)):
            return
        keys = [key for key in self._keys if key in schema and schema.keys() != {"$ref"}]
        culprit = next((key for key in keys if not self._error(_without(schema, {key}))), None)
        if not self._lenient:
            path = self._places.get(id(schema), "")
            raise SchemaError(
                f"{_at(path if culprit is None else f'{path}/{_escaped(culprit)}')}{reason}{REMEDY}"
            )
        several = (keys[: count + 1] for count in range(len(keys)))
        culprits = next((part for part in several if not self._error(_without(schema, set(part)))), [])
        for key in culprits if culprit is None else [culprit]:
            del schema[key]
            if key == "patternProperties":  # their names are not known any more
                schema.pop("additionalProperties", None)

    def _error(self, schema: Mapping[str, Any]) -> str:
        if not schema.keys() & {*IN_PLACE, "$ref"}:  # no part of the value has a second schema
            schema = _shallow(schema)
        return _error({**schema, "$defs": self._known})


def _without(schema: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def _shallow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the schemas within it."""

    def anything(value: Any) -> Any:
        return value if value is False else True

    shallow = dict(schema)
    for key in MAPS:
        if key in schema:
            shallow[key] = {name: anything(value) for name, value in schema[key].items()}
    for key in ONES:
        if key in schema:
            shallow[key] = anything(schema[key])
    if "prefixItems" in schema:
        shallow["prefixItems"] = list(map(anything, schema["prefixItems"]))
    return shallow


def _without_assertions(pattern: Any) -> str:
    """Return a regular expression without look-around and word boundaries: it matches more texts."""
    parts: list[str] = []
    depth = 0
    """Of parentheses within look-around."""
    for part in REGEX.findall(str(pattern)):
        if depth or part.startswith(LOOK_AROUND):
            depth += part.startswith("(") - (part == ")")
        elif part not in (r"\b", r"\B"):
            parts.append(part)
    return "".join(parts)


def _several(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema is several of the same value, so that llguidance has to join them."""
    asked = schema.keys() & {*ENFORCED, *REFERENCES}
    return len(asked) > 1 or len(schema.get("allOf", ())) > 1


def _joins(schema: Any, *, several: bool = False) -> bool:
    """Return whether a schema has a reference beside other schemas of the same value."""
    if not isinstance(schema, dict):
        return False
    several = several or _several(schema)
    if several and schema.keys() & {*REFERENCES}:
        return True
    return any(_joins(part, several=several) for key in IN_PLACE for part in schema.get(key, ()))


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Return the written schemas within a written schema."""
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            yield from value.values()
        elif key in LISTS:
            yield from value
        elif key in ONES:
            yield value


def _walk(value: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Return all objects within `value`, and their paths."""
    if isinstance(value, dict):
        yield value, path
        for key, inner in value.items():
            yield from _walk(inner, f"{path}/{_escaped(key)}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _walk(inner, f"{path}/{position}")


def _resolved(start: tuple[Any, str], pointer: str) -> tuple[Any, str] | None:
    found, path = start
    for step in pointer[1:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
        path = f"{path}/{step}"
    return (found, path) if isinstance(found, dict | bool) else None


def _united(lists: Iterable[Names]) -> Names:
    united: dict[str, None] = {}
    for names in lists:
        if names is None:
            return None
        united |= dict.fromkeys(names)
    return tuple(united)


def _inexact(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > EXACT_LIMIT


def _count(value: Any) -> int | None:
    """Return a count; None if it limits nothing."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if isinstance(value, int) and value >= COUNT_LIMIT else value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _at(path: str) -> str:
    return f"at {path[:80]}: " if path else ""
