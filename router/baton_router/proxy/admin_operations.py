"""
Admin operations, sent to workers: abort a request, flush the caches, probe that a pair works.

The router keeps no list of requests, so an abort goes to all workers. The probe generates one token through a
pair of workers, chosen at random.
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
from baton_http.replies import Receive, Scope, Send, request_id, send_error, send_json
from baton_http.upstream import Headers, UpstreamLost, read_body
from baton_router.engines.heads import WorkerCredentials, WorkerHead
from baton_router.settings import RouterSettings
from baton_router.workers.worker import Worker, WorkerStatus
from baton_router.workers.worker_list import Workers

ABORT = "/abort_request"
PROBE = "/health_generate"
FLUSH = "/flush_cache"
ADMIN_PATHS = {ABORT: "POST", FLUSH: "POST", PROBE: "GET"}
"""Paths and their methods."""

REPLY_LIMIT = 64 * 1024
"""Maximum bytes of a reply."""

REPLY_TIMEOUT_S = 30.0
"""Seconds for one reply; a worker takes up to 20 for the probe."""


_counts = msgspec.json.Decoder(dict[str, int])


class AdminOperations:
    """Serves `ADMIN_PATHS` as an ASGI callable."""

    def __init__(
        self,
        settings: RouterSettings,
        workers: Workers,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._rng = rng
        self._clock = clock
        self._trust = WorkerCredentials.of(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = request_id(scope["headers"])
        client = ClientConnection(scope, receive, send)
        try:
            body = await client.body(self._settings.max_body)
            with client:
                if scope["path"] == PROBE:
                    status, answer = await self._probe(scope["headers"], name)
                else:
                    status, answer = await self._tell_all(scope["path"], scope["headers"], body, name)
            await send_json(send, status, answer, name)
        except ClientDisconnected:
            return
        except BatonError as error:
            await send_error(send, error, name)

    async def _tell_all(self, path: str, given: Headers, body: bytes, name: bytes) -> tuple[int, bytes]:
        """The sum of the workers' counts, or the first rejection."""
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
                continue  # the data of a lost worker are gone with it
            if isinstance(answer, BaseException):
                raise answer
            status, text = answer
            if status != 200:
                return status, text
            sums.update(_parse_counts(worker, text))
        return 200, msgspec.json.encode(sums)

    async def _probe(self, given: Headers, name: bytes) -> tuple[int, bytes]:
        """Generate one token through a pair, chosen at random. Raises NotReady."""
        now = self._clock()
        decode = self._rng.choice(self._workers.serving(None, (), now))
        prefills = self._workers.prefills(decode, now)
        control = self._rng.choice(prefills).control if prefills else ""
        return await _ask(decode, self._head(b"GET", PROBE, given, 0, name, decode, control))

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
        head = WorkerHead(
            path.encode(), given, name, self._trust, time.time(), control=control, method=method
        )
        return head.for_worker(worker.name, length)


def _parse_counts(worker: Worker, answer: bytes) -> dict[str, int]:
    try:
        return _counts.decode(answer)
    except msgspec.DecodeError as error:
        raise WorkerLost(worker.name) from error


async def _ask(worker: Worker, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of a worker's reply. Raises WorkerLost."""
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            exchange = await worker.upstream.request(head, body)
            return exchange.status, await read_body(exchange, REPLY_LIMIT)
    except TimeoutError as error:
        raise WorkerLost(worker.name) from error
