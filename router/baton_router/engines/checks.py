"""
Health checks of one worker by its engine, and finding out which engine it is.

An engine is found out by asking for what only it serves:
Baton's `/load`, vLLM's `/version`, SGLang's `/server_info`; anything else with `/v1/models` speaks OpenAI's
API.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from baton_api import headers, tickets
from baton_api.engines import EngineKind
from baton_api.workers import Load, Role
from baton_http.http_client import Reply, ReplyTooLarge, fetch
from baton_http.upstream import Headers, Upstream

log = logging.getLogger(__name__)

REPLY_LIMIT = 4 * 1024**2
"""Maximum bytes of a reply; metrics of a worker are the longest."""

OK = 200
UNAUTHORIZED = 401
SERVER_ERROR = 500

INVALID_REPLY_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ReplyTooLarge)
"""Errors of reading a reply that is not a worker's load."""


class ListedModel(msgspec.Struct):
    """An entry of `/v1/models`. vLLM and SGLang name an adapter's model as `parent`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ListedModel]


_loads = msgspec.json.Decoder(Load)
_models = msgspec.json.Decoder(ModelList)
_objects = msgspec.json.Decoder(dict[str, Any])


class EngineChecks(Protocol):
    """The health checks of one worker, by one engine. Keeps what was learned from one to the next."""

    async def load(self) -> tuple[Load, str]:
        """
        The worker's load, and why it takes no requests, as a clause (empty if it does).

        Raises UpstreamLost, and `INVALID_REPLY_ERRORS` for an invalid reply.
        """
        ...


class WorkerApi:
    """Short requests to one worker."""

    def __init__(self, upstream: Upstream, role: Role, authorizing: Headers, secret: bytes = b"") -> None:
        """`role` is the one under which it is listed. `authorizing` are headers. `secret` signs tickets."""
        self.upstream = upstream
        self.role = role
        self.secret = secret
        self._headers = authorizing

    async def get(self, target: str, more: Headers | None = None) -> Reply:
        """Raises UpstreamLost, and DecodeError if the worker requires another API key."""
        reply = await fetch(self.upstream, "GET", target, [*self._headers, *(more or ())], limit=REPLY_LIMIT)
        if reply.status == UNAUTHORIZED:
            raise msgspec.DecodeError(
                "it requires another API key: set BATON_ROUTER_WORKER_API_KEY to the workers' key"
            )
        return reply

    async def post(self, target: str, body: dict[str, Any]) -> Reply:
        given = [*self._headers, (b"content-type", b"application/json")]
        return await fetch(self.upstream, "POST", target, given, msgspec.json.encode(body), limit=REPLY_LIMIT)

    async def models(self) -> list[ListedModel]:
        """The served models and adapters. Raises UpstreamLost and INVALID_REPLY_ERRORS."""
        reply = await self.get("/v1/models")
        if reply.status != OK:
            raise msgspec.DecodeError(f"GET /v1/models was answered with {reply.status}")
        return _models.decode(reply.body).data

    async def ready(self, target: str) -> str:
        """Why the worker takes no requests, as a clause; empty if `target` is answered with 200."""
        reply = await self.get(target)
        return "" if reply.status == OK else f"GET {target} was answered with {reply.status}"


class BatonChecks:
    """Implements `EngineChecks` for Baton's workers."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api
        self._warned = False

    async def load(self) -> tuple[Load, str]:
        ticket = tickets.issue(self._api.secret, tickets.CHECK, "", time.time())
        reply = await self._api.get("/load", [(headers.TICKET.encode(), ticket.encode())])
        if reply.status != OK:
            raise msgspec.DecodeError(f"GET /load was answered with {reply.status}")
        load = _loads.decode(reply.body)
        trouble = self._ticket_trouble(load)
        return load, await self._api.ready("/ready") or trouble

    def _ticket_trouble(self, load: Load) -> str:
        """Why this router's tickets allow no pair. A decode worker works without pairs: it is logged once."""
        if not load.ticket_refusal or load.role is Role.BOTH:
            return ""
        trouble = (
            f"it refuses this router's tickets ({load.ticket_refusal}): set BATON_ROUTER_TICKET_SECRET of "
            "the router and BATON_TICKET_SECRET of all workers to the same secret"
        )
        if load.role is Role.PREFILL:
            return trouble
        if not self._warned:
            name = self._api.upstream.name
            log.warning("The decode worker %s computes all prompts itself: %s.", name, trouble)
        self._warned = True
        return ""


class OpenAiChecks:
    """Implements `EngineChecks` for servers that report only their models."""

    def __init__(self, api: WorkerApi) -> None:
        self._api = api

    async def load(self) -> tuple[Load, str]:
        models = await self._api.models()
        if not models:
            return Load(role=self._api.role, model="", engine=EngineKind.OPENAI), "it serves no model"
        load = Load(
            role=self._api.role,
            model=models[0].id,
            names=tuple(model.id for model in models),
            max_model_len=models[0].max_model_len or 0,
            engine=EngineKind.OPENAI,
        )
        if self._api.role is Role.PREFILL:
            return load, "its engine is not one whose workers form pairs: list it with --worker"
        return load, ""


SIGNATURES: tuple[tuple[str, EngineKind, Callable[[dict[str, Any]], bool]], ...] = (
    ("/load", EngineKind.BATON, lambda reply: "epoch" in reply),
    ("/version", EngineKind.VLLM, lambda reply: isinstance(reply.get("version"), str)),
    ("/server_info", EngineKind.SGLANG, lambda reply: "disaggregation_mode" in reply),
    ("/get_server_info", EngineKind.SGLANG, lambda reply: "disaggregation_mode" in reply),
    ("/v1/models", EngineKind.OPENAI, lambda reply: "data" in reply),
)
"""Targets in the order of the requests, and the engine that replies so. Baton serves later ones too."""


async def detect(api: WorkerApi) -> EngineKind | None:
    """
    The engine of a worker; None while it answers nothing by which it is recognized, such as while it starts.

    Raises UpstreamLost and INVALID_REPLY_ERRORS.
    """
    for target, kind, recognizes in SIGNATURES:
        reply = await api.get(target)
        # Ready before the next request, a worker that is starting would be taken for another engine.
        if reply.status >= SERVER_ERROR:
            return None
        if reply.status == OK and recognizes(_object(reply)):
            return kind
    return None


def _object(reply: Reply) -> dict[str, Any]:
    try:
        return _objects.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
