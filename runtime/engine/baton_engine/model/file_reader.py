"""
Reading of tensors from files to memory that is used again, while a thread reads the next ones ahead.

To map a file costs a page fault for every 64 KiB, and new memory costs one for every page. For a model of
13 GB, they take as long as a fast disk.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from baton_api.errors import SetupError

ALIGNMENT = 64
"""Bytes to which tensors in scratch memory are aligned."""
AHEAD_BYTES = 1024**3
"""Maximum bytes that are read ahead, so that they are not evicted before they are needed."""
PIECE_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Location:
    """The bytes of a tensor in a file."""

    path: Path
    first: int
    size: int
    dtype: torch.dtype


@runtime_checkable
class LocatedSource(Protocol):
    """A `TensorSource` that knows where tensors are."""

    def location(self, tensor: str) -> Location | None:
        """Return where the values of `tensor` are. None: `read` computes them."""
        ...


class Scratch:
    """Memory that each layer uses again."""

    def __init__(self, size: int) -> None:
        """`size` in bytes, of the largest layer. The system provides memory when it is used first."""
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._used = 0

    def begin(self) -> None:
        """Begin a layer. Tensors of the last one become invalid."""
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size, first = math.prod(shape) * dtype.itemsize, self._used
        self._used = first + -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[first : first + size].view(dtype).reshape(tuple(shape))


class FileReader:
    """Reads tensors in the order of `locations`, and the next ones ahead. Close it."""

    def __init__(self, locations: Sequence[Location]) -> None:
        self._files: dict[Path, int] = {}
        for path in {location.path for location in locations}:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._locations = locations
        self._read = 0
        self._closed = False
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, name="weights-reader", daemon=True)
        self._thread.start()

    def read(self, location: Location, target: Tensor) -> None:
        """Read to contiguous memory of the same dtype and number of values. Raises SetupError."""
        memory: memoryview = target.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < location.size:
            piece = memory[done : done + PIECE_BYTES]
            try:
                count = os.preadv(self._files[location.path], [piece], location.first + done)
            except OSError as error:
                raise SetupError(f"Cannot read {location.path}: {error}") from error
            if not count:
                raise SetupError(f"{location.path} was truncated while it was read. Download it again.")
            done += count
        with self._progress:
            self._read += location.size
            self._progress.notify()

    def close(self) -> None:
        with self._progress:
            self._closed = True
            self._progress.notify()
        self._thread.join()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read_ahead(self) -> None:
        requested = 0
        for location in self._locations:
            for first in range(0, location.size, PIECE_BYTES):
                size = min(PIECE_BYTES, location.size - first)
                with self._progress:
                    while requested + size > self._read + AHEAD_BYTES and not self._closed:
                        self._progress.wait()
                    if self._closed:
                        return
                # Blocks while the disk's queue is full.
                os.posix_fadvise(
                    self._files[location.path], location.first + first, size, os.POSIX_FADV_WILLNEED
                )
                requested += size
