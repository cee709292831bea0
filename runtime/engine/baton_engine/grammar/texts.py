"""
Translation of constraints to llguidance's language: JSON schemas, regular expressions, grammars and tags.

White space in JSON is limited to a space, or a line break with indentation. Models can write compact and
formatted JSON, and a small model cannot write white space indefinitely.
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
"""Member of a schema with llguidance's options. Values of clients are overwritten."""


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
                raise TextError(f"unknown constraint kind {kind!r}")
    except ValueError as error:
        raise TextError(str(error)) from error


def schema(value: Any, *, lenient: bool = False, white_space: str | None = None) -> str:
    """
    Return the source of a `json_schema` constraint, including llguidance's options.

    With `lenient`, keywords that cannot be enforced are ignored. Otherwise they cause an error during
    compilation.
    """
    options: dict[str, Any] = dict(JSON_OPTIONS)
    if white_space is not None:
        options = {"whitespace_pattern": white_space} if white_space else {"whitespace_flexible": False}
    if lenient:
        options |= {"lenient": True, "coerce_one_of": True}
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    return json.dumps(value | {OPTIONS: options}, ensure_ascii=False)
