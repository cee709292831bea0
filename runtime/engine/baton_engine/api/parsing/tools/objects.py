"""
Tool calls whose arguments are a JSON object.

- Hermes, Qwen2.5, Qwen3 and SmolLM3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`. The template
  of Qwen3 puts the object on its own line and separates blocks by line breaks.
- Llama 3.1, 3.2 and 3.3: `{"name": "f", "parameters": {...}}` as the whole answer, or after `<|python_tag|>`
  anywhere. Semicolons separate several calls, which only some templates support. JSON that does not name a
  tool is text.
- Mistral: one array after `[TOOL_CALLS]` up to tokenizer version 7, `[{"name": "f", "arguments": {...}}]`.
  From version 11 on, the mark precedes each call, `f[ARGS]{...}`. Some models write `[CALL_ID]` and an id
  before `[ARGS]`.
"""

from __future__ import annotations

import json
import re
from functools import partial

from baton_engine.api.parsing.tools.arguments import NAME_LIMIT, read_arguments, read_named
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Lark, Layout
from baton_engine.api.parsing.tools.source import Reading, TextSource, Wait
from baton_engine.api.parsing.tools.toolbox import Tool

START, END = "<tool_call>", "</tool_call>"


def read_hermes(source: TextSource) -> Reading:
    while (yield from source.find(START)):
        mark = source.mark()
        yield from source.space()
        if not (yield from read_named(source, END)):
            source.back(mark)
            source.words(START)
            continue
        yield from source.behind_call("}")
        while (yield from read_named(source, END)):  # some models put several calls into one block
            yield from source.behind_call("}")
        yield from source.literal(END)


def object_call(lark: Lark, tool: Tool, checked: bool, arguments: str = "arguments") -> str:
    """Return the grammar of a call as a JSON object."""
    head = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
    return f"{lark.literal(head)} {lark.arguments(tool, checked)} {lark.literal('}')}"


HERMES = ToolFamily(
    name="hermes",
    keeps=frozenset({START, END}),
    read=read_hermes,
    layout=Layout(
        triggers=(START,), opening=f"{START}\n", call=object_call, closing=f"\n{END}", between="\n"
    ),
)


TAG = "<|python_tag|>"


def read_llama3(source: TextSource) -> Reading:
    yield from _read_calls(source)
    while (yield from source.find(TAG)):
        if not (yield from _read_calls(source)):
            source.words(TAG)


def _read_calls(source: TextSource) -> Wait[bool]:
    mark = source.mark()
    yield from source.space()
    if not (yield from read_named(source)):
        source.back(mark)
        return False
    more = True
    while more:
        yield from source.behind_call("};,")
        more = yield from read_named(source)
    return True


LLAMA3 = ToolFamily(
    name="llama3",
    keeps=frozenset({TAG}),
    read=read_llama3,
    layout=Layout(
        triggers=(TAG,),
        bare="{",
        opening="",
        call=partial(object_call, arguments="parameters"),
        separator="; ",
        closing="",
    ),
)


TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile("[A-Za-z0-9_-]*")
ID = re.compile("[A-Za-z0-9]*")


def read_mistral(source: TextSource) -> Reading:
    while (yield from source.find(TOOL_CALLS)):
        mark = source.mark()
        yield from source.space()
        if not ((yield from _read_array(source)) or (yield from _read_named_arguments(source))):
            source.back(mark)
            source.words(TOOL_CALLS)


def _read_array(source: TextSource) -> Wait[bool]:
    mark = source.mark()
    if (yield from source.literal("[")):
        yield from source.space()
        if (yield from read_named(source)):
            more = True
            while more:
                yield from source.behind_call("},")
                more = yield from read_named(source)
            yield from source.literal("]")
            return True
    source.back(mark)
    return False


def _read_named_arguments(source: TextSource) -> Wait[bool]:
    tool = source.tool((yield from source.match(NAME, NAME_LIMIT)))
    if tool is None:
        return False
    if (yield from source.literal(CALL_ID)):
        yield from source.match(ID, NAME_LIMIT)
    marked = yield from source.literal(ARGS)
    yield from source.space()
    if not marked and (yield from source.peek()) != "{":
        return False
    yield from read_arguments(source, source.call(tool), tool)
    return True


def _named_arguments(lark: Lark, tool: Tool, checked: bool) -> str:
    return f"{lark.literal(f'{tool.name}{ARGS}')} {lark.arguments(tool, checked)}"


MISTRAL_KEEPS = frozenset({TOOL_CALLS, CALL_ID, ARGS})

MISTRAL = ToolFamily(
    name="mistral",
    keeps=MISTRAL_KEEPS,
    read=read_mistral,
    layout=Layout(
        triggers=(TOOL_CALLS,), opening=f"{TOOL_CALLS} [", call=object_call, separator=", ", closing="]"
    ),
)

MISTRAL_V11 = ToolFamily(
    name="mistral_v11",
    keeps=MISTRAL_KEEPS,
    read=read_mistral,
    layout=Layout(triggers=(TOOL_CALLS,), opening=TOOL_CALLS, call=_named_arguments, closing="", between=""),
)
