"""
`/v1/responses` in a cluster: the router keeps the responses, because any worker may get the next request.

A request that continues a response is forwarded with the whole conversation as its input. A header gives the
length of the earlier part, and makes the worker store nothing. The answer is forwarded unchanged. If it is to
be stored, it is stored before the client has all of it, because the client may refer to it immediately. A
request that neither stores nor continues a response is forwarded byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from baton_api import headers, response_items
from baton_api.errors import (
    BodyTooLarge,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
    StorageUnavailable,
)
from baton_api.json_text import check_values
from baton_api.response_store import Turn, resolved
from baton_http.client_connection import ClientConnection
from baton_http.replies import Receive, Scope, Send
from baton_http.sse import is_event_stream, last_response_event
from baton_router.proxy.response_stores import RouterResponseStore
from baton_router.settings import RouterSettings

PATH = "/v1/responses"
STATE = headers.STATE.encode()

RECORDED_LIMIT = 16 * 1024 * 1024
"""Maximum bytes of a response that is stored; of a longer one, nothing more is recorded."""

_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)


class ResponseRequest(msgspec.Struct):
    """The fields of a request that decide what is stored and continued. The worker validates the others."""

    input: str | list[msgspec.Raw] | None = None
    previous_response_id: Any = None
    store: Any = None

    @property
    def wants_storage(self) -> bool:
        return self.store is None or self.store is True

    @property
    def items(self) -> list[bytes]:
        if isinstance(self.input, str):
            return [msgspec.json.encode(item) for item in response_items.listed(self.input)]
        return [bytes(item) for item in self.input or ()]


class ResponseSummary(msgspec.Struct):
    """The fields of a response object that the router reads."""

    id: str
    status: str


class LastEvent(msgspec.Struct):
    response: msgspec.Raw


_request_decoder = msgspec.json.Decoder(ResponseRequest)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_summary_decoder = msgspec.json.Decoder(ResponseSummary)
_item_decoder = msgspec.json.Decoder(dict[str, Any])
_last_event_decoder = msgspec.json.Decoder(LastEvent)


def needs_store(body: bytes, *, keeps: bool) -> bool:
    """
    Whether a request continues a response.

    For a router that `keeps` responses, also whether its response will be stored, or it refers to items.
    """
    try:
        check_values(body)
        request = _request_decoder.decode(body)
    except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the worker, or the proxy before it, says what is wrong with it
    refers = response_items.REFERENCE.encode() in body
    return isinstance(request.previous_response_id, str) or (keeps and (request.wants_storage or refers))


class ResponsesProxy:
    """Wraps the proxy for requests that make a response."""

    def __init__(
        self,
        settings: RouterSettings,
        store: RouterResponseStore,
        owner_of: Callable[[Scope], bytes],
        proxy: Callable[[Scope, Receive, Send], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._store = store
        self._owner_of = owner_of
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = ResponseExchange(self._store, self._owner_of(scope), self._settings.max_body)
        given = [header for header in scope["headers"] if header[0] != STATE]
        inner = {**scope, "headers": given}

        async def receiving() -> MutableMapping[str, Any]:
            if exchange.request_read:
                return await receive()
            body = await ClientConnection(scope, receive, send).body(self._settings.max_body)
            body = await exchange.request(body)
            inner["headers"] = [*given, (STATE, b"%d" % exchange.earlier_items)]
            return {"type": "http.request", "body": body, "more_body": False}

        async def sending(message: Any) -> None:
            await exchange.answer(message)
            await send(message)

        await self._proxy(inner, receiving, sending)


class ResponseExchange:
    """One request and the part of its response that will be stored."""

    def __init__(self, store: RouterResponseStore, owner: bytes, limit: int) -> None:
        """`limit`: bytes of a body, with the conversation that it continues."""
        self.request_read = False
        """Whether `request` was called."""
        self.earlier_items = 0
        """Number of items of earlier responses before those of the request."""
        self._store = store
        self._owner = owner
        self._limit = limit
        self._previous: Turn | None = None
        self._input: list[bytes] = []
        self._recording = False
        self._stream = False
        self._recorded = bytearray()

    async def request(self, body: bytes) -> bytes:
        """
        The body that the worker gets.

        Raises PreviousResponseNotFound, BodyTooLarge, InvalidRequest, StorageUnavailable.
        """
        self.request_read = True
        check_values(body)
        try:
            request = _request_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body  # the worker, or the proxy before it, says what is wrong with it
        self._recording = request.wants_storage
        given = request.items
        references = response_items.references(given)
        stored = await self._store.items(self._owner, set(references.values())) if references else {}
        self._input = resolved(given, references, stored)
        earlier: list[bytes] = []
        if isinstance(request.previous_response_id, str):
            try:
                self._previous = await self._store.get(self._owner, request.previous_response_id)
            except ResponseNotFound as error:
                raise PreviousResponseNotFound(request.previous_response_id) from error
            if self._previous.is_longer_than(self._limit - len(body)):
                raise BodyTooLarge(self._limit)
            earlier = self._previous.conversation
            self.earlier_items = len(earlier)
        elif self._input == given:
            return body
        if sum(map(len, self._input)) - sum(map(len, given)) > self._limit - len(body):
            raise BodyTooLarge(self._limit)
        fields = _fields_decoder.decode(body)
        fields["input"] = msgspec.Raw(b"[%b]" % b",".join([*earlier, *self._input]))
        return msgspec.json.encode(fields)

    async def answer(self, message: MutableMapping[str, Any]) -> None:
        """Record a message of the response before it goes to the client."""
        if not self._recording:
            return
        if message["type"] == "http.response.start":
            self._recording = message["status"] == 200
            self._stream = is_event_stream(message["headers"])
            return
        piece = message.get("body", b"")
        if self._stream and not self._recorded:
            last = last_response_event(piece)
            if last < 0:
                return
            piece = piece[last:]
        self._recorded += piece
        if len(self._recorded) > RECORDED_LIMIT:
            self._recording = False
        elif (b"\n\n" in self._recorded) if self._stream else not message.get("more_body"):
            self._recording = False
            await self._store_turn(bytes(self._recorded))

    async def _store_turn(self, recorded: bytes) -> None:
        """Store the recorded response, with the items of its request."""
        try:
            if self._stream:
                data = _DATA.search(recorded)
                recorded = bytes(_last_event_decoder.decode(data[1] if data else b"").response)
            answered = _summary_decoder.decode(recorded)
            items = [_item_decoder.decode(item) for item in self._input]
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # the client gets it unchanged, but it cannot be continued
        if answered.status in ("completed", "incomplete"):
            turn = Turn(answered.id, self._previous, response_items.named(items), recorded)
            with suppress(StorageUnavailable):  # the store logs and counts it; the client has its answer
                await self._store.put(self._owner, turn)
