"""Loads the weights of a decoder into the native kernels, and records their layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from baton_engine.model.weights import LayerWeights, Weights
from baton_engine.quantized import Matrix, Quantized, floats

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "attention_norm", "qkv", "q_norm", "k_norm", "output", "attention_post_norm", "mlp_norm",
            "gate_up", "down", "mlp_post_norm", "final_norm", "head", "embedding",
        )
    )
}  # fmt: skip
EXPERTS = "experts"
"""Place of all experts of a layer with their router."""

NORMS = tuple(name for name in FIELDS if name.endswith("norm") and name != "final_norm")
STORED = ctypes.c_void_p(None)
"""Address of weights whose packed form is stored: the kernels reserve their space only."""
BIASED = ctypes.c_void_p(1)
"""Any address, for a bias that is stored too."""


class WeightLayout(msgspec.Struct, frozen=True, array_like=True):
    """One weight in the order of loading, as far as the layout of the packed weights depends on it."""

    layer: int
    name: str
    outputs: int
    """EXPERTS: their number."""
    inputs: int
    biased: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    """Format and outputs of each part of a quantized matrix."""


class _Part(ctypes.Structure):
    """`struct part` of model.h."""

    _fields_ = (("format", ctypes.c_int64), ("outputs", ctypes.c_int64), ("rows", ctypes.c_void_p))


class WeightLoader:
    """Loads the weights of one model. They must be in the same order for each model with the same spec."""

    def __init__(self, kernels: ctypes.CDLL, model: ctypes.c_void_p, dtype: torch.dtype) -> None:
        self._kernels, self._model, self._dtype = kernels, model, dtype
        self.loads: list[WeightLayout] = []

    def load(self, weights: Weights) -> None:
        """Copy all weights. Each layer is released before the next one. Raises ValueError and MemoryError."""
        for number, layer in enumerate(weights.layers):
            self._load_layer(number, layer)
        self._load(0, "final_norm", weights.final_norm)
        self._load(0, "head", weights.head)
        if weights.head is not weights.embedding:
            self._load(0, "embedding", weights.embedding)

    def reserve(self, loads: Iterable[WeightLayout], layers: int) -> bool:
        """Lay out weights that are stored in packed form. Returns whether they fit a model of `layers`."""
        self.loads = list(loads)
        return all(0 <= load.layer < layers and self._reserve(load) for load in self.loads)

    def _reserve(self, load: WeightLayout) -> bool:
        layer, bias = ctypes.c_int64(load.layer), BIASED if load.biased else STORED
        if load.name == EXPERTS:
            return bool(
                self._kernels.baton_load_router(self._model, layer, STORED)
                and all(
                    self._kernels.baton_load_expert(
                        self._model, layer, ctypes.c_int64(expert), STORED, STORED
                    )
                    for expert in range(load.outputs)
                )
            )
        where = self._model, layer, ctypes.c_int64(FIELDS[load.name])
        outputs, inputs = ctypes.c_int64(load.outputs), ctypes.c_int64(load.inputs)
        if not load.parts:
            return bool(self._kernels.baton_load(*where, STORED, bias, outputs, inputs))
        parts = (_Part * len(load.parts))(*(_Part(*part, None) for part in load.parts))
        count = ctypes.c_int64(len(parts))
        return bool(self._kernels.baton_load_quantized(*where, ctypes.byref(parts), count, bias, inputs))

    def _load_layer(self, number: int, layer: LayerWeights) -> None:
        for name in NORMS:
            if (norm := getattr(layer, name)) is not None:
                self._load(number, name, norm)
        self._load(number, "qkv", layer.qkv, layer.qkv_bias)
        self._load(number, "output", layer.output, layer.output_bias)
        if layer.gate_up is not None and layer.down is not None:
            self._load(number, "gate_up", layer.gate_up, layer.gate_up_bias)
            self._load(number, "down", layer.down, layer.down_bias)
        if layer.router is not None and layer.expert_gate_up is not None and layer.expert_down is not None:
            weights = layer.router, floats(layer.expert_gate_up), floats(layer.expert_down)
            self._load_experts(number, *weights)
            self.loads.append(WeightLayout(number, EXPERTS, *layer.router.shape))

    def _load_experts(self, layer: int, router: Tensor, gate_up: Tensor, down: Tensor) -> None:
        """Pack the router [E, N] and the experts [E, 2G, N] and [E, N, G] of a layer. Raises MemoryError."""
        number, exact = ctypes.c_int64(layer), router.to(torch.float32).contiguous()
        fits = self._kernels.baton_load_router(self._model, number, ctypes.c_void_p(exact.data_ptr()))
        for expert, weights in enumerate(zip(gate_up, down, strict=True)):
            packed = [weight.to(self._dtype).contiguous() for weight in weights]
            pointers = (ctypes.c_void_p(weight.data_ptr()) for weight in packed)
            fits = fits and self._kernels.baton_load_expert(
                self._model, number, ctypes.c_int64(expert), *pointers
            )
        if not fits:
            raise MemoryError(f"layer {layer}: no memory for {len(router)} packed experts")

    def _load(self, layer: int, name: str, weight: Matrix, bias: Tensor | None = None) -> None:
        bias = None if bias is None else bias.to(self._dtype).contiguous()
        where = (self._model, ctypes.c_int64(layer), ctypes.c_int64(FIELDS[name]))
        bias_at = ctypes.c_void_p(None if bias is None else bias.data_ptr())
        formats: tuple[tuple[int, int], ...] = ()
        if isinstance(weight, Quantized):
            rows = [part.rows.contiguous() for part in weight.parts]
            formats = tuple(
                (int(part.format), len(data)) for part, data in zip(weight.parts, rows, strict=True)
            )
            parts = (_Part * len(rows))(
                *(_Part(*form, data.data_ptr()) for form, data in zip(formats, rows, strict=True))
            )
            fits = self._kernels.baton_load_quantized(
                *where, ctypes.byref(parts), ctypes.c_int64(len(rows)), bias_at, ctypes.c_int64(weight.inputs)
            )
        else:
            # Norms are vectors. The kernels compute with fp32 norms for any dtype of the matrices.
            weight = weight.to(self._dtype if weight.dim() == 2 else torch.float32).contiguous()
            fits = self._kernels.baton_load(
                *where,
                ctypes.c_void_p(weight.data_ptr()),
                bias_at,
                ctypes.c_int64(weight.shape[0]),
                ctypes.c_int64(weight.shape[1] if weight.dim() == 2 else 1),
            )
        if not fits:
            raise ValueError(f"layer {layer}: {name} {tuple(weight.shape)} does not fit the model's sizes")
        inputs = weight.shape[1] if len(weight.shape) == 2 else 1
        self.loads.append(WeightLayout(layer, name, weight.shape[0], inputs, bias is not None, formats))
