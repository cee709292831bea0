"""
Reads of blocks that another worker has cached, instead of computing them.

A prefill worker reads what the decode worker generated, before it computes the rest of a conversation's next
turn. A read that fails, is late, refused or corrupt has no other effect than that the blocks are computed.
Blocks are verified by their checksums before the engine gets them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from baton_api import logs, tickets
from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import Abort, Checksums, Chunk, Commit, Done, Failed, ReadCached
from baton_api.prompt_report import Fallback
from baton_api.workers import PEER
from baton_engine.requests import Fetch, FetchResult
from baton_engine.streams import Event
from baton_engine.tiers.policy import PeerSpeed, read_within_s
from baton_engine.transfer import Pull, Pulled, Transfer
from baton_engine.transfer.control import Pace
from baton_engine.transfer.handshake import Identity
from baton_engine.transfer.integrity import by_sums
from baton_engine.transfer.links import Link, Links
from baton_engine.transfer.parts import whole_bytes

log = logging.getLogger(__name__)

PEERS = 1024
"""Maximum peers whose speed is remembered. The oldest is forgotten first."""


class FetchEngine(Protocol):
    """The part of `baton_engine.engine.Engine` that reads use."""

    def fetched(self, fetched: FetchResult) -> None: ...

    def settled(self, blocks: Collection[int]) -> None: ...

    def check_quarantine(self) -> None: ...


class PeerCaches:
    """The caches of other workers. Used on the event loop only, except `PeerPrefix`."""

    def __init__(
        self,
        engine: FetchEngine,
        transfer: Transfer,
        me: Identity,
        *,
        secret: bytes = b"",
        pace: Pace | None = None,
        hung_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`hung_s`: seconds after which a read that was given up, and has not ended, is taken for hanging."""
        self._engine = engine
        self._transfer = transfer
        self._secret = secret
        self._hung_s = hung_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._links = Links(me, transfer, pace or Pace(), tls)
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._speeds: dict[str, PeerSpeed] = {}
        self._reads: dict[str, asyncio.Task[None]] = {}
        """By request id, until the engine has their result."""
        self._settling: set[asyncio.Future[Pulled]] = set()
        self._numbers = itertools.count(1)
        self._closed = False

    def prefix(self, address: str, hashes: Sequence[bytes], request_id: str) -> PeerPrefix:
        """Return the blocks with these chain hashes at the worker with this control address."""
        speed = self._speeds.get(address)
        if speed is None:
            while len(self._speeds) >= PEERS:
                del self._speeds[next(iter(self._speeds))]
            speed = self._speeds[address] = PeerSpeed(whole_bytes(self._transfer.pools))
        return PeerPrefix(self, address, tuple(hashes), request_id, speed)

    async def close(self) -> None:
        """Cancel all reads and close all connections."""
        self._closed = True
        await asyncio.sleep(0)  # a task that is cancelled before its first step would report nothing
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await self._links.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def start(self, prefix: PeerPrefix, fetch: Fetch, unused: Event) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(self._start, prefix, fetch, unused)

    def cancel(self, request_id: str) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def now(self) -> float:
        return self._clock()

    def _start(self, prefix: PeerPrefix, fetch: Fetch, unused: Event) -> None:
        if self._closed:
            self._engine.fetched(FetchResult(fetch.request_id, arrived=0, reason=Fallback.CANCELLED))
            return
        self._reads[fetch.request_id] = asyncio.create_task(self._run(prefix, fetch, unused))

    def _cancel(self, request_id: str) -> None:
        read = self._reads.get(request_id)
        if read is not None:
            self._loop.call_soon(read.cancel)  # after its first step: otherwise it would report nothing

    async def _run(self, prefix: PeerPrefix, fetch: Fetch, unused: Event) -> None:
        """Read, and report exactly one result to the engine."""
        logs.about(request_id=prefix.request_id)
        read = _Read(fetch, f"{fetch.request_id}#{next(self._numbers)}")
        reason: Fallback | None = None
        began = self._clock()
        try:
            async with asyncio.timeout(fetch.within_s):
                reason = await self._read(read, prefix, unused)
        except TimeoutError:
            reason = Fallback.DEADLINE
        except asyncio.CancelledError:
            reason = Fallback.CANCELLED
        except IncompatiblePeer as error:
            log.warning("cannot read blocks of %s: %s", prefix.address, error)
            reason = Fallback.REFUSED
        except TransferFailed as error:
            log.warning("cannot read blocks of %s: %s", prefix.address, error)
            reason = read.ended or read.failure
        except Exception:  # without a result the request would hang
            log.exception("cannot read blocks of %s", prefix.address)
            reason = Fallback.TRANSFER_FAILED
        finally:
            del self._reads[fetch.request_id]
            unsafe = frozenset(read.under_way)
            result = FetchResult(
                fetch.request_id,
                arrived=0 if unsafe else read.arrived,
                unsafe=unsafe,
                reason="" if reason is None else reason.value,
                transport=read.transport,
            )
            self._engine.fetched(result)
            read.leave(done=not unsafe)
            if reason not in (None, Fallback.CANCELLED, Fallback.REJECTED):
                now = self._clock()
                prefix.speed.failed(now, now - began)
            if unsafe:
                self._settle(read)

    def _settle(self, read: _Read) -> None:
        """Free the blocks of an abandoned read once it has ended."""
        assert read.pull is not None
        ended = read.pull.settled()
        self._settling.add(ended)
        hanging = self._loop.call_later(self._hung_s, self._engine.check_quarantine)

        def settled(_: object) -> None:
            self._settling.discard(ended)
            if not ended.cancelled():
                hanging.cancel()
                if isinstance(error := ended.exception(), TransferFailed):
                    read.fail_link(error)
                self._engine.settled(read.under_way)

        ended.add_done_callback(settled)

    async def _read(self, read: _Read, prefix: PeerPrefix, unused: Event) -> Fallback | None:
        """Return why not all blocks have arrived. Raises TransferFailed or IncompatiblePeer."""
        fetch, transfer, began = read.fetch, self._transfer, self._clock()
        read.failure = Fallback.UNREACHABLE
        ticket = ""
        if self._secret:
            ticket = tickets.issue(self._secret, prefix.request_id, prefix.address, self._wall_clock())
        link = await self._links.link(prefix.address, ticket, prefix.request_id)
        read.failure = Fallback.LOST
        end = fetch.start_block + len(fetch.blocks)
        read.ask(
            link,
            ReadCached(
                session=read.name,
                epoch=1,
                hashes=list(prefix.hashes[fetch.start_block : end]),
                ticket=ticket,
                request_id=prefix.request_id,
                deadline_s=fetch.within_s,
            ),
        )
        chunk = await read.chunk
        announced = self._clock()
        read.failure = Fallback.PROTOCOL
        known = link.peer.pools[0].blocks
        if (
            chunk.first_block != 0
            or not 0 < len(chunk.blocks) <= len(fetch.blocks)
            or not all(0 < block < known for block in chunk.blocks)
        ):
            raise TransferFailed(f"{link.worker[:200]} announced blocks that it was not asked for.")
        if not unused.done():
            await self._loop.run_in_executor(None, unused.wait)
        local = fetch.blocks[: len(chunk.blocks)]
        read.failure = Fallback.TRANSPORT
        read.pull = transfer.pull(link.peer, chunk.blocks, local)
        read.under_way = local
        try:
            pulled = await read.pull.settled()
        except TransferFailed as error:
            read.under_way = ()
            read.fail_link(error)
            raise
        read.under_way, read.transport = (), pulled.transport
        moved = self._clock()
        sums = await read.sums
        read.failure = Fallback.PROTOCOL
        if sums.first_block != 0 or len(sums.checksums) != len(local):
            raise TransferFailed(f"{link.worker[:200]} sent checksums of other blocks.")
        kind = by_sums(link.peer.pools, len(transfer.pools))
        computed = await self._loop.run_in_executor(self._executor, transfer.checksums, local, kind)
        good = [a == b for a, b in zip(computed, sums.checksums, strict=True)]
        read.arrived = (*good, False).index(False)
        if not all(good):
            log.error("%d of %d KV blocks of %s arrived damaged", good.count(False), len(good), link.address)
            return Fallback.CHECKSUM
        now = self._clock()
        prefix.speed.add(len(local), announced - began, now - announced, now)
        times = announced - began, moved - announced, now - moved
        name = link.worker[:200]
        log.info("read %d blocks of %s: wait=%.3fs move=%.3fs verify=%.3fs", len(local), name, *times)
        return None if len(local) == len(fetch.blocks) else Fallback.REJECTED


