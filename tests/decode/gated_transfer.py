"""A transfer that does what the real ones do on a bad day: hangs and writes late, damages, fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.cache import KVCache
from baton_engine.transfer import Peer, Pulled, Transfer
from baton_engine.transfer.loopback import LoopbackTransfer


class GatedTransfer:
    """Loopback behind a gate: a read that waits there copies when the gate opens, as late as that is."""

    def __init__(self, cache: KVCache, worker: str) -> None:
        self._cache = cache
        self._inner: Transfer = LoopbackTransfer(cache, worker)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reading = asyncio.Event()
        """Set once a read was begun."""
        self.damage = False
        """Flip a bit of the last block of each read."""
        self.broken = False
        """End each read with an error after it has copied."""
        self.disconnected: list[str] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def metadata(self) -> bytes:
        return self._inner.metadata

    @property
    def pool(self) -> PoolLayout:
        return self._inner.pool

    async def connect(self, metadata: bytes, pool: PoolLayout, epoch: str) -> Peer:
        return await self._inner.connect(metadata, pool, epoch)

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> GatedPull:
        self.reading.set()
        return GatedPull(asyncio.ensure_future(self._read(peer, list(remote), list(local))))

    async def _read(self, peer: Peer, remote: list[int], local: list[int]) -> Pulled:
        await self.gate.wait()
        pulled = await self._inner.pull(peer, remote, local).settled()
        if self.damage:
            self._cache.block(local[-1])[0] ^= 1
        if self.broken:
            raise TransferFailed("The peer is gone.")
        return pulled

    def serve(self) -> AbstractContextManager[None]:
        return self._inner.serve()

    async def disconnect(self, peer: Peer) -> None:
        self.disconnected.append(peer.name)
        # Reads at the gate go on: releasing a transfer does not cancel it.

    async def close(self) -> None:
        self.gate.set()
        await self._inner.close()


class GatedPull:
    def __init__(self, read: asyncio.Future[Pulled]) -> None:
        self._read = read

    def settled(self) -> asyncio.Future[Pulled]:
        return self._read
