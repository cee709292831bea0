"""The requests of health checks: what all engines' checks have in common."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from baton_api.workers import Load, Role
from baton_http.http_client import Reply, ReplyTooLarge, fetch
from baton_http.upstream import Headers, Upstream

REPLY_LIMIT = 4 * 1024**2
"""Maximum bytes of a reply; metrics of a worker are the longest."""

OK = 200
UNAUTHORIZED = 401

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


_models = msgspec.json.Decoder(ModelList)


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
