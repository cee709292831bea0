"""Loads the weights of a decoder into the native kernels, and records their layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from baton_engine.model.weights import LayerWeights, Weights
from baton_engine.quantized import Matrix, Quantized
from baton_engine.spec import ModelSpec

FIELDS = {
    name: number
    for number, name in enumerate(
        (
            "attention_norm", "qkv", "q_norm", "k_norm", "output", "attention_post_norm", "mlp_norm",
            "gate_up", "down", "mlp_post_norm", "final_norm", "head", "embedding",
        )
    )
}  # fmt: skip
ROUTER = "router"
OF_EXPERTS = {"expert_gate_up": FIELDS["gate_up"], "expert_down": FIELDS["down"]}
"""Matrices of the experts of a layer, and the places of each expert's."""
UNQUANTIZED = 0
"""Format of the kernels for numbers of the weights' dtype."""

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
    inputs: int
    biased: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    """Format and outputs of each part of a quantized matrix, or of one expert's matrix."""


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

    def reserve(self, loads: Iterable[WeightLayout], spec: ModelSpec) -> bool:
        """Lay out weights that are stored in packed form. Returns whether they fit a model of `spec`."""
        self.loads = list(loads)
        return all(0 <= load.layer < spec.layers and self._reserve(load, spec) for load in self.loads)

    def _reserve(self, load: WeightLayout, spec: ModelSpec) -> bool:
        layer, bias = ctypes.c_int64(load.layer), BIASED if load.biased else STORED
        if load.name == ROUTER:
            return bool(self._kernels.baton_load_router(self._model, layer, STORED))
        if load.name in OF_EXPERTS:
            of_each = [_Part(*part, None) for part in load.parts]
            of_all = of_each * (0 if spec.experts is None else spec.experts.count)
            return bool(of_all and self._pack_experts(load.layer, load.name, of_all, len(of_each)))
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
            self._load_router(number, layer.router)
            self._load_experts(number, "expert_gate_up", layer.expert_gate_up, len(layer.router))
            self._load_experts(number, "expert_down", layer.expert_down, len(layer.router))

    def _load_router(self, layer: int, router: Tensor) -> None:
        """Pack the router [E, N] of a layer, in fp32. Raises MemoryError."""
        exact = router.to(torch.float32).contiguous()
        address = ctypes.c_void_p(exact.data_ptr())
        if not self._kernels.baton_load_router(self._model, ctypes.c_int64(layer), address):
            raise MemoryError(f"layer {layer}: no memory for the router of {len(router)} experts")
        self.loads.append(WeightLayout(layer, ROUTER, *router.shape))

    def _load_experts(self, layer: int, name: str, weights: Matrix, count: int) -> None:
        """Pack a matrix of each of `count` experts of a layer, stacked. Raises MemoryError."""
        if isinstance(weights, Quantized):
            outputs, inputs = weights.shape
            rows = [part.rows.contiguous() for part in weights.parts]
            formats = [int(part.format) for part in weights.parts]
        else:
            outputs, inputs = weights.shape[0] * weights.shape[1], weights.shape[2]
            rows = [weight.to(self._dtype).contiguous() for weight in weights]
            formats = [UNQUANTIZED] * count
        parts = [_Part(form, len(data), data.data_ptr()) for form, data in zip(formats, rows, strict=True)]
        of_each = len(parts) // count
        if not self._pack_experts(layer, name, parts, of_each):
            raise MemoryError(f"layer {layer}: no memory for {name} of {count} experts")
        layout = tuple((part.format, part.outputs) for part in parts[:of_each])
        self.loads.append(WeightLayout(layer, name, outputs, inputs, parts=layout))

    def _pack_experts(self, layer: int, name: str, parts: Sequence[_Part], of_each: int) -> int:
        """Pack `of_each` parts of each expert of a layer. Returns 0 if they do not fit."""
        packed: int = self._kernels.baton_load_experts(
            self._model,
            ctypes.c_int64(layer),
            ctypes.c_int64(OF_EXPERTS[name]),
            (_Part * len(parts))(*parts),
            ctypes.c_int64(of_each),
        )
        return packed

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
