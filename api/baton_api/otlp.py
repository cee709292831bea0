"""
OTLP encoding of spans: protobuf, written by hand.

A span is encoded once, when it has ended, so the queue holds only bytes. The messages are those of
`opentelemetry/proto/trace/v1/trace.proto`, and the numbers below are its field numbers.

    spans of one request = span(...) + span(...)          queued
    one HTTP request     = request(heading(...), spans)   sent
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
"""Kinds of spans."""


def place(trace: int, parent: int) -> bytes:
    """Encode the trace and the parent of spans. Parent 0: the root of the trace."""
    return _PLACE.pack(0x0A10, trace.to_bytes(16, "big")) + (_ID.pack(0x2208, parent) if parent else b"")


def span(
    place: bytes, identity: int, name: str, kind: int, start_ns: int, end_ns: int, details: bytes = b"",
    *, failed: bool = False,
) -> bytes:  # fmt: skip
    """Encode a span. `details` are encoded attributes and events."""
    body = b"%b%b%b%b%b%b" % (
        place,
        _ID.pack(0x1208, identity),
        _named(name, kind),
        _TIMES.pack(0x39, start_ns, 0x41, end_ns if end_ns > start_ns else start_ns),
        details,
        b"\x7a\x02\x18\x02" if failed else b"",
    )
    return b"\x12%b%b" % (_varint(len(body)), body)


def attribute(key: str, value: Value) -> bytes:
    """Encode an attribute with a unique value."""
    return _sized(9, _pair(key, value))


@lru_cache(4096, typed=True)
def cached_attributes(keys: tuple[str, ...], *values: Value) -> bytes:
    """Encode attributes whose values recur together, such as names of workers and models. Cached."""
    return b"".join(map(attribute, keys, values))


def attributes(pairs: Attributes) -> bytes:
    return b"".join([attribute(key, value) for key, value in pairs.items()])


def event(name: str, at_ns: int, pairs: Attributes) -> bytes:
    """Encode an event of a span."""
    details = b"".join([_sized(3, _pair(key, value)) for key, value in pairs.items()])
    return _sized(11, _FIXED.pack(0x09, at_ns) + _sized(2, name.encode()) + details)


def heading(resource: Attributes, scope: str, version: str) -> tuple[bytes, bytes]:
    """Encode the resource and the scope of spans."""
    encoded = b"".join([_sized(1, _pair(key, value)) for key, value in resource.items()])
    return _sized(1, encoded), _sized(1, _sized(1, scope.encode()) + _sized(2, version.encode()))


def request(head: tuple[bytes, bytes], spans: bytes) -> bytes:
    """Encode an ExportTraceServiceRequest."""
    resource, scope = head
    return _sized(1, resource + _sized(2, scope + spans))


@lru_cache(256)
def _named(name: str, kind: int) -> bytes:
    return _sized(5, name.encode()) + bytes((6 << 3 | _VARINT, kind))


def _pair(key: str, value: Value) -> bytes:
    if isinstance(value, str):
        # Collectors reject a whole request if one string is invalid UTF-8.
        encoded = _sized(1, value.encode(errors="replace"))
    elif isinstance(value, bool):
        encoded = bytes((2 << 3 | _VARINT, value))
    elif isinstance(value, int):
        encoded = b"\x18" + _varint(value & 0xFFFFFFFFFFFFFFFF)
    else:
        encoded = _DOUBLE.pack(0x21, value)
    return _key(key) + _sized(2, encoded)


@lru_cache(256)
def _key(key: str) -> bytes:
    return _sized(1, key.encode())


def _sized(field: int, content: bytes) -> bytes:
    return b"%c%b%b" % (field << 3 | _SIZED, _varint(len(content)), content)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SMALL = [bytes((number,)) for number in range(0x80)]
