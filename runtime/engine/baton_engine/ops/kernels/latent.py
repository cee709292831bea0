"""
Attention over paged latents: all heads of a token read one vector, as their key and as their value.

https://arxiv.org/abs/2405.04434, section 2.1. A cached vector is a latent of R dimensions, and P rotated
dimensions of the key. A program has a tile of heads, or of tokens and all their heads. It reads a tile of
latents once, for the product with its queries and for that with the weights. Splits, their order, and what
sums do not depend on are those of `attention`.

Latents and sums are in two halves of the dimensions: the compiler then needs fewer registers at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.ops.kernels import float8
from baton_engine.ops.kernels.attention import FACTOR, LEAST_ROWS, LOG2_E, add_splits
from baton_engine.ops.kernels.plans import (
    CAPTURED_PROGRAMS,
    AttentionPlan,
    seen_from_position,
    split_of,
    window_kind,
)
from baton_engine.quantized import FLOAT8_FACTOR
from baton_engine.spec import LATENT_EPSILON, ModelSpec

MOST_RANK, MOST_ROTATED = 512, 64
"""Dimensions of a latent and rotated ones, above which the sums of `MOST_ROWS` do not fit in registers."""

MOST_ROWS = 32
"""Heads, or tokens times heads, of a tile. 64 rows spill registers on Hopper, and their sums, twice for two
loops, do not fit in Blackwell's tensor memory. In float32 a tile has `LEAST_ROWS`."""

KIB = 1024

SHAPES = {
    ("half", LEAST_ROWS): ((96 * KIB, (32, 4, 2)), (0, (32, 4, 1))),
    ("half", MOST_ROWS): ((160 * KIB, (64, 8, 2)), (96 * KIB, (32, 8, 2)), (0, (16, 4, 1))),
    ("float8", LEAST_ROWS): ((96 * KIB, (16, 4, 2)), (0, (16, 4, 1))),
    ("float8", MOST_ROWS): ((96 * KIB, (32, 8, 2)), (0, (16, 4, 1))),
    ("float32", LEAST_ROWS): ((224 * KIB, (16, 8, 1)), (0, (16, 4, 1))),
}
"""
Latents per step, warps and stages, from so many bytes of shared memory of a program on.

By what is read and by the rows of a tile. With more, compilers spill registers, or shared memory is too
small. On AMD, where warps have 64 threads and twice the registers, the lowest ones: gfx950 spills others.
"""

HEADS = 16
"""Heads of a token that one program rotates."""


