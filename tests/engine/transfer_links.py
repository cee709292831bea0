"""Peers of the tests of the transfer: a process to be read from, stopped and killed."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Self

import msgspec
import psutil

from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, Transfer
from tests.engine.transfer_peer import run

TIMEOUT_S = 300.0

# A server that has torch loaded forks them, as loading it again for each takes longer than its test.
_processes = get_context("forkserver")
_processes.set_forkserver_preload(["tests.engine.transfer_peer"])


@contextmanager
def ucx_tls(kind: str) -> Iterator[None]:
    """Agents and processes that are made within use TCP, or whatever UCX likes best (`shm`)."""
    before = os.environ.pop("UCX_TLS", None)
    if kind == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    try:
        yield
    finally:
        os.environ.pop("UCX_TLS", None)
        if before is not None:
            os.environ["UCX_TLS"] = before


class Child:
    """A worker in a process of its own; killed at the end of the block, whatever happened."""

    def __init__(self, role: str, *details: Any) -> None:
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=run, args=(role, os.environ.get("UCX_TLS"), theirs, *details)
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._seen = psutil.Process(self._process.pid)

    def hear(self, seconds: float = TIMEOUT_S) -> Any:
        """Return its next message."""
        assert self._pipe.poll(seconds), "the process says nothing"
        return self._pipe.recv()

    def order(self, command: str) -> None:
        self._pipe.send(command)
        assert self.hear() == "ok"

    def stop(self) -> None:
        """Hang it; return when it hangs."""
        self._seen.suspend()
        while self._seen.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def go_on(self) -> None:
        self._seen.resume()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode is not None

    @property
    def cpu_seconds(self) -> float:
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    @property
    def files(self) -> int:
        """How many file descriptors it has open."""
        return int(self._seen.num_fds())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


class PeerProcess(Child):
    """A worker whose blocks can be read."""

    def __init__(self, blocks: int, layers: int, seed: int, ranks: int = 1) -> None:
        super().__init__("serve", blocks, layers, seed, ranks)
        self.metadata: bytes
        self.pools: tuple[PoolLayout, ...]
        self.epoch: str
        self.metadata, self.pools, self.epoch = self.hear()


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer, and what it needs to know to read from a peer."""

    kind: str
    transfer: Transfer
    cache: KVCache
    metadata: bytes
    pools: tuple[PoolLayout, ...]
    epoch: str

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Peer]:
        peer = await self.transfer.connect(self.metadata, self.pools, self.epoch)
        try:
            yield peer
        finally:
            await self.transfer.disconnect(peer)

    def changed_pools(self, **fields: Any) -> tuple[PoolLayout, ...]:
        return tuple(msgspec.structs.replace(pool, **fields) for pool in self.pools)
