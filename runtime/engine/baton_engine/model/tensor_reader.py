"""
Reading of tensors: stacked in one dtype, or quantized matrices as the checkpoint stores them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.cuts import Cut
from baton_engine.model.file_reader import ALIGNMENT, FileReader, LocatedSource, Location, Scratch
from baton_engine.model.progress import Progress
from baton_engine.quantized import BLOCK, Format, Matrix, Quantized, quantize
from baton_engine.spec import Quantize

log = logging.getLogger(__name__)

MIXED_ROWS = 32
"""Rows per panel of the kernels at most. A panel has one format, so stacked formats meet at a multiple."""
SAMPLES = 16
"""Number of samples of each tensor in the digest of the weights."""

SAMPLE_BYTES = 64

LEAST_CONVERTED = 18 / 32
"""Bytes of a number in the smallest format that `--quantize` converts to, Q4_0."""

PLAIN = ("F64", "F32", "F16", "BF16")
"""Formats of tensors that are not quantized."""


class TensorSource(Protocol):
    """The tensors of one checkpoint."""

    @property
    def name(self) -> str:
        """The checkpoint's name in errors."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def stored_bytes(self, tensor: str) -> int: ...

    def read(self, tensor: str) -> Tensor:
        """Return the tensor in a float dtype on the CPU. May be a view of a mapped file."""
        ...

    def format(self, tensor: str) -> str:
        """Return the name of the tensor's format in the checkpoint, such as BF16 or Q8_0."""
        ...

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        """
        Return the matrix, or its part `cut`, as it is stored.

        None if that is not a format of the kernels, or if the cut is inside a group of inputs.
        """
        ...


