"""
The input file of a batch: lines, slices of them for runners, and the validation of all.

The report names all invalid lines up to a limit. Valid lines that can have no answer get their error here,
so that runners send only lines that are worth a try.

The search for repeated `custom_id`s takes eight bytes per name: the first pass keeps a hash of each name.
Only if two hashes are equal, a second pass compares the names themselves.

An invalid line (JSON, custom_id, method, url) fails the whole file and is reported with its number and a
code. An invalid request body fails only its own line, when that line is executed.

A slice holds the next lines. It begins at a cursor: a byte position and the number of lines before it. Blank
lines count as lines but are not requests.
"""

from __future__ import annotations

import codecs
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import xxhash

from baton_api.errors import (
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    InvalidRequest,
)
from baton_batches.values import VALIDATION_LIMIT, LineError, LineResult
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


BUCKETS = 256
"""Hashes are sorted in so many parts, because a sorted part is a list, which takes several times its size."""


class CustomIds:
    """A set of name hashes, which finds the names that may occur twice."""

    def __init__(self) -> None:
        self._buckets = [array("Q") for _ in range(BUCKETS)]

    def add(self, name: str) -> None:
        number = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))
        self._buckets[number % BUCKETS].append(number)

    def suspects(self) -> set[int]:
        """Hashes that more than one of the names have."""
        return {
            one for bucket in self._buckets for one, other in pairwise(sorted(bucket)) if one == other
        }  # fmt: skip


def repeated(names: Iterable[tuple[int, str]], suspects: set[int]) -> Iterator[tuple[int, str]]:
    """Of numbered names, those that came before. Only names with a suspect hash are remembered."""
    seen: set[str] = set()
    for number, name in names:
        if xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) in suspects:
            if name in seen:
                yield number, name
            seen.add(name)


RESULTS_PER_WRITE = 200


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one input file."""

    bytes: int
    lines: int
    line: int


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """`errors` if the file is invalid; else the number of its requests, and the model of the first one."""

    total: int
    model: str | None
    errors: tuple[LineError, ...] = ()


def validate(
    read: Callable[[], Iterator[bytes]],
    size: int,
    endpoint: str,
    bounds: FileLimits,
    keep: Callable[[list[LineResult]], object],
) -> ValidationResult:
    """`read` begins at the file's first byte each time; `keep` takes results that lines have already."""
    if size > bounds.bytes:
        message = f"The file has {size} bytes; a batch may have {bounds.bytes}."
        return ValidationResult(0, None, (LineError("file_too_large", message),))
    validation = _Validation(endpoint, bounds, keep)
    try:
        validation.run(split_lines(read(), bounds.line, bounds.lines))
    except TooManyBlankLines as fault:
        message = f"The file has more than {bounds.lines} blank lines. Later lines were not read."
        validation.errors.append(LineError("too_many_lines", message, None, fault.args[0]))
    except LineTooLong as fault:
        message = f"The line is over the limit of {bounds.line} bytes. Later lines were not read."
        validation.errors.append(LineError("line_too_long", message, None, fault.args[0]))
    if not validation.total and not validation.errors:
        validation.errors.append(LineError("empty_file", "The file has no requests."))
    if suspects := validation.names.suspects():
        validation.errors += _duplicates(split_lines(read(), bounds.line), suspects, endpoint)
    errors = sorted(validation.errors, key=lambda error: error.line or 0)
    return ValidationResult(validation.total, validation.model, tuple(errors[:VALIDATION_LIMIT]))


class _Validation:
    """The state of one validation."""

    def __init__(self, endpoint: str, bounds: FileLimits, keep: Callable[[list[LineResult]], object]) -> None:
        self.total = 0
        self.model: str | None = None
        self.errors: list[LineError] = []
        self.names = CustomIds()
        self._endpoint = endpoint
        self._bounds = bounds
        self._keep = keep

    def run(self, numbered: Iterable[tuple[int, bytes]]) -> None:
        refused: list[LineResult] = []
        for number, text in numbered:
            self.total += 1
            if self.total > self._bounds.lines:
                message = f"The file has more than {self._bounds.lines} requests. Later lines were not read."
                self.errors.append(LineError("too_many_lines", message, None, number))
                return
            line = parse_line(number, text, self._endpoint)
            if isinstance(line, LineError):
                self.errors.append(line)
                if len(self.errors) >= VALIDATION_LIMIT:
                    return
                continue
            self.names.add(line.custom_id)
            if self.model is None and isinstance(line.body.model, str):
                self.model = line.body.model
            if (result := rejected_result(number, line)) is not None:
                refused.append(result)
                if len(refused) >= RESULTS_PER_WRITE:
                    self._keep(refused)
                    refused = []
        if refused:
            self._keep(refused)


def _duplicates(
    numbered: Iterable[tuple[int, bytes]], suspects: set[int], endpoint: str
) -> Iterator[LineError]:
    def names() -> Iterator[tuple[int, str]]:
        for number, text in numbered:
            line = parse_line(number, text, endpoint)
            if not isinstance(line, LineError):
                yield number, line.custom_id

    count = 0
    try:
        for number, name in repeated(names(), suspects):
            message = f"The custom_id {name[:100]!r} came before."
            yield LineError("duplicate_custom_id", message, "custom_id", number)
            count += 1
            if count >= VALIDATION_LIMIT:
                return
    except LineTooLong:
        return  # the first pass has reported it
