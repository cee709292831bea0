"""
Moves KV blocks from a prefill worker's cache into a decode worker's: the interface.

The decode worker pulls. The process whose memory is written owns the transfer handle, so its own state proves
that writing has ended, and a prefill worker that dies leaves no unnoticed half-written block.

Measurements of NIXL over UCX shaped the interface. Releasing a transfer does not cancel it: bytes arrived for
another 0.2 s. NIXL has no deadline, and a transfer may stay in progress forever if the peer hangs. A transfer
over shared memory completes inside the call that posts it. Therefore one thread owns the agent, the caller
has a deadline of its own, and destination blocks of an unfinished read are quarantined.
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
    """A prefill worker whose blocks can be read, as `Transfer.connect` gave it."""

    name: str
    """Unique for each start of the peer's process."""
    pool: PoolLayout


@dataclass(frozen=True, slots=True)
class Pulled:
    """One finished read."""

    bytes: int
    seconds: float
    transport: str
    """Such as `nixl/ucx shm`, `nixl/ucx tcp`, `loopback`."""


class Pull(Protocol):
    """One read under way."""

    def settled(self) -> asyncio.Future[Pulled]:
        """
        Done when no byte of the destination can change any more: with the figures, or with
        TransferFailed. It may take for ever if the peer hangs; whoever waits has a deadline of
        their own, and until it is done the destination blocks must not be given to anybody.

        Each call gives a future of its own, so a waiter that is cancelled or timed out cancels
        nothing but its waiting: ask again.
        """
        ...


class Transfer(Protocol):
    """One worker's means of reading other workers' blocks and of letting its own be read."""

    @property
    def name(self) -> str:
        """`nixl` or `loopback`."""
        ...

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read this worker's blocks. A capability: for authorised peers only."""
        ...

    @property
    def pool(self) -> PoolLayout: ...

    async def connect(self, metadata: bytes, pool: PoolLayout, epoch: str) -> Peer:
        """Make a peer's blocks readable. Raises TransferFailed."""
        ...

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> Pull:
        """
        Begin to copy the peer's blocks `remote` over the local blocks `local`, pairwise.

        Called on the event loop; returns at once. What the peer got wrong comes out of `settled`.
        """
        ...

    def serve(self) -> AbstractContextManager[None]:
        """
        Hold it while peers may connect to this worker or read its blocks: from `Welcome` until
        the last announced block is done with. Any number may be held at a time; each costs nothing
        but the first, about 4 % of a core.

        A peer's first read, and every read over TCP, goes on only while this side looks at its
        sockets; with nobody holding it, such reads wait, they do not fail.
        """
        ...

    async def disconnect(self, peer: Peer) -> None:
        """Forget the peer. Reads under way settle by themselves, with an error if it is dead."""
        ...

    async def close(self) -> None: ...
