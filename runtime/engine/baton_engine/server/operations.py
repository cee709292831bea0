"""
The routes for those who run a worker: is it well, what is it, how busy is it, end this request.

    GET  /health, /ping                    the process lives
    GET  /ready                            200, or 503 with the reason why it wants no requests
    GET  /health_generate                  200 after one token came through all that requests pass
    GET  /load                             `baton_api.workers.Load`, for routers
    GET  /metrics                          Prometheus
    GET  /debug/requests                   the last requests with their timeline, without their text
    GET  /version, /model_info, /server_info
    GET  /openapi.json                     all of this, for programs
    POST /abort_request                    end requests by their ids
    POST /flush_cache                      empty the prefix cache, but for what requests use
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton_api import openapi
from baton_api.errors import NotReady
from baton_engine.metrics import CONTENT_TYPE
from baton_engine.server import about, bodies
from baton_engine.server.aborting import abort_request
from baton_engine.server.exchange import exchange_of
from baton_engine.server.generate import named_remote
from baton_engine.server.probing import generate_one
from baton_engine.server.served import Served


def routes(served: Served) -> list[Route]:
    """All of them, some under the names that other servers gave them too."""

    async def health(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        reason = served.not_ready()
        if reason is not None:
            raise NotReady(f"Not ready: {reason}.")
        return Response()

    async def health_generate(request: Request) -> Response:
        with served.drain.request():
            name = exchange_of(request.scope).request_id
            await generate_one(served, named_remote(request.scope, served, name))
        return Response()

    async def load(request: Request) -> Response:
        now = served.load()
        return as_json(msgspec.structs.replace(now, draining=now.draining or served.drain.draining))

    async def metrics(request: Request) -> Response:
        return Response(served.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def requests(request: Request) -> Response:
        return as_json({"data": [exchange.body() for exchange in reversed(served.history)]})

    async def version(request: Request) -> Response:
        return as_json(about.version())

    async def model_info(request: Request) -> Response:
        return as_json(about.model_info(served))

    async def server_info(request: Request) -> Response:
        return as_json(about.server_info(served))

    async def description(request: Request) -> Response:
        return as_json(openapi.document(served.names, "worker", keyed=served.keys.required))

    async def abort(request: Request) -> Response:
        fields = bodies.parse(await bodies.read(request.scope, request.receive))
        return as_json(abort_request(fields, served.running))

    async def flush(request: Request) -> Response:
        cached = served.engine.snapshot().cached_blocks
        served.engine.forget()
        return as_json({"flushed_blocks": cached})

    return [
        Route("/health", health),
        Route("/ping", health),
        Route("/ready", ready),
        Route("/health_generate", health_generate),
        Route("/load", load),
        Route("/metrics", metrics),
        Route("/debug/requests", requests),
        Route("/version", version),
        Route("/model_info", model_info),
        Route("/get_model_info", model_info),
        Route("/server_info", server_info),
        Route("/get_server_info", server_info),
        Route("/openapi.json", description),
        Route("/abort_request", abort, methods=["POST"]),
        Route("/flush_cache", flush, methods=["POST"]),
    ]


def as_json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
