"""
Attention over paged keys and values, without gathered copies or a matrix of scores.

For a row of one token, the context is divided at fixed positions into splits of `SPLIT` keys. Each split is a
program of its own, and a second kernel adds them in order; otherwise few rows would occupy few
multiprocessors. For a chunk of a prompt, one program computes the whole context of a tile of tokens. A tile
has all query heads of one key head, which share its keys.

The order of all sums depends on a token's position and window, and on whether its row has one token: not on
the rest of the batch, nor on how its prompt is divided into chunks.
https://arxiv.org/abs/2205.14135, https://pytorch.org/blog/flash-decoding
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.ops.kernels import float8
from baton_engine.ops.kernels.plans import (
    LARGE_TILE_ROWS,
    SPLIT,
    TILE_ROWS,
    AttentionPlan,
    seen_from_position,
    window_kind,
)
from baton_engine.quantized import FLOAT8_FACTOR
from baton_engine.spec import ModelSpec

LEAST_TILE_KEYS, MOST_TILE_KEYS = 16, 64
"""Keys per step."""

TILE_BYTES = 16_384
"""Bytes of the keys of a step, if they are not the fewest. Shared memory holds several such tiles."""

WIDE = 128
"""Dimensions of a head, above which a chunk's tile has twice the warps."""

LEAST_ROWS = 16
"""Minimum rows of a matrix product on tensor cores."""

STAGES = 2
"""Tiles of keys and values in shared memory: one is loaded while the other is used."""

MOST_ROW_BYTES = 512
"""Bytes of a query up to which there is shared memory for `STAGES` tiles: consumers' GPUs have 99 KiB."""

LARGE_TILE = {"TILE": 128, "num_warps": 8, "num_stages": 3}
"""Keys per step of a tile of `LARGE_TILE_ROWS`: faster from 2,000 tokens on, see benchmarks/LOG.md."""

LARGE_TILE_MEMORY = 224 * 1024
"""Bytes of shared memory per program from which a device has such tiles: H100, B200 and later."""

LOG2_E = tl.constexpr(1.4426950408889634)
FACTOR = tl.constexpr(FLOAT8_FACTOR)


