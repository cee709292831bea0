"""AWQ in 4 bits, packed as AutoAWQ's "gemm" kernels read it: along the outputs, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton_engine.model.scheme import (
    Groups,
    IntegerScheme,
    StoredMatrix,
    UnsupportedOption,
    check_four_bits,
    group_size,
    nibbles,
)

if TYPE_CHECKING:
    from torch import Tensor

    from baton_engine.model.cuts import Cut

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of eight is in the nibble with this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(IntegerScheme):
    title = "AWQ"
    packed = ".qweight"
    beside = (".qzeros", ".scales")

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        inputs, words = matrix.shape(self.packed)
        return words * 8, inputs

    def numbers(self, matrix: StoredMatrix, cut: Cut) -> Tensor:
        import torch

        words, outputs = matrix.tensor(self.packed), torch.arange(self.shape(matrix)[0])
        if cut.dimension == 0:
            outputs = cut.of(outputs)
        else:
            words = cut.of(words.T).T
        shifts = 4 * torch.tensor(ORDER, dtype=torch.int32)[outputs % 8]
        return (words[:, outputs // 8] >> shifts & 15).to(torch.int16).T

    def groups(self, matrix: StoredMatrix, count: int) -> Groups:
        outputs, _ = self.shape(matrix)
        zeros = nibbles(matrix.tensor(".qzeros", (count, outputs // 8)))[..., ORDER]
        scales = matrix.tensor(".scales", (count, outputs)).float()
        return Groups(scales.T, zeros.reshape(count, outputs).T)


def read(config: Mapping[str, Any]) -> Awq:
    check_four_bits(config, "w_bit" if "w_bit" in config else "bits")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedOption("version", version, "gemm")
    return Awq(group=group_size(config.get("group_size", config.get("q_group_size"))))
