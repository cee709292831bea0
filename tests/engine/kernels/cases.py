"""Batches over a paged cache, for tests of the kernels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import KVCache
from baton_engine.spec import ModelSpec

GUARD = 256
"""Numbers of NaN on each side of `guarded` values: a multiple of what a device loads at once."""

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def crossed(shapes: Iterable[str], models: Iterable[str], quick: str) -> list[Any]:
    """Return a case for each pair. Those of the model `quick`, and of mixed shapes, are not slow."""
    return [
        pytest.param(
            shape,
            model,
            id=f"{shape}, {model}",
            marks=() if model == quick or "mixed" in shape else pytest.mark.slow,
        )
        for shape, model in itertools.product(shapes, models)
    ]


def batch_of(shapes: Sequence[tuple[int, int]], chance: random.Random, block_size: int = 16) -> Batch:
    """Rows of (start, new tokens) over blocks in any order."""
    needed = [-(-(start + count) // block_size) for start, count in shapes]
    free = chance.sample(range(1, sum(needed) + 9), sum(needed))
    rows = [
        BatchRow([0] * count, start, [free.pop() for _ in range(blocks)], 1)
        for (start, count), blocks in zip(shapes, needed, strict=True)
    ]
    return Batch(rows, block_size, DEVICE)


def guarded(values: Tensor) -> Tensor:
    """Return a contiguous copy of `values` in memory with NaN before and behind it, whatever its shape."""
    memory = torch.full((values.numel() + 2 * GUARD,), torch.nan, dtype=values.dtype, device=values.device)
    inside = memory[GUARD:-GUARD].view(values.shape)
    inside.copy_(values)
    return inside


def caches(spec: ModelSpec, batch: Batch, dtype: torch.dtype) -> tuple[KVCache, KVCache]:
    """Two caches with the same keys and values of `batch`. The rest is 0 in the first, NaN in the second."""
    blocks = 1 + max(max(row.blocks) for row in batch.rows)
    clean, stale = (KVCache(spec, blocks, dtype, DEVICE, batch.block_size) for _ in range(2))
    stale.kv.fill_(torch.nan)
    for row in batch.rows:
        for number, block in enumerate(row.blocks):
            used = min(batch.block_size, row.context - number * batch.block_size)
            clean.kv[block, ..., :used, :].normal_()
            stale.kv[block, ..., :used, :] = clean.kv[block, ..., :used, :]
    return clean, stale
