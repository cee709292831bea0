"""How many blocks the cache gets, by what is asked and what there is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from baton_api.errors import SetupError
from baton_engine.kv.cache import (
    BLOCK_SIZE,
    LEAST_BLOCKS,
    MOST_BLOCKS,
    RESERVED_BLOCKS,
    MemoryBudget,
    cache_blocks,
)
from baton_engine.settings import WorkerSettings

BLOCK = 1000
CONTEXT = 1 << 22
"""Tokens: so long that it bounds nothing."""
GPU = MemoryBudget(at_start=100_000, weights=30_000, free=65_000, gpu=True)
CPU = MemoryBudget(at_start=100_000, weights=30_000, free=65_000, gpu=False)


def blocks(memory: MemoryBudget = CPU, **sizes: Any) -> int:
    return cache_blocks(WorkerSettings.model_validate(sizes), memory, BLOCK, CONTEXT)


@pytest.mark.parametrize(
    ("memory", "sizes", "expected"),
    [
        (CPU, {"kv_cache_memory": 20_999}, 20),
        (CPU, {"kv_cache_tokens": 160}, 11),
        (CPU, {"kv_cache_tokens": 161}, 12),
        (CPU, {"kv_cache_tokens": 1}, 2),
        (CPU, {"memory_share": 0.8}, 50),
        (GPU, {"memory_share": 0.8}, 50),
        (CPU, {"memory_share": 0.8, "kv_cache_tokens": 160}, 11),
        (CPU, {"memory_share": 0.4, "kv_cache_tokens": 100_000}, 10),
        (CPU, {"kv_cache_memory": 5_000, "kv_cache_tokens": 160}, 5),
        (CPU, {}, 6),
        (CPU, {"kv_cache_tokens": 48}, 4),
        (GPU, {}, 58),
        (replace(GPU, working=10_000), {}, 49),
        (replace(GPU, working=10_000), {"memory_share": 0.8}, 40),
    ],
    ids=[
        "bytes, as many whole blocks as fit",
        "tokens, and the block that is padding",
        "tokens are rounded up",
        "one token",
        "a share is for weights and cache together",
        "on a GPU as on a CPU",
        "tokens bound a share",
        "a share bounds tokens",
        "bytes bound tokens",
        "nothing asked on a CPU: a tenth of what is free",
        "tokens alone are exact, whatever the default would be",
        "nothing asked on a GPU: nine tenths of what is free",
        "... and of what passes leave",
        "a share is also for passes",
    ],
)
def test_cache_blocks_configured_size_is_used(
    memory: MemoryBudget, sizes: dict[str, Any], expected: int
) -> None:
    assert blocks(memory, **sizes) == expected


@pytest.mark.parametrize(
    ("memory", "sizes", "parts"),
    [
        (CPU, {"kv_cache_memory": 9000, "memory_share": 0.5}, ("--kv-cache-memory", "only one of them")),
        (CPU, {"memory_share": 0.3}, ("weights need 30.0 kB", "--memory-share above 0.32")),
        (
            MemoryBudget(at_start=20_000, weights=30_000, free=9_000, gpu=True),
            {"memory_share": 0.9},
            ("would have 0 B", "Use a smaller model"),
        ),
        (CPU, {"memory_share": 1.0}, ("--memory-share requires 70.0 kB", "65.0 kB are free")),
        (CPU, {"kv_cache_tokens": 16_000}, ("--kv-cache-tokens requires 1.00 MB", "are free")),
        (CPU, {"kv_cache_memory": 66_000}, ("--kv-cache-memory requires 66.0 kB", "65.0 kB are free")),
        (
            replace(GPU, working=10_000),
            {"kv_cache_memory": 60_000},
            ("requires 60.0 kB", "65.0 kB are free and passes need 10.0 kB"),
        ),
        (
            replace(GPU, working=10_000),
            {"memory_share": 0.4},
            ("weights need 30.0 kB, passes 10.0 kB", "above 0.42"),
        ),
        (
            MemoryBudget(at_start=None, weights=1, free=None, gpu=False),
            {"memory_share": 0.5},
            ("is unknown", "--kv-cache-memory"),
        ),
    ],
    ids=[
        "bytes and a share",
        "a share that the weights use up",
        "a model larger than the memory",
        "a share larger than what is left",
        "tokens beyond the memory",
        "bytes beyond the memory",
        "bytes beyond what passes leave",
        "a share that weights and passes use up",
        "a machine that is unknown",
    ],
)
def test_cache_blocks_too_large_is_rejected_with_numbers(
    memory: MemoryBudget, sizes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(SetupError) as caught:
        blocks(memory, **sizes)
    for part in parts:
        assert part in caught.value.message


def test_cache_blocks_of_tiny_model_are_bounded_by_default() -> None:
    vast = MemoryBudget(at_start=10**9, weights=0, free=10**9, gpu=True)
    assert blocks(vast, memory_share=0.9) == blocks(vast) == MOST_BLOCKS
    assert blocks(vast, kv_cache_memory=900_000_000) == 900_000


def test_law_a_cache_fits_its_bounds_or_there_is_none() -> None:
    random_number = random.Random(7)
    settings = WorkerSettings()
    for _ in range(2000):
        start = random_number.randrange(1, 200_000)
        weights = random_number.randrange(0, 100_000)
        memory = MemoryBudget(
            at_start=start,
            weights=weights,
            free=max(0, start - weights),
            gpu=random_number.random() < 0.5,
            working=random_number.choice((0, random_number.randrange(50_000))),
        )
        share = random_number.choice((0.0, random_number.random()))
        tokens = random_number.choice((0, random_number.randrange(1, 3000)))
        changed = settings.model_copy(update={"memory_share": share, "kv_cache_tokens": tokens})
        try:
            count = cache_blocks(changed, memory, BLOCK, CONTEXT)
        except SetupError:
            continue
        assert count >= LEAST_BLOCKS
        assert count * BLOCK + memory.working <= (memory.free or 0)
        assert not share or count * BLOCK + weights + memory.working <= share * start
        assert not tokens or (count - 1) * 16 < tokens + 16


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        pytest.param(8192, 4 * 8192, id="four contexts"),
        pytest.param(512, 32_768, id="a short context"),
        pytest.param(131_072, 64_000 - 16, id="a long context, bounded by a tenth of the free memory"),
    ],
)
def test_cache_blocks_by_default_are_bounded_by_context(context: int, expected: int) -> None:
    """A small model on a large machine takes what its requests can use, not a tenth of the memory."""
    memory = MemoryBudget(at_start=50_000_000, weights=1, free=40_000_000, gpu=False)
    blocks_by_default = cache_blocks(WorkerSettings(), memory, BLOCK, context)
    assert (blocks_by_default - RESERVED_BLOCKS) * BLOCK_SIZE == expected
    assert cache_blocks(WorkerSettings(memory_share=0.5), memory, BLOCK, context) == 24_999
    vast = MemoryBudget(at_start=200_000_000, weights=1, free=200_000_000, gpu=True)
    assert cache_blocks(WorkerSettings(), vast, BLOCK, context) == MOST_BLOCKS
