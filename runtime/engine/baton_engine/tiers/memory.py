"""
A tier in the host's memory, behind the pool of a worker.

All of it is allocated at the start, and touched while the engine has nothing to do: a virtual machine clears
new memory at 0.4 to 0.5 GB/s, which restoring and copying would otherwise wait for.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np

from baton_api.errors import SetupError
from baton_api.kv_events import HOST_MEMORY
from baton_api.setting_types import show_size
from baton_engine.kv.new_memory import populate
from baton_engine.tiers.slab import Bytes
from baton_engine.tiers.store import Copy, Read

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
