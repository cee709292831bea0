"""
What a quantization of safetensors checkpoints consists of, and what those of integers share.

The modules of `schemes` implement it. They import torch inside functions: `config.json` is read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from baton_api.errors import SetupError

if TYPE_CHECKING:
    from torch import Tensor

    from baton_engine.model.cuts import Cut
    from baton_engine.model.safetensors import SafetensorsFolder
    from baton_engine.quantized import Quantized

WEIGHT = ".weight"


class UnsupportedOption(Exception):
    """An option with its value, and the supported values."""

    def __init__(self, name: str, value: object, supported: str) -> None:
        super().__init__(f"{name} {str(value)[:60]} are not supported. Supported: {supported}")


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The tensors that store one quantized matrix."""

    folder: SafetensorsFolder
    base: str
    """Name without suffix."""
    title: str
    """`Scheme.title`."""

    def has(self, suffix: str) -> bool:
        return f"{self.base}{suffix}" in self.folder.shapes

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.folder.shapes[f"{self.base}{suffix}"]

    def tensor(self, suffix: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return the tensor as it is stored. Raises SetupError if it is missing, or has another `shape`."""
        if not self.has(suffix):
            raise self.error(
                f"tensor {self.base}{suffix} is missing, which {self.title} requires. Download the "
                "checkpoint again."
            )
        if shape is not None and self.shape(suffix) != shape:
            raise self.error(
                f"tensor {self.base}{suffix} has shape {list(self.shape(suffix))}, but {self.title} requires "
                f"{list(shape)}."
            )
        return self.folder.read_raw(f"{self.base}{suffix}")

    def error(self, text: str) -> SetupError:
        return SetupError(f"{self.folder.name}: {text}")


class Scheme(ABC):
    """One quantization of matrices."""

    __slots__ = ()

    title: ClassVar[str]
    """The name in logs and errors."""
    packed: ClassVar[str]
    """Suffix of the tensor with the numbers of a matrix."""
    beside: ClassVar[tuple[str, ...]]
    """Suffixes of the tensors beside it."""

    def is_quantized(self, form: str) -> bool:
        """Return whether a `packed` tensor in the format `form` of safetensors is one of this scheme."""
        return True

    def shape(self, matrix: StoredMatrix) -> tuple[int, int]:
        """Return the outputs and inputs of a matrix, whose `packed` tensor has two dimensions."""
        outputs, inputs = matrix.shape(self.packed)
        return outputs, inputs

    @abstractmethod
    def read(self, matrix: StoredMatrix) -> Tensor:
        """Return the values [outputs, inputs] of a matrix in fp32."""

    @abstractmethod
    def read_quantized(self, matrix: StoredMatrix, cut: Cut) -> Quantized | None:
        """
        Return a part of a matrix in a format of the kernels that holds exactly the same numbers, or None.

        All parts have the format of the whole matrix.
        """


@dataclass(frozen=True, slots=True)
class Groups:
    """Scales and zeros of a matrix [outputs, inputs], by groups of inputs: (numbers - zeros) * scales."""

    scales: Tensor
    """[outputs, groups] fp32"""
    zeros: Tensor
    """[outputs, groups] int16"""
    group_of: Tensor | None = None
    """[inputs] group of each input. None: groups are consecutive inputs of one size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerScheme(Scheme):
    """Numbers of 4 or 8 bits, with a scale and the number that stands for zero for each group of inputs."""

    bits: ClassVar[int] = 4
    group: int = 0
    """Inputs of a group. 0: all inputs of an output."""

    @abstractmethod
    def numbers(self, matrix: StoredMatrix, cut: Cut) -> Tensor:
        """Return the numbers [outputs, inputs] int16 of a part. A cut of inputs is at a multiple of 8."""

    @abstractmethod
    def groups(self, matrix: StoredMatrix, count: int) -> Groups:
        """Return the `count` groups of a matrix."""

    def _groups(self, matrix: StoredMatrix) -> Groups:
        inputs = self.shape(matrix)[1]
        size = self.group or inputs
        if inputs % size and not matrix.has(".g_idx"):
            raise matrix.error(
                f"tensor {matrix.base}{WEIGHT} has {inputs} inputs, not a multiple of the group size {size}. "
                "The checkpoint is damaged."
            )
        return self.groups(matrix, -(-inputs // size))

    def read(self, matrix: StoredMatrix) -> Tensor:
        from baton_engine.model.cuts import Cut

        groups, (outputs, inputs) = self._groups(matrix), self.shape(matrix)
        if groups.group_of is not None:
            scales, zeros = (table[:, groups.group_of] for table in (groups.scales, groups.zeros))
        else:
            size = inputs // groups.scales.shape[1]
            scales, zeros = (table.repeat_interleave(size, dim=1) for table in (groups.scales, groups.zeros))
        return (self.numbers(matrix, Cut(0, (range(outputs),))) - zeros).float() * scales

    def read_quantized(self, matrix: StoredMatrix, cut: Cut) -> Quantized | None:
        """Kernels need groups of a multiple of 32 consecutive inputs, and scales that float16 represents."""
        from baton_engine.quantized import BLOCK, Format, pack

        groups = self._groups(matrix)
        halves = groups.scales.half()
        size = self.shape(matrix)[1] // groups.scales.shape[1]
        blocks = cut if cut.dimension == 0 else cut.in_units(BLOCK)
        if blocks is None or groups.group_of is not None or size % BLOCK:
            return None
        if not halves.float().equal(groups.scales) or (self.bits == 8 and groups.zeros.any()):
            return None
        scales = blocks.of(halves.repeat_interleave(size // BLOCK, dim=1))
        numbers = self.numbers(matrix, cut)
        if self.bits == 8:
            return pack(Format.Q8_0, numbers, scales)
        if bool((groups.zeros == 8).all()):
            return pack(Format.Q4_0, numbers, scales)
        zeros = blocks.of(groups.zeros.repeat_interleave(size // BLOCK, dim=1))
        return pack(Format.INT4, numbers, scales, zeros)


def group_size(value: Any) -> int:
    """Return the group size of a configuration; -1 and None are a whole row, 0 here."""
    size = -1 if value is None else int(value)
    if size != -1 and size < 1:
        raise UnsupportedOption("group_size", value, "-1 or at least 1")
    return max(size, 0)


def check_four_bits(config: Mapping[str, Any], name: str = "bits") -> None:
    if config.get(name) != 4:
        raise UnsupportedOption(name, config.get(name), "4")


def nibbles(packed: Tensor) -> Tensor:
    """Unpack int32 [..., n] to [..., n, 8] int16, the lowest four bits first."""
    import torch

    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.int16)


def rows_of_words(stored: Tensor, cut: Cut, inputs: int) -> Tensor:
    """Unpack a part of int32 [outputs, inputs / 8], whose last words may be filled up, to int16."""
    in_words = cut if cut.dimension == 0 else cut.in_units(8)
    assert in_words is not None
    words = in_words.of(stored)
    return nibbles(words).reshape(len(words), -1)[:, : cut.shape((len(stored), inputs))[1]]
