"""
Interface of the transfer of KV blocks from a prefill worker's cache to a decode worker's cache.

The decode worker reads. The process whose memory is written owns the transfer handle, so it knows when
writing has ended, and a crashed prefill worker cannot leave partially written blocks unnoticed.

Measurements of NIXL over UCX shaped the interface. Releasing a transfer does not cancel it: bytes arrived for
another 0.2 s. NIXL has no deadline, and a transfer may stay in progress forever if the peer hangs. A transfer
over shared memory completes inside the call that posts it. Therefore one thread owns the agent, callers use
their own deadlines, and destination blocks of an unfinished read are quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton_api.messages import PoolLayout


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected prefill worker, the result of `Transfer.connect`."""

    name: str
    """Unique for each start of the peer's process."""
    pools: tuple[PoolLayout, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """A completed read."""

    bytes: int
    seconds: float
    transport: str
    """For example `nixl/ucx shm`, `nixl/ucx tcp` or `loopback`."""


class Pull(Protocol):
    """One read in progress."""

    def settled(self) -> asyncio.Future[Pulled]:
        """
        Return a future that is done when no byte of the destination can change any more.

        Its result is a `Pulled` or TransferFailed. If the peer hangs, it never completes, so use a deadline.
        Do not reuse the destination blocks before it is done. Each call returns a separate future; cancelling
        it does not affect the read.
        """
        ...


class Transfer(Protocol):
    """Reads blocks of other workers, and gives them access to the blocks of this worker."""

    @property
    def name(self) -> str:
        """`nixl` or `loopback`."""
        ...

    @property
    def metadata(self) -> bytes:
        """The data that a peer needs to read this worker's blocks. Send it to authorized peers only."""
        ...

    @property
    def pools(self) -> tuple[PoolLayout, ...]:
        """The parts of this worker's blocks, one for each rank."""
        ...

    async def connect(self, metadata: bytes, pools: tuple[PoolLayout, ...], epoch: str) -> Peer:
        """Connect to a peer. `epoch` identifies the start of its process. Raises TransferFailed."""
        ...

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> Pull:
        """
        Start to copy the peer's blocks `remote` to the local blocks `local`, pairwise.

        Call it on the event loop. It does not block; `settled` reports errors of the peer.
        """
        ...

    def checksums(self, blocks: Sequence[int], sums: bool) -> list[int]:
        """
        Return `integrity.block_checksums` of this worker's blocks, those of all ranks added. May block.

        The device of rank 0 must have written the blocks. Raises TransferFailed if another rank fails.
        """
        ...

    def serve(self) -> AbstractContextManager[None]:
        """
        Return a context during which peers can connect to this worker and read its blocks.

        Hold it from `Welcome` until all announced blocks are released. Contexts may overlap; the first one
        costs about 4 % of a core. A peer's first read and every read over TCP make progress only within a
        context, and wait otherwise.
        """
        ...

    async def disconnect(self, peer: Peer) -> None:
        """Disconnect a peer. Reads in progress end by themselves, with an error if the peer is dead."""
        ...

    async def close(self) -> None: ...
