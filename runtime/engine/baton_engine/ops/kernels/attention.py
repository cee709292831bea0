"""
Attention over paged keys and values, without gathered copies or a matrix of scores.

A context is divided at fixed positions into splits of `SPLIT` keys. Each split is computed by itself, and the
splits are added in order. For a row of one token, each split is a program of its own, and a second kernel
adds them; otherwise few rows would occupy few multiprocessors. For a chunk of a prompt, one program computes
all splits of a tile of tokens. A tile has all query heads of one key head, which share its keys.

The order of all sums depends on a token's position and window only: not on the batch, nor on how its prompt
is divided into chunks. Only the products of tiles may round differently for a row of one token.
https://arxiv.org/abs/2205.14135, https://pytorch.org/blog/flash-decoding
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.model.spec import ModelSpec
from baton_engine.model.unpacked import FLOAT8_FACTOR
from baton_engine.ops.kernels import float8

SPLIT = 256
"""Keys that are added before they are added to others. A multiple of all tiles."""

LEAST_TILE_KEYS, MOST_TILE_KEYS = 16, 64
"""Keys per step."""

TILE_BYTES = 16_384
"""Bytes of the keys of a step, if they are not the fewest. Shared memory holds several such tiles."""

WIDE = 128
"""Dimensions of a head, above which a chunk's tile has twice the warps."""

TILE_ROWS = 64
"""Rows of queries, tokens times heads, of a chunk's tile."""

LEAST_ROWS = 16
"""Minimum rows of a matrix product on tensor cores."""

STAGES = 2
"""Tiles of keys and values in shared memory: one is loaded while the other is used."""

LOG2_E = tl.constexpr(1.4426950408889634)
FACTOR = tl.constexpr(FLOAT8_FACTOR)


class AttentionPlan(NamedTuple):
    """Parts of the programs of one pass, for all layers with the same window. All entries are int32."""

    splits: Tensor
    """[P, 4] row, token, 1, and number of the split, of rows of one token."""
    sums: Tensor
    """[S, 4] token, index of its first entry in `splits`, number of its splits, 0."""
    tiles: Tensor
    """[C, 4] row, first token, number of tokens, 0, of longer rows."""


