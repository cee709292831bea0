"""JSON request bodies with limits of size, time and depth; and endpoints that do not use the engine."""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from baton_api import limits
from baton_api.errors import BodyTooLarge, InvalidRequest
from baton_api.json_text import check_values
from baton_engine.api.fields import Fields
from baton_engine.api.served import Served
from baton_engine.machine import usable_cores
from baton_http.request_cycle import expect_body

Result = TypeVar("Result")

BODY_DEADLINE_S = 60.0

LONG, VERY_LONG = 256 * 1024, 1024 * 1024
"""Bytes of a body that may take a second, or many seconds, to tokenize."""

_threads = {
    size: ThreadPoolExecutor(max(1, usable_cores() // 4), thread_name_prefix=f"bodies-of-{size}")
    for size in (VERY_LONG, LONG)
}
"""By the least size of a body."""

_decoder = msgspec.json.Decoder()


async def read(scope: Scope, receive: Receive, limit: int = limits.BODY.most) -> bytes:
    """
    Read the whole body, at most `limit` bytes.

    Raises InvalidRequest for a wrong content type or a slow client, BodyTooLarge, Overloaded, and ClientGone.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise InvalidRequest("Unsupported media type: only 'application/json' is allowed.")
    expect_body(scope, limit)
    body = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise BodyTooLarge(limit)
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise InvalidRequest(f"The body did not arrive within {BODY_DEADLINE_S:.0f} s.") from error
    return bytes(body)


async def on_thread(work: Callable[..., Result], body: bytes, *arguments: object) -> Result:
    """Return `work(body, *arguments)`, from a thread. A body never waits for others that are much longer."""
    executor = next((threads for size, threads in _threads.items() if len(body) >= size), None)
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(executor, context.run, work, body, *arguments)


def parse(body: bytes) -> Fields:
    """Parse the body, a JSON object. Raises InvalidRequest."""
    check_values(body)
    try:
        value = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = _surrogate(body) or str(error)
        raise InvalidRequest(f"We could not parse the JSON body of your request: {reason}.") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body of the request must be a JSON object.")
    _check_depth(value)
    return Fields(value)


_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+(?:(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F]))"
)
"""Half of an escaped character beyond U+FFFF, without the other half."""


def _surrogate(body: bytes) -> str:
    """Return why `body` cannot be parsed if lone surrogates are the reason, otherwise an empty text."""
    lone = _LONE_SURROGATE.search(body)
    if lone is None:
        return ""
    try:
        _decoder.decode(_LONE_SURROGATE.sub(rb"?", body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    escape = lone[0].lstrip(b"\\").decode()
    return (
        f"\\{escape} at byte {lone.end() - 6} is half of a character, a lone surrogate. Cut texts between "
        "characters and not between UTF-16 units"
    )


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(limits.DEPTH.most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The JSON body of the request is nested deeper than {limits.DEPTH.most} levels.")


class JsonEndpoint:
    """An endpoint that runs `work` on a thread and returns its result as JSON."""

    def __init__(self, served: Served, work: Callable[[Fields, Served], Any]) -> None:
        self._served = served
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read(scope, receive)
        async with until_disconnect(receive):
            encoded = await on_thread(self._answer, body)
        await send_json(encoded, send)

    def _answer(self, body: bytes) -> bytes:
        return msgspec.json.encode(self._work(parse(body), self._served))


async def send_json(encoded: bytes, send: Send, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send `encoded` as a response with status 200, with `more` headers."""
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode()), *more]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": encoded})


class ClientGone(Exception):
    """The client closed the connection."""


class until_disconnect:
    """
    Cancel the body of the `async with` if the client disconnects, and raise ClientGone.

    The body must not send the last part of the response, because servers also report the end of a response as
    a disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise ClientGone from error