class _Read:
    """The state of one read: a `SessionListener`."""

    def __init__(self, fetch: Fetch, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.fetch = fetch
        self.name = name
        self.chunk: asyncio.Future[Chunk] = loop.create_future()
        self.sums: asyncio.Future[Checksums] = loop.create_future()
        self.pull: Pull | None = None
        self.under_way: tuple[int, ...] = ()
        """Local blocks that the peer's memory may still be copied to."""
        self.arrived = 0
        """Leading blocks that are verified."""
        self.transport = ""
        self.failure = Fallback.UNREACHABLE
        """The reason of a `TransferFailed` at this point, unless the peer ended the read."""
        self.ended: Fallback | None = None
        """Why the peer, or the loss of its connection, ended the read."""
        self._link: Link | None = None

    def ask(self, link: Link, message: ReadCached) -> None:
        """Send the message. Raises TransferFailed if the link has ended, or the message is too long."""
        if link.ended:
            raise TransferFailed("The connection has ended.")
        self._link = link
        link.listeners[self.name] = self
        link.send(message)

    def fail_link(self, error: TransferFailed) -> None:
        """The peer's memory cannot be read over this link any more."""
        if self._link is not None:
            self._link.fail(error)

    def leave(self, done: bool) -> None:
        """End the session. With `done`, no read is under way."""
        if self._link is not None:
            self._link.listeners.pop(self.name, None)
            self._link.send((Done if done else Abort)(session=self.name, epoch=1))
        for future in (self.chunk, self.sums):
            future.cancel()

    def receive(self, message: Chunk | Checksums | Commit | Failed) -> None:
        match message:
            case Chunk() if not self.chunk.done():
                self.chunk.set_result(message)
            case Checksums() if not self.sums.done():
                self.sums.set_result(message)
            case Failed(reason=reason):
                ended = Fallback.REFUSED if message.retry else Fallback.REJECTED
                self._fail(ended, f"The peer refused the read: {reason[:500]}.")
            case _:
                pass

    def lost(self) -> None:
        """The link has ended."""
        self._fail(Fallback.LOST, "The connection was lost.")

    def _fail(self, ended: Fallback, why: str) -> None:
        self.ended = self.ended or ended
        error = TransferFailed(why)
        for future in (self.chunk, self.sums):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: not both are awaited


@dataclass(frozen=True, slots=True)
class PeerPrefix:
    """`CachedPrefix` of one prompt at one peer."""

    name = PEER

    caches: PeerCaches
    address: str
    hashes: tuple[bytes, ...]
    """Chain hashes of the prompt's leading blocks, as many as the peer should have."""
    request_id: str
    """The router's id of the request."""
    speed: PeerSpeed

    @property
    def blocks(self) -> int:
        return len(self.hashes)

    def read_within_s(self, blocks: int, compute_s: float) -> float:
        speed = self.speed.at(self.caches.now())
        return 0.0 if speed is None else read_within_s(blocks, compute_s, speed)

    def start(self, fetch: Fetch, unused: Event) -> None:
        self.caches.start(self, fetch, unused)

    def cancel(self, request_id: str) -> None:
        self.caches.cancel(request_id)
