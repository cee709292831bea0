"""Which memory of a KV cache is touched ahead, and that an engine does it only without requests."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from functools import partial

import pytest
import torch

from baton_engine.kv.cache import KVCache
from baton_engine.kv.new_memory import AHEAD_BYTES, PART_BYTES, POPULATE_WRITE, NewMemory, next_part
from tests.engine.fake_model import SPEC, make_cache
from tests.engine.serving import Prefiller, Serving, request_of
from tests.engine.test_interruption import until

MIB = 2**20
PLENTY = 2**40
BLOCK_TOKENS = 64
"""Blocks of 1 KiB in the fake model's cache."""


@pytest.mark.parametrize(
    ("touched", "used", "size", "free", "expected"),
    [
        (0, 0, 8 * MIB, PLENTY, (0, 2 * MIB)),
        (2 * MIB, 0, 8 * MIB, PLENTY, (2 * MIB, 4 * MIB)),
        (2 * MIB, 5 * MIB, 8 * MIB, PLENTY, (4 * MIB, 6 * MIB)),
        (6 * MIB, 0, 7 * MIB, PLENTY, (6 * MIB, 7 * MIB)),
        (8 * MIB, 8 * MIB, 8 * MIB, PLENTY, (8 * MIB, 8 * MIB)),
        (AHEAD_BYTES + MIB, MIB, PLENTY, PLENTY, (AHEAD_BYTES + MIB, AHEAD_BYTES + MIB)),
        (AHEAD_BYTES + MIB, 2 * MIB, PLENTY, PLENTY, (AHEAD_BYTES + MIB, AHEAD_BYTES + 2 * MIB)),
        (0, 0, 8 * MIB, AHEAD_BYTES + 2 * MIB, (0, 2 * MIB)),
        (0, 0, 8 * MIB, AHEAD_BYTES + 2 * MIB - 1, (0, 0)),
        (0, 0, 8 * MIB, None, (0, 0)),
    ],
    ids=[
        "the first part",
        "the next part",
        "memory that blocks have used meanwhile is passed over",
        "the end of the cache",
        "nothing is left",
        "enough beyond the used blocks",
        "used blocks allow more",
        "as much memory is left free",
        "less would be left free",
        "unknown free memory",
    ],
)
def test_next_part_is(
    touched: int, used: int, size: int, free: int | None, expected: tuple[int, int]
) -> None:
    assert next_part(touched, used, size, lambda: free) == expected


@pytest.mark.parametrize("seed", range(20))
def test_law_touched_memory_is_bounded_whatever_is_used(seed: int) -> None:
    chance = random.Random(seed)
    size, free, touched, used = chance.randrange(2 * AHEAD_BYTES), chance.randrange(4 * AHEAD_BYTES), 0, 0
    for _ in range(500):
        used = min(size, used + chance.choice((0, 0, chance.randrange(8 * MIB))))
        start, end = next_part(touched, used, size, partial(int, free))
        assert touched <= start <= end <= max(touched, min(size, used + AHEAD_BYTES))
        assert end - start <= PART_BYTES
        free -= end - start
        assert start == end or free >= AHEAD_BYTES
        touched = end


def resident(address: int, size: int) -> int:
    """Bytes of a mapping that have memory."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def populates() -> bool:
    """Whether this system gives a page memory without a write."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(POPULATE_WRITE)
        except OSError:
            return False
    return True


needs_populating = pytest.mark.skipif(
    not populates(), reason="memory is touched ahead on Linux from 5.14 on only"
)


@needs_populating
def test_touched_memory_keeps_its_bytes() -> None:
    cache = make_cache(6 * 1024, BLOCK_TOKENS)
    kv = cache.kv
    kv[5000] = 7.0
    memory = NewMemory(cache, lambda: PLENTY)
    while memory.touch(1):
        pass
    assert resident(kv.data_ptr(), 6 * MIB) == 6 * MIB
    assert kv[5000].eq(7.0).all() and kv.sum() == kv[5000].sum()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is touched ahead on Linux only")
def test_touching_ends_where_pages_cannot_be_populated() -> None:
    memory = NewMemory(make_cache(6 * 1024, BLOCK_TOKENS), lambda: PLENTY, lambda address, size: False)
    assert memory.touch(1)
    assert not memory.touch(1)


def test_memory_of_a_rank_is_not_touched() -> None:
    """The worker could touch its own rank's only."""
    device = torch.device("cpu")
    cache = KVCache(SPEC, 6 * 1024, torch.float32, device, BLOCK_TOKENS, ranks=2)
    assert not NewMemory(cache, lambda: PLENTY).touch(1)


@needs_populating
def test_engine_touches_memory_once_it_has_no_request() -> None:
    with Serving(8 * 1024, BLOCK_TOKENS, local_prefill_tokens=0) as serving:
        address = serving.cache.kv.data_ptr()
        peer = Prefiller(serving)
        serving.submit(request_of("a", remote=peer))
        fetch = peer.fetch()
        for _ in range(2):  # steps without work, beside the fetch
            serving.engine.lend("none", ()).result()
        assert resident(address, 8 * MIB) <= PART_BYTES
        peer.succeed(fetch)
        until(lambda: resident(address, 8 * MIB) == 8 * MIB)
