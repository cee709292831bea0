"""
The transfer of a worker over NIXL: that of rank 0, and orders to the other ranks.

Each rank has an agent of its own, because an agent can register only memory of its own process. A rank reads
its key heads from the ranks of the peer that have them. A read of the worker ends with the last one of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Protocol, TypeVar

from baton_api.errors import SetupError, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, Pulled
from baton_engine.transfer.integrity import block_checksums, join_sealed, joined_checksums, split_sealed
from baton_engine.transfer.pool_reader import PoolReader
from baton_engine.transfer.reads import PullFuture, check_pools, check_read, join_reads

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLOSE_GRACE_S = 2.0
"""Maximum time that `close` waits for reads. After it, thread, agent and pool stay alive until the peer
replies or the process ends, because releasing them would not stop writes."""


class OtherRanks(Protocol):
    """The `PoolReader`s of a worker's other ranks. Futures fail with TransferFailed if a rank fails."""

    def open(self, worker: str) -> list[Future[tuple[bytes, PoolLayout]]]:
        """Start the agents. Return the sealed metadata and the pool of each rank, in order."""
        ...

    def connect(
        self, sealed: Sequence[bytes], pools: tuple[PoolLayout, ...], epoch: str, peer: str
    ) -> list[Future[None]]: ...

    def disconnect(self, peer: str) -> None: ...

    def pull(self, peer: str, remote: Sequence[int], local: Sequence[int]) -> list[Future[Pulled]]:
        """Start the reads behind all passes that were sent to the ranks."""
        ...

    def checksums(self, blocks: Sequence[int]) -> list[Future[list[int]]]:
        """Return the sums of each rank's parts, behind all passes that were sent to the ranks."""
        ...

    def serve(self, change: int) -> None: ...

    def close(self, seconds: float) -> list[Future[None]]:
        """End the agents. Their reads in progress have this time to end."""
        ...


class NixlTransfer:
    """Implementation of `Transfer`. Created by `create`, used on the event loop."""

    def __init__(self, cache: KVCache, worker: str, others: OtherRanks | None) -> None:
        self._cache = cache
        self._others = others
        self._rank0 = PoolReader(cache, worker)
        self._pools: tuple[PoolLayout, ...] = (self._rank0.pool,)
        self._metadata = b""

    @classmethod
    async def create(cls, cache: KVCache, worker: str, others: OtherRanks | None = None) -> NixlTransfer:
        """Start UCX and register the cache of each rank. Raises SetupError."""
        transfer = cls(cache, worker, others)
        try:
            sealed = [await asyncio.wrap_future(transfer._rank0.open())]
            opened = await _all(others.open(worker)) if others is not None else []
        except TransferFailed as error:
            transfer._rank0.stop()
            raise SetupError(f"A rank cannot transfer its KV blocks: {error.message}") from error
        except BaseException:
            transfer._rank0.stop()
            raise
        transfer._metadata = join_sealed([*sealed, *(metadata for metadata, _ in opened)])
        transfer._pools = (*transfer._pools, *(pool for _, pool in opened))
        return transfer

    @property
    def name(self) -> str:
        return "nixl"

    @property
    def metadata(self) -> bytes:
        return self._metadata

    @property
    def pools(self) -> tuple[PoolLayout, ...]:
        return self._pools

    async def connect(self, metadata: bytes, pools: tuple[PoolLayout, ...], epoch: str) -> Peer:
        check_pools(self._pools, pools, self._cache.divisible_heads)
        sealed = split_sealed(metadata, len(pools))
        peer = Peer(await asyncio.wrap_future(self._rank0.connect(sealed, pools, epoch)), pools)
        if self._others is not None:
            try:
                await _all(self._others.connect(sealed, pools, epoch, peer.name))
            except BaseException:
                await self.disconnect(peer)
                raise
        return peer

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> PullFuture:
        end = PullFuture()
        try:
            check_read(peer.pools[0], self._pools[0], remote, local)
        except TransferFailed as error:
            end.fail(error)
            return end
        rank0 = self._rank0.pull(peer.name, remote, local)
        if self._others is None:
            return rank0
        join_reads([rank0.end, *self._others.pull(peer.name, remote, local)], end)
        return end

    def checksums(self, blocks: Sequence[int], sums: bool) -> list[int]:
        others = self._others.checksums(blocks) if self._others is not None else []
        parts = [block_checksums(self._cache, blocks, sums), *(other.result() for other in others)]
        return joined_checksums(parts, self._cache.replicas)

    @contextmanager
    def serve(self) -> Iterator[None]:
        self._serve(1)
        try:
            yield
        finally:
            self._serve(-1)

    def _serve(self, change: int) -> None:
        self._rank0.serve(change)
        if self._others is not None:
            self._others.serve(change)

    async def disconnect(self, peer: Peer) -> None:
        if self._others is not None:
            self._others.disconnect(peer.name)  # later orders come after it
        await asyncio.wrap_future(self._rank0.disconnect(peer.name))

    async def close(self) -> None:
        others = self._others.close(CLOSE_GRACE_S) if self._others is not None else []
        self._rank0.stop()
        ended = await asyncio.to_thread(self._rank0.join, CLOSE_GRACE_S)
        await asyncio.to_thread(wait, others, CLOSE_GRACE_S)  # a rank that hangs does not answer
        if not ended:
            log.warning(
                "A read from an unresponsive peer is still in progress. The KV pool stays registered."
            )


async def _all(futures: Sequence[Future[Result]]) -> list[Result]:
    """Return all results. Raises the first error, but only when all are done."""
    await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    return [future.result() for future in futures]
