"""
The router's own responses: JSON, the request id, and errors in the format of the path's API.

Workers' responses do not pass here; they are forwarded unchanged.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from baton_api import anthropic, headers
from baton_api.errors import BatonError
from baton_http.upstream import Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

REQUEST_ID = headers.REQUEST_ID.encode()

_VISIBLE = re.compile(rb"[!-~]{1,128}")
_encoder = msgspec.json.Encoder()


async def send_error(send: Send, error: BatonError, request_id: bytes, path: str = "") -> None:
    """Send `error` as the whole response, in the shape of the API of `path`."""
    fields, body = error_response(error, request_id, path)
    await _send(send, error.status, fields, body)


def error_response(error: BatonError, request_id: bytes, path: str = "") -> tuple[list[Header], bytes]:
    """The headers and the body of an error, in the shape of the API of `path`."""
    more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    more += [(name, request_id) for name in anthropic.id_headers(path) if name != REQUEST_ID]
    body = _encoder.encode(anthropic.error_body(error, path, request_id.decode()))
    return [*_json_fields(body, request_id), *more], body


async def send_json(
    send: Send, status: int, body: bytes, request_id: bytes, more: Iterable[Header] = ()
) -> None:
    """Send `body` as the whole response, with `more` headers."""
    await _send(send, status, [*_json_fields(body, request_id), *more], body)


def _json_fields(body: bytes, request_id: bytes) -> list[Header]:
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REQUEST_ID, request_id),
    ]


async def _send(send: Send, status: int, fields: list[Header], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def with_length(given: Headers, length: int) -> Headers:
    """The headers of a response whose body was replaced by JSON."""
    fields = [header for header in given if header[0] not in (b"content-length", b"content-type")]
    return [*fields, (b"content-type", b"application/json"), (b"content-length", b"%d" % length)]


def request_id(given: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's request id if it is valid, otherwise a new one."""
    for name, value in given:
        if name == REQUEST_ID and _VISIBLE.fullmatch(value):
            return value
    return b"%032x" % random.getrandbits(128)  # a name and no secret: no call of the system
