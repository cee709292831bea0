"""
The memory behind the KV blocks, and how many blocks there are.

Block-outermost layout, `kv[block, layer, 2, kv_head, slot, dim]`: a block's bytes are contiguous, so one
block is one descriptor for the transfer (2 MiB for an 8B model, where the layer-outermost layout has 64
pieces of 32 KiB). Block 0 is never allocated: padding points to it.

The size is set in bytes, in tokens, or as a fraction of the memory, or derived from the free memory. Tokens
are an upper bound to the other three; bytes and a fraction exclude each other. The memory must be free:
memory promised twice ends with the process killed.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_engine.model.spec import ModelSpec
from baton_engine.settings import WorkerSettings

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


CACHE_SHARE = 0.1
"""Of the free memory, on a CPU: the machine is rarely ours alone."""

CACHE_LIMIT = 4 * 1024**3

CACHE_CONTEXTS = 4
"""Whole contexts of the model that a CPU's cache holds at most by default: more would mostly lie idle."""

LEAST_DEFAULT_TOKENS = 32_768
"""The same bound for models with a short context: 32 streams of 1,024 tokens."""

GPU_CACHE_SHARE = 0.9

MOST_BLOCKS = 131_072
"""With no size asked for: a tiny model could have millions, and bookkeeping costs memory too."""

RESERVED_BLOCKS = 1
"""Block 0 is padding."""

LEAST_BLOCKS = RESERVED_BLOCKS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of the device that holds the cache; None where nobody knows."""

    at_start: int | None
    """Free before the weights came."""
    weights: int
    free: int | None
    """Now."""
    gpu: bool


def cache_blocks(settings: WorkerSettings, memory: MemoryBudget, block: int, context: int) -> int:
    """Return the number of blocks of `block` bytes, the reserved one included.

    `context` is the number of tokens of the model's context; it bounds the default on a CPU.
    Raises SetupError for what there is no room for.
    """
    share, size = settings.memory_share, settings.kv_cache_memory
    if share and size:
        raise SetupError(
            "--kv-cache-memory gives the KV cache's size and --memory-share (--mem-fraction-static, "
            "--gpu-memory-utilization) has it worked out; give one of them."
        )
    tokens = (
        -(-settings.kv_cache_tokens // BLOCK_SIZE) + RESERVED_BLOCKS if settings.kv_cache_tokens else None
    )
    if size:
        flag, blocks = "--kv-cache-memory", size // block
    elif share:
        flag, size = "--memory-share", _shared(share, memory)
        blocks = min(size // block, MOST_BLOCKS)
    elif tokens is not None:
        flag, size, blocks = "--kv-cache-tokens", tokens * block, tokens
    else:
        flag, size = "", _unasked(memory)
        blocks = min(size // block, _most_by_default(memory, context))
    if blocks < LEAST_BLOCKS:
        raise SetupError(
            f"The KV cache would have {show_size(max(0, size))}, but {LEAST_BLOCKS} blocks of {BLOCK_SIZE} "
            f"tokens, the least there can be, take {show_size(LEAST_BLOCKS * block)}. "
            + _more(flag, memory, block)
        )
    blocks = blocks if tokens is None else min(blocks, tokens)
    if memory.free is not None and blocks * block > memory.free:
        raise SetupError(
            f"{flag or 'The KV cache'} asks for {show_size(blocks * block)}, but {show_size(memory.free)} "
            "are free here. Ask for less, or stop what else uses the memory."
        )
    return blocks


def _shared(share: float, memory: MemoryBudget) -> int:
    if memory.at_start is None:
        raise SetupError(
            "This machine does not tell how much memory is free, so there is nothing to take a "
            "--memory-share of. Give the KV cache's size: --kv-cache-memory 1GiB."
        )
    return int(share * memory.at_start) - memory.weights


def _unasked(memory: MemoryBudget) -> int:
    if memory.gpu:
        return int((memory.free or 0) * GPU_CACHE_SHARE)
    return CACHE_LIMIT if memory.free is None else min(CACHE_LIMIT, int(memory.free * CACHE_SHARE))


def _most_by_default(memory: MemoryBudget, context: int) -> int:
    if memory.gpu:
        return MOST_BLOCKS
    tokens = max(CACHE_CONTEXTS * context, LEAST_DEFAULT_TOKENS)
    return min(MOST_BLOCKS, -(-tokens // BLOCK_SIZE) + RESERVED_BLOCKS)


def _more(flag: str, memory: MemoryBudget, block: int) -> str:
    if flag == "--memory-share" and memory.at_start:
        least = (memory.weights + LEAST_BLOCKS * block) / memory.at_start
        way_out = f"above {least:.2f}" if least < 1 else "cannot be large enough; take a smaller model"
        return f"The weights alone take {show_size(memory.weights)}: a --memory-share {way_out}."
    return f"Give it more: --kv-cache-memory {-(-LEAST_BLOCKS * block // 2**20)}MiB."
