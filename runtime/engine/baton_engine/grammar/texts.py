"""
A constraint as text in llguidance's own language: JSON schemas, regular expressions, grammars and tags.

White space in JSON is free to a bound: a space, or a line break with its indentation, wherever JSON allows
any. So pretty printed and compact answers are both at hand, and a small model cannot go on with blanks for
ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from baton_engine.grammar import ebnf, tags

INDENT_LIMIT = 40

WHITE_SPACE = rf" |\n[ \t]{{0,{INDENT_LIMIT}}}"

JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE}

UNFORCED = '%llguidance {"no_forcing": true}'
OPTIONS = "x-guidance"
"""Where a schema says how it is to be compiled; what clients write there does not count."""


class TextError(ValueError):
    """The constraint is not one; says why."""


def grammar(kind: str, source: str, special: Mapping[str, int]) -> str:
    """What llguidance compiles; `special` are the texts of special tokens with their ids. TextError."""
    grammar_text = _grammar(kind, source, special)
    return _letter_by_letter(grammar_text) if any(mark in source for mark in special) else grammar_text


def _letter_by_letter(grammar: str) -> str:
    """
    The same texts, without what llguidance writes ahead where there is but one way.

    It would write the letters of a special token as that token, which its own grammar does not take for them.
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
                return LLMatcher.grammar_from_json_schema(source)
            case "regex":
                return LLMatcher.grammar_from_regex(source)
            case "ebnf":
                return LLMatcher.grammar_from_lark(ebnf.to_lark(source))
            case "lark":
                return LLMatcher.grammar_from_lark(source)
            case "structural_tag":
                return LLMatcher.grammar_from_lark(tags.to_lark(source, special, JSON_OPTIONS))
            case _:
                raise TextError(f"there is no constraint of kind {kind!r}")
    except ValueError as error:
        raise TextError(str(error)) from error


def schema(value: Any, *, lenient: bool = False, white_space: str | None = None) -> str:
    """
    The source of a `json_schema` constraint, which says itself how it is to be compiled.

    What of a lenient one cannot be enforced is left out; otherwise it is an error when it is compiled.
    """
    options: dict[str, Any] = dict(JSON_OPTIONS)
    if white_space is not None:
        options = {"whitespace_pattern": white_space} if white_space else {"whitespace_flexible": False}
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    return json.dumps(value | {OPTIONS: options}, ensure_ascii=False)
