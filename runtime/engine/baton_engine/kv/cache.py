"""
The memory behind the blocks.

Block-outermost layout, `kv[block, layer, 2, kv_head, slot, dim]`: all that a block holds lies
together, so that one block is one descriptor for the transfer (2 MiB for an 8B model, where the
layer-outermost layout has 64 pieces of 32 KiB). Block 0 is never handed out: padding points to it.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from baton_engine.model.spec import ModelSpec

BLOCK_SIZE = 16
"""Tokens in a block."""


def block_bytes(spec: ModelSpec, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of one block of all layers."""
    return spec.kv_values_per_token * block_size * dtype.itemsize


class KVCache:
    """The tensors of all blocks of one worker."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self.block_size = block_size
        # Zeroed: what lies beyond a request's last token is multiplied by a weight of 0, and 0 * NaN is NaN.
        self.kv: Tensor = _zeros(
            (blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_dim), dtype, device
        )

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.spec, self.kv.dtype, self.block_size)

    def block(self, number: int) -> memoryview:
        """The bytes of block `number`, writable, not copied. CPU only."""
        return self.kv[number].view(torch.uint8).numpy().reshape(-1).data


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zero without being written: memory is taken when a block is first used.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A head's keys of one block are 2 KiB: with small pages, attention waits for address translation.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
