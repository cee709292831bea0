"""The blocks of one rank: reads into its pool, and access of peers to it. Each rank has its own agent."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer.integrity import block_checksums, seal, unseal
from baton_engine.transfer.nixl import NixlAgent
from baton_engine.transfer.parts import VRAM, common_pieces, pool_layout, sources
from baton_engine.transfer.reader import BlockReader, Read
from baton_engine.transfer.reads import PullFuture, join_reads, slices

SLICE_BYTES = 4 * 1024 * 1024
"""Size of one slice. Over shared memory it blocks the thread for about 1 ms."""


@dataclass(slots=True)
class _Peer:
    """A connected peer, as this rank sees it."""

    agents: dict[str, int]
    """Names of the agents of the ranks that are read, and the bytes of a block to read from each."""
    uses: int = 0


class PoolReader:
    """The agent of one rank and its thread. Other threads may use it, and no call waits."""

    def __init__(self, cache: KVCache, worker: str) -> None:
        self.pool = pool_layout(cache)
        self._cache = cache
        self._agent = NixlAgent(f"{worker}-{secrets.token_hex(16)}", cache, self.pool)
        self._reader = BlockReader(self._agent)
        self._peers: dict[str, _Peer] = {}
        """Used on the reader's thread."""

    def open(self) -> Future[bytes]:
        """Start UCX, register the pool, and return the sealed metadata of the agent. Raises SetupError."""
        return self._reader.submit(self._open)

    def _open(self) -> bytes:
        metadata = self._agent.open()
        if self.pool.memory == VRAM:
            block_checksums(self._cache, (0,), sums=True)  # Triton compiles its kernel now, not for a request
        return seal(metadata, self._agent.wire, self._agent.host_id)

    def connect(
        self, sealed: Sequence[bytes], pools: tuple[PoolLayout, ...], epoch: str, peer: str = ""
    ) -> Future[str]:
        """
        Connect to the agents of a peer from whose ranks this rank reads (`parts.sources`).

        `sealed` is the metadata of each rank's agent. Returns `peer`, the name for other calls. By default it
        is that of the first agent. Raises TransferFailed or IncompatiblePeer.
        """
        return self._reader.submit(lambda: self._connect(sealed, pools, epoch, peer))

    def _connect(self, sealed: Sequence[bytes], pools: tuple[PoolLayout, ...], epoch: str, peer: str) -> str:
        agents: dict[str, int] = {}
        try:
            for pool in sources(self.pool, self._cache.ranks, pools):
                common = common_pieces(self.pool, self._cache.parts, pool, self._cache.sections)
                plain, host_id = unseal(sealed[pool.rank], self._agent.wire)
                near = host_id == self._agent.host_id != ""
                agents[self._reader.connect(plain, (pool,), epoch, near)] = common.bytes
        except BaseException:
            for agent in agents:
                self._reader.disconnect(agent)
            raise
        name = peer or next(iter(agents))
        self._peers.setdefault(name, _Peer(agents)).uses += 1
        return name

    def disconnect(self, peer: str) -> Future[None]:
        return self._reader.submit(lambda: self._disconnect(peer))

    def _disconnect(self, peer: str) -> None:
        connected = self._peers.get(peer)
        if connected is None:
            return
        for agent in connected.agents:
            self._reader.disconnect(agent)
        connected.uses -= 1
        if not connected.uses:
            del self._peers[peer]

    def pull(self, peer: str, remote: Sequence[int], local: Sequence[int]) -> PullFuture:
        """Start to read this rank's part of the blocks. They must be valid (`reads.check_read`)."""
        end = PullFuture()
        self._reader.post(lambda: self._pull(peer, remote, local, end))
        return end

    def _pull(self, peer: str, remote: Sequence[int], local: Sequence[int], end: PullFuture) -> None:
        connected = self._peers.get(peer)
        # The reader fails reads from unknown agents.
        agents = {peer: 0} if connected is None else connected.agents
        reads = [
            Read(
                peer=agent,
                bytes=len(remote) * size,
                end=PullFuture() if len(agents) > 1 else end,
                waiting=deque(slices(remote, local, max(1, SLICE_BYTES // max(1, size)))),
                sample=(list(remote[:1]), list(local[:1])),
            )
            for agent, size in agents.items()
        ]
        if len(agents) > 1:
            join_reads([read.end.end for read in reads], end)
        for read in reads:
            self._reader.begin(read)

    def serve(self, change: int) -> None:
        """Add `change` to the number of reasons for which peers may read from this pool."""
        self._reader.post(lambda: self._reader.serve(change))

    def stop(self) -> None:
        """Start no further reads, and end the thread after the last one."""
        self._reader.stop()

    def join(self, seconds: float) -> bool:
        """Wait for the thread. Returns whether it has ended."""
        return self._reader.join(seconds)