def plan(batch: Batch, spec: ModelSpec, window: int | None) -> AttentionPlan:
    """Divide the rows of `batch` among programs, and copy the result to its device in one piece."""
    starts, counts = np.array(batch.starts[:-1]), np.diff(batch.starts)
    single = np.flatnonzero(counts == 1)
    position = np.array(batch.contexts)[single] - 1
    first = _first_seen(position, window, spec.window_chunks) // SPLIT
    numbers = position // SPLIT - first + 1
    owner, split = _numbered(numbers)
    splits = _entries(single[owner], starts[single][owner], 1, first[owner] + split)
    sums = _entries(starts[single], np.cumsum(numbers) - numbers, numbers, 0)
    size = max(1, TILE_ROWS // spec.group)
    longer = np.flatnonzero(counts > 1)
    owner, tile = _numbered(-(-counts[longer] // size))
    tokens = np.minimum(size, counts[longer][owner] - tile * size)
    tiles = _entries(longer[owner], starts[longer][owner] + tile * size, tokens, 0)
    everything = torch.from_numpy(np.concatenate((splits, sums, tiles))).to(batch.device, non_blocking=True)
    splits_end, sums_end = len(splits), len(splits) + len(sums)
    return AttentionPlan(everything[:splits_end], everything[splits_end:sums_end], everything[sums_end:])


def _entries(*columns: NDArray[np.int64] | int) -> NDArray[np.int32]:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int32)


def _first_seen(position: NDArray[np.int64], window: int | None, chunks: bool) -> NDArray[np.int64]:
    """Return the first position that each position attends to, as the kernels do."""
    if window is None:
        return np.zeros_like(position)
    return position // window * window if chunks else np.maximum(position - window + 1, 0)


def _numbered(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each of sum(counts) parts the index of its owner, and its number among the owner's parts."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


@triton.jit
def _seen_from(position, window, WINDOW: tl.constexpr):
    """Return the first position that `position` attends to."""
    if WINDOW == "chunks":
        return position // window * window
    elif WINDOW == "slides":
        return tl.maximum(position - window + 1, 0)
    else:
        return position * 0


@triton.jit
def _attend(
    q, position, seen_from, keys, values, table, begin, end, block_stride, scale, cap,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """
    Attend from q [ROWS, BLOCK_D] to the keys at positions begin to end of one split.

    Returns the highest score [ROWS], in powers of 2; the sum of weights [ROWS] and of weighted values
    [ROWS, BLOCK_D], relative to it. Keys outside of begin to end are not read: other requests may have left
    NaN there.
    """
    dim = tl.arange(0, BLOCK_D)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(begin // TILE * TILE, end, TILE):
        key = start + tl.arange(0, TILE)
        held = (key >= begin) & (key < end)
        block = tl.load(table + key // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        place = block * block_stride + key % BLOCK_SIZE * D
        mask = held[:, None] & (dim < D)[None, :]
        k = tl.load(keys + place[:, None] + dim[None, :], mask=mask, other=0)
        if FLOAT8:
            k = float8.widen(k, q.dtype)  # `scale` makes up for its factor
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
        visible = (key[None, :] <= position[:, None]) & (key[None, :] >= seen_from[:, None]) & held[None, :]
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrunk = tl.exp2(peak - level)
        total = total * shrunk + tl.sum(weights, axis=1)
        v = tl.load(values + place[:, None] + dim[None, :], mask=mask, other=0)
        if FLOAT8:
            v = float8.widen(v, q.dtype)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher
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
def _attend_all(
    q, position, seen_from, keys, values, table, begin, end, block_stride, scale, cap,
    D: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_D: tl.constexpr, CAPPED: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Attend to the keys at positions begin to end of all splits, as `_attend` to those of one."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
        split_peak, split_total, split_mixed = _attend(
            q, position, seen_from, keys, values, table,
            tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT), block_stride, scale, cap,
            D, BLOCK_SIZE, ROWS, TILE, BLOCK_D, CAPPED, FLOAT8,
        )  # fmt: skip
        peak, old, new = _shrinkage(peak, split_peak)
        total = total * old + split_total * new
        mixed = mixed * old[:, None] + split_mixed * new[:, None]
    return peak, total, mixed


@triton.jit
def _add_sink(sinks, head, peak, total):
    """Return the sum of weights with the sink of each head, and the factor of the weighted values."""
    sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    peak, old, new = _shrinkage(peak, sink)
    return total * old + new, old


@triton.jit(do_not_specialize=["table_stride"])
def _attention(
    q, kv, result, parts, sums, tables, work, positions, sinks,
    table_stride, block_stride, plane_stride, head_stride, scale, cap, window,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, FLOAT8: tl.constexpr, SINKS: tl.constexpr,
    PARTIAL: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of tokens to their context; with PARTIAL, from one token to one split of it."""
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    table = tables + tl.load(work + entry * 4).to(tl.int64) * table_stride
    first = tl.load(work + entry * 4 + 1)
    count = tl.load(work + entry * 4 + 2)
    row = tl.arange(0, ROWS)
    used = row < count * G
    token = (first + tl.minimum(row // G, count - 1)).to(tl.int64)
    head = kv_head * G + row % G
    position = tl.load(positions + token).to(tl.int32)
    seen_from = _seen_from(position, window, WINDOW)
    begin = tl.min(seen_from, axis=0)
    end = tl.max(position, axis=0) + 1
    dim = tl.arange(0, BLOCK_D)
    place = token[:, None] * K * G * D + head[:, None] * D + dim[None, :]
    mask = used[:, None] & (dim < D)[None, :]
    queries = tl.load(q + place, mask=mask, other=0.0)
    keys = kv + kv_head * head_stride
    values = keys + plane_stride
    if PARTIAL:
        split = tl.load(work + entry * 4 + 3)
        peak, total, mixed = _attend(
            queries, position, seen_from, keys, values, table,
            tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT), block_stride, scale, cap,
            D, BLOCK_SIZE, ROWS, TILE, BLOCK_D, CAPPED, FLOAT8,
        )  # fmt: skip
        part = entry.to(tl.int64) * K * G + head
        tl.store(parts + part[:, None] * D + dim[None, :], mixed, mask=mask)
        tl.store(sums + part * 2, peak, mask=used)
        tl.store(sums + part * 2 + 1, total, mask=used)
    else:
        peak, total, mixed = _attend_all(
            queries, position, seen_from, keys, values, table, begin, end, block_stride, scale, cap,
            D, BLOCK_SIZE, SPLIT, ROWS, TILE, BLOCK_D, CAPPED, FLOAT8,
        )  # fmt: skip
        if SINKS:
            total, shrunk = _add_sink(sinks, head, peak, total)
            mixed = mixed * shrunk[:, None]
        tl.store(result + place, (mixed / total[:, None]).to(queries.dtype), mask=mask)


@triton.jit
def _add_splits(
    parts, sums, result, work, sinks,
    H: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the splits of one token and one head in order."""
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
    place = (token * H + head) * D + dim
    tl.store(result + place, (mixed / total).to(result.dtype.element_ty), mask=dim < D)


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
    """Implement `Ops.attention`: one launch for chunks, and two for rows of one token. `work`: see `plan`."""
    result = torch.empty_like(q)
    kv = cache.kv[:, layer]  # [blocks, 2, K, slot, D]
    head_sinks = q if sinks is None else sinks
    constants = _constants(spec, cache, window, q.element_size()) | {"SINKS": sinks is not None}

    def launch(entries: Tensor, partial: bool, parts: Tensor, sums: Tensor) -> None:
        _attention[(len(entries), spec.kv_heads)](
            q,
            kv,
            result,
            parts,
            sums,
            batch.block_table,
            entries,
            batch.positions,
            head_sinks,
            batch.block_table.stride(0),
            *kv.stride()[:3],
            spec.score_scale * (FLOAT8_FACTOR if constants["FLOAT8"] else 1),
            spec.attention_cap or 1.0,
            window or 1,
            PARTIAL=partial,
            ROWS=max(LEAST_ROWS if partial else TILE_ROWS, triton.next_power_of_2(spec.group)),
            num_stages=STAGES,
            num_warps=8 if spec.head_dim > WIDE and not partial else 4,
            **constants,
        )

    if len(work.tiles):
        launch(work.tiles, False, result, result)
    if count := len(work.splits):
        parts = torch.empty((count, spec.heads, spec.head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((count, spec.heads, 2), dtype=torch.float32, device=q.device)
        launch(work.splits, True, parts, sums)
        flags = {name: constants[name] for name in ("D", "SINKS", "BLOCK_D", "enable_fp_fusion")}
        _add_splits[(len(work.sums), spec.heads)](
            parts, sums, result, work.sums, head_sinks, H=spec.heads, **flags
        )
    return result.flatten(1)


def _constants(spec: ModelSpec, cache: KVCache, window: int | None, itemsize: int) -> dict[str, Any]:
    """Return what chunks and rows of one token have in common. `itemsize`: bytes of a number in a product."""
    dims = max(LEAST_ROWS, triton.next_power_of_2(spec.head_dim))
    keys = TILE_BYTES // (dims * itemsize)
    return {
        "G": spec.group,
        "K": spec.kv_heads,
        "D": spec.head_dim,
        "BLOCK_SIZE": cache.block_size,
        "WINDOW": "none" if window is None else "chunks" if spec.window_chunks else "slides",
        "CAPPED": spec.attention_cap is not None,
        "FLOAT8": cache.kv.dtype == FLOAT8_CACHE,
        "SPLIT": SPLIT,
        "TILE": max(LEAST_TILE_KEYS, min(MOST_TILE_KEYS, keys)),
        "BLOCK_D": dims,
        "enable_fp_fusion": True,
    }
