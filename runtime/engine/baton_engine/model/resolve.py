"""
From what a user calls a model to the checkpoint on disk.

A path wins; then the built-in name; whatever is left is an id of the Hugging Face hub, fetched by
`huggingface_hub` with its own cache and settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.folders import cache_folder
from baton_engine.model.builtin import SMOLLM2, fetch
from baton_engine.model.checkpoint import GGUF_SUFFIX, Checkpoint
from baton_engine.model.progress import SILENT, Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WANTED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "modules.json",
    "*_Pooling/config.json",
)
"""Files of a hub repository that are fetched: no pickles, no code, no second copy of the weights."""

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
        return Checkpoint(fetch(SMOLLM2, cache or cache_folder(os.environ), progress), model)
    if path.suffix == GGUF_SUFFIX or not HUB_ID.fullmatch(model):
        raise SetupError(f"There is no file or folder {model[:300]!r}. {WAYS_OUT}")
    return Checkpoint(_from_hub(model), model)


def _folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}"))
        hint = f" It holds {files[0]}: give that file's path." if files else ""
        raise SetupError(f"{path} has no config.json, so it is not a model's folder.{hint}")
    return Checkpoint(path, path.resolve().name)


def _from_hub(model: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(WANTED)))
    except GatedRepoError as error:
        raise SetupError(
            f"The model {model} is gated: accept its terms on the hub and set HF_TOKEN to your token."
        ) from error
    except RepositoryNotFoundError as error:
        raise SetupError(
            f"There is no folder {model!r} here, and no such model on the hub (or it is private and HF_TOKEN "
            f"is not set). {WAYS_OUT}"
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError, TypeError, KeyError) as error:
        # The last three are a mirror that answers with something else than a hub does.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
        raise SetupError(
            f"There is no folder {model!r} here, and the hub did not give it: {reason}. {WAYS_OUT}"
        ) from error
