"""
Grammars of tool calls in llguidance's Lark: at least one call, or free text in which every call is valid.

A layout describes how a family writes calls: marks, separators, and the format of one call. A mark that is a
special token matches only that token, and free text cannot contain it. JSON has the white space of
`json.dumps`, as in the models' templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_engine.api.parsing.tools.arguments import RAW_END, RAW_START
from baton_engine.api.parsing.tools.toolbox import TextGrammar, Tool, Toolbox
from baton_engine.grammar.schemas import LENIENT, OPTIONS, PATH, PLACE

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
ANY_TEXT = "(?s:.*)"


def grammar(layout: Layout, toolbox: Toolbox, tokens: Mapping[str, int], answer: str | None = None) -> str:
    """
    Return the grammar of the texts that the tool choice of `toolbox` allows.

    With `answer`, a JSON schema, an answer without calls is a value of the schema instead of free text.
    """
    lark = Lark(tokens)
    trigger = layout.triggers[0] if layout.opening.startswith(layout.triggers) else ""
    alternatives = [layout.call(lark, tool, _checked(toolbox, tool)) for tool in toolbox.callable.values()]
    call = lark.rule(" | ".join(alternatives))
    several = toolbox.parallel
    inner = (
        f"{call} ({joined(lark.literal(layout.separator), call)})*"
        if several and layout.separator is not None
        else call
    )
    rest = joined(lark.literal(layout.opening.removeprefix(trigger)), inner, lark.literal(layout.closing))
    block = lark.rule(joined(lark.literal(trigger), rest))
    if several and layout.between is not None:
        blocks = f"{block} ({joined(lark.literal(layout.between), block)})*"
    else:
        blocks = block
    if toolbox.forced:
        return lark.text(blocks)
    if answer is not None:
        return lark.text(f"{lark.rule(f'%json {answer}')} | {lark.rule(blocks)}")
    free = lark.free(layout.triggers, layout.bare)
    if not trigger:
        return lark.text(f"{free} | {lark.rule(blocks)}")
    many = "*" if several and layout.between is not None else "?"
    if trigger in tokens:
        return lark.text(f"({free} {block}){many} {free}")
    # One lazy rule matches text and mark, because a separate rule of text would consume the mark's beginning.
    up_to = lark.lazy(f"{free} {json.dumps(trigger)}")
    return lark.text(f"({up_to} {lark.rule(rest)}){many} {free}")


class Lark:
    """Builder of a grammar."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._lines: list[str] = []
        self._rules: dict[str, str] = {}
        marks = sorted(tokens, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines]) + "\n"

    def literal(self, text: str | None) -> str:
        """Return an expression for exactly this text; empty for None."""
        parts, position = [], 0
        text = text or ""
        for match in self._marks.finditer(text) if self._marks else ():
            parts += [json.dumps(text[position : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            position = match.end()
        parts.append(json.dumps(text[position:]))
        return " ".join(part for part in parts if part != '""')

    def rule(self, body: str) -> str:
        return self._named("r", body)

    def terminal(self, body: str) -> str:
        return self._named("T", body)

    def json(self, schema: Mapping[str, Any], tool: Tool, path: str = "") -> str:
        """Return a rule for JSON values of `schema`, which is at `path` in the schema of `tool`."""
        options = {**JSON_OPTIONS, LENIENT: not tool.exact, PLACE: place_of(tool), PATH: path}
        return self.rule(f"%json {json.dumps({**schema, OPTIONS: options})}")

    def arguments(self, tool: Tool, checked: bool) -> str:
        """Return an expression for all arguments as one JSON value."""
        if tool.grammar is not None and tool.grammar.syntax == "lark":
            return joined(self.literal(RAW_START), self.input(tool, tool.grammar), self.literal(RAW_END))
        return self.json(tool.schema if checked or tool.custom else ANY_OBJECT, tool)

    def input(self, tool: Tool, grammar: TextGrammar) -> str:
        """Return an expression for the text of a custom tool."""
        where = f"in the grammar of tool '{tool.name}': "
        if grammar.syntax == "regex":
            return self.terminal(first([regex(grammar.definition)], where))
        return self.rule(first([f"%lark {{\n{grammar.definition}\n}}"], where))

    def free(self, without: tuple[str, ...], beginning: str = "") -> str:
        """Return a terminal for text without any of `without` and with no first character in `beginning`."""
        body = f"/{ANY_TEXT}/"
        if beginning:
            body = rf"/\s*([^\s{re.escape(beginning)}]{ANY_TEXT})?/"
        for mark in without:
            body += f" & ~/{ANY_TEXT}{escaped(mark)}{ANY_TEXT}/"
        return self.terminal(body)

    def lazy(self, body: str) -> str:
        """Return a rule for the shortest text that `body` matches."""
        return self._named("lazy", body, "[lazy]")

    def _named(self, kind: str, body: str, options: str = "") -> str:
        line = options + ": " + body
        if line not in self._rules:
            self._rules[line] = f"{kind}{len(self._rules)}"
            self._lines.append(self._rules[line] + line)
        return self._rules[line]


def _checked(toolbox: Toolbox, tool: Tool) -> bool:
    return toolbox.forced or tool.exact


def first(bodies: Sequence[str], where: str) -> str:
    """Return the first of `bodies` that can be enforced. If none can, the error begins with `where`."""
    return f"%first {json.dumps({'bodies': bodies, PLACE: where})}"


def place_of(tool: Tool) -> str:
    return f"in the schema of function '{tool.name}', "


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part) or '""'


def escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def regex(pattern: str) -> str:
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern) + "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Blocks of calls in a text, formatted as in the family's chat template."""

    triggers: tuple[str, ...] = ()
    """Marks that start a block. Free text must not contain them. `opening` begins with the first one."""
    bare: str = ""
    """Characters that start a call without a trigger. An answer without calls must not begin with them."""
    opening: str
    call: Callable[[Lark, Tool, bool], str]
    """Returns the expression of one call. The flag selects whether arguments must match the tool's schema."""
    separator: str | None = None
    """Separator of the calls in a block. None: a block has one call."""
    closing: str
    between: str | None = None
    """Separator of blocks. None: a text has one block."""
