"""
The memory behind the KV blocks, and how many blocks there are.

The layout is block-outermost, `kv[block, layer, 2, kv_head, slot, dim]`. Latent attention has
one vector instead of a key and a value: `kv[block, layer, 1, 1, slot, dim]`. The bytes of a block are
contiguous, so a block is one descriptor of a transfer: 2 MiB for an 8B model. A layer-outermost layout would
have 64 pieces of 32 KiB. Block 0 is never allocated; padding refers to it.

With a draft head, a block has further layers. They are the memory of the head's own keys and values, and of
the state of the block's last computed token, with which the head computes the token after it (`HeadCache`).
So whoever has a block, by a transfer, from a tier or from the prefix cache, has all that drafts need. Ranks
divide each of these parts for itself (`Section`).

The size is set in bytes, in tokens, or as a fraction of the memory, or derived from the free memory. A number
of tokens limits the other three. Bytes and a fraction cannot be combined. The memory must be free, because
the kernel kills a process that uses more than the available memory.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_engine.settings import WorkerSettings
from baton_engine.spec import HeadSpec, ModelSpec
from baton_engine.streams import Streams, streams_of

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Tokens in a block."""

FLOAT8_CACHE = torch.uint8
"""Data type of a cache whose values are bits of float8 (e4m3). Only accelerators' kernels convert them."""


STATE_DTYPES = {FLOAT8_CACHE: torch.bfloat16}
"""Data types of the states of a draft head, by that of the cache. Others are equal."""


def block_layers(spec: ModelSpec, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Return the layers of a block: those of the model, and as many as a draft head needs memory."""
    if (head := spec.draft_head) is None:
        return spec.layers
    needed = head.layer.kv_values_per_token * block_size + head.stored_state * state_values(dtype)
    return spec.layers + -(-needed // (spec.kv_planes * spec.kv_heads * block_size * spec.head_dim))


def state_values(dtype: torch.dtype) -> int:
    """Return how many values of a cache of `dtype` one value of a state takes."""
    return STATE_DTYPES.get(dtype, dtype).itemsize // dtype.itemsize


def block_bytes(spec: ModelSpec, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> int:
    """Bytes of one block of all layers."""
    planes = block_layers(spec, dtype, block_size) * spec.kv_planes
    return planes * spec.kv_heads * spec.head_dim * block_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a rank's blocks: planes of equal size, of each of which every rank has an equal range."""

    planes: int
    plane_bytes: int
    """Bytes of this rank's range."""

    @property
    def bytes(self) -> int:
        return self.planes * self.plane_bytes


class KVCache:
    """The tensors of all blocks of one worker, or of one of its ranks."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
        rank: int = 0,
        ranks: int = 1,
        replicas: int = 1,
    ) -> None:
        """
        `spec` is that of the part of `rank`, which has an equal range of the key heads.

        `replicas` is the number of adjacent ranks that have the same range.
        """
        self.spec = spec
        self.rank = rank
        self.ranks = ranks
        self.replicas = replicas
        self.blocks = blocks
        self.block_size = block_size
        self.streams: Streams = streams_of(device)
        """Order the work on the blocks with readers and writers that the device does not know."""
        # Zeroed, because values after a request's last token are multiplied by 0, and 0 * NaN is NaN.
        self.kv: Tensor = _zeros(
            (
                blocks,
                block_layers(spec, dtype, block_size),
                spec.kv_planes,
                spec.kv_heads,
                block_size,
                spec.head_dim,
            ),
            dtype,
            device,
        )
        self.head: HeadCache | None = None if spec.draft_head is None else HeadCache(self, spec.draft_head)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The parts of a block in their order: the model's, and those of a draft head with unused memory."""
        spec, item = self.spec, self.kv.element_size()
        if (part := self.head) is None:
            return (_keys_and_values(self, spec.layers),)
        state = Section(1, part.states.shape[1] * part.states.element_size())
        used = (_keys_and_values(self, spec.layers), _keys_and_values(part, 1), state)
        rest = self.kv[0].numel() * item - sum(section.bytes for section in used)
        return (*used, Section(1, rest)) if rest else used

    @property
    def parts(self) -> int:
        """Number of different ranges of the key heads."""
        return self.ranks // self.replicas

    @property
    def part(self) -> int:
        """Number of the range that this rank has."""
        return self.rank // self.replicas

    @property
    def divisible_heads(self) -> int:
        """Number of ranges of key heads that ranks can divide at most, of the model and of a draft head."""
        own = self.spec.kv_heads * self.parts
        return own if self.head is None else math.gcd(own, self.head.divisible_heads)

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.spec, self.kv.dtype, self.block_size)

    def block(self, number: int) -> memoryview:
        """Return a writable view of the bytes of block `number`. CPU only."""
        return self.kv[number].view(torch.uint8).numpy().reshape(-1).data


class HeadCache(KVCache):
    """The part of a draft head in each block of a cache: `kv` of its layer, and a state. Views, no memory."""

    def __init__(self, cache: KVCache, head: HeadSpec) -> None:
        layer, flat = head.layer, cache.kv.view(cache.blocks, -1)
        self.spec, self.head = layer, None
        self.rank, self.ranks, self.replicas = cache.rank, cache.ranks, cache.replicas
        self.blocks, self.block_size, self.streams = cache.blocks, cache.block_size, cache.streams
        sizes = (1, layer.kv_planes, layer.kv_heads, cache.block_size, layer.head_dim)
        start = cache.spec.kv_values_per_token * cache.block_size
        end = start + math.prod(sizes)
        self.kv = flat[:, start:end].view(cache.blocks, *sizes)
        dtype = flat.dtype
        last = end + head.stored_state * state_values(dtype)
        self.states: Tensor = flat[:, end:last].view(STATE_DTYPES.get(dtype, dtype))
        """[blocks, N / state_parts] the state of the last computed token of each block, or a rank's part."""


