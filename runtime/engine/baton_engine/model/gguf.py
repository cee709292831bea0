"""
The GGUF file format: key-value metadata, then tensors, memory-mapped.

Every length is compared with the file's size before it is used, so that a damaged or truncated file causes
one clear error. `gguf_model` interprets the keys and tensors.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_api.errors import SetupError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Default alignment of tensor data in bytes; `general.alignment` overrides it."""
DIMENSIONS_LIMIT = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format characters of `struct`, by GGUF's type numbers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor in the file."""

    type: int
    """A `GGMLQuantizationType`."""
    shape: tuple[int, ...]
    """Row-major, outermost dimension first. The file stores the reverse order."""
    offset: int
    """Bytes from the start of the file."""
    size: int
    """Size in bytes."""


class GGUFFile:
    """One GGUF file: parsed metadata, and the locations of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise SetupError(f"Cannot read {path}: {error}.") from error
        cursor = _Cursor(path, self._data)
        if cursor.take(4) != MAGIC:
            raise SetupError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}.")
        if (version := cursor.scalar("I")) not in VERSIONS:
            raise SetupError(
                f"{path} has GGUF version {version}. Supported versions: "
                f"{VERSIONS[0]} and {VERSIONS[1]}, little-endian."
            )
        tensors, keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors = self._locate([_described(cursor) for _ in range(tensors)], cursor.position)
        self._header = cursor.position

    @property
    def header(self) -> bytes:
        """The bytes before the tensors' data: metadata, and names and formats of the tensors."""
        return self._data[: self._header]

    def read(self, name: str, part: int | None = None) -> Tensor:
        """Return tensor `name`, dequantized to fp32: all of it, or one `part` of its outermost dimension."""
        import numpy
        import torch
        from gguf import GGMLQuantizationType, quants

        stored = self.tensors[name]
        kind = GGMLQuantizationType(stored.type)
        shape, rows = stored.shape, self._rows(stored)
        rows.flags.writeable = False  # numbers that are only viewed are copied below
        if part is not None:
            shape, count = shape[1:], len(rows) // shape[0]
            rows = rows[part * count : (part + 1) * count]
        try:
            values = quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise SetupError(f"{self.path}: tensor {name} is stored as {kind.name}: {error}.") from error
        owned = numpy.array(values, dtype=numpy.float32, copy=not values.flags.writeable)
        return torch.from_numpy(owned).reshape(shape)

    def rows(self, name: str) -> Tensor:
        """Return the stored blocks of tensor `name`: [rows, bytes per row] uint8, a view of the file."""
        import torch

        return torch.from_numpy(self._rows(self.tensors[name]))

    def check_scales(self, name: str, rows: Tensor) -> None:
        """Raise SetupError if a scale in `rows` of tensor `name` is not a finite number."""
        import numpy
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        from baton_engine.quantized import Format

        form = Format(self.tensors[name].type)
        blocks = rows.numpy().reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType(form)][1])
        scales = form.scales(blocks)
        if (invalid := scales[~numpy.isfinite(scales)]).size:
            raise SetupError(
                f"{self.path}: tensor {name} in {form.name} has a scale that is {invalid[0]}. The file is "
                "damaged. Download it again."
            )

    def format(self, name: str) -> str:
        """Return the name of the format of tensor `name`, such as Q8_0."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.tensors[name].type).name)

    def _rows(self, stored: StoredTensor) -> NDArray[Any]:
        import numpy

        raw = numpy.frombuffer(self._data, numpy.uint8, stored.size, stored.offset)
        return raw.reshape(math.prod(stored.shape[:-1]), -1)

    def _locate(
        self, described: list[tuple[str, tuple[int, ...], int, int]], end_of_header: int
    ) -> dict[str, StoredTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise SetupError(f"{self.path}: the alignment {alignment!r} is not a power of two.")
        start = -(-end_of_header // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in described:
            try:
                values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError) as error:
                raise SetupError(f"{self.path}: tensor {name} has the unknown type {kind}.") from error
            if shape[-1] % values:
                raise SetupError(
                    f"{self.path}: rows of tensor {name} have {shape[-1]} values, expected a multiple of "
                    f"{values}."
                )
            tensors[name] = StoredTensor(kind, shape, start + offset, math.prod(shape) // values * size)
        needed = max((tensor.offset + tensor.size for tensor in tensors.values()), default=0)
        if needed > len(self._data):
            raise _cut_short(self.path, len(self._data), needed)
        return tensors


class _Cursor:
    """A forward reader of the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise _cut_short(self.path, len(self.data), end)
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        if kind not in SCALARS:
            raise SetupError(f"{self.path}: unknown metadata type {kind} at byte {self.position}.")
        return self.scalar(SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            return list(struct.unpack(f"<{length}{SCALARS[kind]}", self.take(length * size)))
        if kind == ARRAY:
            raise SetupError(
                f"{self.path}: unsupported nested array in the metadata at byte {self.position}."
            )
        return self._strings(length) if kind == STRING else [self.value(kind) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        """Read `length` strings as `string` does, in a fifth of its time: vocabularies have 100,000s."""
        data, position, size_of = self.data, self.position, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            start = position + 8
            if start > len(data):
                raise _cut_short(self.path, len(data), start)
            position = start + size_of(data, position)[0]
            if position > len(data):
                raise _cut_short(self.path, len(data), position)
            strings.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return strings


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read one tensor entry: name, shape, type and offset within the tensor data."""
    name, dimensions = cursor.string(), cursor.scalar("I")
    if not 1 <= dimensions <= DIMENSIONS_LIMIT:
        raise SetupError(f"{cursor.path}: tensor {name[:100]} has {dimensions} dimensions.")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _cut_short(path: Path, size: int, needed: int) -> SetupError:
    return SetupError(
        f"{path} is truncated or damaged: it has {size} bytes, but its header requires {needed}. "
        "Download it again."
    )
