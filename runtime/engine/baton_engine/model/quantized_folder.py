"""
Quantized safetensors folders: FP8, GPTQ, AWQ and compressed-tensors, under the names of plain checkpoints.

Formats: FP8 of DeepSeek and llm-compressor, AutoGPTQ's and AutoAWQ's packing of 4 bits, and "int-quantized",
"pack-quantized" and "float-quantized" of compressed-tensors. Rounding of activations that a checkpoint
prescribes is not applied: the engine's own is finer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.cuts import Cut
from baton_engine.model.expert_tensors import ExpertTensors, regular_name
from baton_engine.model.families import BY_ARCHITECTURE
from baton_engine.model.safetensors import SafetensorsFolder
from baton_engine.model.scheme import WAY_OUT, Scheme, scheme_of
from baton_engine.model.tensor_reader import TensorSource
from baton_engine.quantized import BLOCK, FLOAT8_MULTIPLE, Format, Quantized, pack
from baton_engine.spec import ModelSpec

WEIGHT = ".weight"
PACKED = {"gptq": ".qweight", "awq": ".qweight", "int4": ".weight_packed", "int8": WEIGHT, "fp8": WEIGHT}
"""Suffix of the tensor with the numbers of a matrix."""
BESIDE = {
    "gptq": (".qzeros", ".scales", ".g_idx"),
    "awq": (".qzeros", ".scales"),
    "int4": (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".input_scale"),
    "int8": (".weight_scale", ".weight_zero_point", ".input_scale", ".input_zero_point"),
    "fp8": (".weight_scale", ".weight_scale_inv", ".input_scale", ".activation_scale"),
}
"""Suffixes of the tensors beside it."""
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".attn.k_scale", ".attn.v_scale")
"""Scales of a quantized KV cache. The engine's cache is not quantized."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AutoAWQ packs output i of eight into the nibble with this number."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Scales and zeros of a matrix [outputs, inputs], by groups of inputs: (numbers - zeros) * scales."""

    scales: Tensor
    """[outputs, groups] fp32"""
    zeros: Tensor
    """[outputs, groups] int16"""
    group_of: Tensor | None
    """[inputs] group of each input. None: groups are consecutive inputs of one size."""

    def floats(self, numbers: Tensor) -> Tensor:
        if self.group_of is not None:
            scales, zeros = self.scales[:, self.group_of], self.zeros[:, self.group_of]
        else:
            size = numbers.shape[1] // self.scales.shape[1]
            scales, zeros = (table.repeat_interleave(size, dim=1) for table in (self.scales, self.zeros))
        return (numbers - zeros).to(torch.float32) * scales


