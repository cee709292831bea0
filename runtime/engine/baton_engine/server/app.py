"""
The routes of one worker.

    GET  /v1/models[/{id}]       what is served
    POST /v1/chat/completions    generate
    POST /v1/completions
    GET  /health                 the process lives
    GET  /ready                  200, or 503 with the reason why it wants no requests
    GET  /load                   `baton_api.workers.Load`, for routers
    GET  /metrics                Prometheus
    GET  /debug/requests         the last requests with their timeline, without their text
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from baton_api.errors import ModelNotFound, NotReady
from baton_engine.metrics import CONTENT_TYPE
from baton_engine.server import chat, completions
from baton_engine.server.edge import Edge
from baton_engine.server.generate import Generate
from baton_engine.server.served import Served

__all__ = ["Served", "create_app"]


def create_app(served: Served) -> ASGIApp:
    """The OpenAI API of `served`."""

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(served, name) for name in served.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in served.names:
            raise ModelNotFound(name, served.names)
        return _json(_model(served, name))

    async def health(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        reason = served.not_ready()
        if reason is not None:
            raise NotReady(f"Not ready: {reason}.")
        return Response()

    async def load(request: Request) -> Response:
        now = served.load()
        return _json(msgspec.structs.replace(now, draining=now.draining or served.drain.draining))

    async def metrics(request: Request) -> Response:
        return Response(served.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def requests(request: Request) -> Response:
        return _json({"data": [exchange.body() for exchange in reversed(served.history)]})

    router = Router(
        [
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", Generate(served, chat.prepare), methods=["POST"]),
            Route("/v1/completions", Generate(served, completions.prepare), methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
            Route("/load", load),
            Route("/metrics", metrics),
            Route("/debug/requests", requests),
        ],
        redirect_slashes=False,
    )
    return Edge(router, served.keys)


def _model(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "baton",
        "root": served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
    }


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
