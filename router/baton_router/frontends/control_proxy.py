"""
Passes requests that are not hot to the process that serves them, by its Unix socket, and the answers back.

One connection a request, read and written as streams: an upload of any size passes without being held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import httptools

from baton_api.errors import NotReady
from baton_http.http_client import request_head
from baton_http.replies import Receive, Scope, Send, request_id, send_error
from baton_router.proxy.forwarding import CONNECTION_HEADERS

READ_BYTES = 64 * 1024


class ControlProxy:
    """A bare ASGI callable."""

    def __init__(self, path: str) -> None:
        """`path` of the socket."""
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = request_id(scope["headers"])
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            away = NotReady("This part of the router is starting again; try again in a moment.")
            await send_error(send, away, name)
            return
        upload = asyncio.ensure_future(self._upload(scope, receive, writer))
        try:
            await self._answer(reader, send, bodiless=scope["method"] == "HEAD")
        finally:
            upload.cancel()
            writer.transport.abort()
            await asyncio.gather(upload, return_exceptions=True)

    async def _upload(self, scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
        chunked = not any(name == b"content-length" for name, _ in scope["headers"])
        chunked = chunked and any(name == b"transfer-encoding" for name, _ in scope["headers"])
        writer.write(_head(scope, chunked))
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            piece, more = message.get("body", b""), message.get("more_body", False)
            writer.write(_chunk(piece, more) if chunked else piece)
            await writer.drain()
        else:
            while (await receive())["type"] != "http.disconnect":
                pass
        writer.transport.abort()  # the client has left

    async def _answer(self, reader: asyncio.StreamReader, send: Send, *, bodiless: bool) -> None:
        """Read the answer and give it on. An answer that breaks off stays broken off."""
        answer = _ParsedResponse()
        while not answer.complete:
            data = await reader.read(READ_BYTES)
            if not data:
                return  # to return without the end makes the server cut
            answer.feed(data)
            answer.complete |= bodiless and answer.status > 0
            if answer.status and not answer.started:
                answer.started = True
                headers = [one for one in answer.headers if one[0] not in CONNECTION_HEADERS]
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if answer.started:
                body, answer.body = bytes(answer.body), bytearray()
                if body or answer.complete:
                    more = not answer.complete
                    await send({"type": "http.response.body", "body": body, "more_body": more})


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
    return [one for one in headers if one[0] not in CONNECTION_HEADERS and one[0] != b"expect"]
