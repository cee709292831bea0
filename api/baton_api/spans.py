"""
Where spans go: in each process that makes any a queue of bytes, and a thread that sends them by OTLP (HTTP).

Whoever serves requests only appends to the queue; the thread wakes every second, or when much waits. A
collector that is away costs no request anything: what finds no room is dropped, and what could not be sent is
not tried again. Spans hold names and figures, never text.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException

from baton_api import __version__, otlp
from baton_api.errors import SetupError

log = logging.getLogger(__name__)

PATH = "/v1/traces"
"""Where collectors take them."""

PATIENCE_S = 2.0
"""For one batch of spans; a collector that is away must not hold up the end of the process."""

WAIT_S = 1.0
"""Seconds that a span waits at most for others."""

BATCH = 512 * 1024
"""Bytes that are sent at once, and the size at which they do not wait any longer."""

ROOM = 16 * BATCH
"""Bytes that may wait."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go, and what is said with them."""

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)
    """What is said of whoever makes them, besides the service's name."""
    certificate: str = ""
    """A file of certificates by which to know it; empty for those of the system."""

    @classmethod
    def of(cls, endpoint: str, environment: Mapping[str, str] = os.environ) -> Collector:
        """The one at `endpoint`, with what OpenTelemetry's own variables say. Raises SetupError."""
        if urllib.parse.urlsplit(endpoint).scheme not in ("http", "https"):
            raise SetupError(f"--tracing-endpoint {endpoint!r} is no URL: http://127.0.0.1:4318 is one.")
        endpoint = endpoint.rstrip("/")
        prefix = "OTEL_EXPORTER_OTLP_"

        def said(name: str) -> str:
            return environment.get(f"{prefix}TRACES_{name}") or environment.get(prefix + name, "")

        return cls(
            endpoint if endpoint.endswith(PATH) else endpoint + PATH,
            _pairs(said("HEADERS")),
            _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", "")),
            said("CERTIFICATE"),
        )


def _pairs(text: str) -> dict[str, str]:
    """`a=1,b=2`, with what is no letter as in a URL."""
    parts = (part.partition("=") for part in text.split(",") if "=" in part)
    return {
        urllib.parse.unquote(name.strip()): urllib.parse.unquote(value.strip()) for name, _, value in parts
    }


class Spans:
    """The queue and its thread."""

    def __init__(self, service: str, collector: Collector) -> None:
        self._collector = collector
        resource = {"service.name": service, "service.version": __version__, **collector.resource}
        self._head = otlp.heading(resource, service, __version__)
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
        """Send these, some time soon."""
        with self._lock:
            if self._size + len(spans) > ROOM:
                self._dropped += 1
                return
            self._waiting.append(spans)
            self._size += len(spans)
        if self._size > BATCH and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send what was not sent yet, and wait for that; blocks for a few seconds at most."""
        self._ended = True
        self._wake.set()
        self._thread.join(2 * PATIENCE_S)

    def _context(self) -> ssl.SSLContext | None:
        if not self._collector.endpoint.startswith("https:"):
            return None
        try:
            return ssl.create_default_context(cafile=self._collector.certificate or None)
        except OSError as error:
            raise SetupError(
                f"OTEL_EXPORTER_OTLP_CERTIFICATE {self._collector.certificate!r} cannot be read: {error}."
            ) from error

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(WAIT_S)
            self._wake.clear()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        while batch := self._batch():
            self._send(otlp.request(self._head, batch))

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
        told = {"content-type": "application/x-protobuf", **self._collector.headers}
        asked = urllib.request.Request(self._collector.endpoint, body, told)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_S, context=self._tls):
                pass
        except (OSError, HTTPException) as error:  # of the network, of TLS, and any status that is no success
            if not self._away:
                log.warning("Spans do not reach %s: %s", self._collector.endpoint, error)
            self._away = True
            return
        if self._away:
            log.info("Spans reach %s again.", self._collector.endpoint)
        self._away = False
        dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("Spans of %d requests were dropped: the collector does not keep up.", dropped)


def open_spans(service: str, endpoint: str) -> Spans:
    """For those of `service`. Raises SetupError for what is no address."""
    return Spans(service, Collector.of(endpoint))
