"""
Translation of structural tags to llguidance's Lark: free text in which marks begin structured parts.

Two formats are supported: `structures` with `triggers`, and the nested `format` of xgrammar. A mark that is a
special token of the model matches only that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from baton_engine.grammar import ebnf, schemas

DEPTH_LIMIT = 32
"""Maximum nesting of formats."""

TEXT = r"/(.|\n)*/"


class TagError(ValueError):
    """A structural tag is invalid or of an unsupported type."""


def to_lark(source: str, special: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """
    Translate a structural tag. Raises TagError.

    `special` maps the text of special tokens to ids. `options` are those of JSON schemas.
    """
    try:
        tag = json.loads(source)
    except ValueError as error:
        raise TagError(f"the structural tag is not JSON: {error}") from error
    if not isinstance(tag, dict):
        raise TagError("the structural tag is not a JSON object")
    writer = _Writer(special, options)
    start = writer.format(tag["format"]) if "format" in tag else writer.legacy(tag)
    return "\n".join([f"start: {start}", *writer.lines]) + "\n"


class _Writer:
    def __init__(self, special: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._special = special
        self._options = options
        texts = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._names = 0
        self._depth = 0

    def legacy(self, tag: Mapping[str, Any]) -> str:
        tags = [
            {
                "begin": _text(structure, "begin"),
                "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
                "end": _text(structure, "end"),
            }
            for structure in _objects(tag, "structures")
        ]
        return self._triggered({"triggers": tag.get("triggers"), "tags": tags})

    def format(self, form: Any) -> str:
        """Return an expression for the texts of `form`, which can be part of a sequence."""
        if not isinstance(form, dict):
            raise TagError("expected a format: a JSON object with a 'type'")
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise TagError(f"formats are nested deeper than {DEPTH_LIMIT}")
        try:
            return self._format(form)
        finally:
            self._depth -= 1

    def _format(self, form: dict[str, Any]) -> str:
        match form.get("type"):
            case "const_string":
                return self._literal(_text(form, "value"))
            case "json_schema" | "qwen_xml_parameter" as kind:
                if kind != "json_schema" or form.get("style", "json") != "json":
                    raise TagError("parameters in a style other than JSON are not supported")
                return self._json(form.get("json_schema"))
            case "regex":
                return self._terminal(regex(_text(form, "pattern")))
            case "grammar":
                return self._grammar(_text(form, "grammar"))
            case "any_text" | "free_text":
                return self._terminal(TEXT)
            case "sequence":
                return " ".join(f"({self.format(part)})" for part in self._elements(form))
            case "or":
                return " | ".join(f"({self.format(part)})" for part in _list(form, "elements"))
            case "optional" | "star" | "plus" as kind:
                mark = {"optional": "?", "star": "*", "plus": "+"}[kind]
                return f"({self.format(form.get('content'))}){mark}"
            case "tag":
                return self._tag(form)
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
            case kind:
                raise TagError(f"the format type {str(kind)[:60]!r} is not supported")

    def _elements(self, form: Mapping[str, Any]) -> list[Any]:
        elements = _list(form, "elements")
        for part in elements[:-1]:
            if isinstance(part, dict) and part.get("type") in ("any_text", "free_text", "triggered_tags"):
                raise TagError(f"{part['type']!r} has no end and must be the last element of a 'sequence'")
        return elements

    def _tag(self, form: Mapping[str, Any], begun: str = "") -> str:
        """Return an expression for a tag. `begun` is the part of `begin` that a trigger has matched."""
        begin = _text(form, "begin")[len(begun) :]
        ends = form.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise TagError("'end' is not a string or an array of strings")
        content = form.get("content")
        kind = content.get("type") if isinstance(content, dict) else None
        until = " | ".join(f"({self._literal(end)})" for end in ends)
        letters = not any(self._marks and self._marks.search(end) for end in ends)
        if kind in ("any_text", "free_text") and letters and all(ends):
            inner = self._terminal(f"{TEXT} ({until})", lazy=True)  # the text extends to the first end
            return self._joined(begin, inner)
        if kind == "regex" and letters:
            assert isinstance(content, dict)
            inner = self._terminal(f"{regex(_text(content, 'pattern'))} ({until})")
            return self._joined(begin, inner)
        return self._joined(begin, self._named(self.format(content)), self._named(until))

    def _joined(self, begin: str, *rest: str) -> str:
        return self._named(" ".join([*([self._literal(begin)] if begin else []), *rest]))

    def _triggered(self, form: Mapping[str, Any]) -> str:
        triggers, tags = _list(form, "triggers"), _objects(form, "tags")
        alternatives: list[str] = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise TagError("a trigger is not a string with at least one character")
            bodies = [self._tag(tag, trigger) for tag in tags if _text(tag, "begin").startswith(trigger)]
            if not bodies:
                raise TagError(f"no tag begins with the trigger {trigger[:60]!r}")
            mark = self._marks.search(trigger) if self._marks is not None else None
            if mark is not None and mark.start() > 0:
                raise TagError(f"the special token in the trigger {trigger[:60]!r} is not at its start")
            if mark is not None:
                before = f"{self._terminal(TEXT)} {self._literal(trigger)}"
            else:
                before = self._terminal(f"{TEXT} {json.dumps(trigger)}", lazy=True)
            alternatives.append(f"{before} ({' | '.join(bodies)})")
        for tag in tags:
            begin = _text(tag, "begin")
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise TagError(f"the tag {begin[:60]!r} does not begin with a trigger")
        tag_rule = self._named(" | ".join(f"({way})" for way in alternatives))
        if form.get("stop_after_first"):
            return tag_rule if form.get("at_least_one") else f"({tag_rule} | {self._terminal(TEXT)})"
        return f"{tag_rule}{'+' if form.get('at_least_one') else '*'} {self._terminal(TEXT)}"

    def _separated(self, form: Mapping[str, Any]) -> str:
        tag_rule = self._named(" | ".join(f"({self._tag(tag)})" for tag in _objects(form, "tags")))
        if form.get("stop_after_first"):
            several = tag_rule
        else:
            separator = _text(form, "separator")
            several = f"{tag_rule} ({self._literal(separator)} {tag_rule})*" if separator else f"{tag_rule}+"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _json(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise TagError("the schema of a tag is not a JSON object")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return f"%json {json.dumps(schemas.enforced(schema | {schemas.OPTIONS: self._options}))}"

    def _grammar(self, text: str) -> str:
        try:
            lark = ebnf.to_lark(text)
        except ebnf.EbnfError as error:
            raise TagError(str(error)) from error
        return f"%lark {{\n{lark}}}"

    def _literal(self, text: str) -> str:
        """Return an expression for `text` with its special tokens."""
        parts: list[str] = []
        position = 0
        for matched in self._marks.finditer(text) if self._marks is not None else ():
            if matched.start() > position:
                parts.append(json.dumps(text[position : matched.start()]))
            parts.append(f"<[{self._special[matched.group()]}]>")
            position = matched.end()
        if position < len(text) or not parts:
            parts.append(json.dumps(text[position:]))
        return " ".join(parts)

    def _terminal(self, body: str, *, lazy: bool = False) -> str:
        # A lazy lexeme is a rule in llguidance's Lark, any other a terminal.
        self._names += 1
        name = f"lazy{self._names}" if lazy else f"T{self._names}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _named(self, body: str) -> str:
        self._names += 1
        self.lines.append(f"r{self._names}: {body}")
        return f"r{self._names}"


def regex(pattern: str) -> str:
    """Return a regular expression in Lark's syntax."""
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(pattern))
    rule: str = grammar["grammars"][0]["lark_grammar"]
    return rule.removeprefix("start: ")


def _text(form: Mapping[str, Any], name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise TagError(f"'{name}' is missing, or not a string")
    return value


def _list(form: Mapping[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise TagError(f"'{name}' is missing, or not an array of at least one item")
    return value


def _objects(form: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = _list(form, name)
    if not all(isinstance(value, dict) for value in values):
        raise TagError(f"'{name}' is not an array of objects")
    return values
