"""A server's address, and as many connections to it as there are requests at a time."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from baton_api.errors import SetupError
from baton_cli.bench.connection import Answer, Connection

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
