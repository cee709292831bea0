"""
The input file of a batch: split into lines, each line parsed, and slices of lines cut for runners.

An invalid line (JSON, custom_id, method, url) fails the whole file and is reported with its number and a
code. An invalid request body fails only its own line, when that line is executed.

A slice holds the next lines. It begins at a cursor: a byte position and the number of lines before it. Blank
lines count as lines but are not requests.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_api.errors import INVALID_TYPE, INVALID_VALUE, MISSING_REQUIRED_PARAMETER, InvalidRequest
from baton_batches.values import LineError, LineResult
from baton_batches.wire import InputLine

METHOD = "POST"


class LineTooLong(Exception):
    """A line has no end within what a line may have; its number is the argument."""


class TooManyBlankLines(Exception):
    """More lines are blank than may be; the number of the first one too many is the argument."""


class RequestLineBody(msgspec.Struct):
    """The fields of a line's request that are checked."""

    model: Any = None
    stream: Any = None


class RequestLine(msgspec.Struct):
    """One request. `custom_id` is its name in the output and error files."""

    custom_id: str
    method: str
    url: str
    body: RequestLineBody


_line = msgspec.json.Decoder(RequestLine)


def split_lines(
    pieces: Iterable[bytes], limit: int, blank_limit: float = math.inf
) -> Iterator[tuple[int, bytes]]:
    """
    Numbers from 1 and the lines that are not blank, without their ends; a BOM before the first is let be.

    Raises LineTooLong for a line of more than `limit` bytes, TooManyBlankLines beyond `blank_limit`.

    >>> list(split_lines([b'{"a"', b':1}\\r\\n\\n{}'], 99))
    [(1, b'{"a":1}'), (3, b'{}')]
    """
    number = blank = 0
    rest = bytearray()
    for piece in pieces:
        rest += piece
        if b"\n" not in piece:
            if len(rest) > limit + 2:
                raise LineTooLong(number + 1)
            continue
        *whole, rest = rest.split(b"\n")
        for line in whole:
            number += 1
            if bare := _stripped(line, number, limit):
                yield number, bare
            else:
                blank += 1
                if blank > blank_limit:
                    raise TooManyBlankLines(number)
    if bare := _stripped(rest, number + 1, limit):
        yield number + 1, bare


def _stripped(line: bytes | bytearray, number: int, limit: int) -> bytes:
    bare = bytes(line).removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip()
    if len(bare) > limit:
        raise LineTooLong(number)
    return bare


def parse_line(number: int, line: bytes, endpoint: str) -> RequestLine | LineError:
    """Return the line's request, or why it is not valid in a batch for this endpoint."""
    try:
        parsed = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _form_error(number, line)
    if parsed.method != METHOD:
        return LineError(
            "invalid_method", f"The method must be POST, not {parsed.method[:20]!r}.", "method", number
        )
    if parsed.url not in (endpoint, endpoint.removeprefix("/v1")):
        message = f"The url {parsed.url[:100]!r} is not the batch's endpoint, {endpoint}."
        return LineError("invalid_url", message, "url", number)
    return parsed


def _form_error(number: int, line: bytes) -> LineError:
    """Return the error of a line with an invalid form."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineError("invalid_json_line", "The line is not valid JSON.", None, number)
    if not isinstance(fields, dict):
        return LineError("invalid_line", "The line is JSON, but no object.", None, number)
    for name in ("custom_id", "method", "url"):
        value = fields.get(name)
        if value is None:
            return LineError(MISSING_REQUIRED_PARAMETER, f"The line has no {name}.", name, number)
        if not isinstance(value, str):
            return LineError(INVALID_TYPE, f"{name} must be a string.", name, number)
    if fields.get("body") is None:
        return LineError(MISSING_REQUIRED_PARAMETER, "The line has no body.", "body", number)
    return LineError(INVALID_TYPE, "body must be an object.", "body", number)


def rejected_result(number: int, line: RequestLine) -> LineResult | None:
    """Return the error of a request that no worker can serve in a batch; None if it may be sent."""
    if line.body.stream is not True:
        return None
    error = InvalidRequest("A batch's requests cannot be streamed.", param="stream", code=INVALID_VALUE)
    return LineResult(number, error.status, msgspec.json.encode(error.body()))


BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputCursor:
    """The start of a line of the file."""

    position: int = 0
    lines: int = 0
    """Before it."""


def cut_slice(data: bytes, cursor: InputCursor, end: bool, limit: int) -> tuple[list[InputLine], InputCursor]:
    """
    Up to `limit` lines of `data`, the file's bytes from `cursor` on, and where they end.

    Unless `data` is the file's end, what follows its last newline is left for the next slice; if that is
    everything, the cursor does not move.
    """
    lines: list[InputLine] = []
    position, number = 0, cursor.lines
    while len(lines) < limit and position < len(data):
        newline = data.find(b"\n", position)
        if newline < 0:
            if not end:
                break
            newline = len(data)
        number += 1
        text = data[position:newline].strip()
        if number == 1:
            text = text.removeprefix(BOM)
        if text:
            lines.append(InputLine(number, text))
        position = min(newline + 1, len(data))
    return lines, InputCursor(cursor.position + position, number)
