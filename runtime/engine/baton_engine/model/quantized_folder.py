"""
Quantized safetensors folders, under the names of plain checkpoints. `schemes` knows how each is quantized.

Rounding of activations that a checkpoint prescribes is not applied, because the engine's own is finer. The
exception is FP8 with scales that follow from the activations (`ops/kernels/scaled.py`).

gpt-oss and Llama 4 have one tensor [E, inputs, outputs] for all gates and ups of a layer, and one for all
downs; `ExpertTensors` reads them under names of single experts. gpt-oss also stores them in MXFP4: 32 values
of 4 bits share one exponent of 8 bits.
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.cuts import Cut
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.safetensors import SafetensorsFolder
from baton_engine.model.scheme import WEIGHT, Scheme, StoredMatrix
from baton_engine.model.schemes import WAY_OUT, scheme_of
from baton_engine.model.tensor_reader import TensorSource
from baton_engine.quantized import NO_EXPONENT, Format, Quantized, pack_float4
from baton_engine.spec import ModelSpec

if TYPE_CHECKING:
    from baton_engine.model.safetensors import SafetensorsFolder

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


FUSED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|)")
"""Names of fused tensors. MXFP4 has `_scales` beside `_blocks`."""

REGULAR = {".sinks": ".sinks.weight", ".e_score_correction_bias": ".e_score_correction.bias"}
"""Endings of names without `.weight` or `.bias`, and regular ones."""

FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the numbers of float4 (e2m1)."""
EXPONENT_BIAS = 127
"""Of the exponents of MXFP4."""


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The rows of one expert's gate, up or down in a stored tensor."""

    stored: str
    expert: int
    experts: int
    rows: slice
    share: float
    """Of the expert's part of the stored tensor."""


class ExpertTensors:
    """Implementation of `TensorSource`: the tensors of a folder, with one name for each expert's matrix."""

    def __init__(self, source: SafetensorsFolder, spec: ModelSpec) -> None:
        self.name = source.name
        self._source = source
        self._order = order = BY_ARCHITECTURE[spec.architecture].fused_experts
        self._stored: dict[str, str] = {}
        self._parts: dict[str, ExpertSlice] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for stored, shape in source.shapes.items():
            if order and (match := FUSED.fullmatch(stored)):
                self._add(stored, shape, *match.groups())
            elif not (
                stored.endswith("_scales") and stored.removesuffix("scales") + "blocks" in source.shapes
            ):
                name = regular_name(stored)
                self._stored[name], self.shapes[name] = stored, shape

    def _add(self, stored: str, shape: tuple[int, ...], stem: str, matrix: str, form: str) -> None:
        kind = "bias" if form == "_bias" else "weight"
        outputs, inputs = shape[-1], shape[1:-1]
        if form == "_blocks":  # [E, outputs, inputs / 32, 16]
            outputs, inputs = shape[1], (32 * shape[2],)
        pieces = {"down_proj": slice(0, outputs)}
        if matrix == "gate_up_proj":
            half = outputs // 2
            halves = (slice(0, half), slice(half, outputs))
            gate, up = halves if self._order == "halves" else (slice(0, None, 2), slice(1, None, 2))
            pieces = {"gate_proj": gate, "up_proj": up}
        for expert in range(shape[0]):
            for piece, rows in pieces.items():
                name = f"{stem}{expert}.{piece}.{kind}"
                self._parts[name] = ExpertSlice(stored, expert, shape[0], rows, 1 / len(pieces))
                self.shapes[name] = (outputs // len(pieces), *inputs)

    def stored_bytes(self, tensor: str) -> int:
        if (part := self._parts.get(tensor)) is None:
            return self._source.stored_bytes(self._stored[tensor])
        return int(self._source.stored_bytes(part.stored) * part.share / part.experts)

    def format(self, tensor: str) -> str:
        part = self._parts.get(tensor)
        if part is not None and part.stored.endswith("_blocks"):
            return Format.MXFP4.name
        return self._source.format(self._stored[tensor] if part is None else part.stored)

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        part = self._parts.get(tensor)
        if part is None or not part.stored.endswith("_blocks"):
            return None
        blocks, exponents = self._mxfp4(part)
        matrix = pack_float4(_numbers(blocks).flatten(1), exponents)
        return matrix if cut is None else cut.of_blocks(matrix.parts[0], matrix.inputs)

    def _mxfp4(self, part: ExpertSlice) -> tuple[Tensor, Tensor]:
        """Return blocks [rows, B, 16] and exponents [rows, B] of an expert. Raises SetupError."""
        scales = part.stored.removesuffix("blocks") + "scales"
        blocks, exponents = (
            self._source.read_bytes(name)[part.expert, part.rows] for name in (part.stored, scales)
        )
        if bool((exponents == NO_EXPONENT).any()):
            raise SetupError(
                f"{self.name}: tensor {scales} has an exponent of {NO_EXPONENT}, which is NaN. The file "
                "is damaged. Download it again."
            )
        return blocks, exponents

    def read(self, tensor: str) -> Tensor:
        if (part := self._parts.get(tensor)) is None:
            return self._source.read(self._stored[tensor])
        if part.stored.endswith("_blocks"):
            return expand_mxfp4(*self._mxfp4(part))
        values = self._source.read(part.stored)[part.expert]
        return (values.T if values.dim() == 2 else values)[part.rows]


def regular_name(stored: str) -> str:
    """
    Return the name that the decoder has for a stored tensor.

    >>> regular_name("model.layers.0.mlp.gate.e_score_correction_bias")
    'model.layers.0.mlp.gate.e_score_correction.bias'
    """
    ending = next((ending for ending in REGULAR if stored.endswith(ending)), "")
    return stored.removesuffix(ending) + REGULAR[ending] if ending else stored


def expand_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """
    Return the values [rows, 32 * B] fp32 of blocks [rows, B, 16] and exponents [rows, B], both uint8.

    The low four bits of a byte are the first value. A scale is a power of two.
    """
    values = torch.tensor(FLOAT4_VALUES)[_numbers(blocks).long()]
    return torch.ldexp(values, (exponents.to(torch.int32) - EXPONENT_BIAS)[..., None]).flatten(-2)


def _numbers(blocks: Tensor) -> Tensor:
    """Return the numbers [rows, B, 32] uint8 of blocks [rows, B, 16]."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