class TensorStream:
    """Reads tensors from their files, where the source knows them, to memory that each layer uses again."""

    def __init__(self, source: TensorSource, names: Iterable[str], scratch: Scratch) -> None:
        """`names` in the order of reading."""
        self.scratch = scratch
        located = source if isinstance(source, LocatedSource) else None
        self._locations: dict[str, Location] = {}
        for name in names:
            if located is not None and (location := located.location(name)) is not None:
                self._locations[name] = location
        self._reader = FileReader(tuple(self._locations.values()))

    def read(self, tensor: str, target: Tensor) -> bool:
        """Read `tensor` to contiguous memory. False: its values are not in a file in this dtype."""
        location = self._locations.get(tensor)
        if location is None or location.dtype != target.dtype:
            return False
        self._reader.read(location, target)
        return True

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads and stacks tensors."""

    source: TensorSource
    shapes: Mapping[str, tuple[int, ...]]
    dtype_of: Callable[[str], torch.dtype]
    """Dtype in which a tensor is stored here, by name."""
    progress: Progress
    choice: Quantize
    formats: Collection[Format]
    """Formats that the model keeps."""
    sampled: bool = False
    """Whether only the values of `samples` are read. The rest stays uninitialized, without memory."""
    device: torch.device | None = None
    """
    Where tensors are stored, one by one from the checkpoint's file, and where matrices are rounded to a
    quantized format. None: in the host's memory. Matrices that are quantized in the file stay there too.
    """
    stream: TensorStream | None = None
    """Memory and files of a model whose layers are read one by one. None: each tensor has its own memory."""
    divided: bool = False
    """Whether the source has the part of a rank."""
    expanded: Counter[str] = field(default_factory=Counter)
    """Number of matrices by format that are stored quantized and expanded here."""

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Return the tensors stacked along the first dimension, in memory of their own or of the stream."""
        rows = [self.shapes[name][0] for name in names]
        shape = sum(rows), *self.shapes[names[0]][1:]
        dtype = self.dtype_of(names[0])
        if self.stream is None:
            stack = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            stack = self.stream.scratch.take(shape, dtype)
        start = 0
        for name, count in zip(names, rows, strict=True):
            if self.sampled:
                _copy_samples(stack, start, self.source.read(name))
            elif self.stream is None or not self.stream.read(name, stack[start : start + count]):
                stack[start : start + count] = self.source.read(name)
            start += count
            self.progress.advance(self.source.stored_bytes(name))
        return stack

    def most_bytes(self, name: str) -> int:
        """Return the bytes that `stacked` needs for a tensor at most."""
        return math.prod(self.shapes[name]) * self.dtype_of(name).itemsize + ALIGNMENT

    def least_bytes(self, name: str) -> int:
        """Return the bytes that a tensor needs at least, in the dtype or quantized."""
        shape = self.shapes[name]
        exact = math.prod(shape) * self.dtype_of(name).itemsize
        if self.choice == "off" or len(shape) != 2:
            return exact
        if Format.__members__.get(self.source.format(name)) in self.formats:
            return min(self.source.stored_bytes(name), exact)
        return exact if self.choice == "keep" else int(min(math.prod(shape) * LEAST_CONVERTED, exact))

    def matrix(self, names: Sequence[str], paired: bool = False) -> Matrix:
        """Return the matrices stacked, quantized if possible. `paired`: they must have one format."""
        read = self._sampled if self.sampled else self._quantized
        matrices = [read(name) for name in names] if self.choice != "off" else []
        parts = [part for matrix in matrices if matrix is not None for part in matrix.parts]
        uniform = len(parts) == len(names) and (
            len({part.format for part in parts}) == 1
            or (not paired and all(len(part.rows) % MIXED_ROWS == 0 for part in parts))
        )
        if not uniform:
            self.expanded.update(form for form in map(self.source.format, names) if form not in PLAIN)
            return self.stacked(names)
        for name in names:
            self.progress.advance(self.source.stored_bytes(name))
        return Quantized(tuple(parts), self.shapes[names[0]][1])

    def _quantized(self, name: str, cut: Cut | None = None) -> Quantized | None:
        stored = Format.__members__.get(self.source.format(name))
        matrix = None
        if stored is None or stored in self.formats:
            matrix = self.source.read_quantized(name, cut)
        if matrix is not None or self.choice == "keep" or self.shapes[name][1] % BLOCK:
            return matrix
        values = self.source.read(name)
        values = values if cut is None else cut.of(values)
        try:
            return quantize(values, Format[self.choice.upper()], self.device)
        except ValueError as error:
            raise SetupError(
                f"{self.source.name}: tensor {name} cannot be converted: {error}. The file is damaged, or "
                "needs --quantize off."
            ) from None

    def _sampled(self, name: str) -> Quantized | None:
        """Return the matrix with the rows of `samples`. Other rows stay uninitialized, without memory."""
        first = self._quantized(name, Cut(0, (range(1),)))
        if first is None:
            return None
        (part,), count = first.parts, self.shapes[name][0]
        all_rows = torch.empty((count, part.rows.shape[1]), dtype=torch.uint8)
        width = all_rows.shape[1]
        rows = sorted(
            {
                row
                for sample in samples(all_rows.numel(), 1)
                for row in range(sample.start // width, -(-sample.stop // width))
            }
        )
        read = self._quantized(name, Cut(0, tuple(range(row, row + 1) for row in rows)))
        assert read is not None
        all_rows[rows] = read.parts[0].rows
        return Quantized((replace(part, rows=all_rows),), first.inputs)

    def report(self) -> None:
        """Log the quantized matrices that were expanded."""
        formats = ", ".join(form.name for form in sorted(self.formats))
        parts = ", in parts of whole groups of inputs" if self.divided else ""
        for form, count in sorted(self.expanded.items()):
            log.log(
                logging.INFO if self.choice == "off" else logging.WARNING,
                "%s: %d matrices in %s were expanded%s",
                self.source.name,
                count,
                form,
                "" if self.choice == "off" else f". Formats that are kept: {formats}{parts}",
            )


def samples(count: int, itemsize: int) -> list[range]:
    """Return the values that the digest reads, of `count` values of a tensor in memory order."""
    length = max(1, SAMPLE_BYTES // itemsize)
    last = max(0, count - length)
    starts = sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)})
    return [range(start, min(start + length, count)) for start in starts]


def _copy_samples(tensor: Tensor, row: int, part: Tensor) -> None:
    """Copy the samples of `tensor` that are in `part`, whose first row is `row` there."""
    target, source = tensor.view(-1), part.reshape(-1)
    offset = row * (tensor.numel() // len(tensor))
    for sample in samples(tensor.numel(), tensor.dtype.itemsize):
        start, stop = max(sample.start, offset), min(sample.stop, offset + len(source))
        if start < stop:
            target[start:stop] = source[start - offset : stop - offset]
