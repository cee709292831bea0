"""
The prefill workers that compute prompts for this decode worker, as named by the router.

A connection is opened on first use, shared by all prompts, and opened again after a loss. If a fetch fails,
the engine computes the prompt itself, so no error here fails a request. Every reason is counted.

This worker trusts a prefill worker's blocks. With a secret, it therefore connects only to the address in the
router's ticket, which is checked when the request arrives. Tickets are short-lived and a request may wait
long, so this worker signs a new ticket when it sends the prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton_api import exposure, logs, tickets
from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import Pong
from baton_api.prompt_report import Fallback
from baton_decode.fetching import FetchContext, FetchEngine, FetchRequest, FetchTask, whole_hash
from baton_engine.kv.cache import KVCache
from baton_engine.requests import Fetch, RemotePrefill
from baton_engine.streams import Event
from baton_engine.transfer import Transfer
from baton_engine.transfer.control import Pace, split_address
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.links import Links

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 600.0
"""Long, since a prompt may wait behind others for minutes; heartbeats show whether the peer is alive."""

WHOLE = "whole"
"""The outcome of a successful fetch."""


class PrefillWorkers:
    """One per decode worker. Used on the event loop only, except `remote` and `post`."""

    def __init__(
        self,
        engine: FetchEngine,
        cache: KVCache,
        transfer: Transfer,
        me: Identity,
        *,
        vocab: int,
        transfer_deadline_s: float = 30.0,
        answer_deadline_s: float = ANSWER_DEADLINE_S,
        secret: bytes = b"",
        source: str = "",
        pace: Pace | None = None,
        tls: ssl.SSLContext | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`source` is the control address at which prefill workers may read cached blocks; empty: none."""
        self.outcomes: Counter[str] = Counter()
        """Fetches by outcome: `whole`, or a `Fallback`."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._context = FetchContext(
            engine, cache, transfer, vocab, transfer_deadline_s, answer_deadline_s, self._executor
        )
        self._secret = secret
        self._source = source
        self._wall_clock = wall_clock
        self._links = Links(me, transfer, pace or Pace(), tls)
        self._loop = asyncio.get_running_loop()
        self._fetches: dict[str, FetchTask] = {}
        """By request id, until the engine has their result."""
        self._unsettled: set[FetchTask] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def remote(self, address: str, ticket: str, request_id: str) -> RemotePrefill:
        """The prefill worker at `address`, for one request. `ticket` is for `request_id`. Any thread."""
        refusal = tickets.refusal(self._secret, ticket, request_id, address, self._wall_clock())
        return _RemotePrefill(self, address, ticket, request_id, refusal)

    @property
    def loads(self) -> dict[str, Pong]:
        """The last heartbeat of each connected prefill worker, by address."""
        return {link.address: link.load for link in self._links.open if link.load is not None}

    @property
    def under_way(self) -> int:
        """Fetches without a result."""
        return len(self._fetches)

    @property
    def unsettled(self) -> int:
        """Fetches with a result whose reads have not ended."""
        return len(self._unsettled)

    async def close(self) -> None:
        """Cancel all fetches and close all connections."""
        self._closed = True
        for fetch in list(self._fetches.values()):
            fetch.cancel()
        await asyncio.sleep(0)  # Abort is sent before the connection ends
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._links.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def post(self, call: Callable[..., None], *arguments: object) -> None:
        """Call on the event loop. Any thread."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def start(self, request: FetchRequest) -> None:
        name = f"{request.fetch.request_id}#{next(self._numbers)}"
        task = FetchTask(request, name, self._context, self._changed)
        self._fetches[request.fetch.request_id] = task
        if self._closed:
            task.cancel()
        elif request.refusal is not None:
            address, fields = request.address[:200], logs.of(request.request_id)
            log.warning("ticket refused for prefill worker %s: %s", address, request.refusal, extra=fields)
            task.fail(Fallback.REFUSED)
        else:
            self._spawn(self._run(task))

    def cancel(self, request_id: str) -> None:
        task = self._fetches.get(request_id)
        if task is not None:
            task.cancel()

    async def _run(self, task: FetchTask) -> None:
        request = task.request
        logs.about(request_id=request.request_id)
        try:
            # Hashing a long prompt would block the event loop for milliseconds.
            tail = await asyncio.to_thread(whole_hash, request.fetch, self._context.cache.block_size)
            link = await self._links.link(request.address, self._ticket(request), request.request_id)
            if not task.answered:
                source = self.source_for(request)
                task.begin(link, tail, self._ticket(request, source), source)
        except IncompatiblePeer as error:
            log.error("prefill worker %s: %s", request.address, error)
            task.fail(Fallback.REFUSED)
        except TransferFailed as error:
            log.warning("prefill worker %s: %s", request.address, error)
            task.fail(Fallback.UNREACHABLE)
        except Exception:  # without a result the request would hang
            log.exception("cannot send a prompt to prefill worker %s", request.address)
            task.broken()

    def _ticket(self, request: FetchRequest, source: str = "") -> str:
        """A ticket that is valid now; the router's may have expired while the request waited."""
        if not self._secret:
            return request.ticket
        return tickets.issue(self._secret, request.request_id, request.address, self._wall_clock(), source)

    def source_for(self, request: FetchRequest) -> str:
        """
        This worker's control address, if the prefill worker can reach it and the ticket can name it.

        The router's own tickets name no source.
        """
        if not self._source or (request.ticket and not self._secret):
            return ""
        theirs, ours = (exposure.reachable(split_address(one)[0]) for one in (request.address, self._source))
        return self._source if ours or not theirs else ""

    def _changed(self, task: FetchTask) -> None:
        if task.retryable:
            self._spawn(self._run(task))
            return
        if self._fetches.get(task.request.fetch.request_id) is task:
            del self._fetches[task.request.fetch.request_id]
            self.outcomes[task.reason.value if task.reason else WHOLE] += 1
        if task.settled:
            self._unsettled.discard(task)
        else:
            self._unsettled.add(task)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True)
class _RemotePrefill:
    prefills: PrefillWorkers
    address: str
    ticket: str
    request_id: str
    refusal: str | None

    def start(self, fetch: Fetch, unused: Event) -> None:
        request = FetchRequest(fetch, self.address, self.ticket, self.request_id, unused, self.refusal)
        self.prefills.post(self.prefills.start, request)

    def cancel(self, request_id: str) -> None:
        self.prefills.post(self.prefills.cancel, request_id)
