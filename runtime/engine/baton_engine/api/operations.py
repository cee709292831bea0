"""
Operational routes of a worker: health, load, metrics, identity, and ending requests.

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

import asyncio
import contextlib
import secrets
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton_api import openapi
from baton_api.errors import MISSING_REQUIRED_PARAMETER, InvalidRequest, NotReady
from baton_api.sampling import SamplingParams
from baton_engine import requests
from baton_engine.api import bodies
from baton_engine.api import server_info as about
from baton_engine.api.exchange import exchange_of
from baton_engine.api.fields import Fields
from baton_engine.api.generate import named_remote
from baton_engine.api.running import Running, read_names
from baton_engine.api.served import Served
from baton_engine.metrics.exposition import CONTENT_TYPE
from baton_engine.requests import RemotePrefill


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

    async def latest_requests(request: Request) -> Response:
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
        served.engine.clear_cache()
        return as_json({"flushed_blocks": cached})

    return [
        Route("/health", health),
        Route("/ping", health),
        Route("/ready", ready),
        Route("/health_generate", health_generate),
        Route("/load", load),
        Route("/metrics", metrics),
        Route("/debug/requests", latest_requests),
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


def abort_request(fields: Fields, running: Running) -> dict[str, int]:
    """
    How many requests ended: none is no error, since they may have ended on their own.

    For the event loop, to which the running requests belong.
    """
    if fields.boolean("abort_all"):
        return {"aborted": running.abort_all()}
    names = read_names(fields)
    if not names:
        raise InvalidRequest(
            "Say which request to abort: 'rid' or 'request_id', or 'abort_all'.",
            param="rid",
            code=MISSING_REQUIRED_PARAMETER,
        )
    return {"aborted": sum(running.abort(name) for name in dict.fromkeys(names))}


PATIENCE_S = 20.0
"""Seconds that the token may take."""


async def generate_one(served: Served, remote: RemotePrefill | None = None) -> None:
    """
    Generate one token. With `remote`, its worker must have computed the prompt.

    Raises NotReady if that took too long or went another way, and what the engine raises.
    """
    relayed = False
    request = _request(served, remote)
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            contextlib.aclosing(served.engine.generate(request)) as outputs,
        ):
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                relayed = relayed or output.relay is not None
    except TimeoutError as error:
        raise NotReady(f"No token was generated within {PATIENCE_S:.0f} s.") from error
    if remote is not None and not relayed:
        raise NotReady("The prefill worker did not bring the prompt; it was computed by the decode worker.")


def _request(served: Served, remote: RemotePrefill | None) -> requests.Request:
    """Long enough that a decode worker does not rather compute it itself; too new to be in a cache."""
    size = served.engine.snapshot().block_size
    wanted = served.settings.local_prefill_tokens + size + 1 if remote is not None else size + 1
    length = max(1, min(wanted, served.max_model_len - 1))
    prompt = tuple(secrets.randbelow(served.vocabulary.size) for _ in range(length))
    name = f"health-{uuid.uuid4().hex}"
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    return requests.Request(name, prompt, greedy, salt=name, remote=remote)
