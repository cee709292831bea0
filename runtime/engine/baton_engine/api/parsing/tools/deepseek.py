"""
Tool calls between DeepSeek's special tokens: V3 and R1 with their distilled models, and V3.1.

In the older format a call has a type and a Markdown block with the arguments; in the newer one only name and
arguments.
"""

from __future__ import annotations

from baton_engine.api.parsing.tools.arguments import read_arguments
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.grammar import Lark, Layout
from baton_engine.api.parsing.tools.source import Reading, TextSource, Wait
from baton_engine.api.parsing.tools.toolbox import Tool
from baton_engine.model.tokenizer import SPACE_MARK


def _token(words: str) -> str:
    """Return a special token in DeepSeek's notation: fullwidth bars and visible spaces."""
    return f"<\uff5c{words.replace(' ', SPACE_MARK)}\uff5c>"


CALLS, CALLS_END = _token("tool calls begin"), _token("tool calls end")
CALL, CALL_END, SEPARATOR = _token("tool call begin"), _token("tool call end"), _token("tool sep")
FENCE, FENCE_END = "```json\n", "\n```"
KIND = "function"
HEAD_LIMIT = 256
"""Maximum characters of a call's type or name."""


def read(source: TextSource) -> Reading:
    while mark := (yield from source.find(CALLS, CALL)):
        start = source.mark()
        yield from source.space()
        if not (yield from _read_call(source, begun=mark == CALL)):
            source.back(start)
            source.words(mark)
            continue
        more = True
        while more:
            yield from source.behind_call()
            more = yield from _read_call(source)
        yield from source.literal(CALLS_END)


def _read_call(source: TextSource, begun: bool = False) -> Wait[bool]:
    mark = source.mark()
    if begun or (yield from source.literal(CALL)):
        head = yield from source.until(SEPARATOR, limit=HEAD_LIMIT)
        if head is not None:
            tool = source.tool(head[0].strip())
            yield from source.space()
            if head[0].strip() == KIND and (yield from source.peek()) != "{":
                name = yield from source.until("\n", limit=HEAD_LIMIT)
                tool = source.tool(name[0].strip()) if name is not None else None
                yield from source.literal(FENCE)
            if tool is not None:
                yield from read_arguments(source, source.call(tool), tool, CALL_END)
                yield from source.space()
                yield from source.literal(FENCE_END.strip())
                yield from source.space()
                yield from source.literal(CALL_END)
                return True
    source.back(mark)
    return False


def _fenced(lark: Lark, tool: Tool, checked: bool) -> str:
    head = lark.literal(f"{CALL}{KIND}{SEPARATOR}{tool.name}\n{FENCE}")
    return f"{head} {lark.arguments(tool, checked)} {lark.literal(FENCE_END + CALL_END)}"


def _plain(lark: Lark, tool: Tool, checked: bool) -> str:
    head = lark.literal(f"{CALL}{tool.name}{SEPARATOR}")
    return f"{head} {lark.arguments(tool, checked)} {lark.literal(CALL_END)}"


KEEPS = frozenset({CALLS, CALLS_END, CALL, CALL_END, SEPARATOR})

DEEPSEEK_V3 = ToolFamily(
    name="deepseek_v3",
    keeps=KEEPS,
    read=read,
    layout=Layout(triggers=(CALLS, CALL), opening=CALLS, call=_fenced, separator="\n", closing=CALLS_END),
)

DEEPSEEK_V31 = ToolFamily(
    name="deepseek_v31",
    keeps=KEEPS,
    read=read,
    layout=Layout(triggers=(CALLS, CALL), opening=CALLS, call=_plain, separator="", closing=CALLS_END),
)
