"""
Spans over OTLP (HTTP): their protobuf encoding, a queue of bytes, and a thread that sends them.

A span is encoded once, when it has ended, so the queue holds only bytes. The messages are those of
`opentelemetry/proto/trace/v1/trace.proto`, and the numbers below are its field numbers.

    spans of one request = span(...) + span(...)          queued
    one HTTP request     = request(heading(...), spans)   sent

Request handlers only append to the queue. The thread wakes every second, or when the queue is long. An
unavailable collector delays no request: spans that exceed the queue are dropped, and failed batches are not
sent again. Spans have names and numbers, and no text of prompts or outputs.
"""

from __future__ import annotations

import logging
import os
import ssl
import struct
import threading
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException

from baton_api import __version__
from baton_api.errors import SetupError

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


log = logging.getLogger(__name__)

PATH = "/v1/traces"
"""Path of the collector for traces."""

SEND_TIMEOUT_S = 2.0
"""Timeout of one batch, so that an unavailable collector does not delay the end of the process."""

WAIT_S = 1.0
"""Maximum seconds that a span is queued."""

BATCH = 512 * 1024
"""Maximum bytes per batch. A queue of this size is sent immediately."""

QUEUE_LIMIT = 16 * BATCH
"""Maximum bytes in the queue."""


@dataclass(frozen=True, slots=True)
class Collector:
    """The collector, and the attributes of the resource."""

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the resource besides the service name."""
    certificate: str = ""
    """CA file for the collector. Empty: the CAs of the system."""

    @classmethod
    def of(cls, endpoint: str, environment: Mapping[str, str] = os.environ) -> Collector:
        """Return the collector at `endpoint`, with OpenTelemetry's environment variables. Raises
        SetupError.
        """
        if urllib.parse.urlsplit(endpoint).scheme not in ("http", "https"):
            raise SetupError(
                f"Invalid --tracing-endpoint {endpoint!r}. Expected a URL such as http://127.0.0.1:4318."
            )
        endpoint = endpoint.rstrip("/")
        prefix = "OTEL_EXPORTER_OTLP_"

        def variable(name: str) -> str:
            return environment.get(f"{prefix}TRACES_{name}") or environment.get(prefix + name, "")

        return cls(
            endpoint if endpoint.endswith(PATH) else endpoint + PATH,
            _pairs(variable("HEADERS")),
            _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", "")),
            variable("CERTIFICATE"),
        )


def _pairs(text: str) -> dict[str, str]:
    """Parse `a=1,b=2`, with percent-encoding."""
    parts = (part.partition("=") for part in text.split(",") if "=" in part)
    return {
        urllib.parse.unquote(name.strip()): urllib.parse.unquote(value.strip()) for name, _, value in parts
    }


class Spans:
    """The queue and its sender thread."""

    def __init__(self, service: str, collector: Collector) -> None:
        self._collector = collector
        resource = {"service.name": service, "service.version": __version__, **collector.resource}
        self._head = heading(resource, service, __version__)
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._away = False
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = False
        self._tls = self._context()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def take(self, spans: bytes) -> None:
        """Queue spans for sending."""
        with self._lock:
            if self._size + len(spans) > QUEUE_LIMIT:
                self._dropped += 1
                return
            self._waiting.append(spans)
            self._size += len(spans)
        if self._size > BATCH and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send the queue. Blocks for a few seconds at most."""
        self._ended = True
        self._wake.set()
        self._thread.join(2 * SEND_TIMEOUT_S)

    def _context(self) -> ssl.SSLContext | None:
        if not self._collector.endpoint.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=self._collector.certificate or None)
        except OSError as error:
            raise SetupError(
                f"Cannot read OTEL_EXPORTER_OTLP_CERTIFICATE {self._collector.certificate!r}: {error}."
            ) from error

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(WAIT_S)
            self._wake.clear()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        while batch := self._batch():
            self._send(request(self._head, batch))

    def _batch(self) -> bytes:
        with self._lock:
            pieces: list[bytes] = []
            size = 0
            while self._waiting and size < BATCH:
                pieces.append(self._waiting.popleft())
                size += len(pieces[-1])
            self._size -= size
        return b"".join(pieces)

    def _send(self, body: bytes) -> None:
        headers = {"content-type": "application/x-protobuf", **self._collector.headers}
        request = urllib.request.Request(self._collector.endpoint, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=SEND_TIMEOUT_S, context=self._tls):
                pass
        except (OSError, HTTPException) as error:  # network, TLS, and unsuccessful statuses
            if not self._away:
                log.warning("Cannot send spans to %s: %s", self._collector.endpoint, error)
            self._away = True
            return
        if self._away:
            log.info("Sending spans to %s works again.", self._collector.endpoint)
        self._away = False
        dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("Dropped the spans of %d requests, because the collector is too slow.", dropped)


def open_spans(service: str, endpoint: str) -> Spans:
    """Start the export of a service's spans. Raises SetupError if the endpoint is invalid."""
    return Spans(service, Collector.of(endpoint))
