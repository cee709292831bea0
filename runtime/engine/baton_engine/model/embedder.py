"""
Embedding support of a model: the pooling that its checkpoint or a setting specifies.

A folder specifies the pooling in sentence-transformers' files: `modules.json` lists the steps after the
decoder, and the pooling step has its own `config.json`. A .gguf file has `<architecture>.pooling_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, read_json, read_list
from baton_engine.requests import Pooling

MODULES = "modules.json"
CHOICES = ("auto", "mean", "last", "cls", "none")
"""Values of the setting."""

FIRST_TOKEN = "it pools by its first token, which attends to no other token in a decoder"
MODES: dict[str, Pooling | str] = {
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
    "last": Pooling.LAST,
    "lasttoken": Pooling.LAST,
    "cls": FIRST_TOKEN,
    "cls_token": FIRST_TOKEN,
}
"""Pooling of decoders by sentence-transformers' names. Older names lack their prefix `pooling_mode_`."""

LAST_TOKEN = "it pools by its last token, which is not supported for encoders"
ENCODER_MODES: dict[str, Pooling | str] = {
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
    "last": LAST_TOKEN,
    "lasttoken": LAST_TOKEN,
}
"""The same of encoders."""

GGUF_TYPES: dict[int, Pooling | str] = {
    1: Pooling.MEAN,
    2: FIRST_TOKEN,
    3: Pooling.LAST,
    4: "it ranks pairs of texts and does not compute embeddings",
}
"""Pooling by llama.cpp's numbers. 0 means no pooling."""

UNPOOLED = (
    "its checkpoint does not specify a pooling; start with --pooling mean or --pooling cls, whichever the "
    "model was trained with"
)
SCORES = "it scores pairs of texts; use /v1/rerank or /v1/score"

