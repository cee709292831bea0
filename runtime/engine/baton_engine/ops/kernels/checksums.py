"""Sums of the words of blocks, from which `baton_engine.transfer.integrity` makes checksums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024
"""Words that a program reads at a time."""

TILE = 8 * CHUNK
"""Words that a program sums: 64 KiB, so that the blocks of one prompt occupy the whole device."""


@triton.jit
def _mixed_sums(
    words, blocks, sums, size, words_stride, run, stride, begin, key, first, second,
    TILE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    start = tl.program_id(1) * TILE
    total = tl.zeros((CHUNK,), dtype=tl.uint64)
    for step in range(TILE // CHUNK):
        at = start + step * CHUNK + tl.arange(0, CHUNK)
        inside = at < size
        word = tl.load(words + block * words_stride + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
        position = at // run * stride + begin + at % run + 1
        x = word ^ (position.to(tl.uint64) * key.to(tl.uint64))
        x = (x ^ (x >> 30)) * first.to(tl.uint64)
        x = (x ^ (x >> 27)) * second.to(tl.uint64)
        total += tl.where(inside, x ^ (x >> 31), 0)
    sum_ = tl.sum(total, axis=0).to(tl.int64, bitcast=True)
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), sum_)


def mixed_sums(
    words: Tensor, blocks: Tensor, keys: tuple[int, int, int], layout: tuple[int, int, int]
) -> Tensor:
    """
    Return the sums [B] int64 of `integrity.word_sums` of rows `blocks` [B] of `words` [blocks, W] int64.

    Rows may be parts of longer ones. `keys` are signed: the factor of positions, and those of the two
    multiplications. `layout` are `integrity.WordLayout`.
    """
    size = words.shape[1]
    sums = torch.empty((len(blocks), triton.cdiv(size, TILE)), dtype=torch.int64, device=words.device)
    if len(blocks):
        sizes = size, words.stride(0)
        _mixed_sums[tuple(sums.shape)](
            words, blocks, sums, *sizes, *layout, *keys, TILE=TILE, CHUNK=CHUNK, enable_fp_fusion=True
        )
    return sums.sum(1)
