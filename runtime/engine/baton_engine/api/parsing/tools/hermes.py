"""
`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one block a call: Hermes, Qwen 2.5 and 3, SmolLM3.

The template of Qwen3 puts the object on a line of its own and separates blocks by line breaks.
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
        while (yield from read_named(source, END)):  # some models put several into one block
            yield from source.behind_call("}")
        yield from source.literal(END)


def object_call(lark: Lark, tool: Tool, checked: bool, arguments: str = "arguments") -> str:
    """A call as an object of JSON."""
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
