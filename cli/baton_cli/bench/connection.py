"""
One connection to a server, for one request after the other: bytes out, bytes in, and when they came.

Nothing is parsed but HTTP itself. What arrives is acknowledged at once (TCP_QUICKACK) where the system can:
a server that waits for that would otherwise be charged for the client's patience.
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
    """Of one request."""

    sent: float
    """By `time.perf_counter`, as all times here."""
    status: int = 0
    """0 if there was none."""
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    failure: str = ""
    """Why it is not whole."""

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.arrivals)

    @property
    def first(self) -> float:
        """When the first byte of the body came."""
        return self.arrivals[0][0] if self.arrivals else self.ended


class Connection(asyncio.Protocol):
    """Made by `create_connection`; asked by one at a time."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set with the first byte of the body of the request under way, or when there will be none."""
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._keeps = False

    @property
    def answer(self) -> Answer:
        """The last request's, as far as it has come."""
        assert self._answer is not None, "nothing was asked yet"
        return self._answer

    @property
    def usable(self) -> bool:
        """Whether another request may follow."""
        return self._keeps and self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, timeout_s: float | None = None) -> Answer:
        """Whatever came until the end, the loss of the connection, or the time is over."""
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

    # --- asyncio's and httptools' side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        self._socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._answer is None:
            return
        self._acknowledge()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")

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
    """Belongs to one event loop."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float | None = None) -> None:
        """Raises SetupError for what is no address."""
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SetupError(f"{url!r} is no address of a server; one looks like http://127.0.0.1:8080.")
        self.url = parts.geturl()
        self._host, self._path = parts.hostname, parts.path
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"host: {parts.netloc}\r\n{key}"
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Any:
        """An object of JSON. Raises SetupError."""
        answer = await self._ask(f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n".encode())
        if answer.failure or answer.status != 200:
            raise SetupError(f"{self.url}{path}: {answer.failure or explained(answer)}")
        try:
            return json.loads(answer.body)
        except ValueError as error:
            raise SetupError(f"{self.url}{path} answers with no JSON.") from error

    async def post(self, path: str, body: Mapping[str, Any], headers: str = "") -> Answer:
        """Whatever came of it; `headers` are lines that end in CRLF."""
        return await self._ask(self.request(path, body, headers))

    def request(self, path: str, body: Mapping[str, Any], headers: str = "") -> bytes:
        """The bytes of one."""
        text = json.dumps(body).encode()
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{headers}content-type: application/json\r\n"
        return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text

    async def connect(self) -> Connection:
        """An idle connection, or a new one. Raises OSError."""
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
    """What a server that refuses says."""
    try:
        said = json.loads(answer.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = answer.body[:200].decode(errors="replace")
    return f"status {answer.status}: {said}"
