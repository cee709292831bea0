"""
A transfer that misbehaves on demand: late, failing, damaging, hanging.

It wraps a real one. Bytes move when the wrapped transfer moves them, so a pull that is held has not
touched its destination yet. It writes over it when it is released, however late: as a peer does that
hung and came back.

    transfer.hold()                 # every pull from now on waits
    pull = transfer.pull(...)
    await transfer.held(1)          # it has begun and does not settle
    transfer.release()              # the bytes land, the pull settles
    transfer.fail_next()            # the next one settles with TransferFailed, and so do all that follow
                                    # until the peer is connected again, as with NIXL
    transfer.fail_next(after=3)     # ... when its first 3 blocks have landed
    transfer.flip_bit_next()        # the next one arrives with one bit flipped in its first block
    transfer.summing = Event()      # every checksum from now on waits for this event, in its thread
    transfer.fail_next_sums(OSError())  # the next checksums raise this error
    transfer.refuse_next()          # the next connect raises TransferFailed
    transfer.refuse_next(KeyError())  # ... or another error, as a defect would
    transfer.connecting = Event()   # every connect from now on waits for this event
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, Pulled, Transfer


@dataclass(frozen=True, slots=True)
class PullRequest:
    """One pull as requested."""

    peer: str
    remote: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    after: int


@dataclass(frozen=True, slots=True)
class _Flip:
    position: int


class FaultyTransfer:
    """`inner`, whose local blocks lie in `cache`, with faults in front. For one event loop."""

    def __init__(self, inner: Transfer, cache: KVCache) -> None:
        self.inner = inner
        self.requested: list[PullRequest] = []
        self.under_way = 0
        """Pulls that have not settled."""
        self.connecting: asyncio.Event | None = None
        self.summing: threading.Event | None = None
        self._cache = cache
        self._faults: deque[_Failure | _Flip] = deque()
        self._refusals: deque[Exception] = deque()
        self._sums_errors: deque[Exception] = deque()
        self._dead: set[str] = set()
        """Peers of which a read has failed since they were connected."""
        self._gate: asyncio.Event | None = None
        self._holding = 0
        self._changed = asyncio.Condition()

    def hold(self) -> None:
        """Pulls that begin from now on wait for `release`."""
        if self._gate is None:
            self._gate = asyncio.Event()

    def release(self) -> None:
        """Release the held pulls; later pulls are not held."""
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    async def held(self, count: int) -> None:
        """Wait until at least `count` pulls are being held."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._holding >= count)

    async def idle(self) -> None:
        """Wait until every pull has settled."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.under_way == 0)

    def fail_next(self, after: int = 0) -> None:
        self._faults.append(_Failure(after))

    def flip_bit_next(self, position: int = 0) -> None:
        """Flip one bit of the block at `position` of the pull."""
        self._faults.append(_Flip(position))

    def fail_next_sums(self, error: Exception) -> None:
        self._sums_errors.append(error)

    def refuse_next(self, error: Exception | None = None) -> None:
        self._refusals.append(error or TransferFailed("The peer cannot be reached: a fault was asked for."))

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def metadata(self) -> bytes:
        return self.inner.metadata

    @property
    def pools(self) -> tuple[PoolLayout, ...]:
        return self.inner.pools

    async def connect(self, metadata: bytes, pools: tuple[PoolLayout, ...], epoch: str) -> Peer:
        if self.connecting is not None:
            await self.connecting.wait()
        if self._refusals:
            raise self._refusals.popleft()
        peer = await self.inner.connect(metadata, pools, epoch)
        self._dead.discard(peer.name)
        return peer

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> _FaultyPull:
        self.requested.append(PullRequest(peer.name, tuple(remote), tuple(local)))
        self.under_way += 1
        fault = self._faults.popleft() if self._faults else None
        work = self._pull(peer, list(remote), list(local), fault, self._gate)
        return _FaultyPull(asyncio.ensure_future(work))

    async def _pull(
        self,
        peer: Peer,
        remote: list[int],
        local: list[int],
        fault: _Failure | _Flip | None,
        gate: asyncio.Event | None,
    ) -> Pulled:
        try:
            if gate is not None:
                await self._count_held(1)
                await gate.wait()
                await self._count_held(-1)
            if peer.name in self._dead:
                raise TransferFailed(f"The peer {peer.name} is gone.")
            if isinstance(fault, _Failure):
                self._dead.add(peer.name)
                await self.inner.pull(peer, remote[: fault.after], local[: fault.after]).settled()
                raise TransferFailed(f"Reading from {peer.name} failed: a fault was asked for.")
            pulled = await self.inner.pull(peer, remote, local).settled()
            if isinstance(fault, _Flip):
                self._cache.block(local[fault.position])[0] ^= 1
            return pulled
        finally:
            self.under_way -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _count_held(self, change: int) -> None:
        async with self._changed:
            self._holding += change
            self._changed.notify_all()

    def checksums(self, blocks: Sequence[int], sums: bool) -> list[int]:
        if self.summing is not None:
            self.summing.wait()
        if self._sums_errors:
            raise self._sums_errors.popleft()
        return self.inner.checksums(blocks, sums)

    def serve(self) -> AbstractContextManager[None]:
        return self.inner.serve()

    async def disconnect(self, peer: Peer) -> None:
        await self.inner.disconnect(peer)

    async def close(self) -> None:
        await self.inner.close()


class _FaultyPull:
    """A pull that no cancellation of a waiter reaches."""

    def __init__(self, task: asyncio.Task[Pulled]) -> None:
        self._task = task
        # A pull that fails without a listener does not fail the test.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settled(self) -> asyncio.Future[Pulled]:
        return asyncio.shield(self._task)
