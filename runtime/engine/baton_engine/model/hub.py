"""
Models of the Hugging Face hub, by `huggingface_hub` with its own cache and settings.

What may be fetched is named (WANTED): no pickles, no code, no second copy of the weights. All that can go
wrong is told in one sentence.
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
"""Files of a repository that are fetched if nobody says otherwise."""


def cached(model: str, opening: str, ways_out: str) -> Path:
    """The model in the library's own cache. Raises SetupError, between `opening` and `ways_out`."""
    from huggingface_hub import snapshot_download

    with _errors(model, "", opening, ways_out):
        return Path(snapshot_download(model, allow_patterns=list(WANTED)))


def download(model: str, revision: str, patterns: Sequence[str], folder: Path, ways_out: str) -> str:
    """Its files into `folder`, going on where it was interrupted; returns the commit. Raises SetupError."""
    from huggingface_hub import HfApi, snapshot_download

    with _errors(model, revision, "", ways_out):
        # First the commit: all files are then of this one, whatever is pushed meanwhile.
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
        # The last three are a mirror that answers with something else than a hub does.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
        raise SetupError(f"{the} hub did not give {model!r}: {reason}. {ways_out}") from error
