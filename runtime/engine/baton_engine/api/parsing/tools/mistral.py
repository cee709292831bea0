"""
Tool calls after `[TOOL_CALLS]`: Mistral.

Up to tokenizer version 7, one array follows the mark: `[{"name": "f", "arguments": {...}}]`. From version 11
on, the mark precedes each call, `f[ARGS]{...}`. Some models write `[CALL_ID]` and an id before `[ARGS]`.
"""

from __future__ import annotations

import re

from baton_engine.api.parsing.tools.arguments import NAME_LIMIT, read_arguments, read_named
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Lark, Layout
from baton_engine.api.parsing.tools.hermes import object_call
from baton_engine.api.parsing.tools.source import Reading, TextSource, Wait
from baton_engine.api.parsing.tools.toolbox import Tool

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile("[A-Za-z0-9_-]*")
ID = re.compile("[A-Za-z0-9]*")


def read(source: TextSource) -> Reading:
    while (yield from source.find(CALLS)):
        mark = source.mark()
        yield from source.space()
        if not ((yield from _read_array(source)) or (yield from _read_named_arguments(source))):
            source.back(mark)
            source.words(CALLS)


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


KEEPS = frozenset({CALLS, CALL_ID, ARGS})

MISTRAL = ToolFamily(
    name="mistral",
    keeps=KEEPS,
    read=read,
    layout=Layout(triggers=(CALLS,), opening=f"{CALLS} [", call=object_call, separator=", ", closing="]"),
)

MISTRAL_V11 = ToolFamily(
    name="mistral_v11",
    keeps=KEEPS,
    read=read,
    layout=Layout(triggers=(CALLS,), opening=CALLS, call=_named_arguments, closing="", between=""),
)