def _keys_and_values(cache: KVCache, layers: int) -> Section:
    """Return the section of `layers` layers, whose planes are keys or values of a layer."""
    planes, item = cache.kv[0, 0], cache.kv.element_size()
    return Section(layers * planes.shape[0], planes[0].numel() * item)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # New pages are zero without a write, so memory is allocated at the first use of a block.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The keys of a head in one block are 2 KiB. Small pages would cause many TLB misses in attention.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


CACHE_SHARE = 0.1
"""Default fraction of the free memory on a CPU, which other processes use too."""

CACHE_LIMIT = 4 * 1024**3

CACHE_CONTEXTS = 4
"""Default maximum size on a CPU, in contexts of the model. A larger cache would mostly be unused."""

LEAST_DEFAULT_TOKENS = 32_768
"""Lower bound of this maximum for models with a short context: 32 streams of 1,024 tokens."""

GPU_CACHE_SHARE = 0.9

MOST_BLOCKS = 131_072
"""Maximum number of blocks if no size is set. A tiny model could have millions, which need memory for
metadata."""

RESERVED_BLOCKS = 1
"""Block 0 is padding."""

LEAST_BLOCKS = RESERVED_BLOCKS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of the cache's device in bytes. None: unknown."""

    at_start: int | None
    """Free memory before the weights were loaded."""
    weights: int
    free: int | None
    """Free memory now."""
    gpu: bool
    working: int = 0
    """Needed by the largest forward pass, beside weights and cache."""


def cache_blocks(settings: WorkerSettings, memory: MemoryBudget, block: int, context: int) -> int:
    """Return the number of blocks of `block` bytes, the reserved one included.

    `context` is the number of tokens of the model's context; it bounds the default on a CPU.
    Raises SetupError if the memory is insufficient or the settings contradict each other.
    """
    share, size = settings.memory_share, settings.kv_cache_memory
    if share and size:
        raise SetupError(
            "--kv-cache-memory and --memory-share (--mem-fraction-static, --gpu-memory-utilization) both set "
            "the size of the KV cache. Set only one of them."
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
            f"The KV cache would have {show_size(max(0, size))}, but the minimum of {LEAST_BLOCKS} blocks of "
            f"{BLOCK_SIZE} tokens needs {show_size(LEAST_BLOCKS * block)}. " + _more(flag, memory, block)
        )
    blocks = blocks if tokens is None else min(blocks, tokens)
    if memory.free is not None and blocks * block > memory.free - memory.working:
        working = f" and passes need {show_size(memory.working)}" if memory.working else ""
        raise SetupError(
            f"{flag or 'The KV cache'} requires {show_size(blocks * block)}, but only "
            f"{show_size(memory.free)} are free{working}. Reduce the size, or stop other processes."
        )
    return blocks


def open_cache(
    settings: WorkerSettings,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    memory: MemoryBudget,
    beside: int = 0,
    allocate: Callable[[int, torch.dtype, torch.device], KVCache] | None = None,
) -> KVCache:
    """
    Allocate the KV cache of a worker. Raises SetupError as `cache_blocks`, or if the allocation fails.

    `beside` are the bytes of a block in other caches with as many blocks: that of a draft model, or those of
    other ranks in the same memory. `allocate` replaces `KVCache`, to allocate those of other ranks too.
    """
    size = block_bytes(spec, dtype) + beside
    blocks = cache_blocks(settings, memory, size, spec.context)
    try:
        if allocate is not None:
            cache = allocate(blocks, dtype, device)
        else:
            cache = KVCache(spec, blocks, dtype, device)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError if the CPU's memory is exhausted
        raise SetupError(
            f"Cannot allocate a KV cache of {show_size(blocks * size)}: {error}. Set a smaller "
            "--kv-cache-memory."
        ) from error
    half = show_size(blocks * size / 2)
    log.info(
        "KV Cache is allocated. #tokens: %d, K size: %s, V size: %s",
        (blocks - RESERVED_BLOCKS) * BLOCK_SIZE,
        half,
        half,
    )
    return cache


def _shared(share: float, memory: MemoryBudget) -> int:
    if memory.at_start is None:
        raise SetupError(
            "--memory-share cannot be used, because the free memory of this machine is unknown. Set the size "
            "of the KV cache: --kv-cache-memory 1GiB."
        )
    return int(share * memory.at_start) - memory.weights - memory.working


def _unasked(memory: MemoryBudget) -> int:
    if memory.gpu:
        return int(((memory.free or 0) - memory.working) * GPU_CACHE_SHARE)
    return CACHE_LIMIT if memory.free is None else min(CACHE_LIMIT, int(memory.free * CACHE_SHARE))


def _most_by_default(memory: MemoryBudget, context: int) -> int:
    if memory.gpu:
        return MOST_BLOCKS
    tokens = max(CACHE_CONTEXTS * context, LEAST_DEFAULT_TOKENS)
    return min(MOST_BLOCKS, -(-tokens // BLOCK_SIZE) + RESERVED_BLOCKS)


def _more(flag: str, memory: MemoryBudget, block: int) -> str:
    if flag == "--memory-share" and memory.at_start:
        used = memory.weights + memory.working
        least = (used + LEAST_BLOCKS * block) / memory.at_start
        advice = f"Set --memory-share above {least:.2f}" if least < 1 else "Use a smaller model"
        passes = f", passes {show_size(memory.working)}" if memory.working else ""
        return f"The weights need {show_size(memory.weights)}{passes}. {advice}."
    return f"Increase it: --kv-cache-memory {-(-LEAST_BLOCKS * block // 2**20)}MiB."
