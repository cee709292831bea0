"""
A checkpoint on disk, a Hugging Face folder or a .gguf file: its spec and its weights.

Only reading weights loads torch, so that finding a model is quick.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_api.errors import SetupError
from baton_engine.model import config, gguf_model
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.progress import SILENT, Progress
from baton_engine.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from baton_engine.model.weights import Weights

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a model lies."""

    path: Path
    """A folder with `config.json`, or a .gguf file."""
    name: str
    """What the model is called if nobody says otherwise."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == GGUF_SUFFIX


def load_spec(checkpoint: Checkpoint) -> ModelSpec:
    """What kind of decoder it is; a SetupError for one that is not served."""
    if checkpoint.is_gguf:
        return gguf_model.spec_of(GGUFFile(checkpoint.path))
    path = checkpoint.path / "config.json"
    return config.spec_of(read_json(path), str(path))


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, progress: Progress = SILENT
) -> Weights:
    """All weights in `dtype` on the CPU. Names and shapes are checked whole before anything is read."""
    from baton_engine.model import weights
    from baton_engine.model.safetensors import SafetensorsFolder

    source: weights.TensorSource
    if checkpoint.is_gguf:
        source = gguf_model.GGUFTensors(GGUFFile(checkpoint.path), spec)
    else:
        source = SafetensorsFolder(checkpoint.path)
    return weights.build(source, spec, dtype, progress)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; a SetupError if it is missing or damaged."""
    value = _read(path)
    if not isinstance(value, dict):
        raise SetupError(f"{path} holds no JSON object.")
    return value


def read_list(path: Path) -> list[Any]:
    """The array in a JSON file of a checkpoint; a SetupError if it is missing or damaged."""
    value = _read(path)
    if not isinstance(value, list):
        raise SetupError(f"{path} holds no JSON array.")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise SetupError(f"{path.parent} has no {path.name}.") from error
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from error


FILE = "generation_config.json"

RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}
"""The ranges of the same parameters of a request, as far as a default can make sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Where a request says nothing. As they stand: OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __str__(self) -> str:
        return ", ".join(f"{one.name}={getattr(self, one.name):g}" for one in fields(self))


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """The model's own, or OpenAI's where it says nothing. Raises SetupError for what makes no sense."""
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
                f"{path}: {name} is {str(value)[:60]}, which is not a number within {low} to {high}. Correct "
                "the file, or start with --sampling-defaults openai."
            )
    if "top_k" in given:
        given["top_k"] = max(0, int(given["top_k"]))  # -1 is another word for off
    return SamplingDefaults(**given)
