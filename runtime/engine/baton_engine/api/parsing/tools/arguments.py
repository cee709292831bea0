"""
Arguments of calls in JSON, `{"name": "f", "arguments": {...}}`, passed on as they arrive.

The reader does not repair the model's text. It uses brackets and quotes only to find the end of the
arguments. The text of a custom tool is the single member of an object. If it must follow a grammar, it is raw
text between two marks, because a grammar cannot match through JSON escapes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from baton_engine.api.parsing.tools.source import OpenCall, TextSource, Wait
from baton_engine.api.parsing.tools.toolbox import INPUT, Tool

RAW_START, RAW_END = f"<{INPUT}>\n", f"\n</{INPUT}>"
"""Marks around the text of a custom tool with a grammar."""

STRING = re.compile(r'["\\]')
SCALAR = re.compile(r"[^\s,;\]}<\[]*")
HEX = re.compile("[0-9a-fA-F]*")
SCALAR_LIMIT = 4096
"""Maximum characters of a number, boolean or null."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
SURROGATES = re.compile("[\ud800-\udfff]")


def read_arguments(source: TextSource, call: OpenCall, tool: Tool, end: str = "") -> Wait[None]:
    """Pass on the next value. It ends with its brackets, at `end` outside of strings, or with the text."""
    yield from source.space()
    if tool.custom and (yield from source.literal(RAW_START)):
        yield from source.pass_on(RAW_END, call.write)
        return
    if tool.custom and (yield from _input_ahead(source)):
        yield from _decoded(source, call)
        yield from rest_of_object(source)
        return
    ahead = yield from source.peek()
    if ahead == '"':  # the input of a custom tool, or JSON in a JSON string
        yield from source.take()
        yield from _decoded(source, call)
    elif ahead in ("{", "["):
        yield from _verbatim(source, call, end)
    else:
        text = yield from source.match(SCALAR, SCALAR_LIMIT)
        if text or not source.cut:
            call.write(text if text not in ("", "null") else "" if tool.custom else "{}")


def read_string(source: TextSource, limit: int) -> Wait[str | None]:
    """Consume and decode a JSON string. Returns None for another value or more than `limit` characters."""
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
    """Skip a JSON value. Returns False if it has more than `limit` characters."""
    yield from source.space()
    start = source.mark()
    if (yield from source.peek()) in ('"', "{", "["):
        yield from _verbatim(source, OpenCall([], None), "", limit)
    else:
        yield from source.match(SCALAR, SCALAR_LIMIT)
    return limit is None or source.mark() - start <= limit


def rest_of_object(source: TextSource) -> Wait[None]:
    """Skip the remaining members of an object and its closing bracket."""
    yield from source.space()
    while (yield from source.literal(",")):
        yield from skip_value(source)
        yield from source.space()
        if (yield from source.literal(":")):
            yield from skip_value(source)
            yield from source.space()
    yield from source.literal("}")


def _input_ahead(source: TextSource) -> Wait[bool]:
    """Consume the start of an object with a custom tool's input. Returns whether it was next."""
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
            behind = source.mark()
            source.back(behind - 1)
            if (yield from source.literal(end)):
                source.back(behind - 1)
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
    """Pass on the rest of a string without decoding it."""
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
    """Decode and pass on the rest of a string."""
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
        return "" if source.cut else f"\\u{digits}"
    code, mark = int(digits, 16), source.mark()
    if 0xD800 <= code < 0xDC00 and (yield from source.literal("\\u")):
        low = int((yield from source.match(HEX, 4)) or "0", 16)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
        source.back(mark)
    return SURROGATES.sub("\ufffd", chr(code))  # a lone surrogate cannot be encoded


@cache
def _brackets(other: str) -> re.Pattern[str]:
    return re.compile(rf'["{{}}\[\]{re.escape(other)}]')


ARGUMENTS = ("arguments", "parameters")
BESIDE = ("type", "id")
"""Further members that a call may have."""
MEMBERS = 4
NAME_LIMIT = 256
EARLY_LIMIT = 1024
"""Maximum characters of arguments before the name. Low, because each mark in them causes another read."""


@dataclass(frozen=True, slots=True)
class _Head:
    tool: Tool
    arguments: int | None
    """Position of the arguments, or None if the call has no arguments."""
    closed: bool
    """Whether the whole object was read, including the arguments."""


def read_named(source: TextSource, end: str = "") -> Wait[bool]:
    """
    Read a call: an object that names a tool of the request. `end` is the family's mark after a call.

    Returns False and consumes nothing if the next value is not a call.
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
    """Read a call up to its arguments, or completely if the arguments precede the name or are missing."""
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
