"""
Weights of a Hugging Face folder: one `model.safetensors`, or shards and their index, memory-mapped.

Pickled weights are rejected, because loading a pickle can run any code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.cuts import Cut
from baton_engine.model.file_reader import Location
from baton_engine.quantized import Quantized

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Supported dtypes, with their size in bytes."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES = "U8"
HEADER_LIMIT = 100_000_000
"""Maximum size of a header in bytes, the limit of safetensors itself."""


class SafetensorsFolder:
    """Implementation of `TensorSource` for one or several safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._files = {path: read_header(path) for path in _weight_files(folder)}
        self._homes: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, header in self._files.items():
            for tensor, entry in header.items():
                if tensor in self._homes:
                    raise SetupError(
                        f"{self.name}: tensor {tensor} is in both {self._homes[tensor].name} and {path.name}."
                    )
                self._homes[tensor] = path
                self.shapes[tensor] = tuple(entry["shape"])

    def stored_bytes(self, tensor: str) -> int:
        begin, end = self._files[self._homes[tensor]][tensor]["data_offsets"]
        return int(end - begin)

    def format(self, tensor: str) -> str:
        return str(self._files[self._homes[tensor]][tensor]["dtype"])

    def read_quantized(self, tensor: str, cut: Cut | None = None) -> Quantized | None:
        return None

    def read(self, tensor: str) -> Tensor:
        path = self._homes[tensor]
        dtype = self._files[path][tensor]["dtype"]
        if dtype not in FLOATS:
            raise SetupError(
                f"{path}: tensor {tensor} has the unsupported dtype {dtype}. Supported: {', '.join(FLOATS)}. "
                "The quantization_config of config.json must describe quantized weights."
            )
        return self.read_raw(tensor)

    def location(self, tensor: str) -> Location | None:
        path = self._homes[tensor]
        entry = self._files[path][tensor]
        if entry["dtype"] not in DTYPES:
            return None
        first, end = entry["data_offsets"]
        return Location(path, entry["start"] + first, end - first, DTYPES[entry["dtype"]])

    def read_bytes(self, tensor: str) -> Tensor:
        """Return a tensor of uint8, such as quantized values."""
        path = self._homes[tensor]
        if (dtype := self._files[path][tensor]["dtype"]) != BYTES:
            raise SetupError(f"{path}: tensor {tensor} has the unsupported dtype {dtype}. Expected {BYTES}.")
        return self.read_raw(tensor)

    def read_raw(self, tensor: str) -> Tensor:
        """Return the tensor in the dtype in which it is stored."""
        from safetensors import SafetensorError, safe_open

        path = self._homes[tensor]
        try:
            if path not in self._open:  # a header of thousands of experts takes long to parse
                self._open[path] = safe_open(path, framework="pt")
            stored: Tensor = self._open[path].get_tensor(tensor)
        except SafetensorError as error:
            raise SetupError(f"Cannot read tensor {tensor} of {path}: {error}") from error
        return stored


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if pickled := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED):
        raise SetupError(
            f"{folder} contains pickled weights ({pickled[0]}), which are not loaded: a pickle can run any "
            "code. Convert them with transformers' save_pretrained, or use a revision of the model with "
            "safetensors."
        )
    raise SetupError(f"{folder} has neither {SINGLE} nor {INDEX}.")


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        shards = sorted({str(name) for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{index} is not a safetensors index with a weight_map: {error!r}") from error
    if not shards:
        raise SetupError(f"{index} does not list any file.")
    for shard in shards:
        if Path(shard).name != shard:
            raise SetupError(f"{index} names {shard!r}, which is not a plain file name.")
        if not (folder / shard).is_file():
            raise SetupError(f"{folder} lacks {shard}, one of the {len(shards)} shards that {INDEX} names.")
    return [folder / shard for shard in shards]


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file after comparing it with the file's size. Raises SetupError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT + 1
        if length > min(size, HEADER_LIMIT):
            raise SetupError(f"{path} is not a safetensors file, or is truncated: it has {size} bytes.")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            checked = {tensor: _entry(entry) for tensor, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(f"{path} has a damaged safetensors header: {error!r}") from error
    needed = 8 + length + max((entry["data_offsets"][1] for entry in checked.values()), default=0)
    if size < needed:
        raise SetupError(
            f"{path} is truncated: it has {size} bytes, but its header requires {needed}. Download it again."
        )
    for entry in checked.values():
        entry["start"] = 8 + length
    return checked


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Validate one tensor of a header. Raises ValueError."""
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = [int(length) for length in entry["shape"]]
    dtype = str(entry["dtype"])
    if not 0 <= begin <= end or min(shape, default=0) < 0:
        raise ValueError(f"offsets {begin} to {end}, shape {shape}")
    if dtype in FLOATS and end - begin != FLOATS[dtype] * torch.Size(shape).numel():
        raise ValueError(f"{end - begin} bytes for {dtype} of shape {shape}")
    return {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