GENERATES = (
    "it is a generative model, and its checkpoint does not specify a pooling; to use its hidden states as "
    "embeddings, start with --pooling mean or --pooling last"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """Conversion of a model's final hidden states into embeddings."""

    pooling: Pooling
    normalized: bool = True
    """Whether embeddings are scaled to length 1."""
    shortens: bool = False
    """Whether embeddings may be truncated to fewer dimensions (Matryoshka)."""
    lengths: tuple[int, ...] = ()
    """Supported numbers of dimensions; empty if every number is supported."""

    def __str__(self) -> str:
        length = "normalized" if self.normalized else "not normalized"
        shorter = f"; {', '.join(map(str, self.lengths)) or 'any'} dimensions" if self.shortens else ""
        return f"{self.pooling} pooling, {length}{shorter}"


@dataclass(frozen=True, slots=True)
class NoEmbeddings:
    """A model that does not compute embeddings."""

    reason: str
    """Completes the sentence "the model does not compute embeddings: …"."""


def embedder_of(checkpoint: Checkpoint, choice: str, *, shortens: bool = False) -> Embedder | NoEmbeddings:
    """
    Return the embedding configuration of `checkpoint`.

    `choice` is one of `CHOICES`. `shortens` is the setting that allows truncated embeddings. Raises
    SetupError for damaged files, and for a choice that the model does not support.
    """
    if choice == "none":
        return NoEmbeddings("this worker was started with --pooling none")
    config = {} if checkpoint.is_gguf else read_json(checkpoint.path / "config.json")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        if choice != "auto":
            raise SetupError(
                f"--pooling {choice}: {checkpoint.name} uses bidirectional attention, which is not "
                "supported. Its embeddings would be wrong. Use --pooling none."
            )
        return NoEmbeddings("it uses bidirectional attention, which is not supported")
    if choice == "cls":
        raise SetupError(f"--pooling cls: {checkpoint.name} is a decoder, and {FIRST_TOKEN}.")
    embedder = _of_gguf(checkpoint) if checkpoint.is_gguf else _of_folder(checkpoint.path, MODES)
    lengths = _lengths(config, checkpoint)
    if isinstance(embedder, NoEmbeddings):
        if choice == "auto":
            return embedder
        embedder = Embedder(pooling=Pooling(choice))
    return Embedder(
        pooling=embedder.pooling if choice == "auto" else Pooling(choice),
        normalized=embedder.normalized,
        shortens=shortens or bool(lengths) or config.get("is_matryoshka") is True,
        lengths=lengths,
    )


def encoder_embedder(checkpoint: Checkpoint, choice: str, *, labels: int) -> Embedder | NoEmbeddings:
    """
    Return the embedding configuration of an encoder. `labels` is the number of its scores, 0 without a head.

    `choice` is one of `CHOICES`. Raises SetupError as `embedder_of` does.
    """
    if choice == "none":
        return NoEmbeddings("this worker was started with --pooling none")
    mode = Pooling.MEAN if choice == "auto" else ENCODER_MODES[choice]
    if labels or not isinstance(mode, Pooling):
        reason = SCORES if labels else str(mode)
        if choice != "auto":
            raise SetupError(f"--pooling {choice}: {checkpoint.name} has no such embeddings: {reason}.")
        return NoEmbeddings(reason)
    if not (checkpoint.path / MODULES).is_file():
        return NoEmbeddings(UNPOOLED) if choice == "auto" else Embedder(pooling=mode)
    embedder = _of_folder(checkpoint.path, ENCODER_MODES)
    if choice == "auto" or isinstance(embedder, NoEmbeddings):
        return embedder if choice == "auto" else Embedder(pooling=mode)
    return Embedder(pooling=mode, normalized=embedder.normalized)


def _of_gguf(checkpoint: Checkpoint) -> Embedder | NoEmbeddings:
    metadata = checkpoint.gguf.metadata
    number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if number == 0:
        return NoEmbeddings(GENERATES)
    mode = GGUF_TYPES.get(number, f"its pooling_type {str(number)[:20]} is not supported")
    return Embedder(pooling=mode) if isinstance(mode, Pooling) else NoEmbeddings(mode)


def _of_folder(folder: Path, modes: Mapping[str, Pooling | str]) -> Embedder | NoEmbeddings:
    if not (folder / MODULES).is_file():
        return NoEmbeddings(GENERATES)
    pooling: Embedder | NoEmbeddings = NoEmbeddings(f"its {MODULES} has no pooling")
    for module in read_list(folder / MODULES):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else str(module)
        match kind:
            case "Transformer":
                continue
            case "Pooling":
                pooling = _pooling(folder, module, modes)
            case "Normalize":
                if isinstance(pooling, Embedder):
                    pooling = Embedder(pooling=pooling.pooling)
            case _:
                return NoEmbeddings(f"its {MODULES} has the step {kind[:60]!r}, which is not supported")
    return pooling


def _pooling(
    folder: Path, module: Mapping[str, Any], supported: Mapping[str, Pooling | str]
) -> Embedder | NoEmbeddings:
    path = folder / str(module.get("path")) / "config.json"
    if not path.resolve().is_relative_to(folder.resolve()):
        raise SetupError(f"{folder / MODULES} refers to a pooling outside the model's folder.")
    config = read_json(path)
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named
    if modes is None:
        prefix = "pooling_mode_"
        modes = [name.removeprefix(prefix) for name, on in config.items() if on is True and prefix in name]
    if not isinstance(modes, list) or len(modes) != 1:
        return NoEmbeddings(f"it pools by {_listed(modes)}, but only one pooling at a time is supported")
    names = ", ".join(name for name, mode in supported.items() if isinstance(mode, Pooling))
    mode = supported.get(str(modes[0]), f"it pools by {str(modes[0])[:60]!r}, but only {names} are supported")
    return Embedder(pooling=mode, normalized=False) if isinstance(mode, Pooling) else NoEmbeddings(mode)


def _listed(modes: object) -> str:
    return (" and ".join(map(str, modes)) if isinstance(modes, list) else str(modes))[:120] or "nothing"


def _lengths(config: Mapping[str, Any], checkpoint: Checkpoint) -> tuple[int, ...]:
    given = config.get("matryoshka_dimensions") or ()
    try:
        return tuple(sorted(int(length) for length in given))
    except (TypeError, ValueError) as error:
        raise SetupError(
            f"{checkpoint.path / 'config.json'}: matryoshka_dimensions is not a list of numbers: {error}"
        ) from error