@triton.jit
def _turned(row, dim, inside, cos, sin, P: tl.constexpr):
    """Rotate the halves of P dimensions at `row` + `dim`, in fp32. The rest of `inside` is not read."""
    partner = tl.where(dim < P // 2, dim + P // 2, dim - P // 2)
    raw = tl.load(row + dim, mask=inside, other=0.0)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    angle = dim % (P // 2)
    turned = tl.load(cos + angle, mask=dim < P, other=1.0) * raw.to(tl.float32)
    crossed = tl.load(sin + angle, mask=dim < P, other=0.0) * other
    return tl.where(dim < P // 2, turned - crossed, turned + crossed).to(raw.dtype)


@triton.jit
def _store_latents(
    q_part, latents, norm, cos, sin, slots, queries, kv, q_stride, latent_stride, block_stride, epsilon,
    H: tl.constexpr, PLAIN: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FLOAT8: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Store the normalized latent of a token, and its rotated key; or rotate a tile of its queries."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dim = tl.arange(0, BLOCK_P)[None, :]
    cos += token * (P // 2)
    sin += token * (P // 2)
    if tile == 0:
        column = tl.arange(0, BLOCK_R)[None, :]
        row = latents + token * latent_stride
        raw = tl.load(row + column, mask=column < R, other=0.0)
        exact = raw.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(exact * exact, axis=1) / R + epsilon)[:, None]
        weight = tl.load(norm + column, mask=column < R, other=0.0).to(tl.float32)
        latent = (exact * scale * weight).to(raw.dtype)
        key = _turned(row + R, dim, dim < P, cos, sin, P)
        if FLOAT8:
            latent = float8.narrow(latent.to(tl.float32))
            key = float8.narrow(key.to(tl.float32))
        slot = tl.load(slots + token)
        if slot >= 0:
            at = kv + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (R + P)
            tl.store(at + column, latent, mask=column < R)
            tl.store(at + R + dim, key, mask=dim < P)
    else:
        head = ((tile - 1) * TILE + tl.arange(0, TILE))[:, None]
        inside = (head < H) & (dim < P)
        of_heads = q_part + token * q_stride + head * (PLAIN + P) + PLAIN
        query = _turned(of_heads, dim, inside, cos, sin, P)
        tl.store(queries + (token * H + head) * (R + P) + R + dim, query, mask=inside)


def store_latents(
    q: Tensor,
    latents: Tensor,
    rotation: tuple[Tensor, Tensor],
    norm: Tensor,
    keys: Tensor,
    cache: KVCache,
    layer: int,
    batch: Batch,
    spec: ModelSpec,
) -> Tensor:
    """Implement `Ops.store_latents` by one launch, and one product of all heads."""
    tokens, heads, plain, rank = q.shape[0], spec.heads, keys.shape[1], keys.shape[2]
    queries = torch.empty((tokens, heads, spec.head_dim), dtype=q.dtype, device=q.device)
    kv = cache.kv[:, layer]  # [blocks, 1, 1, slot, R + P]
    _store_latents[(tokens, 1 + triton.cdiv(heads, HEADS))](
        q,
        latents,
        norm,
        *rotation,
        batch.slots,
        queries,
        kv,
        q.stride(0),
        latents.stride(0),
        kv.stride(0),
        LATENT_EPSILON,
        H=heads,
        PLAIN=plain,
        R=rank,
        P=spec.rotated,
        BLOCK_SIZE=cache.block_size,
        FLOAT8=cache.kv.dtype == FLOAT8_CACHE,
        TILE=HEADS,
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_P=triton.next_power_of_2(spec.rotated),
        enable_fp_fusion=True,
    )
    of_heads = q[..., :plain].transpose(0, 1)  # [H, T, plain]
    torch.bmm(of_heads, keys, out=queries[..., :rank].transpose(0, 1))
    return queries


def expand_latents(mixed: Tensor, values: Tensor) -> Tensor:
    """Implement `Ops.expand_latents` by one product of all heads."""
    heads, size, rank = values.shape
    of_heads = mixed.view(-1, heads, rank).transpose(0, 1)  # [H, T, R]
    result = torch.empty((of_heads.shape[1], heads, size), dtype=mixed.dtype, device=mixed.device)
    torch.bmm(of_heads, values.transpose(1, 2), out=result.transpose(0, 1))
    return result.flatten(1)


@triton.jit
def _tile(
    q_low, q_high, q_turned, position, seen_from, latents, table, start, begin, end, block_stride, scale,
    peak, total, low, high,
    R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,
    BLOCK_P: tl.constexpr, WINDOW: tl.constexpr, FLOAT8: tl.constexpr, ONE_TOKEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """
    Add the latents at positions start to start + TILE to the peaks, sums and mixed latents of all rows.

    Without MASKED, each row sees all of them. With ONE_TOKEN, all rows see those from `begin` to `end`.
    """
    dim = tl.arange(0, HALF)[None, :]
    turned = tl.arange(0, BLOCK_P)[None, :]
    key = start + tl.arange(0, TILE)
    in_range = (key >= begin) & (key < end) if MASKED else key >= start
    block = tl.load(table + key // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
    at = latents + (block * block_stride + key % BLOCK_SIZE * (R + P))[:, None]
    if MASKED or 2 * HALF != R:
        c_low = tl.load(at + dim, mask=in_range[:, None] & (dim < R), other=0)
        c_high = tl.load(at + HALF + dim, mask=in_range[:, None] & (dim < R - HALF), other=0)
    else:
        c_low = tl.load(at + dim)
        c_high = tl.load(at + HALF + dim)
    if MASKED or BLOCK_P != P:
        k = tl.load(at + R + turned, mask=in_range[:, None] & (turned < P), other=0)
    else:
        k = tl.load(at + R + turned)
    if FLOAT8:  # `scale` makes up for its factor
        c_low, c_high = float8.widen(c_low, q_low.dtype), float8.widen(c_high, q_low.dtype)
        k = float8.widen(k, q_low.dtype)
    scores = tl.dot(q_low, tl.trans(c_low), input_precision="ieee")
    scores = tl.dot(q_high, tl.trans(c_high), acc=scores, input_precision="ieee")
    scores = tl.dot(q_turned, tl.trans(k), acc=scores, input_precision="ieee") * (scale * LOG2_E)
    if MASKED and ONE_TOKEN:
        scores = tl.where(in_range[None, :], scores, float("-inf"))
    elif MASKED:
        visible = (key[None, :] <= position[:, None]) & (key[None, :] >= seen_from[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # Without a window, all rows see the first key.
    level = higher if WINDOW == "none" else tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    shrunk = tl.exp2(peak - level)
    total = total * shrunk + tl.sum(weights, axis=1)
    shares = weights.to(c_low.dtype)
    low = tl.dot(shares, c_low, acc=low * shrunk[:, None], input_precision="ieee")
    high = tl.dot(shares, c_high, acc=high * shrunk[:, None], input_precision="ieee")
    return higher, total, low, high


@triton.jit
def _attend(
    item, q, kv, result, parts, sums, tables, work, positions, table_stride, block_stride, scale, window,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr, FLOAT8: tl.constexpr,
    PARTIAL: tl.constexpr, SPLIT: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_P: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """
    Attend from a tile of an entry's rows, which are its tokens times all heads, to their context.

    With PARTIAL, from one token to one split of it. Otherwise an entry has one token or one tile.
    """
    ONE_TOKEN: tl.constexpr = PARTIAL or 2 * H > ROWS
    entry, tile = item // TILES, item % TILES
    table = tables + tl.load(work + entry * 4).to(tl.int64) * table_stride
    first = tl.load(work + entry * 4 + 1).to(tl.int64)
    tokens = tl.load(work + entry * 4 + 2)
    row = tl.arange(0, ROWS)
    used = row < tokens * H - tile * ROWS
    first_position = tl.load(positions + first).to(tl.int32)
    position = first_position + row // H
    seen_from = seen_from_position(position, window, WINDOW)
    begin = seen_from_position(first_position, window, WINDOW)
    end = first_position + tokens
    everyone = end if ONE_TOKEN else first_position + 1  # where the latents end that all rows see
    if PARTIAL:
        split = tl.load(work + entry * 4 + 3)
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
        everyone = end
    start_of_first = begin // TILE * TILE
    masked = everyone // TILE * TILE if WINDOW == "none" else start_of_first
    dim = tl.arange(0, HALF)[None, :]
    turned = tl.arange(0, BLOCK_P)[None, :]
    mask_low, mask_high = used[:, None] & (dim < R), used[:, None] & (dim < R - HALF)
    at = q + (first * H + tile * ROWS) * (R + P) + row[:, None] * (R + P)
    q_low = tl.load(at + dim, mask=mask_low, other=0.0)
    q_high = tl.load(at + HALF + dim, mask=mask_high, other=0.0)
    q_turned = tl.load(at + R + turned, mask=used[:, None] & (turned < P), other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    low = tl.zeros([ROWS, HALF], tl.float32)
    high = tl.zeros([ROWS, HALF], tl.float32)
    if WINDOW == "none":
        for start in range(start_of_first, masked, TILE):
            peak, total, low, high = _tile(
                q_low, q_high, q_turned, position, seen_from, kv, table, start, begin, end,
                block_stride, scale, peak, total, low, high,
                R, P, BLOCK_SIZE, TILE, HALF, BLOCK_P, WINDOW, FLOAT8, ONE_TOKEN, False,
            )  # fmt: skip
    for start in range(masked, end, TILE):
        peak, total, low, high = _tile(
            q_low, q_high, q_turned, position, seen_from, kv, table, start, begin, end,
            block_stride, scale, peak, total, low, high,
            R, P, BLOCK_SIZE, TILE, HALF, BLOCK_P, WINDOW, FLOAT8, ONE_TOKEN, True,
        )  # fmt: skip
    if FLOAT8:
        low *= FACTOR
        high *= FACTOR
    if PARTIAL:
        part = tl.cast(entry, tl.int64) * H + tile * ROWS
        to = parts + part * R + row[:, None] * R + dim
        tl.store(to, low, mask=mask_low)
        tl.store(to + HALF, high, mask=mask_high)
        tl.store(sums + part * 2 + row * 2, peak, mask=used)
        tl.store(sums + part * 2 + row * 2 + 1, total, mask=used)
    else:
        to = result + (first * H + tile * ROWS) * R + row[:, None] * R + dim
        tl.store(to, (low / total[:, None]).to(q_low.dtype), mask=mask_low)
        tl.store(to + HALF, (high / total[:, None]).to(q_low.dtype), mask=mask_high)


@triton.jit(do_not_specialize=["table_stride"])
def _latent_attention(
    q, kv, result, parts, sums, tables, work, used_splits, positions, table_stride, block_stride, scale,
    window,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BLOCK_SIZE: tl.constexpr, FLOAT8: tl.constexpr,
    PARTIAL: tl.constexpr, SPLIT: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_P: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute one tile; with PARTIAL, a share of the tiles of all splits, one split's after another's."""
    if PARTIAL:
        for item in range(tl.program_id(0), tl.load(used_splits) * TILES, tl.num_programs(0)):
            _attend(
                item, q, kv, result, parts, sums, tables, work, positions,
                table_stride, block_stride, scale, window,
                H, R, P, BLOCK_SIZE, FLOAT8, PARTIAL, SPLIT, TILES, ROWS, TILE, HALF, BLOCK_P, WINDOW,
            )  # fmt: skip
    else:
        _attend(
            tl.program_id(0),
            q, kv, result, parts, sums, tables, work, positions, table_stride, block_stride, scale, window,
            H, R, P, BLOCK_SIZE, FLOAT8, PARTIAL, SPLIT, TILES, ROWS, TILE, HALF, BLOCK_P, WINDOW,
        )  # fmt: skip


def attention(
    q: Tensor,
    cache: KVCache,
    layer: int,
    batch: Batch,
    work: AttentionPlan,
    window: int | None,
    spec: ModelSpec,
    shared: int,
) -> Tensor:
    """
    Implement `Ops.attention` over latents: one launch for chunks, and two for rows of one token.

    `shared`: bytes of shared memory that the device has for a program. 0: not known.
    """
    assert spec.latent is not None
    heads, rank, kv = spec.heads, spec.latent.kv_rank, cache.kv[:, layer]  # [blocks, 1, 1, slot, R + P]
    result = torch.empty((len(q), heads, rank), dtype=q.dtype, device=q.device)
    float8_cache, most_rows = cache.kv.dtype == FLOAT8_CACHE, tile_rows(q.element_size())
    kind = "float32" if q.element_size() > 2 else "float8" if float8_cache else "half"

    def launch(entries: Tensor, partial: bool, parts: Tensor, sums: Tensor) -> None:
        rows = most_rows if not partial or heads > LEAST_ROWS else LEAST_ROWS
        tiles = triton.cdiv(heads, rows)
        programs = min(work.programs * tiles, CAPTURED_PROGRAMS) if partial else len(entries) * tiles
        tile, warps, stages = shape_of(kind, rows, shared)
        _latent_attention[(programs,)](
            q,
            kv,
            result,
            parts,
            sums,
            batch.block_table,
            entries,
            work.total,
            batch.positions,
            batch.block_table.stride(0),
            kv.stride(0),
            spec.score_scale * (FLOAT8_FACTOR if float8_cache else 1),
            window or 1,
            H=heads,
            R=rank,
            P=spec.rotated,
            BLOCK_SIZE=cache.block_size,
            FLOAT8=float8_cache,
            PARTIAL=partial,
            SPLIT=split_of(spec),
            TILES=tiles,
            ROWS=rows,
            HALF=max(LEAST_ROWS, triton.next_power_of_2(rank) // 2),
            BLOCK_P=max(LEAST_ROWS, triton.next_power_of_2(spec.rotated)),
            WINDOW=window_kind(spec, window),
            enable_fp_fusion=True,
            TILE=tile,
            num_warps=warps,
            num_stages=stages,
        )

    if len(work.tiles):
        launch(work.tiles, False, result, result)
    if count := len(work.splits):
        parts = torch.empty((count, heads, rank), dtype=torch.float32, device=q.device)
        sums = torch.empty((count, heads, 2), dtype=torch.float32, device=q.device)
        launch(work.splits, True, parts, sums)
        add_splits(parts, sums, result, work.sums)
    return result.flatten(1)


def tile_rows(itemsize: int) -> int:
    """Return the rows of a tile of a prompt's chunk. `itemsize`: bytes of a number in a product."""
    return MOST_ROWS if itemsize == 2 else LEAST_ROWS


def shape_of(kind: str, rows: int, shared: int) -> tuple[int, int, int]:
    """Return the shape that `SHAPES` has for this device. `shared` as in `attention`."""
    if torch.version.hip is not None:
        shared = 0
    return next(shape for least, shape in SHAPES[kind, rows] if shared >= least)


def unsupported(spec: ModelSpec) -> str | None:
    """Return why the kernels do not compute attention over latents of this model, or None."""
    assert spec.latent is not None
    if spec.latent.kv_rank > MOST_RANK or spec.rotated > MOST_ROTATED:
        return (
            f"latents of {spec.latent.kv_rank} and {spec.rotated} rotated dimensions, above {MOST_RANK} and "
            f"{MOST_ROTATED}"
        )
    return None
