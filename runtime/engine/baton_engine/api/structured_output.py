"""
Structured output: the fields of all supported APIs, as one constraint.

OpenAI uses `response_format`; SGLang `regex`, `ebnf`, `json_schema` and `structural_tag`; vLLM
`structured_outputs`, and `guided_*` in older versions. A request may have at most one constraint.

JSON schemas are enforced with and without `strict`. Keywords that a grammar cannot enforce are ignored
without `strict`, as OpenAI allows, and cause an error otherwise: `grammar.schemas` decides. Only
`response_format` has `strict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from baton_api import limits
from baton_api.errors import INVALID_VALUE, MISSING_REQUIRED_PARAMETER, InvalidRequest
from baton_api.sampling import Constraint
from baton_engine.api.fields import Fields, shown, wrong_type
from baton_engine.grammar import texts

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
NAME = re.compile(r"[A-Za-z0-9_-]+")
LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*(\[[^\]]*\]|\{[^}]*\})?\s*:(?!:=))", re.MULTILINE)
"""Matches grammars in Lark. EBNF has `root ::=`."""

NamedConstraint = tuple[str, Constraint]
"""Path of the field with a constraint, and the constraint."""


def read_constraint(fields: Fields) -> Constraint | None:
    """Return the constraint of a request, or None. Its compilation happens later. Raises InvalidRequest."""
    constraints = list(_constraints(fields))
    if len(constraints) > 1:
        raise InvalidRequest(
            f"'{constraints[0][0]}' and '{constraints[1][0]}' cannot be combined. Remove one of them.",
            param=constraints[1][0],
        )
    return constraints[0][1] if constraints else None


def constrained_by(fields: Fields) -> str | None:
    """Return the path of the field with the constraint, or None."""
    return next((param for param, _ in _constraints(fields)), None)


def _constraints(fields: Fields) -> Iterator[NamedConstraint]:
    yield from _response_format(fields)
    yield from _structured_outputs(fields)
    for name, read in _READERS.items():
        yield from read(fields, name)
    blank = _white_space(fields, "guided_whitespace_pattern")
    yield from _schema(fields, "guided_json", blank)
    fields.text("guided_decoding_backend")


def _response_format(fields: Fields) -> Iterator[NamedConstraint]:
    value = fields.mapping("response_format")
    if value is None:
        return
    inner = Fields(value, fields.param("response_format"))
    inner.require("type")
    match inner.choice("type", FORMATS):
        case "json_object":
            yield fields.param("response_format"), _any_object()
        case "json_schema":
            inner.require("json_schema")
            yield fields.param("response_format"), _named_schema(inner.member("json_schema"))
        case "structural_tag":
            form = {key: part for key, part in value.items() if key != "type"}
            yield fields.param("response_format"), _tag(form, inner.param("type"))


def _named_schema(fields: Fields) -> Constraint:
    name = fields.required_text("name", limits.SCHEMA_NAME.most)
    if not NAME.fullmatch(name):
        fields.wrong_value("name", f"expected only a-z, A-Z, 0-9, '_' and '-', but got {shown(name)}")
    fields.text("description")
    fields.require("schema")
    schema = fields.mapping("schema")
    return _of_schema(schema, fields.param("schema"), lenient=not fields.boolean("strict"))


def _structured_outputs(fields: Fields) -> Iterator[NamedConstraint]:
    if not fields.mapping("structured_outputs"):
        return
    inner = fields.member("structured_outputs")
    blank = _white_space(inner, "whitespace_pattern")
    if inner.boolean("disable_any_whitespace"):
        blank = ""
    inner.boolean("disable_additional_properties")  # no schema allows those that it does not mention
    inner.boolean("disable_fallback")
    constraints = [
        *_schema(inner, "json", blank),
        *_regex(inner, "regex"),
        *_choice(inner, "choice"),
        *_grammar(inner, "grammar"),
        *_structural_tag(inner, "structural_tag"),
    ]
    if inner.boolean("json_object"):
        constraints.append((inner.param("json_object"), _any_object()))
    if not constraints:
        raise InvalidRequest(
            "'structured_outputs' is empty. Expected one of 'json', 'regex', 'choice', 'grammar', "
            "'json_object' and 'structural_tag'.",
            param=fields.param("structured_outputs"),
            code=MISSING_REQUIRED_PARAMETER,
        )
    yield from constraints


def _schema(fields: Fields, name: str, white_space: str | None = None) -> Iterator[NamedConstraint]:
    """Read a schema: an object, or a string with JSON."""
    value = fields.get(name)
    if value is None:
        return
    param = fields.param(name)
    if isinstance(value, str):
        _check_size(value, param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"Invalid value for '{param}': it is not JSON: {error}.", param=param, code=INVALID_VALUE
            ) from error
    if not isinstance(value, dict | bool):
        raise wrong_type(param, "an object, or a string that contains one", value)
    yield param, _of_schema(value, param, lenient=True, white_space=white_space)


def _regex(fields: Fields, name: str) -> Iterator[NamedConstraint]:
    yield from _text(fields, name, "regex")


def _grammar(fields: Fields, name: str) -> Iterator[NamedConstraint]:
    for param, constraint in _text(fields, name, "ebnf"):
        kind = "lark" if LARK.search(constraint.source) else "ebnf"
        yield param, Constraint(kind, constraint.source)


def _choice(fields: Fields, name: str) -> Iterator[NamedConstraint]:
    choices = fields.array(name, limits.CHOICES.most)
    if choices is None:
        return
    param = fields.param(name)
    if not choices:
        raise InvalidRequest(
            f"Invalid '{param}': empty array. Expected at least 1 item.",
            param=param,
            code=limits.CHOICES.code_below,
        )
    for position, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise wrong_type(f"{param}[{position}]", "a string", choice)
    literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    _check_size(literals, param)
    # One terminal with alternatives is faster than a rule with alternatives.
    yield param, Constraint("lark", f"start: CHOICE\nCHOICE: {literals}\n")


def _structural_tag(fields: Fields, name: str) -> Iterator[NamedConstraint]:
    """Read a structural tag: an object, or a string with JSON."""
    value = fields.get(name)
    if value is None:
        return
    if isinstance(value, dict):
        yield fields.param(name), _tag(value, fields.param(name))
    else:
        yield from _text(fields, name, "structural_tag")


def _text(fields: Fields, name: str, kind: str) -> Iterator[NamedConstraint]:
    value = fields.text(name)
    if value is not None:
        _check_size(value, fields.param(name))
        yield fields.param(name), Constraint(kind, value)


_READERS: dict[str, Callable[[Fields, str], Iterator[NamedConstraint]]] = {
    "regex": _regex,
    "ebnf": _grammar,
    "json_schema": _schema,
    "structural_tag": _structural_tag,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
"""Fields of a request that contain a constraint directly."""


def _white_space(fields: Fields, name: str) -> str | None:
    """Read the regular expression of white space between the tokens of JSON."""
    return fields.text(name, limits.WHITE_SPACE.most)


def _any_object() -> Constraint:
    return Constraint("json_schema", texts.schema({"type": "object"}))


def _of_schema(schema: Any, param: str, *, lenient: bool, white_space: str | None = None) -> Constraint:
    if _deeper(schema, limits.DEPTH.most):
        raise InvalidRequest(
            f"Invalid '{param}': nested too deeply. Expected at most {limits.DEPTH.most} levels of objects "
            "and arrays.",
            param=param,
            code=limits.DEPTH.code,
        )
    source = texts.schema(schema, lenient=lenient, white_space=white_space)
    _check_size(source, param)
    return Constraint("json_schema", source)


def _tag(form: dict[str, Any], param: str) -> Constraint:
    source = json.dumps(form, ensure_ascii=False)
    _check_size(source, param)
    return Constraint("structural_tag", source)


def _check_size(source: str, param: str) -> None:
    size = len(source.encode(errors="surrogatepass"))
    if size > limits.CONSTRAINT.most:
        raise InvalidRequest(
            f"Invalid '{param}': too large. Expected at most {limits.CONSTRAINT.most} bytes, but got {size}.",
            param=param,
            code=limits.CONSTRAINT.code,
        )


def _deeper(value: Any, levels: int) -> bool:
    """Return whether objects and arrays are nested deeper than `levels`."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
