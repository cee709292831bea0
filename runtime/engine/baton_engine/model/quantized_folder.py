"""
Quantized safetensors folders, under the names of plain checkpoints. `schemes` knows how each is quantized.

Rounding of activations that a checkpoint prescribes is not applied: the engine's own is finer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.cuts import Cut
from baton_engine.model.expert_tensors import ExpertTensors, regular_name
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.safetensors import SafetensorsFolder
from baton_engine.model.scheme import WEIGHT, Scheme, StoredMatrix
from baton_engine.model.schemes import WAY_OUT, scheme_of
from baton_engine.model.tensor_reader import TensorSource
from baton_engine.quantized import Quantized
from baton_engine.spec import ModelSpec

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".attn.k_scale", ".attn.v_scale")
"""Scales of a quantized KV cache. The engine's cache is not quantized."""


class QuantizedFolder:
    """Implementation of `TensorSource` for a quantized safetensors folder."""

    def __init__(self, folder: Path, scheme: Scheme) -> None:
        self._plain = SafetensorsFolder(folder)
        self._scheme = scheme
        self.name = self._plain.name
        stored = self._plain.shapes
        bases = [
            name.removesuffix(scheme.packed)
            for name in stored
            if name.endswith(scheme.packed) and scheme.is_quantized(self._plain.format(name))
        ]
        self._matrices = {f"{base}{WEIGHT}": StoredMatrix(self._plain, base, scheme.title) for base in bases}
        """Quantized matrices by their names in plain checkpoints. Some stay as they are, such as the head."""
        read = {f"{base}{suffix}" for base in bases for suffix in (scheme.packed, *scheme.beside)}
        self._others = {
            regular_name(name): name
            for name in stored
            if name not in read and not name.endswith(CACHE_SCALES)
        }
        """Stored names of the tensors that are not quantized."""
        self.shapes = {name: stored[other] for name, other in self._others.items()}
        self.shapes.update({name: self._shape(matrix) for name, matrix in self._matrices.items()})

    def stored_bytes(self, tensor: str) -> int:
        if (matrix := self._matrices.get(tensor)) is None:
            return self._plain.stored_bytes(self._others[tensor])
        suffixes = (self._scheme.packed, *self._scheme.beside)
        return sum(
            self._plain.stored_bytes(f"{matrix.base}{suffix}") for suffix in suffixes if matrix.has(suffix)
        )

    def format(self, tensor: str) -> str:
        return self._scheme.title if tensor in self._matrices else self._plain.format(self._others[tensor])

    def read(self, tensor: str) -> Tensor:
        if (matrix := self._matrices.get(tensor)) is None:
            return self._plain.read(self._others[tensor])
        return self._scheme.read(matrix)

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        if (matrix := self._matrices.get(tensor)) is None:
            return None
        return self._scheme.read_quantized(matrix, cut or Cut(0, (range(self.shapes[tensor][0]),)))

    def _shape(self, matrix: StoredMatrix) -> tuple[int, ...]:
        if len(packed := matrix.shape(self._scheme.packed)) != 2:
            raise matrix.error(f"tensor {matrix.base}{WEIGHT} has {len(packed)} dimensions, expected 2.")
        return self._scheme.shape(matrix)


def source_of(folder: Path, config: Mapping[str, Any], spec: ModelSpec) -> TensorSource:
    """Return the tensors of a folder with this `config.json`. Raises SetupError."""
    others = BY_ARCHITECTURE[spec.architecture].quantizations
    scheme = scheme_of(config, str(folder / "config.json"), others)
    if scheme is None:
        return ExpertTensors(SafetensorsFolder(folder), spec)
    if BY_ARCHITECTURE[spec.architecture].fused_experts:
        raise SetupError(
            f"{folder / 'config.json'}: {scheme.title} weights of {spec.architecture} are not supported: its "
            f"experts are in one tensor. {WAY_OUT}"
        )
    return QuantizedFolder(folder, scheme)
