"""
A minimal HTTP/1.1 client that records the arrival time of every part of a response.

It parses HTTP only. Data are acknowledged immediately (TCP_QUICKACK) where possible; otherwise a server that
waits for acknowledgements would seem slower than it is.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from baton_api.errors import SetupError

QUICK = getattr(socket, "TCP_QUICKACK", None)

BROKEN = "connection lost"


@dataclass(slots=True)
class Answer:
    """The response to one request."""

    sent: float
    """Time of sending, by `time.perf_counter` like all times here."""
    status: int = 0
    """0 without a response."""
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    failure: str = ""
    """Why the response is incomplete. Empty if it is complete."""

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.arrivals)

    @property
    def first(self) -> float:
        """Arrival time of the first byte of the body."""
        return self.arrivals[0][0] if self.arrivals else self.ended


class Connection(asyncio.Protocol):
    """A connection for one request at a time, created by `create_connection`."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set at the first byte of the body, or at the end of the response."""
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._keeps = False

    @property
    def answer(self) -> Answer:
        """The response of the last request, as received so far."""
        assert self._answer is not None, "no request was sent"
        return self._answer

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._keeps and self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, timeout_s: float | None = None) -> Answer:
        """Send a request. Returns at the end of the response, a lost connection or the timeout."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._keeps = False
        self.begun.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._acknowledge()
        answer = self._answer = Answer(time.perf_counter())
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            answer.failure = f"no end after {timeout_s:g} s"
        finally:
            answer.ended = time.perf_counter()
            self.begun.set()
            if not self._keeps:
                self._transport.close()
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --- Callbacks of asyncio and httptools ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has other classes
        self._socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._answer is None:
            return
        self._acknowledge()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"invalid HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._answer is not None
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._answer is not None and self._parser is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._answer is not None
        self._answer.arrivals.append((time.perf_counter(), body))
        self.begun.set()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._keeps = self._parser.should_keep_alive()
        self._end("")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(BROKEN)

    def _end(self, failure: str) -> None:
        if self._done is not None and not self._done.done() and self._answer is not None:
            self._answer.failure = failure
            self._done.set_result(None)

    def _acknowledge(self) -> None:
        if QUICK is None or self._socket is None or self._transport is None or self._transport.is_closing():
            return
        self._socket.setsockopt(socket.IPPROTO_TCP, QUICK, 1)


CONNECT_S = 10.0


class Endpoint:
    """A server, and a pool of connections to it. Belongs to one event loop."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float | None = None) -> None:
        """Parse the address. Raises SetupError if it is invalid."""
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SetupError(f"Invalid address {url!r}. Expected a URL such as http://127.0.0.1:8000.")
        self.url = parts.geturl()
        self._host, self._path = parts.hostname, parts.path
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"host: {parts.netloc}\r\n{key}"
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Any:
        """Return the JSON of a response. Raises SetupError."""
        answer = await self._ask(f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n".encode())
        if answer.failure or answer.status != 200:
            raise SetupError(f"{self.url}{path}: {answer.failure or explained(answer)}")
        try:
            return json.loads(answer.body)
        except ValueError as error:
            raise SetupError(f"{self.url}{path} returned invalid JSON.") from error

    async def post(self, path: str, body: Mapping[str, Any], headers: str = "") -> Answer:
        """Send a POST request and return the response. `headers` are lines that end in CRLF."""
        return await self._ask(self.request(path, body, headers))

    def request(self, path: str, body: Mapping[str, Any], headers: str = "") -> bytes:
        """Return the bytes of a POST request."""
        text = json.dumps(body).encode()
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{headers}content-type: application/json\r\n"
        return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text

    async def connect(self) -> Connection:
        """Return an idle connection or a new one. Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, request: bytes) -> Answer:
        try:
            connection = await self.connect()
        except OSError as error:  # a timeout is one
            reason = error.strerror or str(error) or "no connection in time"
            return Answer(sent=0.0, failure=f"no connection: {reason}")
        answer = await connection.ask(request, self._timeout_s)
        if connection.usable:
            self._idle.append(connection)
        return answer


def explained(answer: Answer) -> str:
    """Return the error message of a response."""
    try:
        message = json.loads(answer.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.body[:200].decode(errors="replace")
    return f"status {answer.status}: {message}"
