"""
A checkpoint on disk (a Hugging Face folder or a .gguf file): its spec, weights and sampling defaults.

Only `load_weights` imports torch, so that commands that only locate a model start quickly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_api.errors import SetupError
from baton_engine.model import builtin, config, gguf_model
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.progress import SILENT, Progress
from baton_engine.spec import ModelSpec, Quantize

if TYPE_CHECKING:
    import torch

    from baton_engine.model.shards import Shard
    from baton_engine.model.weights import Weights
    from baton_engine.quantized import Format

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True)
class Checkpoint:
    """Location and name of a model."""

    path: Path
    """A folder with `config.json`, or a .gguf file."""
    name: str
    """The model's name in the API unless a setting overrides it."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == GGUF_SUFFIX

    @cached_property
    def gguf(self) -> GGUFFile:
        """The .gguf file. Its header is parsed once, until `release`. Raises SetupError if it is damaged."""
        return GGUFFile(self.path)

    def release(self) -> None:
        """Drop the header of the .gguf file, whose vocabulary takes megabytes."""
        vars(self).pop("gguf", None)


def load_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Read the architecture of the decoder. Raises SetupError if it is not supported."""
    if checkpoint.is_gguf:
        return gguf_model.spec_of(checkpoint.gguf)
    path = checkpoint.path / "config.json"
    return config.spec_of(read_json(path), str(path))


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Progress = SILENT,
    quantize: Quantize = "off",
    shard: Shard | None = None,
    sampled: bool = False,
    formats: Collection[Format] | None = None,
    device: torch.device | None = None,
    streamed: bool = False,
    lazy: bool = False,
) -> Weights:
    """
    Load all weights in `dtype`. Checks all names and shapes first. Raises SetupError.

    `shard`, `sampled`, `device`, `streamed` and `lazy` as in `baton_engine.model.weights.build`. `formats`
    are those that the model keeps, None: those of the native kernels. torch's operations need
    `quantize="off"`.
    """
    from baton_engine.model import weights
    from baton_engine.model.family_tensors import FamilyTensors
    from baton_engine.model.quantized_folder import source_of
    from baton_engine.model.tensor_reader import TensorSource
    from baton_engine.quantized import NATIVE_FORMATS

    source: TensorSource
    if checkpoint.is_gguf:
        source = gguf_model.GGUFTensors(checkpoint.gguf, spec)
    else:
        folder = source_of(checkpoint.path, read_json(checkpoint.path / "config.json"), spec)
        source = FamilyTensors(folder, spec)
    formats = NATIVE_FORMATS if formats is None else formats
    return weights.build(
        source, spec, dtype, progress, quantize, shard, sampled, formats, device, streamed, lazy
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raises SetupError if it is missing or damaged."""
    value = _read(path)
    if not isinstance(value, dict):
        raise SetupError(f"{path} does not contain a JSON object.")
    return value


def read_list(path: Path) -> list[Any]:
    """Return the array in a JSON file of a checkpoint. Raises SetupError if it is missing or damaged."""
    value = _read(path)
    if not isinstance(value, list):
        raise SetupError(f"{path} does not contain a JSON array.")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise SetupError(f"{path.parent} has no {path.name}.") from error
    except (OSError, ValueError) as error:
        raise SetupError(f"Cannot read {path}: {error}") from error


FILE = "generation_config.json"

RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}
"""Accepted ranges of model defaults, by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of the sampling parameters that a request omits. The defaults of the fields are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 disables top-k."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{parameter.name}={getattr(self, parameter.name):g}" for parameter in fields(self))


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """
    Read `generation_config.json`; OpenAI's defaults fill gaps. The built-in model has its publisher's.

    Raises SetupError for invalid values.
    """
    if model := builtin.recognized(checkpoint.path):
        return SamplingDefaults(temperature=model.temperature, top_p=model.top_p)
    path = checkpoint.path / FILE
    if checkpoint.is_gguf or not path.is_file():
        return SamplingDefaults()
    config = read_json(path)
    given = {name: config[name] for name in RANGES if config.get(name) is not None}
    for name, value in given.items():
        low, high = RANGES[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (name == "top_k" and value != int(value)):
            raise SetupError(
                f"{path}: {name} is {str(value)[:60]}, expected a number from {low} to {high}. Correct the "
                "file, or start with --sampling-defaults openai."
            )
    if "top_k" in given:
        given["top_k"] = max(0, int(given["top_k"]))  # -1 also disables top-k
    return SamplingDefaults(**given)