class QuantizedFolder:
    """Implementation of `TensorSource` for a quantized safetensors folder."""

    def __init__(self, folder: Path, scheme: Scheme) -> None:
        self._plain = SafetensorsFolder(folder)
        self._scheme = scheme
        self.name = self._plain.name
        shapes, packed = self._plain.shapes, PACKED[scheme.method]
        self._bases = {
            name.removesuffix(packed)
            for name in shapes
            if name.endswith(packed) and self._is_quantized(name.removesuffix(packed))
        }
        ours = {f"{base}{suffix}" for base in self._bases for suffix in (packed, *BESIDE[scheme.method])}
        self._others = {
            regular_name(name): name
            for name in shapes
            if name not in ours and not name.endswith(CACHE_SCALES)
        }
        """Stored names of the tensors that are not quantized."""
        self.shapes = {name: shapes[stored] for name, stored in self._others.items()}
        self.shapes.update({f"{base}{WEIGHT}": self._shape(base) for base in self._bases})

    def stored_bytes(self, tensor: str) -> int:
        base = tensor.removesuffix(WEIGHT)
        if base not in self._bases:
            return self._plain.stored_bytes(self._others[tensor])
        method = self._scheme.method
        names = (f"{base}{suffix}" for suffix in (PACKED[method], *BESIDE[method]))
        return sum(self._plain.stored_bytes(name) for name in names if name in self._plain.shapes)

    def format(self, tensor: str) -> str:
        quantized = tensor.removesuffix(WEIGHT) in self._bases
        return self._scheme.title if quantized else self._plain.format(self._others[tensor])

    def read(self, tensor: str) -> Tensor:
        base = tensor.removesuffix(WEIGHT)
        if base not in self._bases:
            return self._plain.read(self._others[tensor])
        if self._scheme.method == "fp8":
            return self._read_fp8(base)
        all_rows = Cut(0, (range(self._shape(base)[0]),))
        return self._groups(base).floats(self._numbers(base, all_rows))

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        """
        Return the matrix in a format of the kernels that holds exactly the same numbers, or None.

        The kernels need groups of a multiple of 32 consecutive inputs, and scales that float16 represents.
        Groups of FP8 are multiples of 16, and their scales are float32. All parts have the format of the
        whole matrix.
        """
        base = tensor.removesuffix(WEIGHT)
        if base not in self._bases:
            return None
        cut = cut or Cut(0, (range(self._shape(base)[0]),))
        return self._kept_fp8(base, cut) if self._scheme.method == "fp8" else self._kept_integers(base, cut)

    def _kept_integers(self, base: str, cut: Cut) -> Quantized | None:
        groups = self._groups(base)
        halves = groups.scales.to(torch.float16)
        size = self._shape(base)[1] // groups.scales.shape[1]
        blocks = cut if cut.dimension == 0 else cut.in_units(BLOCK)
        if blocks is None or groups.group_of is not None or size % BLOCK:
            return None
        if not torch.equal(halves.float(), groups.scales) or (self._scheme.bits == 8 and groups.zeros.any()):
            return None
        scales = blocks.of(halves.repeat_interleave(size // BLOCK, dim=1))
        numbers = self._numbers(base, cut)
        if self._scheme.bits == 8:
            return pack(Format.Q8_0, numbers, scales)
        if bool((groups.zeros == 8).all()):
            return pack(Format.Q4_0, numbers, scales)
        zeros = blocks.of(groups.zeros.repeat_interleave(size // BLOCK, dim=1))
        return pack(Format.INT4, numbers, scales, zeros)

    def _is_quantized(self, base: str) -> bool:
        """Return whether the matrix is quantized; checkpoints leave some as they are, such as the head."""
        name = f"{base}{PACKED[self._scheme.method]}"
        if self._scheme.method in ("int8", "fp8"):
            return self._plain.format(name) in ("I8", "F8_E4M3")
        return True

    def _shape(self, base: str) -> tuple[int, ...]:
        packed = self._plain.shapes[f"{base}{PACKED[self._scheme.method]}"]
        if len(packed) != 2:
            raise SetupError(f"{self.name}: tensor {base}{WEIGHT} has {len(packed)} dimensions, expected 2.")
        match self._scheme.method:
            case "gptq":
                return packed[1], packed[0] * 8
            case "awq":
                return packed[1] * 8, packed[0]
            case "int4":
                outputs, inputs = (int(size) for size in self._raw(base, ".weight_shape", (2,)))
                if outputs != packed[0] or -(-inputs // 8) != packed[1]:
                    raise SetupError(
                        f"{self.name}: tensor {base}.weight_packed has shape {list(packed)}, but "
                        f"{base}.weight_shape says {[outputs, inputs]}."
                    )
                return outputs, inputs
            case _:
                return packed

    def _raw(self, base: str, suffix: str, shape: tuple[int, ...] | None = None) -> Tensor:
        name = f"{base}{suffix}"
        if name not in self._plain.shapes:
            raise SetupError(
                f"{self.name}: tensor {name} is missing, which {self._scheme.title} requires. Download the "
                "checkpoint again."
            )
        if shape is not None and self._plain.shapes[name] != shape:
            raise SetupError(
                f"{self.name}: tensor {name} has shape {list(self._plain.shapes[name])}, but "
                f"{self._scheme.title} requires {list(shape)}."
            )
        return self._plain.read_raw(name)

    def _has(self, base: str, suffix: str) -> bool:
        return f"{base}{suffix}" in self._plain.shapes

    def _read_fp8(self, base: str) -> Tensor:
        scales, width = self._fp8_scales(base)
        values = self._raw(base, WEIGHT).to(torch.float32)
        return values * scales.repeat_interleave(width, 1)[:, : values.shape[1]]

    def _kept_fp8(self, base: str, cut: Cut) -> Quantized | None:
        scales, width = self._fp8_scales(base)
        outputs, inputs = self._shape(base)
        if width < inputs and width % FLOAT8_MULTIPLE:
            return None
        matrix = cut.of_float8(self._raw(base, WEIGHT).view(torch.uint8), scales.expand(outputs, -1), width)
        if matrix is None:
            return None
        numbers = matrix.parts[0].rows[:, : matrix.inputs]
        if bool((numbers & 0x7F == 0x7F).any()) or not bool(scales.isfinite().all()):
            raise SetupError(
                f"{self.name}: tensor {base}{WEIGHT} has a number or a scale that is not finite. The file is "
                "damaged. Download it again."
            )
        return matrix

    def _fp8_scales(self, base: str) -> tuple[Tensor, int]:
        """Return scales [outputs, groups] or [1, 1] in fp32, and the number of inputs of a group."""
        outputs, inputs = self._shape(base)
        if self._scheme.block is not None:
            height, width = self._scheme.block
            grid = (-(-outputs // height), -(-inputs // width))
            suffix = ".weight_scale_inv" if self._has(base, ".weight_scale_inv") else ".weight_scale"
            scales = self._raw(base, suffix, grid).to(torch.float32)
            return scales.repeat_interleave(height, 0)[:outputs], width
        scale = self._raw(base, ".weight_scale").to(torch.float32)
        if scale.numel() not in (1, outputs):
            raise SetupError(
                f"{self.name}: tensor {base}.weight_scale has {scale.numel()} numbers, expected 1 or "
                f"{outputs}."
            )
        return scale.reshape(-1, 1), inputs

    def _numbers(self, base: str, cut: Cut) -> Tensor:
        """Return the numbers [outputs, inputs] int16 of a part. A cut of inputs is at a multiple of 8."""
        outputs, inputs = self._shape(base)
        match self._scheme.method:
            case "int8":
                return cut.of(self._raw(base, WEIGHT)).to(torch.int16)
            case "awq":
                words, rows = self._raw(base, ".qweight"), torch.arange(outputs)
                if cut.dimension == 0:
                    rows = cut.of(rows)
                else:
                    words = cut.of(words.T).T
                shifts = 4 * torch.tensor(AWQ_ORDER, dtype=torch.int32)[rows % 8]
                return (words[:, rows // 8] >> shifts & 15).to(torch.int16).T
            case method:
                stored = self._raw(base, PACKED[method])
                in_words = cut if cut.dimension == 0 else cut.in_units(8)
                assert in_words is not None
                words = in_words.of(stored.T if method == "gptq" else stored)
                return _nibbles(words).reshape(len(words), -1)[:, : cut.shape((outputs, inputs))[1]]

    def _groups(self, base: str) -> _Groups:
        outputs, inputs = self._shape(base)
        size = self._scheme.group or inputs
        if inputs % size and not self._has(base, ".g_idx"):
            raise SetupError(
                f"{self.name}: tensor {base}{WEIGHT} has {inputs} inputs, not a multiple of the group size "
                f"{size}. The checkpoint is damaged."
            )
        groups = -(-inputs // size)
        if self._scheme.method == "gptq":
            return self._gptq(base, outputs, inputs, groups)
        if self._scheme.method == "awq":
            zeros = _nibbles(self._raw(base, ".qzeros", (groups, outputs // 8)))[..., AWQ_ORDER]
            scales = self._raw(base, ".scales", (groups, outputs)).to(torch.float32)
            return _Groups(scales.T, zeros.reshape(groups, outputs).T, None)
        return self._compressed(base, outputs, inputs, groups)

    def _gptq(self, base: str, outputs: int, inputs: int, groups: int) -> _Groups:
        """AutoGPTQ stores each zero less one, modulo 16; `gptq_v2` stores the zero itself."""
        zeros = _nibbles(self._raw(base, ".qzeros", (groups, outputs // 8))).reshape(groups, outputs)
        zeros = zeros + self._scheme.zero_offset & 15
        scales = self._raw(base, ".scales", (groups, outputs)).to(torch.float32)
        group_of = None
        if self._has(base, ".g_idx"):
            group_of = self._raw(base, ".g_idx", (inputs,)).long()
            if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
                raise SetupError(
                    f"{self.name}: tensor {base}.g_idx names group {int(group_of.max())}, but the group size "
                    f"{self._scheme.group} gives {groups} groups."
                )
            if torch.equal(group_of, torch.arange(inputs) // (inputs // groups)):
                group_of = None
        return _Groups(scales.T, zeros.T, group_of)

    def _compressed(self, base: str, outputs: int, inputs: int, groups: int) -> _Groups:
        """The scale of a whole tensor is repeated for each output."""
        scales = self._raw(base, ".weight_scale").to(torch.float32)
        scales = (
            scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales.reshape(outputs, -1)
        )
        if scales.shape[1] != groups:
            raise SetupError(
                f"{self.name}: tensor {base}.weight_scale has {scales.shape[1]} groups, but the group size "
                f"{self._scheme.group or inputs} gives {groups}."
            )
        zero = 0 if self._scheme.method == "int8" else 8
        zeros = torch.full_like(scales, zero, dtype=torch.int16)
        if self._has(base, ".weight_zero_point"):
            stored = self._raw(base, ".weight_zero_point")
            if stored.dtype == torch.int32:  # packed along the outputs
                zeros = _nibbles(stored.T).reshape(stored.shape[1], -1)[:, :outputs].T
            else:
                zeros = stored.to(torch.int16).reshape(scales.shape) + zero
        return _Groups(scales, zeros, None)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack int32 [..., n] to [..., n, 8] int16, the lowest four bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.int16)


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
