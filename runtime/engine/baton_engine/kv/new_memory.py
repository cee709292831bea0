"""
Memory that the blocks of a KV cache will use next, touched while the engine has no request.

The system clears a page when it is first written. A virtual machine may have to get the page from its host
before that, at 0.3 to 0.5 GB/s, and prompts waited for it. Blocks are handed out from the lowest number on,
so it is known which memory is used next. Only AHEAD_BYTES beyond the used blocks are touched: a worker with
little to do stays small. As much is left free, of the machine's memory and of a container's with cgroup v2;
the limit of a container with cgroup v1 is unknown.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

from baton_engine import machine
from baton_engine.kv.cache import KVCache

AHEAD_BYTES = 256 * 2**20
"""Touched beyond the blocks that have been used: 11,000 tokens of SmolLM2-135M, 2,048 of Llama-3.1-8B, whose
longer prompts take so much longer that new memory does not matter."""

PART_BYTES = 2 * 2**20
"""Touched at once, while a request that arrives waits: 6 ms if the host has to give it, otherwise 0.3 ms."""

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: gives pages memory as a write would, and changes no byte, so that others
may write blocks meanwhile."""


def next_part(touched: int, used: int, size: int, free: Callable[[], int | None]) -> tuple[int, int]:
    """
    Return start and end of the bytes to touch next, both equal if there are none.

    Of a cache of `size` bytes, those below `touched` have been touched, and those below `used` belong to
    blocks that have been used. `free` returns the free memory in bytes, or None: then nothing is touched.
    """
    start = min(max(touched, used // PART_BYTES * PART_BYTES), size)
    end = min(start + PART_BYTES, used + AHEAD_BYTES, size)
    if end > start:
        left = free()
        if left is not None and left - (end - start) >= AHEAD_BYTES:
            return start, end
    return start, start


def populate(address: int, size: int) -> bool:
    """Give the whole pages in a range of bytes memory. False: this kernel cannot, or there is none."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = max(0, address + size - first)
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), POPULATE_WRITE) == 0)


class NewMemory:
    """The memory of one cache on a CPU. It belongs to the engine's thread."""

    def __init__(
        self,
        cache: KVCache,
        free: Callable[[], int | None] = machine.free_memory,
        populate: Callable[[int, int], bool] = populate,
    ) -> None:
        """That of a rank is not touched, because other ranks would still wait for theirs."""
        self._kv = cache.kv
        self._free = free
        self._populate = populate
        touches = cache.kv.device.type == "cpu" and cache.ranks == 1 and sys.platform == "linux"
        self._size = cache.kv.numel() * cache.kv.itemsize if touches else 0
        self._touched = 0

    def touch(self, blocks: int) -> bool:
        """Touch the next part, if blocks below number `blocks` have been used. Return whether it did."""
        start, end = next_part(self._touched, self._size * blocks // len(self._kv), self._size, self._free)
        if start == end:
            return False
        self._touched = end if self._populate(self._kv.data_ptr() + start, end - start) else self._size
        return True
