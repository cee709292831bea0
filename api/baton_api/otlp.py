"""
Spans as collectors of OpenTelemetry take them: protobuf, written by hand, each span once.

A span is made from names and figures when all is known of it, so that there is nothing to keep for one that
goes on, and what is queued is bytes. The messages are those of `opentelemetry/proto/trace/v1/trace.proto`,
and the numbers below are of its fields.

    spans of one request = span(...) + span(...)          what is queued
    one request of HTTP  = request(heading(...), spans)   what is sent
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

Value = str | int | float | bool
Attributes = Mapping[str, Value]

_VARINT, _SIZED = 0, 2
_PLACE = struct.Struct(">H16s")
_ID = struct.Struct(">HQ")
_TIMES = struct.Struct("<BQBQ")
_FIXED = struct.Struct("<BQ")
_DOUBLE = struct.Struct("<Bd")

INTERNAL, SERVER = 1, 2
"""Whose side of a call a span is, or nobody's."""


def place(trace: int, parent: int) -> bytes:
    """Where spans lie, for all that lie there: within a trace, under a span; 0 for what begins the trace."""
    return _PLACE.pack(0x0A10, trace.to_bytes(16, "big")) + (_ID.pack(0x2208, parent) if parent else b"")


def span(
    place: bytes, identity: int, name: str, kind: int, start_ns: int, end_ns: int, told: bytes = b"",
    *, failed: bool = False,
) -> bytes:  # fmt: skip
    """One span; `told` is what `attribute` and `event` made."""
    body = b"%b%b%b%b%b%b" % (
        place,
        _ID.pack(0x1208, identity),
        _named(name, kind),
        _TIMES.pack(0x39, start_ns, 0x41, end_ns if end_ns > start_ns else start_ns),
        told,
        b"\x7a\x02\x18\x02" if failed else b"",
    )
    return b"\x12%b%b" % (_varint(len(body)), body)


def attribute(key: str, value: Value) -> bytes:
    """One of a span; for what is never the same twice."""
    return _sized(9, _pair(key, value))


@lru_cache(4096, typed=True)
def known(keys: tuple[str, ...], *values: Value) -> bytes:
    """Several, kept: for names of workers, models, and whatever else comes together again and again."""
    return b"".join(map(attribute, keys, values))


def attributes(told: Attributes) -> bytes:
    return b"".join([attribute(key, value) for key, value in told.items()])


def event(name: str, at_ns: int, told: Attributes) -> bytes:
    """Something that happened within a span."""
    pairs = b"".join([_sized(3, _pair(key, value)) for key, value in told.items()])
    return _sized(11, _FIXED.pack(0x09, at_ns) + _sized(2, name.encode()) + pairs)


def heading(resource: Attributes, scope: str, version: str) -> tuple[bytes, bytes]:
    """Who makes the spans: the resource, and the scope within it."""
    who = b"".join([_sized(1, _pair(key, value)) for key, value in resource.items()])
    return _sized(1, who), _sized(1, _sized(1, scope.encode()) + _sized(2, version.encode()))


def request(head: tuple[bytes, bytes], spans: bytes) -> bytes:
    """The body of an ExportTraceServiceRequest."""
    resource, scope = head
    return _sized(1, resource + _sized(2, scope + spans))


@lru_cache(256)
def _named(name: str, kind: int) -> bytes:
    return _sized(5, name.encode()) + bytes((6 << 3 | _VARINT, kind))


def _pair(key: str, value: Value) -> bytes:
    if isinstance(value, str):
        # What is no text by UTF-8 is no string of protobuf: a collector would refuse all that came with it.
        said = _sized(1, value.encode(errors="replace"))
    elif isinstance(value, bool):
        said = bytes((2 << 3 | _VARINT, value))
    elif isinstance(value, int):
        said = b"\x18" + _varint(value & 0xFFFFFFFFFFFFFFFF)
    else:
        said = _DOUBLE.pack(0x21, value)
    return _key(key) + _sized(2, said)


@lru_cache(256)
def _key(key: str) -> bytes:
    return _sized(1, key.encode())


def _sized(field: int, content: bytes) -> bytes:
    return b"%c%b%b" % (field << 3 | _SIZED, _varint(len(content)), content)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_SMALL = [bytes((number,)) for number in range(0x80)]
