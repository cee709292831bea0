"""
Operational routes of a worker: health, load, metrics, identity and aborts.

    GET  /health, /ping                    200 while the process lives
    GET  /ready                            200, or 503 with the reason
    GET  /health_generate                  200 after the engine has generated one token
    GET  /load                             `baton_api.workers.Load`, for routers
    GET  /metrics                          Prometheus metrics
    GET  /debug/requests                   timeline of the latest requests, without text
    GET  /version, /model_info, /server_info
    GET  /openapi.json                     OpenAPI document of all routes
    GET  /kv/snapshot                      all blocks of the prefix cache, for a router that missed KV events
    POST /abort_request                    abort requests by id
    POST /flush_cache                      clear the prefix cache, except for blocks in use
    POST /v1/load_lora_adapter             load a LoRA adapter, as in vLLM
    POST /v1/unload_lora_adapter           unload it; requests that use it continue
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from baton_api import __version__, headers, openapi, tickets
from baton_api.errors import MISSING_REQUIRED_PARAMETER, InvalidRequest, NotReady
from baton_api.kv_events import FRAME_ENTRIES, SnapshotFrame, frame
from baton_api.metrics import CONTENT_TYPE
from baton_api.sampling import SamplingParams
from baton_api.workers import Role
from baton_engine import requests
from baton_engine.api import bodies
from baton_engine.api.exchange import HISTORY_LIMIT, exchange_of
from baton_engine.api.fields import Fields
from baton_engine.api.generate import named_remote
from baton_engine.api.running import Running, read_names
from baton_engine.api.served import Served
from baton_engine.kv.events import KvSnapshot
from baton_engine.requests import RemotePrefill

Handler = Callable[[Served, Request], Awaitable[Response]]

STEP_TIMEOUT_S = 30.0
"""Timeout of `GET /kv/snapshot`, which waits for the end of an engine step."""


def routes(served: Served) -> list[Route]:
    """Return the operational routes, including aliases of other servers."""
    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/health", _health),
        ("GET", "/ping", _health),
        ("GET", "/ready", _ready),
        ("GET", "/health_generate", _health_generate),
        ("GET", "/load", _load),
        ("GET", "/metrics", _metrics),
        ("GET", "/debug/requests", _latest_requests),
        ("GET", "/version", _version),
        ("GET", "/model_info", _model_info),
        ("GET", "/get_model_info", _model_info),
        ("GET", "/server_info", _server_info),
        ("GET", "/get_server_info", _server_info),
        ("GET", "/openapi.json", _description),
        ("POST", "/abort_request", _abort),
        ("POST", "/flush_cache", _flush),
        ("GET", "/kv/snapshot", _kv_snapshot),
        ("POST", "/v1/load_lora_adapter", _load_adapter),
        ("POST", "/v1/unload_lora_adapter", _unload_adapter),
    ]
    return [Route(path, partial(handler, served), methods=[method]) for method, path, handler in handlers]


async def _health(served: Served, request: Request) -> Response:
    return Response()


async def _ready(served: Served, request: Request) -> Response:
    reason = served.not_ready()
    if reason is not None:
        raise NotReady(f"Not ready: {reason}.")
    return Response()


async def _health_generate(served: Served, request: Request) -> Response:
    with served.drain.request():
        name = exchange_of(request.scope).request_id
        await generate_one(served, named_remote(request.scope, served, name))
    return Response()


async def _load(served: Served, request: Request) -> Response:
    now = served.load()
    draining = now.draining or served.drain.draining
    secret, ticket = served.settings.ticket_secret.encode(), request.headers.get(headers.TICKET, "")
    refusal = tickets.refusal(secret, ticket, tickets.CHECK, "", time.time()) or ""
    return as_json(msgspec.structs.replace(now, draining=draining, ticket_refusal=refusal))


async def _metrics(served: Served, request: Request) -> Response:
    text = served.metrics.text(await served.others.samples())
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def _latest_requests(served: Served, request: Request) -> Response:
    latest = [exchange.body() for exchange in reversed(served.history)]  # the last to end first
    if elsewhere := await served.others.requests():  # of which only the arrival can be compared
        latest = sorted(latest + elsewhere, key=lambda body: body["received"], reverse=True)[:HISTORY_LIMIT]
    return as_json({"data": latest})


async def _version(served: Served, request: Request) -> Response:
    return as_json(version())


async def _model_info(served: Served, request: Request) -> Response:
    return as_json(model_info(served))


async def _server_info(served: Served, request: Request) -> Response:
    return as_json(server_info(served))


async def _description(served: Served, request: Request) -> Response:
    return as_json(openapi.document(served.names, "worker", keyed=served.keys.required))


async def _abort(served: Served, request: Request) -> Response:
    fields = bodies.parse(await bodies.read(request.scope, request.receive))
    names = read_aborts(fields)
    aborted = abort_named(names, served.running) + await served.others.abort(names)
    return as_json({"aborted": aborted})


async def _flush(served: Served, request: Request) -> Response:
    cached = served.computing.snapshot().cached_blocks
    served.computing.clear_cache()
    return as_json({"flushed_blocks": cached})


async def _load_adapter(served: Served, request: Request) -> Response:
    fields = bodies.parse(await bodies.read(request.scope, request.receive))
    name, path = fields.text("lora_name") or "", fields.text("lora_path") or ""
    await served.adapters.load(name, path, in_place=fields.boolean("load_inplace"))
    await served.others.adapters_changed()
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def _unload_adapter(served: Served, request: Request) -> Response:
    fields = bodies.parse(await bodies.read(request.scope, request.receive))
    name = fields.text("lora_name") or ""
    await served.adapters.unload(name)
    await served.others.adapters_changed()
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _kv_snapshot(served: Served, request: Request) -> Response:
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            snapshot = await served.computing.kv_snapshot()
    except TimeoutError as error:
        raise NotReady(f"The engine did not complete a step within {STEP_TIMEOUT_S:g} s.") from error
    load = served.load()
    return StreamingResponse(frames(snapshot, load.epoch, load.block_size), media_type="application/msgpack")


def as_json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def read_aborts(fields: Fields) -> tuple[str, ...] | None:
    """Return the names of the requests to abort. None: all. Raises InvalidRequest."""
    if fields.boolean("abort_all"):
        return None
    names = read_names(fields)
    if not names:
        raise InvalidRequest(
            "The request to abort is missing. Set 'rid', 'request_id' or 'abort_all'.",
            param="rid",
            code=MISSING_REQUIRED_PARAMETER,
        )
    return tuple(dict.fromkeys(names))


def abort_named(names: Sequence[str] | None, running: Running) -> int:
    """
    Abort requests by their names, or all, and return their number. 0 is valid: they may have finished before.

    Call it on the event loop.
    """
    return running.abort_all() if names is None else sum(running.abort(name) for name in names)


TOKEN_TIMEOUT_S = 20.0
"""Timeout of `GET /health_generate`."""


async def generate_one(served: Served, remote: RemotePrefill | None = None) -> None:
    """
    Generate one token. With `remote`, that worker must compute the prompt.

    Raises NotReady after a timeout or if another worker computed the prompt, and the errors of the engine.
    """
    relayed = False
    request = _request(served, remote)
    try:
        async with (
            asyncio.timeout(TOKEN_TIMEOUT_S),
            contextlib.aclosing(served.engine.generate(request)) as outputs,
        ):
            async for output in outputs:
                if output.error is not None:
                    raise output.error
                relayed = relayed or output.relay is not None
    except TimeoutError as error:
        raise NotReady(f"No token was generated within {TOKEN_TIMEOUT_S:.0f} s.") from error
    if remote is not None and not relayed:
        raise NotReady("The prefill worker did not provide the prompt. The decode worker computed it.")


def _request(served: Served, remote: RemotePrefill | None) -> requests.Request:
    """Create a request with a random, uncached prompt that is long enough for a remote prefill."""
    size = served.computing.snapshot().block_size
    wanted = served.settings.local_prefill_tokens + size + 1 if remote is not None else size + 1
    length = max(1, min(wanted, served.max_model_len - 1))
    prompt = tuple(secrets.randbelow(served.vocabulary.size) for _ in range(length))
    name = f"health-{uuid.uuid4().hex}"
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    return requests.Request(name, prompt, greedy, salt=name, remote=remote)


async def frames(snapshot: KvSnapshot, epoch: str, block_size: int) -> AsyncIterator[bytes]:
    def encoded(start: int) -> bytes:
        stop = start + FRAME_ENTRIES
        blocks = snapshot.part(start, stop)
        return msgspec.msgpack.encode(
            SnapshotFrame(epoch, snapshot.seq, block_size, blocks, stop >= len(snapshot))
        )

    for start in range(0, len(snapshot) or 1, FRAME_ENTRIES):
        yield frame(await asyncio.to_thread(encoded, start))


SECRETS = frozenset({"api_key", "api_key_file", "admin_api_key", "admin_api_key_file", "ticket_secret"})
"""Settings that responses omit."""

_SNAPSHOT_FIELDS = (
    "running", "queued", "fetching", "held", "queued_tokens", "block_size", "total_blocks", "free_blocks",
    "cached_blocks", "owned_blocks", "pinned_blocks", "quarantined_blocks", "generated_per_s",
    "computed_per_s",
)  # fmt: skip


def model_card(served: Served, name: str) -> dict[str, Any]:
    """Return one entry of `/v1/models`. For an adapter, `root` is its path, and `parent` the model."""
    adapter = served.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "baton",
        "root": served.name if adapter is None else adapter.path,
        "parent": None if adapter is None else served.name,
        "max_model_len": served.max_model_len,
    }


def version() -> dict[str, Any]:
    return {"version": __version__, "server": "baton"}


def model_info(served: Served) -> dict[str, Any]:
    settings, vocabulary = served.settings, served.vocabulary
    return {
        "model_path": settings.model,
        "served_model_name": served.name,
        "served_model_names": served.names,
        "tokenizer_path": settings.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "max_model_len": served.max_model_len,
        "vocab_size": vocabulary.size,
        "eos_token_ids": vocabulary.eos_ids,
        "has_chat_template": bool(settings.chat_template or served.tokenizer.chat_template),
        "reasoning_parser": settings.reasoning_parser or None,
        "tool_call_parser": settings.tool_call_parser or None,
        "disaggregation_mode": "null" if settings.role is Role.BOTH else settings.role,
    }


def server_info(served: Served) -> dict[str, Any]:
    """Return settings and current metrics, including fields that tools of other servers read."""
    settings = served.settings.model_dump(mode="json", exclude=set(SECRETS))
    snapshot = served.computing.snapshot()
    return {
        **version(),
        "status": served.not_ready() or "ready",
        "started": served.created,
        **model_info(served),
        "max_total_num_tokens": snapshot.total_blocks * snapshot.block_size,
        "settings": settings,
        "figures": {name: getattr(snapshot, name) for name in _SNAPSHOT_FIELDS}
        | {"totals": msgspec.to_builtins(snapshot.totals)},
    }
