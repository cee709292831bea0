"""
Tool calls with one tag per parameter: Qwen3-Coder, and models with the same template.

    <tool_call>
    <function=f>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

The type of a parameter determines how its text is parsed. Strings are emitted as they arrive, other values
when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton_engine.api.parsing.tools import tagged_arguments
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import ANY_TEXT, Lark, Layout, escaped, first, place_of, regex
from baton_engine.api.parsing.tools.source import OpenCall, Reading, TextSource, Wait
from baton_engine.api.parsing.tools.tagged_arguments import definitions, members, not_enforced, root_of
from baton_engine.api.parsing.tools.toolbox import INPUT, Tool

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
VALUE_END = f"\n{PARAMETER_END}"
NAME_LIMIT = 256
ANCHORED = re.compile(r"\^((?:[^$\\]|\\.)*)\$")


def read(source: TextSource) -> Reading:
    while mark := (yield from source.find(START, FUNCTION)):
        start = source.mark()
        if not (yield from _read_calls(source, begun=mark == FUNCTION)):
            source.back(start)
            source.words(mark)


def _read_calls(source: TextSource, begun: bool) -> Wait[bool]:
    if not begun:
        yield from source.space()
    if not (yield from _read_call(source, begun)):
        return False
    more = True
    while more:
        yield from source.space()
        more = yield from _read_call(source, begun=False)
    yield from source.literal(END)
    return True


def _read_call(source: TextSource, begun: bool) -> Wait[bool]:
    mark = source.mark()
    if begun or (yield from source.literal(FUNCTION)):
        name = yield from source.until(">", limit=NAME_LIMIT)
        tool = source.tool(name[0].strip()) if name is not None else None
        if tool is not None:
            yield from _read_parameters(source, source.call(tool), tool)
            return True
    source.back(mark)
    return False


def _read_parameters(source: TextSource, call: OpenCall, tool: Tool) -> Wait[None]:
    root, written = root_of(tool), 0
    properties = root.get("properties", {})
    while True:
        yield from source.space()
        if not (yield from source.literal(PARAMETER)):
            break
        name = yield from source.until(">", limit=NAME_LIMIT)
        if name is None:
            break
        yield from source.literal("\n")
        if tool.custom:
            writer = _Line(call.write if name[0] == INPUT else lambda text: None)
            yield from source.pass_on(PARAMETER_END, writer.write)
            continue
        call.write(f"{', ' if written else '{'}{tagged_arguments.dumped(name[0])}: ")
        written += 1
        types = tagged_arguments.types_of(properties.get(name[0]), root)
        if types == {"string"}:
            call.write('"')
            if not (yield from source.pass_on(PARAMETER_END, _Line(partial(_quote, call)).write)):
                return
            call.write('"')
        else:
            text = yield from source.until(PARAMETER_END)
            if text is None:
                call.write(source.rest(VALUE_END, PARAMETER_END))
                return
            call.write(tagged_arguments.typed(text[0].removesuffix("\n"), types))
    yield from source.space()
    closed = yield from source.literal(FUNCTION_END)
    if not tool.custom and (closed or not source.ended):
        call.write("}" if written else "{}")


class _Line:
    """Passes on text without a trailing line break."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._pass = write
        self._line_break = ""

    def write(self, text: str) -> None:
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._pass(text.removesuffix("\n"))


def _quote(call: OpenCall, text: str) -> None:
    call.write(json.dumps(text, ensure_ascii=False)[1:-1])


# --- The grammar ---


def _call(lark: Lark, tool: Tool, checked: bool) -> str:
    def parameter(name: str, schema: Mapping[str, Any]) -> str:
        head, end = lark.literal(f"{PARAMETER}{name}>\n"), lark.literal("\n")
        if tool.grammar is not None:
            return f"{head} {lark.input(tool, tool.grammar)} {lark.literal(VALUE_END)} {end}"
        return f"{head} {_value(lark, tool, schema, schema, f'/properties/{name}')} {end}"

    head = lark.literal(f"{FUNCTION}{tool.name}>\n")
    return f"{head} {members(lark, tool, checked, parameter)} {lark.literal(FUNCTION_END)}"


def _value(lark: Lark, tool: Tool, schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> str:
    """Return the grammar of a value and its end tag. `path` leads to the schema in that of `tool`."""
    end = lark.literal(VALUE_END)
    if isinstance(target := tagged_arguments.resolved(schema.get("$ref"), root), Mapping):
        return _value(lark, tool, target, root, schema["$ref"].partition("#")[2])
    if "enum" in schema or "const" in schema:
        alternatives = schema.get("enum", [schema.get("const")])
        texts = [
            alternative if isinstance(alternative, str) else tagged_arguments.dumped(alternative)
            for alternative in alternatives
        ]
        return f"({' | '.join(map(lark.literal, texts))}) {end}"
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = enumerate(schema[key])
            alternatives = [
                _value(lark, tool, part, root, f"{path}/{key}/{number}") for number, part in parts
            ]
            return f"({' | '.join(alternatives)})"
    types = tagged_arguments.types_of(schema, root)
    if types and "string" not in types:
        return f"{lark.json(definitions(root) | dict(schema), tool, path)} {end}"
    return lark.lazy(f"{lark.terminal(_text(tool, schema, path))} {json.dumps(VALUE_END)}")


def _text(tool: Tool, schema: Mapping[str, Any], path: str) -> str:
    """Return the terminal of a string, with those bounds that a terminal can express."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    last = f"~/{ANY_TEXT}{escaped(VALUE_END)}{ANY_TEXT}/"
    bodies = [f"/{ANY_TEXT}/ & {last}"]
    if least or most != "":
        bodies.insert(0, rf"/(?s:.{{{least},{most}}})/ & {last}")
    pattern = ANCHORED.fullmatch(str(schema.get("pattern", "")))
    if pattern is not None:
        bodies.insert(0, f"{regex(pattern[1])} & {bodies[0]}")
    elif tool.strict and "pattern" in schema:
        raise not_enforced(tool, f"at {path}/pattern: it does not begin with '^' and end with '$'")
    if tool.strict and "format" in schema:
        raise not_enforced(tool, f"at {path}/format: a string has a format")
    return first(bodies[:1] if tool.strict else bodies, f"{place_of(tool)}at {path}: ")


QWEN3_CODER = ToolFamily(
    name="qwen3_coder",
    keeps=frozenset({START, END}),
    read=read,
    layout=Layout(
        triggers=(START, FUNCTION), opening=f"{START}\n", call=_call, closing=f"\n{END}", between="\n"
    ),
)