@triton.jit
def _tile(
    q, position, seen_from, keys, values, table, start, begin, end, block_stride, scale, cap,
    peak, total, mixed,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr, FLOAT8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """
    Add the keys at positions start to start + TILE to the peaks, sums and weighted values of all rows.

    Without MASKED, each row sees all of them: masks cost more than a third of the time of a long prompt.
    """
    dim = tl.arange(0, BLOCK_D)
    key = start + tl.arange(0, TILE)
    in_range = (key >= begin) & (key < end) if MASKED else key >= start
    block = tl.load(table + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
    offset = block * block_stride + key % BLOCK_SIZE * D
    if MASKED or BLOCK_D != D:
        mask = in_range[:, None] & (dim < D)[None, :]
        k = tl.load(keys + offset[:, None] + dim[None, :], mask=mask, other=0)
    else:
        k = tl.load(keys + offset[:, None] + dim[None, :])
    if FLOAT8:
        k = float8.widen(k, q.dtype)  # `scale` makes up for its factor
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
    scores *= LOG2_E
    if MASKED:
        visible = (
            (key[None, :] <= position[:, None]) & (key[None, :] >= seen_from[:, None]) & in_range[None, :]
        )
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - level[:, None])
    shrunk = tl.exp2(peak - level)
    total = total * shrunk + tl.sum(weights, axis=1)
    if MASKED or BLOCK_D != D:
        v = tl.load(values + offset[:, None] + dim[None, :], mask=mask, other=0)
    else:
        v = tl.load(values + offset[:, None] + dim[None, :])
    if FLOAT8:
        v = float8.widen(v, q.dtype)
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _attend(
    q, position, seen_from, keys, values, table, begin, end, block_stride, scale, cap,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, FLOAT8: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """
    Attend from q [ROWS, BLOCK_D] to the keys at positions begin to end.

    Returns the highest score [ROWS], in powers of 2; the sum of weights [ROWS] and of weighted values
    [ROWS, BLOCK_D], relative to it. Keys outside of begin to end are not read: other requests may have left
    NaN there.
    """
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_D], tl.float32)
    first = begin // TILE * TILE
    clear = first  # the first tile that all rows see in full, and the first one behind those
    behind = first
    if not PARTIAL:
        if WINDOW != "none":
            clear = tl.cdiv(tl.max(seen_from, axis=0), TILE) * TILE
            for start in range(first, clear, TILE):
                peak, total, mixed = _tile(
                    q, position, seen_from, keys, values, table, start, begin, end, block_stride, scale, cap,
                    peak, total, mixed, D, BLOCK_SIZE, TILE, BLOCK_D, CAPPED, FLOAT8, True,
                )  # fmt: skip
        behind = tl.maximum(clear, (tl.min(position, axis=0) + 1) // TILE * TILE)
        for start in range(clear, behind, TILE):
            peak, total, mixed = _tile(
                q, position, seen_from, keys, values, table, start, begin, end, block_stride, scale, cap,
                peak, total, mixed, D, BLOCK_SIZE, TILE, BLOCK_D, CAPPED, FLOAT8, False,
            )  # fmt: skip
    for start in range(behind, end, TILE):
        peak, total, mixed = _tile(
            q, position, seen_from, keys, values, table, start, begin, end, block_stride, scale, cap,
            peak, total, mixed, D, BLOCK_SIZE, TILE, BLOCK_D, CAPPED, FLOAT8, True,
        )  # fmt: skip
    if FLOAT8:
        mixed *= FACTOR
    return peak, total, mixed


@triton.jit
def _shrinkage(peak, split_peak):
    """Return the higher of two peaks, and the factors of the sums relative to each of them."""
    higher = tl.maximum(peak, split_peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(peak - level), tl.exp2(split_peak - level)


@triton.jit
def _add_sink(sinks, head, peak, total):
    """Return the sum of weights with the sink of each head, and the factor of the weighted values."""
    sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    peak, old, new = _shrinkage(peak, sink)
    return total * old + new, old


@triton.jit
def _attend_entry(
    entry, q, kv, result, parts, sums, tables, work, positions, sinks,
    table_stride, block_stride, plane_stride, head_stride, scale, cap, window,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, FLOAT8: tl.constexpr, SINKS: tl.constexpr,
    PARTIAL: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of tokens to their context; with PARTIAL, from one token to one split of it."""
    kv_head = tl.program_id(1)
    table = tables + tl.load(work + entry * 4).to(tl.int64) * table_stride
    first = tl.load(work + entry * 4 + 1)
    count = tl.load(work + entry * 4 + 2)
    row = tl.arange(0, ROWS)
    used = row < count * G
    token = (first + tl.minimum(row // G, count - 1)).to(tl.int64)
    head = kv_head * G + row % G
    position = tl.load(positions + token).to(tl.int32)
    seen_from = seen_from_position(position, window, WINDOW)
    begin = tl.min(seen_from, axis=0)
    end = tl.max(position, axis=0) + 1
    dim = tl.arange(0, BLOCK_D)
    offset = token[:, None] * K * G * D + head[:, None] * D + dim[None, :]
    mask = used[:, None] & (dim < D)[None, :]
    queries = tl.load(q + offset, mask=mask, other=0.0)
    keys = kv + kv_head * head_stride
    values = keys + plane_stride
    if PARTIAL:
        split = tl.load(work + entry * 4 + 3)
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
    peak, total, mixed = _attend(
        queries, position, seen_from, keys, values, table, begin, end, block_stride, scale, cap,
        D, BLOCK_SIZE, ROWS, TILE, BLOCK_D, WINDOW, CAPPED, FLOAT8, PARTIAL,
    )  # fmt: skip
    if PARTIAL:
        part = head.to(tl.int64) + entry * (K * G)
        tl.store(parts + part[:, None] * D + dim[None, :], mixed, mask=mask)
        tl.store(sums + part * 2, peak, mask=used)
        tl.store(sums + part * 2 + 1, total, mask=used)
    else:
        if SINKS:
            total, shrunk = _add_sink(sinks, head, peak, total)
            mixed = mixed * shrunk[:, None]
        tl.store(result + offset, (mixed / total[:, None]).to(queries.dtype), mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def _attention(
    q, kv, result, parts, sums, tables, work, total, positions, sinks,
    table_stride, block_stride, plane_stride, head_stride, scale, cap, window,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, FLOAT8: tl.constexpr, SINKS: tl.constexpr,
    PARTIAL: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute one tile; with PARTIAL, a share of the splits: all of them if there is a program for each."""
    if PARTIAL:
        for entry in range(tl.program_id(0), tl.load(total), tl.num_programs(0)):
            _attend_entry(
                entry, q, kv, result, parts, sums, tables, work, positions, sinks,
                table_stride, block_stride, plane_stride, head_stride, scale, cap, window,
                G, K, D, BLOCK_SIZE, WINDOW, CAPPED, FLOAT8, SINKS, PARTIAL, SPLIT, ROWS, TILE, BLOCK_D,
            )  # fmt: skip
    else:
        _attend_entry(
            tl.program_id(0), q, kv, result, parts, sums, tables, work, positions, sinks,
            table_stride, block_stride, plane_stride, head_stride, scale, cap, window,
            G, K, D, BLOCK_SIZE, WINDOW, CAPPED, FLOAT8, SINKS, PARTIAL, SPLIT, ROWS, TILE, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _add_splits(
    parts, sums, result, work, sinks,
    H: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the splits of one token and one head in order. A token without splits gets 0."""
    entry = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(work + entry * 4).to(tl.int64)
    first = tl.load(work + entry * 4 + 1).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for split in range(tl.load(work + entry * 4 + 2)):
        part = (first + split) * H + head
        peak, old, new = _shrinkage(peak, tl.load(sums + part * 2))
        total = total * old + tl.load(sums + part * 2 + 1) * new
        mixed = mixed * old + tl.load(parts + part * D + dim, mask=dim < D, other=0.0) * new
    if SINKS:
        total, shrunk = _add_sink(sinks, head, peak, total)
        mixed = mixed * shrunk
    offset = (token * H + head) * D + dim
    mixed = mixed / tl.where(total == 0, 1.0, total)
    tl.store(result + offset, mixed.to(result.dtype.element_ty), mask=dim < D)


def attention(
    q: Tensor,
    cache: KVCache,
    layer: int,
    batch: Batch,
    work: AttentionPlan,
    window: int | None,
    sinks: Tensor | None,
    spec: ModelSpec,
) -> Tensor:
    """Implement `Ops.attention`: one launch for chunks, and two for rows of one token."""
    result, kv = torch.empty_like(q), cache.kv[:, layer]  # [blocks, 2, K, slot, D]
    head_sinks = q if sinks is None else sinks
    constants = _constants(spec, cache, window, q.element_size()) | {"SINKS": sinks is not None}

    def launch(
        entries: Tensor, programs: int, partial: bool, parts: Tensor, sums: Tensor, shape: dict[str, Any]
    ) -> None:
        _attention[(programs, spec.kv_heads)](
            q,
            kv,
            result,
            parts,
            sums,
            batch.block_table,
            entries,
            work.total,
            batch.positions,
            head_sinks,
            batch.block_table.stride(0),
            *kv.stride()[:3],
            spec.score_scale * (FLOAT8_FACTOR if constants["FLOAT8"] else 1),
            spec.attention_cap or 1.0,
            window or 1,
            PARTIAL=partial,
            **constants | shape,
        )

    if len(work.tiles):
        shape = {"ROWS": max(work.tile_rows, triton.next_power_of_2(spec.group))}
        large = work.tile_rows == LARGE_TILE_ROWS
        shape |= LARGE_TILE if large else {"num_warps": 8 if spec.head_dim > WIDE else 4}
        launch(work.tiles, len(work.tiles), False, result, result, shape)
    if count := len(work.splits):
        parts = torch.empty((count, spec.heads, spec.head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((count, spec.heads, 2), dtype=torch.float32, device=q.device)
        shape = {"ROWS": max(LEAST_ROWS, triton.next_power_of_2(spec.group))}
        launch(work.splits, work.programs, True, parts, sums, shape)
        add_splits(parts, sums, result, work.sums, sinks)
    return result.flatten(1)


def add_splits(
    parts: Tensor, sums: Tensor, result: Tensor, work: Tensor, sinks: Tensor | None = None
) -> None:
    """
    Write the sums of splits to `result` [T, H, D]. `work` are the plan's `sums`.

    `parts` [P, H, D] are weighted values of the splits, `sums` [P, H, 2] their peaks and sums of weights.
    """
    heads, dims = result.shape[1:]
    _add_splits[(len(work), heads)](
        parts,
        sums,
        result,
        work,
        result if sinks is None else sinks,
        H=heads,
        D=dims,
        SINKS=sinks is not None,
        BLOCK_D=triton.next_power_of_2(dims),
        enable_fp_fusion=True,
    )


def tile_rows(spec: ModelSpec, itemsize: int, shared_memory: int) -> int:
    """
    Return the rows of a tile of a prompt's chunk.

    `itemsize`: bytes of a number in a product. `shared_memory`: bytes that the device has for a program.
    """
    large = (
        shared_memory >= LARGE_TILE_MEMORY
        and itemsize == 2
        and WIDE // 2 < spec.head_dim <= WIDE
        and spec.group <= LARGE_TILE_ROWS
    )
    return LARGE_TILE_ROWS if large else TILE_ROWS


def _constants(spec: ModelSpec, cache: KVCache, window: int | None, itemsize: int) -> dict[str, Any]:
    """Return what chunks and rows of one token have in common. `itemsize`: bytes of a number in a product."""
    dims = max(LEAST_ROWS, triton.next_power_of_2(spec.head_dim))
    keys = TILE_BYTES // (dims * itemsize)
    return {
        "G": spec.group,
        "K": spec.kv_heads,
        "D": spec.head_dim,
        "BLOCK_SIZE": cache.block_size,
        "WINDOW": window_kind(spec, window),
        "CAPPED": spec.attention_cap is not None,
        "FLOAT8": cache.kv.dtype == FLOAT8_CACHE,
        "SPLIT": SPLIT,
        "TILE": max(LEAST_TILE_KEYS, min(MOST_TILE_KEYS, keys)),
        "BLOCK_D": dims,
        "enable_fp_fusion": True,
        "num_stages": STAGES if dims * itemsize <= MOST_ROW_BYTES else 1,
        "num_warps": 4,
    }
