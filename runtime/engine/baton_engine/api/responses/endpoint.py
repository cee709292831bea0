"""
The routes of `/v1/responses` on a worker, and the conversations that `previous_response_id` continues.

A standalone worker stores responses itself. Behind a router, the next request may reach another worker. The
router therefore stores responses, and sends the whole conversation with each request.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton_api import headers, limits, response_items, response_store
from baton_api.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    EMPTY_ARRAY,
    BodyTooLarge,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
)
from baton_api.response_store import ResponseStore, StoreLimits, Turn, owner, resolved
from baton_engine.api.chat import endpoint
from baton_engine.api.fields import Fields, renamed_fields
from baton_engine.api.generate import Generate
from baton_engine.api.responses import request
from baton_engine.api.responses.output import Events, MessageLogprobs, ResponseItems, ResponseShape
from baton_engine.api.responses.request import ResponseRequest
from baton_engine.api.served import Served
from baton_engine.api.work import Work, with_constraint_field

ResponseBody = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recalled:
    """The conversation of a request."""

    items: Sequence[object]
    """The whole conversation, oldest item first."""
    earlier: int
    """Number of items from earlier responses."""
    keep: Callable[[ResponseBody], None]
    """Stores the response."""


class ConversationMemory(Protocol):
    """Access of one request to stored conversations."""

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        """
        Return the conversation that ends with `given`, with kept items in place of references.

        Raises PreviousResponseNotFound, InvalidRequest for an unknown item, and BodyTooLarge for a
        conversation that no body may have.
        """
        ...


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Stores responses in this worker."""

    store: ResponseStore
    owner: bytes

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        size = 0
        if any(isinstance(item, dict) and item.get("type") == response_items.REFERENCE for item in given):
            items = [msgspec.json.encode(item) for item in given]
            references = response_items.references(items)
            stored_items = self.store.items(self.owner, set(references.values()))
            items = resolved(items, references, stored_items)
            size = sum(map(len, items))
            if size > limits.BODY.most:
                raise BodyTooLarge(limits.BODY.most)
            given = [msgspec.json.decode(item) for item in items]
        before = None
        if previous is not None:
            try:
                before = self.store.get(self.owner, previous)
            except ResponseNotFound as error:
                raise PreviousResponseNotFound(previous) from error
            if before.is_longer_than(limits.BODY.most - size):
                raise BodyTooLarge(limits.BODY.most)
        earlier = [msgspec.json.decode(item) for item in before.conversation] if before else []

        def keep(response: ResponseBody) -> None:
            body = msgspec.json.encode(response)
            self.store.put(self.owner, Turn(response["id"], before, response_items.named(given), body))

        return Recalled([*earlier, *given], len(earlier), keep)


@dataclass(frozen=True, slots=True)
class RoutersMemory:
    """The router stores responses, and has put `earlier` items before the input."""

    earlier: int

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        return Recalled(given, min(self.earlier, len(given)), forget)


def forget(response: ResponseBody) -> None:
    """Do not store the response."""


_STATE = headers.STATE.encode()

PATH = "/v1/responses"


def items_of_router(scope: Scope) -> int | None:
    """Return the number of earlier items that the router has put before the input. None: no router did."""
    given: bytes = dict(scope["headers"]).get(_STATE, b"")
    return int(given) if given.isdigit() else None


def route_for_routers(served: Served) -> Route:
    """Return the route of requests with `items_of_router`, which need no store."""
    return Route(PATH, Create(served, None), methods=["POST"])


