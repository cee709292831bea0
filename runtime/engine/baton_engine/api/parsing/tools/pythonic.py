"""
Tool calls as a Python list, `[f(a=1, b="x"), g()]`: Llama 3.2 and 4 with templates that request Python.

Llama 4 may enclose the list in two special tokens. The reader emits arguments value by value, as JSON. Values
are literals; no code is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton_engine.api.parsing.tools import tagged_arguments
from baton_engine.api.parsing.tools.arguments import RAW_END, RAW_START
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Lark, Layout
from baton_engine.api.parsing.tools.source import OpenCall, Reading, TextSource, Wait
from baton_engine.api.parsing.tools.tagged_arguments import members
from baton_engine.api.parsing.tools.toolbox import Tool

START, END = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[A-Za-z0-9_.-]*")
NAME_LIMIT = 256
OPENING_QUOTE = re.compile(r"^\s*['\"]")
VALUE = re.compile(r"""["'(\[{)\]},\\]""")


def read(source: TextSource) -> Reading:
    yield from _read_list(source)
    while (yield from source.find(START)):
        if not (yield from _read_list(source)):
            source.words(START)


def _read_list(source: TextSource) -> Wait[bool]:
    mark = source.mark()
    yield from source.space()
    if (yield from source.literal("[")):
        more = yield from _read_call(source)
        if more:
            while more:
                yield from source.behind_call(",")
                more = yield from _read_call(source)
            yield from source.literal("]")
            yield from source.space()
            yield from source.literal(END)
            return True
    source.back(mark)
    return False


def _read_call(source: TextSource) -> Wait[bool]:
    mark = source.mark()
    yield from source.space()
    tool = source.tool((yield from source.match(NAME, NAME_LIMIT)))
    yield from source.space()
    if tool is None or not (yield from source.literal("(")):
        source.back(mark)
        return False
    call = source.call(tool)
    if tool.custom and (yield from source.literal(RAW_START)):
        yield from source.pass_on(RAW_END, call.write)
        yield from source.literal(")")
        return True
    yield from _read_keywords(source, call, tool)
    return True


def _read_keywords(source: TextSource, call: OpenCall, tool: Tool) -> Wait[None]:
    written = 0
    while True:
        yield from source.space()
        if (yield from source.literal(")")) or (yield from source.peek()) in ("]", "}", ""):
            break
        name = yield from source.match(NAME, NAME_LIMIT)
        yield from source.space()
        if not (yield from source.literal("=")) and source.cut and not (yield from source.peek()):
            break
        text = yield from _read_value(source)
        cut = not (yield from source.peek())
        if tool.custom:
            value = json.loads(tagged_arguments.literal(text))
            call.write(value if isinstance(value, str) and not cut else OPENING_QUOTE.sub("", text))
        else:
            value = text.lstrip() if cut else tagged_arguments.literal(text)
            call.write(f"{', ' if written else '{'}{tagged_arguments.dumped(name)}: {value}")
        written += 1
        yield from source.literal(",")
    if not tool.custom and not source.ended:
        call.write("}" if written else "{}")


def _read_value(source: TextSource) -> Wait[str]:
    """Return the text before the next comma or closing bracket, which stays in the source."""
    text, closers = "", ""
    while True:
        piece, stop = yield from source.chunk(VALUE)
        text += piece
        if stop in ("'", '"'):
            text += stop + (yield from _read_quoted(source, stop))
            continue
        if not closers and (stop in (",", ")", "]", "}") or (not stop and source.ended)):
            if stop:
                source.back(source.mark() - 1)
            return text
        if not stop and source.ended:
            return text
        text += stop
        if stop in ("(", "[", "{"):
            closers += stop
        elif stop in (")", "]", "}"):
            closers = closers[:-1]


def _read_quoted(source: TextSource, quote: str) -> Wait[str]:
    text, stops = "", QUOTES[quote]
    while True:
        piece, stop = yield from source.chunk(stops)
        text += piece + stop
        if stop == "\\":
            text += yield from source.take()
        elif stop or source.ended:
            return text


QUOTES = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}


def _call(lark: Lark, tool: Tool, checked: bool) -> str:
    head = lark.literal(f"{tool.name}(")
    if tool.grammar is not None and tool.grammar.syntax == "lark":
        return f"{head} {lark.arguments(tool, checked)} {lark.literal(')')}"

    def keyword(name: str, schema: Mapping[str, Any]) -> str:
        return f"{lark.literal(f'{name}=')} {lark.json(schema, tool, f'/properties/{name}')}"

    return f"{head} {members(lark, tool, checked, keyword, ', ')} {lark.literal(')')}"


PYTHONIC = ToolFamily(
    name="pythonic",
    keeps=frozenset({START, END}),
    read=read,
    layout=Layout(triggers=(START,), bare="[", opening="[", call=_call, separator=", ", closing="]"),
)

LLAMA4_PYTHONIC = ToolFamily(
    name="llama4_pythonic",
    keeps=frozenset({START, END}),
    read=read,
    layout=Layout(
        triggers=(START,),
        bare="[",
        opening=f"{START}[",
        call=_call,
        separator=", ",
        closing=f"]{END}",
    ),
)
