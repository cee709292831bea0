"""
A runner's connection to the router: the internal batch API, and batch lines on the OpenAI paths.

Calls of the internal API are repeated until the router answers; it may be restarting or without its database.
A line is sent once; `retries` decides whether it is sent again.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from baton_api import headers
from baton_api.errors import NotReady, SetupError, WorkerLost
from baton_batches import retries, wire
from baton_batches.retries import AttemptOutcome
from baton_batches.values import LineResult
from baton_batches.wire import (
    InputSlice,
    LeaseRenewal,
    LeaseRequest,
    ResultReceipt,
    RunnerLease,
    RunnerProgress,
)
from baton_http.upstream import Headers, Reply, ReplyTooLarge, Upstream, UpstreamLost, fetch

CONNECT_S = 5.0
REQUEST_TIMEOUT_S = 60.0
"""Seconds for one call of the internal API; it may wait for the database."""

REPLY_LIMIT = 256 * 1024 * 1024
"""Maximum bytes of one line's reply."""

OK, NO_CONTENT, UNAUTHORIZED, NOT_FOUND, CONFLICT = 200, 204, 401, 404, 409

Read = TypeVar("Read")


class LeaseLost(Exception):
    """Another runner has the batch, or it has ended: results of this runner no longer count."""


class BatchMissing(LeaseLost):
    """The batch does not exist."""


class TokenRejected(Exception):
    """The token is invalid or has expired."""


REJECTIONS: dict[int, type[Exception]] = {
    UNAUTHORIZED: TokenRejected,
    NOT_FOUND: BatchMissing,
    CONFLICT: LeaseLost,
}


@dataclass(frozen=True, slots=True)
class LineReply:
    """The reply to one try of a line."""

    outcome: AttemptOutcome
    status: int = 0
    body: bytes = b""
    retry_s: float = 0.0
    """Value of `Retry-After`."""
    events: bool = False
    """Whether it is an event stream."""


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorCode = msgspec.field(default_factory=_ErrorCode)


_failure = msgspec.json.Decoder(_ErrorBody).decode


class RunnerGateway:
    """The gateway of one runner, for one batch."""

    def __init__(self, url: str, batch: str, token: str, rng: random.Random) -> None:
        """Raises SetupError if `url` is not a router's."""
        self._upstream = upstream_of(url)
        self._path = f"{wire.PATH}{batch}"
        self._token = token
        self._rng = rng

    def close(self) -> None:
        self._upstream.close()

    # --- The internal batch API: each raises Dismissed or Refused ---

    async def lease(self, runner: str) -> RunnerLease | None:
        """The lease; None if nothing is left to run."""
        body = await self._call("POST", "/lease", wire.encode(LeaseRequest(runner)))
        if not body:
            return None
        lease = wire.decode_lease(body)
        self._token = lease.token
        return lease

    async def renew(self, progress: RunnerProgress) -> LeaseRenewal:
        renewal = wire.decode_renewal(await self._call("POST", "/renew", wire.encode(progress)))
        self._token = renewal.token
        return renewal

    async def lines(self, cursor: str) -> InputSlice:
        return wire.decode_slice(await self._call("GET", f"/lines?after={cursor}"))

    async def record(self, results: list[LineResult]) -> ResultReceipt:
        return wire.decode_receipt(await self._call("POST", "/results", wire.encode(results)))

    async def give_back(self) -> None:
        """Free all lines of this runner, as lines that must be sent while no others are in flight."""
        await self._call("POST", "/give_back")

    async def release(self) -> None:
        await self._call("POST", "/release")

    async def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Repeat the call until the router answers. Raises LeaseLost and TokenRejected."""
        attempts = 0
        while True:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    reply = await self._fetch(method, self._path + path, wire.MSGPACK, body)
            except (WorkerLost, NotReady, TimeoutError):
                pass
            else:
                if reply.status in (OK, NO_CONTENT):
                    return reply.body
                if reply.status in REJECTIONS:
                    raise REJECTIONS[reply.status](reply.body.decode(errors="replace"))
            await asyncio.sleep(retries.backoff_s(attempts, self._rng) / 5)
            attempts += 1

    async def _fetch(
        self, method: str, path: str, content_type: str, body: bytes, *headers: tuple[str, str]
    ) -> Reply:
        authorization = ("authorization", f"Bearer {self._token}")
        every = (("content-type", content_type), authorization, *headers)
        return await fetch(self._upstream, method, path, every, body, limit=REPLY_LIMIT)

    # --- Lines ---

    async def send(self, path: str, body: bytes, request_id: str, seconds: float) -> LineReply:
        """Try a line once. Cancellation closes its connection, which stops the worker too."""
        names = (headers.REQUEST_ID, request_id), (headers.CLASS, headers.BATCH_CLASS)
        try:
            async with asyncio.timeout(seconds):
                reply = await self._fetch("POST", path, "application/json", body, *names)
        except TimeoutError:
            return LineReply(AttemptOutcome.SLOW)
        except NotReady:  # no file descriptor is left
            return LineReply(AttemptOutcome.AWAY)
        except UpstreamLost as lost:
            return LineReply(AttemptOutcome.AWAY if lost.cause == "connect" else AttemptOutcome.LOST)
        except ReplyTooLarge:
            return LineReply(AttemptOutcome.LOST)
        code = _code(reply.body) if reply.status >= retries.SERVER_ERRORS else None
        return LineReply(
            outcome=retries.outcome_of(reply.status, code),
            status=reply.status,
            body=reply.body,
            retry_s=_retry_s(reply.headers),
            events=_events(reply.headers),
        )


def upstream_of(url: str) -> Upstream:
    """Connections to a router. Raises SetupError if `url` is invalid."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise SetupError(f"Invalid router URL: {url!r}. Expected a URL such as http://127.0.0.1:8000.")
    return Upstream(parts.hostname, parts.port or 80, CONNECT_S)


def _code(body: bytes) -> str | None:
    try:
        return _failure(body).error.code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _retry_s(given: Headers) -> float:
    for name, value in given:
        if name == b"retry-after" and value.isdigit():
            return float(value)
    return 0.0


def _events(given: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in given)
