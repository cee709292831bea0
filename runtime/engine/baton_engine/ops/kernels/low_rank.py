"""
LoRA adapters: for each linear of a layer one launch shrinks its input to the ranks, and one expands it.

In rows of one token, the activation of an MLP expands its inputs and shrinks its results in the same launch.
Adapters are looked up by their slot in a table on the device. So the launches do not depend on which adapters
a batch has, or on how many rows each of them has, and captured passes repeat them for others.
https://arxiv.org/abs/2310.18547, https://arxiv.org/abs/2311.03285
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_engine.batch import Batch, StaticBatch
from baton_engine.ops import Linear
from baton_engine.ops.kernels import layers
from baton_engine.ops.kernels.adapter_table import COLUMNS, FIELDS, MOST_PARTS, PART, AdapterTable
from baton_engine.ops.kernels.layers import gated_product
from baton_engine.streams import copied

FEW_TOKENS, MANY_TOKENS = 16, 64
"""Tokens of a tile: of rows with a few tokens, and of prompts."""

RANKS, STEP = 64, 64
"""Ranks that are computed at once, and inputs."""

PROGRAMS = 64
"""Tiles from which the inputs are not divided among programs."""

SPLIT = 1024
"""Inputs of a program, where they are divided."""

ROW_SPLIT, ROW_RANKS = 512, 16
"""Inputs and ranks of a program, where each tile is one token."""

GATED_COLUMNS = 256
"""Results of an activation that one program computes, where each tile is one token."""


@triton.jit
def _shrink(
    x, shrunk, entries, table, x_stride, inputs, count, ranks,
    SPLIT_INPUTS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write products of a tile of tokens with a split of all rows of A to shrunk [splits, C, T, ranks]."""
    entry = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(entries + entry)
    if slot >= 0:
        fields = table + slot * FIELDS
        a = tl.load(fields)
        rows = tl.load(fields + 1).to(tl.int32)
        if a != 0:
            weights = a.to(tl.pointer_type(x.dtype.element_ty))
            token = tl.arange(0, TOKENS)
            used = token < tl.load(entries + 2 * count + entry)
            source = x + (tl.load(entries + count + entry) + token.to(tl.int64))[:, None] * x_stride
            to = shrunk + ((split * count + entry).to(tl.int64) * TOKENS + token)[:, None] * ranks
            for first in range(0, rows, RANKS):
                rank = first + tl.arange(0, RANKS)
                total = tl.zeros([TOKENS, RANKS], tl.float32)
                end = tl.minimum(inputs, (split + 1) * SPLIT_INPUTS)
                for begin in range(split * SPLIT_INPUTS, end, STEP):
                    k = begin + tl.arange(0, STEP)
                    inside = k < end
                    values = tl.load(source + k[None, :], mask=used[:, None] & inside[None, :], other=0.0)
                    tile = tl.load(
                        weights + rank.to(tl.int64)[:, None] * inputs + k[None, :],
                        mask=(rank < rows)[:, None] & inside[None, :],
                        other=0.0,
                    )
                    total = tl.dot(values, tl.trans(tile), total, input_precision="ieee")
                tl.store(to + rank[None, :], total, mask=used[:, None] & (rank < rows)[None, :])


