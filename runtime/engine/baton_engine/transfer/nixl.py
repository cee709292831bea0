"""
The agent of NIXL. No other module imports NIXL.

NIXL's progress thread is disabled, because it uses a whole core. Its listening thread is disabled, because it
would send metadata to any client. The agent belongs to the thread of one `BlockReader`.

Known defect of NIXL 1.5.1 with UCX 1.23: if a reader dies during a READ over TCP, the other process purges
its unsent replies with uninitialized fields. An agent on the main thread, with recycled memory, crashed every
time. An agent on a separate thread with its own arena did not crash in 60 attempts. Reads over shared memory
and RDMA do not involve the other process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton_api import installing
from baton_api.errors import SetupError
from baton_api.messages import PoolLayout
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import ucx
from baton_engine.transfer.parts import DRAM, VRAM, CommonPieces, common_pieces
from baton_engine.transfer.reader import AgentError

log = logging.getLogger(__name__)

SELF_TEST_BYTES = 1024 * 1024

TEARDOWN_STEPS = 50
"""Number of calls in which UCX tears down a failed connection, 3 us each."""

WAY_OUT = "Check UCX_TLS and UCX_NET_DEVICES, or use --transfer loopback if all workers are in one process."


class NixlAgent:
    """Implementation of `reader.Agent` with NIXL and UCX. Used on the reader's thread only."""

    def __init__(self, name: str, cache: KVCache, pool: PoolLayout) -> None:
        """`pool` is `pool_layout` of `cache`, the part of one rank."""
        self.wire = ""
        self.host_id = ""
        self._name = name
        self._cache = cache  # keeps the memory alive while peers may write to it
        self._pool = pool
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._registered: Any = None
        self._blocks: Any = None
        self._rdma = False

    def open(self) -> bytes:
        """Start UCX, register the pool, and return the metadata for peers. Raises SetupError."""
        pool = self._pool
        size = pool.blocks * pool.block_bytes
        self._cache.streams.use()  # without the device's context, UCX registers VRAM as host memory
        with ucx.environment():
            nixl_agent, nixl_agent_config, self._errors = _load()
            try:
                config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self._agent = nixl_agent(self._name, config)
                if "UCX" not in self._agent.backends:
                    raise SetupError(f"The NIXL library has no UCX plugin. {WAY_OUT}")
                regions = [(pool.address, size, pool.device, "")]
                self._registered = self._agent.register_memory(regions, pool.memory, ["UCX"])
                self._blocks = self._prepare("NIXL_INIT_AGENT", pool)
                metadata: bytes = self._agent.get_agent_metadata()
            except self._errors as error:
                tls = os.environ.get("UCX_TLS", "all")
                raise SetupError(
                    f"UCX cannot start (UCX_TLS={tls}) or cannot register {size} bytes: {error}. {WAY_OUT}"
                ) from error
            self.wire = ucx.wire()
            self.host_id = ucx.host_id()
        self._rdma = ucx.has_rdma()
        return metadata

    def add(self, metadata: bytes) -> str:
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
            return name.decode(errors="replace")
        except self._errors as error:
            raise AgentError(str(error)) from error

    def prepare(self, peer: str, pools: tuple[PoolLayout, ...]) -> _Blocks:
        (pool,) = pools
        common = common_pieces(self._pool, self._cache.parts, pool, self._cache.sections)
        try:
            return _Blocks(peer, pool, common, self._prepare(peer, pool))
        except self._errors as error:
            raise AgentError(str(error)) from error

    def _prepare(self, agent: str, pool: PoolLayout) -> Any:
        """Create one descriptor per block, from a row (address, bytes, device, distance, count)."""
        row = pool.address, pool.block_bytes, pool.device, pool.block_bytes, pool.blocks
        return self._agent.prep_xfer_dlist(agent, np.array([row], dtype=np.uint64), pool.memory, ["UCX"])

    def make(self, theirs: _Blocks, remote: Sequence[int], local: Sequence[int]) -> Any:
        try:
            if theirs.pool.block_bytes != self._pool.block_bytes:
                return self._make_of_pieces(theirs, remote, local)
            # NIXL merges adjacent blocks into one descriptor.
            numbers = np.array(local, dtype=np.int32), np.array(remote, dtype=np.int32)
            return self._agent.make_prepped_xfer(
                "READ", self._blocks, numbers[0], theirs.prepared, numbers[1]
            )
        except self._errors as error:
            raise AgentError(str(error)) from error

    def _make_of_pieces(self, theirs: _Blocks, remote: Sequence[int], local: Sequence[int]) -> Any:
        # Prepared lists of all pieces of all blocks could need gigabytes.
        common = theirs.common
        return self._agent.initialize_xfer(
            "READ",
            self._described(local, self._pool, common.ours, common.sizes),
            self._described(remote, theirs.pool, common.theirs, common.sizes),
            theirs.peer,
            backends=["UCX"],
        )

    def _described(
        self, blocks: Sequence[int], pool: PoolLayout, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Any:
        """Return descriptors of the pieces at `offsets` of `blocks`, piece by piece."""
        starts = np.array(blocks, dtype=np.uint64) * np.uint64(pool.block_bytes) + np.uint64(pool.address)
        rows = np.empty((len(offsets), len(blocks), 3), dtype=np.uint64)  # address, bytes, device
        rows[:, :, 0] = starts + np.array(offsets, dtype=np.uint64)[:, None]
        rows[:, :, 1] = np.array(sizes, dtype=np.uint64)[:, None]
        rows[:, :, 2] = pool.device
        return self._agent.get_xfer_descs(rows.reshape(-1, 3), pool.memory)

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
        on_device = VRAM in (pools[0].memory, self._pool.memory)
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
    """The blocks of a peer's rank."""

    peer: str
    pool: PoolLayout
    common: CommonPieces
    prepared: Any
    """Descriptors, one for each block."""


def is_installed() -> bool:
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
            f"Cannot load the NIXL library ({error}). Install it with {installing.command('nixl')}, or use "
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
