"""
Parts of tensors: some of their outputs or inputs, in quantized formats too.

The outputs of a quantized matrix can be cut anywhere. Its inputs are cut between groups, so that a part is a
matrix in the same format and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baton_engine.quantized import FLOAT8_MULTIPLE, Quantized, QuantizedPart, pack_float8


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of one dimension of a tensor, stacked in their order."""

    dimension: int
    """0: outputs. 1: inputs, of which there is one range."""
    ranges: tuple[range, ...]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of `shape`."""
        count = sum(len(part) for part in self.ranges)
        return (*shape[: self.dimension], count, *shape[self.dimension + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of `tensor`: a view if there is one range."""
        parts = [tensor.narrow(self.dimension, part.start, len(part)) for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)

    def in_units(self, size: int) -> Cut | None:
        """Return the cut of a tensor whose elements are units of `size` values. None: it is inside a unit."""
        if any(part.start % size or part.stop % size for part in self.ranges):
            return None
        return Cut(
            self.dimension, tuple(range(part.start // size, part.stop // size) for part in self.ranges)
        )

    def of_blocks(self, part: QuantizedPart, inputs: int) -> Quantized | None:
        """Return the part of a matrix whose rows are blocks, all formats but FP8. None: it cuts blocks."""
        if self.dimension == 0:
            return Quantized((replace(part, rows=self.of(part.rows)),), inputs)
        blocks = self.in_units(part.format.block)
        if blocks is None:
            return None
        stored = part.rows.view(len(part.rows), inputs // part.format.block, -1)
        rows = blocks.of(stored).flatten(1)
        return Quantized((replace(part, rows=rows),), sum(len(span) for span in self.ranges))

    def of_float8(self, numbers: Tensor, scales: Tensor, group: int) -> Quantized | None:
        """
        Return the part of a matrix whose numbers and scales are apart, as `pack_float8`.

        A part that begins inside a group has smaller groups, with the scales of the groups that they are
        parts of. None: they would be smaller than a step of the kernels.
        """
        if self.dimension == 0:
            return pack_float8(self.of(numbers), self.of(scales), group)
        (inputs,) = self.ranges
        first, last = inputs.start // group, (inputs.stop - 1) // group
        size = len(inputs) if first == last else math.gcd(group, inputs.start)
        if first < last and size % FLOAT8_MULTIPLE:
            return None
        groups = torch.arange(inputs.start, inputs.stop, size) // group
        return pack_float8(self.of(numbers), scales[:, groups], size)


def outputs_in_order(order: Tensor, read: Callable[[Cut], Quantized | None]) -> Quantized | None:
    """
    Return the outputs of a matrix whose stored numbers are `order`. Each output is read once, by one `read`.

    None if `read` returns None.
    """
    stored, places = np.unique(order.numpy(), return_inverse=True)
    runs = np.split(stored, 1 + np.flatnonzero(np.diff(stored) > 1))
    matrix = read(Cut(0, tuple(range(int(run[0]), int(run[-1]) + 1) for run in runs)))
    if matrix is None:
        return None
    (part,) = matrix.parts
    # By indices of numpy: torch's own copies take milliseconds each while other processes use the cores.
    rows = torch.from_numpy(part.rows.numpy()[places])
    return replace(matrix, parts=(replace(part, rows=rows),))
