"""A call as one JSON object: `{"name": "f", "arguments": {...}}`, as most families write it."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.server.tools.arguments import read_arguments, read_string, rest_of_object, skip_value
from baton_engine.server.tools.source import Source, Wait
from baton_engine.server.tools.toolbox import Tool

ARGUMENTS = ("arguments", "parameters")
BESIDE = ("type", "id")
"""Members that may stand beside name and arguments."""
MEMBERS = 4
NAME_LIMIT = 256
EARLY_LIMIT = 1024
"""Characters of arguments that stand before the name. Few: they are read again for each mark among them."""


@dataclass(frozen=True, slots=True)
class _Head:
    tool: Tool
    arguments: int | None
    """Where they stand, if there are any."""
    closed: bool
    """Whether the object is over, and its arguments lie behind."""


def read_named(source: Source, end: str = "") -> Wait[bool]:
    """
    The call ahead, if there is one: an object that names a tool of the request.

    If not, nothing is taken. `end` is what the family writes behind a call.
    """
    mark = source.mark()
    head = yield from _read_head(source)
    if head is None:
        source.back(mark)
        return False
    call, behind = source.call(head.tool), source.mark()
    if head.arguments is None:
        call.write("" if head.tool.custom else "{}")
    else:
        source.back(head.arguments)
        yield from read_arguments(source, call, head.tool, end)
    if head.closed:
        source.back(behind)
    else:
        yield from rest_of_object(source)
    return True


def _read_head(source: Source) -> Wait[_Head | None]:
    """Up to the arguments, or to the end of an object that has them before the name, or not at all."""
    tool, early = None, None
    if not (yield from source.literal("{")):
        return None
    for _ in range(MEMBERS):
        yield from source.space()
        key = yield from read_string(source, NAME_LIMIT)
        yield from source.space()
        if key is None or not (yield from source.literal(":")):
            return None
        yield from source.space()
        if key == "name":
            tool = source.tool((yield from read_string(source, NAME_LIMIT)) or "")
            if tool is None:
                return None
        elif key in ARGUMENTS and tool is not None:
            return _Head(tool, source.mark(), closed=False)
        elif key in (*ARGUMENTS, *BESIDE):
            early = source.mark() if key in ARGUMENTS else early
            if not (yield from skip_value(source, EARLY_LIMIT)):
                return None
        else:
            return None
        yield from source.space()
        if (yield from source.literal(",")):
            continue
        over = yield from source.literal("}")
        return _Head(tool, early, closed=True) if over and tool is not None else None
    return None
