"""
The bytes of blocks: those of the pool, and what a tier keeps.

A tier has one `Store`, and calls it from its two threads. `MemoryStore` is the host's memory. All of it is
allocated at the start, and touched while the engine has nothing to do: a virtual machine clears new memory at
0.4 to 0.5 GB/s, which restoring and copying would otherwise wait for.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from baton_api.errors import SetupError
from baton_api.kv_events import HOST_MEMORY
from baton_api.setting_types import show_size
from baton_engine.kv.cache import KVCache
from baton_engine.kv.new_memory import populate
from baton_engine.streams import Streams
from baton_engine.tiers.index import Place
from baton_engine.tiers.slab import Bytes, sum_of

Read = Callable[[int, Bytes], int]
"""Copies the bytes of a block of the pool, or of a slot of the tier above. Returns the copy's sum."""


class Copy(NamedTuple):
    """A block to be copied to a slot."""

    name: bytes
    parent: bytes
    block: int
    """Where it is in the pool, or in the tier above."""
    slot: int
    sum: int | None = None
    """xxh3-64 of its bytes. None: not known, because the pool has them."""


class Store(Protocol):
    """Memory or a disk with slots for blocks."""

    @property
    def name(self) -> str:
        """In metrics and in `usage`."""
        ...

    @property
    def medium(self) -> str:
        """In KV events."""
        ...

    @property
    def first_bytes_per_s(self) -> float:
        """Assumed speed of the first restore."""
        ...

    @property
    def free(self) -> Sequence[int]:
        """Slots without one of the blocks in `found`, in the order in which they are used."""
        ...

    @property
    def found(self) -> Sequence[tuple[bytes, Place]]:
        """Blocks of an earlier process, by their chain hashes, the one to be dropped first before others."""
        ...

    def write(self, copies: Sequence[Copy], read: Read) -> list[int | None]:
        """
        Copy blocks, and return their sums; None for one that has other bytes than `Copy.sum` says.

        Raises OSError if that failed: no slot is valid then.
        """
        ...

    def expect(self, slots: Sequence[int]) -> None:
        """These slots are read next. Raises OSError."""
        ...

    def read(self, slot: int) -> Bytes:
        """Return the bytes of a slot, valid until the next call. May take long. Raises OSError."""
        ...

    def prepare(self) -> bool:
        """Do a part of what makes later writes faster, for some milliseconds. False: nothing is left."""
        ...

    def clear(self) -> None:
        """Forget all blocks: a later process does not find them. Raises OSError."""
        ...

    def close(self) -> None:
        """Release everything. No thread uses it any more."""
        ...


class PoolBytes:
    """Reads and writes whole blocks. Any thread may use it; copies of large blocks release the GIL."""

    def __init__(self, cache: KVCache) -> None:
        self.block_bytes = cache.block_bytes
        self._streams: Streams = cache.streams
        self._rows = cache.kv.view(cache.blocks, -1).view(torch.uint8)
        self._on_host = cache.kv.device.type == "cpu"
        self._host: Bytes | None = self._rows.numpy() if self._on_host else None

    def read(self, block: int, out: Bytes) -> int:
        """Copy a block, which its device has written, to `out`. Returns its sum."""
        if self._host is not None:
            row = self._host[block]
            value = sum_of(row)
            np.copyto(out, row)
            return value
        self._streams.use()
        with self._streams.side_stream():
            np.copyto(out, self._rows[block].cpu().numpy())
        return sum_of(out)

    def write(self, block: int, data: Bytes, expected: int) -> bool:
        """Copy `data` to a block that nothing else uses. Returns whether its sum is right."""
        if self._host is not None:
            row = self._host[block]
            np.copyto(row, data)
            return sum_of(row) == expected
        if sum_of(data) != expected:
            return False
        self._streams.use()
        with self._streams.side_stream():
            self._rows[block].copy_(torch.from_numpy(data if data.flags.writeable else data.copy()))
            self._streams.record().wait()
        return True


PREPARED_BYTES = 8 * 2**20
"""Memory that is touched at once: 20 ms."""


class MemoryStore:
    """A `Store` of `size` bytes at most."""

    name = "memory"
    medium = HOST_MEMORY
    first_bytes_per_s = 2e9
    found = ()

    def __init__(
        self,
        size: int,
        block_bytes: int,
        free: int | None,
        populate: Callable[[int, int], bool] = populate,
    ) -> None:
        """`free`: memory beside the KV cache. Raises SetupError if it is less, or `size` is no block."""
        self.slots = size // block_bytes
        if not self.slots:
            raise SetupError(
                f"--kv-memory-tier {show_size(size)} is less than one KV block of {show_size(block_bytes)}."
            )
        if free is not None and size > free:
            raise SetupError(
                f"--kv-memory-tier requires {show_size(size)}, but only {show_size(free)} are free beside "
                "the KV cache. Reduce the size of either, or stop other processes."
            )
        self.free = range(self.slots)
        total = self.slots * block_bytes
        try:
            self._pages = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise SetupError(f"Cannot allocate --kv-memory-tier {show_size(size)}: {error}.") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._pages, dtype=np.uint8)
        self._rows: Bytes = self._bytes.reshape(self.slots, block_bytes)
        self._populate = populate
        self._touched = 0

    def write(self, copies: Sequence[Copy], read: Read) -> list[int | None]:
        return [read(copy.block, self._rows[copy.slot]) for copy in copies]

    def expect(self, slots: Sequence[int]) -> None:
        return

    def read(self, slot: int) -> Bytes:
        row: Bytes = self._rows[slot]
        return row

    def prepare(self) -> bool:
        part = self._bytes[self._touched : self._touched + PREPARED_BYTES]
        if not self._populate(part.ctypes.data, len(part)):
            # Writes each page, and changes none. The thread that writes blocks calls this.
            part[:: mmap.PAGESIZE] |= 0
        self._touched += PREPARED_BYTES
        return self._touched < len(self._bytes)

    def clear(self) -> None:
        return

    def close(self) -> None:
        return  # the memory is freed with the last array of it


Result = TypeVar("Result")


class TierThread:
    """Does one piece of work after the other, or as many at once as it has threads."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        done: Future[Result] = Future()

        def run() -> None:
            if self._closed:
                done.cancel()
            if not done.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._work.put(run)
        return done

    def close(self, within_s: float) -> bool:
        """Leave out what has not begun. Returns whether the threads end within this time."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and the arrays that it has
