"""
Plans of attention: the parts of the programs of one pass, for all layers with the same window.

The host makes the plan of a plain pass. A captured pass is repeated for other lengths: the device makes its
plan, and a fixed number of programs divides the splits among them in a loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from baton_engine.batch import Batch, StaticBatch
from baton_engine.spec import ModelSpec
from baton_engine.streams import copied

SPLIT = 256
"""Keys that are added before they are added to others, or a part of them. A multiple of all tiles."""

LATENT_HEADS = 32
"""Heads up to which a split of latents has `SPLIT` keys. More heads have longer ones: the sums of a head take
nearly the bytes of two latents in bfloat16. Those of all heads then take at most a quarter of the bytes of
the split."""

TILE_ROWS, LARGE_TILE_ROWS = 64, 128
"""Rows of queries, tokens times heads, of a chunk's tile: on any device, and where shared memory suffices."""

CAPTURED_PROGRAMS = 2048
"""Programs of a captured launch for splits. A GPU runs about as many at once, and idle ones take time too."""

PLAN_STEP = 128
"""Splits of a row that the plan writes at once."""


class AttentionPlan(NamedTuple):
    """Parts of the programs of one pass, for all layers with the same window. All entries are int32."""

    splits: Tensor
    """[P, 4] row, token, 1, and number of the split, of rows of one token. Only `total` of them are used."""
    total: Tensor
    """[1] number of used splits."""
    programs: int
    """Programs that compute the splits for one key head."""
    sums: Tensor
    """[S, 4] token, index of its first entry in `splits`, number of its splits, 0."""
    tiles: Tensor
    """[C, 4] row, first token, number of tokens, 0, of longer rows."""
    tile_rows: int = TILE_ROWS
    """Rows that an entry of `tiles` has at most, if it has more than one token."""


def split_of(spec: ModelSpec) -> int:
    """Return the number of keys of a split."""
    return SPLIT if spec.latent is None else SPLIT * -(-spec.heads // LATENT_HEADS)


def plan(batch: Batch, spec: ModelSpec, window: int | None, *, tile_rows: int = TILE_ROWS) -> AttentionPlan:
    """Divide the rows of `batch` among programs, and copy the result to its device in one piece."""
    keys = split_of(spec)
    starts, counts = np.array(batch.starts[:-1]), np.diff(batch.starts)
    single = np.flatnonzero(counts == 1)
    position = np.array(batch.contexts)[single] - 1
    first = _first_seen(position, window, spec) // keys
    numbers = position // keys - first + 1
    owner, split = _numbered(numbers)
    splits = _entries(single[owner], starts[single][owner], 1, first[owner] + split)
    sums = _entries(starts[single], np.cumsum(numbers) - numbers, numbers, 0)
    size = max(1, tile_rows // spec.group)
    longer = np.flatnonzero(counts > 1)
    owner, tile = _numbered(-(-counts[longer] // size))
    tokens = np.minimum(size, counts[longer][owner] - tile * size)
    tiles = _entries(longer[owner], starts[longer][owner] + tile * size, tokens, 0)
    total = _entries(np.array([len(splits)]), 0, 0, 0)
    parts = np.concatenate((splits, sums, tiles, total))
    everything = copied(parts, batch.device)
    splits_end, sums_end = len(splits), len(splits) + len(sums)
    return AttentionPlan(
        splits=everything[:splits_end],
        total=everything[-1],
        programs=len(splits),
        sums=everything[splits_end:sums_end],
        tiles=everything[sums_end:-1],
        tile_rows=tile_rows,
    )


def plan_on_device(batch: StaticBatch, spec: ModelSpec, window: int | None) -> AttentionPlan:
    """Return the plan of the tensors of `batch`, which each replay of a captured pass makes again."""
    rows, device = len(batch.rows), batch.device
    keys = split_of(spec)
    most = rows + batch.most_context // keys
    splits = torch.empty((most, 4), dtype=torch.int32, device=device)
    sums = torch.empty((rows, 4), dtype=torch.int32, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    _plan[(rows,)](
        batch.positions,
        batch.slots,
        splits,
        sums,
        total,
        rows,
        window or 1,
        WINDOW=window_kind(spec, window),
        SPLIT=keys,
        ROWS=triton.next_power_of_2(rows),
        STEP=PLAN_STEP,
        enable_fp_fusion=True,
    )
    programs = min(most, max(1, CAPTURED_PROGRAMS // spec.kv_heads))
    return AttentionPlan(splits, total, programs, sums, splits[:0])


def window_kind(spec: ModelSpec, window: int | None) -> str:
    return "none" if window is None else spec.window_kind


def _entries(*columns: NDArray[np.int64] | int) -> NDArray[np.int32]:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int32)


def _first_seen(position: NDArray[np.int64], window: int | None, spec: ModelSpec) -> NDArray[np.int64]:
    """Return the first position that each position attends to, as the kernels do."""
    if window is None:
        return np.zeros_like(position)
    match spec.window_kind:
        case "chunks":
            return position // window * window
        case "rest":
            return np.maximum(np.minimum(position, 1), position - window + 1)
        case "slides":
            return np.maximum(position - window + 1, 0)


def _numbered(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each of sum(counts) parts the index of its owner, and its number among the owner's parts."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


@triton.jit
def seen_from_position(position, window, WINDOW: tl.constexpr):
    """Return the first position that `position` attends to."""
    if WINDOW == "chunks":
        return position // window * window
    elif WINDOW == "slides":
        return tl.maximum(position - window + 1, 0)
    elif WINDOW == "rest":
        return tl.maximum(tl.minimum(position, 1), position - window + 1)
    else:
        return position * 0


@triton.jit
def _plan(
    positions, slots, splits, sums, total, rows, window,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the splits of one row, whose only token is at the same index, and its sum."""
    current = tl.program_id(0)
    row = tl.arange(0, ROWS)
    position = tl.load(positions + row, mask=row < rows, other=0).to(tl.int32)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    first = seen_from_position(position, window, WINDOW) // SPLIT
    number = tl.where(slot >= 0, position // SPLIT - first + 1, 0)  # a row without a slot has no splits
    before = tl.sum(tl.where(row < current, number, 0), axis=0)
    current_first = tl.sum(tl.where(row == current, first, 0), axis=0)
    current_number = tl.sum(tl.where(row == current, number, 0), axis=0)
    tl.store(sums + current * 4, current)
    tl.store(sums + current * 4 + 1, before)
    tl.store(sums + current * 4 + 2, current_number)
    if current == rows - 1:
        tl.store(total, before + current_number)
    for start in range(0, current_number, STEP):
        split = start + tl.arange(0, STEP)
        entry = splits + (before + split) * 4
        inside = split < current_number
        tl.store(entry, current + split * 0, mask=inside)
        tl.store(entry + 1, current + split * 0, mask=inside)
        tl.store(entry + 2, 1 + split * 0, mask=inside)
        tl.store(entry + 3, current_first + split, mask=inside)
