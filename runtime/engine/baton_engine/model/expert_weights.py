"""Weights of a layer's MLP and experts: the shapes of their tensors, and how they are stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

from torch import Tensor

from baton_engine.model.experts import ExpertSpec
from baton_engine.model.family import TensorNames
from baton_engine.model.spec import ModelSpec

if TYPE_CHECKING:
    from baton_engine.model.quantized import Matrix

Shape = tuple[int, int, bool]
"""Outputs, inputs, and whether there is a bias."""


class MLPWeights(TypedDict):
    """Fields of `LayerWeights`."""

    gate_up: Matrix | None
    gate_up_bias: Tensor | None
    down: Matrix | None
    down_bias: Tensor | None
    router: Tensor | None
    router_bias: Tensor | None
    router_correction: Tensor | None
    expert_gate_up: Matrix | None
    expert_gate_up_bias: Tensor | None
    expert_down: Matrix | None
    expert_down_bias: Tensor | None


class PartReader(Protocol):
    def __call__(self, present: bool, kind: str, *parts: str) -> Tensor | None:
        """Return the tensors of `kind` (weight or bias) of one layer, stacked; None if not `present`."""
        ...


def mlp_shapes(spec: ModelSpec, names: TensorNames, layer: int) -> dict[str, Shape]:
    """Return the shape of each matrix of the MLP and of the experts of `layer`."""
    n, experts = spec.hidden, spec.experts_of(layer)
    if experts is None:
        return _gated_shapes(_dense_gates(names), names.down, n, spec.intermediate, spec.mlp_bias)
    shapes = {names.router: (experts.count, n, experts.biased)}
    for expert in range(experts.count):
        gates = [names.expert_gate.format(expert), names.expert_up.format(expert)]
        down = names.expert_down.format(expert)
        shapes |= _gated_shapes(gates, down, n, experts.intermediate, experts.biased)
    if experts.shared:
        gates = [names.shared_gate, names.shared_up]
        shapes |= _gated_shapes(gates, names.shared_down, n, experts.shared, False)
    return shapes


def _gated_shapes(gates: Sequence[str], down: str, n: int, f: int, biased: bool) -> dict[str, Shape]:
    rows = 2 * f // len(gates)
    return {**dict.fromkeys(gates, (rows, n, biased)), down: (n, f, biased)}


def mlp_weights(
    spec: ModelSpec, names: TensorNames, layer: int, read: PartReader, matrix: Callable[..., Matrix]
) -> MLPWeights:
    """Read the MLP and the experts of `layer`."""
    experts = spec.experts_of(layer)
    dense, biased = experts is None, experts is None and spec.mlp_bias
    gates, down = _dense_gates(names), names.down
    if not dense:
        gates, down = [names.shared_gate, names.shared_up], names.shared_down
    has_mlp = experts is None or experts.shared > 0
    gates_of, downs_of = [names.expert_gate, names.expert_up], [names.expert_down]
    return {
        "gate_up": matrix(*gates) if has_mlp else None,
        "gate_up_bias": read(biased, "bias", *gates),
        "down": matrix(down) if has_mlp else None,
        "down_bias": read(biased, "bias", down),
        "router": read(not dense, "weight", names.router),
        "router_bias": read(experts is not None and experts.biased, "bias", names.router),
        "router_correction": read(experts is not None and experts.corrected, "bias", names.router_correction),
        "expert_gate_up": _weights_of(experts, gates_of, matrix),
        "expert_gate_up_bias": _biases_of(experts, gates_of, read),
        "expert_down": _weights_of(experts, downs_of, matrix),
        "expert_down_bias": _biases_of(experts, downs_of, read),
    }


def _weights_of(
    experts: ExpertSpec | None, parts: Sequence[str], matrix: Callable[..., Matrix]
) -> Matrix | None:
    if experts is None:
        return None
    stacked = matrix(*_of_each(experts, parts))
    return stacked.view(experts.count, -1, stacked.shape[1]) if isinstance(stacked, Tensor) else stacked


def _biases_of(experts: ExpertSpec | None, parts: Sequence[str], read: PartReader) -> Tensor | None:
    if experts is None:
        return None
    biases = read(experts.biased, "bias", *_of_each(experts, parts))
    return None if biases is None else biases.view(experts.count, -1)


def _of_each(experts: ExpertSpec, parts: Sequence[str]) -> list[str]:
    return [part.format(expert) for expert in range(experts.count) for part in parts]


def _dense_gates(names: TensorNames) -> list[str]:
    return [names.gate_up] if names.gate_up else [names.gate, names.up]
