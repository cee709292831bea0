"""LoRA adapters in the native decoder: each row of a pass has its own adapter or none, see `lora.h`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from baton_engine.model.lora import FUSED, LoraWeights, low_rank_linears, projection_shapes
from baton_engine.spec import ModelSpec

MOST_PARTS = 3


class _Part(ctypes.Structure):
    """`struct low_rank_part` of lora.h."""

    _fields_ = (
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("start", "outputs", "first_rank", "rank")),
    )


class _Source(ctypes.Structure):
    """`struct low_rank_source` of lora.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "inputs", "outputs", "parts")),
        ("part", _Part * MOST_PARTS),
    )


class NativeAdapter:
    """A packed adapter. Its memory is freed with the last reference."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: LoraWeights,
        dtype: torch.dtype,
        kernel_library: ctypes.CDLL,
        model: ctypes.c_void_p,
    ) -> None:
        """`model` is the handle of the decoder. Raises MemoryError."""
        sizes = {part: size for _, part, _, size in projection_shapes(spec).values()}
        outputs = [
            sizes[linear] if linear in sizes else sum(sizes[part] for part in parts)
            for linear, parts in FUSED.items()
        ]
        sources = (_Source * (spec.layers * len(FUSED)))()
        tensors = []  # referenced until the library has copied them
        for number, layer in enumerate(weights.layers):
            linears = low_rank_linears(spec, layer, dtype, torch.device("cpu"))
            tensors.append(linears)
            for position, name in enumerate(FUSED):
                if (linear := linears.get(name)) is None:
                    continue
                source = sources[number * len(FUSED) + position]
                source.a = linear.a.data_ptr()
                source.rank, source.inputs = linear.a.shape
                source.outputs, source.parts = outputs[position], len(linear.outputs)
                for index, part in enumerate(linear.outputs):
                    source.part[index] = _Part(
                        part.b.data_ptr(), part.start, len(part.b), part.rank, part.b.shape[1]
                    )
        handle = kernel_library.baton_adapter_create(model, sources)
        if not handle:
            raise MemoryError("no memory for the adapter")
        self.handle = ctypes.c_void_p(handle)
        weakref.finalize(self, kernel_library.baton_adapter_destroy, self.handle)


def adapter_pointers(adapters: Sequence[NativeAdapter | None]) -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the adapters of a pass's rows as `struct pass` has them; None if no row has one."""
    if not any(adapters):
        return None
    return (ctypes.c_void_p * len(adapters))(
        *(None if adapter is None else adapter.handle for adapter in adapters)
    )
