"""
Forwards requests outside of the hot paths to the process that serves them, over its Unix socket.

Each request has a connection, read and written as streams: an upload of any size passes without being stored.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

import httptools

from baton_api.errors import NotReady
from baton_http.replies import Receive, Scope, Send, request_id, send_error
from baton_http.request_heads import CONNECTION_HEADERS
from baton_http.upstream import request_head

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024


class ControlProxy:
    """A bare ASGI callable."""

    def __init__(self, path: str, away: str = "This part of the router is starting again") -> None:
        """`path` of the socket; `away` is what clients are told if nobody listens there."""
        self._path = path
        self._away = f"{away}; try again in a moment."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, self._path)
            except OSError:
                await self._send_away(scope, send)
                return
            upload = asyncio.ensure_future(self._upload(scope, receive, connection))
            try:
                await self._answer(scope, connection, send)
            finally:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)

    async def _upload(self, scope: Scope, receive: Receive, connection: socket.socket) -> None:
        """
        Send the request until its end, or until the other side stops reading.

        That side may have answered already: an error does not wait for the body. So the answer is read
        whatever happens here. A stream of asyncio would drop it with the connection.
        """
        loop = asyncio.get_running_loop()
        chunked = not any(name == b"content-length" for name, _ in scope["headers"])
        chunked = chunked and any(name == b"transfer-encoding" for name, _ in scope["headers"])
        try:
            await loop.sock_sendall(connection, _head(scope, chunked))
            more = True
            while more and (message := await receive())["type"] != "http.disconnect":
                piece, more = message.get("body", b""), message.get("more_body", False)
                await loop.sock_sendall(connection, _chunk(piece, more) if chunked else piece)
            while not more and (await receive())["type"] != "http.disconnect":
                pass
            connection.shutdown(socket.SHUT_RDWR)  # the client has left
        except OSError as error:
            log.debug("%s was not read to its end: %s", scope["path"], error)

    async def _answer(self, scope: Scope, connection: socket.socket, send: Send) -> None:
        """Read the response and forward it. A response that breaks off is cut for the client too."""
        loop = asyncio.get_running_loop()
        answer = _ParsedResponse()
        while not answer.complete:
            try:
                data = await loop.sock_recv(connection, READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                if not answer.started:
                    await self._send_away(scope, send)
                return  # returning without an end makes the server cut the connection
            answer.feed(data)
            answer.complete |= scope["method"] == "HEAD" and answer.status > 0
            if answer.status and not answer.started:
                answer.started = True
                headers = [header for header in answer.headers if header[0] not in CONNECTION_HEADERS]
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if answer.started:
                body, answer.body = bytes(answer.body), bytearray()
                if body or answer.complete:
                    more = not answer.complete
                    await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_away(self, scope: Scope, send: Send) -> None:
        await send_error(send, NotReady(self._away), request_id(scope["headers"]))


class _ParsedResponse:
    """The response as far as httptools has parsed it."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.complete = False
        self.started = False

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def _chunk(piece: bytes, more: bool) -> bytes:
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
    return chunk if more else chunk + b"0\r\n\r\n"


def _head(scope: Scope, chunked: bool) -> bytes:
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    headers = _forwarded(scope["headers"])
    if chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    return request_head(scope["method"], target, [*headers, (b"connection", b"close")])


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [header for header in headers if header[0] not in CONNECTION_HEADERS and header[0] != b"expect"]
