"""
LoRA adapters: for each linear of a layer one launch shrinks its input to the ranks, and one expands it.

In rows of one token, the activation of an MLP expands its inputs and shrinks its results in the same launch.
Adapters are looked up by their slot in a table on the device. So the launches do not depend on which adapters
a batch has, or on how many rows each of them has, and captured passes repeat them for others.
https://arxiv.org/abs/2310.18547, https://arxiv.org/abs/2311.03285
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from baton_engine.batch import Batch, StaticBatch
from baton_engine.ops import Linear, LowRankLinear
from baton_engine.ops.kernels import layers
from baton_engine.ops.kernels.layers import gated_product
from baton_engine.spec import ModelSpec
from baton_engine.streams import copied

SLOTS = 256
"""Maximum number of adapters on a device, loaded or still used by requests."""

MOST_PARTS = 3
"""Projections that one linear computes: q, k and v."""

PART = tl.constexpr(3)
FIELDS = tl.constexpr(2 + 3 * MOST_PARTS)
"""Numbers of an adapter and a linear: address and rows of A; for each part address of B, first rank and
number of ranks."""

FEW_TOKENS, MANY_TOKENS = 16, 64
"""Tokens of a tile: of rows with a few tokens, and of prompts."""

COLUMNS = 128
"""Outputs of a tile."""

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
    SLOT_FIELDS: tl.constexpr, SPLIT_INPUTS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Write products of a tile of tokens with a split of all rows of A to shrunk [splits, C, T, ranks]."""
    entry = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(entries + entry)
    if slot >= 0:
        fields = table + slot * SLOT_FIELDS
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
    SLOT_FIELDS: tl.constexpr, PART_FIELDS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of a tile of tokens with some rows of B to the result."""
    entry = tl.program_id(0)
    slot = tl.load(entries + entry)
    if slot >= 0:
        tile = tiles + tl.program_id(1) * 4
        fields = table + slot * SLOT_FIELDS + 2 + tl.load(tile + 2) * PART_FIELDS
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
    SLOT_FIELDS: tl.constexpr, INPUTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write products of one token with a split of some rows of A to shrunk [splits, C, ranks]."""
    entry = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.load(entries + entry)
    if slot >= 0:
        fields = table + slot * SLOT_FIELDS
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
    SLOT_FIELDS: tl.constexpr, PART_FIELDS: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of one token with some rows of B to the result."""
    entry = tl.program_id(0)
    slot = tl.load(entries + entry)
    if slot >= 0:
        tile = tiles + tl.program_id(1) * 4
        fields = table + slot * SLOT_FIELDS + 2 + tl.load(tile + 2) * PART_FIELDS
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
    SLOT_FIELDS: tl.constexpr, PART_FIELDS: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr,
    COLUMNS: tl.constexpr, GELU: tl.constexpr,
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
        fields = gate_up_table + slot * SLOT_FIELDS + 2
        added = _expanded(
            source, fields, column, inside, count * ranks, splits,
            SPLITS, RANKS, COLUMNS, gate_up.dtype.element_ty,
        )  # fmt: skip
        gate = (gate.to(tl.float32) + added).to(gate.dtype)
        added = _expanded(
            source, fields + PART_FIELDS, column, inside, count * ranks, splits,
            SPLITS, RANKS, COLUMNS, gate_up.dtype.element_ty,
        )  # fmt: skip
        up = (up.to(tl.float32) + added).to(up.dtype)
    product = gated_product(gate, up, GELU)
    tl.store(result + token * size + column, product, mask=inside)
    if slot >= 0:
        fields = down_table + slot * SLOT_FIELDS
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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SlottedAdapter:
    """An adapter in a `LowRankTable`, which it leaves with its last reference."""

    slot: int
    rank: int
    """The most rows of A of a linear."""
    layers: Sequence[Mapping[str, LowRankLinear]]
    """The memory to which the table points."""


class LowRankTable:
    """The adapters on a device. `place` runs on any thread."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        width, f = spec.kv_heads * spec.head_dim, spec.intermediate
        parts = {
            "qkv": (spec.heads * spec.head_dim, width, width),
            "output": (spec.hidden,),
            "gate_up": (f, f),
            "down": (spec.hidden,),
        }
        self._gelu = spec.activation == "gelu_tanh"
        self._starts = {name: np.cumsum((0, *sizes)) for name, sizes in parts.items()}
        self._linears = {name: number for number, name in enumerate(parts)}
        self._tiles = {
            name: torch.tensor(_tiles(starts), dtype=torch.int32, device=device)
            for name, starts in self._starts.items()
        }
        size = (spec.layers, len(parts), SLOTS, FIELDS.value)
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    @torch.inference_mode()  # as passes, one of which may have made the table
    def place(self, layers: Sequence[Mapping[str, LowRankLinear]]) -> SlottedAdapter:
        """Put an adapter in a free slot. Raises MemoryError if there is none."""
        with self._lock:
            if not self._free:
                raise MemoryError(f"{SLOTS} adapters are loaded or still used by requests")
            slot = self._free.pop(0)
        try:
            self._write(slot, layers)
        except BaseException as error:
            self._free.append(slot)
            if isinstance(error, torch.OutOfMemoryError):
                raise MemoryError(str(error)) from error
            raise
        most = max((len(linear.a) for linears in layers for linear in linears.values()), default=1)
        adapter = SlottedAdapter(slot, most, layers)
        weakref.finalize(adapter, self._release, slot)
        return adapter

    def _write(self, slot: int, layers: Sequence[Mapping[str, LowRankLinear]]) -> None:
        fields = np.zeros((*self._table.shape[:2], FIELDS.value), dtype=np.int64)
        for layer, linears in enumerate(layers):
            for name, linear in linears.items():
                fields[layer, self._linears[name]] = self._fields(name, linear)
        device = self._table.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # passes under way may read the slot's last adapter
        self._table[:, :, slot] = torch.from_numpy(fields).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before a pass on another stream reads this one

    def _release(self, slot: int) -> None:
        self._free.append(slot)  # without the lock, which a finalizer could wait for in its own thread

    def _fields(self, name: str, linear: LowRankLinear) -> list[int]:
        fields = [linear.a.data_ptr(), len(linear.a)]
        starts = self._starts[name].tolist()
        for start in starts[:-1]:
            for piece in linear.outputs:
                outputs, rank = piece.b.shape
                if piece.start <= start < piece.start + outputs:
                    inside = piece.b[start - piece.start :]
                    fields += [inside.data_ptr(), piece.rank, rank]
                    break
            else:
                fields += [0, 0, 0]
        return fields + [0] * (FIELDS.value - len(fields))

    def rows(self, batch: Batch, *, wanted: bool) -> LowRankRows | None:
        """Return what the kernels need of the rows of a batch, or None if none has an adapter."""
        if isinstance(batch, StaticBatch):
            if batch.adapters is None:
                return None
            number = torch.arange(batch.size, device=batch.device)
            entries = torch.stack((batch.adapters, number, torch.ones_like(number)))
            return LowRankRows(self, entries, 1, batch.adapter_rank * MOST_PARTS)
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
        return LowRankRows(self, entries, tile, max(adapter.rank for _, adapter in spans))

    def launch(self, rows: LowRankRows, result: Tensor, x: Tensor, layer: int, linear: str) -> None:
        if rows.tile == 1:
            self._add_expanded(rows, result, self._shrunk(rows, x, layer, linear), layer, linear)
        else:
            self._launch_tiles(rows, result, x, layer, linear)

    def mlp(self, rows: LowRankRows, gate_up: Tensor, x: Tensor, layer: int, down: Linear) -> Tensor:
        count, size = rows.entries.shape[1], gate_up.shape[1] // 2
        if rows.tile > 1 or count < len(gate_up):  # tokens without adapters have no entries
            self.launch(rows, gate_up, x, layer, "gate_up")
            gated = layers.gated(gate_up, self._gelu)
            result = down(gated)
            self.launch(rows, result, gated, layer, "down")
            return result
        from_x, gated = self._shrunk(rows, x, layer, "gate_up"), gate_up.new_empty((count, size))
        shrunk = x.new_empty((triton.cdiv(size, GATED_COLUMNS), count, rows.ranks), dtype=torch.float32)
        _gated_rows[(count, len(shrunk))](
            gate_up,
            from_x,
            gated,
            shrunk,
            rows.entries,
            self._table[layer, self._linears["gate_up"]],
            self._table[layer, self._linears["down"]],
            gate_up.stride(0),
            size,
            len(from_x),
            count,
            rows.ranks,
            SLOT_FIELDS=FIELDS,
            PART_FIELDS=PART,
            SPLITS=triton.next_power_of_2(len(from_x)),
            RANKS=ROW_RANKS,
            COLUMNS=GATED_COLUMNS,
            GELU=self._gelu,
            num_warps=8,  # as many columns of a thread as in `_expand_rows`: with 4, it takes all registers
            enable_fp_fusion=True,
        )
        result = down(gated)
        self._add_expanded(rows, result, shrunk, layer, "down")
        return result

    def _shrunk(self, rows: LowRankRows, x: Tensor, layer: int, linear: str) -> Tensor:
        """Return products [splits, C, ranks] fp32 of splits of the tokens' inputs with A."""
        count, inputs = rows.entries.shape[1], x.shape[1]
        splits = triton.cdiv(inputs, ROW_SPLIT)
        shrunk = x.new_empty((splits, count, rows.ranks), dtype=torch.float32)
        _shrink_rows[(count, splits, triton.cdiv(rows.ranks, ROW_RANKS))](
            x,
            shrunk,
            rows.entries,
            self._table[layer, self._linears[linear]],
            x.stride(0),
            inputs,
            count,
            rows.ranks,
            SLOT_FIELDS=FIELDS,
            INPUTS=ROW_SPLIT,
            RANKS=ROW_RANKS,
            enable_fp_fusion=True,
        )
        return shrunk

    def _add_expanded(
        self, rows: LowRankRows, result: Tensor, shrunk: Tensor, layer: int, linear: str
    ) -> None:
        (splits, count, _), tiles = shrunk.shape, self._tiles[linear]
        _expand_rows[(count, len(tiles))](
            result,
            shrunk,
            rows.entries,
            self._table[layer, self._linears[linear]],
            tiles,
            result.stride(0),
            splits,
            count,
            rows.ranks,
            SLOT_FIELDS=FIELDS,
            PART_FIELDS=PART,
            SPLITS=triton.next_power_of_2(splits),
            RANKS=ROW_RANKS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )

    def _launch_tiles(self, rows: LowRankRows, result: Tensor, x: Tensor, layer: int, linear: str) -> None:
        count, inputs = rows.entries.shape[1], x.shape[1]
        splits = triton.cdiv(inputs, SPLIT) if count < PROGRAMS else 1
        table = self._table[layer, self._linears[linear]]
        shrunk = x.new_empty((splits, count, rows.tile, rows.ranks), dtype=torch.float32)
        _shrink[(count, splits)](
            x,
            shrunk,
            rows.entries,
            table,
            x.stride(0),
            inputs,
            count,
            rows.ranks,
            SLOT_FIELDS=FIELDS,
            SPLIT_INPUTS=SPLIT if splits > 1 else triton.next_power_of_2(inputs),
            TOKENS=rows.tile,
            RANKS=RANKS,
            STEP=STEP,
            enable_fp_fusion=True,
        )
        tiles = self._tiles[linear]
        _expand[(count, len(tiles))](
            result,
            shrunk,
            rows.entries,
            table,
            tiles,
            result.stride(0),
            splits,
            count,
            rows.ranks,
            SLOT_FIELDS=FIELDS,
            PART_FIELDS=PART,
            TOKENS=rows.tile,
            RANKS=FEW_TOKENS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )


@dataclass(frozen=True, slots=True)
class LowRankRows:
    """The tokens of a pass that have adapters: implementation of `AdaptedRows`."""

    table: LowRankTable
    entries: Tensor
    """[3, C] int64 slot, first token and number of tokens of each tile. Those of slot -1 have no adapter."""
    tile: int
    """Most tokens of a tile."""
    ranks: int
    """Most rows of A."""

    def add(self, result: Tensor, x: Tensor, layer: int, linear: str) -> Tensor:
        self.table.launch(self, result, x if x.stride(1) == 1 else x.contiguous(), layer, linear)
        return result

    def mlp(self, gate_up: Tensor, x: Tensor, layer: int, down: Linear) -> Tensor:
        return self.table.mlp(self, gate_up, x if x.stride(1) == 1 else x.contiguous(), layer, down)


def _tiles(starts: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Return for each tile of a linear's outputs its first one, and the end, number and start of its part."""
    return [
        (first, stop, part, start)
        for part, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        for first in range(start, stop, COLUMNS)
    ]
