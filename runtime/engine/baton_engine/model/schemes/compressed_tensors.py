"""compressed-tensors of llm-compressor: "int-quantized", "pack-quantized" (4 bits) and "float-quantized"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from baton_engine.model.scheme import (
    WEIGHT,
    Groups,
    IntegerScheme,
    Scheme,
    StoredMatrix,
    UnsupportedOption,
    group_size,
    nibbles,
    rows_of_words,
)
from baton_engine.model.schemes.fp8 import Float8

if TYPE_CHECKING:
    from torch import Tensor

    from baton_engine.model.cuts import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class _Integers(IntegerScheme):
    zero: ClassVar[int]
    """The number that stands for zero, without other zero points."""

    def groups(self, matrix: StoredMatrix, count: int) -> Groups:
        """The scale of a whole tensor is repeated for each output."""
        import torch

        outputs, inputs = self.shape(matrix)
        scales = matrix.tensor(".weight_scale").float()
        scales = (
            scales.reshape(1, 1).expand(outputs, 1) if scales.numel() == 1 else scales.reshape(outputs, -1)
        )
        if scales.shape[1] != count:
            raise matrix.error(
                f"tensor {matrix.base}.weight_scale has {scales.shape[1]} groups, but the group size "
                f"{self.group or inputs} gives {count}."
            )
        zeros = torch.full_like(scales, self.zero, dtype=torch.int16)
        if matrix.has(".weight_zero_point"):
            stored = matrix.tensor(".weight_zero_point")
            if stored.dtype == torch.int32:  # packed along the outputs
                zeros = nibbles(stored.T).reshape(stored.shape[1], -1)[:, :outputs].T
            else:
                zeros = stored.to(torch.int16).reshape(scales.shape) + self.zero
        return Groups(scales, zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(_Integers):
    title = "int8"
    packed = WEIGHT
    beside = (".weight_scale", ".weight_zero_point", ".input_scale", ".input_zero_point")
    bits = 8
    zero = 0

    def is_quantized(self, form: str) -> bool:
        return form == "I8"

    def numbers(self, matrix: StoredMatrix, cut: Cut) -> Tensor:
        return cut.of(matrix.tensor(WEIGHT)).short()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4(_Integers):
    title = "int4"
    packed = ".weight_packed"
    beside = (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".input_scale")
    zero = 8

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        packed = matrix.shape(self.packed)
        outputs, inputs = (int(size) for size in matrix.tensor(".weight_shape", (2,)))
        if outputs != packed[0] or -(-inputs // 8) != packed[1]:
            raise matrix.error(
                f"tensor {matrix.base}.weight_packed has shape {list(packed)}, but "
                f"{matrix.base}.weight_shape says {[outputs, inputs]}."
            )
        return outputs, inputs

    def numbers(self, matrix: StoredMatrix, cut: Cut) -> Tensor:
        return rows_of_words(matrix.tensor(self.packed), cut, self.shape(matrix)[1])


def read(config: Mapping[str, Any]) -> Scheme:
    groups = list(config["config_groups"].values())
    weights = [group["weights"] for group in groups]
    if not weights or any(other != weights[0] for other in weights[1:]):
        raise UnsupportedOption("config_groups", f"of {len(weights)} kinds", "one kind of weights")
    given = weights[0]
    kind, bits, strategy = given.get("type", "int"), given.get("num_bits"), given.get("strategy", "tensor")
    forms = {form for form in (config.get("format"), *(group.get("format") for group in groups)) if form}
    if (kind, bits) == ("float", 8) and forms <= {"float-quantized", "naive-quantized"}:
        rounds_inputs = all(_rounds_inputs(group.get("input_activations")) for group in groups)
        if strategy in ("tensor", "channel"):
            return Float8(rounds_inputs=rounds_inputs)
        if strategy == "block":
            height, width = (int(size) for size in given["block_structure"])
            return Float8(block=(height, width), rounds_inputs=rounds_inputs)
    if given.get("actorder") not in (None, "weight", "static", False):
        raise UnsupportedOption("actorder", given["actorder"], "none, weight")
    group = group_size(given.get("group_size")) if strategy == "group" else 0
    if strategy in ("tensor", "channel", "group"):
        if (kind, bits) == ("int", 8) and forms <= {"int-quantized", "naive-quantized"}:
            return Int8(group=group)
        if (kind, bits) == ("int", 4) and forms == {"pack-quantized"}:
            return Int4(group=group)
    raise UnsupportedOption(
        "config_groups",
        f"{kind}{bits} in {', '.join(sorted(forms)) or 'no format'}, by {strategy}",
        "float8 by tensor, channel or block; int8 and packed int4 by tensor, channel or group",
    )


def _rounds_inputs(activations: Mapping[str, Any] | None) -> bool:
    """Return whether inputs are rounded to FP8 with scales that follow from them."""
    given = activations or {}
    return (given.get("type"), given.get("num_bits"), given.get("dynamic")) == ("float", 8, True)
