"""
What the router asks of workers for those who run the service: end this request, empty your cache, show
that you work.

A request is known to the worker that has it, and the router keeps no list of them; so an abort goes to
all workers, and each ends what it knows. That a pair works is shown by one token through both of its
workers, chosen as for any request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from baton_api.errors import BatonError, WorkerLost
from baton_http.client_connection import ClientConnection, ClientDisconnected
from baton_http.http_client import read_body
from baton_http.replies import Receive, Scope, Send, request_id, send_error, send_json
from baton_http.upstream import Headers, UpstreamLost
from baton_router.proxy.forwarding import WorkerCredentials, request_head
from baton_router.scheduling.fallback_policy import FallbackPolicy, choose_pair
from baton_router.settings import RouterSettings
from baton_router.workers.worker import Worker, Workers, WorkerStatus

ABORT = "/abort_request"
PROBE = "/health_generate"
FLUSH = "/flush_cache"
ADMIN_PATHS = {ABORT: "POST", FLUSH: "POST", PROBE: "GET"}
"""Paths and their methods."""

REPLY_LIMIT = 64 * 1024
"""Bytes of an answer that are read; these are short."""

REPLY_TIMEOUT_S = 30.0
"""Seconds for one answer: a worker gives itself 20 to show that it works."""


_counts = msgspec.json.Decoder(dict[str, int])


class AdminOperations:
    """Serves what `ADMIN_PATHS` lists, as a bare ASGI callable."""

    def __init__(
        self,
        settings: RouterSettings,
        workers: Workers,
        policy: FallbackPolicy,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._policy = policy
        self._rng = rng
        self._clock = clock
        self._trust = WorkerCredentials.of(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = request_id(scope["headers"])
        client = ClientConnection(scope, receive, send)
        try:
            body = await client.body(self._settings.max_body, self._settings.body_s)
            with client:
                if scope["path"] == PROBE:
                    status, answer = await self._probe(scope["headers"], name)
                else:
                    status, answer = await self._tell_all(scope["path"], scope["headers"], body, name)
            await send_json(send, status, answer, name)
        except ClientDisconnected:
            return
        except BatonError as error:
            await send_error(send, error, name, close=not client.read)

    async def _tell_all(self, path: str, given: Headers, body: bytes, name: bytes) -> tuple[int, bytes]:
        """The sums of what workers count in their answers; or what the first one that refuses says."""
        now = self._clock()
        workers_up = [one for one in self._workers.listed if one.state(now) is not WorkerStatus.DOWN]
        heads = [self._head(b"POST", path, given, len(body), name, one) for one in workers_up]
        answers = await asyncio.gather(
            *(_ask(one, head, body) for one, head in zip(workers_up, heads, strict=True)),
            return_exceptions=True,
        )
        sums: Counter[str] = Counter()
        for worker, answer in zip(workers_up, answers, strict=True):
            if isinstance(answer, UpstreamLost):
                continue  # what it had is gone with it
            if isinstance(answer, BaseException):
                raise answer
            status, text = answer
            if status != 200:
                return status, text
            sums.update(_parse_counts(worker, text))
        return 200, msgspec.json.encode(sums)

    async def _probe(self, given: Headers, name: bytes) -> tuple[int, bytes]:
        """One token, by way of a pair."""
        pair = choose_pair(self._policy, self._workers, None, (), self._clock(), self._rng)
        assert pair is not None  # nobody was tried before
        control = pair.prefill.control if pair.prefill else ""
        return await _ask(pair.decode, self._head(b"GET", PROBE, given, 0, name, pair.decode, control))

    def _head(
        self,
        method: bytes,
        path: str,
        given: Headers,
        length: int,
        name: bytes,
        worker: Worker,
        control: str = "",
    ) -> bytes:
        return request_head(
            path.encode(), given, length, name, worker.name, control, self._trust, time.time(), method=method
        )


def _parse_counts(worker: Worker, answer: bytes) -> dict[str, int]:
    try:
        return _counts.decode(answer)
    except msgspec.DecodeError as error:
        raise WorkerLost(worker.name) from error


async def _ask(worker: Worker, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of a worker's answer. Raises WorkerLost."""
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            exchange = await worker.upstream.request(head, body)
            return exchange.status, await read_body(exchange, REPLY_LIMIT)
    except TimeoutError as error:
        raise WorkerLost(worker.name) from error
