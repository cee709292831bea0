"""
Tool calls as `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3 and SmolLM3.

The template of Qwen3 puts the object on its own line and separates blocks by line breaks.
"""

from __future__ import annotations

import json

from baton_engine.api.parsing.tools.arguments import read_named
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Lark, Layout
from baton_engine.api.parsing.tools.source import Reading, TextSource
from baton_engine.api.parsing.tools.toolbox import Tool

START, END = "<tool_call>", "</tool_call>"


def read(source: TextSource) -> Reading:
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
    read=read,
    layout=Layout(
        triggers=(START,), opening=f"{START}\n", call=object_call, closing=f"\n{END}", between="\n"
    ),
)