@triton.jit
def _expand(
    result, shrunk, entries, table, tiles, result_stride, splits, count, ranks,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile of tokens with some rows of B to the result."""
    entry = tl.program_id(0)
    slot = tl.load(entries + entry)
    if slot >= 0:
        tile = tiles + tl.program_id(1) * 4
        fields = table + slot * FIELDS + 2 + tl.load(tile + 2) * PART
        b = tl.load(fields)
        if b != 0:
            weights = b.to(tl.pointer_type(result.dtype.element_ty))
            offset = tl.load(fields + 1).to(tl.int32)
            rows = tl.load(fields + 2).to(tl.int32)
            output = tl.load(tile) + tl.arange(0, COLUMNS)
            valid = output < tl.load(tile + 1)
            row = output - tl.load(tile + 3)
            token = tl.arange(0, TOKENS)
            used = token < tl.load(entries + 2 * count + entry)
            source = shrunk + (entry.to(tl.int64) * TOKENS + token)[:, None] * ranks + offset
            total = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for first in range(0, rows, RANKS):
                rank = first + tl.arange(0, RANKS)
                mask = used[:, None] & (rank < rows)[None, :]
                values = tl.zeros([TOKENS, RANKS], tl.float32)
                for split in range(splits):
                    part = source + split * count * TOKENS * ranks
                    values += tl.load(part + rank[None, :], mask=mask, other=0.0)
                factors = tl.load(
                    weights + row.to(tl.int64)[:, None] * rows + rank[None, :],
                    mask=valid[:, None] & (rank < rows)[None, :],
                    other=0.0,
                )
                total = tl.dot(values.to(factors.dtype), tl.trans(factors), total, input_precision="ieee")
            first_token = tl.load(entries + count + entry)
            at = result + (first_token + token.to(tl.int64))[:, None] * result_stride + output[None, :]
            mask = used[:, None] & valid[None, :]
            total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, total.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_rows(
    x, shrunk, entries, table, x_stride, inputs, count, ranks,
    INPUTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write products of one token with a split of some rows of A to shrunk [splits, C, ranks]."""
    entry = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(entries + entry)
    if slot >= 0:
        fields = table + slot * FIELDS
        a = tl.load(fields)
        rows = tl.load(fields + 1).to(tl.int32)
        first = tl.program_id(2) * RANKS
        if first < rows:
            weights = a.to(tl.pointer_type(x.dtype.element_ty))
            rank = first + tl.arange(0, RANKS)
            k = split * INPUTS + tl.arange(0, INPUTS)
            inside = k < inputs
            values = tl.load(x + tl.load(entries + count + entry) * x_stride + k, mask=inside, other=0.0)
            tile = tl.load(
                weights + rank.to(tl.int64)[:, None] * inputs + k[None, :],
                mask=(rank < rows)[:, None] & inside[None, :],
                other=0.0,
            )
            total = tl.sum(tile.to(tl.float32) * values.to(tl.float32)[None, :], axis=1)
            tl.store(shrunk + (split * count + entry).to(tl.int64) * ranks + rank, total, mask=rank < rows)


@triton.jit
def _expanded(
    source, fields, row, valid, split_stride, splits,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the products [COLUMNS] of one token's shrunk splits at `source` with some rows of a part's B."""
    weights = tl.load(fields).to(tl.pointer_type(DTYPE))
    offset = tl.load(fields + 1).to(tl.int32)
    rows = tl.load(fields + 2).to(tl.int32)
    split = tl.arange(0, SPLITS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, rows, RANKS):
        rank = first + tl.arange(0, RANKS)
        used = rank < rows
        parts = tl.load(
            source + split.to(tl.int64)[:, None] * split_stride + offset + rank[None, :],
            mask=(split < splits)[:, None] & used[None, :],
            other=0.0,
        )
        factors = tl.load(
            weights + row.to(tl.int64)[:, None] * rows + rank[None, :],
            mask=valid[:, None] & used[None, :],
            other=0.0,
        )
        total += tl.sum(factors.to(tl.float32) * tl.sum(parts, axis=0)[None, :], axis=1)
    return total


@triton.jit
def _expand_rows(
    result, shrunk, entries, table, tiles, result_stride, splits, count, ranks,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of one token with some rows of B to the result."""
    entry = tl.program_id(0)
    slot = tl.load(entries + entry)
    if slot >= 0:
        tile = tiles + tl.program_id(1) * 4
        fields = table + slot * FIELDS + 2 + tl.load(tile + 2) * PART
        if tl.load(fields) != 0:
            output = tl.load(tile) + tl.arange(0, COLUMNS)
            valid = output < tl.load(tile + 1)
            total = _expanded(
                shrunk + entry.to(tl.int64) * ranks, fields, output - tl.load(tile + 3), valid,
                count * ranks, splits, SPLITS, RANKS, COLUMNS, result.dtype.element_ty,
            )  # fmt: skip
            at = result + tl.load(entries + count + entry) * result_stride + output
            total += tl.load(at, mask=valid, other=0.0).to(tl.float32)
            tl.store(at, total.to(result.dtype.element_ty), mask=valid)


@triton.jit
def _gated_rows(
    gate_up, shrunk, result, result_shrunk, entries, gate_up_table, down_table,
    row_stride, size, splits, count, ranks,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """
    Write the activation [T, size] of gate_up [T, 2 size], to which adapters are added first, and its products
    with all rows of A to result_shrunk [programs of a row, C, ranks].
    """
    entry = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    token = tl.load(entries + count + entry)
    at = gate_up + token * row_stride + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + size, mask=inside, other=0.0)
    slot = tl.load(entries + entry)
    if slot >= 0:
        source = shrunk + entry.to(tl.int64) * ranks
        fields = gate_up_table + slot * FIELDS + 2
        added = _expanded(
            source, fields, column, inside, count * ranks, splits,
            SPLITS, RANKS, COLUMNS, gate_up.dtype.element_ty,
        )  # fmt: skip
        gate = (gate.to(tl.float32) + added).to(gate.dtype)
        added = _expanded(
            source, fields + PART, column, inside, count * ranks, splits,
            SPLITS, RANKS, COLUMNS, gate_up.dtype.element_ty,
        )  # fmt: skip
        up = (up.to(tl.float32) + added).to(up.dtype)
    product = gated_product(gate, up, GELU)
    tl.store(result + token * size + column, product, mask=inside)
    if slot >= 0:
        fields = down_table + slot * FIELDS
        weights = tl.load(fields).to(tl.pointer_type(gate_up.dtype.element_ty))
        rows = tl.load(fields + 1).to(tl.int32)
        to = result_shrunk + (tl.program_id(1) * count + entry).to(tl.int64) * ranks
        for first in range(0, rows, RANKS):
            rank = first + tl.arange(0, RANKS)
            tile = tl.load(
                weights + rank.to(tl.int64)[:, None] * size + column[None, :],
                mask=(rank < rows)[:, None] & inside[None, :],
                other=0.0,
            )
            total = tl.sum(tile.to(tl.float32) * product.to(tl.float32)[None, :], axis=1)
            tl.store(to + rank, total, mask=rank < rows)


def adapted_rows(table: AdapterTable, batch: Batch, *, wanted: bool, gelu: bool) -> AdapterRows | None:
    """Return the rows of a batch that have adapters, or None if none has one."""
    if isinstance(batch, StaticBatch):
        if batch.adapters is None:
            return None
        number = torch.arange(batch.size, device=batch.device)
        entries = torch.stack((batch.adapters, number, torch.ones_like(number)))
        return AdapterRows(table, entries, 1, batch.adapter_rank * MOST_PARTS, gelu)
    spans = batch.adapted(wanted=wanted)
    spans = [(tokens, adapter) for tokens, adapter in spans if tokens.start < tokens.stop]
    if not spans:
        return None
    longest = max(tokens.stop - tokens.start for tokens, _ in spans)
    tile = next((most for most in (1, FEW_TOKENS) if longest <= most), MANY_TOKENS)
    listed = [
        (adapter.slot, first, min(tile, tokens.stop - first))
        for tokens, adapter in spans
        for first in range(tokens.start, tokens.stop, tile)
    ]
    entries = copied(np.array(listed, dtype=np.int64).T.copy(), batch.device)
    return AdapterRows(table, entries, tile, max(adapter.rank for _, adapter in spans), gelu)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The tokens of a pass that have adapters: implementation of `AdaptedRows`."""

    table: AdapterTable
    entries: Tensor
    """[3, C] int64 slot, first token and number of tokens of each tile. Those of slot -1 have no adapter."""
    tile: int
    """Most tokens of a tile."""
    ranks: int
    """Most rows of A."""
    gelu: bool
    """Whether the activation of an MLP is GELU."""

    @property
    def count(self) -> int:
        return self.entries.shape[1]

    def add(self, result: Tensor, x: Tensor, layer: int, linear: str) -> Tensor:
        fields, tiles = self.table.fields(layer, linear), self.table.tiles[linear]
        if self.tile == 1:
            self._expand_rows(result, self._shrink_rows(x, fields), fields, tiles)
        else:
            self._expand_tiles(result, self._shrink_tiles(x, fields), fields, tiles)
        return result

    def mlp(self, gate_up: Tensor, x: Tensor, layer: int, down: Linear) -> Tensor:
        if self.tile > 1 or self.count < len(gate_up):  # tokens without adapters have no entries
            gated = layers.gated(self.add(gate_up, x, layer, "gate_up"), self.gelu)
            return self.add(down(gated), gated, layer, "down")
        size = gate_up.shape[1] // 2
        gate_up_fields, down_fields = self.table.fields(layer, "gate_up"), self.table.fields(layer, "down")
        from_x = self._shrink_rows(x, gate_up_fields)
        gated = gate_up.new_empty((self.count, size))
        programs = triton.cdiv(size, GATED_COLUMNS)
        shrunk = x.new_empty((programs, self.count, self.ranks), dtype=torch.float32)
        _gated_rows[(self.count, programs)](
            gate_up,
            from_x,
            gated,
            shrunk,
            self.entries,
            gate_up_fields,
            down_fields,
            gate_up.stride(0),
            size,
            len(from_x),
            self.count,
            self.ranks,
            SPLITS=triton.next_power_of_2(len(from_x)),
            RANKS=ROW_RANKS,
            COLUMNS=GATED_COLUMNS,
            GELU=self.gelu,
            num_warps=8,  # as many columns of a thread as in `_expand_rows`: with 4, it takes all registers
            enable_fp_fusion=True,
        )
        result = down(gated)
        self._expand_rows(result, shrunk, down_fields, self.table.tiles["down"])
        return result

    def _shrink_rows(self, x: Tensor, fields: Tensor) -> Tensor:
        """Return products [splits, C, ranks] fp32 of splits of the tokens' inputs with A."""
        x, inputs = x if x.stride(1) == 1 else x.contiguous(), x.shape[1]
        splits = triton.cdiv(inputs, ROW_SPLIT)
        shrunk = x.new_empty((splits, self.count, self.ranks), dtype=torch.float32)
        _shrink_rows[(self.count, splits, triton.cdiv(self.ranks, ROW_RANKS))](
            x,
            shrunk,
            self.entries,
            fields,
            x.stride(0),
            inputs,
            self.count,
            self.ranks,
            INPUTS=ROW_SPLIT,
            RANKS=ROW_RANKS,
            enable_fp_fusion=True,
        )
        return shrunk

    def _expand_rows(self, result: Tensor, shrunk: Tensor, fields: Tensor, tiles: Tensor) -> None:
        _expand_rows[(self.count, len(tiles))](
            result,
            shrunk,
            self.entries,
            fields,
            tiles,
            result.stride(0),
            len(shrunk),
            self.count,
            self.ranks,
            SPLITS=triton.next_power_of_2(len(shrunk)),
            RANKS=ROW_RANKS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )

    def _shrink_tiles(self, x: Tensor, fields: Tensor) -> Tensor:
        """Return products [splits, C, tile, ranks] fp32 of splits of the tokens' inputs with A."""
        x, inputs = x if x.stride(1) == 1 else x.contiguous(), x.shape[1]
        splits = triton.cdiv(inputs, SPLIT) if self.count < PROGRAMS else 1
        shrunk = x.new_empty((splits, self.count, self.tile, self.ranks), dtype=torch.float32)
        _shrink[(self.count, splits)](
            x,
            shrunk,
            self.entries,
            fields,
            x.stride(0),
            inputs,
            self.count,
            self.ranks,
            SPLIT_INPUTS=SPLIT if splits > 1 else triton.next_power_of_2(inputs),
            TOKENS=self.tile,
            RANKS=RANKS,
            STEP=STEP,
            enable_fp_fusion=True,
        )
        return shrunk

    def _expand_tiles(self, result: Tensor, shrunk: Tensor, fields: Tensor, tiles: Tensor) -> None:
        _expand[(self.count, len(tiles))](
            result,
            shrunk,
            self.entries,
            fields,
            tiles,
            result.stride(0),
            len(shrunk),
            self.count,
            self.ranks,
            TOKENS=self.tile,
            RANKS=FEW_TOKENS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )
