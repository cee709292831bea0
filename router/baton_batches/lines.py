"""
The lines of a batch's input file: told apart as the bytes come by, and judged one by one.

Faults of a line's frame make the whole file no batch, and are listed with their line and a code. What is
wrong with a request's body is found when it is executed, and is that line's own: it goes to the error file.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from baton_api.errors import INVALID_TYPE, INVALID_VALUE, MISSING_REQUIRED_PARAMETER, InvalidRequest
from baton_batches.values import LineError, Result

METHOD = "POST"


class TooLong(Exception):
    """A line has no end within what a line may have; its number is the argument."""


class Body(msgspec.Struct):
    """What is looked at of a line's request."""

    model: Any = None
    stream: Any = None


class Line(msgspec.Struct):
    """One request. `custom_id` is its name in the files that come of it."""

    custom_id: str
    method: str
    url: str
    body: Body


_line = msgspec.json.Decoder(Line)


def split(pieces: Iterable[bytes], limit: int) -> Iterator[tuple[int, bytes]]:
    """
    Numbers from 1 and the lines that are not blank, without their ends; a BOM before the first is let be.

    Raises TooLong for a line of more than `limit` bytes.

    >>> list(split([b'{"a"', b':1}\\r\\n\\n{}'], 99))
    [(1, b'{"a":1}'), (3, b'{}')]
    """
    number = 0
    rest = bytearray()
    for piece in pieces:
        rest += piece
        if b"\n" not in piece:
            if len(rest) > limit + 2:
                raise TooLong(number + 1)
            continue
        *whole, rest = rest.split(b"\n")
        for line in whole:
            number += 1
            if bare := _bare(line, number, limit):
                yield number, bare
    if bare := _bare(rest, number + 1, limit):
        yield number + 1, bare


def _bare(line: bytes | bytearray, number: int, limit: int) -> bytes:
    bare = bytes(line).removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip()
    if len(bare) > limit:
        raise TooLong(number)
    return bare


def read(number: int, line: bytes, endpoint: str) -> Line | LineError:
    """What the line asks for, or why it is no request of a batch for this endpoint."""
    try:
        found = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _fault(number, line)
    if found.method != METHOD:
        return LineError(
            "invalid_method", f"The method must be POST, not {found.method[:20]!r}.", "method", number
        )
    if found.url not in (endpoint, endpoint.removeprefix("/v1")):
        told = f"The url {found.url[:100]!r} is not the batch's endpoint, {endpoint}."
        return LineError("invalid_url", told, "url", number)
    return found


def _fault(number: int, line: bytes) -> LineError:
    """What is wrong with a line that does not have the form of one."""
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


def refused(number: int, line: Line) -> Result | None:
    """The answer to a request that no batch can have, whatever serves it; None if it may be tried."""
    if line.body.stream is not True:
        return None
    error = InvalidRequest("A batch's requests cannot be streamed.", param="stream", code=INVALID_VALUE)
    return Result(number, error.status, msgspec.json.encode(error.body()))
