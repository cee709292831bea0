"""
Downloads from the Hugging Face hub with `huggingface_hub`, its cache and its settings.

`WANTED` lists the files to download. It excludes pickles, code and second copies of the weights. Every
failure becomes a SetupError of one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton_api.errors import SetupError

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
"""Default patterns of the files to download from a repository."""


def cached(model: str, opening: str, ways_out: str, patterns: Sequence[str] = WANTED) -> Path:
    """Return the model's folder in the library's cache. `opening` and `ways_out` complete a SetupError."""
    from huggingface_hub import snapshot_download

    with _errors(model, "", opening, ways_out):
        return Path(snapshot_download(model, allow_patterns=list(patterns)))


def download(model: str, revision: str, patterns: Sequence[str], folder: Path, ways_out: str) -> str:
    """Download into `folder`, resuming an interrupted download; return the commit. Raises SetupError."""
    from huggingface_hub import HfApi, snapshot_download

    with _errors(model, revision, "", ways_out):
        # Resolve the commit first, so that all files belong to it even if a new commit is pushed.
        commit = HfApi().model_info(model, revision=revision or None).sha or ""
        snapshot_download(model, revision=commit, local_dir=folder, allow_patterns=list(patterns or WANTED))
    return commit


@contextmanager
def _errors(model: str, revision: str, opening: str, ways_out: str) -> Iterator[None]:
    import httpx2
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    the = f"{opening}the" if opening else "The"
    try:
        yield
    except GatedRepoError as error:
        raise SetupError(
            f"The model {model} is gated: accept its terms on the hub and set HF_TOKEN to your token."
        ) from error
    except RevisionNotFoundError as error:
        raise SetupError(f"The model {model} has no revision {revision!r} on the hub.") from error
    except RepositoryNotFoundError as error:
        raise SetupError(
            f"{the} hub has no model {model!r} (or it is private and HF_TOKEN is not set). {ways_out}"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError, TypeError, KeyError) as error:
        # A mirror with an unexpected response format causes the last three.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
        raise SetupError(f"{the} hub did not provide {model!r}: {reason}. {ways_out}") from error
