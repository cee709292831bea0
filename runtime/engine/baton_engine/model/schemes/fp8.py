"""FP8 of DeepSeek and llm-compressor: float8 (e4m3), with scales of tensors, outputs or blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from baton_engine.model.scheme import WEIGHT, Scheme, StoredMatrix, UnsupportedOption

if TYPE_CHECKING:
    from torch import Tensor

    from baton_engine.model.cuts import Cut
    from baton_engine.quantized import Quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8(Scheme):
    title = "FP8"
    packed = WEIGHT
    beside = (".weight_scale", ".weight_scale_inv", ".input_scale", ".activation_scale")

    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale. None: one scale for a tensor or for each output."""
    rounds_inputs: bool = False
    """Whether inputs are rounded too, with scales that follow from them ("dynamic")."""

    def is_quantized(self, form: str) -> bool:
        return form == "F8_E4M3"

    def read(self, matrix: StoredMatrix) -> Tensor:
        scales, width = self._scales(matrix)
        values = matrix.tensor(WEIGHT).float()
        return values * scales.repeat_interleave(width, 1)[:, : values.shape[1]]

    def read_quantized(self, matrix: StoredMatrix, cut: Cut) -> Quantized | None:
        """Groups of the kernels are multiples of 16 inputs, and their scales are float32."""
        import torch

        from baton_engine.quantized import FLOAT8_MULTIPLE

        scales, width = self._scales(matrix)
        outputs, inputs = self.shape(matrix)
        if width < inputs and width % FLOAT8_MULTIPLE:
            return None
        part = cut.of_float8(matrix.tensor(WEIGHT).view(torch.uint8), scales.expand(outputs, -1), width)
        if part is None:
            return None
        numbers = part.parts[0].rows[:, : part.inputs]
        if bool((numbers & 0x7F == 0x7F).any()) or not bool(scales.isfinite().all()):
            raise matrix.error(
                f"tensor {matrix.base}{WEIGHT} has a number or a scale that is not finite. The file is "
                "damaged. Download it again."
            )
        (only,) = part.parts
        return replace(part, parts=(replace(only, rounds_inputs=self.rounds_inputs),))

    def _scales(self, matrix: StoredMatrix) -> tuple[Tensor, int]:
        """Return scales [outputs, groups] or [1, 1] in fp32, and the number of inputs of a group."""
        outputs, inputs = self.shape(matrix)
        if self.block is not None:
            height, width = self.block
            grid = (-(-outputs // height), -(-inputs // width))
            suffix = ".weight_scale_inv" if matrix.has(".weight_scale_inv") else ".weight_scale"
            scales = matrix.tensor(suffix, grid).float()
            return scales.repeat_interleave(height, 0)[:outputs], width
        scale = matrix.tensor(".weight_scale").float()
        if scale.numel() not in (1, outputs):
            raise matrix.error(
                f"tensor {matrix.base}.weight_scale has {scale.numel()} numbers, expected 1 or {outputs}."
            )
        return scale.reshape(-1, 1), inputs


def read(config: Mapping[str, Any]) -> Float8:
    if (kind := config.get("fmt", "e4m3")) != "e4m3":
        raise UnsupportedOption("fmt", kind, "e4m3")
    rounds_inputs = config.get("activation_scheme") == "dynamic"
    block = config.get("weight_block_size")
    if block is None:
        return Float8(rounds_inputs=rounds_inputs)
    height, width = (int(size) for size in block)
    if min(height, width) < 1:
        raise UnsupportedOption("weight_block_size", block, "two numbers of at least 1")
    return Float8(block=(height, width), rounds_inputs=rounds_inputs)
