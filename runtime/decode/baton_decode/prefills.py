"""
The prefill workers that this worker has prompts computed by: whom the router names, as it names them.

Connections are made when they are first needed, shared by all prompts, and made again after a loss. What
cannot be had from a prefill worker is reported to the engine, which computes it itself; so nothing here
ever fails a request, and every reason is counted.

A prefill worker's blocks are believed, so with a secret this worker connects only where the router's ticket
says. The ticket is checked when the request arrives. A ticket is short-lived and a request may wait long for
its turn, so the prefill worker gets a new one, signed with the same secret when it is asked.
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

from baton_api import logs, tickets
from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import Pong
from baton_api.reports import Fallback
from baton_decode.fetching import Errand, Fetching, Means, Receiver, whole_hash
from baton_decode.links import Link
from baton_engine.kv.cache import KVCache
from baton_engine.requests import Fetch, RemotePrefill
from baton_engine.transfer import Transfer
from baton_engine.transfer.control import Pace
from baton_engine.transfer.handshake import Identity

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 600.0
"""A long prompt behind others may take minutes; that the peer is alive is known from its heartbeats."""

UNREACHABLE_S = 1.0
"""For so long an address that did not answer is not tried again: other requests need not wait for it."""

WHOLE = "whole"
"""The outcome of a prompt that came over."""


class Prefills:
    """One per decode worker. Made, used and closed on the event loop, save for `remote`."""

    def __init__(
        self,
        engine: Receiver,
        cache: KVCache,
        transfer: Transfer,
        me: Identity,
        *,
        vocab: int,
        transfer_deadline_s: float = 30.0,
        answer_deadline_s: float = ANSWER_DEADLINE_S,
        secret: bytes = b"",
        pace: Pace | None = None,
        tls: ssl.SSLContext | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        """How fetches ended: `whole`, or a `Fallback`."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._means = Means(
            engine, cache, transfer, vocab, transfer_deadline_s, answer_deadline_s, self._executor
        )
        self._me = me
        self._secret = secret
        self._wall_clock = wall_clock
        self._pace = pace or Pace()
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, asyncio.Task[Link]] = {}
        self._fetches: dict[str, Fetching] = {}
        """By request id, until they are answered."""
        self._unsettled: set[Fetching] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def remote(self, address: str, ticket: str, request_id: str) -> RemotePrefill:
        """For one request: the prefill worker at `address`, `ticket` being for `request_id`. Any thread."""
        refusal = tickets.refusal(self._secret, ticket, request_id, address, self._wall_clock())
        return _Remote(self, address, ticket, request_id, refusal)

    @property
    def loads(self) -> dict[str, Pong]:
        """What each connected prefill worker said of itself last, by address."""
        links = {address: task.result() for address, task in self._links.items() if _is_up(task)}
        return {address: link.load for address, link in links.items() if link.load is not None}

    @property
    def under_way(self) -> int:
        """Fetches that are not answered."""
        return len(self._fetches)

    @property
    def unsettled(self) -> int:
        """Answered fetches for which something is still being written."""
        return len(self._unsettled)

    async def close(self) -> None:
        """Answer what is under way and end all connections."""
        self._closed = True
        for fetching in list(self._fetches.values()):
            fetching.cancel()
        await asyncio.sleep(0)  # so that Abort leaves before the connection ends
        tasks = [*self._links.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def post(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop do it. Any thread."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def start(self, errand: Errand) -> None:
        name = f"{errand.fetch.request_id}#{next(self._numbers)}"
        fetching = Fetching(errand, name, self._means, self._changed)
        self._fetches[errand.fetch.request_id] = fetching
        if self._closed:
            fetching.cancel()
        elif errand.refusal is not None:
            reason = errand.address[:200], errand.refusal
            log.warning("prefill worker %s is not asked: %s", *reason, extra=logs.of(errand.request_id))
            fetching.fail(Fallback.REFUSED)
        else:
            self._spawn(self._run(fetching))

    def cancel(self, request_id: str) -> None:
        fetching = self._fetches.get(request_id)
        if fetching is not None:
            fetching.cancel()

    async def _run(self, fetching: Fetching) -> None:
        errand = fetching.errand
        logs.about(request_id=errand.request_id)
        try:
            # Hashing a long prompt takes milliseconds that the event loop does not have.
            tail = await asyncio.to_thread(whole_hash, errand.fetch, self._means.cache.block_size)
            link = await self._link(errand)
            if not fetching.answered:
                fetching.begin(link, tail, self._ticket(errand))
        except IncompatiblePeer as error:
            log.error("prefill worker %s: %s", errand.address, error)
            fetching.fail(Fallback.REFUSED)
        except TransferFailed as error:
            log.warning("prefill worker %s: %s", errand.address, error)
            fetching.fail(Fallback.UNREACHABLE)
        except Exception:  # a defect costs this request a recomputation; without an answer it would hang
            log.exception("prefill worker %s could not be asked", errand.address)
            fetching.broken()

    def _ticket(self, errand: Errand) -> str:
        """One that is valid now, even if the request has waited for longer than the router's is."""
        if not self._secret:
            return errand.ticket
        return tickets.issue(self._secret, errand.request_id, errand.address, self._wall_clock())

    async def _link(self, errand: Errand) -> Link:
        address = errand.address
        opening = self._links.get(address)
        if opening is None:
            opening = asyncio.create_task(
                Link.open(
                    address,
                    self._ticket(errand),
                    errand.request_id,
                    self._me,
                    self._means.transfer,
                    self._pace,
                    self._tls,
                )
            )
            self._links[address] = opening
            opening.add_done_callback(lambda task: self._opened(address, task))
        return await asyncio.shield(opening)

    def _opened(self, address: str, opening: asyncio.Task[Link]) -> None:
        if _is_up(opening):
            self._spawn(self._keep(opening.result(), opening))
        elif not opening.cancelled() and isinstance(opening.exception(), TransferFailed):
            self._loop.call_later(UNREACHABLE_S, self._forget, address, opening)
        else:
            self._forget(address, opening)

    async def _keep(self, link: Link, opening: asyncio.Task[Link]) -> None:
        await link.run(self._means.transfer, lambda: self._forget(link.address, opening))

    def _forget(self, address: str, opening: asyncio.Task[Link]) -> None:
        if self._links.get(address) is opening:
            del self._links[address]

    def _changed(self, fetching: Fetching) -> None:
        if fetching.worth_another_try:
            self._spawn(self._run(fetching))
            return
        if self._fetches.get(fetching.errand.fetch.request_id) is fetching:
            del self._fetches[fetching.errand.fetch.request_id]
            self.outcomes[fetching.reason.value if fetching.reason else WHOLE] += 1
        if fetching.settled:
            self._unsettled.discard(fetching)
        else:
            self._unsettled.add(fetching)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True)
class _Remote:
    prefills: Prefills
    address: str
    ticket: str
    request_id: str
    refusal: str | None

    def start(self, fetch: Fetch) -> None:
        errand = Errand(fetch, self.address, self.ticket, self.request_id, self.refusal)
        self.prefills.post(self.prefills.start, errand)

    def cancel(self, request_id: str) -> None:
        self.prefills.post(self.prefills.cancel, request_id)


def _is_up(opening: asyncio.Task[Link]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None
