"""
The LoRA adapters on a device: a table of addresses, by slot, layer and linear, where kernels look them up.

An adapter keeps its slot until nothing refers to it any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from baton_engine.ops import LowRankLinear
from baton_engine.spec import ModelSpec

SLOTS = 256
"""Maximum number of adapters on a device, loaded or still used by requests."""

MOST_PARTS = 3
"""Projections that one linear computes: q, k and v."""

PART = tl.constexpr(3)
FIELDS = tl.constexpr(2 + 3 * MOST_PARTS)
"""Numbers of an adapter and a linear: address and rows of A; for each part address of B, first rank and
number of ranks."""

COLUMNS = 128
"""Outputs of a tile."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SlottedAdapter:
    """An adapter in an `AdapterTable`, which it leaves with its last reference."""

    slot: int
    rank: int
    """The most rows of A of a linear."""
    layers: Sequence[Mapping[str, LowRankLinear]]
    """The memory to which the table points."""


class AdapterTable:
    """The adapters on a device. `place` runs on any thread."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        width, f = spec.kv_heads * spec.head_dim, spec.intermediate
        parts = {
            "qkv": (spec.heads * spec.head_dim, width, width),
            "output": (spec.hidden,),
            "gate_up": (f, f),
            "down": (spec.hidden,),
        }
        self._starts = {name: [0, *np.cumsum(sizes).tolist()] for name, sizes in parts.items()}
        self._linears = {name: number for number, name in enumerate(parts)}
        self.tiles = {
            name: torch.tensor(_tiles(starts), dtype=torch.int32, device=device)
            for name, starts in self._starts.items()
        }
        """By linear, [tiles, 4] int32: first output, and end, number and start of its part."""
        size = (spec.layers, len(parts), SLOTS, FIELDS.value)
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        self._free = list(range(SLOTS))
        self._lock = threading.Lock()

    def fields(self, layer: int, linear: str) -> Tensor:
        """Return the fields [SLOTS, FIELDS] int64 of all adapters for a linear."""
        return self._table[layer, self._linears[linear]]

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
        # Without the lock, which a finalizer could wait for in its own thread.
        weakref.finalize(adapter, self._free.append, slot)
        return adapter

    def _write(self, slot: int, layers: Sequence[Mapping[str, LowRankLinear]]) -> None:
        fields = np.zeros((*self._table.shape[:2], FIELDS.value), dtype=np.int64)
        for layer, linears in enumerate(layers):
            for name, linear in linears.items():
                numbers = _fields(self._starts[name][:-1], linear)
                fields[layer, self._linears[name], : len(numbers)] = numbers
        device = self._table.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # passes under way may read the slot's last adapter
        self._table[:, :, slot] = torch.from_numpy(fields).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before a pass on another stream reads this one


def _fields(starts: Sequence[int], linear: LowRankLinear) -> list[int]:
    """Return the fields of a linear whose parts begin at `starts`."""
    fields = [linear.a.data_ptr(), len(linear.a)]
    for start in starts:
        for piece in linear.outputs:
            outputs, rank = piece.b.shape
            if piece.start <= start < piece.start + outputs:
                fields += [piece.b[start - piece.start :].data_ptr(), piece.rank, rank]
                break
        else:
            fields += [0, 0, 0]
    return fields


def _tiles(starts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    return [
        (first, stop, part, start)
        for part, (start, stop) in enumerate(pairwise(starts))
        for first in range(start, stop, COLUMNS)
    ]
