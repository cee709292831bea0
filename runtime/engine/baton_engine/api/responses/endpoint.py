"""The routes of `/v1/responses` on a worker."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton_api import headers, response_store
from baton_api.response_store import ResponseStore, StoreLimits, owner
from baton_engine.api.generate import Generate
from baton_engine.api.responses.prepare import prepare
from baton_engine.api.responses.store import Memory, OwnMemory, RoutersMemory
from baton_engine.api.served import Served

_STATE = headers.STATE.encode()


def routes(served: Served) -> list[Route]:
    """All of them, around one store."""
    settings = served.settings
    store = ResponseStore(
        StoreLimits(settings.responses_kept, settings.responses_memory, settings.responses_ttl_s)
    )
    create = Create(served, store)

    def whose(request: Request) -> bytes:
        return owner(request.headers.get("authorization", "").encode("latin-1"), served.keys.required)

    async def retrieve(request: Request) -> Response:
        id = request.path_params["id"]
        return _json(response_store.retrieve(store, whose(request), id, request.query_params))

    async def delete(request: Request) -> Response:
        return _json(response_store.delete(store, whose(request), request.path_params["id"]))

    async def input_items(request: Request) -> Response:
        id = request.path_params["id"]
        return _json(response_store.input_items(store, whose(request), id, request.query_params))

    async def cancel(request: Request) -> Response:
        response_store.cancel(store, whose(request), request.path_params["id"])

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", input_items, methods=["GET"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
    ]


class Create:
    """`POST /v1/responses`."""

    def __init__(self, served: Served, store: ResponseStore) -> None:
        self._served = served
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generate = Generate(self._served, partial(prepare, memory=self._memory(scope)))
        await generate(scope, receive, send)

    def _memory(self, scope: Scope) -> Memory:
        given = dict(scope["headers"])
        earlier = given.get(_STATE, b"")
        if earlier.isdigit():
            return RoutersMemory(int(earlier))
        return OwnMemory(self._store, owner(given.get(b"authorization", b""), self._served.keys.required))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
