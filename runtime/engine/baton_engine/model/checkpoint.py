"""
A checkpoint on disk, a Hugging Face folder or a .gguf file: its spec and its weights.

Only reading weights loads torch, so that finding a model is quick.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    from baton_engine.model import tensors
    from baton_engine.model.safetensors import SafetensorsFolder

    source: tensors.TensorSource
    if checkpoint.is_gguf:
        source = gguf_model.GGUFTensors(GGUFFile(checkpoint.path), spec)
    else:
        source = SafetensorsFolder(checkpoint.path)
    return tensors.build(source, spec, dtype, progress)


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
