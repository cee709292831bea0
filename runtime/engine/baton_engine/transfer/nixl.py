"""
The transfer over NIXL. No other module imports NIXL.

NIXL's progress thread is disabled, because it uses a whole core. Its listening thread is disabled, because it
would send metadata to any client. The agent belongs to the thread of one `BlockReader`.

Known defect of NIXL 1.5.1 with UCX 1.23: if a reader dies during a READ over TCP, the other process purges
its unsent replies with uninitialized fields. An agent on the main thread, with recycled memory, crashed every
time. An agent on a separate thread with its own arena did not crash in 60 attempts. Reads over shared memory
and RDMA do not involve the other process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton_api.errors import SetupError, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, ucx
from baton_engine.transfer.integrity import seal, unseal
from baton_engine.transfer.parts import DRAM, VRAM, BlockPiece, block_pieces, pool_layouts, whole_bytes
from baton_engine.transfer.reader import AgentError, BlockReader, Read
from baton_engine.transfer.reads import Settlement, check_pools, check_read, slices

log = logging.getLogger(__name__)

SLICE_BYTES = 4 * 1024 * 1024
"""Size of one slice. Over shared memory it blocks the thread for about 1 ms."""

CLOSE_GRACE_S = 2.0
"""Maximum time that `close` waits for reads. After it, thread, agent and pool stay alive until the peer
replies or the process ends, because releasing them would not stop writes."""

SELF_TEST_BYTES = 1024 * 1024

TEARDOWN_STEPS = 50
"""Number of calls in which UCX tears down a failed connection, 3 us each."""

WAY_OUT = "Check UCX_TLS and UCX_NET_DEVICES, or use --transfer loopback if all workers are in one process."


class NixlTransfer:
    """The agent of one worker and its thread. Created by `create`, used on the event loop."""

    def __init__(self, cache: KVCache, worker: str) -> None:
        self._cache = cache
        self._pools = pool_layouts(cache)
        self._agent = NixlAgent(f"{worker}-{secrets.token_hex(16)}", cache, self._pools)
        self._reader = BlockReader(self._agent)
        self._metadata = b""

    @classmethod
    async def create(cls, cache: KVCache, worker: str) -> NixlTransfer:
        """Start UCX and register the cache. Raises SetupError."""
        transfer = cls(cache, worker)
        try:
            plain = await transfer._reader.call(transfer._agent.open)
        except BaseException:
            transfer._reader.stop()
            raise
        transfer._metadata = seal(plain, transfer._agent.wire, transfer._agent.place)
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
        check_pools(self._pools, pools, self._cache.whole_kv_heads)
        plain, place = unseal(metadata, self._agent.wire)
        near = place == self._agent.place != ""
        name = await self._reader.call(lambda: self._reader.connect(plain, pools, epoch, near))
        return Peer(name, pools)

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> Settlement:
        end = Settlement()
        try:
            check_read(peer.pools[0], self._pools[0], remote, local)
        except TransferFailed as error:
            end.fail(error)
            return end
        size = whole_bytes(self._pools)
        read = Read(
            peer=peer.name,
            bytes=len(remote) * size,
            end=end,
            waiting=deque(slices(remote, local, max(1, SLICE_BYTES // size))),
            sample=(list(remote[:1]), list(local[:1])),
        )
        self._reader.post(lambda: self._reader.begin(read))
        return end

    @contextmanager
    def serve(self) -> Iterator[None]:
        self._reader.post(lambda: self._reader.serve(1))
        try:
            yield
        finally:
            self._reader.post(lambda: self._reader.serve(-1))

    async def disconnect(self, peer: Peer) -> None:
        await self._reader.call(lambda: self._reader.disconnect(peer.name))

    async def close(self) -> None:
        self._reader.stop()
        if not await asyncio.to_thread(self._reader.join, CLOSE_GRACE_S):
            log.warning(
                "A read from an unresponsive peer is still in progress. The KV pool stays registered."
            )


class NixlAgent:
    """Implementation of `reader.Agent` with NIXL and UCX. Used on the reader's thread only."""

    def __init__(self, name: str, cache: KVCache, pools: tuple[PoolLayout, ...]) -> None:
        self.wire = ""
        self.place = ""
        self._name = name
        self._cache = cache  # keeps the memory alive while peers may write to it
        self._pools = pools
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._registered: Any = None
        self._blocks: Any = None
        self._rdma = False

    def open(self) -> bytes:
        """Start UCX, register the pool, and return the metadata for peers. Raises SetupError."""
        size = self._cache.blocks * whole_bytes(self._pools)
        self._cache.streams.use()  # without the device's context, UCX registers VRAM as host memory
        with ucx.environment():
            nixl_agent, nixl_agent_config, self._errors = _load()
            try:
                config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self._agent = nixl_agent(self._name, config)
                if "UCX" not in self._agent.backends:
                    raise SetupError(f"The NIXL library has no UCX plugin. {WAY_OUT}")
                regions = [(one.address, one.blocks * one.block_bytes, one.device, "") for one in self._pools]
                self._registered = self._agent.register_memory(regions, self._pools[0].memory, ["UCX"])
                self._blocks = self._prepare("NIXL_INIT_AGENT", self._pools)
                metadata: bytes = self._agent.get_agent_metadata()
            except self._errors as error:
                tls = os.environ.get("UCX_TLS", "all")
                raise SetupError(
                    f"UCX cannot start (UCX_TLS={tls}) or cannot register {size} bytes: {error}. {WAY_OUT}"
                ) from error
            self.wire = ucx.wire()
            self.place = ucx.place()
        self._rdma = ucx.has_rdma()
        return metadata

    def add(self, metadata: bytes) -> str:
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
            return name.decode(errors="replace")
        except self._errors as error:
            raise AgentError(str(error)) from error

    def prepare(self, peer: str, pools: tuple[PoolLayout, ...]) -> _Blocks:
        try:
            return _Blocks(peer, pools, self._prepare(peer, pools))
        except self._errors as error:
            raise AgentError(str(error)) from error

    def _prepare(self, agent: str, pools: tuple[PoolLayout, ...]) -> Any:
        """Create one descriptor per block and rank, from rows (address, bytes, device, distance, count)."""
        rows = [(one.address, one.block_bytes, one.device, one.block_bytes, one.blocks) for one in pools]
        return self._agent.prep_xfer_dlist(agent, np.array(rows, dtype=np.uint64), pools[0].memory, ["UCX"])

    def make(self, theirs: _Blocks, remote: Sequence[int], local: Sequence[int]) -> Any:
        try:
            if len(theirs.pools) != len(self._pools):
                return self._make_of_pieces(theirs, remote, local)
            # NIXL merges adjacent blocks into one descriptor.
            return self._agent.make_prepped_xfer(
                "READ",
                self._blocks,
                _indices(local, self._pools),
                theirs.prepared,
                _indices(remote, theirs.pools),
            )
        except self._errors as error:
            raise AgentError(str(error)) from error

    def _make_of_pieces(self, theirs: _Blocks, remote: Sequence[int], local: Sequence[int]) -> Any:
        # Prepared lists of all pieces of all blocks could need gigabytes.
        planes = self._cache.planes
        our_pieces = block_pieces(self._pools, len(theirs.pools), planes)
        their_pieces = block_pieces(theirs.pools, len(self._pools), planes)
        return self._agent.initialize_xfer(
            "READ",
            self._described(local, self._pools, our_pieces),
            self._described(remote, theirs.pools, their_pieces),
            theirs.peer,
            backends=["UCX"],
        )

    def _described(
        self, blocks: Sequence[int], pools: tuple[PoolLayout, ...], pieces: Sequence[BlockPiece]
    ) -> Any:
        """Return descriptors of all pieces of `blocks`, piece by piece."""
        numbers = np.array(blocks, dtype=np.uint64)
        rows = np.empty((len(pieces), len(numbers), 3), dtype=np.uint64)  # address, bytes, device
        for row, piece in zip(rows, pieces, strict=True):
            pool = pools[piece.rank]
            row[:, 0] = numbers * np.uint64(pool.block_bytes) + np.uint64(pool.address + piece.offset)
            row[:, 1:] = piece.size, pool.device
        return self._agent.get_xfer_descs(rows.reshape(-1, 3), pools[0].memory)

    def post(self, handle: Any) -> bool:
        try:
            return bool(self._agent.transfer(handle) == "DONE")
        except self._errors as error:
            raise AgentError(str(error)) from error

    def done(self, handle: Any) -> bool:
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            raise AgentError(str(error)) from error
        if state == "ERR":
            raise AgentError("NIXL reports an error")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        self._tidy(handle.release)

    def remove(self, peer: str, blocks: _Blocks | None) -> None:
        # UCX tears down a failed connection step by step. Removing the agent earlier aborts the process.
        for _ in range(TEARDOWN_STEPS):
            self.progress()
        if blocks is not None:
            self._tidy(blocks.prepared.release)
        self._tidy(lambda: self._agent.remove_remote_agent(peer))

    def progress(self) -> None:
        self._agent.get_new_notifs(["UCX"])

    def transport(self, pools: tuple[PoolLayout, ...], copied: bool) -> str:
        on_device = VRAM in (pools[0].memory, self._pools[0].memory)
        return ucx.transport(on_device, copied, self._rdma)

    def close(self) -> None:
        if self._blocks is not None:
            self._tidy(self._blocks.release)
        if self._registered is not None:
            self._tidy(lambda: self._agent.deregister_memory(self._registered, ["UCX"]))
        self._agent = self._blocks = self._registered = None

    def _tidy(self, step: Callable[[], object]) -> None:
        """Release an unused resource. A failure is only logged."""
        try:
            step()
        except self._errors as error:
            log.warning("NIXL failed to release a resource: %s", error)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a peer."""

    peer: str
    pools: tuple[PoolLayout, ...]
    prepared: Any
    """Descriptors: that of block `b` of rank `r` is number `r * blocks + b`."""


def _indices(blocks: Sequence[int], pools: tuple[PoolLayout, ...]) -> NDArray[np.int32]:
    """Return the numbers of the prepared descriptors of `blocks`, rank by rank."""
    first = np.arange(len(pools), dtype=np.int32)[:, None] * pools[0].blocks
    return (first + np.array(blocks, dtype=np.int32)).reshape(-1)


def is_installed() -> bool:
    """Return whether the library is installed."""
    return importlib.util.find_spec("nixl") is not None


def try_out() -> str:
    """Start UCX as a worker does, register memory, and return a description. Raises SetupError."""
    memory = np.zeros(SELF_TEST_BYTES, dtype=np.uint8)
    with ucx.environment():
        nixl_agent, nixl_agent_config, errors = _load()
        try:
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            agent = nixl_agent(f"trial-{secrets.token_hex(8)}", config)
            if "UCX" not in agent.backends:
                raise SetupError(f"The NIXL library has no UCX plugin. {WAY_OUT}")
            regions = {DRAM: memory.ctypes.data}
            if torch.cuda.is_available():
                on_device = torch.zeros(SELF_TEST_BYTES, dtype=torch.uint8, device="cuda:0")
                regions[VRAM] = on_device.data_ptr()
            for kind, address in regions.items():
                registered = agent.register_memory([(address, SELF_TEST_BYTES, 0, "")], kind, ["UCX"])
                agent.deregister_memory(registered, ["UCX"])
            plugins = ", ".join(sorted(agent.get_plugin_list()))
        except errors as error:
            tls = os.environ.get("UCX_TLS", "all")
            raise SetupError(f"UCX cannot start (UCX_TLS={tls}): {error}. {WAY_OUT}") from error
    memories = " and ".join(regions)
    return f"NIXL {importlib.metadata.version('nixl')} with UCX for {memories}; plugins: {plugins}"


def _load() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """Import NIXL without its changes of the logging configuration. Returns agent, configuration, errors."""
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _bindings, nixl_agent, nixl_agent_config
    except ImportError as error:
        raise SetupError(
            f"Cannot load the NIXL library ({error}). Install it with pip install 'baton[nixl]', or use "
            "--transfer loopback if all workers are in one process."
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions
    chatter = logging.getLogger("nixl")  # writes a line for each agent to stdout
    chatter.handlers.clear()
    chatter.propagate = True
    chatter.setLevel(logging.WARNING)
    members = vars(_bindings).values()
    errors = [value for value in members if isinstance(value, type) and issubclass(value, Exception)]
    return nixl_agent, nixl_agent_config, tuple(errors)
