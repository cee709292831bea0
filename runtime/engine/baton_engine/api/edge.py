"""
The outermost layer of the API: request ids, API keys, error responses and the access log.

An error before the first byte of a response becomes a status with OpenAI's error object, or with Anthropic's
on the paths of its API. An error within a stream becomes an error event, and the connection is closed without
an end of the stream. Clients would accept a regular end as a complete answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton_api import anthropic, headers, keys, limits, logs, trace_context
from baton_api.errors import (
    BatonError,
    HeadTooLarge,
    InternalError,
    MethodNotAllowed,
    NotReady,
    RouteNotFound,
)
from baton_api.keys import OPEN_PATHS, Keys
from baton_engine.api.bodies import ClientGone
from baton_engine.api.exchange import Exchange, open_exchange
from baton_engine.api.streaming import FAILURE, error_event

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Logged status of a request whose client disconnected before the response."""

ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache"})
"""Paths of requests that change what all clients get."""

POLLED = ("/health", "/ready", "/load", "/metrics")
"""Paths that probes and routers poll. They are logged at debug level."""


class Edge:
    """Wraps the routes of a worker."""

    def __init__(self, app: ASGIApp, keys: Keys | None = None, admin_keys: Keys | None = None) -> None:
        """`admin_keys`: required for ADMIN_PATHS in place of `keys`, if there are any."""
        self._app = app
        self._keys = keys or Keys()
        self._admin_keys = admin_keys if admin_keys is not None and admin_keys.required else self._keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets and lifespan events are not supported
        scope["app"] = self  # routes raise HTTPException instead of answering in plain text
        scope["headers"] = keys.with_authorization(scope["headers"])
        given = dict(scope["headers"])
        exchange = open_exchange(scope, request_id(given.get(headers.REQUEST_ID.encode(), b"")))
        exchange.tenant = given.get(headers.TENANT.encode(), b"").decode("latin-1") or exchange.request_id
        logs.about(request_id=exchange.request_id)
        if trace_context.TRACEPARENT in given:
            exchange.trace = trace_context.read(scope["headers"])
        named = [(name, exchange.request_id.encode()) for name in anthropic.id_headers(exchange.path)]

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *named]
            await send(message)

        try:
            _check_head(scope)
            valid = self._admin_keys if exchange.path in ADMIN_PATHS else self._keys
            exchange.client = valid.check(exchange.path, given.get(b"authorization", b""))
            await self._app(scope, receive, reply)
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE
        except asyncio.CancelledError:  # the server stops without waiting for this request
            await _answer(NotReady("This worker is shutting down. Try again."), exchange, scope, reply)
            raise
        except Exception as error:
            await _answer(_translated(error, exchange), exchange, scope, reply)
        finally:
            exchange.ended = time.monotonic()
            logger.log(logging.DEBUG if exchange.path in POLLED else logging.INFO, "%s", exchange.line())


def _check_head(scope: Scope) -> None:
    line = len(scope["raw_path"]) + len(scope["query_string"])
    size = line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > limits.HEAD.most:
        raise HeadTooLarge(limits.HEAD.most)


def request_id(given: bytes) -> str:
    """Return the client's request id if it is short and printable ASCII, otherwise a new one."""
    if 0 < len(given) <= limits.REQUEST_ID.most and all(0x21 <= byte <= 0x7E for byte in given):
        return given.decode()
    return f"req_{uuid.uuid4().hex}"


def _translated(error: Exception, exchange: Exchange) -> BatonError:
    match error:
        case BatonError():
            return error
        case HTTPException(status_code=404):
            return RouteNotFound(exchange.method, exchange.path)
        case HTTPException(status_code=405, headers=given):
            return MethodNotAllowed(exchange.method, exchange.path, (given or {}).get("Allow", ""))
        case _:
            logger.error("request %s failed", exchange.request_id, exc_info=error)
            return InternalError()


async def _answer(error: BatonError, exchange: Exchange, scope: Scope, reply: Send) -> None:
    if exchange.status:
        failure = scope.get(FAILURE, error_event)
        # `more_body` stays true, which makes the server close the connection.
        await reply({"type": "http.response.body", "body": failure(error), "more_body": True})
        return
    fields = [(b"content-type", b"application/json")]
    fields += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    body = msgspec.json.encode(anthropic.error_body(error, exchange.path, exchange.request_id))
    fields.append((b"content-length", str(len(body)).encode()))
    await reply({"type": "http.response.start", "status": error.status, "headers": fields})
    await reply({"type": "http.response.body", "body": body})


class Probes:
    """Restricts an app to the paths that do not require a key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._nothing = Edge(_not_here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] in OPEN_PATHS)
        await (self._app if open_to_all else self._nothing)(scope, receive, send)


async def _not_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise RouteNotFound(scope["method"], scope["path"])
