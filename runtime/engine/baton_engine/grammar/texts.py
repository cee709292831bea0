"""
Translation of constraints to llguidance's language: JSON schemas, regular expressions, grammars and tags.

White space in JSON is limited to a space, or a line break with indentation. Models can write compact and
formatted JSON, and a small model cannot write white space indefinitely.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from baton_engine.grammar import ebnf, schemas, tags
from baton_engine.grammar.schemas import LENIENT, OPTIONS, PLACE

INDENT_LIMIT = 40

WHITE_SPACE = rf" |\n[ \t]{{0,{INDENT_LIMIT}}}"

JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE}

UNFORCED = '%llguidance {"no_forcing": true}'
RULE = re.compile(r"^(\w+): %(json|first) (\{.*\})$", re.MULTILINE)
"""Matches a rule of tool calls with a schema, or with bodies of which the first possible one holds."""


class TextError(ValueError):
    """The constraint is invalid. The message contains the reason."""


def grammar(kind: str, source: str, special: Mapping[str, int]) -> str:
    """Return the grammar for llguidance. `special` maps special tokens to ids. Raises TextError."""
    grammar_text = _grammar(kind, source, special)
    return _letter_by_letter(grammar_text) if any(mark in source for mark in special) else grammar_text


def _letter_by_letter(grammar: str) -> str:
    """
    Disable llguidance's forced tokens in a grammar.

    With forced tokens, llguidance would write the text of a special token as that token, which its grammar
    does not accept.
    """
    if not grammar.lstrip().startswith("{"):
        return grammar if "%llguidance" in grammar else f"{UNFORCED}\n{grammar}"
    grammar_text = json.loads(grammar)
    for part in grammar_text["grammars"]:
        lark = part.get("lark_grammar") or f"start: %json {json.dumps(part.pop('json_schema'))}\n"
        part |= {"lark_grammar": f"{UNFORCED}\n{lark}"}
    return json.dumps(grammar_text)


def _grammar(kind: str, source: str, special: Mapping[str, int]) -> str:
    try:
        match kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(json.dumps(schemas.enforced(json.loads(source))))
            case "regex":
                return LLMatcher.grammar_from_regex(source)
            case "ebnf":
                return LLMatcher.grammar_from_lark(ebnf.to_lark(source))
            case "lark":
                return LLMatcher.grammar_from_lark(source)
            case "tools":
                return LLMatcher.grammar_from_lark(RULE.sub(_enforced_rule, source))
            case "structural_tag":
                return LLMatcher.grammar_from_lark(
                    tags.to_lark(source, special, JSON_OPTIONS | {LENIENT: True})
                )
            case _:
                raise TextError(f"unknown constraint kind {kind!r}")
    except ValueError as error:
        raise TextError(str(error)) from error


def _enforced_rule(rule: re.Match[str]) -> str:
    """Return a rule of tool calls in llguidance's language. Raises SchemaError."""
    name, kind, given = rule[1], rule[2], json.loads(rule[3])
    if kind == "json":
        # The grammar of a custom tool may contain schemas, which have no options.
        return f"{name}: %json {json.dumps(schemas.enforced(given))}" if OPTIONS in given else rule[0]
    reason = ""
    for body in given.get("bodies", ()):
        text = f"{name}: {body}"
        reason = schemas.rejection(LLMatcher.grammar_from_lark(f"start: {name}\n{text}\n"))
        if not reason:
            return text
    raise schemas.SchemaError(f"{given.get(PLACE, '')}{reason}")


def schema(value: Any, *, lenient: bool = False, white_space: str | None = None) -> str:
    """
    Return the source of a `json_schema` constraint, including llguidance's options.

    With `lenient`, keywords that cannot be enforced are dropped, see `schemas`. Otherwise they are an error.
    """
    options: dict[str, Any] = dict(JSON_OPTIONS)
    if white_space is not None:
        options = {"whitespace_pattern": white_space} if white_space else {"whitespace_flexible": False}
    if lenient:
        options[LENIENT] = True
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    return json.dumps(value | {OPTIONS: options}, ensure_ascii=False)
