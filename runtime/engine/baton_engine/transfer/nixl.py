"""
NIXL, as far as Baton speaks it. No other module imports it.

Its own progress thread stays off, as it takes a whole core, and so does its listening thread, which
would hand out metadata to whoever asks. The agent belongs to one `BlockReader`'s thread.

Known of NIXL 1.5.1 with its UCX 1.23: when a reader dies in the middle of a READ over TCP, the process it
was reading from purges its unsent answers through fields of them that nobody set. With the agent on the
main thread, on memory used before, that crashed it every time; on a thread of its own, with an
arena of its own, never in 60 kills. Over shared memory and RDMA the process that is read from takes no part.
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
from typing import Any

import numpy as np

from baton_api.errors import SetupError, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, ucx
from baton_engine.transfer.integrity import seal, unseal
from baton_engine.transfer.reader import AgentError, BlockReader, Read
from baton_engine.transfer.reads import Settlement, check_pool, check_read, slices

log = logging.getLogger(__name__)

SLICE_BYTES = 4 * 1024 * 1024
"""Of one post. Over shared memory it holds the thread for about 1 ms."""

CLOSE_GRACE_S = 2.0
"""How long `close` waits for reads under way. After it the thread, the agent and the pool stay as they
are until the peer answers or the process ends: letting go of them would not stop the writing."""

SELF_TEST_BYTES = 1024 * 1024

TEARDOWN_STEPS = 50
"""Calls in which UCX lets go of a connection that failed, 3 us each."""

WAY_OUT = "Check UCX_TLS and UCX_NET_DEVICES, or use --transfer loopback if all workers are in one process."


class NixlTransfer:
    """One worker's agent and the thread that owns it. Made by `create`, used on the event loop."""

    def __init__(self, cache: KVCache, worker: str) -> None:
        cuda = cache.kv.device.type == "cuda"
        self._pool = PoolLayout(
            address=cache.kv.data_ptr(),
            block_bytes=cache.block_bytes,
            blocks=cache.blocks,
            device=(cache.kv.device.index or 0) if cuda else 0,
            memory="VRAM" if cuda else "DRAM",
        )
        self._agent = NixlAgent(f"{worker}-{secrets.token_hex(16)}", cache, self._pool)
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
    def pool(self) -> PoolLayout:
        return self._pool

    async def connect(self, metadata: bytes, pool: PoolLayout, epoch: str) -> Peer:
        check_pool(self._pool, pool)
        plain, place = unseal(metadata, self._agent.wire)
        near = place == self._agent.place != ""
        name = await self._reader.call(lambda: self._reader.connect(plain, pool, epoch, near))
        return Peer(name, pool)

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> Settlement:
        end = Settlement()
        try:
            check_read(peer.pool, self._pool, remote, local)
        except TransferFailed as error:
            end.fail(error)
            return end
        read = Read(
            peer=peer.name,
            bytes=len(remote) * self._pool.block_bytes,
            end=end,
            waiting=deque(slices(remote, local, max(1, SLICE_BYTES // self._pool.block_bytes))),
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
            log.warning("A peer that does not answer is still being read; the KV pool stays registered.")


class NixlAgent:
    """`reader.Agent` over NIXL and UCX. Only its reader's thread calls it."""

    def __init__(self, name: str, cache: KVCache, pool: PoolLayout) -> None:
        self.wire = ""
        self.place = ""
        self._name = name
        self._cache = cache  # keeps the memory alive as long as anything may write to it
        self._pool = pool
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._registered: Any = None
        self._blocks: Any = None
        self._rdma = False

    def open(self) -> bytes:
        """Start UCX and register the pool; the metadata for peers. Raises SetupError."""
        size = self._pool.blocks * self._pool.block_bytes
        with ucx.environment():
            nixl_agent, nixl_agent_config, self._errors = _load()
            try:
                config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self._agent = nixl_agent(self._name, config)
                if "UCX" not in self._agent.backends:
                    raise SetupError(f"The NIXL library has no UCX plugin. {WAY_OUT}")
                region = (self._pool.address, size, self._pool.device, "")
                self._registered = self._agent.register_memory([region], self._pool.memory, ["UCX"])
                self._blocks = self._prepare("NIXL_INIT_AGENT", self._pool)
                metadata: bytes = self._agent.get_agent_metadata()
            except self._errors as error:
                tls = os.environ.get("UCX_TLS", "all")
                raise SetupError(
                    f"UCX cannot start (UCX_TLS={tls}) or register {size} bytes: {error}. {WAY_OUT}"
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

    def prepare(self, peer: str, pool: PoolLayout) -> Any:
        try:
            return self._prepare(peer, pool)
        except self._errors as error:
            raise AgentError(str(error)) from error

    def _prepare(self, agent: str, pool: PoolLayout) -> Any:
        """One descriptor per block, as one row: (address, bytes, device, distance, count)."""
        row = (pool.address, pool.block_bytes, pool.device, pool.block_bytes, pool.blocks)
        return self._agent.prep_xfer_dlist(agent, np.array([row], dtype=np.uint64), pool.memory, ["UCX"])

    def make(self, theirs: Any, remote: Sequence[int], local: Sequence[int]) -> Any:
        # NIXL joins neighbouring blocks into one descriptor by itself.
        try:
            return self._agent.make_prepped_xfer(
                "READ",
                self._blocks,
                np.array(local, dtype=np.int32),
                theirs,
                np.array(remote, dtype=np.int32),
            )
        except self._errors as error:
            raise AgentError(str(error)) from error

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

    def remove(self, peer: str, blocks: Any) -> None:
        # UCX tears down a connection that failed step by step; an agent that goes before aborts the process.
        for _ in range(TEARDOWN_STEPS):
            self.progress()
        if blocks is not None:
            self._tidy(blocks.release)
        self._tidy(lambda: self._agent.remove_remote_agent(peer))

    def progress(self) -> None:
        self._agent.get_new_notifs(["UCX"])

    def transport(self, pool: PoolLayout, copied: bool) -> str:
        memory = "VRAM" if "VRAM" in (pool.memory, self._pool.memory) else "DRAM"
        return ucx.transport(memory, copied, self._rdma)

    def close(self) -> None:
        if self._blocks is not None:
            self._tidy(self._blocks.release)
        if self._registered is not None:
            self._tidy(lambda: self._agent.deregister_memory(self._registered, ["UCX"]))
        self._agent = self._blocks = self._registered = None

    def _tidy(self, step: Callable[[], object]) -> None:
        """Letting go of something that is of no more use: a failure is worth a line, and no more."""
        try:
            step()
        except self._errors as error:
            log.warning("NIXL did not let go of something: %s", error)


def is_installed() -> bool:
    """Whether the library is there at all."""
    return importlib.util.find_spec("nixl") is not None


def try_out() -> str:
    """Start UCX as a worker does, register some memory and let go: what there is. Raises SetupError."""
    memory = np.zeros(SELF_TEST_BYTES, dtype=np.uint8)
    with ucx.environment():
        nixl_agent, nixl_agent_config, errors = _load()
        try:
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            agent = nixl_agent(f"trial-{secrets.token_hex(8)}", config)
            if "UCX" not in agent.backends:
                raise SetupError(f"The NIXL library has no UCX plugin. {WAY_OUT}")
            region = (memory.ctypes.data, SELF_TEST_BYTES, 0, "")
            agent.deregister_memory(agent.register_memory([region], "DRAM", ["UCX"]), ["UCX"])
            plugins = ", ".join(sorted(agent.get_plugin_list()))
        except errors as error:
            tls = os.environ.get("UCX_TLS", "all")
            raise SetupError(f"UCX cannot start (UCX_TLS={tls}): {error}. {WAY_OUT}") from error
    return f"NIXL {importlib.metadata.version('nixl')} with UCX; plugins: {plugins}"


def _load() -> tuple[Any, Any, tuple[type[Exception], ...]]:
    """NIXL's agent, its configuration and its errors, without what importing it does to logging."""
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _bindings, nixl_agent, nixl_agent_config
    except ImportError as error:
        raise SetupError(
            f"The NIXL library cannot be loaded ({error}). Install it with pip install 'baton[nixl]', "
            "or use --transfer loopback if all workers are in one process."
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions
    chatter = logging.getLogger("nixl")  # it writes a line on each agent to stdout
    chatter.handlers.clear()
    chatter.propagate = True
    chatter.setLevel(logging.WARNING)
    members = vars(_bindings).values()
    errors = [value for value in members if isinstance(value, type) and issubclass(value, Exception)]
    return nixl_agent, nixl_agent_config, tuple(errors)
