"""
Transfer between workers of one process by plain copies, for tests and for several workers in one process.

The module-level registry `_workers` maps a random token to each worker. The token is the worker's metadata,
so only its holders have access, and tests do not interfere. Closed and deleted workers are removed from the
registry. Peers in other processes are not supported.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakValueDictionary

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, Pulled
from baton_engine.transfer.integrity import block_checksums
from baton_engine.transfer.parts import pool_layout, whole_bytes
from baton_engine.transfer.reads import PullFuture, check_pools, check_read, runs

_workers: WeakValueDictionary[bytes, LoopbackTransfer] = WeakValueDictionary()


class LoopbackTransfer:
    """The transfer of one worker. Copies run one at a time on a separate thread."""

    def __init__(self, cache: KVCache, worker: str) -> None:
        self._cache = cache
        self._token = secrets.token_bytes(16)
        self._agent = f"{worker}-{self._token.hex()}"
        self._copier = ThreadPoolExecutor(1, thread_name_prefix=f"loopback-{worker}")
        self._peers: dict[str, bytes] = {}
        _workers[self._token] = self

    @property
    def name(self) -> str:
        return "loopback"

    @property
    def metadata(self) -> bytes:
        return self._token

    @property
    def pools(self) -> tuple[PoolLayout, ...]:
        return (pool_layout(self._cache),)

    async def connect(self, metadata: bytes, pools: tuple[PoolLayout, ...], epoch: str) -> Peer:
        worker = _workers.get(metadata)
        if worker is None:
            raise TransferFailed(
                "No worker of this process has this metadata: --transfer loopback supports only workers in "
                "one process. Start both workers with --transfer nixl."
            )
        check_pools(self.pools, pools, self._cache.divisible_heads)
        if pools != worker.pools:
            raise TransferFailed(f"The pools of {worker._agent} differ from those that the peer announced.")
        self._peers[worker._agent] = metadata
        return Peer(worker._agent, pools)

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> PullFuture:
        end = PullFuture()
        try:
            check_read(peer.pools[0], self.pools[0], remote, local)
            self._copier.submit(self._copy, peer, list(remote), list(local), end)
        except TransferFailed as error:
            end.fail(error)
        return end

    def _copy(self, peer: Peer, remote: list[int], local: list[int], end: PullFuture) -> None:
        begin = time.perf_counter()
        token = self._peers.get(peer.name)
        worker = None if token is None else _workers.get(token)
        if worker is None:
            end.fail(TransferFailed(f"The peer {peer.name} is gone."))
            return
        with self._cache.streams.side_stream():
            for source, destination, count in runs(remote, local):
                content = worker._cache.kv[source : source + count]
                self._cache.kv[destination : destination + count].copy_(content)
            self._cache.streams.record().wait()
        size = len(remote) * whole_bytes(self.pools)
        end.succeed(Pulled(bytes=size, seconds=time.perf_counter() - begin, transport="loopback"))

    def checksums(self, blocks: Sequence[int], sums: bool) -> list[int]:
        return block_checksums(self._cache, blocks, sums)

    def serve(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def disconnect(self, peer: Peer) -> None:
        self._peers.pop(peer.name, None)

    async def close(self) -> None:
        _workers.pop(self._token, None)
        await asyncio.to_thread(self._copier.shutdown)
