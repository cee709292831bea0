"""GPTQ in 4 bits, packed as AutoGPTQ does: along the inputs, whose groups may be in any order."""

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
    rows_of_words,
)

if TYPE_CHECKING:
    from torch import Tensor

    from baton_engine.model.cuts import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(IntegerScheme):
    title = "GPTQ"
    packed = ".qweight"
    beside = (".qzeros", ".scales", ".g_idx")

    zero_offset: int
    """A zero less its stored number, modulo 16. AutoGPTQ stores 1 less, `gptq_v2` the zero itself."""

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        words, outputs = matrix.shape(self.packed)
        return outputs, words * 8

    def numbers(self, matrix: StoredMatrix, cut: Cut) -> Tensor:
        return rows_of_words(matrix.tensor(self.packed).T, cut, self.shape(matrix)[1])

    def groups(self, matrix: StoredMatrix, count: int) -> Groups:
        outputs, inputs = self.shape(matrix)
        zeros = nibbles(matrix.tensor(".qzeros", (count, outputs // 8))).reshape(count, outputs)
        zeros = zeros + self.zero_offset & 15
        scales = matrix.tensor(".scales", (count, outputs)).float()
        return Groups(scales.T, zeros.T, self._order(matrix, inputs, count))

    def _order(self, matrix: StoredMatrix, inputs: int, count: int) -> Tensor | None:
        import torch

        if not matrix.has(".g_idx"):
            return None
        group_of = matrix.tensor(".g_idx", (inputs,)).long()
        if int(group_of.min()) < 0 or int(group_of.max()) >= count:
            raise matrix.error(
                f"tensor {matrix.base}.g_idx names group {int(group_of.max())}, but the group size "
                f"{self.group} gives {count} groups."
            )
        return None if torch.equal(group_of, torch.arange(inputs) // (inputs // count)) else group_of


def read(config: Mapping[str, Any]) -> Gptq:
    check_four_bits(config)
    form = config.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedOption("checkpoint_format", form, "gptq, gptq_v2")
    return Gptq(group=group_size(config.get("group_size")), zero_offset=int(form == "gptq"))