def routes(served: Served) -> list[Route]:
    """Return the routes, with a common store."""
    settings = served.settings
    store = ResponseStore(
        StoreLimits(settings.responses_kept, settings.responses_memory, settings.responses_ttl_s)
    )
    create = Create(served, store)

    def owner_of(request: Request) -> bytes:
        return owner(request.headers.get("authorization", "").encode("latin-1"), served.keys.required)

    def found(request: Request) -> Turn:
        return store.get(owner_of(request), request.path_params["id"])

    async def retrieve(request: Request) -> Response:
        return _json(response_store.retrieved(found(request), request.query_params))

    async def delete(request: Request) -> Response:
        id = request.path_params["id"]
        store.delete(owner_of(request), id)
        return _json(response_store.deleted(id))

    async def input_items(request: Request) -> Response:
        return _json(response_items.page(found(request).whole_input, request.query_params))

    async def cancel(request: Request) -> Response:
        found(request)
        raise response_store.not_cancelable()

    return [
        Route(PATH, create, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    ]


class Create:
    """`POST /v1/responses`."""

    def __init__(self, served: Served, store: ResponseStore | None) -> None:
        """`store`: None if all requests have `items_of_router`."""
        self._served = served
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generate = Generate(self._served, partial(prepare, memory=self._memory(scope)))
        await generate(scope, receive, send)

    def _memory(self, scope: Scope) -> ConversationMemory:
        earlier = items_of_router(scope)
        if earlier is not None:
            return RoutersMemory(earlier)
        assert self._store is not None
        credentials = dict(scope["headers"]).get(b"authorization", b"")
        return OwnMemory(self._store, owner(credentials, self._served.keys.required))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def prepare(fields: Fields, served: Served, memory: ConversationMemory) -> Work:
    """Translate and prepare a request. Blocks for long conversations, so do not call it on the event loop."""
    given = _input(fields)
    recalled = memory.recall(fields.text("previous_response_id"), given)
    if not recalled.items:
        raise InvalidRequest(
            "Invalid 'input': empty array. Expected at least 1 item.", param="input", code=EMPTY_ARRAY
        )
    response_request = request.read(fields, recalled.items, recalled.earlier)
    here = partial(request.here, request=response_request)
    with renamed_fields(here):
        work = (
            _fitted(response_request, served)
            if response_request.truncate
            else _chat(response_request, served, 0)
        )
    constrained_by = work.constrained_by and here(work.constrained_by)
    sampling = served.defaults.sampling
    sampling_echo = {
        "temperature": fields.number("temperature", sampling.temperature, *limits.TEMPERATURE.range),
        "top_p": fields.number("top_p", sampling.top_p, *limits.TOP_P.range),
    }
    streams = work.parameters.streaming.wanted
    events = Events(streams)
    logprobs = (
        MessageLogprobs(served.tokenizer, response_request.options.get("top_logprobs", 0))
        if response_request.logprobs
        else None
    )
    shape = ResponseShape(
        model=served.answering(fields.text("model")),
        echo=response_request.echo | sampling_echo,
        events_of=events,
        output=ResponseItems(events, response_request.tools, logprobs),
        logprobs=logprobs,
        keep=recalled.keep if response_request.echo["store"] else forget,
    )
    return dataclasses.replace(
        work, shape=shape, failure=shape.failure, done=b"", constrained_by=constrained_by
    )


def _input(fields: Fields) -> list[Any]:
    """Read the items of the request's input."""
    if fields.get("previous_response_id") is None:
        fields.require("input")
    value = fields.get("input")
    if value is None:
        return []
    if isinstance(value, str):
        return response_items.listed(value)
    if not isinstance(value, list):
        fields.wrong_type("input", "a string or an array of items", value)
    return value


def _chat(response_request: ResponseRequest, served: Served, start: int) -> Work:
    """Prepare the chat request with the instructions and the messages from `start` on."""
    conversation = response_request.conversation
    head = conversation.messages[: conversation.sources[:1] == ["instructions"]]
    messages = [*head, *conversation.messages[max(start, len(head)) :]]
    fields = Fields(response_request.options | {"messages": messages})
    return with_constraint_field(endpoint.prepare(fields, served), fields)


def _fitted(response_request: ResponseRequest, served: Served) -> Work:
    """Prepare the chat request with the longest end of the conversation that fits and begins with a user."""
    roles = [message["role"] for message in response_request.conversation.messages]
    starts = [0, *(position for position, role in enumerate(roles) if role == "user" and position)]
    works: dict[int, Work] = {}

    def fits(start: int) -> bool:
        try:
            works[start] = _chat(response_request, served, start)
        except InvalidRequest as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED or start == starts[-1]:
                raise
            return False
        return True

    # The whole conversation usually fits; otherwise a binary search needs few attempts.
    first = 0 if fits(starts[0]) else bisect.bisect_left(starts, True, lo=1, key=fits)
    return works[starts[min(first, len(starts) - 1)]]
