"""
From what a user calls a model to the checkpoint on disk.

A path wins; then the built-in name; whatever is left is an id of the Hugging Face hub, fetched by
`huggingface_hub` with its own cache and settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.machine import bundled_folder, cache_folder
from baton_engine.model import hub
from baton_engine.model.builtin import SMOLLM2, bundled, fetch
from baton_engine.model.checkpoint import GGUF_SUFFIX, Checkpoint
from baton_engine.model.progress import SILENT, Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WAYS_OUT = (
    f"Give a local folder, a .gguf file or the built-in name {SMOLLM2.name}; or, if the hub is out of reach, "
    "fetch the model where it is not and set HF_HUB_OFFLINE=1, or set HF_ENDPOINT to a mirror."
)


def resolve(model: str, progress: Progress = SILENT, cache: Path | None = None) -> Checkpoint:
    """The checkpoint of `model`, fetched if need be. `cache` is for built-in models."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix == GGUF_SUFFIX:
            return Checkpoint(path, path.name)
        raise SetupError(
            f"{path} is a file, but not a {GGUF_SUFFIX} file. Served are folders with config.json and "
            "safetensors, and .gguf files."
        )
    if model == SMOLLM2.name:
        file = bundled(SMOLLM2, bundled_folder(os.environ))
        return Checkpoint(file or fetch(SMOLLM2, cache or cache_folder(os.environ), progress), model)
    if path.suffix == GGUF_SUFFIX or not HUB_ID.fullmatch(model):
        raise SetupError(f"There is no file or folder {model[:300]!r}. {WAYS_OUT}")
    opening = f"There is no folder {model!r} here, and "
    return Checkpoint(hub.cached(model, opening, WAYS_OUT), model)


def served_names(chosen: Iterable[str], checkpoint: Checkpoint, model: str) -> tuple[str, ...]:
    """
    The names of the API: those that a person has `chosen`, or the checkpoint's and `model` as it was given.

    vLLM and SGLang serve a path under its whole text, and their clients send that. A path with a comma is
    left out: names stand in a setting with commas between.
    """
    given = () if "," in model else (model,)
    return tuple(dict.fromkeys(chosen)) or tuple(dict.fromkeys((checkpoint.name, *given)))


def _folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}"))
        if len(files) == 1:
            return Checkpoint(path / files[0], files[0])
        hint = f" It holds {', '.join(files[:3])}: give the path of one." if files else ""
        raise SetupError(f"{path} has no config.json, so it is not a model's folder.{hint}")
    return Checkpoint(path, path.resolve().name)
