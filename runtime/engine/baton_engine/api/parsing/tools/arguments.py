"""
Arguments of a call that is one JSON object, `{"name": "f", "arguments": {...}}`, passed on as they arrive.

The model's text is not repaired: brackets and quotes only tell where the arguments end. The text of a custom
tool is the one member of an object, or raw text between two marks if it must follow a grammar, because no
grammar can see through JSON escapes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from baton_engine.api.parsing.tools.source import OpenCall, TextSource, Wait
from baton_engine.api.parsing.tools.toolbox import INPUT, Tool

RAW_START, RAW_END = f"<{INPUT}>\n", f"\n</{INPUT}>"
"""Around the text of a custom tool that has to follow a grammar."""

STRING = re.compile(r'["\\]')
SCALAR = re.compile(r"[^\s,;\]}<\[]*")
HEX = re.compile("[0-9a-fA-F]*")
SCALAR_LIMIT = 4096
"""Characters of a value that is no string and has no brackets."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
SURROGATES = re.compile("[\ud800-\udfff]")


def read_arguments(source: TextSource, call: OpenCall, tool: Tool, end: str = "") -> Wait[None]:
    """The value ahead. It is over with its brackets, at an `end` outside of strings, or with the text."""
    yield from source.space()
    if tool.custom and (yield from source.literal(RAW_START)):
        yield from source.pass_on(RAW_END, call.write)
        return
    if tool.custom and (yield from _input_ahead(source)):
        yield from _decoded(source, call)
        yield from rest_of_object(source)
        return
    ahead = yield from source.peek()
    if ahead == '"':  # custom input alone, or JSON within JSON
        yield from source.take()
        yield from _decoded(source, call)
    elif ahead in ("{", "["):
        yield from _verbatim(source, call, end)
    else:
        text = yield from source.match(SCALAR, SCALAR_LIMIT)
        call.write(text if text not in ("", "null") else "" if tool.custom else "{}")


def read_string(source: TextSource, limit: int) -> Wait[str | None]:
    """The JSON string ahead, decoded; None if there is none, or one of more than `limit` characters."""
    if not (yield from source.literal('"')):
        return None
    text, stop = '"', ""
    while len(text) <= limit and stop != '"':
        piece, stop = yield from source.chunk(STRING)
        text += piece + stop
        if stop == "\\":
            text += yield from source.take()
        elif not stop and source.ended:
            return None
    try:
        return str(json.loads(text, strict=False)) if len(text) <= limit else None
    except ValueError:
        return None


def skip_value(source: TextSource, limit: int | None = None) -> Wait[bool]:
    """Go past the JSON value ahead; False if it has more than `limit` characters."""
    yield from source.space()
    start = source.mark()
    if (yield from source.peek()) in ('"', "{", "["):
        yield from _verbatim(source, OpenCall([], None), "", limit)
    else:
        yield from source.match(SCALAR, SCALAR_LIMIT)
    return limit is None or source.mark() - start <= limit


def rest_of_object(source: TextSource) -> Wait[None]:
    """Up to the bracket that closes an object, behind a value of it."""
    yield from source.space()
    while (yield from source.literal(",")):
        yield from skip_value(source)
        yield from source.space()
        if (yield from source.literal(":")):
            yield from skip_value(source)
            yield from source.space()
    yield from source.literal("}")


def _input_ahead(source: TextSource) -> Wait[bool]:
    """Whether an object with a custom tool's input begins, which is then taken up to the text."""
    mark = source.mark()
    for part in ("{", f'"{INPUT}"', ":", '"'):
        if not (yield from source.literal(part)):
            source.back(mark)
            return False
        if part != '"':
            yield from source.space()
    return True


def _verbatim(source: TextSource, call: OpenCall, end: str, limit: int | None = None) -> Wait[None]:
    start, depth = source.mark(), 0
    while limit is None or source.mark() - start <= limit:
        if limit is None:
            source.trim()
        text, stop = yield from source.chunk(_brackets(end[:1]))
        call.write(text)
        if stop and stop == end[:1]:
            place = source.mark()
            source.back(place - 1)
            if (yield from source.literal(end)):
                source.back(place - 1)
                return
            yield from source.take()
        call.write(stop)
        if stop == '"':
            yield from _quoted(source, call, limit)
        elif stop in ("{", "["):
            depth += 1
        elif stop in ("}", "]"):
            depth -= 1
        elif not stop and source.ended:
            return
        if depth <= 0 and stop in ('"', "}", "]"):
            return


def _quoted(source: TextSource, call: OpenCall, limit: int | None) -> Wait[None]:
    """The rest of a string, as it is written."""
    start = source.mark()
    while limit is None or source.mark() - start <= limit:
        if limit is None:
            source.trim()
        text, stop = yield from source.chunk(STRING)
        if stop == "\\":
            stop += yield from source.take()
        call.write(text + stop)
        if stop == '"' or (not stop and source.ended):
            return


def _decoded(source: TextSource, call: OpenCall) -> Wait[None]:
    """The rest of a string, as what it stands for."""
    while True:
        source.trim()
        text, stop = yield from source.chunk(STRING)
        call.write(text)
        if stop == "\\":
            call.write((yield from _escape(source)))
        elif stop or source.ended:
            return


def _escape(source: TextSource) -> Wait[str]:
    letter = yield from source.take()
    if letter != "u":
        return ESCAPES.get(letter, letter)
    digits = yield from source.match(HEX, 4)
    if len(digits) < 4:
        return f"\\u{digits}"
    code, mark = int(digits, 16), source.mark()
    if 0xD800 <= code < 0xDC00 and (yield from source.literal("\\u")):
        low = int((yield from source.match(HEX, 4)) or "0", 16)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
        source.back(mark)
    return SURROGATES.sub("\ufffd", chr(code))  # nobody could encode half a character


@cache
def _brackets(other: str) -> re.Pattern[str]:
    return re.compile(rf'["{{}}\[\]{re.escape(other)}]')


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


def read_named(source: TextSource, end: str = "") -> Wait[bool]:
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


def _read_head(source: TextSource) -> Wait[_Head | None]:
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
